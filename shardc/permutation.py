"""Where values go that change places: which position gives to which, and how many bytes all of them send."""

from __future__ import annotations

import math
from typing import Any

from shardc.mesh import MICROBATCH, Axes, AxisPart, Mesh, part_ends, split_parts
from shardc.partition import parse_parts
from shardc.sharding import num_shards
from shardc.window import rows_sent


def source_position(mesh: Mesh, position: int, src: Axes, dst: Axes) -> int:
    """The position whose value a position receives when index i along ``src`` goes to index i along ``dst``.

    Along the parts that are in ``dst`` alone the value is replicated; the replica with our own index along the parts
    in ``src`` alone is taken, which makes the exchange a permutation: every rank sends one value and receives one.
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
        position += (digit - mesh.coordinate(position, part)) * _stride(mesh, part)
    return position


def _stride(mesh: Mesh, part: AxisPart) -> int:
    """How far apart two positions are whose coordinates along a part differ by one."""
    i = mesh.axis_names.index(part.name)
    return math.prod(mesh.shape[i:]) // (part.pre * part.size)


def wire_bytes_total(mesh: Mesh, kind: str, args: tuple[Any, ...], wire: int) -> int:
    """Bytes that all ranks together send in a collective of which one rank sends at most ``wire``.

    ``args`` are those after the value. In most kinds all send alike. In a permute some ranks keep what they have, and
    of exchanges with neighbours (``windows``, ``overlap_add``, ``rechunk``) each sends what others need of it; where
    bytes are an expression it is as if all sent the most.
    """
    ranks = math.prod(size for name, size in mesh.sizes.items() if name != MICROBATCH)
    if not isinstance(wire, int):
        return wire * ranks
    if kind in ("windows", "overlap_add", "rechunk"):
        gives, takes = rows_sent(args[2])
        rows = takes if kind == "overlap_add" else gives
        return wire // max(rows) * sum(rows) * ranks // len(rows) if wire else 0
    if kind == "collective_permute" and wire:
        src, dst = (parse_parts(axes, mesh) for axes in args[:2])
        among = _along(mesh, src + dst)
        giving = sum(source_position(among, i, src, dst) != i for i in range(among.size))
        return wire * giving * ranks // among.size
    return wire * ranks


def _along(mesh: Mesh, axes: Axes) -> Mesh:
    """The mesh of these axes alone."""
    names = {part.name for part in axes}
    return Mesh(device_ids=None, **{name: size for name, size in mesh.sizes.items() if name in names})
