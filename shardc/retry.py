"""A compiled model asked again with other annotations, by as few passes as tell what became of it.

It was captured once; it is captured again only where the annotations of modules differ, which are in the graph. What
comes before the first pass that reads annotations is not done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardc.announcement import collectives_of
from shardc.api import Compiled
from shardc.change import Change, Figures
from shardc.cost import flops_of, memory_of
from shardc.error import CaptureError, ShardingError
from shardc.node import is_annotation, operand
from shardc.partition import P
from shardc.passes.pins import annotation_text
from shardc.passes.pipeline import PASSES
from shardc.program import Program
from shardc.request import Request
from shardc.stage import has_stages
from shardc.stage_cut import stages_of
from shardc.stage_record import StageRecord
from shardc.stage_schedule import schedule_of
from shardc.transfer import Transfer, transfers

SETTLED = "fuse_collectives"  # after it no pass takes a collective away, or adds one to another value
UNREAD = "keep_dims"  # up to it only the annotations of outputs and modules are read
NAMES = [each.__name__ for each in PASSES]


def figures_of(program: Program) -> Figures:
    """What a localized program costs one rank."""
    found, memory = collectives_of(program), memory_of(program)
    sent, crossing = (
        sum(each.wire_bytes * each.times for each in found if each.kind == "send" or not is_message)
        for is_message in (False, True)
    )
    flops = StageRecord(program).rank_flops if has_stages(program) else flops_of(program)
    return Figures(sent, memory["peak"], memory["optimizer"], flops, len(found), crossing)


@dataclass
class Attempt:
    """A plan under other annotations. ``start``: a program and the pass after which it stands."""

    program: Program
    after: str

    @cached_property
    def transfers(self) -> frozenset[Transfer]:
        """What is moved: known before the last passes, which are run where figures are asked for."""
        self._run_to(SETTLED)
        return frozenset(each for found in transfers(self.program).values() for each in found)

    @cached_property
    def figures(self) -> Figures:
        """What it costs."""
        self._run_to(NAMES[-1])
        return figures_of(self.program)

    def _run_to(self, name: str) -> None:
        first = NAMES.index(self.after) + 1 if self.after in NAMES else 0
        for run in PASSES[first : NAMES.index(name) + 1]:
            self.program, self.after = run(self.program), run.__name__


class Retry:
    """Asks a compiled model again; each change is tried once, however often it is asked for."""

    def __init__(self, compiled: Compiled) -> None:
        assert compiled.request is not None, "compiled by hand"
        self.compiled, self.request = compiled, compiled.request
        self._tried: dict[object, Attempt | None] = {}

    @cached_property
    def figures(self) -> Figures:
        """What the plan costs as it is."""
        return figures_of(self.compiled.program)

    @cached_property
    def annotations(self) -> Mapping[str, P]:
        """As they are, those in DTensor's placements as a P."""
        return annotations_of(self.request)

    def attempt(self, change: Change) -> Attempt | None:
        """The plan after a change; None where it cannot be."""
        asked = change.applied(self.annotations)
        before = self.request.options
        zero, pipeline = change.zero_after(before.zero), change.pipeline_after(before.pipeline)
        key = (frozenset(asked.items()), zero, change.taken_out, change.stages, change.mesh)
        if key not in self._tried:
            try:
                options = replace(before, zero=zero, pipeline=pipeline)
                mesh = change.mesh_after(self.request.mesh)
                request = replace(self.request, annotations=asked, options=options, mesh=mesh)
                self._tried[key] = self._attempt(request, change.taken_out)
            except (ShardingError, CaptureError, NotImplementedError):
                self._tried[key] = None
        return self._tried[key]

    def _attempt(self, request: Request, taken_out: tuple[str, ...]) -> Attempt:
        is_cut_anew = (request.mesh, request.options.pipeline) != (self.request.mesh, self.request.options.pipeline)
        model, base = self.compiled.model, _without_calls(self.compiled.at("capture"), taken_out)
        before, matched = self.request.matched(model), request.matched(model)
        if matched.modules != before.modules:
            captured = _without_calls(request.capture(model, matched).program, taken_out)
            found = Attempt(request.program(captured, request.asked(captured, matched)), "")
        else:
            asked = request.asked(base, matched)
            is_read = is_cut_anew or bool(taken_out) or _outputs(asked) != _outputs(self.request.asked(base, before))
            program = request.program(base, asked)
            found = Attempt(program, "") if is_read else Attempt(_with_pins(self.compiled.at(UNREAD), program), UNREAD)
        if request.options.pipeline and found.transfers is not None:
            stages_of(found.program)  # an error for what needs the whole batch
        if is_cut_anew:
            schedule_of(found.program)  # an error for one that cannot run
        return found


def annotations_of(request: Request) -> dict[str, P]:
    """What was annotated, each as a P."""
    from shardc.annotations import spec_of

    return {name: spec_of(given, request.annotated, name) for name, given in request.annotations.items()}


def _outputs(asked: Any) -> list[Any]:
    return [pin for pin in asked if pin.kind == "output"]


def _with_pins(program: Program, other: Program) -> Program:
    return replace(program, pins=other.pins, options=other.options)


def _without_calls(program: Program, taken_out: tuple[str, ...]) -> Program:
    """A captured program without some calls of ``shardc.annotate``, and without those of their gradients."""
    if not taken_out:
        return program
    program = program.copy()
    for node in list(filter(is_annotation, program.calls)):
        if annotation_text(program, node) in taken_out:
            program.replace(node, operand(node))
    return program
