"""Reasons for a plan: for each choice, the cost of the best plan tried without it; and the cost of its copies.

A cost marked ``about`` is of a plan that was not compiled whole: the chosen plan's cost times the ratio of estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardc.language.text import bytes_text, change_text, seconds_text
from shardc.search.found import Found
from shardc.search.pricing.whole import Copying, WholePlans
from shardc.search.space.plan import Plan
from shardc.search.suggestion import python_text

Alternative = tuple[str, str, Callable[[Plan], bool]]  # a choice and its alternative in words; whether a plan has that


def reasons(chosen: Plan, whole: WholePlans, estimates: Mapping[Plan, Found]) -> tuple[str, ...]:
    """A sentence for each choice of a plan that was compiled whole, for each idle axis, and for its copies.

    ``estimates``: the plans that were priced from a few blocks.
    """
    cost, task = whole.costs[chosen], whole.task
    found = {plan: whole.found(plan) for plan in whole.costs}
    estimated = [each for plan, each in estimates.items() if plan not in found]
    if chosen in estimates:
        estimated = [corrected(each, found[chosen], estimates[chosen]) for each in estimated]
    others = [each for each in (*estimated, *found.values()) if each.plan != chosen and task.permits(each.plan)]
    choices = []
    for choice, words, has_other in _alternatives(chosen):
        having = [each for each in others if has_other(each.plan)]
        if having:
            best = min(having, key=lambda each: each.rank(task))
            choices.append(f"{choice}: {words} the best tried takes {_beside(whole, chosen, best)}")
    idle = [_idle_text(name, chosen.mesh.axis_size(name)) for name in cost.idle]
    return (*choices, *idle, *([] if cost.copying is None else [_copying_text(cost.copying)]))


def _alternatives(plan: Plan) -> Iterator[Alternative]:
    yield f"{plan.mesh}", "on another mesh", lambda other: other.mesh != plan.mesh
    places = plan.places()
    for axis in plan.axes:
        for decision in sorted(axis.cuts & places.keys(), key=str):
            without = replace(axis, cuts=axis.cuts - {decision})
            axes = tuple(without if each == axis else each for each in plan.axes)
            yield f"{axis.name} cuts {places[decision][0]}", "without that", lambda other, axes=axes: other.axes == axes  # type: ignore[misc]
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


def corrected(other: Found, chosen: Found, estimate: Found) -> Found:
    """The estimate of another plan, scaled by the errors of the chosen plan's estimate."""
    time, memory = chosen.price.seconds / estimate.price.seconds, chosen.price.peak / estimate.price.peak
    computing, exposed, peak = time * other.price.computing, time * other.price.exposed, memory * other.price.peak
    return replace(other, price=replace(other.price, computing=computing, exposed=exposed, peak=round(peak)))


def _beside(whole: WholePlans, chosen: Plan, other: Found) -> str:
    """The cost of another plan in words, compared with that of the chosen one."""
    price, cost = other.price, whole.costs[chosen]
    about = "" if other.plan in whole.costs else "about "
    slower = f"{price.seconds / cost.seconds - 1:+.1%}"
    slower = "the same" if slower[1:] == "0.0%" else slower
    fits = ", which does not fit" if price.peak > whole.task.memory else ""
    peak = f"{bytes_text(price.peak)} a rank ({change_text(cost.memory['peak'], price.peak)})"
    return f"{about}{seconds_text(price.seconds)} a step ({slower}) and {peak}{fits}"


def _idle_text(axis: str, size: int) -> str:
    return f"{axis} cuts no work: its {size} ranks compute the same, since every cut that was tried costs more"


def _copying_text(copying: Copying) -> str:
    """The cost of copies to the tier below, in words."""
    copied = f"copies to the tier below and back: {bytes_text(copying.nbytes)} a step"
    if copying.seconds is None or copying.waited is None:
        return copied
    return (
        f"{copied} in {seconds_text(copying.seconds)}; a rank is idle for {seconds_text(copying.waited)} until they end"
    )
