"""``advise``: the smallest change of a plan that removes a collective, found by compiling again after a few changes.

For a message between pipeline stages, it is a change that makes fewer bytes cross: stages that begin elsewhere, or
fewer stages.

A change is free if it removes the collective, a rank sends fewer bytes a step, and neither its peak memory, with and
without the optimizer's states, nor its floating-point operations grow. Changes are compiled group by group, the
likeliest group first. The advice is the free change that sends least in the first group that has one. If no change is
free, the advice is the cheapest change that removes the collective altogether, with its cost.

If a model repeats a block more than twice, changes are tried on two of its blocks. The best two changes are then
compiled for the whole model, whose costs are reported. If they do not work there as on the blocks, all changes are
tried on the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError, did_you_mean
from shardc.program.collective import Collective
from shardc.program.provenance import SavedCut, StageCrossing
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.candidates import candidates, paths_near, related_annotations, stage_candidates
from shardc.report.explain.collectives import Transfer, is_removed, replacement_kinds, transfers, why_needed
from shardc.report.explain.records import REMOVE, SHRINK, Advice, Aim, Figures, Suggestion
from shardc.report.explain.retry import Attempt, Change, Retry

FINALISTS = 2  # best changes to compile for the whole model: two blocks may not tell them apart


def advise(compiled: Compiled, name: str, tries: int = 12) -> Advice:
    """Find a change that would remove a collective of a compiled model, among at most ``tries`` changes.

    Raises a ShardingError, with near names, for a name that no collective has.
    """
    return Advisor(compiled, tries).advise(name)


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a change at the collective ``name``.

    ``why``: the reason for the collective. ``changes``: groups of changes to try. ``is_met(attempt, altogether)``:
    whether a plan meets the goal. ``transfers``: those of the collective. ``paths``: of the modules and parameters that
    it concerns.
    """

    name: str
    aim: Aim
    why: str
    changes: list[list[Change]]
    is_met: Callable[[Attempt, bool], bool]
    transfers: frozenset[Transfer] = frozenset()
    paths: tuple[str, ...] = ()


class Advisor:
    """Advises on the collectives of one compiled model. A change compiled for one collective serves all others."""

    def __init__(self, compiled: Compiled, tries: int = 12) -> None:
        self.program, self.tries = compiled.whole, max(1, tries)
        self._nodes = {node.name: node for node in self.program.calls}
        self._retry = Retry(compiled)
        self._transfers = transfers(self.program)
        self._collectives = {each.name: each for each in collectives_of(compiled.program)}

    def advise(self, name: str) -> Advice:
        """Advice to remove a collective. Raises a ShardingError for a name that no collective has."""
        goal = self._goal(name)
        near = self._retry.near(goal.paths) if goal.transfers else None
        if near is not None and is_removed(goal.transfers, near.transfers):
            near = None  # two blocks do not have the collective
        for retry in (near, self._retry) if near is not None else (self._retry,):
            changes, is_free, tried = best_changes(goal, retry)
            suggestions = filter(None, (self._suggestion(goal, change) for change in changes[:FINALISTS]))
            suggestion = min(suggestions, key=lambda each: each.excess, default=None)
            if suggestion is not None and suggestion.is_free >= is_free:
                return Advice(name, tried, "" if suggestion.is_free else goal.why, suggestion, goal.aim, retry.blocks)
        return Advice(name, tried, goal.why, None, goal.aim)

    def _goal(self, name: str) -> Goal:
        if name not in self._transfers and name not in self._collectives:
            what, remedy = f"a program of {len(self._collectives)}", did_you_mean(name, self._collectives)
            none = "it has none of that name"
            raise ShardingError(f"collective {name!r}", what, none, remedy or "name one that shardc dump lists")
        # With a pipeline, a collective of several stages has a name for each. A message has no node.
        node = self._nodes[name] if name in self._transfers else sender(self._nodes, name)
        if node is None:
            return self._goal_of_message(self._collectives[name])
        before, retry = self._transfers[node.name], self._retry
        related = related_annotations(self.program, node, retry.annotations)
        zero = retry.request.options.zero
        changes = candidates(related, retry.annotations, self.program.inputs, zero, self.tries)
        if any(isinstance(cause, SavedCut) for cause in self.program.causes(node)):
            changes = [[Change(is_saved_whole=True)]]

        def is_met(attempt: Attempt, altogether: bool) -> bool:
            return is_removed(before, attempt.transfers, altogether)

        paths = tuple(paths_near(self.program, node))
        return Goal(name, REMOVE, why_needed(self.program, node), changes, is_met, before, paths)

    def _goal_of_message(self, message: Collective) -> Goal:
        """The goal that fewer bytes cross between stages, in all messages together."""
        (cause,), before = message.causes, self._retry.figures
        assert isinstance(cause, StageCrossing), message
        is_late, mesh = message.name.startswith("send_after"), self._retry.request.mesh
        changes = [[each] for each in stage_candidates(self.program, cause, is_late, mesh, self.tries)]
        why = f"{cause.text}; wherever stages were tried to begin, as much crosses or something else grows"
        return Goal(message.name, SHRINK, why, changes, lambda attempt, _: attempt.figures.crossing < before.crossing)

    def _suggestion(self, goal: Goal, change: Change) -> Suggestion | None:
        """A change with its cost for the whole model; None if it does not meet the goal there."""
        before, annotations = self._retry.figures, self._retry.annotations
        attempt, pipeline = self._retry.attempt(change), self._retry.request.options.pipeline
        if attempt is None or not goal.is_met(attempt, False):
            return None
        is_free = attempt.figures.is_free_after(before)
        if not is_free and not goal.is_met(attempt, True):
            return None
        flags, all_flags = (change.flags(annotations, pipeline, replaces) for replaces in (False, True))
        instead = replacement_kinds(goal.transfers, attempt.transfers)
        python = change.python(annotations, pipeline)
        return Suggestion(change.text, before, attempt.figures, is_free, python, flags, all_flags, instead)


def best_changes(goal: Goal, retry: Retry) -> tuple[list[Change], bool, int]:
    """The free changes of the first group that has any, or else all changes that meet the goal altogether.

    Free changes are sorted by the bytes sent, others by their excess; of changes with equal figures the first is kept.
    Also returns whether the changes are free, and the number of changes compiled.
    """
    tried, before = 0, retry.figures
    met: dict[Figures, Change] = {}
    for group in goal.changes:
        free: dict[Figures, Change] = {}
        for change in group:
            attempt = retry.attempt(change)
            tried += attempt is not None
            if attempt is None or not goal.is_met(attempt, False):
                continue
            if attempt.figures.is_free_after(before):
                free.setdefault(attempt.figures, change)
            elif goal.is_met(attempt, True):
                met.setdefault(attempt.figures, change)
        if free:
            return [free[each] for each in sorted(free, key=lambda each: each.wire_bytes)], True, tried
    return [met[each] for each in sorted(met, key=lambda each: each.excess(before))], False, tried
