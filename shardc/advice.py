"""What would remove a collective: the smallest change of annotations, found by compiling again under each of a few.

A change is good where the collective is removed (shardc/transfer.py says when), a rank sends fewer bytes a step, and
neither its peak memory, with and without Adam's state, nor its floating-point operations grow. Changes are tried one
thing at a time, the likeliest first, and the first good one is the advice. Where none is, it is the one that removes
the collective altogether and costs least, with what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc.api import Compiled
from shardc.candidate import candidates
from shardc.change import Change, Figures
from shardc.error import ShardingError, did_you_mean
from shardc.partition import P
from shardc.retry import Attempt, Retry
from shardc.site import site_of
from shardc.text import bytes_text
from shardc.transfer import Transfer, instead, is_removed, transfers
from shardc.why_needed import why_needed


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that removes a collective, and what a step costs a rank before and after it.

    ``is_free``: less is sent, and neither memory nor operations grow. ``python`` and ``flags``: as one types it,
    the flags where ``--annotate`` adds to a target's own annotations; ``all_flags`` where it stands in their place, as
    for ``hf:``. ``instead``: the kinds of collectives that then move the same values.
    """

    change: Change
    before: Figures
    after: Figures
    is_free: bool
    python: str
    flags: str
    all_flags: str
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """What would remove the collective ``name``, after ``tried`` changes were compiled.

    ``suggestion`` is None where none of them removes it. ``why``: what it is there for, in any plan like this one.
    """

    name: str
    tried: int
    why: str
    suggestion: Suggestion | None

    def text(self, is_whole: bool = False) -> str:
        """For a reader; ``is_whole``: ``--annotate`` stands in place of the target's annotations."""
        return "\n".join(self._lines(is_whole)) + "\n"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        if self.suggestion is not None:
            found["suggestion"]["change"] = self.suggestion.change.text
        return found

    def _lines(self, is_whole: bool) -> Iterator[str]:
        found = self.suggestion
        if found is None:
            yield f"nothing was found that removes it: none of {_changes(self.tried)} does"
            yield f"  {self.why}"
            return
        if found.is_free:
            yield f"to remove it: {found.change.text}"
        else:
            yield f"every change that removes it costs something; of {_changes(self.tried)} this costs least:"
            yield f"  {found.change.text}"
        if found.instead:
            yield f"  what it moves then goes by {' and '.join(found.instead)}"
        yield from (f"  {line}" for line in _costs(found.before, found.after))
        yield f"  in Python        {found.python}"
        yield f"  on command line  {found.all_flags if is_whole else found.flags}"
        if found.is_free:
            yield f"  {_changes(self.tried)} compiled to find it"
        else:
            yield f"  why: {self.why}"


def _changes(count: int) -> str:
    return f"{count} change{'s' * (count != 1)}"


def _costs(before: Figures, after: Figures) -> Iterator[str]:
    yield f"a rank then sends {_difference(before.wire_bytes, after.wire_bytes)} a step"
    yield f"its peak memory is {_difference(before.peak, after.peak)}"
    if after.optimizer != before.optimizer:
        yield f"its optimizer state is {_difference(before.optimizer, after.optimizer)}"
    if after.flops != before.flops:
        yield f"it computes {after.flops / max(1, before.flops):.2f} times as much"


def _difference(before: int, after: int) -> str:
    if before == after:
        return f"{bytes_text(before)} as before"
    return f"{bytes_text(after)}, {bytes_text(abs(after - before))} {'more' if after > before else 'less'}"


class Advisor:
    """Advises on the collectives of one compiled model; what is compiled for one serves all others."""

    def __init__(self, compiled: Compiled, tries: int = 12) -> None:
        self.program, self.tries = compiled.whole, max(1, tries)
        self._retry = Retry(compiled)
        self._moved = transfers(self.program)
        self._sent = {each.name: each for each in compiled.collectives}

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.calls}

    def advise(self, name: str) -> Advice:
        """What would remove a collective. Raises a ShardingError for a name that none has."""
        node = self._nodes.get(name) if name in self._moved else self._of_stage(name)
        if node is None:
            return Advice(name, 0, "a stage of the pipeline reads what another one makes: no annotation changes that, "
                          "but where stages begin does (cuts=, balance=)", None)  # fmt: skip
        retry, options = self._retry, self._retry.request.options
        site = site_of(self.program, node, retry.annotations)
        changes = candidates(site, retry.annotations, self.program.inputs, options.zero, self.tries)
        moved, tried = self._moved[node.name], 0
        removing: list[tuple[Change, Attempt]] = []
        for change in changes:
            attempt = retry.attempt(change)
            tried += attempt is not None
            if attempt is None or not is_removed(moved, attempt.transfers):
                continue
            if attempt.figures.is_free_after(retry.figures):
                return Advice(name, tried, "", self._suggestion(moved, change, attempt))
            if is_removed(moved, attempt.transfers, altogether=True):
                removing.append((change, attempt))
        cheapest = min(removing, key=lambda pair: pair[1].figures.excess(retry.figures), default=None)
        why = why_needed(self.program, node)
        return Advice(name, tried, why, None if cheapest is None else self._suggestion(moved, *cheapest))

    def _of_stage(self, name: str) -> fx.Node | None:
        """Of a pipeline a collective of several stages has a name for each; None for a message."""
        if name not in self._sent:
            remedy = did_you_mean(name, self._sent) or "name one that shardc dump lists"
            raise ShardingError(
                f"collective {name!r}", f"a program of {len(self._sent)}", "it has none of that name", remedy
            )
        return self._nodes.get(name.partition("_stage_")[0])

    def _suggestion(self, moved: frozenset[Transfer], change: Change, attempt: Attempt) -> Suggestion:
        before, annotations = self._retry.figures, self._retry.annotations
        return Suggestion(
            change, before, attempt.figures, attempt.figures.is_free_after(before),
            _python(change, change.applied(annotations)),
            change.flags(annotations, is_whole=False), change.flags(annotations, is_whole=True),
            instead(moved, attempt.transfers),
        )  # fmt: skip


def _python(change: Change, annotations: dict[str, P]) -> str:
    """The whole of the annotations, and the option where it changes."""
    said = ", ".join(f"{pattern!r}: {spec!r}" for pattern, spec in annotations.items())
    return f"annotations = {{{said}}}" + (f", zero={change.zero!r}" if change.is_zero else "")


def advise(compiled: Compiled, name: str, tries: int = 12) -> Advice:
    """What would remove a collective of a compiled model, by at most ``tries`` further compilations."""
    return Advisor(compiled, tries).advise(name)
