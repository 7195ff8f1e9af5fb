"""The collectives of one rank as functions of a tensor.

Each is started, and gives what waits for it and returns its result. Where it is recorded for a compiler it is one of
torch's functional collectives. Else it is asked of the process group: those pass through Python, at the price of
several small ops. A group of one never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp, ReduceScatterOptions, Work
from torch.utils._python_dispatch import _get_current_dispatch_mode

c10d = torch.ops._c10d_functional
Finish = Callable[[], Tensor]
Options = TypeVar("Options", AllreduceOptions, ReduceScatterOptions)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in one collective, as this rank sees them.

    ``index``: this rank's among them, major axis first. ``order``: for each index the rank in the process group, which
    may stand in another order. ``adds_locally``: the backend has no reduce_scatter of its own that sends less than an
    all_reduce (gloo), so it is an all_to_all and a local reduction.
    """

    process: ProcessGroup
    size: int
    index: int
    order: tuple[int, ...]
    adds_locally: bool

    @property
    def name(self) -> str:
        """The process group's."""
        return self.process.group_name

    @property
    def inverse(self) -> tuple[int, ...]:
        """For each rank in the process group its index."""
        return tuple(self.order.index(rank) for rank in range(self.size))


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0, dtype=pieces.dtype),
    "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0),
}
OPS: dict[str, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def all_gather(x: Tensor, group: Group, dim: int) -> Finish:
    """The pieces of all ranks, joined along ``dim``: one copy, none where ``dim`` leads."""
    if _is_functional(x):
        finish = _waiting(c10d.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    else:
        made = x.new_empty(group.size * x.numel())
        finish = _after(group.process._allgather_base(made, x.reshape(-1)), made)
    return lambda: join(_arrange(finish().view(group.size, *x.shape), group.order), dim)


def all_reduce(x: Tensor, group: Group, op: str, is_own: bool = False) -> Finish:
    """The reduction over all ranks; in the operand's memory where ``is_own`` says that no one else reads it."""
    if _is_functional(x):
        return _waiting(c10d.all_reduce(x.contiguous(), op, group.name))
    made = x.contiguous() if is_own else x.clone(memory_format=torch.contiguous_format)
    return _after(group.process.allreduce([made], _options(AllreduceOptions, op)), made)


def reduce_scatter(x: Tensor, group: Group, op: str, dim: int) -> Finish:
    """Our piece along ``dim`` of the reduction over all ranks."""
    pieces = _arrange(split(x, group.size, dim), group.inverse)
    if group.adds_locally:
        received = _exchange(pieces, group)
        return lambda: LOCAL[op](_arrange(received(), group.order))
    if _is_functional(x):
        finish = _waiting(c10d.reduce_scatter_tensor(pieces.flatten(), op, group.size, group.name))
    else:
        made = pieces.new_empty(pieces[0].numel())
        finish = _after(
            group.process._reduce_scatter_base(made, pieces.flatten(), _options(ReduceScatterOptions, op)), made
        )
    return lambda: finish().view(pieces.shape[1:])


def all_to_all(x: Tensor, group: Group, src_dim: int, dst_dim: int) -> Finish:
    """The pieces along ``dst_dim`` that all ranks have for this one, joined along ``src_dim``."""
    received = _exchange(_arrange(split(x, group.size, dst_dim), group.inverse), group)
    return lambda: join(_arrange(received(), group.order), src_dim)


def permute(x: Tensor, group: Group, source: int, target: int) -> Finish:
    """The tensor of the rank at index ``source``; ours goes to the one at ``target``."""
    sends = [x.numel() if rank == group.order[target] else 0 for rank in range(group.size)]
    takes = [x.numel() if rank == group.order[source] else 0 for rank in range(group.size)]
    finish = _send(x.contiguous().flatten(), takes, sends, group)
    return lambda: finish().view(x.shape)


def is_traced() -> bool:
    """Whether what runs is recorded: then every op must be pure."""
    return _get_current_dispatch_mode() is not None


def exchange(
    x: Tensor, pieces: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]], dim: int, group: Group
) -> list[Sequence[Tensor]]:
    """Pieces of any length along ``dim`` for every rank of the group, in return for those that it has for us.

    ``lengths`` are those of the pieces that are taken; ours for ourselves are left out.
    """
    row = x.numel() // max(1, x.shape[dim])
    gives = [sum(piece.numel() for piece in pieces[i]) for i in group.inverse]
    takes = [row * sum(lengths[i]) if i != group.index else 0 for i in group.inverse]
    flat = torch.cat([x.new_empty(0), *(piece.flatten() for i in group.inverse for piece in pieces[i])])
    received = _send(flat, takes, gives, group)().split(takes)
    return [
        [
            piece.view([size if i == dim else old for i, old in enumerate(x.shape)])
            for size, piece in zip(lengths[i], received[rank].split([row * size for size in lengths[i]]), strict=True)
        ]
        if i != group.index
        else ()
        for i, rank in enumerate(group.order)
    ]


def _exchange(pieces: Tensor, group: Group) -> Finish:
    """The i-th piece of every rank goes to the i-th rank of the process group; those received, by sender."""
    sizes = [pieces[0].numel()] * group.size
    finish = _send(pieces.flatten(), sizes, sizes, group)
    return lambda: finish().view(pieces.shape)


def _send(flat: Tensor, takes: list[int], gives: list[int], group: Group) -> Finish:
    """The next ``gives[i]`` elements go to rank i of the process group; those received, ``takes[i]`` from rank i."""
    if _is_functional(flat):
        return _waiting(c10d.all_to_all_single(flat, takes, gives, group.name))
    made = flat.new_empty(sum(takes))
    return _after(group.process.alltoall_base(made, flat, takes, gives), made)


def _is_functional(x: Tensor) -> bool:
    """Whether torch's ops are called: they know what complex numbers are to a backend."""
    return is_traced() or x.is_complex()


@cache
def _options(kind: type[Options], op: str) -> Options:
    """What says the reduction to a process group; to make it of the bare op takes longer than a small op."""
    options = kind()
    options.reduceOp = OPS[op]
    return options


def _waiting(started: Tensor) -> Finish:
    return lambda: c10d.wait_tensor(started)


def _after(work: Work, made: Tensor) -> Finish:
    def finish() -> Tensor:
        work.wait()
        return made

    return finish


def _arrange(pieces: Tensor, order: tuple[int, ...]) -> Tensor:
    """The pieces in another order; a copy only where the order differs."""
    if order == tuple(range(len(order))):
        return pieces
    return torch.stack([pieces[i] for i in order])


def split(x: Tensor, count: int, dim: int) -> Tensor:
    """Equal pieces along ``dim``, stacked; a copy unless ``dim`` leads."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


def join(pieces: Tensor, dim: int) -> Tensor:
    """Stacked pieces joined along ``dim``; a copy unless ``dim`` leads."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)
