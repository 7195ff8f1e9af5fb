"""The collectives: the effect of each on a sharding, and the bytes that it moves.

In a *lowered* program they are identities of global values, like the functions below; localize gives them local values
and a runtime executes them. ``axes`` are printed axis parts, major first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from torch import fx

from shardc.language.machine import LOCAL_KINDS, WHOLE_PAYLOAD, CollectiveKind
from shardc.language.mesh import MICROBATCH, Axes, AxisPart, Mesh, merge_parts, part_ends, split_parts
from shardc.language.partition import parse_parts
from shardc.language.sharding import DimSharding, Sharding, num_shards
from shardc.language.size import plain
from shardc.language.windows import overlap_add, rows_sent, windows
from shardc.ops.attention.rules import RINGS
from shardc.ops.contraction import DOT_RINGS
from shardc.program.provenance import Cause, cause_text


def all_gather(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Join the pieces of ``dim`` along ``axes``, which are its minor cuts; afterwards they cut nothing."""
    return x


def shard_slice(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Keep on each rank its piece of ``dim``, with ``axes`` as the new minor cuts. Local."""
    return x


def saved_slice(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """A ``shard_slice`` in forward of a value that backward reads: the piece is saved, and gathered in backward."""
    return x


def all_reduce(x: Any, axes: tuple[str, ...], op: str) -> Any:
    """Complete the partial reduction over ``axes``."""
    return x


def reduce_scatter(x: Any, axes: tuple[str, ...], op: str, dim: int) -> Any:
    """Complete the partial reduction over ``axes``, and keep on each rank its piece of ``dim``."""
    return x


def all_to_all(x: Any, axes: tuple[str, ...], src_dim: int, dst_dim: int) -> Any:
    """Move ``axes`` from the minor end of ``src_dim`` to the minor end of ``dst_dim``."""
    return x


def collective_permute(x: Any, src_axes: tuple[str, ...], dst_axes: tuple[str, ...]) -> Any:
    """Send the local value at index i along ``src_axes`` to index i along ``dst_axes``.

    ``src_axes`` lists the parts that cut before, dim by dim; ``dst_axes`` lists those that cut the same dims
    afterwards, each dim into as many pieces as before.
    """
    return x


def mask_padding(x: Any, axes: tuple[str, ...], dim: int, size: int, inner: int, fill: float) -> Any:
    """Fill the padding of ``dim`` with ``fill``. Local.

    ``axes`` cut ``size`` units of ``inner`` elements (of one rank) each; there may be several such rows in the dim.
    """
    return x


def rechunk(x: Any, axes: tuple[str, ...], dim: int, values: tuple[int, ...], inner: int) -> Any:
    """Cut ``dim`` by ``axes`` into other chunks, in units of ``inner`` elements; ranks exchange what they lack.

    ``values``: the fields of the ``Windows`` that are the new chunks.
    """
    return x


def reshard(x: Any) -> Any:
    """A change of sharding, still abstract; the target is the node's own sharding."""
    return x


COLLECTIVES: dict[Callable[..., Any], CollectiveKind] = {
    all_gather: "all_gather",
    saved_slice: "shard_slice",
    shard_slice: "shard_slice",
    all_reduce: "all_reduce",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
    collective_permute: "collective_permute",
    mask_padding: "mask_padding",
    rechunk: "rechunk",
}
GO_ROUND = (*RINGS, *DOT_RINGS)  # they compute with one chunk while the next is on its way
EXCHANGES: dict[Callable[..., Any], str] = {  # with neighbours; the arguments are a value, axes, a dim and what is sent
    each: each.__name__ for each in (windows, overlap_add, *GO_ROUND)
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    ``axes`` are printed axis parts; shapes are one rank's. ``bytes`` is the payload (the larger of input and output on
    one rank), ``wire_bytes`` the most that any one rank sends, by the ring algorithm, ``wire_bytes_total`` the bytes
    that all ranks send, in a pipeline those of one stage. ``name`` is the node's name, ``source`` the line of the
    user's model, ``node`` the node whose value is moved; ``causes`` say why. In a pipeline it belongs to one ``stage``
    and runs ``times`` times a step; a ``send`` is a message to another stage, which receives it. ``ranks``: the size of
    the group if a rank sends a share of the payload, else 0. ``steps``: the number of messages one after another,
    several in a ring. ``codec``: the codec in which values are sent, or empty.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    dtype: str
    local_shape_in: tuple[int, ...]
    local_shape_out: tuple[int, ...]
    bytes: int
    wire_bytes: int
    wire_bytes_total: int = 0
    name: str = ""
    phase: Literal["forward", "backward", "update"] = "forward"
    node: str = ""
    source: str = ""
    causes: tuple[Cause, ...] = field(default=(), repr=False, compare=False)
    stage: int | None = None
    times: int = 1
    ranks: int = field(default=0, repr=False, compare=False)
    steps: int = 1
    codec: str = ""

    def __repr__(self) -> str:
        when = self.phase if self.times == 1 else f"{self.phase} {self.times} times"
        name = f"{self.name}: " if self.name else ""
        sent = f"{self.wire_bytes} bytes sent{f' as {self.codec}' if self.codec else ''}"
        return f"<{name}{self.kind} over {', '.join(self.axes)}, {when}, {sent}>"

    @property
    def share(self) -> Any:
        """The bytes that a rank sends, not rounded."""
        if self.kind in WHOLE_PAYLOAD or self.ranks in (0, 1):
            return self.wire_bytes
        sent: Any = (2 if self.kind == "all_reduce" else 1) * self.bytes * (self.ranks - 1)
        is_number = isinstance(sent, int) and isinstance(self.ranks, int)
        return Fraction(sent, self.ranks) if is_number else sent / self.ranks

    @property
    def num_values(self) -> int:
        """The number of values that it moves, several for a bucket."""
        return len(self.node.split(", "))

    @property
    def cause(self) -> str:
        """The causes in a few words, with the annotations that they come from."""
        return cause_text(self.causes)


def wire_bytes(kind: CollectiveKind, payload: int, group_size: int) -> int:
    """Bytes that one rank sends, by the ring algorithms: ``payload`` is the larger of its input and output.

    all_gather, reduce_scatter and all_to_all send (n-1)/n of it, all_reduce twice that, permute and send all of it.
    """
    if kind in LOCAL_KINDS or group_size == 1:
        return 0
    if kind in WHOLE_PAYLOAD:
        return payload
    once = payload * (group_size - 1) // group_size
    return 2 * once if kind == "all_reduce" else once


def collective_kind(node: fx.Node) -> CollectiveKind:
    """The kind of a node that is a collective."""
    return COLLECTIVES[node.target]  # type: ignore[index]


def adds_microbatches(node: fx.Node) -> bool:
    """Whether a node is a sum over microbatches, which is local to a rank."""
    return node.target is all_reduce and node.args[1] == (MICROBATCH,)


def group_size(mesh: Mesh, kind: CollectiveKind, args: tuple[Any, ...]) -> int:
    """The number of ranks in one group of a collective, given its arguments after the value."""
    axes = parse_parts(args[0], mesh)
    if kind == "collective_permute":
        before, after = ([part for part in parts if part.size != 1] for parts in (axes, parse_parts(args[1], mesh)))
        return 1 if before == after else num_shards(axes)
    return num_shards(axes)


# The effect of a collective on a sharding and on local shapes.


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reshard: a call of the function ``kind`` with ``args`` after the value, or a view to ``shape``.

    ``sharding`` and ``shape`` (global) are those of the result.
    """

    kind: CollectiveKind | Literal["view"]
    args: tuple[Any, ...]
    sharding: Sharding
    shape: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        """The axis parts over which it acts; for a permute, those that cut before it."""
        return () if self.kind == "view" else parse_parts(self.args[0], self.sharding.mesh)


@lru_cache(maxsize=4096)
def steps_sharding(src: Sharding, kind: CollectiveKind, args: tuple[Any, ...]) -> Sharding:
    """The sharding after a collective on a value of sharding ``src``, given its arguments after the value.

    Parts of an axis that then follow each other on a dim are joined.
    """
    axes = parse_parts(args[0], src.mesh)
    match kind:
        case "mask_padding":
            return src
        case "all_gather":
            return _uncut(src, axes, args[1])
        case "shard_slice":
            return _cut(src, axes, args[1])
        case "all_to_all":
            return _cut(_uncut(src, axes, args[1]), axes, args[2])
        case "all_reduce":
            return _reduced(src, axes, args[1])
        case "reduce_scatter":
            return _cut(_reduced(src, axes, args[1]), axes, args[2])
        case "collective_permute":
            return _permuted(src, axes, parse_parts(args[1], src.mesh))
        case "rechunk":
            return src.with_dim(args[1], DimSharding(axes, ((args[3], ()),) if args[3] > 1 else ()))
    raise AssertionError(f"{kind} does not change a sharding")


def _uncut(src: Sharding, axes: Axes, dim: int) -> Sharding:
    """Remove ``axes`` from the minor end of a dim."""
    cut = src.dims[dim]
    ends = part_ends(cut.axes + axes)
    parts, gone = split_parts(cut.axes, ends), split_parts(axes, ends)
    assert gone and not cut.minor and parts[-len(gone) :] == gone, (
        f"{axes} are not the minor cuts of dim {dim} of {src}"
    )
    return src.with_dim(dim, DimSharding(merge_parts(parts[: -len(gone)])))


def _cut(src: Sharding, axes: Axes, dim: int) -> Sharding:
    """Add ``axes`` at the minor end of a dim."""
    cut = src.dims[dim]
    busy = [part for part in src.used_parts if any(part.overlaps(new) for new in axes)]
    assert not cut.minor and not busy, f"{axes} cannot cut dim {dim} of {src}"
    return src.with_dim(dim, DimSharding(merge_parts(cut.axes + axes)))


def _reduced(src: Sharding, axes: Axes, op: str) -> Sharding:
    """Remove ``axes`` from the partial ones."""
    ends = part_ends(src.partial_axes + axes)
    gone = split_parts(axes, ends)
    partial = [(piece, by) for part, by in src.partial for piece in split_parts((part,), ends)]
    assert all((part, op) in partial for part in gone), f"no {op} over {axes} is open in {src}"
    return replace(src, partial=tuple((part, by) for part, by in partial if part not in gone))


def _permuted(src: Sharding, axes: Axes, new_axes: Axes) -> Sharding:
    """Replace on each dim the run of ``axes`` by as many pieces of ``new_axes``."""
    ends, gone, new = part_ends(axes), split_parts(axes, part_ends(src.cut_axes)), list(new_axes)
    removed: Axes = ()
    dims = list(src.dims)
    for dim, cut in enumerate(src.dims):
        parts = split_parts(cut.axes, ends)
        run = [i for i, part in enumerate(parts) if part in gone]
        if run:
            first, last = run[0], run[-1] + 1
            assert not cut.minor and len(run) == last - first, f"{gone} is no run of {cut}"
            removed += parts[first:last]
            dims[dim] = DimSharding(merge_parts(parts[:first] + _take(new, _weight(parts[first:last])) + parts[last:]))
    assert removed == gone and not new, f"{axes} cannot give way to {new_axes} in {src}"
    return replace(src, dims=tuple(dims))


def _take(parts: list[AxisPart], weight: int) -> Axes:
    """Remove and return the leading parts that cut into ``weight`` pieces."""
    count = 0
    while count < len(parts) and _weight(tuple(parts[: count + 1])) <= weight:
        count += 1
    leading = tuple(parts[:count])
    assert _weight(leading) == weight, f"{parts} cannot make {weight} pieces"
    del parts[:count]
    return leading


def _weight(parts: Axes) -> int:
    """The number of pieces that parts cut into; a part of a single rank counts as two, so that it has a position."""
    return math.prod(max(part.size, 2) for part in parts)


def source_position(mesh: Mesh, position: int, src: Axes, dst: Axes) -> int:
    """The position whose value a position receives when index i along ``src`` goes to index i along ``dst``.

    Along the parts that are only in ``dst`` the value is replicated. The replica is taken whose index there is our own
    index along the parts that are only in ``src``. So the exchange is a permutation: every rank sends one value and
    receives one.
    """
    ends = part_ends(src + dst)
    src, dst = split_parts(src, ends), split_parts(dst, ends)
    assert num_shards(src) == num_shards(dst), (src, dst)
    src_only = tuple(part for part in src if part not in dst)
    dst_only = tuple(part for part in dst if part not in src)
    moved = _with_index(mesh, position, dst_only, mesh.index(position, src_only))
    return _with_index(mesh, moved, src, mesh.index(position, dst))


def _with_index(mesh: Mesh, position: int, axes: Axes, index: int) -> int:
    """The position with another index along these parts."""
    for part in reversed(axes):
        index, digit = divmod(index, part.size)
        ranks_of_axis = math.prod(mesh.shape[mesh.axis_names.index(part.name) :])
        stride = ranks_of_axis // (part.pre * part.size)
        position += (digit - mesh.coordinate(position, part)) * stride
    return position


def wire_bytes_total(mesh: Mesh, kind: str, args: tuple[Any, ...], wire: int) -> int:
    """Bytes that all ranks together send in a collective in which one rank sends at most ``wire``.

    ``args`` are those after the value. In most kinds all ranks send that much. In a permute some keep their value.
    In exchanges with neighbours (``windows``, ``overlap_add``, ``rechunk``) each rank sends what others need; if sizes
    are expressions, all are taken to send the most.
    """
    ranks = math.prod(size for name, size in mesh.sizes.items() if name != MICROBATCH)
    is_exchange = kind in ("windows", "overlap_add", "rechunk")
    if not isinstance(wire, int) or (is_exchange and not all(isinstance(value, int) for value in args[2])):
        return wire * ranks
    if is_exchange:
        sent, received = rows_sent(args[2])
        rows = received if kind == "overlap_add" else sent
        return wire // max(rows) * sum(rows) * ranks // len(rows) if wire else 0
    if kind == "collective_permute" and wire:
        src, dst = (parse_parts(axes, mesh) for axes in args[:2])
        names = {part.name for part in src + dst}
        among = Mesh(device_ids=None, **{name: size for name, size in mesh.sizes.items() if name in names})
        giving = sum(source_position(among, i, src, dst) != i for i in range(among.size))
        return wire * giving * ranks // among.size
    return wire * ranks


Fit = tuple[int, int]  # a dim, and the size that it must have


def fits(
    kind: CollectiveKind, args: tuple[Any, ...], count: int, src_shape: tuple[int, ...], dst_shape: tuple[int, ...]
) -> tuple[Fit | None, Fit | None]:
    """The sizes to which a collective in groups of ``count`` pads a dim of its operand, and cuts one of its result.

    The shapes are local; ``args`` are the arguments after the value. Collectives cut and join equal pieces: a dim that
    is cut unevenly is padded before, or shortened after. None if the sizes fit.
    """
    before: Fit | None = None
    after: Fit | None = None
    if kind in ("all_gather", "all_to_all") and dst_shape[args[1]] != count * src_shape[args[1]]:
        after = args[1], dst_shape[args[1]]
    if kind in ("shard_slice", "reduce_scatter", "all_to_all"):
        dim = args[1 if kind == "shard_slice" else 2]
        before = (dim, count * dst_shape[dim]) if src_shape[dim] != count * dst_shape[dim] else None
    return before, after


def payload_numel(
    kind: CollectiveKind, args: tuple[Any, ...], count: int, src_shape: tuple[int, ...], dst_shape: tuple[int, ...]
) -> int:
    """Elements of the larger of one rank's input and output, padded to equal pieces."""
    before, after = fits(kind, args, count, src_shape, dst_shape)
    sizes = list(dst_shape if kind == "all_gather" else src_shape)
    if kind == "all_gather" and after:
        sizes[after[0]] = count * src_shape[after[0]]
    elif before:
        sizes[before[0]] = before[1]
    return plain(math.prod(sizes))


def wire_numel(step: Step, src_shape: tuple[int, ...]) -> int:
    """Elements that one rank sends in a step by the ring algorithms, given the local shape before it."""
    if step.kind == "view":
        return 0
    if step.kind == "rechunk":
        return rechunked_numel(step.args, src_shape)[1]
    count = group_size(step.sharding.mesh, step.kind, step.args)
    dst_shape = step.sharding.local_shape(step.shape)
    return wire_bytes(step.kind, payload_numel(step.kind, step.args, count, src_shape, dst_shape), count)


def rechunked_numel(args: tuple[Any, ...], src_shape: tuple[int, ...]) -> tuple[int, int]:
    """The most elements that a rank sends or receives in a ``rechunk``, and the most that one sends."""
    _, dim, values, _ = args
    sends, receives = map(max, rows_sent(values))
    row = math.prod(size for i, size in enumerate(src_shape) if i != dim)
    return plain(max(sends, receives) * row), plain(sends * row)
