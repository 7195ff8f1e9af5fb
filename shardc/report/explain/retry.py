"""Compile a model again after a change of the plan, with as few passes as possible, and measure its new cost.

The model is captured again only if the annotations of its modules change, since those are in the graph. Passes before
the first one that reads annotations are not run again. Many changes are tried on a model of two of its repeated blocks
(``Retry.near``), which compiles in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from shardc.capture.annotations import named_by, spec_of
from shardc.capture.call import names_of
from shardc.compiler import (
    Compiled,
    Request,
    capture_model,
    compile_request,
    first_program,
    match_annotations,
    resolve_pins,
)
from shardc.costs.count import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stages.record import StageRecord
from shardc.costs.stages.schedule import schedule_of
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Pipeline, Zero
from shardc.passes.order import SETTLED, UNANNOTATED, Pass, run_passes
from shardc.passes.propagate.propagate import annotation_text
from shardc.program.node import is_annotation, operand
from shardc.program.program import Program
from shardc.program.stages import has_stages, stages_of
from shardc.program.traffic import collectives_of
from shardc.report.explain.blocks import blocks_text, nearest_blocks, repeated_blocks, with_blocks
from shardc.report.explain.collectives import Transfer, transfers
from shardc.report.explain.records import Figures


class Retry:
    """Compiles a model again after changes. A change is compiled once, however often it is attempted.

    ``blocks``: the blocks that the model was cut down to, in words; empty for the whole model.
    """

    def __init__(self, compiled: Compiled, blocks: str = "") -> None:
        assert compiled.request is not None, "compiled by hand"
        self.compiled, self.request, self.blocks = compiled, compiled.request, blocks
        self._attempts: dict[object, Attempt | None] = {}
        self._near: dict[object, Retry | None] = {}

    def near(self, names: Iterable[str]) -> Retry | None:
        """A Retry for the model with two blocks of each repeated list, preferably blocks that contain the ``names``.

        None if no block is repeated, a pipeline spreads blocks over stages, or the model needs all its blocks.
        """
        lists = {} if self.request.options.pipeline else repeated_blocks(self.compiled.model)
        kept = nearest_blocks(lists, names)
        key = tuple(kept.items())
        if kept and key not in self._near:
            self._near[key] = self._on_blocks(kept)
        return self._near.get(key)

    def _on_blocks(self, kept: Mapping[str, tuple[str, ...]]) -> Retry | None:
        request, model = self.request, with_blocks(self.compiled.model, kept)
        names = names_of(model, request.args, request.kwargs)
        annotations = {pattern: spec for pattern, spec in request.annotations.items() if named_by(pattern, names)}
        try:
            request = replace(request, annotations=annotations, strict=False)
            return Retry(compile_request(model, request), blocks_text(kept))
        except Exception:  # the model's own code may fail in any way without its other blocks
            return None

    @cached_property
    def figures(self) -> Figures:
        """The cost of the plan without a change."""
        return figures_of(self.compiled.program)

    @cached_property
    def transfers(self) -> frozenset[Transfer]:
        """The transfers of the plan without a change."""
        return frozenset[Transfer]().union(*transfers(self.compiled.whole).values())

    @cached_property
    def annotations(self) -> Mapping[str, P]:
        """The annotations without a change, DTensor placements as a P."""
        mesh = self.request.options.stage_mesh(self.request.mesh)
        return {name: spec_of(spec, mesh, name) for name, spec in self.request.annotations.items()}

    def attempt(self, change: Change) -> Attempt | None:
        """The plan after a change; None if it cannot be compiled."""
        annotations, before = change.annotations_after(self.annotations), self.request.options
        zero, pipeline = change.zero if change.is_zero else before.zero, change.pipeline_after(before.pipeline)
        saved = None if change.is_saved_whole else before.saved
        key = (
            frozenset(annotations.items()), zero, change.removed_calls, change.pipeline_fields, change.mesh,
            change.is_saved_whole,
        )  # fmt: skip
        if key not in self._attempts:
            try:
                options = replace(before, zero=zero, pipeline=pipeline, saved=saved)
                mesh = Mesh(device_ids=None, **dict(change.mesh)) if change.mesh else self.request.mesh
                request = replace(self.request, annotations=annotations, options=options, mesh=mesh)
                self._attempts[key] = self._compile(request, change.removed_calls)
            except (ShardingError, CaptureError, NotImplementedError):
                self._attempts[key] = None
        return self._attempts[key]

    def _compile(self, request: Request, removed_calls: tuple[str, ...]) -> Attempt:
        stages, before = ((each.mesh, each.options.pipeline) for each in (request, self.request))
        has_other_stages = stages != before
        attempt = self._first_attempt(request, removed_calls, has_other_stages)
        if request.options.pipeline and attempt.transfers is not None:
            stages_of(attempt.program)  # raises for an op that needs the whole batch
        if has_other_stages:
            schedule_of(attempt.program)  # raises for a schedule that cannot run
        return attempt

    def _first_attempt(self, request: Request, removed_calls: tuple[str, ...], has_other_stages: bool) -> Attempt:
        """The program after the last pass whose result the change leaves as it is, with the pins of the request."""
        model, captured = self.compiled.model, _without_calls(self.compiled.at("capture"), removed_calls)
        before, matched = match_annotations(model, self.request), match_annotations(model, request)
        if matched.modules != before.modules:
            captured = _without_calls(capture_model(model, request, matched).program, removed_calls)
            return Attempt(first_program(captured, request, resolve_pins(captured, request, matched)))
        pins, pins_before = resolve_pins(captured, request, matched), resolve_pins(captured, self.request, before)
        program = first_program(captured, request, pins)
        outputs, outputs_before = ([pin for pin in each if pin.kind == "output"] for each in (pins, pins_before))
        if has_other_stages or removed_calls or outputs != outputs_before:
            return Attempt(program)
        unannotated = self.compiled.at(UNANNOTATED)
        options = replace(program.options, pipeline=unannotated.options.pipeline)  # with the chunks chosen before
        return Attempt(replace(unannotated, pins=program.pins, options=options), UNANNOTATED)


def _without_calls(program: Program, removed_calls: tuple[str, ...]) -> Program:
    """A captured program without some calls of ``shardc.annotate``, and without those of their gradients."""
    if not removed_calls:
        return program
    program = program.copy()
    for node in list(filter(is_annotation, program.calls)):
        if annotation_text(program, node) in removed_calls:
            program.replace(node, operand(node))
    return program


@dataclass
class Attempt:
    """A plan after a change. ``program`` is the result of the pass ``after``, or of capture if that is None."""

    program: Program
    after: Pass | None = None

    @cached_property
    def transfers(self) -> frozenset[Transfer]:
        """The transfers of the plan. They are settled before the last passes, which run only for figures."""
        self.program, self.after = run_passes(self.program, after=self.after, until=SETTLED), SETTLED
        return frozenset[Transfer]().union(*transfers(self.program).values())

    @cached_property
    def figures(self) -> Figures:
        """The cost of a step on one rank."""
        return figures_of(run_passes(self.program, after=self.after))


def figures_of(program: Program) -> Figures:
    """The cost of a step of a localized program on one rank.

    With a pipeline, bytes sent are the sum over one rank of each stage; ``crossing`` of them go between stages. Each
    other figure is that of the rank with the largest one.
    """
    collectives, memory = collectives_of(program), memory_of(program)
    sent, crossing = (
        sum(each.wire_bytes * each.times for each in collectives if each.kind == "send" or not is_message)
        for is_message in (False, True)
    )
    flops = StageRecord(program).rank_flops if has_stages(program) else flops_of(program)
    return Figures(sent, memory["peak"], memory["optimizer"], flops, len(collectives), crossing)


@dataclass(frozen=True, slots=True)
class Edit:
    """One annotation before and after a change; None if there is none."""

    pattern: str
    before: P | None
    after: P | None

    @property
    def text(self) -> str:
        """The edit in words and Python."""
        if self.after is None:
            return f"drop {self.pattern!r}: {self.before!r}"
        if self.before is None:
            return f"add {self.pattern!r}: {self.after!r}"
        return f"change {self.pattern!r} from {self.before!r} to {self.after!r}"


@dataclass(frozen=True, slots=True)
class Change:
    """Edits of annotations that go together, and changes of options.

    ``zero``: the option after the change, if ``is_zero``. ``removed_calls``: calls of ``shardc.annotate`` in the model,
    as origins name them. ``pipeline_fields``: fields of the option ``pipeline`` with their new values. ``mesh``: the
    axes and sizes of another mesh. ``is_saved_whole``: whether the option ``saved`` is dropped.
    """

    edits: tuple[Edit, ...] = ()
    zero: Zero | None = None
    is_zero: bool = False
    removed_calls: tuple[str, ...] = ()
    pipeline_fields: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    is_saved_whole: bool = False

    def annotations_after(self, annotations: Mapping[str, P]) -> dict[str, P]:
        """The annotations after the change; those that stay keep their order."""
        edited = {edit.pattern: edit.after for edit in self.edits}
        after = {pattern: edited.get(pattern, spec) for pattern, spec in {**annotations, **edited}.items()}
        return {pattern: spec for pattern, spec in after.items() if spec is not None}

    def pipeline_after(self, before: Pipeline | None) -> Pipeline | None:
        """The option ``pipeline`` after the change."""
        return before if before is None else replace(before, **dict(self.pipeline_fields))

    @property
    def text(self) -> str:
        """The change in words and Python."""
        parts = [edit.text for edit in self.edits]
        for call in self.removed_calls:
            parts.append(f"take out of the model shardc.{call.replace('annotate(', 'annotate(..., ')}")
        if self.is_zero:
            parts.append(f"say zero={self.zero!r}" if self.zero else "leave zero= out")
        if self.pipeline_fields:
            parts.append(f"say {', '.join(f'{name}={each!r}' for name, each in self.pipeline_fields)} in pipeline=")
        if self.is_saved_whole:
            parts.append("leave saved= out")
        if self.mesh:
            parts.append(f"compile for {_axes_text(self.mesh, ', ')}")
        return ", ".join(parts)

    def python(self, annotations: Mapping[str, P], pipeline: Pipeline | None) -> str:
        """The change as Python source. ``annotations`` and ``pipeline`` are those before the change."""
        if self.pipeline_fields or self.mesh:
            settings = ", ".join(f"{name}={value!r}" for name, value in self._settings(pipeline).items())
            mesh = [f"mesh = Mesh({_axes_text(self.mesh, ', ')})"] * bool(self.mesh)
            return "; ".join([*mesh, *[f"pipeline = Pipeline({settings})"] * bool(self.pipeline_fields)])
        if self.is_saved_whole:
            return "saved=None"
        after_edits = self.annotations_after(annotations).items()
        entries = ", ".join(f"{pattern!r}: {spec!r}" for pattern, spec in after_edits)
        return f"annotations = {{{entries}}}" + (f", zero={self.zero!r}" if self.is_zero else "")

    def flags(self, annotations: Mapping[str, P], pipeline: Pipeline | None, replaces: bool) -> str:
        """The change as flags of the command line.

        ``replaces``: ``--annotate`` replaces all annotations of the target, as for ``hf:``. Otherwise it adds to them,
        and a dropped annotation becomes an open one, which has the same effect.
        """
        if self.pipeline_fields or self.mesh:
            settings = self._settings(pipeline)
            axis = settings.pop("axis")
            words = [axis, *(f"{k}={'+'.join(v) if isinstance(v, tuple) else v}" for k, v in settings.items())]
            mesh = [f"--mesh {_axes_text(self.mesh, ',')}"] * bool(self.mesh)
            return " ".join([*mesh, *[f"--pipeline {','.join(words)}"] * bool(self.pipeline_fields)])
        if self.is_saved_whole:
            return "without --saved"
        dropped = {edit.pattern: P(...) for edit in self.edits if edit.after is None}
        kept = {edit.pattern: edit.after for edit in self.edits if edit.after is not None}
        specs = self.annotations_after(annotations) if replaces else dropped | kept
        flags = [f"--annotate '{pattern}={spec}'" for pattern, spec in specs.items()]
        if self.is_zero:
            flags.append(f"--zero {self.zero.flag}" if self.zero else "without --zero")
        return " ".join(flags)

    def _settings(self, before: Pipeline | None) -> dict[str, Any]:
        """The fields of the option ``pipeline`` after the change: axis, microbatches and all that are no defaults."""
        after = self.pipeline_after(before)
        assert after is not None, self
        values, default = {each.name: getattr(after, each.name) for each in fields(after)}, Pipeline(after.axis)
        needed = ("axis", "microbatches")
        return {name: value for name, value in values.items() if name in needed or value != getattr(default, name)}


def _axes_text(axes: tuple[tuple[str, int], ...], separator: str) -> str:
    return separator.join(f"{name}={size}" for name, size in axes)
