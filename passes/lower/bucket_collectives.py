"""bucket_collectives: lowered -> lowered. Collectives of one kind over the same axes go together, over a flat buffer.

::

    a = all_reduce(x, ("dp",), "sum")         b = bucket("all_reduce", ("dp",), (("sum",), ("sum",)), x, y)
    c = all_reduce(y, ("dp",), "sum")   ->    a = b[0];  c = b[1]

Reductions join in the order in which their operands are computed, so that the first bucket starts while backward still
runs. Gathers of stored parameters join for a layer, or for several layers that together are no larger than the largest.
A bucket is closed before it is read, and as soon as it holds its share, at most ``bucket`` bytes (an option). A larger
collective goes alone, and needs no buffer. So a bucket holds less than twice the limit. Reductions of one kind and
dtype over the same axes that nothing reads before the end go in at most ``bytes / bucket`` buckets, rounded up, plus
one. If sums and gathers go in two steps, over axes of two kinds, so do their buckets: a second step does not close the
bucket that it reads, but waits in one of its own.

A stage of a pipeline runs all of a bucket if it needs any of it. So a bucket holds collectives that the same stages run
in the same part of their work; a weight that two stages read goes separately. Invariant: no value changes its sharding.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from shardc.language.machine import CollectiveKind
from shardc.language.mesh import MICROBATCH
from shardc.language.words import Part
from shardc.ops.tier import offload
from shardc.program.coding.content import Contents
from shardc.program.communication import Member, bucket, chain, deferrable, is_early, layer, members, move_before
from shardc.program.lifetime import split
from shardc.program.node import is_view
from shardc.program.program import Program
from shardc.program.stages import has_stages, stages_of

SMALL = 2**20  # bytes; a smaller bucket is not worth a start of its own
Where = frozenset[tuple[int, Part]]  # the stages of a pipeline that run a call, and in which part of their work
REDUCTIONS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter")


def bucket_collectives(program: Program) -> Program:
    """The program with fewer collectives."""
    where, program = _where(program), program.edited()
    _return_last(program)
    sizes: dict[fx.Node, int] = {}  # bytes of each collective that a bucket may hold
    for node in program.calls:
        if node.target is not bucket and (parts := members(node)) and parts[0].args[0] != (MICROBATCH,):
            ends = program.local_type(parts[0].operand), program.local_type(node)
            sizes[node] = max(end.nbytes for end in ends if end is not None)
    _join_reductions(program, _reductions(program, sizes, where))
    for gathers in _gathers(program, sizes, where):
        for node in gathers[1:]:
            move_before(gathers[0], node)
        _join(program, gathers, gathers[0], gathers[0])
    return program


def _is_in_steps(program: Program) -> bool:
    """Whether sums go over fast axes first, so that a bucket of them is read by another."""
    return program.options.zero is not None and bool(program.options.zero.fast_axes)


def _return_last(program: Program) -> None:
    """Move gradients that are copies of a bucket's results, or in sums by steps views of them, to the end.

    In their own place they would close the bucket. The pass ``overlap_collectives`` finds a place for the copies.
    """
    has_views = _is_in_steps(program)
    for node in list(program.calls):
        is_end = (has_views and is_view(node)) or node.target is offload
        if is_end and set(node.users) == {program.output_node}:
            program.output_node.prepend(node)


def _where(program: Program) -> dict[fx.Node, Where]:
    """The stages and parts of work in which each node runs; empty for all nodes without a pipeline."""
    where = defaultdict[fx.Node, Where](frozenset)
    for index, stage in enumerate(stages_of(program).stages if has_stages(program) else ()):
        for part, calls in stage.parts.items():
            for node in calls:
                where[node] |= {(index, part)}
    return where


def _reductions(program: Program, sizes: Mapping[fx.Node, int], where: Mapping[fx.Node, Where]) -> list[list[fx.Node]]:
    """Buckets of small reductions. No node of a bucket is read before its last one, and none reads a later bucket.

    A bucket may hold one node. Reductions that run once for several backwards do not join those that run in each.
    """
    backward, late, limit = set(split(program).backward), deferrable(program), program.options.bucket
    contents, waits = Contents(program), _is_in_steps(program)
    keys: dict[fx.Node, object] = {}
    steps: dict[fx.Node, int] = {}  # 2 for a reduction of a value that is already reduced over other axes
    total: Counter[object] = Counter()
    for node, nbytes in sizes.items():
        part = members(node)[0]
        if part.kind in REDUCTIONS and nbytes < limit:
            steps[node] = 1 + max(steps.get(each, 0) for each in node.all_input_nodes) if waits else 1
            key = _key(contents, node, part), where[node], part.args[1]
            keys[node] = *key, node in backward, node in late, steps[node]
            total[keys[node]] += nbytes
    # All buckets of a key have one size, and there is one more than needed, so that the first can start early.
    full = {key: max(min(limit, SMALL), n / (-(-n // limit) + 1)) if n else limit for key, n in total.items()}
    open_: dict[object, list[fx.Node]] = {}
    done: list[list[fx.Node]] = []

    def awaited(read: Iterable[fx.Node]) -> set[object]:
        """The keys of the open buckets that hold nodes in ``read``, and of the buckets that these read."""
        found = {keys[node] for node in read if node in open_.get(keys.get(node), ())}
        return found.union(*(awaited(node.all_input_nodes) for key in found for node in open_[key]))

    def close(read: Iterable[fx.Node]) -> None:
        closed = awaited(read)
        done.extend(open_.pop(key) for key in in_turn() if key in closed)

    def in_turn() -> list[object]:
        """The keys of open buckets in the order of their steps: a bucket reads only buckets of earlier steps."""
        return sorted(open_, key=lambda key: steps[open_[key][0]])

    for node in program.graph.nodes:
        if node not in keys or not waits:
            close(node.all_input_nodes)
        if node in keys:
            open_.setdefault(keys[node], []).append(node)
            if sum(map(sizes.__getitem__, open_[keys[node]])) >= full[keys[node]]:
                close([node])
    return [*done, *(open_[key] for key in in_turn())]


def _join_reductions(program: Program, buckets: Iterable[list[fx.Node]]) -> None:
    """Join each bucket right behind its last node, or that of a bucket that it reads."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    places: dict[fx.Node, fx.Node] = {}  # by each node of a bucket, the node behind which the bucket is put
    ends: dict[fx.Node, fx.Node] = {}  # the last of the nodes that were put behind such a node
    for nodes in buckets:
        read = [places[each] for node in nodes for each in node.all_input_nodes if each in places]
        place = max([nodes[-1], *read], key=order.__getitem__)
        places.update(dict.fromkeys(nodes, place))
        end = ends.get(place, place)
        if len(nodes) > 1:
            _join(program, nodes, nodes[-1], end)
        elif place is not nodes[0]:
            end.append(nodes[0])
        ends[place] = nodes[-1]


def _gathers(program: Program, sizes: Mapping[fx.Node, int], where: Mapping[fx.Node, Where]) -> list[list[fx.Node]]:
    """Buckets of consecutive gathers of inputs: those of a layer, or of several layers no larger than the largest."""
    runs: dict[tuple[Any, ...], list[list[fx.Node]]] = {}
    layers: dict[tuple[Any, ...], str] = {}
    backward, limit, contents = set(split(program).backward), program.options.bucket, Contents(program)

    def nbytes(nodes: list[fx.Node]) -> int:
        return sum(map(sizes.__getitem__, nodes))

    for node in filter(is_early, sizes):
        part, read_by = members(node)[0], layer(program, node)
        is_second = any(map(members, chain(part.operand) or ()))
        key = is_second, _key(contents, node, part), where[node], node in backward
        run = runs.setdefault(key, [[]])
        if layers.get(key) != read_by or nbytes([*run[-1], node]) > limit:
            run.append([])
        run[-1].append(node)
        layers[key] = read_by
    buckets: list[list[fx.Node]] = []
    for _, run in sorted(runs.items(), key=lambda pair: pair[0][0]):  # those that are gathered again come first
        most = min(limit, max(map(nbytes, run)))
        merged = run[:1]
        for nodes in run[1:]:
            if nbytes(merged[-1] + nodes) <= most:
                merged[-1] = merged[-1] + nodes
            else:
                merged.append(nodes)
        buckets += merged
    return [nodes for nodes in buckets if len(nodes) > 1]


def _key(contents: Contents, node: fx.Node, part: Member) -> tuple[object, ...]:
    """The properties that collectives of one bucket share."""
    program = contents.program
    alike = part.kind, part.args[0], program.type(node).dtype, program.source(node).phase
    if not contents.wire:
        return alike
    # Values that are too few for their codec stay apart from those that are meant by none, to which it would apply.
    return *alike, contents.content(node), contents.steps(node), tuple(contents.codecs(node).items())


def _join(program: Program, nodes: list[fx.Node], like: fx.Node, place: fx.Node) -> None:
    """One bucket for several nodes, right after ``place``, with the source of ``like``; each picks its result."""
    parts = [members(node)[0] for node in nodes]
    args = (parts[0].kind, parts[0].args[0], tuple(part.args[1:] for part in parts))
    types = tuple(program.type(node) for node in nodes)
    name = f"{parts[0].kind}_{'_'.join(parts[0].args[0])}_bucket".replace(":", "_")
    with program.graph.inserting_after(place):
        joined = program.insert(bucket, (*args, *(part.operand for part in parts)), types, like, name=name)
    program.set_sharding(joined, tuple(program.sharding(node) for node in nodes))
    program.set_origins(joined, tuple(program.origin(node) for node in nodes))
    program.set_causes(joined, tuple(cause for node in nodes for cause in program.causes(node)))
    for i, node in reversed(list(enumerate(nodes))):
        if node < joined:
            joined.append(node)
        node.target, node.args = operator.getitem, (joined, i)
        program.set_causes(node, ())
