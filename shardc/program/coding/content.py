"""The contents of collectives, and the codecs in which their values are sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import fx

from shardc.language.mesh import axis_of
from shardc.program.collective import group_size
from shardc.program.communication import (
    Member,
    axes_of,
    chain,
    is_collective,
    is_early,
    is_fetch,
    is_saved,
    members,
    only_to_gradients,
)
from shardc.program.node import descendants, is_cast, is_free, operand
from shardc.program.program import Program, ends_of, parameters_of
from shardc.wire import ACTIVATIONS, GRADIENTS, PARAMETERS, VALUES, Codec, codec_named, key_of

aten = torch.ops.aten
Step = tuple[tuple[str, ...], Codec]  # the axes, printed, of a part of a collective, and its codec
STATISTICS = {  # of activations: few numbers, on which much depends
    aten.sum.dim_IntList, aten.sum.default, aten.native_batch_norm_backward.default,
}  # fmt: skip
SCALED = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
FEWEST = 256
CODED = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


class Contents:
    """The contents of the collectives of a lowered program, and the codecs that the option ``wire`` gives them.

    State: ``unused``, the keys of the option that have applied to nothing so far.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.wire = program, program.options.wire or {}
        self.unused = set(self.wire)
        self._parameters = {node: name for name, node in parameters_of(program).items()}

    def steps(self, node: fx.Node) -> tuple[Step, ...]:
        """The steps of a collective that sends codes: the axes and the codec of each; empty for one that sends values.

        If all axes have a codec, they are one step, in the most exact of these codecs. A sum that is also over axes
        without a codec is first done over these, so that each rank then sends only the codes of its own piece.
        """
        codecs, parts = self.codecs(node), members(node)
        codec = min((each for each in codecs.values() if each is not None), key=lambda each: each.error, default=None)
        if codec is None or not self._is_fewer(codec, parts):
            return ()
        axes: tuple[str, ...] = parts[0].args[0]
        plain = tuple(part for part in axes if codecs[axis_of(part)] is None)
        if not plain:
            return ((axes, codec),)
        coded = tuple(part for part in axes if part not in plain)
        return ((plain, VALUES), (coded, codec)) if parts[0].kind == "all_reduce" else ()

    def _is_fewer(self, codec: Codec, parts: Sequence[Member]) -> bool:
        """Whether the codes of a collective's values are fewer bytes than the values."""
        types = [type_ for part in parts if (type_ := self.program.local_type(part.operand)) is not None]
        coded, plain = sum(codec.nbytes(type_.numel) for type_ in types), sum(type_.nbytes for type_ in types)
        return coded < plain or codec is VALUES

    def codecs(self, node: fx.Node) -> dict[str, Codec | None]:
        """The codec that the option has for each axis of a collective; empty for a collective that has to send values.

        Whole numbers, maxima and minima are sent as values. So are small activations and sums of activations, as a
        softmax over a cut dim needs them; and saved values, since much depends on some of them, such as the sums of
        attention. A codec with feedback is for gradients, and for other contents if a key names them.
        """
        parts = members(node) if self.wire and is_collective(node) else ()
        if not parts or not all(self._may_be_coded(part) for part in parts):
            return {}
        content, paths = self.content(node), set(self._paths(node))
        if content == ACTIVATIONS:
            types = [self.program.local_type(part.operand) for part in parts]
            are_few = sum(type_.numel for type_ in types if type_ is not None) < FEWEST
            if are_few or any(_computed_by(part.operand).target in STATISTICS for part in parts):
                return {}
        return {axis: self._codec_of(axis, content, paths) for axis in axes_of(node)}

    def message_codec(self, node: fx.Node) -> Codec | None:
        """The codec of a value that a stage of a pipeline sends to another; None if it is sent as it is."""
        pipeline, type_ = self.program.options.pipeline, self.program.local_type(node)
        is_coded = type_ is not None and type_.dtype.is_floating_point and type_.numel >= FEWEST
        if pipeline is None or type_ is None or not is_coded:
            return None
        codec = self._codec_of(pipeline.axis, ACTIVATIONS, {self.program.source(node).module})
        is_fewer = codec is VALUES or (codec is not None and codec.nbytes(type_.numel) < type_.nbytes)
        return codec if is_fewer else None

    def _codec_of(self, axis: str, content: str, paths: Collection[str]) -> Codec | None:
        key = key_of(self.wire, axis, content, paths)
        codec = None if key is None or (name := self.wire[key]) is None else codec_named(name)
        if codec is not None and codec.has_feedback and content != GRADIENTS and content not in (key or "").split():
            return None
        self.unused.discard(key or "")
        return codec

    def feeds_back(self, node: fx.Node, steps: Sequence[Step]) -> bool:
        """Whether what codes leave out of the values of a collective is added to those of the next step."""
        return any(codec.has_feedback for _, codec in steps) and self.content(node) == GRADIENTS

    @cached_property
    def _to_gradients(self) -> set[fx.Node]:
        return only_to_gradients(self.program)

    def content(self, node: fx.Node) -> str:
        """The contents of a collective, one of ``CONTENTS``."""
        if node in self._to_gradients:
            return GRADIENTS
        gathered = set(_inputs(node)) if is_early(node) else set()
        return PARAMETERS if gathered and self._parameters.keys() >= gathered else ACTIVATIONS

    def _may_be_coded(self, part: Member) -> bool:
        program = self.program
        assert program.mesh is not None
        if part.kind not in CODED or group_size(program.mesh, part.kind, part.args) == 1:
            return False
        if is_saved(operand(part.operand) if is_fetch(part.operand) else part.operand):
            return False
        is_sum = part.kind not in ("all_reduce", "reduce_scatter") or part.args[1] == "sum"
        return is_sum and program.value_type(program.value(part.operand)).dtype.is_floating_point

    def _paths(self, node: fx.Node) -> Iterator[str]:
        """The modules and parameters that a collective belongs to."""
        yield from filter(None, {self.program.source(each).module for each in (node, *node.users)})
        yield from (self._parameters[each] for each in _inputs(node) if each in self._parameters)
        if node in self._to_gradients:
            after = descendants(node)
            yield from (output.name for output, _, result in ends_of(self.program) if result in after)


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs that an early gather gathers."""
    for part in members(node):
        ops = [part.operand, *(each for op in chain(part.operand) or () for each in op.all_input_nodes)]
        yield from (each for each in ops if each.op == "placeholder")


def _computed_by(node: fx.Node) -> fx.Node:
    """The op that computes a value, behind views, casts and factors."""
    while is_free(node) or is_cast(node) or node.target in SCALED:
        node = node.all_input_nodes[0]
    return node
