"""Initial values on the ranks of a job: compares the models of all ranks, and sends the first rank's values."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.capture.model import plain_tensors, state_names
from shardc.language.errors import ShardingError
from shardc.language.sharding import TensorType

from ..agreement.agreement import Agreement
from ..comm.checksum import checksum
from ..comm.distributed import TorchComm
from ..comm.failure import waiting
from ..comm.process_group import Group
from ..comm.scatter import Part, broadcast, scatter

Initial = Literal["broadcast", "check", "trust"]
INITIAL: tuple[str, ...] = get_args(Initial)
SENDING = "the first rank's values for all others"
ModelTensors = dict[tuple[str, str], Tensor]


def model_tensors(model: nn.Module) -> ModelTensors:
    """The tensors of a model that a program may read, by kind and name: tied ones once, computed ones left out.

    Kinds are ``parameter``, ``buffer`` and ``attribute``, a tensor in a plain attribute of a module. They are sorted by
    name within a kind, so that the order is the same on all ranks.
    """
    parameters, buffers, _ = state_names(model)
    own = {id(each) for each in (*parameters.values(), *buffers.values())}
    others = plain_tensors(model).items()
    attributes = {name: each for name, each in others if id(each) not in own and not each.grad_fn}
    tables: dict[str, Mapping[str, Tensor]] = {"parameter": parameters, "buffer": buffers, "attribute": attributes}
    return {(kind, name): table[name] for kind, table in tables.items() for name in sorted(table)}


def is_sent(tensor: Tensor) -> bool:
    """Whether a tensor's values are compared and sent; DTensors and sparse tensors are kept as they are."""
    return not isinstance(tensor, DTensor) and tensor.layout == torch.strided


class InitialValues:
    """Compares the models of all ranks of a mesh, and sends the first rank's values to the others."""

    def __init__(self, comm: TorchComm, agreement: Agreement | None) -> None:
        self.comm, self.agreement = comm, agreement
        self.ranks = [comm.mesh.rank(position) for position in range(comm.mesh.size)]

    def check(self, tensors: ModelTensors, initial: str) -> bool:
        """Compare the models of all ranks. Returns whether a rank other than the first has tensors on meta.

        Compares names, shapes and dtypes, and with ``"check"`` values. If they differ, every rank raises a
        ShardingError that names the first such tensor and two ranks. Every rank also raises one if the first rank, or
        with ``"check"`` any rank, has tensors on meta. ``"trust"`` looks at this rank alone.
        """
        if self.comm.device.type == "meta":  # a rehearsal without values
            return False
        if initial == "trust":
            if names := _on_meta(tensors):
                _raise_on_meta(names, "", "initial='trust' sends no values from other ranks")
            return False
        position = self._compare(tensors)
        if position is not None and (position == 0 or initial == "check"):
            names = self._from_all("\n".join(_on_meta(tensors)).encode())[position].decode().splitlines()
            problem = "all ranks start from the values of the first rank of the mesh"
            if initial == "check":
                problem = "initial='check' compares the values of all ranks"
            _raise_on_meta(names, f"on rank {self.ranks[position]} ", problem)
        if initial == "check":
            self._compare_values(tensors)
        return position is not None

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Write the first rank's values to the contiguous tensors of all ranks, in place."""
        with waiting(lambda: SENDING, self.ranks):
            broadcast(tensors, self._everyone, self.comm.device)

    @torch.no_grad()
    def scatter(self, parts: Sequence[Part]) -> None:
        """Fill parts of the first rank's tensors on the ranks that store them."""
        with waiting(lambda: SENDING, self.ranks):
            scatter(parts, self._everyone, self.comm.device)

    @property
    def _everyone(self) -> Group:
        mesh = self.comm.mesh
        return self.comm.group(tuple(map(mesh.axis, mesh.axis_names)))

    def _compare(self, tensors: ModelTensors) -> int | None:
        """Compare names, shapes and dtypes. Returns the first position that has tensors on meta, or None."""
        text = "\n".join(_line(key, each) for key, each in tensors.items()).encode()
        rows = self._from_all(hashlib.sha256(text).digest() + bytes([bool(_on_meta(tensors))]))
        if len({row[:-1] for row in rows}) > 1:
            self._raise_difference(text)
        return next((position for position, row in enumerate(rows) if row[-1]), None)

    def _compare_values(self, tensors: ModelTensors) -> None:
        values = {key: each for key, each in tensors.items() if is_sent(each)}
        numbers = array("q", [int(checksum(each)) for each in values.values()])
        rows = [array("q", row) for row in self._from_all(numbers.tobytes())]
        check_alike([f"{kind} {name!r}" for kind, name in values], rows, self.ranks, "ranks")

    def _raise_difference(self, text: bytes) -> None:
        one, *others = (dict(line.split(": ", 1) for line in row.decode().splitlines()) for row in self._from_all(text))
        position = next(i for i, other in enumerate(others) if other != one)
        other = others[position]
        who = next(name for name in {**one, **other} if one.get(name) != other.get(name))
        what = f"{one.get(who, 'nothing')} on rank {self.ranks[0]}, {other.get(who, 'nothing')} on rank "
        problem, remedy = "all ranks must come with one model", "make the model alike on every rank"
        raise ShardingError(who, what + str(self.ranks[position + 1]), problem, remedy)

    def _from_all(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, by position."""
        if self.agreement is None:
            return [data]
        by_rank = dict(zip(self.agreement.ranks, self.agreement.exchange(data), strict=True))
        return [by_rank[rank] for rank in self.ranks]


def check_alike(names: Sequence[str], rows: Sequence[Sequence[int]], ranks: Sequence[int], who: str) -> None:
    """Raise a ShardingError for the first tensor whose checksum differs. ``rows``: the checksums of each rank."""
    for name, (first, *others) in zip(names, zip(*rows, strict=True), strict=True):
        if differing := [rank for rank, other in zip(ranks[1:], others, strict=True) if other != first]:
            what = f"its values on rank {ranks[0]} and rank {differing[0]} differ"
            problem = f"initial='check': all {who} must come with one model"
            remedy = f"seed all ranks alike before they make it, or leave initial out to start from rank {ranks[0]}'s"
            raise ShardingError(name, what, problem, remedy)


def _on_meta(tensors: ModelTensors) -> list[str]:
    return [f"{kind} {name!r}" for (kind, name), each in tensors.items() if is_sent(each) and each.is_meta]


def _raise_on_meta(names: Sequence[str], where: str, problem: str) -> NoReturn:
    others = f", as are {len(names) - 1} others" if len(names) > 1 else ""
    remedy = "write shardc.init_parameters(model, mesh), or model.to_empty(device='cpu') and its initialisers"
    raise ShardingError(names[0], f"{where}it is on meta{others}", problem, remedy)


def _line(key: tuple[str, str], tensor: Tensor) -> str:
    kind, name = key
    return f"{kind} {name!r}: {TensorType.of(tensor)}{' as a DTensor' if isinstance(tensor, DTensor) else ''}"
