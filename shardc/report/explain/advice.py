"""What would remove a collective: the smallest change of annotations, found by compiling again under each of a few.

Of a message between stages of a pipeline, what would let less cross: other beginnings of stages, or fewer stages.

A change is good where the collective is removed (shardc/transfer.py says when), a rank sends fewer bytes a step, and
neither its peak memory, with and without Adam's state, nor its floating-point operations grow. Changes are tried one
thing at a time, the likeliest first, and the first good one is the advice. Where none is, it is the one that removes
the collective altogether and costs least, with what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.partition import P
from shardc.language.text import bytes_text
from shardc.program.collective import Collective
from shardc.program.provenance import StageCrossing
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.candidates import candidates, stage_candidates
from shardc.report.explain.collectives import Transfer, instead, is_removed, site_of, transfers, why_needed
from shardc.report.explain.retry import Attempt, Change, Figures, Retry

REMOVE, SHRINK = "to remove it", "to send less between stages"
THAT = {REMOVE: "that removes it", SHRINK: "that lets less cross"}


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
    ``aim``: of a message, to let less cross between stages.
    """

    name: str
    tried: int
    why: str
    suggestion: Suggestion | None
    aim: str = REMOVE

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
            yield f"nothing was found {THAT[self.aim]}: none of {_changes(self.tried)} does"
            yield f"  {self.why}"
            return
        if found.is_free:
            yield f"{self.aim}: {found.change.text}"
        else:
            yield f"every change {THAT[self.aim]} costs something; of {_changes(self.tried)} this costs least:"
            yield f"  {found.change.text}"
        if found.before.crossing:
            crossing = _difference(found.before.crossing, found.after.crossing)
            yield f"  between stages go {crossing} a step"
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
        self._sent = {each.name: each for each in collectives_of(compiled.program)}

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.calls}

    def advise(self, name: str) -> Advice:
        """What would remove a collective. Raises a ShardingError for a name that none has."""
        node = self._nodes.get(name) if name in self._moved else self._of_stage(name)
        if node is None:
            return self._of_message(self._sent[name])
        moved, options = self._moved[node.name], self._retry.request.options
        site = site_of(self.program, node, self._retry.annotations)
        changes = candidates(site, self._retry.annotations, self.program.inputs, options.zero, self.tries)

        def removes(attempt: Attempt, altogether: bool) -> bool:
            return is_removed(moved, attempt.transfers, altogether)

        tried, change, attempt = self._search(changes, removes)
        if change is None or attempt is None:
            return Advice(name, tried, why_needed(self.program, node), None)
        found = self._suggestion(moved, change, attempt)
        return Advice(name, tried, "" if found.is_free else why_needed(self.program, node), found)

    def _of_message(self, found: Collective) -> Advice:
        """What would let less cross between stages than now, in all messages together."""
        (cause,), before = found.causes, self._retry.figures
        assert isinstance(cause, StageCrossing), found
        is_late, mesh = found.name.startswith("send_after"), self._retry.request.mesh
        changes = stage_candidates(self.program, cause, is_late, mesh, self.tries)
        tried, change, attempt = self._search(changes, lambda attempt, _: attempt.figures.crossing < before.crossing)
        why = f"{cause.text}; wherever stages were tried to begin, as much crosses or something else grows"
        if change is None or attempt is None:
            return Advice(found.name, tried, why, None, SHRINK)
        suggestion = self._suggestion(frozenset(), change, attempt)
        return Advice(found.name, tried, "" if suggestion.is_free else why, suggestion, SHRINK)

    def _search(
        self, changes: Iterable[Change], is_met: Callable[[Attempt, bool], bool]
    ) -> tuple[int, Change | None, Attempt | None]:
        """The first change that is free, else the cheapest of those that meet the aim altogether; how many were tried.

        ``is_met(attempt, altogether)``: whether a plan meets the aim.
        """
        tried, before = 0, self._retry.figures
        met: list[tuple[Change, Attempt]] = []
        for change in changes:
            attempt = self._retry.attempt(change)
            tried += attempt is not None
            if attempt is None or not is_met(attempt, False):
                continue
            if attempt.figures.is_free_after(before):
                return tried, change, attempt
            if is_met(attempt, True):
                met.append((change, attempt))
        return tried, *min(met, key=lambda pair: pair[1].figures.excess(before), default=(None, None))

    def _of_stage(self, name: str) -> fx.Node | None:
        """Of a pipeline a collective of several stages has a name for each; None for a message."""
        if name not in self._sent:
            remedy = did_you_mean(name, self._sent) or "name one that shardc dump lists"
            raise ShardingError(
                f"collective {name!r}", f"a program of {len(self._sent)}", "it has none of that name", remedy
            )
        return sender(self._nodes, name)

    def _suggestion(self, moved: frozenset[Transfer], change: Change, attempt: Attempt) -> Suggestion:
        before, annotations = self._retry.figures, self._retry.annotations
        typed = change.flags(annotations, is_whole=False), change.flags(annotations, is_whole=True)
        python, pipeline = _python(change, change.applied(annotations)), self._retry.request.options.pipeline
        if change.stages or change.mesh:
            after = change.pipeline_after(pipeline)
            assert after is not None, change
            python, typed = change.stage_python(after), (change.stage_flags(after),) * 2
        is_free = attempt.figures.is_free_after(before)
        return Suggestion(change, before, attempt.figures, is_free, python, *typed, instead(moved, attempt.transfers))


def _python(change: Change, annotations: dict[str, P]) -> str:
    """The whole of the annotations, and the option where it changes."""
    said = ", ".join(f"{pattern!r}: {spec!r}" for pattern, spec in annotations.items())
    return f"annotations = {{{said}}}" + (f", zero={change.zero!r}" if change.is_zero else "")


def advise(compiled: Compiled, name: str, tries: int = 12) -> Advice:
    """What would remove a collective of a compiled model, by at most ``tries`` further compilations."""
    return Advisor(compiled, tries).advise(name)
