"""Attention over cut positions as a ring: keys and values go round, and each rank joins the parts its queries see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import fx

from shardc.language.errors import ShardingError
from shardc.language.mesh import WITHOUT_EFFECT
from shardc.language.sharding import TensorType, ceil_div, num_shards
from shardc.ops.attention.kernels import TILED_FAMILY
from shardc.ops.attention.ring import POSITIONS, Ring, ring_bytes, wide_dims
from shardc.ops.attention.rules import BACKWARD, FORWARD, RINGS, ring_attention, ring_attention_backward
from shardc.ops.attention.tiled import TILED, TILED_MASK_BACKWARD
from shardc.options import GATHER, RING, ULYSSES
from shardc.program.communication import ring_of
from shardc.program.node import arguments, operand
from shardc.program.program import Program

from ..emitter import Emitter
from .along import Along, Results, Windowed
from .mask import Placed, as_wide, mask_program
from .share_heads import HEADS, Shared, with_heads, with_positions

DETOUR = 3  # factor on the bytes of sharing heads in place of nested chunks, which move axis by axis


@dataclass(frozen=True, slots=True)
class Rings(Windowed):
    """A kernel of attention, in chunks of its positions."""

    def moved(self, along: Along) -> int | None:
        """Bytes that all ranks together send: each chunk of keys and values goes to all ranks that see any of it.

        In backward their gradients go with them. None if the mask needs a gradient, or if heads are cut instead.
        """
        if not self._may_be_apart(along):
            return None
        ring = _ring(along)[0]
        ranks = _sharing_heads(along, ring)
        if ranks == along.count and not _is_made_in_tiles(along, ring, ranks):
            return None  # all axes of positions move to heads, see choose_dims
        return along.count * _sent(along, ring, ranks, RINGS[along.node.target in BACKWARD])

    def _may_be_apart(self, along: Along) -> bool:
        mask = along.given.get("grad_input_mask")
        return along.dim == POSITIONS and not (mask and mask[3])

    def ways(self, along: Along) -> list[tuple[str, int]]:
        """The possible ways: keys and values go round, ranks share heads, or each rank gathers all keys."""
        if not self._may_be_apart(along):
            return []
        ring, kind = _ring(along)[0], RINGS[along.node.target in BACKWARD]
        chosen, may_travel = (_sharing_heads(along, ring), ring.travels), _may_travel(ring)
        ways = [(ranks, may_travel) for ranks in _divisors(along.count) if _may_share(along, ranks)]
        found = {way: _sent(along, replace(ring, travels=way[1]), way[0], kind) for way in [*ways, (1, False)]}
        found = {chosen: found[chosen], **found}
        return [(way_text(along.count, *way), nbytes) for way, nbytes in found.items()]


def _sent(along: Along, ring: Ring, ranks: int, target: Any) -> int:
    """Bytes that one rank sends in attention, or in its backward, if groups of ``ranks`` ranks share heads.

    In a group, queries, keys, values and results, or their gradients, go by all_to_all. Between groups, keys and values
    go round a ring or are gathered.
    """
    given = along.given
    queries, keys, values = (_padded(along, given[name]) for name in ("query", "key", "value"))
    results, count = queries.nbytes // queries.shape[3] * values.shape[3], along.count // ranks
    to_heads = (queries.nbytes + keys.nbytes + values.nbytes + results) * (ranks - 1) // (along.count * ranks)
    to_heads *= DETOUR if along.nested else 1
    if not ring.travels:
        return to_heads + (keys.nbytes + values.nbytes) * (count - 1) // (count * ranks)
    chunk = ceil_div(keys.shape[POSITIONS], count)
    chunks = (TensorType((*x.shape[:2], chunk, *x.shape[3:]), x.dtype) for x in (keys, values))
    in_ring = ring_bytes(replace(ring, count=count), *chunks, is_backward=target is ring_attention_backward)
    return to_heads + in_ring // ranks


def _padded(along: Along, x: fx.Node) -> TensorType:
    """The type of a value as it is sent: padded to chunks of equal length."""
    type_ = along.emit.type(x)
    length = along.count * ceil_div(type_.shape[POSITIONS], along.count)
    return replace(type_, shape=(*type_.shape[:POSITIONS], length, *type_.shape[POSITIONS + 1 :]))


def _sharing_heads(along: Along, ring: Ring) -> int:
    """The number of ranks in each group that shares heads instead of positions; by default the number that sends least.

    It is 1 if the model is given a mask with a row for each query, or learns one, since a rank would need whole rows.
    It is not all ranks if the model makes such a mask and ranks cannot make it tile by tile.
    """
    program, way = along.emit.program, along.emit.program.options.attention
    if way in (RING, GATHER):
        return 1
    ways = [ranks for ranks in _divisors(along.count) if _may_share(along, ranks)]
    if way == ULYSSES:
        if ways[-1] == 1:
            raise _undivided(along)
        return ways[-1]
    dims = _mask_dims(ring)
    if "both" in dims or _learns_mask(along.node):
        return 1
    if "row" in dims and ways[-1] == along.count and not _is_made_in_tiles(along, ring, along.count):
        ways.pop()
    kinds = RINGS if _has_backward(program) else RINGS[:1]
    return min(ways, key=lambda ranks: sum(_sent(along, ring, ranks, kind) for kind in kinds))


def _divisors(count: int) -> list[int]:
    return [ranks for ranks in range(1, count + 1) if count % ranks == 0]


def way_text(count: int, ranks: int, travels: bool) -> str:
    """In words, the way to compute attention on ``count`` ranks where groups of ``ranks`` share heads."""
    rest = f"keys and values go round {count // ranks} ranks" if travels else "each gathers all keys and values"
    if ranks == 1:
        return rest
    return f"{ranks} ranks share heads in place of positions{f', {rest}' * (ranks < count)}"


def _is_made_in_tiles(along: Along, ring: Ring, ranks: int) -> bool:
    """Whether the mask has a row for each query and ranks that share heads can make it tile by tile from vectors."""
    dims = _mask_dims(ring)
    return "row" in dims and "both" not in dims and Shared.by(along, ranks) is not None


def _mask_dims(ring: Ring) -> set[str]:
    """The dims of scores along which the tensors of the mask extend: ``row``, ``column`` or ``both``."""
    return {leaf.along for leaf in ring.mask.leaves} if ring.mask is not None else set()


def _learns_mask(attention: fx.Node) -> bool:
    """Whether attention, a forward or a backward call, needs the gradient of its mask."""
    behind = (user for item in attention.users for user in item.users)
    return any(node.target is TILED_MASK_BACKWARD for node in (attention, *behind))


def _may_share(along: Along, ranks: int) -> bool:
    key = along.given["key"]
    sharding, heads = along.emit.program.sharding(key), along.emit.shape(key)[HEADS]
    if heads % (num_shards(sharding.dims[HEADS].all_axes) * ranks):
        return False
    return ranks in (1, along.count) or Shared.by(along, ranks) is not None


def _has_backward(program: Program) -> bool:
    targets = (*BACKWARD, ring_attention_backward)
    return any(program.graph.find_nodes(op="call_function", target=target) for target in targets)


def _undivided(along: Along) -> ShardingError:
    program, key = along.emit.program, along.given["key"]
    heads, positions = along.emit.shape(key)[HEADS : POSITIONS + 1]
    what, problem = f"{heads} heads of keys", f"the {along.count} ranks that share the positions cannot share the heads"
    axes = program.sharding(key).dims[HEADS].all_axes
    each = heads // num_shards(axes)
    if axes:
        what = f"{what}, {each} to a rank since {', '.join(part.name for part in axes)} cuts them"
    if gcd(each, along.count) > 1:
        what = f"{what}, {along.size(along.given['query'])} queries and {positions} keys on {program.mesh}"
        problem = f"{problem}: some can, where lengths divide and the last of the axes of positions has as many ranks"
    return ShardingError(
        f"attention={ULYSSES!r}, {program.source(along.node).place}", what, problem, "say attention='ring'"
    )


def _mask(along: Along) -> fx.Node | None:
    mask: fx.Node | None = along.given.get("attn_mask") or along.given.get("attn_bias")
    return mask


def _ring(along: Along) -> tuple[Ring, list[Placed]]:
    """The ring of an op, and the values that its mask is made of."""
    given, mask, program = along.given, _mask(along), along.emit.program
    lengths = along.size(given["query"]), along.size(given["key"])
    family, travels = (FORWARD | BACKWARD)[along.node.target], program.options.attention != GATHER
    ring = Ring(family, along.count, *lengths, given["is_causal"], given["scale"], travels, nested=along.nested)
    ring = replace(ring, dropout=given.get("dropout_p", 0.0), draw=given.get("draw", 0))
    ring = replace(ring, score_text=given.get("score_mod", ""))
    if mask is None:
        return ring, []
    if along.node.target is TILED_MASK_BACKWARD:
        ring = replace(ring, of_mask=wide_dims(along.emit.shape(mask)))
    made, leaves = mask_program(program, mask, ring.family == TILED_FAMILY)
    if not leaves:
        return ring, []
    ring = replace(ring, made_by=astuple(made))
    return replace(ring, travels=travels and _may_travel(ring)), leaves


def _may_travel(ring: Ring) -> bool:
    """Whether keys may go round: not with torch's kernels and a mask that adds numbers."""
    return ring.mask is None or ring.family == TILED_FAMILY or not ring.mask.may_lower


def _in_place(along: Along) -> Results:
    """The op as a ring of all ranks that share the positions, or of groups whose ranks share heads."""
    assert along.chosen is not None
    asked = replace(along, emit=along.chosen)
    ranks = _sharing_heads(asked, _ring(asked)[0])
    shared = Shared.by(asked, ranks) if ranks > 1 else None
    if shared is None:
        return as_ring(along)
    names = ["query", "key", "value"]
    is_backward = along.node.target in BACKWARD
    read = [*names, *([_grad(along), "out", "logsumexp"] if is_backward else [])]
    operands = with_heads(along.emit, shared, read)
    results = as_ring(replace(along, count=along.count // ranks), operands=operands)
    assert isinstance(results, list)
    return with_positions(along.emit, shared, results, names if is_backward else names[:1])


def _grad(along: Along) -> str:
    return "grad_out" if "grad_out" in along.given else "grad_out_"


def as_ring(
    along: Along, in_zigzag: tuple[bool, bool] = (False, False), operands: Mapping[str, fx.Node] | None = None,
    order: Callable[[fx.Node], fx.Node] = lambda leaf: leaf,
) -> Results:  # fmt: skip
    """The op as a ring.

    ``in_zigzag``: whether queries, and keys, are in zigzag. ``operands``: replacements of the op's own. ``order``:
    brings the rows of a value that the mask is made of, ``[samples, heads, rows, columns]``, into the order of queries.
    """
    emit, given, (ring, made_of) = along.emit, {**along.given, **(operands or {})}, _ring(along)
    ring = replace(ring, in_zigzag=in_zigzag)
    leaves = [
        order(as_wide(emit, leaf, *each))
        for leaf, each in zip(ring.mask.leaves if ring.mask else (), made_of, strict=True)
    ]
    leaves += [given["random"], given["first"]] if ring.dropout else []
    q, k, v = (given[name] for name in ("query", "key", "value"))
    fixed, more = ((), POSITIONS, ring.values), emit.program.types(along.node)
    if along.node.target in FORWARD:
        results = emit.results(emit(ring_attention, q, *fixed, k, v, *leaves))
        # Lengths and seeds: only the backward reads them, and it is taken apart too.
        return [*results, *(emit(torch.ops.aten.zeros.default, []) for _ in more[len(results) :])]
    call = emit(
        ring_attention_backward, given[_grad(along)], *fixed, q, k, v, given["out"], given["logsumexp"], *leaves
    )
    results = emit.results(call)
    return [*results, *[None] * len(more[len(results) :])]


def learned_masks(program: Program) -> list[tuple[fx.Node, fx.Node]]:
    """Attention by torch's kernels whose mask needs a gradient, each with its backward."""
    pairs = list[tuple[fx.Node, fx.Node]]()
    for node in program.calls:
        given = arguments(node) if node.target in BACKWARD else {}
        if given.get("grad_input_mask", [False])[-1] and not given["is_causal"]:
            forward, _ = program.value(given["logsumexp"])
            pairs += [(forward, node)] if forward.target in FORWARD else []
    return pairs


def with_own_kernels(program: Program, pairs: Iterable[tuple[fx.Node, fx.Node]]) -> Program:
    """The program with our own kernels for these attentions, which can run as a ring with the gradient of a mask."""
    for forward, backward in pairs:
        given = arguments(forward)
        options = (None, None, 0.0, 0, False, given["attn_bias"], given["scale"])
        _replace(program, forward, TILED, [given[name] for name in ("query", "key", "value")], options)
        given = arguments(backward)
        names = ("grad_out_", "query", "key", "value", "out", "logsumexp")
        _replace(program, backward, TILED_MASK_BACKWARD, [given[name] for name in names], options)
    return program


def _replace(program: Program, node: fx.Node, op: Any, operands: Sequence[fx.Node], options: tuple[Any, ...]) -> None:
    with program.graph.inserting_before(node):
        emit = Emitter(program, node)
        results = emit.results(emit(op, *operands, *options))
        more = program.types(node)[len(results) :]  # seeds: only the backward reads them, and it is replaced too
        program.replace(node, [*results, *(emit(torch.ops.aten.zeros.default, []) for _ in more)])


def writes_out_softmax(program: Program) -> bool:
    """Whether a program has a softmax of its own, as attention without torch's kernels does."""
    return any(node.target in WRITTEN_OUT for node in program.calls)


def without_effect(program: Program, has_softmax: bool) -> list[str]:
    """A note if the user asks for rings or shared heads and no attention has them.

    ``has_softmax``: of the program before any op was taken apart, see ``writes_out_softmax``.
    """
    way = program.options.attention
    if way not in WITHOUT_EFFECT:
        return []
    rings = [ring for node in program.calls if (ring := ring_of(node)) is not None]
    if any(way == ULYSSES or ring.travels for ring in rings):
        return []
    fused = [node for node in program.calls if node.target in FORWARD]
    if any(program.sharding(operand(node)).dims[POSITIONS].all_axes for node in fused):
        return []  # all ranks share heads, see choose_dims
    if rings:
        why, remedy = "a mask adds numbers to scores, so that keys are gathered", "make it of True and False"
    elif fused:
        why, remedy = "none has its positions cut", "cut positions of an input"
    elif has_softmax:
        why = "softmax is written out, or a function changes scores"
        remedy = "write F.scaled_dot_product_attention, in transformers 'sdpa'"
    else:
        why, remedy = "the model has none", f"leave attention={way!r} out"
    return [f"{WITHOUT_EFFECT[way]}, as {why}: {remedy}"]


WRITTEN_OUT = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
ATTENTION: dict[Any, Windowed] = {op: Rings(lambda along: [], _in_place, nests=True) for op in (*FORWARD, *BACKWARD)}
