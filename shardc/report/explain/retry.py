"""A compiled model asked again with other annotations, by as few passes as tell what became of it.

It was captured once; it is captured again only where the annotations of modules differ, which are in the graph. What
comes before the first pass that reads annotations is not done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from shardc.compiler import (
    Compiled,
    Request,
    capture_model,
    first_program,
    match_annotations,
    resolve_pins,
)
from shardc.costs.flops import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.stage_schedule import schedule_of
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Pipeline, Zero
from shardc.passes.order import SETTLED, UNANNOTATED, Pass, run_passes
from shardc.passes.propagate.pins import annotation_text
from shardc.program.node import is_annotation, operand
from shardc.program.program import Program
from shardc.program.stages import has_stages, stages_of
from shardc.program.traffic import collectives_of
from shardc.report.explain.collectives import Transfer, transfers


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
    """A plan under other annotations. ``program`` stands after the pass ``after``, or was captured where it is None."""

    program: Program
    after: Pass | None = None

    @cached_property
    def transfers(self) -> frozenset[Transfer]:
        """The transfers of the plan. They are settled before the last passes, which run where figures are needed."""
        self.program, self.after = run_passes(self.program, after=self.after, until=SETTLED), SETTLED
        return frozenset(each for found in transfers(self.program).values() for each in found)

    @cached_property
    def figures(self) -> Figures:
        """The cost of a step on one rank."""
        return figures_of(run_passes(self.program, after=self.after))


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
        before, matched = match_annotations(model, self.request), match_annotations(model, request)
        if matched.modules != before.modules:
            captured = _without_calls(capture_model(model, request, matched).program, taken_out)
            found = Attempt(first_program(captured, request, resolve_pins(captured, request, matched)))
        else:
            pins = resolve_pins(base, request, matched)
            outputs = _outputs(resolve_pins(base, self.request, before))
            program = first_program(base, request, pins)
            if is_cut_anew or taken_out or _outputs(pins) != outputs:
                found = Attempt(program)
            else:
                found = Attempt(_with_pins(self.compiled.at(UNANNOTATED), program), UNANNOTATED)
        if request.options.pipeline and found.transfers is not None:
            stages_of(found.program)  # raises for an op that needs the whole batch
        if is_cut_anew:
            schedule_of(found.program)  # raises for a schedule that cannot run
        return found


def annotations_of(request: Request) -> dict[str, P]:
    """What was annotated, each as a P."""
    from shardc.capture.annotations import spec_of

    mesh = request.options.stage_mesh(request.mesh)
    return {name: spec_of(given, mesh, name) for name, given in request.annotations.items()}


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


@dataclass(frozen=True, slots=True)
class Edit:
    """One annotation before and after: None where there is none."""

    pattern: str
    before: P | None
    after: P | None

    @property
    def text(self) -> str:
        """In words and Python."""
        if self.after is None:
            return f"drop {self.pattern!r}: {self.before!r}"
        if self.before is None:
            return f"add {self.pattern!r}: {self.after!r}"
        return f"change {self.pattern!r} from {self.before!r} to {self.after!r}"


@dataclass(frozen=True, slots=True)
class Change:
    """Edits that go together, and the option ``zero`` where ``is_zero`` says that it changes.

    ``taken_out``: calls of ``shardc.annotate`` in the model, as an origin names them. ``stages``: fields of the option
    ``pipeline`` and what they become. ``mesh``: its axes and sizes, where these change.
    """

    edits: tuple[Edit, ...] = ()
    zero: Zero | None = None
    is_zero: bool = False
    taken_out: tuple[str, ...] = ()
    stages: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    def applied(self, annotations: Mapping[str, P]) -> dict[str, P]:
        """The annotations after the change, those that are kept in their order."""
        after = {edit.pattern: edit.after for edit in self.edits}
        found = {pattern: after.get(pattern, spec) for pattern, spec in {**annotations, **after}.items()}
        return {pattern: spec for pattern, spec in found.items() if spec is not None}

    def zero_after(self, before: Zero | None) -> Zero | None:
        """The option after the change."""
        return self.zero if self.is_zero else before

    def pipeline_after(self, before: Pipeline | None) -> Pipeline | None:
        """The option after the change."""
        return replace(before, **dict(self.stages)) if before is not None and self.stages else before

    def mesh_after(self, before: Mesh) -> Mesh:
        """The mesh after the change."""
        return Mesh(device_ids=None, **dict(self.mesh)) if self.mesh else before

    @property
    def text(self) -> str:
        """In words and Python."""
        option = [f"say zero={self.zero!r}" if self.zero else "leave zero= out"] if self.is_zero else []
        calls = [
            f"take out of the model shardc.{call.replace('annotate(', 'annotate(..., ')}" for call in self.taken_out
        ]
        stages = [f"say {', '.join(f'{name}={value!r}' for name, value in self.stages)} in pipeline="] * bool(
            self.stages
        )
        mesh = [f"compile for {_axes_text(self.mesh, ', ')}"] * bool(self.mesh)
        return ", ".join([*(edit.text for edit in self.edits), *calls, *option, *stages, *mesh])

    def flags(self, annotations: Mapping[str, P], is_whole: bool) -> str:
        """On the command line; ``is_whole``: ``--annotate`` stands in place of all that there is, as for an hf target.

        Else what is dropped is left open, which comes to the same.
        """
        after = self.applied(annotations)
        open_ = {edit.pattern: P(...) for edit in self.edits if edit.after is None}
        said = after if is_whole else open_ | {e.pattern: e.after for e in self.edits if e.after is not None}
        flags = [f"--annotate '{pattern}={spec}'" for pattern, spec in said.items()]
        if self.is_zero:
            flags += [f"--zero {self.zero.axis}={self.zero.stage}" if self.zero else "without --zero"]
        return " ".join(flags)

    def stage_flags(self, pipeline: Pipeline) -> str:
        """On the command line, of a change of stages or of the mesh; all else stays as it was typed."""
        flags = [f"--mesh {_axes_text(self.mesh, ',')}"] * bool(self.mesh)
        return " ".join([*flags, *[f"--pipeline {_typed(pipeline)}"] * bool(self.stages)])

    def stage_python(self, pipeline: Pipeline) -> str:
        """In Python, likewise."""
        mesh = [f"mesh = Mesh({_axes_text(self.mesh, ', ')})"] * bool(self.mesh)
        return "; ".join([*mesh, *[f"pipeline = {_said(pipeline)}"] * bool(self.stages)])


def _axes_text(axes: tuple[tuple[str, int], ...], sign: str) -> str:
    return sign.join(f"{name}={size}" for name, size in axes)


def _given(option: Pipeline) -> dict[str, Any]:
    """What of an option is not as it is by default."""
    plain = Pipeline(option.axis)
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    return {name: value for name, value in values.items() if name == "microbatches" or value != getattr(plain, name)}


def _said(option: Pipeline) -> str:
    """An option as one types it in Python."""
    given = {"axis": option.axis, **_given(option)}
    return f"Pipeline({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _typed(option: Pipeline) -> str:
    """An option as one types it after ``--pipeline``."""
    words = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in _given(option).items()}
    return ",".join([option.axis, *(f"{name}={value}" for name, value in words.items())])


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step of a plan costs one rank.

    ``wire_bytes`` sent, ``peak`` bytes alive at once with Adam's state left out, which is ``optimizer``; ``flops``.
    Of a pipeline bytes are those of one rank of each stage together, of which ``crossing`` go between stages; all else
    is of the rank that has most of it.
    """

    wire_bytes: int
    peak: int
    optimizer: int
    flops: int
    num_collectives: int
    crossing: int = 0

    def is_free_after(self, before: Figures) -> bool:
        """Whether less is sent, and neither peak memory, with and without Adam's state, nor operations grow."""
        is_no_larger = self.peak <= before.peak and self.peak + self.optimizer <= before.peak + before.optimizer
        return self.wire_bytes < before.wire_bytes and is_no_larger and self.flops <= before.flops

    def excess(self, before: Figures) -> float:
        """How much more it costs in all: the sum of what each figure grows by, relative to what it was."""
        pairs = [(self.wire_bytes, before.wire_bytes), (self.peak + self.optimizer, before.peak + before.optimizer)]
        pairs.append((self.flops, before.flops))
        return sum(max(0, now - then) / max(1, then) for now, then in pairs)
