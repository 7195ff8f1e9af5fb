"""``advise``: the smallest change of a plan that removes a collective, found by compiling again after a few changes.

For a message between pipeline stages it is a change by which less crosses: other beginnings of stages, or fewer stages.

A change is free if it removes the collective, a rank sends fewer bytes a step, and neither its peak memory, with and
without the optimizer's states, nor its floating-point operations grow. Changes are compiled group by group, the
likeliest group first; of the first group with a free one, the free one that sends least is the advice. Where none is
free, the advice is the change that removes the collective altogether and costs least, with its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.text import bytes_text, printable
from shardc.program.collective import Collective
from shardc.program.provenance import StageCrossing
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.candidates import candidates, related_annotations, stage_candidates
from shardc.report.explain.collectives import Transfer, is_removed, replacement_kinds, transfers, why_needed
from shardc.report.explain.retry import Attempt, Change, Figures, Retry

REMOVE, SHRINK = "to remove it", "to send less between stages"
WHICH = {REMOVE: "that removes it", SHRINK: "that lets less cross"}


def advise(compiled: Compiled, name: str, tries: int = 12) -> Advice:
    """Changes that would remove a collective of a compiled model, by at most ``tries`` further compilations.

    Raises a ShardingError, with near names, for a name that no collective has.
    """
    return Advisor(compiled, tries).advise(name)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that removes a collective, and what a step costs a rank before and after it.

    ``is_free``: less is sent, and neither memory nor operations grow. ``python`` and ``flags``: the change as one types
    it; ``flags`` where ``--annotate`` adds to a target's annotations, ``all_flags`` where it replaces them, as for
    ``hf:``. ``instead``: the kinds of collectives that then move the same values.
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
    """Changes that would remove the collective ``name``, after ``tried`` changes were compiled.

    ``suggestion`` is None where none of them removes it. ``why``: what it is there for in any plan like this one.
    ``aim``: for a message, to let less cross between stages.
    """

    name: str
    tried: int
    why: str
    suggestion: Suggestion | None
    aim: str = REMOVE

    def text(self, replaces: bool = False) -> str:
        """The text form; ``replaces``: ``--annotate`` replaces the target's annotations."""
        return "\n".join(map(printable, self._lines(replaces))) + "\n"

    def record(self) -> dict[str, Any]:
        """The JSON form."""
        record = asdict(self)
        if self.suggestion is not None:
            record["suggestion"]["change"] = self.suggestion.change.text
        return record

    def _lines(self, replaces: bool) -> Iterator[str]:
        s, changes = self.suggestion, f"{self.tried} change{'s' * (self.tried != 1)}"
        if s is None:
            yield f"nothing was found {WHICH[self.aim]}: none of {changes} does"
            yield f"  {self.why}"
            return
        if s.is_free:
            yield f"{self.aim}: {s.change.text}"
        else:
            yield f"every change {WHICH[self.aim]} costs something; of {changes} this costs least:"
            yield f"  {s.change.text}"
        if s.before.crossing:
            yield f"  between stages go {_change_text(s.before.crossing, s.after.crossing)} a step"
        if s.instead:
            yield f"  what it moves then goes by {' and '.join(s.instead)}"
        yield f"  a rank then sends {_change_text(s.before.wire_bytes, s.after.wire_bytes)} a step"
        yield f"  its peak memory with the optimizer is {_change_text(s.before.peak, s.after.peak)}"
        if s.after.optimizer != s.before.optimizer:
            yield f"  of that the optimizer's states are {_change_text(s.before.optimizer, s.after.optimizer)}"
        if s.after.flops != s.before.flops:
            yield f"  it computes {s.after.flops / max(1, s.before.flops):.2f} times as much"
        yield f"  in Python        {s.python}"
        yield f"  on command line  {s.all_flags if replaces else s.flags}"
        yield f"  {changes} compiled to find it" if s.is_free else f"  why: {self.why}"


def _change_text(before: int, after: int) -> str:
    if before == after:
        return f"{bytes_text(before)} as before"
    return f"{bytes_text(after)}, {bytes_text(abs(after - before))} {'more' if after > before else 'less'}"


class Advisor:
    """Advises on the collectives of one compiled model. Changes that are compiled for one serve all others."""

    def __init__(self, compiled: Compiled, tries: int = 12) -> None:
        self.program, self.tries = compiled.whole, max(1, tries)
        self._nodes = {node.name: node for node in self.program.calls}
        self._retry = Retry(compiled)
        self._transfers = transfers(self.program)
        self._collectives = {each.name: each for each in collectives_of(compiled.program)}

    def advise(self, name: str) -> Advice:
        """What would remove a collective. Raises a ShardingError for a name that none has."""
        if name not in self._transfers and name not in self._collectives:
            what, remedy = f"a program of {len(self._collectives)}", did_you_mean(name, self._collectives)
            none = "it has none of that name"
            raise ShardingError(f"collective {name!r}", what, none, remedy or "name one that shardc dump lists")
        # With a pipeline, a collective of several stages has a name for each. A message has no node.
        node = self._nodes[name] if name in self._transfers else sender(self._nodes, name)
        if node is None:
            return self._of_message(self._collectives[name])
        before, retry = self._transfers[node.name], self._retry
        related = related_annotations(self.program, node, retry.annotations)
        zero = retry.request.options.zero
        changes = candidates(related, retry.annotations, self.program.inputs, zero, self.tries)

        def is_met(attempt: Attempt, altogether: bool) -> bool:
            return is_removed(before, attempt.transfers, altogether)

        return self._advice(name, changes, is_met, before, why_needed(self.program, node), REMOVE)

    def _of_message(self, message: Collective) -> Advice:
        """What would let less cross between stages, in all messages together."""
        (cause,), before = message.causes, self._retry.figures
        assert isinstance(cause, StageCrossing), message
        is_late, mesh = message.name.startswith("send_after"), self._retry.request.mesh
        changes = [[each] for each in stage_candidates(self.program, cause, is_late, mesh, self.tries)]
        why = f"{cause.text}; wherever stages were tried to begin, as much crosses or something else grows"

        def is_met(attempt: Attempt, altogether: bool) -> bool:
            return attempt.figures.crossing < before.crossing

        return self._advice(message.name, changes, is_met, frozenset(), why, SHRINK)

    def _advice(
        self,
        name: str,
        groups: Iterable[Iterable[Change]],
        is_met: Callable[[Attempt, bool], bool],
        transfers: frozenset[Transfer],
        why: str,
        aim: str,
    ) -> Advice:
        """Advice from the leanest free change of a group, or else from the cheapest that meets the aim altogether.

        ``is_met(attempt, altogether)``: whether a plan meets the aim. ``why`` is said unless the change is free.
        """
        tried, before = 0, self._retry.figures
        met: list[tuple[Change, Attempt]] = []
        for group in groups:
            free: list[tuple[Change, Attempt]] = []
            for change in group:
                attempt = self._retry.attempt(change)
                tried += attempt is not None
                if attempt is None or not is_met(attempt, False):
                    continue
                if attempt.figures.is_free_after(before):
                    free.append((change, attempt))
                elif is_met(attempt, True):
                    met.append((change, attempt))
            if free:
                leanest = min(free, key=lambda pair: pair[1].figures.wire_bytes)
                return Advice(name, tried, "", self._suggestion(transfers, *leanest), aim)
        if not met:
            return Advice(name, tried, why, None, aim)
        cheapest = min(met, key=lambda pair: pair[1].figures.excess(before))
        return Advice(name, tried, why, self._suggestion(transfers, *cheapest), aim)

    def _suggestion(self, transfers: frozenset[Transfer], change: Change, attempt: Attempt) -> Suggestion:
        before, annotations = self._retry.figures, self._retry.annotations
        pipeline = self._retry.request.options.pipeline
        flags, all_flags = (change.flags(annotations, pipeline, replaces) for replaces in (False, True))
        return Suggestion(
            change, before, attempt.figures, attempt.figures.is_free_after(before),
            change.python(annotations, pipeline), flags, all_flags, replacement_kinds(transfers, attempt.transfers),
        )  # fmt: skip
