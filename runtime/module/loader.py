"""A DataLoader whose ranks each read their own rows of the global batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shardc.capture.containers import flatten, rebuild
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.mesh import Axes, Mesh
from shardc.language.partition import P
from shardc.language.sharding import WHOLE, DimSharding, Sharding, chunk_of

from ..agreement.agreement import Agreement, agreement_on
from ..agreement.entry import Entry, Kind
from ..agreement.gate import Gate
from ..comm.checksum import checksum
from ..comm.distributed import own_position
from ..comm.dtensor import shard
from ..tensor.make import to_global

Specs = Mapping[str, P | None]


def shard_loader(loader: DataLoader[Any], mesh: Any, specs: P | Specs) -> ShardedLoader:
    """A loader of the same global batches, of which each rank reads only its own rows.

    All ranks iterate together. In each epoch the order of samples is that of the mesh's first rank. Batches that do not
    divide evenly are cut like ``torch.chunk``, and may leave ranks without rows. ``collate_fn`` gets this rank's
    samples; it must return a row for each, with the same sizes of other dims on all ranks.

    Args:
        loader: a loader of the whole data set, with the global batch size.
        mesh: a DeviceMesh, or a Mesh of virtual ranks, for which batches stay whole and plain.
        specs: the sharding of every tensor of a batch, ``P("dp")``, or by name, ``{"ids": P("dp"), "scale": None}``.
            Names are globs over the names that annotations use: the entries of a tuple are ``0``, ``1``, ..., and a
            batch that is a tensor is ``batch``. All must cut dim 0, the rows, alike. A tensor with ``None`` or ``P()``
            stays plain, and must be equal on all ranks.

    Returns:
        An iterable of batches in the containers of ``loader``.

    Raises:
        ShardingError: for a loader without global batches, such as one with an IterableDataset or a DistributedSampler.
    """
    table = {"*": specs} if isinstance(specs, P) else specs
    _check(loader, table)
    return ShardedLoader(loader, Rows.of(mesh, table) if isinstance(mesh, DeviceMesh) else None)


def _check(loader: Any, specs: Any) -> None:
    who = "shard_loader"
    if not isinstance(loader, DataLoader):
        problem, remedy = (
            "it takes a DataLoader",
            "give the DataLoader of the whole data set, with the global batch_size",
        )
        raise ShardingError(who, f"of type {type(loader).__name__}", problem, remedy)
    if isinstance(loader.dataset, IterableDataset):
        problem = "its samples have no numbers by which a rank could read its own alone"
        remedy = "let it yield each rank's own rows, and write shardc.shard_batch(rows, mesh, P('dp'))"
        raise ShardingError(who, "an IterableDataset", problem, remedy)
    if loader.batch_sampler is None:
        raise ShardingError(who, "batch_size=None", "its data set makes the batches", "say the global batch_size")
    if any(isinstance(each, DistributedSampler) for each in (loader.sampler, loader.batch_sampler)):
        problem = "it gives each rank other samples, where all ranks go through the same global batches"
        raise ShardingError(who, "a DistributedSampler", problem, "leave it out, and say shuffle=True")
    if not hasattr(loader.batch_sampler, "__len__"):
        what, problem = f"a {type(loader.batch_sampler).__name__} without a length", "an epoch's order is drawn at once"
        raise ShardingError(who, what, problem, "give it a method __len__, the number of batches in an epoch")
    if not isinstance(specs, Mapping) or not all(each is None or isinstance(each, P) for each in specs.values()):
        raise ShardingError(
            who, f"specs={specs!r}", "it is neither a P nor a dict of them", "write for example P('dp')"
        )


class ShardedLoader:
    """The batches of a DataLoader as DTensors, of which this rank reads only its own rows.

    ``len`` and all attributes are those of the DataLoader. Without ``rows`` its batches are whole and plain.
    """

    def __init__(self, loader: DataLoader[Any], rows: Rows | None) -> None:
        self.loader, self._rows, self._own = loader, rows, _Samples()
        self._gate = None if rows is None or rows.agreement is None else _gate(rows.agreement)
        if rows is not None:
            self._reader: DataLoader[Any] = DataLoader(
                loader.dataset, batch_sampler=self._own, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context, generator=torch.Generator(),
                prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        if self._rows is None:
            yield from self.loader
            return
        rows = self._rows
        if self._gate is not None:
            self._gate.enter(Entry(Kind.EPOCH, self._gate.digest))
        with self._telling():
            order, seed = epoch_order(self.loader, rows.agreement)
        own = [rows.of_batch(len(samples)) for samples in order]
        pairs = zip(order, own, strict=True)
        self._own.batches = [samples[start : start + count] or samples[:1] for samples, (start, count) in pairs]
        self._reader.generator.manual_seed(seed + rows.index)  # equal on ranks that read the same rows
        reader = iter(self._reader)
        for i, samples in enumerate(order):
            with self._telling():
                batch = next(reader)
            if i == 0:
                rows.compare(batch, own[0])
            with self._telling():
                placed = rows.placed(batch, len(samples), own[i][1])
            yield placed

    def _telling(self) -> AbstractContextManager[None]:
        """Context that tells the other ranks, if there are any, of an error in the block."""
        return nullcontext() if self._gate is None else self._gate.telling()


def _gate(agreement: Agreement) -> Gate:
    """The gate of the next loader on these ranks, which all of them pass to begin an epoch."""
    agreement.num_modules["loader"] += 1
    return Gate(agreement, f"loader {agreement.num_modules['loader']} of shard_loader", "1")


class _Samples:
    """A batch sampler of this rank's samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def epoch_order(loader: DataLoader[Any], agreement: Agreement | None) -> tuple[list[list[Any]], int]:
    """The samples of every global batch of an epoch, as the first rank draws them, and a seed for workers.

    The other ranks draw from the states of the first rank's generators. They restore torch's default generator
    afterwards, unless it had the first rank's state already. Raises a ShardingError if the orders differ all the same.
    """
    if agreement is None:
        return _drawn(loader)
    samplers = (loader, loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = (getattr(each, "generator", None) for each in samplers)
    generators = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
    states = [torch.get_rng_state(), *(each.get_state() for each in generators)]
    own = torch.cat(states).numpy().tobytes()
    first = agreement.exchange(own if agreement.ranks[0] == torch.distributed.get_rank() else b"")[0]
    if len(first) == len(own):
        sent = torch.frombuffer(bytearray(first), dtype=torch.uint8).split([len(each) for each in states])
        for generator, state in zip(generators, sent[1:], strict=True):
            generator.set_state(state.clone())
        is_same = torch.equal(states[0], sent[0])
        with nullcontext() if is_same else torch.random.fork_rng(devices=()):
            torch.set_rng_state(sent[0].clone())
            order, seed = _drawn(loader)
    else:
        order, seed = _drawn(loader)
    digests = agreement.exchange(hashlib.sha256(repr(order).encode()).digest())
    other = next((i for i, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise ShardingError(
            "shard_loader", f"the samples of an epoch differ on rank {agreement.ranks[0]} and rank "
            f"{agreement.ranks[other]}", "data sets have other lengths, or the sampler draws from no torch.Generator",
            "give all ranks one data set, and say shuffle=True or a sampler that draws from torch's generators",
        )  # fmt: skip
    return order, seed


def _drawn(loader: DataLoader[Any]) -> tuple[list[list[Any]], int]:
    """The samples of every batch, drawn as the DataLoader's own iterator draws them: after a seed for its workers."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
    return [list(samples) for samples in loader.batch_sampler or ()], seed % 2**62


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of global batches. ``axes``: the mesh axes that cut dim 0.

    ``agreement``: that of all ranks that iterate together, those of other pipeline stages included.
    """

    device_mesh: DeviceMesh
    mesh: Mesh
    specs: Specs
    axes: Axes
    position: int
    agreement: Agreement | None

    @staticmethod
    def of(device_mesh: DeviceMesh, specs: Specs) -> Rows:
        """The rows that specs give this rank. Raises a ShardingError if they cut dim 0 differently."""
        mesh = Mesh.of(device_mesh)
        cut = {name: spec for name, spec in specs.items() if spec is not None and spec.entries}
        dims = {name: _rows_of(spec, mesh, name) for name, spec in cut.items()}
        for name, dim in dims.items():
            if dim != next(iter(dims.values())):
                what = f"{', '.join(f'{key}: {spec!r}' for key, spec in cut.items())}"
                problem = "dim 0 is cut differently, where a rank reads its rows of every tensor"
                raise ShardingError("shard_loader", what, problem, f"cut dim 0 of {name!r} as of the others")
        axes = next(iter(dims.values())).axes if dims else ()
        return Rows(device_mesh, mesh, specs, axes, own_position(device_mesh), agreement_on(_root(device_mesh)))

    @property
    def index(self) -> int:
        """The index of this rank among the ranks that read different rows."""
        return self.mesh.index(self.position, self.axes)

    def of_batch(self, count: int) -> tuple[int, int]:
        """The first row and the number of rows of this rank in a batch of ``count``."""
        cut = Sharding(self.mesh, (DimSharding(self.axes),)).storable((count,)).dims[0]
        return chunk_of(count, cut.axes, self.mesh, self.position)

    def compare(self, batch: Any, rows: tuple[int, int]) -> None:
        """Raise a ShardingError on every rank if two ranks have read different values of the same rows of a batch."""
        if self.agreement is None:
            return
        tensors = [each for _, each in flatten(batch)[0] if isinstance(each, Tensor)]
        numbers = b"".join(int(checksum(each)).to_bytes(8, "big", signed=True) for each in tensors)
        key = rows[0].to_bytes(8, "big") + rows[1].to_bytes(8, "big")
        found = self.agreement.exchange(key + hashlib.sha256(numbers).digest())
        firsts: dict[bytes, int] = {}
        for i, each in enumerate(found):
            first = firsts.setdefault(each[:16], i)
            if found[first] != each and int.from_bytes(each[8:16], "big"):
                ranks = [self.agreement.ranks[first], self.agreement.ranks[i]]
                raise ShardingError(
                    "shard_loader", f"the first batch, read on rank {ranks[0]} and rank {ranks[1]}",
                    "both have the same rows of it, and their values differ",
                    "give all ranks one data set; random numbers that it draws are alike with num_workers=1 or more",
                )  # fmt: skip

    def placed(self, batch: Any, total: int, count: int) -> Any:
        """A batch with DTensors of the global batch of ``total`` rows, made of this rank's ``count`` samples."""
        leaves, tree = flatten(batch)
        names = [name or "batch" for name, _ in leaves]
        tensors = [name for name, (_, value) in zip(names, leaves, strict=True) if isinstance(value, Tensor)]
        if unused := [each for each in self.specs if not any(fnmatchcase(name, each) for name in tensors)]:
            remedy = did_you_mean(unused[0], tensors) or f"use one of {', '.join(tensors)}"
            raise ShardingError("shard_loader", f"specs[{unused[0]!r}]", "no tensor of a batch has this name", remedy)
        values = (
            self._tensor(name, value, total, count) if isinstance(value, Tensor) else value
            for name, (_, value) in zip(names, leaves, strict=True)
        )  # fmt: skip
        return rebuild(tree, values)

    def _tensor(self, name: str, value: Tensor, total: int, count: int) -> Tensor:
        pattern = next((each for each in self.specs if fnmatchcase(name, each)), None)
        if pattern is None:
            problem, remedy = "specs do not say how it is cut", f"add {name!r}: P('dp'), or None for one without rows"
            raise ShardingError("shard_loader", f"{name!r} of a batch", problem, remedy)
        spec = self.specs[pattern]
        if spec is None or not spec.entries:
            return value
        if value.ndim == 0 or len(value) != max(count, 1):
            what, problem = f"shape {list(value.shape)} of {max(count, 1)} samples", "it has no row for each sample"
            raise ShardingError(
                f"{name!r} of a batch", what, problem, f"let collate_fn stack rows, or say {name!r}: None"
            )
        shape = (total, *value.shape[1:])
        sharding = spec.sharding(self.mesh, shape, f"{name!r} of a batch").storable(shape)
        piece = shard(value[:count], replace(sharding, dims=(WHOLE, *sharding.dims[1:])), self.position)
        device = torch.device(self.device_mesh.device_type)
        return to_global(piece.contiguous().to(device, non_blocking=True), sharding, shape, self.device_mesh, name)


def _rows_of(spec: P, mesh: Mesh, name: str) -> DimSharding:
    """The sharding of dim 0 by a spec."""
    dim = P(spec.entries[0]).sharding(mesh, (mesh.size**2,), f"shard_loader, {name!r}").dims[0]
    if dim.minor:
        raise ShardingError("shard_loader", repr(spec), "rows have no blocks", "write P('dp')")
    return dim


def _root(device_mesh: DeviceMesh) -> DeviceMesh:
    """The whole mesh that a mesh is a part of."""
    root: DeviceMesh = device_mesh._get_root_mesh()
    return root
