"""encode_collectives: lowered -> lowered. Collectives send codes in place of values, as the option ``wire`` says.

::

    y = all_gather(x, ("dp",), 0)        ->      c = encode("all_gather", ("dp",), ((0,),), "int8", x)
                                                 d = all_gather(c, ("dp",), 0)
                                                 y = decode("all_gather", ("dp",), ((0,),), "int8", d)

A reduce_scatter becomes an all_to_all, whose results are added when they are decoded; an all_reduce does that and
gathers the codes of the sums. So sums are made of decoded values, and every rank that holds a value has decoded it from
the same codes, the rank that encoded it too. In a pipeline the codes of a message are made by the stage that sends it,
and decoded by the one that it is for.

Invariant: every value that was there keeps its type and its sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.language.mesh import Axes, merge_parts, part_ends, split_parts
from shardc.language.partition import parse_parts
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div, num_shards
from shardc.ops.codes import codes_dtype, sum_dtype
from shardc.program.coding.content import Contents
from shardc.program.coding.local import piece_of
from shardc.program.coding.nodes import add_codes, decode, encode
from shardc.program.collective import all_gather, all_to_all, collective_permute, group_size, steps_sharding
from shardc.program.communication import bucket, members
from shardc.program.program import Program
from shardc.program.stages import Crossing, has_stages, stages_of
from shardc.wire import Codec


def encode_collectives(program: Program) -> Program:
    """The program whose collectives send codes where that is asked for."""
    if not program.options.wire:
        return program
    program = program.edited()
    contents = Contents(program)
    codecs = {node: codec for node in program.calls if (codec := contents.codec(node))}
    messages = list(_messages(program, contents)) if has_stages(program) else []
    for message in messages:
        _encode_message(program, *message)
    for node, codec in codecs.items():
        with program.graph.inserting_before(node):
            result = _Coded(program, node, codec).result()
        for user in list(node.users) if node.target is bucket else ():
            user.args = (result, user.args[1])
        node.replace_all_uses_with(result)
        program.graph.erase_node(node)
    return program


Message = tuple[fx.Node, Codec, Crossing, tuple[fx.Node, ...]]


def _messages(program: Program, contents: Contents) -> Iterator[Message]:
    """The values that a rank sends to another one in each microbatch, with their codecs and what reads them there."""
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
    """Let the stage that a value is sent to read what it decodes."""
    type_, asked = program.local_type(node), ("send", (), ((),), codec.name)
    assert type_ is not None and program.mesh is not None
    senders = DimSharding(merge_parts(_others([program.sharding(node)], ())))
    codes_type = TensorType((num_shards(senders.axes), 1, codec.length(type_.numel)), codes_dtype(codec))
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
    """Makes the nodes of a collective that sends codes."""

    def __init__(self, program: Program, node: fx.Node, codec: Codec) -> None:
        assert program.mesh is not None
        self.program, self.node, self.codec, self.parts = program, node, codec, members(node)
        self.kind, (self.axes, *_) = self.parts[0].kind, self.parts[0].args
        self.count = group_size(program.mesh, self.kind, self.parts[0].args)
        own, shardings = parse_parts(self.axes, program.mesh), [program.sharding(part.operand) for part in self.parts]
        self._senders = DimSharding(merge_parts(_others(shardings, own) + own))
        values = program.value_type(program.value(self.parts[0].operand))
        self._sum_dtype = sum_dtype(values.dtype)

    def result(self) -> fx.Node:
        """Insert all nodes; the last one has the results of the collective."""
        asked = self.kind, self.axes, tuple(part.args[1:] for part in self.parts), self.codec.name
        operands = [part.operand for part in self.parts]
        receivers, length = self._row()
        codes = self._codes(encode, (*asked, *operands), receivers, length)
        if self.kind == "collective_permute":
            arrived = self._send(collective_permute, codes, self.parts[0].args)
        elif self.kind == "all_gather":
            arrived = self._send(all_gather, codes, (self.axes, 0))
        else:
            arrived = self._send(all_to_all, codes, (self.axes, 0, 1))
        if self.kind == "all_reduce":
            arrived = self._send(all_gather, self._codes_of_sums(arrived, length), (self.axes, 0))
        program, node = self.program, self.node
        types = program.types(node) if program.has_many(node) else program.type(node)
        result = program.insert(decode, (*asked, arrived), types, node, name=f"decode_{node.name}")
        shardings = program.shardings(node)
        program.set_sharding(result, shardings if program.has_many(node) else shardings[0])
        program.set_origins(result, program.origins(node))
        return result

    def _row(self) -> tuple[int, int]:
        """The rows that a rank sends, and the length of each."""
        length, shapes = self.codec.length, [self.program.local_type(part.operand) for part in self.parts]
        numels = [type_.numel for type_ in shapes if type_ is not None]
        if self.kind == "all_reduce":
            unit = self.codec.block or 1
            return self.count, length(unit * ceil_div(sum(ceil_div(numel, unit) for numel in numels), self.count))
        if self.kind in ("all_gather", "collective_permute"):
            return 1, sum(map(length, numels))
        pieces = [piece_of(self.program, part.operand, part.kind, part.args) for part in self.parts]
        return self.count, sum(length(math.prod(piece)) for piece in pieces)

    def _codes(self, target: Any, args: tuple[Any, ...], receivers: int, length: int) -> fx.Node:
        type_ = TensorType((num_shards(self._senders.axes), receivers, length), codes_dtype(self.codec))
        codes = self.program.insert(target, args, type_, self.node, name=f"encode_{self.node.name}")
        return self._cut(codes, 3)

    def _codes_of_sums(self, arrived: fx.Node, length: int) -> fx.Node:
        program, node, unit = self.program, self.node, self.codec.length(1)
        numel = length // unit * (self.codec.block or 1)
        type_ = TensorType((num_shards(self._senders.axes), numel), self._sum_dtype)
        sums = program.insert(add_codes, (self.codec.name, arrived), type_, node, name=f"sum_{node.name}")
        args = "all_gather", self.axes, ((0,),), self.codec.name, self._cut(sums, 2)
        return self._codes(encode, args, 1, length)

    def _cut(self, node: fx.Node, ndim: int) -> fx.Node:
        """Let the first dim of a node be cut by the axes along which senders differ."""
        assert self.program.mesh is not None
        self.program.set_sharding(node, Sharding(self.program.mesh, (self._senders, *[WHOLE] * (ndim - 1))))
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
