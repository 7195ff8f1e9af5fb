"""Collectives on a torch process group, as functions of one rank's tensor.

Each function starts a collective, and returns a function that waits for it and returns the result. If ops are traced,
the collectives are torch's functional ones; else the process group is called directly, since torch's Python wrappers
cost as much as several small ops. Groups have at least two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp, ReduceScatterOptions, Work
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shardc.language.errors import ShardingError

from .failure import job_timeout, meet, ranks_text

c10d = torch.ops._c10d_functional
Finish = Callable[[], Tensor]  # waits for a collective, and returns its result
Options = TypeVar("Options", AllreduceOptions, ReduceScatterOptions)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in one collective.

    ``index``: this rank's, major axis first. ``order``: for each index the rank within the process group, which may
    have another order. ``adds_locally``: the backend (gloo) has no reduce_scatter that sends less than an all_reduce,
    so that reduce_scatter is an all_to_all and a local reduction. ``timeout``: the longest wait for a message.
    """

    process: ProcessGroup
    size: int
    index: int
    order: tuple[int, ...]
    adds_locally: bool
    timeout: timedelta = default_pg_timeout

    @property
    def inverse(self) -> tuple[int, ...]:
        """For each rank within the process group, its index."""
        return tuple(self.order.index(rank) for rank in range(self.size))


_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def process_group_of(ranks: Sequence[int]) -> ProcessGroup:
    """The job's process group of these ranks, with the job's timeout; they make it in the first call."""
    job, key = dist.group.WORLD, tuple(sorted(ranks))
    assert job is not None
    known = _groups.setdefault(job, {})
    if key not in known:
        known[key] = new_process_group(key)
    return known[key]


def new_process_group(ranks: Sequence[int]) -> ProcessGroup:
    """A process group of these ranks, with the job's timeout; only they make it.

    Raises a CommunicationError once one of them is gone, and a ShardingError on all of them if they are in different
    numbers of groups: torch derives the name under which they find each other from that number, and would wait for the
    timeout.
    """
    if not meet(ranks, "making a process group", len(dist.distributed_c10d._world.pg_names)):
        what, problem = "making their process group", "some of them are in more groups than others, as torch counts"
        remedy = "make the meshes of all ranks, and run their modules once, before meshes of some ranks"
        raise ShardingError(ranks_text(ranks), what, problem, remedy)
    desc = f"mesh_{'-'.join(map(str, ranks))}"  # like torch's names for the groups of a DeviceMesh
    return dist.new_group(list(ranks), job_timeout(), use_local_synchronization=True, group_desc=desc)


def limit_timeout(process: ProcessGroup) -> None:
    """Give a group with torch's default timeout the timeout of the job, which torch sets on the default group alone."""
    for device in process._device_types if dist.get_backend() != "fake" else ():
        backend: Any = process._get_backend(device)
        if backend.options._timeout in (default_pg_timeout, default_pg_nccl_timeout):
            backend._set_default_timeout(job_timeout())


REDUCE_STACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0, dtype=pieces.dtype),
    "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0),
}
OPS: dict[str, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def all_gather(x: Tensor, group: Group, dim: int) -> Finish:
    """The pieces of all ranks, joined along ``dim``; this copies once, or not at all if ``dim`` is the first."""
    if _is_functional(x):
        finish = _waiting(c10d.all_gather_into_tensor(x.contiguous(), group.size, group.process.group_name))
    else:
        result = x.new_empty(group.size * x.numel())
        finish = _after(group.process._allgather_base(result, x.reshape(-1)), result)
    return lambda: join(_arrange(finish().view(group.size, *x.shape), group.order), dim)


def all_reduce(x: Tensor, group: Group, op: str, is_own: bool = False) -> Finish:
    """The reduction over all ranks; in the operand's memory if ``is_own``: nobody else reads that."""
    if _is_functional(x):
        return _waiting(c10d.all_reduce(x.contiguous(), op, group.process.group_name))
    result = x.contiguous() if is_own else x.clone(memory_format=torch.contiguous_format)
    return _after(group.process.allreduce([result], _options(AllreduceOptions, op)), result)


def reduce_scatter(x: Tensor, group: Group, op: str, dim: int) -> Finish:
    """This rank's piece along ``dim`` of the reduction over all ranks."""
    pieces = _arrange(split(x, group.size, dim), group.inverse)
    if group.adds_locally:
        received = _exchange(pieces, group)
        return lambda: REDUCE_STACKED[op](_arrange(received(), group.order))
    if _is_functional(x):
        finish = _waiting(c10d.reduce_scatter_tensor(pieces.flatten(), op, group.size, group.process.group_name))
    else:
        result, options = pieces.new_empty(pieces[0].numel()), _options(ReduceScatterOptions, op)
        finish = _after(group.process._reduce_scatter_base(result, pieces.flatten(), options), result)
    return lambda: finish().view(pieces.shape[1:])


def all_to_all(x: Tensor, group: Group, src_dim: int, dst_dim: int) -> Finish:
    """This rank's pieces along ``dst_dim`` from all ranks, joined along ``src_dim``."""
    received = _exchange(_arrange(split(x, group.size, dst_dim), group.inverse), group)
    return lambda: join(_arrange(received(), group.order), src_dim)


def permute(x: Tensor, group: Group, source: int, target: int) -> Finish:
    """The tensor of the rank at index ``source``; this rank's tensor goes to index ``target``."""
    sends = [x.numel() if rank == group.order[target] else 0 for rank in range(group.size)]
    receives = [x.numel() if rank == group.order[source] else 0 for rank in range(group.size)]
    finish = _all_to_all(x.contiguous().flatten(), receives, sends, group)
    return lambda: finish().view(x.shape)


def rotate(xs: Sequence[Tensor], group: Group, by: int) -> Callable[[], list[Tensor]]:
    """The tensors of the rank ``by`` indices before, of the same shapes; this rank's go ``by`` indices further."""
    flat = in_one(xs)
    finish = permute(flat, group, (group.index - by) % group.size, (group.index + by) % group.size)

    def received() -> list[Tensor]:
        pieces = finish().split([x.numel() for x in xs])
        return [piece.view(x.shape) for piece, x in zip(pieces, xs, strict=True)]

    return received


def in_one(xs: Sequence[Tensor]) -> Tensor:
    """Tensors joined into a flat one: a view if they are adjacent in memory, as tensors received together are."""
    first, at = xs[0], xs[0].storage_offset()
    if len(xs) == 1:
        return first.flatten()
    if not _is_functional(first):
        for x in xs:
            is_next = x.is_contiguous() and x.storage_offset() == at and x.dtype == first.dtype
            if not is_next or x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                break
            at += x.numel()
        else:
            return first.as_strided([at - first.storage_offset()], [1])
    return torch.cat([x.flatten() for x in xs])


def exchange(
    x: Tensor, pieces: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]], dim: int, group: Group
) -> Callable[[], list[Sequence[Tensor]]]:
    """Send ``pieces`` of any length along ``dim`` to each rank of the group. The result: the pieces from each rank.

    ``lengths``: those of the received pieces. Pieces of this rank for itself are left out.
    """
    shape = x.shape
    row = x.numel() // max(1, shape[dim])
    sends = [sum(piece.numel() for piece in pieces[i]) for i in group.inverse]
    receives = [row * sum(lengths[i]) if i != group.index else 0 for i in group.inverse]
    flat = torch.cat([x.new_empty(0), *(piece.flatten() for i in group.inverse for piece in pieces[i])])
    finish = _all_to_all(flat, receives, sends, group)

    def received() -> list[Sequence[Tensor]]:
        parts = finish().split(receives)
        return [
            [
                piece.view([size if i == dim else old for i, old in enumerate(shape)])
                for size, piece in zip(lengths[i], parts[rank].split([row * size for size in lengths[i]]), strict=True)
            ]
            if i != group.index
            else ()
            for i, rank in enumerate(group.order)
        ]

    return received


def _exchange(pieces: Tensor, group: Group) -> Finish:
    """Send the i-th of equal pieces to the i-th rank of the process group. The result: the pieces by sender."""
    sizes = [pieces[0].numel()] * group.size
    finish = _all_to_all(pieces.flatten(), sizes, sizes, group)
    return lambda: finish().view(pieces.shape)


def _all_to_all(flat: Tensor, receives: list[int], sends: list[int], group: Group) -> Finish:
    """Send ``sends[i]`` elements to rank i of the process group, and receive ``receives[i]`` from it, both in order."""
    if _is_functional(flat):
        return _waiting(c10d.all_to_all_single(flat, receives, sends, group.process.group_name))
    result = flat.new_empty(sum(receives))
    return _after(group.process.alltoall_base(result, flat, receives, sends), result)


def _is_functional(x: Tensor) -> bool:
    """Whether to call torch's functional collectives, which also handle complex numbers for each backend."""
    return is_traced() or x.is_complex()


@cache
def _options(kind: type[Options], op: str) -> Options:
    """The options of a reduction, cached: making them takes longer than a small op."""
    options = kind()
    options.reduceOp = OPS[op]
    return options


def _waiting(started: Tensor) -> Finish:
    return lambda: c10d.wait_tensor(started)


def _after(work: Work, result: Tensor) -> Finish:
    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def _arrange(pieces: Tensor, order: tuple[int, ...]) -> Tensor:
    """The pieces in another order; a copy only if the order differs."""
    if order == tuple(range(len(order))):
        return pieces
    return torch.stack([pieces[i] for i in order])


def split(x: Tensor, count: int, dim: int) -> Tensor:
    """Equal pieces along ``dim``, stacked; a copy unless ``dim`` is the first."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


def join(pieces: Tensor, dim: int) -> Tensor:
    """Stacked pieces joined along ``dim``; a copy unless ``dim`` is the first."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


WAIT = " (wait)"  # a collective has one profiler range for its start, and one with this suffix for its wait
NO_RANGE: AbstractContextManager[Any] = nullcontext()


def is_traced() -> bool:
    """Whether a dispatch mode records ops, so that each of them must be pure."""
    return _get_current_dispatch_mode() is not None


def is_profiled() -> bool:
    """Whether a profiler is on, and ops run and are not recorded."""
    return profiler._is_profiler_enabled and not is_traced()


def in_range(name: str) -> AbstractContextManager[Any]:
    """Context with a range of this name under a profiler; else it does nothing."""
    return record_function(name) if is_profiled() else NO_RANGE
