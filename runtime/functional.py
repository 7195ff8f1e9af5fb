"""The collectives of one rank as functions of a tensor, over torch's functional collectives.

Each is started, and gives what waits for it and returns its result. All is made of ops, so a compiler can trace it. A
group of one never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

c10d = torch.ops._c10d_functional
Finish = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in one collective, as this rank sees them.

    ``name``: the process group's. ``index``: this rank's among them, major axis first. ``order``: for each index the
    rank in the process group, which may stand in another order. ``adds_locally``: the backend has no reduce_scatter of
    its own that sends less than an all_reduce (gloo), so it is an all_to_all and a local reduction.
    """

    name: str
    size: int
    index: int
    order: tuple[int, ...]
    adds_locally: bool

    @property
    def inverse(self) -> tuple[int, ...]:
        """For each rank in the process group its index."""
        return tuple(self.order.index(rank) for rank in range(self.size))


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0, dtype=pieces.dtype),
    "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0),
}


def all_gather(x: Tensor, group: Group, dim: int) -> Finish:
    """The pieces of all ranks, joined along ``dim``: one copy, none where ``dim`` leads."""
    started = c10d.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    return lambda: join(_arrange(c10d.wait_tensor(started).view(group.size, *x.shape), group.order), dim)


def all_reduce(x: Tensor, group: Group, op: str, is_own: bool = False) -> Finish:
    """The reduction over all ranks; in the operand's memory where ``is_own`` says that no one else reads it."""
    reduce = c10d.all_reduce_ if is_own and not is_traced() else c10d.all_reduce
    started = reduce(x.contiguous(), op, group.name)
    return lambda: c10d.wait_tensor(started)


def reduce_scatter(x: Tensor, group: Group, op: str, dim: int) -> Finish:
    """Our piece along ``dim`` of the reduction over all ranks."""
    pieces = _arrange(split(x, group.size, dim), group.inverse)
    if group.adds_locally:
        received = _exchange(pieces, group)
        return lambda: LOCAL[op](_arrange(received(), group.order))
    started = c10d.reduce_scatter_tensor(pieces.flatten(), op, group.size, group.name)
    return lambda: c10d.wait_tensor(started).view(pieces.shape[1:])


def all_to_all(x: Tensor, group: Group, src_dim: int, dst_dim: int) -> Finish:
    """The pieces along ``dst_dim`` that all ranks have for this one, joined along ``src_dim``."""
    received = _exchange(_arrange(split(x, group.size, dst_dim), group.inverse), group)
    return lambda: join(_arrange(received(), group.order), src_dim)


def permute(x: Tensor, group: Group, source: int, target: int) -> Finish:
    """The tensor of the rank at index ``source``; ours goes to the one at ``target``."""
    sends = [x.numel() if rank == group.order[target] else 0 for rank in range(group.size)]
    takes = [x.numel() if rank == group.order[source] else 0 for rank in range(group.size)]
    started = c10d.all_to_all_single(x.contiguous().flatten(), takes, sends, group.name)
    return lambda: c10d.wait_tensor(started).view(x.shape)


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
    received = c10d.wait_tensor(c10d.all_to_all_single(flat, takes, gives, group.name)).split(takes)
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
    started = c10d.all_to_all_single(pieces.flatten(), sizes, sizes, group.name)
    return lambda: c10d.wait_tensor(started).view(pieces.shape)


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
