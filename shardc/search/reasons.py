"""Why a plan is as it is: for each choice, what the best plan without it costs; and what its copies cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from shardc.language.text import bytes_text, seconds_text
from shardc.search.found import Found
from shardc.search.pricing.whole import Copying
from shardc.search.space.plan import Plan
from shardc.search.suggestion import python_text
from shardc.search.task import Task

Alternative = tuple[str, str, Callable[[Plan], bool]]  # the choice and the other one, in words; whether a plan has that


def reasons(chosen: Found, found: Collection[Found], task: Task, copying: Copying | None) -> tuple[str, ...]:
    """A sentence for each choice of a plan, read off the plans that were priced beside it; and one for its copies."""
    choices = (
        f"{choice}: {_next_best(chosen, others, words, task)}"
        for choice, words, has_other in _alternatives(chosen.plan)
        if (others := [each for each in found if has_other(each.plan)])
    )
    return (*choices, *([] if copying is None else [_copying_text(copying)]))


def _alternatives(plan: Plan) -> Iterator[Alternative]:
    yield f"{plan.mesh}", "on another mesh", lambda other: other.mesh != plan.mesh
    for axis in plan.axes:
        for decision in sorted(axis.cuts, key=str):
            without = replace(axis, cuts=axis.cuts - {decision})
            axes = tuple(without if each == axis else each for each in plan.axes)
            yield f"{axis.name} cuts {decision}", "without that", lambda other, axes=axes: other.axes == axes  # type: ignore[misc]
    for name in ("zero", "remat", "precision", "pipeline"):
        option = getattr(plan, name)
        choice = f"no {name}" if option is None else f"{name}={python_text(option)}"
        is_other = _has_other(plan, name, option)
        yield choice, f"with {name}" if option is None else f"with another {name} or none", is_other
    if plan.overlap:
        plain = replace(plan, overlap=None)
        yield f"overlap={plan.overlap!r}", "with its products plain", lambda other: other == plain
    if plan.saved:
        words = "with all saved whole on the device"
        yield f"saved={python_text(plan.saved)}", words, lambda other: not other.saved


def _has_other(plan: Plan, name: str, option: Any) -> Callable[[Plan], bool]:
    return lambda other: getattr(other, name) != option and other.mesh.size == plan.mesh.size


def _next_best(chosen: Found, others: Collection[Found], words: str, task: Task) -> str:
    """What the best of the other plans costs, beside the chosen one."""
    best = min(others, key=lambda each: each.rank(task))
    slower, larger = best.price.seconds / chosen.price.seconds - 1, best.price.peak - chosen.price.peak
    time = f"{seconds_text(best.price.seconds)} a step ({slower:+.1%})"
    fits = ", which does not fit" if best.price.peak > task.memory else ""
    return f"{words} the best takes {time} and {bytes_text(best.price.peak)} a rank ({_signed(larger)}){fits}"


def _copying_text(copying: Copying) -> str:
    """What copies to the tier below cost."""
    copied = f"copies to the tier below and back: {bytes_text(copying.nbytes)} a step"
    if copying.seconds is None or copying.waited is None:
        return copied
    return f"{copied} in {seconds_text(copying.seconds)}, of which a rank waits for {seconds_text(copying.waited)}"


def _signed(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else '+'}{bytes_text(abs(nbytes))}"
