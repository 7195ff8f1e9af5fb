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
from shardc.stage_cut import stages_of
from shardc.transfer import Transfer, transfers

SETTLED = "fuse_collectives"  # after it no pass takes a collective away, or adds one to another value
UNREAD = "keep_dims"  # up to it only the annotations of outputs and modules are read
NAMES = [each.__name__ for each in PASSES]


def figures_of(program: Program) -> Figures:
    """What a localized program costs one rank."""
    found, memory = collectives_of(program), memory_of(program)
    sent = sum(each.wire_bytes * each.times for each in found)
    return Figures(sent, memory["peak"], memory["optimizer"], flops_of(program), len(found))


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
        options = replace(self.request.options, zero=change.zero_after(self.request.options.zero))
        key = (frozenset(asked.items()), options.zero, change.taken_out)
        if key not in self._tried:
            try:
                request = replace(self.request, annotations=asked, options=options)
                self._tried[key] = self._attempt(request, change.taken_out)
            except (ShardingError, CaptureError, NotImplementedError):
                self._tried[key] = None
        return self._tried[key]

    def _attempt(self, request: Request, taken_out: tuple[str, ...]) -> Attempt:
        model, base = self.compiled.model, _without_calls(self.compiled.at("capture"), taken_out)
        before, matched = self.request.matched(model), request.matched(model)
        if matched.modules != before.modules:
            captured = _without_calls(request.capture(model, matched).program, taken_out)
            found = Attempt(request.program(captured, request.asked(captured, matched)), "")
        else:
            asked = request.asked(base, matched)
            is_read = bool(taken_out) or _outputs(asked) != _outputs(self.request.asked(base, before))
            unread = base if is_read else self.compiled.at(UNREAD)
            found = Attempt(_with_pins(unread, request.program(base, asked)), "" if is_read else UNREAD)
        if found.transfers and request.options.pipeline:
            stages_of(found.program)  # an error for what needs the whole batch
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
