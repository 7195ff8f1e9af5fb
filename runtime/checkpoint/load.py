"""``shardc.load``: the ranks verify all files together, then each rank reads the blocks that it stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardc.language.errors import CheckpointError, did_you_mean

from ..comm.dtensor import local, own_part
from ..feedback.residuals import Source
from ..local.outer import PREFIX
from ..module.module import ParallelModule
from ..tensor.global_tensor import GlobalTensor
from ..tier.files import empty_beside
from .file import CODES, DTYPES, OpenFile
from .folder import resolve_of_group
from .index import NAME, Index, TensorEntry
from .ranks import Ranks, group_of, ranks_of
from .region import Layout
from .save import check_request, finish_save
from .state import Names, block_of, layout_of, optimizer_names, unwrapped
from .tree import decode, key_of

# State of torch's optimizers that is a plain 0-dim tensor for parameters of any shape.
PLAIN_SCALARS = {"step", "eta", "mu", "mu_product"}


def load(
    path: str | os.PathLike[str],
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint, saved on any mesh, into a module and an optimizer; every rank of the job must call it.

    Each rank reads the blocks that it stores.

    Args:
        path: the folder given to ``shardc.save``, whose latest checkpoint is loaded, or one of its checkpoints.
        module: a parallel module, or a plain one; without it nothing is filled, and everything is returned.
        optimizer: the optimizer of its parameters.
        scheduler: an object with a ``load_state_dict``.
        scaler: likewise.

    Returns:
        The checkpoint's ``step``, ``extra`` and ``path``. Without a module also everything else that was saved, as
        whole plain tensors: ``model``, by name, ``optimizer``, and so on.

    Raises:
        CheckpointError: for a file that is missing or damaged, or a tensor that does not fit, which it names; nothing
            was changed then.
    """
    check_request(path, nn.Identity() if module is None else module, optimizer, None, None)
    if module is None:
        _refuse_without_module(optimizer, scheduler, scaler)
        return read_whole(Path(path))
    module = unwrapped(module)
    ranks = ranks_of(module, "loads")
    finish_save(ranks)
    checkpoint = open_checkpoint(Path(path), ranks, group_of(module))
    parts, error = [], None
    try:
        target = Target(module, optimizer, {"scheduler": scheduler, "scaler": scaler}, ranks)
        target.check(checkpoint)
        parts = list(target.parts(checkpoint))
    except Exception as caught:
        error = caught
    checkpoint.verify(ranks, error)
    try:
        result = target.fill(checkpoint, parts)
    except Exception as caught:
        error = caught
    ranks.agree(error)
    return result


def _refuse_without_module(*others: Any) -> None:
    if any(other is not None for other in others):
        what, problem = "an optimizer, scheduler or scaler without a module", "its parameters are known by their names"
        raise CheckpointError("shardc.load", what, problem, "write shardc.load(path, module, optimizer)")


@dataclass(slots=True)
class Checkpoint:
    """An open checkpoint: its folder, its index, and its files, which are opened when they are first read."""

    folder: Path
    index: Index
    files: dict[str, OpenFile]

    def file(self, name: str) -> OpenFile:
        """A file of the checkpoint, opened. Raises a CheckpointError if it is missing or has not the index's size."""
        if name not in self.files:
            self.files[name] = OpenFile(self.folder / name, self.index.files[name].size)
        return self.files[name]

    def verify(self, ranks: Ranks, error: Exception | None) -> None:
        """Verify the SHA-256 and the tensors of every file, each on one rank; raise an error of one rank on all."""
        try:
            names = list(own_files(self.index, ranks)) if error is None else []
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
                list(threads.map(self._verify, names))
        except Exception as caught:
            error = caught
        ranks.agree(error)

    def _verify(self, name: str) -> None:
        file = self.file(name)
        if file.sha256() != self.index.files[name].sha256:
            what, problem = "its SHA-256 is not the one in the index", "the file was changed or damaged"
            raise CheckpointError(str(file.path), what, problem, "load another checkpoint, or restore the file")
        expected = {
            piece.key: (tensor.code, piece.block.sizes)
            for tensor in self.index.tensors.values()
            for piece in tensor.pieces
            if piece.file == name
        }
        found = {key: (header.code, header.shape) for key, header in file.headers.items()}
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                what, problem = f"tensor {key!r}", f"the index says {expected.get(key)}, the file has {found.get(key)}"
                raise CheckpointError(str(file.path), what, problem, "load another checkpoint")

    def read(self, name: str, value: Tensor, layout: Layout) -> None:
        """Fill ``value``, the part of a tensor that this rank stores."""
        entry = self.index.tensors[name]
        for stored in layout.blocks(entry.shape):
            for piece in entry.pieces:
                if (common := stored.block.meet(piece.block)) is not None:
                    source = block_of(self.file(piece.file).tensor(piece.key), common.within(piece.block), common.sizes)
                    place = tuple(map(int.__add__, stored.offsets, common.within(stored.block)))
                    block_of(value, place, common.sizes).copy_(source)

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in host memory."""
        entry = self.index.tensors[name]
        value = torch.empty(entry.shape, dtype=DTYPES[entry.code])
        self.read(name, value, Layout((0,), (1,), (None,), 0))
        return value

    def value(self, section: str) -> Any:
        """The value of a section, with whole tensors; None if it was not saved."""
        return self.decoded(self.index.values.get(section), self.whole)

    def residuals(self, ranks: Ranks) -> dict[str, list[Source]]:
        """By name of a residual, functions that add its saved values to the tensor that stores it from now on."""
        found = self.decoded(self.index.values.get("residuals"), lambda key: partial(self._add_residual, key, ranks))
        return found or {}

    def _add_residual(self, key: str, ranks: Ranks, tensor: Tensor) -> None:
        """Add this rank's part of a residual; if the number of ranks differs from the saved one, a share of the sum."""
        entry, layout = self.index.tensors[key], layout_of(tensor, ranks, key)
        if entry.shape[1:] != tensor.shape[1:]:
            return  # a gradient of another shape
        if entry.shape == tensor.shape:
            part = torch.zeros_like(own_part(tensor))
            self.read(key, part, layout)
            own_part(tensor).add_(part)
            return
        total = self.whole(key).sum(0, keepdim=True).div_(len(tensor)).expand(tensor.shape)
        for stored in layout.blocks(tuple(tensor.shape)):
            part = block_of(total, stored.block.offsets, stored.block.sizes).to(tensor.device)
            block_of(own_part(tensor), stored.offsets, stored.block.sizes).add_(part)

    def decoded(self, value: Any, tensor: Callable[[str], Any]) -> Any:
        """Decode a value of the index. Raises a CheckpointError if it is malformed."""
        try:
            return decode(value, tensor)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            what, remedy = "a value that no save writes", "load another checkpoint"
            raise CheckpointError(str(self.folder / NAME), what, problem, remedy) from error

    def result(self) -> dict[str, Any]:
        """The part of the result that every load returns."""
        return {"step": self.index.values["step"], "extra": self.value("extra"), "path": self.folder}


def open_checkpoint(path: Path, ranks: Ranks, group: int = 0) -> Checkpoint:
    """The checkpoint that the first rank finds at a path, opened on every rank.

    ``group``: the index of these ranks' group, if several train by themselves.
    """
    found, error = ("", ""), None
    if ranks.is_first:
        try:
            folder, sha256 = resolve_of_group(path, group)
            index, own = Index.read(folder / NAME)
            if sha256 is not None and sha256 != own:
                what, problem = "its SHA-256 of the index is not that of the index", "it was damaged, or the index was"
                raise CheckpointError(str(folder.parent / "latest"), what, problem, f"load {folder} by its own path")
            found = str(folder), own
        except Exception as caught:
            error = caught
    name, sha256 = json.loads(ranks.agree(error, json.dumps(found))[0])
    if not ranks.is_first:
        try:
            index, own = Index.read(Path(name) / NAME)
            if own != sha256:
                what, problem = "not the index that the first rank reads", "its SHA-256 is another one"
                remedy = "give a folder on a file system that all ranks share"
                raise CheckpointError(str(Path(name) / NAME), what, problem, remedy)
        except Exception as caught:
            error = caught
    ranks.agree(error)
    return Checkpoint(Path(name), index, {})


def own_files(index: Index, ranks: Ranks) -> Iterator[str]:
    """The files that this rank verifies: each file belongs to one rank, and all ranks get about as many bytes."""
    loads = [0] * len(ranks.ranks)
    for name, entry in sorted(index.files.items(), key=lambda each: (-each[1].size, each[0])):
        writer = loads.index(min(loads))
        loads[writer] += entry.size
        if writer == ranks.index:
            yield name


def read_whole(path: Path) -> dict[str, Any]:
    """The whole content of a checkpoint, with plain tensors."""
    checkpoint = open_checkpoint(path, Ranks())
    checkpoint.verify(Ranks(), None)
    index = checkpoint.index
    model = {name: checkpoint.whole(f"model/{name}") for name in names_of(index)}
    model |= {alias: model[name] for alias, name in index.aliases.items()}
    values = {section: checkpoint.value(section) for section in index.values}
    return {"model": model} | values | checkpoint.result()


def names_of(index: Index) -> Iterator[str]:
    """The names of the module's tensors, each under its first name."""
    for key in index.tensors:
        section, _, name = key.partition("/")
        if section == "model":
            yield name


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, and the part of it that this rank stores."""

    key: str
    value: Tensor
    layout: Layout


class Target:
    """The module, optimizer and others that a checkpoint is loaded into."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Any], ranks: Ranks) -> None:
        self.module, self.optimizer, self.others, self.ranks = module, optimizer, others, ranks
        self.names = Names.of(module)
        self.optimizer_state: dict[str, Any] = {}
        self.optimizer_groups: list[dict[str, Any]] = []

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a CheckpointError for the first tensor or section that does not fit."""
        index = checkpoint.index
        for value in index.values.values():
            checkpoint.decoded(value, index.tensors.__getitem__)
        known = {*names_of(index), *index.aliases}
        own = {*self.names.tensors, *self.names.aliases}
        missing, unknown = sorted(own - known), sorted(known - self._all_names())
        for names, problem in ((missing, "the checkpoint does not have it"), (unknown, "the module does not have it")):
            if names:
                what = f"and {len(names) - 1} more" if len(names) > 1 else "a parameter or buffer"
                remedy = did_you_mean(names[0], known if names is missing else own) or "load the model that was saved"
                raise CheckpointError(f"{checkpoint.folder}: {names[0]!r}", what, problem, remedy)
        for name, tensor in self.names.tensors.items():
            entry = index.tensors[f"model/{index.aliases.get(name, name)}"]
            self._check_type(f"{checkpoint.folder}: {name!r}", tensor, entry)
        for alias, name in self.names.aliases.items():
            if index.aliases.get(alias, alias) != index.aliases.get(name, name):
                what, problem = f"tied to {name!r} in the module", "the checkpoint has two tensors"
                raise CheckpointError(
                    f"{checkpoint.folder}: {alias!r}", what, problem, "untie them, or tie them before"
                )
        sections = {"optimizer": self.optimizer, **self.others}
        for section, each in sections.items():
            if each is not None and section not in index.values:
                what, problem = f"it holds {', '.join(('model', *index.values))}", f"it was saved without {section}="
                remedy = f"leave {section}= out to load the rest"
                raise CheckpointError(str(checkpoint.folder), what, problem, remedy)
        if self.optimizer is not None:
            self._check_optimizer(checkpoint, self.optimizer)

    def _all_names(self) -> set[str]:
        """The names of all parameters and buffers, including those of other pipeline stages."""
        named: Sequence[Iterator[tuple[str, Tensor]]] = (
            nn.Module.named_parameters(self.module, remove_duplicate=False),
            nn.Module.named_buffers(self.module, remove_duplicate=False),
        )
        return {name for each in named for name, _ in each}

    def _check_type(self, who: str, tensor: Tensor, entry: TensorEntry) -> None:
        if tensor.is_meta:
            remedy = "give it memory first: module.to_empty(device=...)"
            raise CheckpointError(who, "on meta in the module", "there is no memory to load it to", remedy)
        found = TensorEntry(CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), ())
        if (found.code, found.shape) != (entry.code, entry.shape):
            problem = f"the module's is {found}"
            raise CheckpointError(who, f"{entry} in the checkpoint", problem, "load the model that was saved")

    def _check_optimizer(self, checkpoint: Checkpoint, optimizer: Optimizer) -> None:
        """Find the saved options of each group; raise a CheckpointError if parameters or groups do not fit."""
        saved = checkpoint.index.values["optimizer"]
        options = {name: group["options"] for group in saved["groups"] for name in group["params"]}
        aliases = checkpoint.index.aliases
        for names in optimizer_names(self.names, optimizer):
            found = [options.get(aliases.get(name, name)) for name in names]
            for name, each in zip(names, found, strict=True):
                if each is None:
                    what, problem = "a parameter of the optimizer", "the optimizer that was saved did not have it"
                    remedy = "give the optimizer the parameters that it had"
                    raise CheckpointError(f"{checkpoint.folder}: {name!r}", what, problem, remedy)
                if each != found[0]:
                    what, problem = f"in one group with {names[0]!r}", "they were saved with other options"
                    remedy = "make the groups of the optimizer as they were"
                    raise CheckpointError(f"{checkpoint.folder}: {name!r}", what, problem, remedy)
            self.optimizer_groups.append((found[0] if found else None) or {})

    def parts(self, checkpoint: Checkpoint) -> Iterator[Part]:
        """The parts that this rank reads; makes tensors for state that the optimizer does not have yet."""
        aliases, ranks = checkpoint.index.aliases, self.ranks
        layouts = {name: layout_of(each, ranks, name) for name, each in self.names.tensors.items()}
        for name, tensor in self.names.tensors.items():
            yield Part(f"model/{aliases.get(name, name)}", own_part(tensor), layouts[name])
        if self.optimizer is None:
            return
        pairs = zip(optimizer_names(self.names, self.optimizer), self.optimizer.param_groups, strict=True)
        for names, group in pairs:
            for name, parameter in zip(names, group["params"], strict=True):
                for key, each in self._state_tensors(checkpoint, self.optimizer, name, parameter).items():
                    yield Part(key, own_part(each), layout_of(each, ranks, key, layouts[name]))

    def _state_tensors(
        self, checkpoint: Checkpoint, optimizer: Optimizer, name: str, parameter: Tensor
    ) -> dict[str, Tensor]:
        """The tensors of a parameter's state, by key, which are to be filled; keeps the state for ``fill``."""
        saved_name = checkpoint.index.aliases.get(name, name)
        prefix, tensors = key_of(("optimizer", saved_name, "")), dict[str, Tensor]()
        present = optimizer.state.get(parameter, {})

        def find(key: str) -> Tensor:
            entry = checkpoint.index.tensors[key]
            tensors[key] = state_tensor(key.removeprefix(prefix), entry, parameter, present)
            return tensors[key]

        saved = checkpoint.index.values["optimizer"]["state"].get(saved_name, {})
        self.optimizer_state[name] = checkpoint.decoded(saved, find)
        return tensors

    @torch.no_grad()
    def fill(self, checkpoint: Checkpoint, parts: Sequence[Part]) -> dict[str, Any]:
        """Read all parts and values, which were all checked before."""
        for part in parts:
            checkpoint.read(part.key, part.value, part.layout)
        values = checkpoint.index.values
        outer = self.module.shardc.outer if isinstance(self.module, ParallelModule) else None
        if outer is not None:
            outer.note_loaded()
            outer.load_early(checkpoint.decoded(values.get("outer"), partial(self._outer_tensor, checkpoint)) or {})
        else:
            self._forget_outer()
        if isinstance(self.module, ParallelModule) and "random" in values:
            runtime, random = self.module.shardc, values["random"]
            runtime.seed, runtime.step = random["seed"], random["step"]
            runtime.load_residuals(checkpoint.residuals(self.ranks))
        for name, each in (checkpoint.value("extra_state") or {}).items():
            self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(each)
        if self.optimizer is not None:
            self._fill_optimizer(checkpoint, self.optimizer)
            if isinstance(self.module, ParallelModule):
                self.module.shardc.feedback.attach(self.optimizer)
        for section, each in self.others.items():
            if each is not None:
                each.load_state_dict(checkpoint.value(section))
        return checkpoint.result()

    def _outer_tensor(self, checkpoint: Checkpoint, key: str) -> Tensor:
        """A saved tensor of a parameter's outer steps, cut like the parameter."""
        name = next(name for name in self.names.tensors if key.startswith(f"{key_of(('outer', name))}/"))
        parameter = self.names.tensors[name]
        tensor = state_tensor("", checkpoint.index.tensors[key], parameter, {})
        checkpoint.read(key, own_part(tensor), layout_of(tensor, self.ranks, key))
        return tensor

    def _forget_outer(self) -> None:
        """Drop the optimizer's state of outer steps: all ranks train together now."""
        for name, state in self.optimizer_state.items():
            self.optimizer_state[name] = {key: each for key, each in state.items() if not key.startswith(PREFIX)}

    def _fill_optimizer(self, checkpoint: Checkpoint, optimizer: Optimizer) -> None:
        names = [name for group in optimizer_names(self.names, optimizer) for name in group]
        numbers = {name: i for i, name in enumerate(names)}
        groups: list[dict[str, Any]] = []
        pairs = zip(optimizer.param_groups, self.optimizer_groups, optimizer_names(self.names, optimizer), strict=True)
        for group, saved, own in pairs:
            current = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            options = checkpoint.decoded(saved, checkpoint.whole)
            groups.append(current | options | {"params": [numbers[name] for name in own]})
        state = {numbers[name]: each for name, each in self.optimizer_state.items() if each}
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def state_tensor(kind: str, entry: TensorEntry, parameter: Tensor, present: Mapping[str, Any]) -> Tensor:
    """A tensor for a value of a parameter's state: the optimizer's own, or a new one that is cut like the parameter."""
    dtype, own = DTYPES[entry.code], present.get(kind)
    if isinstance(own, Tensor) and own.dtype == dtype and tuple(own.shape) == entry.shape:
        return own
    if kind.removeprefix(PREFIX) in PLAIN_SCALARS and not entry.shape:
        return torch.empty((), dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.empty(entry.shape, dtype=dtype, device=parameter.device if entry.shape else "cpu")
    if entry.shape == tuple(parameter.shape):
        piece = empty_beside(local(parameter), dtype)
        meta = parameter._spec.tensor_meta._replace(dtype=dtype)  # type: ignore[union-attr]
        spec = replace(parameter._spec, tensor_meta=meta)
        result: DTensor = DTensor.__new__(DTensor, piece, spec, requires_grad=False)
    else:
        value = torch.empty(entry.shape, dtype=dtype, device=local(parameter).device)
        result = DTensor.from_local(value, parameter.device_mesh, run_check=False)
    return GlobalTensor.of(result) if isinstance(parameter, GlobalTensor) else result
