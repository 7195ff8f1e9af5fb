"""What a collective carries, and so the codec in which its values are sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardc.program.collective import group_size
from shardc.program.communication import Member, axes_of, chain, is_collective, is_early, members, only_to_gradients
from shardc.program.node import descendants, is_cast, is_free
from shardc.program.program import Program, ends_of, parameters_of
from shardc.wire import ACTIVATIONS, GRADIENTS, PARAMETERS, Codec, codec_of

aten = torch.ops.aten
STATISTICS = {aten.sum.dim_IntList, aten.sum.default}  # of activations: few numbers, on which much depends
SCALED = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
FEWEST = 256
CODED = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


class Contents:
    """What the collectives of a lowered program carry, and the codecs that the option ``wire`` gives them."""

    def __init__(self, program: Program) -> None:
        self.program, self.wire = program, program.options.wire or {}
        self._to_gradients = only_to_gradients(program) if self.wire else set()
        self._parameters = {node: name for name, node in parameters_of(program).items()}

    def codec(self, node: fx.Node) -> Codec | None:
        """The codec of a collective; None for one that sends values as they are.

        Codes stand for floats where they are fewer bytes; not for the largest of values, nor for a few activations or
        sums of them, as a softmax over a cut dim needs them. Of the codecs of several axes it is the most exact.
        """
        parts = members(node) if self.wire and is_collective(node) else ()
        if not parts or not all(self._may_be_coded(part) for part in parts):
            return None
        content, paths = self.content(node), set(self._paths(node))
        types = [type_ for part in parts if (type_ := self.program.local_type(part.operand)) is not None]
        if content == ACTIVATIONS:
            are_few = sum(type_.numel for type_ in types) < FEWEST
            if are_few or any(_computed_by(part.operand).target in STATISTICS for part in parts):
                return None
        codecs = [codec_of(self.wire, axis, content, paths) for axis in axes_of(node)]
        codec = max((each for each in codecs if each is not None), key=lambda each: each.bits, default=None)
        if codec is None or None in codecs:
            return None
        coded = sum(codec.nbytes(type_.numel) for type_ in types)
        return codec if coded < sum(type_.nbytes for type_ in types) else None

    def message_codec(self, node: fx.Node) -> Codec | None:
        """The codec of a value that a stage of a pipeline sends to another one; None for one that is sent as it is."""
        pipeline, type_ = self.program.options.pipeline, self.program.local_type(node)
        is_coded = type_ is not None and type_.dtype.is_floating_point and type_.numel >= FEWEST
        if pipeline is None or type_ is None or not is_coded:
            return None
        codec = codec_of(self.wire, pipeline.axis, ACTIVATIONS, {self.program.source(node).module})
        return None if codec is None or codec.nbytes(type_.numel) >= type_.nbytes else codec

    def content(self, node: fx.Node) -> str:
        """What a collective carries, one of ``CONTENTS``."""
        if node in self._to_gradients:
            return GRADIENTS
        is_stored = is_early(node) and self._parameters.keys() >= set(_inputs(node))
        return PARAMETERS if is_stored else ACTIVATIONS

    def _may_be_coded(self, part: Member) -> bool:
        program = self.program
        assert program.mesh is not None
        if part.kind not in CODED or group_size(program.mesh, part.kind, part.args) == 1:
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
