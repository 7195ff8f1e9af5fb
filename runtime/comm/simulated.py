"""Virtual ranks: runs the collectives of all ranks of a mesh in one process, in lockstep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.language.machine import CollectiveKind
from shardc.language.mesh import Mesh
from shardc.language.partition import parse_parts
from shardc.program.collective import source_position, wire_bytes

from . import comm
from .comm import BucketLayout, LocalCollectives, PartNames, Places, Results, Rows, Tensors, Traffic, chunk
from .halo import HALO_KINDS, exchange_of

Act = Callable[[Tensors], Tensors]  # maps the operands of a group's ranks to their results


class SimulatedComm(LocalCollectives):
    """Runs collectives of all ranks in this process; reductions run in the order of the group's ranks.

    ``traffic`` counts the bytes that each rank would send by ring algorithms.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.mesh, self.positions, self.device = mesh, tuple(range(mesh.size)), torch.device(device)
        self.traffic = tuple(Traffic() for _ in self.positions)
        self.gathers_in_place = False

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        """Run a collective at once, in new memory."""
        results: Tensors = self._exchange(kind, xs, *args) if kind in HALO_KINDS else getattr(self, kind)(xs, *args)
        return lambda: results

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        """Run the collective of a bucket at once, on one buffer for each rank, of which only the results are kept."""
        results = comm.start_packed(self, layout, [layout.pack(row) for row in rows])()
        return lambda: results

    def rotate(self, rows: Rows, axes: PartNames, by: int = 1) -> Callable[[], Rows]:
        """Each rank gets the tensors of the rank ``by`` indices before it in its group."""
        results = list(rows)
        for group in self.mesh.groups(parse_parts(axes, self.mesh)):
            for i, position in enumerate(group):
                before = group[(i - by) % len(group)]
                results[position] = rows[before]
                self.traffic[before].count("collective_permute", sum(x.nbytes for x in rows[before]))
        return lambda: results

    def all_gather(self, xs: Tensors, axes: PartNames, dim: int) -> Tensors:
        """Each rank of a group gets the pieces of all, joined along ``dim``."""
        return self._in_groups("all_gather", xs, axes, lambda group: [torch.cat(tuple(group), dim)] * len(group))

    def all_reduce(self, xs: Tensors, axes: PartNames, op: str) -> Tensors:
        """Each rank of a group gets the reduction of all."""
        return self._in_groups("all_reduce", xs, axes, lambda group: [_reduced(group, op)] * len(group))

    def reduce_scatter(self, xs: Tensors, axes: PartNames, op: str, dim: int) -> Tensors:
        """Each rank of a group gets its piece along ``dim`` of the reduction of all."""

        def reduce(group: Tensors) -> Tensors:
            return [piece.clone() for piece in _chunks(_reduced(group, op), len(group), dim)]

        return self._in_groups("reduce_scatter", xs, axes, reduce)

    def all_to_all(self, xs: Tensors, axes: PartNames, src_dim: int, dst_dim: int) -> Tensors:
        """The i-th rank of a group gets the i-th piece along ``dst_dim`` of every rank, joined along ``src_dim``."""

        def exchange(group: Tensors) -> Tensors:
            pieces = [_chunks(x, len(group), dst_dim) for x in group]
            return [torch.cat(received, src_dim) for received in zip(*pieces, strict=True)]

        return self._in_groups("all_to_all", xs, axes, exchange)

    def collective_permute(self, xs: Tensors, src_axes: PartNames, dst_axes: PartNames) -> Tensors:
        """Each rank at index i along ``dst_axes`` gets the tensor of a rank at index i along ``src_axes``."""
        src, dst = parse_parts(src_axes, self.mesh), parse_parts(dst_axes, self.mesh)
        sources = [source_position(self.mesh, position, src, dst) for position in self.positions]
        for position, source in enumerate(sources):
            self.traffic[source].count("collective_permute", 0 if source == position else xs[source].nbytes)
        return [xs[source] for source in sources]

    def _exchange(self, kind: str, xs: Tensors, axes: PartNames, *args: Any) -> Tensors:
        """Exchange edges with neighbours: ``windows``, ``overlap_add`` or ``rechunk``."""
        exchange, results = exchange_of(kind, *args), list(xs)
        for group in self.mesh.groups(parse_parts(axes, self.mesh)):
            sent = [exchange.pieces(xs[position], i) for i, position in enumerate(group)]
            for i, position in enumerate(group):
                results[position] = exchange.join(xs[position], i, [pieces[i] for pieces in sent])
                num_bytes = sum(piece.nbytes for j, pieces in enumerate(sent[i]) if j != i for piece in pieces)
                if exchange.moves:
                    self.traffic[position].count("collective_permute", num_bytes)
        return results

    def _in_groups(self, kind: CollectiveKind, xs: Tensors, axes: PartNames, act: Act) -> Tensors:
        results = list(xs)
        for group in self.mesh.groups(parse_parts(axes, self.mesh)):
            if len(group) == 1:
                continue
            for position, result in zip(group, act([xs[position] for position in group]), strict=True):
                results[position] = result
                payload = max(xs[position].nbytes, result.nbytes)
                self.traffic[position].count(kind, wire_bytes(kind, payload, len(group)))
        return results


def _chunks(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    return tuple(chunk(x, count, dim, index) for index in range(count))


def _reduced(group: Tensors, op: str) -> Tensor:
    return functools.reduce(comm.REDUCE[op], group)
