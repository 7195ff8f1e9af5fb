"""What ``compile`` is asked, beside the model: enough to ask again with other annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardc.capture.annotations import Matched, Spec, match, resolve
from shardc.capture.capture import Captured, capture
from shardc.capture.microbatches import check_loss, empty_microbatches, with_microbatches
from shardc.language.mesh import Mesh
from shardc.options import Options
from shardc.program.program import Pin, Program

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``compile`` but the model; see there."""

    mesh: Mesh
    annotations: Mapping[str, Spec] = field(default_factory=dict)
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True
    differentiable: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    fixed: tuple[Pin, ...] = ()

    def on_meta(self) -> Request:
        """The same with inputs that have no values, which may be kept."""
        return replace(self, args=_on_meta(tuple(self.args)), kwargs=_on_meta(dict(self.kwargs)))

    @property
    def computing(self) -> Mesh:
        """The mesh of the program: of a pipeline that of one stage, with an axis of microbatches."""
        pipeline = self.options.pipeline
        return pipeline.compute_mesh(self.mesh) if pipeline else self.mesh

    @property
    def annotated(self) -> Mesh:
        """The mesh that annotations speak of: of a pipeline that of the ranks of one stage."""
        pipeline = self.options.pipeline
        return pipeline.stage_mesh(self.mesh) if pipeline else self.mesh

    def matched(self, model: nn.Module) -> Matched:
        """What is annotated. Raises a ShardingError for a pattern that means nothing, or too much."""
        return match(self.annotations, model, self.args, self.kwargs, self.annotated)

    def capture(self, model: nn.Module, matched: Matched) -> Captured:
        """The model's graph, with what is annotated in it. Raises a CaptureError."""
        return capture(
            model, self.args, self.kwargs, train=self.train, modules=matched.modules,
            differentiable=self.differentiable, precision=self.options.precision,
        )  # fmt: skip

    def asked(self, captured: Program, matched: Matched) -> tuple[Pin, ...]:
        """The shardings that the annotations of inputs and outputs fix."""
        return resolve(captured, matched, self.computing)

    def program(self, captured: Program, asked: tuple[Pin, ...]) -> Program:
        """The captured program as the first pass takes it."""
        pipeline = self.options.pipeline
        settled = {(pin.kind, pin.name) for pin in self.fixed}
        pins = (*(pin for pin in asked if (pin.kind, pin.name) not in settled), *self.fixed)
        notes = captured.notes
        if pipeline:
            check_loss(captured)
            pins = tuple(with_microbatches(captured, pins, pipeline, self.computing))
            notes = (*notes, *empty_microbatches(captured, pins, pipeline))
        num_stages = pipeline.num_stages(self.mesh) if pipeline else 1
        return replace(
            captured, mesh=self.computing, pins=pins, options=self.options, num_stages=num_stages, notes=notes
        )


def _on_meta(value: Any) -> Any:
    import torch

    from shardc.capture.call import flatten, rebuild

    leaves, tree = flatten(value)
    return rebuild(tree, [_typed(leaf) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves])


def _typed(tensor: Any) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
