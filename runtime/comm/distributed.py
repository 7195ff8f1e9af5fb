"""torch.distributed: this rank's collectives over the process groups of a DeviceMesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.language.errors import ShardingError
from shardc.language.mesh import Axes, Mesh, part_ends, split_parts
from shardc.language.partition import parse_parts
from shardc.language.sharding import Sharding, num_shards
from shardc.program.collective import source_position, wire_bytes

from . import functional, messages
from .comm import AtPositions, Flat, PartNames, Places, Results, Rows, Tensors, Traffic, start_packed
from .exchange import Exchange, OverlapExchange, WindowExchange
from .functional import Group
from .placement import unshard

STARTED = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")  # as functions of one tensor and its group


class TorchComm(AtPositions):
    """The collectives of this process.

    ``device`` is that of the mesh: this process's own one where there are several of the type. Process groups are made
    when they are first used, which is in the same order on every rank, since all run one program; the groups of a
    DeviceMesh's own axes are reused.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.mesh = Mesh.of(device_mesh)
        self.position = own_position(device_mesh)
        self.positions = (self.position,)
        self.device = device_of(device_mesh)
        self.traffic = (Traffic(),)
        self.gathers_in_place = self.device.type == "cpu"
        self._groups: dict[Axes, Group] = {}
        self._printed: dict[PartNames, Group | None] = {}
        self._process_groups = self._existing_groups()

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Send; what is local is done at once."""
        if kind in STARTED:
            return self._begin(kind, xs, *args, is_own=is_own, into=into)
        if kind == "collective_permute":
            return self._permute(xs, *args)
        results: Tensors = getattr(self, kind)(xs, *args)
        return lambda: results

    def start_bucket(self, flat: Flat, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """As one collective, or as messages where the backend does better by these."""
        group = self._printed_group(flat.parts[0].args[0])
        if group is None or not _sends_messages(flat.kind, group):
            return start_packed(self, flat, [flat.pack(row) for row in rows])
        (xs,) = rows
        self._count(flat.kind, sum(x.nbytes for x in xs), group)
        finish = _messages(flat.kind, xs, [part.args[1:] for part in flat.parts], group, *into)
        return lambda: [finish()]

    def all_gather(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors:
        """The pieces of all ranks, joined."""
        return self.start("all_gather", xs, axes, dim)()

    def all_reduce(self, xs: Tensors, axes: PartNames, op: str) -> Tensors:
        """The reduction over all ranks."""
        return self.start("all_reduce", xs, axes, op)()

    def reduce_scatter(self, xs: Tensors, axes: PartNames, op: str, dim: int) -> Tensors:
        """One piece of the reduction over all ranks."""
        return self.start("reduce_scatter", xs, axes, op, dim)()

    def all_to_all(self, xs: Tensors, axes: PartNames, src_dim: int, dst_dim: int) -> Tensors:
        """The pieces along ``dst_dim`` that all ranks have for this one, joined along ``src_dim``."""
        return self.start("all_to_all", xs, axes, src_dim, dst_dim)()

    def collective_permute(self, xs: Tensors, src_axes: PartNames, dst_axes: PartNames) -> Tensors:
        """Local values change places."""
        return self.start("collective_permute", xs, src_axes, dst_axes)()

    def rechunk(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], inner: int) -> Tensors:
        """Our new chunk."""
        return self.windows(xs, axes, dim, values, 0)

    def windows(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...], fill: float) -> Tensors:
        """Our window, from our chunk and the neighbours'."""
        return self._exchange(xs, axes, WindowExchange(values, dim, fill))

    def overlap_add(self, xs: Tensors, axes: PartNames, dim: int, values: tuple[int, ...]) -> Tensors:
        """The sum of what our window and the neighbours' have for our chunk."""
        return self._exchange(xs, axes, OverlapExchange(values, dim))

    def _exchange(self, xs: Tensors, axes: PartNames, exchange: Exchange) -> Tensors:
        parts = parse_parts(axes, self.mesh)
        index = self.mesh.index(self.position, parts)
        (x,) = xs
        pieces = exchange.pieces(x, index)
        given = [each if i != index else () for i, each in enumerate(pieces)]
        taken: list[Tensors] = [()] * len(pieces)
        if exchange.moves:
            taken = functional.exchange(x, given, exchange.lengths(index), exchange.dim, self.group(parts))
            self.traffic[0].count("collective_permute", sum(piece.nbytes for each in given for piece in each))
        taken[index] = pieces[index]
        return [exchange.join(x, index, taken)]

    def group(self, axes: Axes) -> Group:
        """The group along these axes that this rank is in; the process group is made if there is none yet."""
        if axes not in self._groups:
            self._groups[axes] = self._new_group(axes)
        return self._groups[axes]

    def _printed_group(self, axes: Any) -> Group | None:
        """The group along axes as they are printed; None where that is this rank alone."""
        if axes not in self._printed:
            parts = parse_parts(axes, self.mesh)
            self._printed[axes] = self.group(parts) if num_shards(parts) > 1 else None
        return self._printed[axes]

    def _begin(self, kind: Any, xs: Tensors, axes: PartNames, *args: Any, is_own: bool, into: Places) -> Results:
        group = self._printed_group(axes)
        if group is None:
            return lambda: xs
        (x,) = xs
        self._count(kind, x.nbytes, group)
        if _sends_messages(kind, group):
            return _messages(kind, xs, [args], group, into)
        own = (is_own,) if kind == "all_reduce" else ()
        finish: functional.Finish = getattr(functional, kind)(x, group, *args, *own)
        return lambda: [finish()]

    def _count(self, kind: Any, nbytes: int, group: Group) -> None:
        """Count a collective of operands of so many bytes."""
        payload = nbytes * (group.size if kind == "all_gather" else 1)
        self.traffic[0].count(kind, wire_bytes(kind, payload, group.size))

    def _permute(self, xs: Tensors, src_axes: PartNames, dst_axes: PartNames) -> Results:
        src, dst = parse_parts(src_axes, self.mesh), parse_parts(dst_axes, self.mesh)
        both = union(src, dst)
        if num_shards(both) == 1:
            return lambda: xs
        group = self.group(both)
        source = self.mesh.index(source_position(self.mesh, self.position, src, dst), both)
        target = self.mesh.index(source_position(self.mesh, self.position, dst, src), both)
        (x,) = xs
        self.traffic[0].count("collective_permute", 0 if target == group.index else x.nbytes)
        finish = functional.permute(x, group, source, target)
        return lambda: [finish()]

    def _new_group(self, axes: Axes) -> Group:
        members = next(group for group in self.mesh.groups(axes) if self.position in group)
        ranks = [self.mesh.rank(position) for position in members]
        ordered = tuple(sorted(ranks))
        if ordered not in self._process_groups:
            self._process_groups[ordered] = dist.new_group(list(ordered), use_local_synchronization=True)
        order = tuple(ordered.index(rank) for rank in ranks)
        process, index = self._process_groups[ordered], members.index(self.position)
        return Group(process, len(members), index, order, adds_locally=self.device.type == "cpu")

    def _existing_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        groups = [dist.group.WORLD, *(self.device_mesh.get_group(name) for name in self.mesh.axis_names)]
        return {tuple(dist.get_process_group_ranks(group)): group for group in groups if group is not None}


def _sends_messages(kind: str, group: Group) -> bool:
    """Whether a collective goes as messages: on gloo, unless it is recorded for a compiler."""
    return kind in ("all_gather", "reduce_scatter") and group.adds_locally and not functional.is_traced()


def _messages(kind: str, xs: Tensors, rest: Sequence[Sequence[Any]], group: Group, into: Places = ()) -> Results:
    """``rest``: of each of ``xs`` the arguments of the collective after the axes."""
    if kind == "all_gather":
        places = into or [None] * len(xs)
        return messages.all_gather([(x, dim, place) for x, (dim,), place in zip(xs, rest, places, strict=True)], group)
    return messages.reduce_scatter([(x, dim) for x, (_, dim) in zip(xs, rest, strict=True)], rest[0][0], group)


def union(src: Axes, dst: Axes) -> Axes:
    """The parts of both, each coordinate once: those of ``src``, then what ``dst`` adds."""
    ends = part_ends(src + dst)
    src, dst = split_parts(src, ends), split_parts(dst, ends)
    return src + tuple(part for part in dst if part not in src)


def own_position(device_mesh: DeviceMesh) -> int:
    """Where this process stands in the mesh, row-major over the axes."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(
            "mesh", f"ranks {device_mesh.mesh.flatten().tolist()}", f"rank {dist.get_rank()} is not among them",
            "call parallelize on the ranks of the mesh only",
        )  # fmt: skip
    position = 0
    for index, size in zip(coordinate, device_mesh.shape, strict=True):
        position = position * size + index
    return position


def device_of(device_mesh: DeviceMesh) -> torch.device:
    """The device that this process computes on."""
    if device_mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())


def make_device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh over the running job; the default process group is started as ``torchrun`` says if there is none.

    ShardingError if the mesh is larger than the job.
    """
    if not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group("gloo" if device_type == "cpu" else None)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size > world:
        raise ShardingError(
            "mesh", f"{mesh} has {mesh.size} ranks", f"the job has {world}",
            f"start it with torchrun --nproc-per-node {mesh.size}, or make the mesh smaller",
        )  # fmt: skip
    if mesh.device_ids is None and mesh.size == world:
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.axis_names)
    ids = torch.tensor([mesh.rank(position) for position in range(mesh.size)]).reshape(mesh.shape)
    return DeviceMesh(device_type, ids, mesh_dim_names=mesh.axis_names)


def gather_whole(comm: TorchComm, piece: Tensor, sharding: Sharding, shape: tuple[int, ...], name: str) -> Tensor:
    """The whole tensor from every rank's piece, by one all_gather over the axes that cut it."""
    axes = sharding.cut_axes
    if num_shards(axes) == 1:
        return piece
    pieces = functional.all_gather(piece.unsqueeze(0), comm.group(axes), 0)().unbind()
    held = [pieces[comm.mesh.index(position, axes)] for position in range(comm.mesh.size)]
    return unshard(held, sharding, shape, name)
