"""bucket_collectives: lowered -> lowered. Collectives of one kind over the same axes go together, over a flat buffer.

::

    a = all_reduce(x, ("dp",), "sum")         b = bucket("all_reduce", ("dp",), (("sum",), ("sum",)), x, y)
    c = all_reduce(y, ("dp",), "sum")   ->    a = b[0];  c = b[1]

Reductions join in the order in which their operands are computed, so that the first bucket starts while backward still
runs. Gathers of stored parameters join for a layer, or for several layers that are together no larger than the largest.
A bucket is closed before it is read, and as soon as it holds its share of at most ``bucket`` bytes, an option. A larger
collective goes alone, and needs no buffer. So a bucket holds less than twice the limit. Reductions of one kind and
dtype over the same axes that nothing reads before the end go in at most ``bytes / bucket`` buckets, rounded up, plus
one.

A stage of a pipeline runs a bucket whole if it needs any of it. So a bucket holds collectives that the same stages run
in the same part of their work; a weight that two stages read goes apart. Invariant: no value changes its sharding.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from shardc.language.collective_kind import CollectiveKind
from shardc.language.mesh import MICROBATCH
from shardc.program.code_motion import deferrable, is_early, layer, move_before
from shardc.program.communication import Member, bucket, members
from shardc.program.lifetime import split
from shardc.program.program import Program
from shardc.program.stages import Part, has_stages, stages_of

SMALL = 2**20  # below it a bucket is not worth a start of its own
Where = frozenset[tuple[int, Part]]  # the stages of a pipeline that run a call, and in which part of their work
REDUCTIONS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter")


def bucket_collectives(program: Program) -> Program:
    """The program with fewer collectives."""
    given, program, limit = program, program.copy(), program.options.bucket
    where = dict(zip(program.graph.nodes, _where(given), strict=True))
    for found in _reductions(program, limit, where):
        _join(program, found, found.nodes[-1])
    for found in _gathers(program, limit, where):
        for node in found.nodes[1:]:
            move_before(found.nodes[0], node)
        _join(program, found, found.nodes[0])
    return program


def _where(program: Program) -> Iterator[Where]:
    """For each node, in order, where it is run; without a pipeline all are alike."""
    found: dict[fx.Node, set[tuple[int, Part]]] = {node: set() for node in program.graph.nodes}
    for index, stage in enumerate(stages_of(program).stages if has_stages(program) else ()):
        for part, calls in stage.parts.items():
            for node in calls:
                found[node].add((index, part))
    yield from map(frozenset, found.values())


@dataclass(slots=True)
class Bucket:
    """Collectives that go together, in program order, and how many bytes they move."""

    nodes: list[fx.Node] = field(default_factory=list)
    nbytes: int = 0

    def add(self, node: fx.Node, nbytes: int) -> None:
        """One more."""
        self.nodes.append(node)
        self.nbytes += nbytes


def _reductions(program: Program, limit: int, where: Mapping[fx.Node, Where]) -> list[Bucket]:
    """Buckets of which no node is read before the last one."""
    open_: dict[object, Bucket] = {}
    done: list[Bucket] = []
    keys = _reduction_keys(program, limit, where)
    total: Counter[object] = Counter()
    for node, key in keys.items():
        total[key] += _nbytes(program, node)
    # All buckets of a key are of one size, and one more than there need be, so that the first can start early.
    full = {
        key: max(min(limit, SMALL), size / (-(-size // limit) + 1)) if size else limit for key, size in total.items()
    }
    for node in program.graph.nodes:
        read = set(node.all_input_nodes)
        done += [open_.pop(key) for key, found in list(open_.items()) if not read.isdisjoint(found.nodes)]
        if node in keys:
            found = open_.setdefault(keys[node], Bucket())
            found.add(node, _nbytes(program, node))
            if found.nbytes >= full[keys[node]]:
                done.append(open_.pop(keys[node]))
    return [found for found in (*done, *open_.values()) if len(found.nodes) > 1]


def _reduction_keys(program: Program, limit: int, where: Mapping[fx.Node, Where]) -> dict[fx.Node, object]:
    """The reductions that are smaller than a bucket, each with what those of one bucket have in common.

    Those that run once for several backwards are not joined to one that runs in each.
    """
    backward, late = set(split(program).backward), deferrable(program)
    sent = [(node, part) for node in program.calls if (part := _sent(node)) is not None and part.kind in REDUCTIONS]
    return {
        node: (_key(program, node, part), where[node], part.args[1], node in backward, node in late)
        for node, part in sent
        if _nbytes(program, node) < limit
    }


def _gathers(program: Program, limit: int, where: Mapping[fx.Node, Where]) -> list[Bucket]:
    """Buckets of gathers of inputs that follow each other: a layer's, or several that are no more than the largest."""
    runs: dict[object, list[Bucket]] = {}
    layers: dict[object, str] = {}
    backward = set(split(program).backward)
    for node in program.calls:
        part = _sent(node)
        if part is None or not is_early(node):
            continue
        nbytes, key = _nbytes(program, node), (_key(program, node, part), where[node], node in backward)
        found, read_by = runs.setdefault(key, [Bucket()]), layer(program, node)
        if layers.get(key) != read_by or found[-1].nbytes + nbytes > limit:
            found.append(Bucket())
        found[-1].add(node, nbytes)
        layers[key] = read_by
    return [found for run in runs.values() for found in _merged(run, limit) if len(found.nodes) > 1]


def _merged(run: list[Bucket], limit: int) -> list[Bucket]:
    """Neighbours go together where they hold no more than the largest alone."""
    size = max(found.nbytes for found in run)
    merged = [run[0]]
    for found in run[1:]:
        if merged[-1].nbytes + found.nbytes <= min(size, limit):
            merged[-1] = Bucket(merged[-1].nodes + found.nodes, merged[-1].nbytes + found.nbytes)
        else:
            merged.append(found)
    return merged


def _sent(node: fx.Node) -> Member | None:
    """A collective by itself."""
    parts = members(node)
    return parts[0] if node.target is not bucket and parts and parts[0].args[0] != (MICROBATCH,) else None


def _key(program: Program, node: fx.Node, part: Member) -> tuple[object, ...]:
    """What collectives of one bucket have in common."""
    return part.kind, part.args[0], program.type(node).dtype, program.source(node).phase


def _nbytes(program: Program, node: fx.Node) -> int:
    ends = program.local_type(members(node)[0].operand), program.local_type(node)
    return max(end.nbytes for end in ends if end is not None)


def _join(program: Program, found: Bucket, place: fx.Node) -> None:
    """One bucket for several nodes, right before one of them; each of them picks its result."""
    parts = [members(node)[0] for node in found.nodes]
    args = (parts[0].kind, parts[0].args[0], tuple(part.args[1:] for part in parts))
    types = tuple(program.type(node) for node in found.nodes)
    shardings = tuple(program.sharding(node) for node in found.nodes)
    name = f"{parts[0].kind}_{'_'.join(parts[0].args[0])}_bucket".replace(":", "_")
    with program.graph.inserting_before(place):
        joined = program.insert(bucket, (*args, *(part.operand for part in parts)), types, place, name=name)
    program.set_sharding(joined, shardings)
    program.set_origins(joined, tuple(program.origin(node) for node in found.nodes))
    program.set_causes(joined, tuple(cause for node in found.nodes for cause in program.causes(node)))
    for i, node in reversed(list(enumerate(found.nodes))):
        if node < joined:
            joined.append(node)
        node.target, node.args = operator.getitem, (joined, i)
        program.set_causes(node, ())
