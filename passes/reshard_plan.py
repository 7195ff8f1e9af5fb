"""The collectives between two shardings as tools are told them, and between two orders of the mesh's devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardc.collective import Collective, Step, group_size, wire_bytes
from shardc.error import ShardingError
from shardc.mesh import Mesh
from shardc.partition import P
from shardc.payload import payload_numel, rechunked_numel
from shardc.permutation import wire_bytes_total
from shardc.sharding import Sharding, TensorType, dtype_name

from .plain_steps import plain_steps
from .plan_reshard import is_open, plan_reshard

if TYPE_CHECKING:
    import torch


def reshard_plan(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, src: P | Sharding, dst: P | Sharding
) -> tuple[Collective, ...]:
    """The collectives of the cheapest way from one sharding to another, without local slices.

    A Sharding may be on a mesh of the same axes with its devices in another order. Raises a ShardingError where a
    sharding does not fit the shape, or ``dst`` is partial where ``src`` is not.
    """
    mesh, type_ = Mesh.of(mesh), _type(shape, dtype)
    before, after = _sharding(mesh, type_, src, "src"), _sharding(mesh, type_, dst, "dst")
    moved = replace(before, mesh=after.mesh)
    if not is_open(moved, after):
        raise ShardingError("dst", after.text(type_), f"src is {before.text(type_)}: no reduction can be opened again",
                            "make dst partial only where src is")  # fmt: skip
    if before.mesh == after.mesh or _holds_alike(before, after.mesh) or _holds_alike(after, before.mesh):
        return tuple(collectives_of_steps(moved, plan_reshard(moved, after, type_), type_))
    return tuple(collectives_of_steps(moved, _reordering_steps(moved, after, type_), type_, is_reordered=True))


def _type(shape: object, dtype: object) -> TensorType:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (-1,)
    if any(isinstance(size, (str, float)) or (isinstance(size, int) and size < 0) for size in sizes):
        raise ShardingError("shape", repr(shape), "it holds the sizes of dims, 0 or more", "write for example (8, 64)")
    if type(dtype).__name__ != "dtype":
        raise ShardingError("dtype", repr(dtype), "it is no dtype of torch", "write for example torch.float32")
    return TensorType(sizes, dtype)  # type: ignore[arg-type]


def _sharding(mesh: Mesh, type: TensorType, said: P | Sharding, who: str) -> Sharding:
    if isinstance(said, P):
        return said.sharding(mesh, type.shape, who)
    if not isinstance(said, Sharding):
        raise ShardingError(who, repr(said), "it is no P and no Sharding", "write for example P('dp', None)")
    is_same = (said.mesh.axis_names, said.mesh.shape) == (mesh.axis_names, mesh.shape)
    if len(said.dims) != len(type.shape) or not is_same:
        raise ShardingError(who, f"{said} on {said.mesh}, shape {list(type.shape)}, {mesh}",
                            "the sharding does not fit: mesh or number of dims",
                            "make the sharding on this mesh for this shape")  # fmt: skip
    return said


def collectives_of_steps(
    before: Sharding, steps: Sequence[Step], type: TensorType, is_reordered: bool = False
) -> Iterator[Collective]:
    """The collectives among the steps; a permute that puts the devices in order sends all."""
    shape = type.shape
    for step in steps:
        if step.kind not in ("view", "shard_slice", "mask_padding"):
            found = _collective(step, before.local_shape(shape), type.dtype)
            is_sent = is_reordered and step.kind == "collective_permute"
            total = found.bytes * step.sharding.mesh.size
            yield replace(found, wire_bytes=found.bytes, wire_bytes_total=total) if is_sent else found
        before, shape = step.sharding, step.shape


def _collective(step: Step, local_shape: tuple[int, ...], dtype: torch.dtype) -> Collective:
    assert step.kind != "view"
    mesh = step.sharding.mesh
    after, count = step.sharding.local_shape(step.shape), group_size(mesh, step.kind, step.args)
    name = dtype_name(dtype)
    if step.kind == "rechunk":
        moved, given = (numel * dtype.itemsize for numel in rechunked_numel(step.args, local_shape))
        total = wire_bytes_total(mesh, step.kind, step.args, given)
        return Collective("collective_permute", step.args[0], name, local_shape, after, moved, given, total)
    payload = payload_numel(step.kind, step.args, count, local_shape, after) * dtype.itemsize
    sent = wire_bytes(step.kind, payload, count)
    total = wire_bytes_total(mesh, step.kind, step.args, sent)
    return Collective(step.kind, step.args[0], name, local_shape, after, payload, sent, total)


# Devices in another order.


def _reordering_steps(src: Sharding, dst: Sharding, type: TensorType) -> Sequence[Step]:
    """Steps of which one is a permute: those before it go by the first mesh, those after by the other."""
    is_plain = not any(cut.minor for cut in src.dims + dst.dims)
    if is_plain and src.is_even(type.shape) and dst.is_even(type.shape):
        return tuple(plain_steps(src, dst, type.shape, reorders=True))
    return (Step("collective_permute", ((), ()), src, type.shape), *plan_reshard(src, dst, type))


def _holds_alike(sharding: Sharding, other: Mesh) -> bool:
    """Whether every device holds the same piece, and the same terms, by either mesh."""
    parts = [*(cut.all_axes for cut in sharding.dims), sharding.partial_axes]
    places = [{mesh.rank(position): position for position in range(mesh.size)} for mesh in (sharding.mesh, other)]
    return all(
        sharding.mesh.index(places[0][rank], axes) == other.index(places[1][rank], axes)
        for rank in range(other.size)
        for axes in parts
    )
