"""Conversion between a user's tensors and the shards that ranks compute on: on virtual ranks, or torch.distributed.

On torch.distributed, parameters and cut outputs become DTensors here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim.optimizer import Optimizer

from shardc.capture.containers import flatten, rebuild
from shardc.language.errors import ShardingError, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import Sharding, num_shards
from shardc.options import Zero
from shardc.program.lifetime import is_row_of_kept
from shardc.program.program import Program

from ..agreement.agreement import Agreement, agreement_on
from ..comm.comm import Comm
from ..comm.distributed import TorchComm, gather_whole
from ..comm.dtensor import (
    check_order,
    local,
    pad,
    placements,
    region,
    shard,
    sharding_of,
    unpad,
    unshard,
)
from ..comm.failure import waiting
from ..comm.scatter import Part, batches
from ..comm.simulated import SimulatedComm
from ..execute.executor import Rows, Runner
from ..execute.part import Values
from ..tensor.global_tensor import new_global_tensor
from ..tensor.make import GlobalTensorMaker, to_global
from ..tier.tier import Tier, tier_of
from .initial import InitialValues, is_sent, model_tensors
from .optimizer import StepWatcher, share_overflows
from .value import Value


def conversion_on(mesh: Any, device: torch.device | str = "cpu", zero: Zero | None = None) -> Conversion:
    """The conversion of tensors on a torch DeviceMesh, or on virtual ranks; ``zero`` may offload parameters."""
    if isinstance(mesh, DeviceMesh):
        return DistributedConversion(mesh, zero=zero)
    return VirtualConversion(Mesh.of(mesh), device)


def shard_batch(local: Any, device_mesh: DeviceMesh, spec: P) -> Any:
    """Make a DTensor of the global batch from each rank's own part of it: ``shard_batch(mine, mesh, P("dp"))``.

    Args:
        local: a tensor, of the same shape on every rank, or a tuple, list, dict or dataclass of such tensors. All are
            cut alike; numbers and None stay as they are.
        device_mesh: the mesh of the job.
        spec: the sharding of the global batch.

    Returns:
        ``local`` with a DTensor for each tensor. Each dim of its global shape is the local one times the number of
        ranks that cut it.

    Raises:
        ShardingError: without a DeviceMesh, a P or a tensor.
    """
    if not isinstance(device_mesh, DeviceMesh):
        problem, remedy = "only the ranks of a job hold shards", "give the DeviceMesh of init_device_mesh"
        raise ShardingError("shard_batch", f"the mesh {device_mesh!r}", problem, remedy)
    if not isinstance(spec, P):
        raise ShardingError("shard_batch", repr(spec), "it is no P", "write for example P('dp')")
    leaves, tree = flatten(local)
    if not any(isinstance(each, Tensor) for _, each in leaves):
        problem = "there is no tensor in it"
        raise ShardingError("shard_batch", f"of type {type(local).__name__}", problem, "give tensors of own rows")
    return rebuild(tree, (_global(x, device_mesh, spec) if isinstance(x, Tensor) else x for _, x in leaves))


def _global(local: Tensor, device_mesh: DeviceMesh, spec: P) -> DTensor:
    """The global tensor whose parts on all ranks have the shape of ``local``."""
    mesh = Mesh.of(device_mesh)
    probe = spec.sharding(mesh, tuple(size * mesh.size for size in local.shape), "batch")
    shape = tuple(size * num_shards(cut.all_axes) for size, cut in zip(local.shape, probe.dims, strict=True))
    return to_global(local, spec.sharding(mesh, shape, "batch"), shape, device_mesh, "batch")


class Converter(Protocol):
    """Converts one input or output of a program, whose sharding, global shape and name are fixed.

    Shards are a list, one for each rank in this process.
    """

    def to_shards(self, tensor: Tensor) -> list[Tensor]:
        """The shards of a tensor, padded to the shape that is equal on all ranks."""

    def to_tensor(self, shards: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The tensor of these shards: whole and plain if ``is_plain``, else possibly a DTensor."""

    def write(self, tensor: Tensor, shards: Sequence[Tensor]) -> None:
        """Write shards to a buffer or an input, in place."""

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros, stored like the input or output."""


class VirtualConversion:
    """All ranks in this process: all tensors of the user are plain and whole, and every call cuts them."""

    agreement: Agreement | None = None  # there is only one process
    tier: Tier | None = None  # tensors stay where the user has them

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.comm: Comm = SimulatedComm(mesh, device)

    def gathered_parameters(self) -> None:
        """None: nothing is kept gathered, since a write through ``.data`` of a plain tensor cannot be detected."""

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a parameter or buffer of the user's model for the parallel module."""
        return tensor.detach().clone()

    def copies(
        self, model: nn.Module, initial: str, is_placed_soon: bool, values: Mapping[str, Value] | None = None
    ) -> Copies:
        """The copies of a model's parameters and buffers, with ``values`` in place of theirs."""
        if values is None:
            return Copies({id(each): self.copy(each) for each in (*model.parameters(), *model.buffers())})
        stored = ((name, each) for (kind, name), each in model_tensors(model).items() if kind != "attribute")
        return Copies({id(each): self._written(values[name], each) for name, each in stored})

    def _written(self, value: Value, like: Tensor) -> Tensor:
        """A whole tensor with ``value``, of the shape and dtype of ``like``."""
        whole = torch.empty(like.shape, dtype=like.dtype, device=self.comm.device)
        value.write(whole, Sharding.replicated(self.comm.mesh, like.ndim), 0)
        return whole

    def place(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """The same tensor, which stays whole."""
        return tensor

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """None: all tensors are plain."""
        return None

    def converter(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Converter:
        """The converter of an input or output of a program; ``shape`` is its global shape."""
        return VirtualConverter(sharding, shape, name, self.comm.device)

    def check(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Nothing to check: every tensor may be plain."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a model's tensors, by id. ``awaited``: kinds and names of those that get values at placement."""

    by_id: dict[int, Any]
    awaited: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor of the model, replicated so far, that gets its values now, from the first rank or from a ``Value``.

    ``sharding``: its sharding from now on. ``name``: its name in errors. ``homes``: the ranks of a pipeline that store
    it; None for all.
    """

    tensor: Tensor
    sharding: Sharding
    name: str
    homes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class VirtualConverter:
    """Cuts a whole tensor into the shards of every rank, and joins them."""

    sharding: Sharding
    shape: tuple[int, ...]
    name: str
    device: torch.device
    is_cut: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_cut", any(part.size > 1 for part in self.sharding.cut_axes))

    def to_shards(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.to(self.device)
        if not self.is_cut:
            return [tensor] * self.sharding.mesh.size
        shards = [shard(tensor, self.sharding, position) for position in range(self.sharding.mesh.size)]
        return [pad(each, self.sharding, self.shape, position) for position, each in enumerate(shards)]

    def to_tensor(self, shards: Sequence[Tensor], is_plain: bool) -> Tensor:
        """The whole tensor: the shard of a single rank, or all shards joined. An AssertionError if replicas differ."""
        whole = shards[0] if len(shards) == 1 else unshard(shards, self.sharding, self.shape, self.name)
        return whole.to(self.device)  # a gradient may be in the tier below

    def write(self, tensor: Tensor, shards: Sequence[Tensor]) -> None:
        tensor.copy_(self.to_tensor(shards, is_plain=True))

    def zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.shape, dtype=dtype, device=self.device)


class DistributedConversion:
    """One rank of a torch.distributed job: parameters and cut values are DTensors on one mesh.

    ``job`` and ``agreement``: the communication and the agreement of all ranks of the job's mesh, of which a pipeline's
    ``device_mesh`` is a part. A single rank has no agreement. ``tier``: stores parameters and gradients, unless they
    are on the device.
    """

    def __init__(self, device_mesh: DeviceMesh, job_mesh: DeviceMesh | None = None, zero: Zero | None = None) -> None:
        self.device_mesh, self.torch_comm = device_mesh, TorchComm(device_mesh)
        self.tier = tier_of(zero, self.torch_comm.device)
        self.job = self.torch_comm if job_mesh is None else TorchComm(job_mesh)
        self.agreement = agreement_on(job_mesh or device_mesh)
        self.comm: Comm = self.torch_comm
        check_order(self.torch_comm.mesh)
        share_overflows(device_mesh, self.agreement)

    def gathered_parameters(self) -> GatheredParameters | None:
        return GatheredParameters()

    @cached_property
    def initial_values(self) -> InitialValues:
        """Compares and sends initial values."""
        return InitialValues(self.job, self.agreement)

    def copy(self, tensor: Tensor) -> Tensor:
        """A replicated DTensor with a copy; a DTensor's copy keeps its sharding."""
        if (sharding := self.sharding(tensor, "parameter")) is not None:
            return to_global(local(tensor).clone(), sharding, tuple(tensor.shape), self.device_mesh)
        return self._replicated(self._copied(tensor, tensor.detach(), self.torch_comm.device))

    def _copied(self, tensor: Tensor, piece: Tensor, device: torch.device | None = None) -> Tensor:
        """A contiguous copy of a piece of a model's tensor; a parameter's is in the tier below, if there is one."""
        if self.tier is not None and isinstance(tensor, nn.Parameter):
            return self.tier.copied(piece)
        return piece.to(device or piece.device).clone(memory_format=torch.contiguous_format)

    def copies(
        self, model: nn.Module, initial: str, is_placed_soon: bool, values: Mapping[str, Value] | None = None
    ) -> Copies:
        """The copies of a model's tensors: ``initial`` says whether they start from the first rank's values.

        ``values``: values of parameters and buffers that every rank has; they are copied when tensors are placed.

        Without them the first rank sends its values at once, to whole copies. If some rank has tensors on meta, or if
        tensors are about to be placed, it sends them at placement, to each rank its part alone. Until then other ranks
        have copies on meta; the first rank has copies, or the model's own memory if tensors are about to be placed.
        """
        if values is not None:
            stored = [(key, each) for key, each in model_tensors(model).items() if key[0] != "attribute"]
            return Copies(
                {id(each): self._replicated(each.detach().to("meta")) for _, each in stored},
                frozenset(key for key, _ in stored),
            )
        tensors, sender = model_tensors(model), self.initial_values
        waits = sender.check(tensors, initial) or is_placed_soon
        sends = initial == "broadcast" and self.agreement is not None
        copies, sent, awaited = dict[int, Tensor](), list[Tensor](), set[tuple[str, str]]()
        for (kind, name), tensor in tensors.items():
            is_stored = kind != "attribute"
            if not sends or not is_sent(tensor):
                copies |= {id(tensor): self.copy(tensor)} if is_stored else {}
            elif is_stored and waits:
                awaited.add((kind, name))
                copies[id(tensor)] = self._awaiting(tensor, is_placed_soon)
            elif is_stored:
                copies[id(tensor)] = self.copy(tensor)
                sent.append(local(copies[id(tensor)]))
            else:
                device = self.torch_comm.device if tensor.is_meta else tensor.device
                memory = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
                sent.append(memory if tensor.is_meta else memory.copy_(tensor.detach()))
                copies[id(tensor)] = memory.detach().requires_grad_(tensor.requires_grad)
        sender.broadcast(sent)
        return Copies(copies, frozenset(awaited))

    def _awaiting(self, tensor: Tensor, is_placed_soon: bool) -> Tensor:
        """A replicated DTensor for a tensor whose values are sent later.

        It is on meta, but on the first rank, where it stays on its own device.
        """
        waiting = self._replicated(tensor.detach().to("meta"))
        if self.job.position != 0:
            return waiting
        value = tensor.detach()
        return new_global_tensor(value if is_placed_soon else self._copied(tensor, value), waiting._spec)

    def receive(self, arrivals: Sequence[Arrival]) -> Iterator[Tensor]:
        """Yield for each arrival a DTensor with this rank's shard of the first rank's tensor.

        It is on meta if this rank stores none. Tensors are sent in batches, so that memory is needed for the shards and
        one batch. A batch is sent when its first tensor is asked for.
        """
        for batch in batches([each.tensor.nbytes for each in arrivals]):
            own = [arrivals[i] for i in batch]
            placed, parts = list[Tensor](), list[Part]()
            for each in own:
                placed.append(self._awaited(each))
                parts += self._parts(each, local(placed[-1]))
            self.initial_values.scatter(parts)
            yield from placed

    def filled(self, arrivals: Sequence[Arrival], values: Sequence[Value]) -> Iterator[Tensor]:
        """Yield for each arrival a DTensor with this rank's shard of a value that every rank has."""
        for each, value in zip(arrivals, values, strict=True):
            placed = self._awaited(each)
            if self._stores(self.job.position, each):
                sharding = each.sharding.on(self.torch_comm.mesh)
                value.write(local(placed), sharding, self._position(self.job.position))
            yield placed

    def _awaited(self, arrival: Arrival) -> Tensor:
        """A DTensor with memory for this rank's shard; on meta if this rank stores none."""
        sharding, shape = arrival.sharding.on(self.torch_comm.mesh), tuple(arrival.tensor.shape)
        whole = torch.empty(shape, dtype=arrival.tensor.dtype, device="meta")
        piece = shard(whole, sharding, self.torch_comm.position)
        if self._stores(self.job.position, arrival):
            piece = self._empty(arrival.tensor, piece.shape)
        return to_global(piece, sharding, shape, self.device_mesh, arrival.name)

    def _parts(self, arrival: Arrival, own: Tensor) -> Iterator[Part]:
        """The distinct parts of a tensor that ranks store."""
        sharding, shape = arrival.sharding.on(self.torch_comm.mesh), tuple(arrival.tensor.shape)
        holders: dict[Any, list[int]] = {}
        for position in range(self.job.mesh.size):
            if self._stores(position, arrival):
                holders.setdefault(region(sharding, shape, self._position(position)), []).append(position)
        for where, positions in holders.items():
            nbytes = math.prod(length for _, length in where) * arrival.tensor.dtype.itemsize
            read = partial(shard, local(arrival.tensor), sharding, self._position(positions[0]))
            yield Part(tuple(positions), nbytes, read, own if self.job.position in positions else None)

    def _position(self, position: int) -> int:
        """The position in the mesh of DTensors that belongs to a position in the mesh of all ranks."""
        return position

    def _stores(self, position: int, arrival: Arrival) -> bool:
        """Whether the rank at a position stores a part of a tensor."""
        return True

    def _empty(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a shard of one of the model's tensors."""
        if self.tier is not None and isinstance(tensor, nn.Parameter):
            return self.tier.empty(shape, tensor.dtype)
        return torch.empty(shape, dtype=tensor.dtype, device=self.torch_comm.device)

    def _replicated(self, whole: Tensor) -> DTensor:
        sharding = Sharding.replicated(self.torch_comm.mesh, whole.ndim)
        return to_global(whole, sharding, tuple(whole.shape), self.device_mesh)

    def place(self, tensor: Tensor, sharding: Sharding, name: str) -> Tensor:
        """A DTensor with a copy of this rank's shard."""
        current = self.sharding(tensor, name)
        if current == sharding:
            return tensor
        whole = _replicated(tensor) if current is not None and current.cut_axes else tensor
        piece = self._copied(tensor, shard(local(whole), sharding, self.torch_comm.position))
        return to_global(piece, sharding, tuple(tensor.shape), self.device_mesh, name)

    def sharding(self, tensor: Tensor, name: str) -> Sharding | None:
        """The sharding of a DTensor; None for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        if tensor.device_mesh != self.device_mesh:
            what, problem = f"a DTensor on {tensor.device_mesh}", f"the model is on {self.device_mesh}"
            raise ShardingError(name, what, problem, "make it on the model's mesh, with shardc.shard_batch")
        return sharding_of(tensor.placements, tensor.shape, self.torch_comm.mesh, name)

    def converter(self, sharding: Sharding, shape: tuple[int, ...], name: str) -> Converter:
        return DistributedConverter(self.torch_comm, sharding, shape, name)

    def check(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Raise a ShardingError for parameters that are plain tensors, except on meta, which another stage holds."""
        parameters = {name: tensor for (kind, name), tensor in tensors.items() if kind == "parameter"}
        plain = [name for name, each in parameters.items() if not isinstance(each, DTensor) and not each.is_meta]
        what, problem = "a plain tensor", "it was put into the module that parallelize returned"
        remedy = "put it into the model and call parallelize again: an optimizer needs the DTensor that is made of it"
        raise_all([ShardingError(f"parameter {name!r}", what, problem, remedy) for name in plain])


Conversion = VirtualConversion | DistributedConversion


class DistributedConverter:
    """Converts plain global tensors or DTensors to the shard of this rank, and back.

    No DTensor can have some of the shardings. A value of such a sharding is stored as a DTensor with one close to it
    (``stored``), and is converted through the whole tensor.
    """

    def __init__(self, comm: TorchComm, sharding: Sharding, shape: tuple[int, ...], name: str) -> None:
        self.comm, self.sharding, self.shape, self.name = comm, sharding, shape, name
        self.stored = sharding.storable(shape)
        self.is_padded = not sharding.is_even(shape)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the DTensor. Raises a ShardingError if no DTensor can have such a sharding."""
        return placements(self.stored, self.shape, self.name)

    @cached_property
    def make(self) -> GlobalTensorMaker:
        """The maker of a DTensor from this rank's shard."""
        return GlobalTensorMaker(self.stored, self.shape, self.comm.device_mesh, self.name)

    def to_shards(self, tensor: Tensor) -> list[Tensor]:
        """One shard; a DTensor of another sharding is gathered first."""
        position = self.comm.position
        if isinstance(tensor, DTensor) and tensor.placements == self.placements and self.stored == self.sharding:
            piece = local(tensor)
        else:
            piece = shard(plain(tensor).to(self.comm.device), self.sharding, position)
        return [pad(piece, self.sharding, self.shape, position) if self.is_padded else piece]

    def to_tensor(self, shards: Sequence[Tensor], is_plain: bool) -> Tensor:
        """A DTensor, or the whole tensor if ``is_plain``."""
        return self._whole(shards) if is_plain else self.make(self._stored_shard(shards).contiguous())

    def write(self, tensor: Tensor, shards: Sequence[Tensor]) -> None:
        if isinstance(tensor, DTensor):
            local(tensor).copy_(self._stored_shard(shards))
        else:
            tensor.copy_(self._whole(shards))

    def zeros(self, dtype: torch.dtype) -> Tensor:
        piece = shard(torch.empty(self.shape, device="meta"), self.stored, self.comm.position)
        return self.make(torch.zeros(piece.shape, dtype=dtype, device=self.comm.device))

    def _stored_shard(self, shards: Sequence[Tensor]) -> Tensor:
        if not self.is_padded:
            return shards[0]
        if self.stored != self.sharding:
            return shard(self._whole(shards), self.stored, self.comm.position)
        return unpad(shards[0], self.sharding, self.shape, self.comm.position)

    def _whole(self, shards: Sequence[Tensor]) -> Tensor:
        return gather_whole(self.comm, shards[0], self.sharding, self.shape, self.name)


def plain(tensor: Tensor) -> Tensor:
    """The whole tensor; a DTensor is gathered."""
    return local(_replicated(tensor)) if isinstance(tensor, DTensor) else tensor


def _replicated(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), type(tensor)
    with waiting(lambda: "the gather of a DTensor", lambda: tensor.device_mesh.mesh.flatten().tolist()):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


Shards = list[Tensor]  # one for each rank in this process


class GatheredParameters(StepWatcher):
    """The gathered parameters of a module, for all of its programs (``shards``, by name).

    A parameter counts as written if its version changed, or the address or version of its piece; if an optimizer that
    holds it has stepped; or if its gradient changed outside of a backward, as a user's own optimizer may do in a step.
    All ranks agree on this, since all run one program. State: the versions of the parameters (``_written``) and of
    their gradients (``_gradients``) for which ``shards`` is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shards] = {}
        self._written: tuple[Any, ...] = ()
        self._gradients: tuple[Any, ...] = ()

    def is_current(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these parameters are gathered and were not written since; they are watched from now on."""
        self.watch(parameters.values())
        is_written = self._written != self._versions() or self._gradients != self._gradient_versions()
        return parameters.keys() <= self.shards.keys() and not is_written

    def note_gathered(self) -> None:
        """Note that the shards are those of the current parameters."""
        self._written = self._versions()

    def note_backward(self) -> None:
        """Note that gradients are as a backward has left them."""
        self._gradients = self._gradient_versions()

    def note_step(self, optimizer: Optimizer) -> None:
        self.forget()

    def forget(self) -> None:
        """Make the next call gather all parameters again."""
        self._written = ()

    def _versions(self) -> tuple[Any, ...]:
        pairs = ((each, _piece(each)) for each in self.watched())
        return tuple((each._version, piece._version, piece.data_ptr()) for each, piece in pairs)

    def _gradient_versions(self) -> tuple[Any, ...]:
        gradients = (each.grad for each in self.watched())
        return tuple(None if each is None else (id(each), each._version) for each in gradients)


class ParameterGather:
    """Gathers the parameters of one program if they were written since the last time.

    ``outputs``: for each gathered parameter, by name, the index of the program's output. ``agreed``: whether all ranks
    gather in the next call; None until they have agreed on it.
    """

    def __init__(self, program: Program, runner: Runner, comm: Comm, outputs: Mapping[str, int],
                 cache: GatheredParameters) -> None:  # fmt: skip
        self.program, self.runner, self.comm, self.outputs, self.cache = program, runner, comm, outputs, cache
        self.agreed: bool | None = None
        self._first_rows = dict(self._find_first_rows())

    def is_due(self, tensors: Mapping[tuple[str, str], Tensor]) -> bool:
        """Whether the next call should gather, given the model's tensors by kind and name."""
        return not self.cache.is_current({name: tensors["parameter", name] for name in self.outputs})

    def __call__(self, values: Values, inputs: Sequence[Values]) -> Rows:
        """The gathered parameters of each rank, in the order of the program's outputs.

        ``values``: the program's inputs as the user's tensors. ``inputs``: for each rank their shards.
        """
        pairs = zip(self.program.inputs, values, strict=True)
        parameters = {put.name: value for put, value in pairs if put.name in self.outputs and value is not None}
        gathers = not self.cache.is_current(parameters) if self.agreed is None else self.agreed
        self.agreed = None
        if gathers:
            rows = self.runner.update(inputs, self._rows())
            for name, i in self.outputs.items():
                self.cache.shards[name] = [_dense(piece) for row in rows if (piece := row[i]) is not None]
            for name, row in self._first_rows.items():
                _share_memory(_piece(parameters[name]), self.cache.shards[name][0], row)
            self.cache.note_gathered()
        self.cache.note_backward()
        return self._rows()

    def _rows(self) -> Rows:
        rows: Rows = [[None] * len(self.program.outputs) for _ in self.comm.positions]
        for name, i in self.outputs.items():
            for row, piece in zip(rows, self.cache.shards.get(name, ()), strict=False):
                row[i] = piece
        return rows

    def _find_first_rows(self) -> Iterator[tuple[str, int]]:
        """The parameters whose shard is a range of rows of the gathered parameter, with the first of these rows."""
        for put, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            gathered = self.program.results[self.outputs[put.name]] if put.name in self.outputs else None
            if put.kind != "parameter" or gathered is None:
                continue
            if is_row_of_kept(self.program, put.name, node, gathered):
                stored, computed = self.program.sharding(node), self.program.computed[put.name]
                added = stored.dims[0].axes[len(computed.dims[0].axes) :]
                index = stored.mesh.index(self.comm.positions[0], added)
                yield put.name, index * stored.local_shape(put.type.shape)[0]


def _piece(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _dense(gathered: Tensor) -> Tensor:
    """The tensor, contiguous and with a storage of its own; copied if need be."""
    is_dense = gathered.is_contiguous() and gathered.untyped_storage().nbytes() == gathered.nbytes
    return gathered if is_dense else gathered.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _share_memory(piece: Tensor, gathered: Tensor, row: int) -> None:
    """Make a parameter's shard a view of rows of the gathered parameter, so that it is stored once."""
    rows = gathered[row : row + len(piece)]
    if piece.is_contiguous() and piece.data_ptr() != rows.data_ptr():
        piece.set_(gathered.untyped_storage(), rows.storage_offset(), piece.shape, piece.stride())
