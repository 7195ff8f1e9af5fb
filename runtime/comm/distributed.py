"""This rank's collectives on torch.distributed, over the groups of a DeviceMesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from shardc.language.errors import ShardingError
from shardc.language.machine import LOCAL_KINDS
from shardc.language.mesh import Axes, Mesh, part_ends, split_parts
from shardc.language.partition import parse_parts
from shardc.language.sharding import Sharding, num_shards
from shardc.program.collective import source_position, wire_bytes

from . import messages, process_group
from .comm import BucketLayout, LocalCollectives, PartNames, Places, Results, Rows, Tensors, Traffic, start_packed
from .dtensor import unshard
from .failure import announce, timeout_of, waiting
from .halo import HALO_KINDS, exchange_of
from .process_group import Group, is_traced, limit_timeout, process_group_of


class TorchComm(LocalCollectives):
    """Runs this process's collectives. ``device``: the mesh's device on which this process computes.

    Process groups are made when they are first used, in the same order on every rank, since all ranks run one program.
    The groups of the DeviceMesh's own axes are reused.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh, self.mesh = device_mesh, Mesh.of(device_mesh)
        self.position = own_position(device_mesh)
        self.positions = (self.position,)
        self.device = torch.device(device_mesh.device_type)
        if self.device.type not in ("cpu", "meta"):
            self.device = torch.device(self.device.type, torch.get_device_module(self.device).current_device())
        self.traffic = (Traffic(),)
        self.gathers_in_place = self.device.type == "cpu"
        self._groups: dict[Axes, Group] = {}
        self._groups_by_name: dict[PartNames, Group | None] = {}
        own = [dist.group.WORLD, *(device_mesh.get_group(name) for name in self.mesh.axis_names)]
        self._process_groups = {tuple(dist.get_process_group_ranks(each)): each for each in own if each is not None}
        for each in self._process_groups.values():
            limit_timeout(each)
        announce(self)

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Start a collective; local kinds run at once."""
        if kind in LOCAL_KINDS:
            results: Tensors = getattr(self, kind)(xs, *args)
            return lambda: results
        if kind in HALO_KINDS:
            return self._exchange(kind, xs, *args)
        if kind == "collective_permute":
            return self._permute(xs, *args)
        axes, *rest = args
        if (group := self._group_along(axes)) is None:
            return lambda: xs
        (x,) = xs
        self._count(kind, x.nbytes, group)
        if _sends_messages(kind, group):
            return _messages(kind, xs, [rest], group, into)
        own = (is_own,) if kind == "all_reduce" else ()
        finish: process_group.Finish = getattr(process_group, kind)(x, group, *rest, *own)
        return lambda: [finish()]

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """Start one collective for a bucket, or messages if they are faster with the backend."""
        group = self._group_along(layout.parts[0].args[0])
        if group is None or not _sends_messages(layout.kind, group):
            return start_packed(self, layout, [layout.pack(row) for row in rows])
        (xs,) = rows
        self._count(layout.kind, sum(x.nbytes for x in xs), group)
        finish = _messages(layout.kind, xs, [part.args[1:] for part in layout.parts], group, *into)
        return lambda: [finish()]

    def rotate(self, rows: Rows, axes: PartNames, by: int = 1) -> Callable[[], Rows]:
        """Start to send this rank's tensors ``by`` indices further in its group. The result: the received tensors."""
        group, (xs,) = self._group_along(axes), rows
        assert group is not None, axes
        self.traffic[0].count("collective_permute", sum(x.nbytes for x in xs))
        sends_messages = group.adds_locally and not is_traced()
        finish = messages.rotate(xs, group, by) if sends_messages else process_group.rotate(xs, group, by)
        return lambda: [finish()]

    @property
    def process_groups(self) -> Sequence[ProcessGroup]:
        """The groups that this process may wait on."""
        return list(self._process_groups.values())

    def group(self, axes: Axes) -> Group:
        """This rank's group along axes; makes its process group if there is none yet."""
        if axes not in self._groups:
            members = next(group for group in self.mesh.groups(axes) if self.position in group)
            ranks = [self.mesh.rank(position) for position in members]
            ordered = tuple(sorted(ranks))
            if ordered not in self._process_groups:
                self._process_groups[ordered] = process_group_of(ordered)
            order, index = tuple(map(ordered.index, ranks)), members.index(self.position)
            is_gloo, process = self.device.type == "cpu", self._process_groups[ordered]
            self._groups[axes] = Group(process, len(members), index, order, is_gloo, timeout_of(process, self.device))
        return self._groups[axes]

    def _group_along(self, axes: PartNames) -> Group | None:
        """This rank's group along printed axes; None if it has one rank."""
        if axes not in self._groups_by_name:
            parts = parse_parts(axes, self.mesh)
            self._groups_by_name[axes] = self.group(parts) if num_shards(parts) > 1 else None
        return self._groups_by_name[axes]

    def _count(self, kind: Any, num_bytes: int, group: Group) -> None:
        """Count a collective whose operands have ``num_bytes``."""
        payload = num_bytes * (group.size if kind == "all_gather" else 1)
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
        finish = process_group.permute(x, group, source, target)
        return lambda: [finish()]

    def _exchange(self, kind: str, xs: Tensors, axes: PartNames, *args: Any) -> Results:
        """Exchange edges with neighbours: ``windows``, ``overlap_add`` or ``rechunk``."""
        exchange, parts = exchange_of(kind, *args), parse_parts(axes, self.mesh)
        index, (x,) = self.mesh.index(self.position, parts), xs
        pieces = exchange.pieces(x, index)
        if not exchange.moves:
            result = exchange.join(x, index, pieces)
            return lambda: [result]
        sent = [each if i != index else () for i, each in enumerate(pieces)]
        finish = process_group.exchange(x, sent, exchange.lengths(index), exchange.dim, self.group(parts))
        self.traffic[0].count("collective_permute", sum(piece.nbytes for each in sent for piece in each))

        def join() -> Tensors:
            received = finish()
            received[index] = pieces[index]
            return [exchange.join(x, index, received)]

        return join


def _sends_messages(kind: str, group: Group) -> bool:
    """Whether a collective is sent as messages: gathers and reductions on gloo, unless they are traced."""
    return kind in ("all_gather", "reduce_scatter") and group.adds_locally and not is_traced()


def _messages(kind: str, xs: Tensors, rest: Sequence[Sequence[Any]], group: Group, into: Places = ()) -> Results:
    """Start messages. ``rest``: for each of ``xs`` the arguments of its collective after the axes."""
    if kind == "all_gather":
        places = into or [None] * len(xs)
        return messages.all_gather([(x, dim, place) for x, (dim,), place in zip(xs, rest, places, strict=True)], group)
    return messages.reduce_scatter([(x, dim) for x, (_, dim) in zip(xs, rest, strict=True)], rest[0][0], group)


def union(src: Axes, dst: Axes) -> Axes:
    """The axis parts of ``src``, then those that ``dst`` adds."""
    ends = part_ends(src + dst)
    src, dst = split_parts(src, ends), split_parts(dst, ends)
    return src + tuple(part for part in dst if part not in src)


def own_position(device_mesh: DeviceMesh) -> int:
    """The position of this process in the mesh, row-major over the axes. ShardingError if it is not in the mesh."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        what, problem = f"ranks {device_mesh.mesh.flatten().tolist()}", f"rank {dist.get_rank()} is not among them"
        raise ShardingError("mesh", what, problem, "call parallelize on the ranks of the mesh only")
    position = 0
    for index, size in zip(coordinate, device_mesh.shape, strict=True):
        position = position * size + index
    return position


def make_device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh over the running job; starts the default process group from torchrun's environment if there is none.

    Raises a ShardingError if the mesh is larger than the job.
    """
    start_job(device_type)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size > world:
        remedy = f"start it with torchrun --nproc-per-node {mesh.size}, or make the mesh smaller"
        raise ShardingError("mesh", f"{mesh} has {mesh.size} ranks", f"the job has {world}", remedy)
    ranks = [mesh.rank(position) for position in range(mesh.size)]
    return shared_device_mesh(ranks, mesh.shape, mesh.axis_names, device_type)


_device_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], DeviceMesh]] = WeakKeyDictionary()


def shared_device_mesh(
    ranks: Sequence[int], shape: Sequence[int], names: Sequence[str], device_type: str
) -> DeviceMesh:
    """The DeviceMesh that equal meshes of a job share; every new DeviceMesh would make process groups of its own."""
    job, key = dist.group.WORLD, (device_type, tuple(ranks), tuple(shape), tuple(names))
    known = {} if job is None else _device_meshes.setdefault(job, {})
    if key not in known:
        grid = torch.tensor(ranks, device="cpu").reshape(*shape)
        known[key] = DeviceMesh(device_type, grid, mesh_dim_names=tuple(names))
    return known[key]


def start_job(device_type: str) -> None:
    """Start the default process group from torchrun's environment, unless there is one.

    torchrun keeps one store for all attempts of a job: without a prefix a restarted rank may read another rank's
    address from the last attempt.
    """
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo" if device_type == "cpu" else None, store=store, rank=rank, world_size=size)


def gather_whole(comm: TorchComm, piece: Tensor, sharding: Sharding, shape: tuple[int, ...], name: str) -> Tensor:
    """The whole tensor from every rank's piece, by one all_gather over the axes that cut it."""
    axes = sharding.cut_axes
    if num_shards(axes) == 1:
        return piece
    with waiting(
        lambda: f"the gather of {name} over {', '.join(map(comm.mesh.print_part, axes))}",
        lambda: comm.ranks(tuple(map(comm.mesh.print_part, axes))),
    ):
        gathered = process_group.all_gather(piece.unsqueeze(0), comm.group(axes), 0)().unbind()
    pieces = [gathered[comm.mesh.index(position, axes)] for position in range(comm.mesh.size)]
    return unshard(pieces, sharding, shape, name)
