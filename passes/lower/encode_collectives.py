"""encode_collectives: lowered -> lowered. Collectives send codes in place of values, as the option ``wire`` says.

::

    y = all_gather(x, ("dp",), 0)        ->      c = encode("all_gather", ("dp",), ((0,),), "int8", x)
                                                 d = all_gather(c, ("dp",), 0)
                                                 y = decode("all_gather", ("dp",), ((0,),), "int8", d)

A reduce_scatter becomes an all_to_all, whose results are added when they are decoded; an all_reduce does that and
gathers the codes of the sums. So sums are made of decoded values, and every rank that holds a value has decoded it from
the same codes, the rank that encoded it too. In a pipeline the sending stage makes the codes of a message, and the
receiving stage decodes them.

A codec with feedback adds inputs and results of kind ``residual`` to the program: for each gradient, the part that
codes left out in the step before, and the part that they leave out in this one. In an all_reduce a rank then adds its
own piece of the sum as it is. ``shardc/program/coding/nodes.py`` has an example.

Invariant: every existing value keeps its type and its sharding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.language.mesh import NO_CODES, Axes, merge_parts, part_ends, split_parts
from shardc.language.partition import parse_parts
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div, num_shards
from shardc.ops.codes import CUT, codes_dtype, sum_dtype
from shardc.options import Momentum
from shardc.program.coding.content import Contents, Step
from shardc.program.coding.local import piece_of
from shardc.program.coding.nodes import Arguments, add_codes, decode, encode, left_out, with_momentum, with_residual
from shardc.program.coding.residuals import Residuals, residual_of
from shardc.program.collective import (
    all_gather,
    all_to_all,
    collective_permute,
    group_size,
    shard_slice,
    steps_sharding,
)
from shardc.program.communication import bucket, members, results
from shardc.program.lifetime import split
from shardc.program.node import operand
from shardc.program.program import Program, inputs_of, residual_owner
from shardc.program.stages import TIMED, Crossing, has_stages, stages_of
from shardc.wire import VALUES, Codec


def encode_collectives(program: Program) -> Program:
    """The program whose collectives send codes where the option asks for it."""
    if not program.options.wire:
        return program
    program = program.edited()
    contents = Contents(program)
    coded = {node: steps for node in program.calls if (steps := contents.steps(node))}
    messages = list(_messages(program, contents)) if has_stages(program) else []
    if split(program).backward:  # a program without backward sends less
        unused = [key for key in contents.wire if key in contents.unused]
        program.notes = (*program.notes, *(f"wire names {key!r}, but {NO_CODES}" for key in unused))
    for message in messages:
        _encode_message(program, *message)
    fed = {node for node, steps in coded.items() if contents.feeds_back(node, steps)}
    repeated = fed & _timed(program)  # a residual would have to go from microbatch to microbatch
    coded, fed = {node: steps for node, steps in coded.items() if node not in repeated}, fed - repeated
    residuals = Residuals(program, fed)
    for node, steps in coded.items():
        with program.graph.inserting_before(node):
            result = _Coded(program, node, residuals if node in fed else None).result(steps)
        for user in list(node.users) if node.target is bucket else ():
            user.args = (result, user.args[1])
        node.replace_all_uses_with(result)
        program.graph.erase_node(node)
    if program.options.momentum is not None:
        program.notes = (*program.notes, *_without_momentum(program, program.options.momentum))
    return program


def _without_momentum(program: Program, option: Momentum) -> Iterator[str]:
    """A note of the parameters whose gradients are sent in codes with feedback, and not in their momentum."""
    momenta = inputs_of(program, "momentum")
    names = dict.fromkeys(residual_owner(name) for name in inputs_of(program, "residual"))
    if without := [name for name in names if name not in momenta]:
        shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        yield (
            f"{option.text} sends no momentum of {shown}: their gradients are not in float32, or not complete after "
            "one sum; in codes they disturb Adam's variance"
        )


def _timed(program: Program) -> set[fx.Node]:
    """The calls that run for each microbatch of a pipeline."""
    stages = stages_of(program).stages if has_stages(program) else ()
    return {node for stage in stages for part in TIMED for node in stage.parts[part]}


Message = tuple[fx.Node, Codec, Crossing, tuple[fx.Node, ...]]


def _messages(program: Program, contents: Contents) -> Iterator[Message]:
    """The values that a rank sends to another one in each microbatch, with their codecs and their readers there."""
    found, pipeline = stages_of(program), program.options.pipeline
    assert pipeline is not None
    rank_of = pipeline.place(program.num_stages)
    for crossing, nodes in found.crossings.items():
        calls = [call for part in found.stages[crossing.target].parts.values() for call in part]
        if crossing.part != "after" and rank_of[crossing.source] != rank_of[crossing.target]:
            for node in nodes:
                if codec := contents.message_codec(node):
                    yield node, codec, crossing, tuple(call for call in calls if node in call.all_input_nodes)


def _encode_message(
    program: Program, node: fx.Node, codec: Codec, crossing: Crossing, readers: Sequence[fx.Node]
) -> None:
    """Let the stage that receives a value read the decoded one."""
    type_, asked = program.local_type(node), ("send", (), ((),), codec.name)
    assert type_ is not None and program.mesh is not None
    senders = DimSharding(merge_parts(_others([program.sharding(node)], ())))
    codes_type = TensorType((num_shards(senders.axes), 1, codec.length(type_.numel)), codes_dtype(codec, type_.dtype))
    with program.graph.inserting_after(node):
        codes = program.insert(encode, (*asked, node), codes_type, node, name=f"encode_{node.name}")
    with program.graph.inserting_after(codes):
        decoded = program.insert(decode, (*asked, codes), program.type(node), node, name=f"decode_{node.name}")
    program.set_sharding(codes, Sharding(program.mesh, (senders, WHOLE, WHOLE)))
    program.set_sharding(decoded, program.sharding(node))
    for each, stage in ((codes, crossing.source), (decoded, crossing.target)):
        program.set_source(each, replace(program.source(node), stage=stage))
        program.set_origins(each, ({},) if each is codes else (program.origin(node),))
    for reader in readers:
        reader.replace_input_with(node, decoded)


class _Coded:
    """Makes the nodes of a collective that sends codes; with ``residuals`` the part left out is sent next step."""

    def __init__(self, program: Program, node: fx.Node, residuals: Residuals | None) -> None:
        assert program.mesh is not None
        self.program, self.node, self.mesh, self.parts = program, node, program.mesh, members(node)
        self.kind, self.residuals = self.parts[0].kind, residuals
        self.dtype = sum_dtype(program.value_type(program.value(self.parts[0].operand)).dtype)

    def result(self, steps: Sequence[Step]) -> fx.Node:
        """Insert all nodes; the last one has the results of the collective."""
        (axes, codec), values = steps[0], [part.operand for part in self.parts]
        asked = self.kind, axes, tuple(part.args[1:] for part in self.parts), codec
        if self.residuals is not None and self.program.options.momentum is not None:
            values = [self._with_momentum(self.program.options.momentum, i, each) for i, each in enumerate(values)]
        given = self.residuals.of_last_step(values, self.node) if self.residuals else {}
        values = [self._with_residual(*pair) for pair in zip(values, given.values(), strict=True)] if given else values
        if self.kind == "all_reduce":
            arrived, left = self._reduced(steps, values, asked[2])
        else:
            codes = self._encode(*asked, values)
            if self.kind == "collective_permute":
                arrived = self._send(collective_permute, codes, self.parts[0].args)
            elif self.kind == "all_gather":
                arrived = self._send(all_gather, codes, (axes, 0))
            else:
                arrived = self._send(all_to_all, codes, (axes, 0, 1))
            left = self._left_out(*asked, codes, values)
        self._keep(list(given), left)
        program, node = self.program, self.node
        types = program.types(node) if program.has_many(node) else program.type(node)
        result = self._insert(decode, (*asked[:3], codec.name, arrived), types)
        shardings = program.shardings(node)
        program.set_sharding(result, shardings if program.has_many(node) else shardings[0])
        program.set_origins(result, program.origins(node))
        return result

    def _with_momentum(self, option: Momentum, index: int, value: fx.Node) -> fx.Node:
        """The parameter's new momentum, in place of a gradient whose sum is returned as it is; else the gradient."""
        assert self.residuals is not None
        program, sharding = self.program, self.program.sharding(value)
        axes = parse_parts(self.parts[0].args[0], self.mesh)
        found = [self.residuals.results.get(each, []) for each in results(self.node, self.parts[index])]
        type_ = program.value_type(program.value(value))
        is_complete = self.kind == "all_reduce" and set(sharding.partial_axes) == set(axes)
        if not is_complete or type_.dtype != self.dtype or not any(found):
            return value
        name = next(names[0] for names in found if names)
        complete = replace(sharding, partial=())
        momentum = self.residuals.add_input(name, "momentum", type_, complete)
        result = self._insert(with_momentum, (value, momentum, option.beta, num_shards(axes)), type_)
        program.set_sharding(result, sharding)
        program.set_origins(result, (program.origin(value),))
        return result

    def _with_residual(self, value: fx.Node, residual: fx.Node) -> fx.Node:
        program = self.program
        type_ = TensorType(program.value_type(program.value(value)).shape, self.dtype)
        result = self._insert(with_residual, (value, residual), type_)
        program.set_sharding(result, program.sharding(value))
        program.set_origins(result, (program.origin(value),))
        return result

    def _keep(self, names: Sequence[str], left: fx.Node | None) -> None:
        """Return the part left out of each value from the program."""
        if self.residuals is None or left is None:
            return
        for i, name in enumerate(names):
            each = left
            if self.program.has_many(left):
                each = self._insert(operator.getitem, (left, i), self.program.types(left)[i])
            self.residuals.keep(name, each)

    def _left_out(
        self, kind: Any, axes: tuple[str, ...], args: Arguments, codec: Codec, codes: fx.Node,
        values: Sequence[fx.Node], index: fx.Node | None = None, rest: fx.Node | None = None,
    ) -> fx.Node | None:  # fmt: skip
        """The part that codes leave out of values; None without residuals.

        ``rest``: the part left out of the sum of this rank's own piece, that of ``index``.
        """
        if self.residuals is None:
            return None
        found = [residual_of(self.program, value) for value in values]
        types, shardings = zip(*found, strict=True)
        given = () if has_stages(self.program) else values  # a pipeline may drop the gradients that it computes
        before = tuple(operand(each, 1) for each in given if each.target is with_residual)
        call = (kind, axes, args, codec.name, types[0].shape[0], codes, index, rest, before, *values)
        result = self._insert(left_out, call, types if len(types) > 1 else types[0])
        self.program.set_sharding(result, shardings if len(types) > 1 else shardings[0])
        self.program.set_origins(result, ({},) * len(types))
        return result

    def _own_index(self, axes: tuple[str, ...]) -> fx.Node:
        """The index of this rank along axes, as a tensor of one number."""
        program, count = self.program, group_size(self.mesh, "all_gather", (axes,))
        indices = program.emit(torch.ops.aten.arange.default, count, like=self.node)
        program.set_sharding(indices, Sharding.replicated(self.mesh, 1))
        own = self._insert(shard_slice, (indices, axes, 0), program.type(indices))
        program.set_sharding(own, steps_sharding(program.sharding(indices), "shard_slice", (axes, 0)))
        for each in (indices, own):
            program.set_origins(each, ({},))
        return own

    def _reduced(
        self, steps: Sequence[Step], values: Sequence[fx.Node], args: Arguments
    ) -> tuple[fx.Node, fx.Node | None]:
        """An all_reduce of values: the codes from all ranks of its first step, and the part left out of the values."""
        (axes, codec), *further = steps
        codes, rest = self._encode("all_reduce", axes, args, codec, values), None
        index = self._own_index(axes) if self.residuals is not None else None
        arrived = self._send(all_to_all, codes, (axes, 0, 1))
        numel = self.program.type(arrived).shape[2] // codec.length(1) * codec.block
        senders = self._senders(values, axes)
        type_ = TensorType((num_shards(senders.axes), numel), self.dtype)
        own = () if index is None or codec is VALUES else (index, *values)
        total = self._cut(self._insert(add_codes, (codec.name, own, arrived), type_), senders)
        if further:  # afterwards ranks along the axes of these steps have the same
            assert codec is VALUES, steps
            summed, ((within, by), *_) = parse_parts(axes, self.mesh), further
            sums, rest = self._reduced(further, [total], (("sum",),))
            others = _others([self.program.sharding(total)], summed + parse_parts(within, self.mesh))
            senders = DimSharding(merge_parts(others + summed))
            type_ = TensorType((num_shards(senders.axes), numel), self.dtype)
            total = self._cut(self._insert(decode, ("all_reduce", within, (("sum",),), by.name, sums), type_), senders)
        gathered = "all_gather", axes, ((0,),), codec
        encoded = self._encode(*gathered, [total])
        arrived = self._send(all_gather, encoded, (axes, 0))
        if codec is not VALUES:
            rest = self._left_out(*gathered, encoded, [total])
        return arrived, self._left_out("all_reduce", axes, args, codec, codes, values, index, rest)

    def _encode(
        self, kind: Any, axes: tuple[str, ...], args: Arguments, codec: Codec, values: Sequence[fx.Node]
    ) -> fx.Node:
        receivers, length = self._row(kind, axes, args, codec, values)
        senders = self._senders(values, axes)
        type_ = TensorType((num_shards(senders.axes), receivers, length), codes_dtype(codec, self.dtype))
        return self._cut(self._insert(encode, (kind, axes, args, codec.name, *values), type_), senders)

    def _row(
        self, kind: Any, axes: tuple[str, ...], args: Arguments, codec: Codec, values: Sequence[fx.Node]
    ) -> tuple[int, int]:
        """The number of rows of codes that a rank makes, and the length of each."""
        count = group_size(self.mesh, kind, (axes, *args[0]))
        pieces = [piece_of(self.program, x, kind, (axes, *rest)) for x, rest in zip(values, args, strict=True)]
        numels = [math.prod(piece) for piece in pieces]
        if kind == "all_reduce":
            blocks = sum(ceil_div(numel, codec.block) for numel in numels)
            return count, codec.length(codec.block * ceil_div(blocks, count))
        return count if kind in CUT else 1, sum(map(codec.length, numels))

    def _senders(self, values: Sequence[fx.Node], axes: tuple[str, ...]) -> DimSharding:
        """The cut of the dim of senders: the axes along which values differ, and last those of the collective."""
        own = parse_parts(axes, self.mesh)
        return DimSharding(merge_parts(_others([self.program.sharding(each) for each in values], own) + own))

    def _insert(self, target: Any, args: tuple[Any, ...], type_: Any) -> fx.Node:
        return self.program.insert(target, args, type_, self.node, name=f"{target.__name__}_{self.node.name}")

    def _cut(self, node: fx.Node, senders: DimSharding) -> fx.Node:
        """Cut the first dim of a node, the dim of senders."""
        others = [WHOLE] * (len(self.program.type(node).shape) - 1)
        self.program.set_sharding(node, Sharding(self.mesh, (senders, *others)))
        self.program.set_origins(node, ({},))
        return node

    def _send(self, target: Any, codes: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        program, node, kind = self.program, self.node, target.__name__
        name = node.name.replace(self.kind, kind, 1)
        sent = program.insert(target, (codes, *args), program.type(codes), node, name=name)
        program.set_sharding(sent, steps_sharding(program.sharding(codes), kind, args))
        program.set_origins(sent, ({},))
        program.set_causes(sent, program.causes(node))
        return sent


def _others(shardings: list[Sharding], own: Axes) -> Axes:
    """The axes that cut the values or over which they are partial, without those of the collective."""
    used = [part for sharding in shardings for part in sharding.used_parts]
    ends = part_ends([*used, *own])
    within = split_parts(own, ends)
    return tuple(dict.fromkeys(part for part in split_parts(used, ends) if part not in within))
