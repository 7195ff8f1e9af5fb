"""The state to save of a module, an optimizer and others: tensors by key, each with its layout, and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardc.language.errors import CheckpointError
from shardc.program.program import residual_owner

from ..comm.dtensor import own_part
from ..module.module import ParallelModule
from ..pipeline.module import PipelineModule
from .ranks import Ranks
from .region import Cut, Layout
from .tree import encode, key_of


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as this rank stores it: its global shape, the part on this rank, and its layout on the job's ranks.

    ``is_saved``: False if the ranks of another pipeline stage hold the tensor too, and save it.
    """

    shape: tuple[int, ...]
    value: Tensor
    layout: Layout
    is_saved: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """Tensors by key, further names of tied parameters, and values; the first holder of a parameter has its values."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """The tensors of a module by first name, the first names by further names, and other entries of ``state_dict``."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    others: dict[str, Any]

    @staticmethod
    def of(module: nn.Module) -> Names:
        """The names in ``state_dict``: without non-persistent buffers; in a pipeline those of this rank's stages."""
        tensors, first, others = dict[str, Tensor](), dict[int, str](), dict[str, Any]()
        aliases: dict[str, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                others[name] = value
            elif first.setdefault(id(value), name) == name:
                tensors[name] = value
            else:
                aliases[name] = first[id(value)]
        return Names(tensors, aliases, others)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or ``torch.compile``, which has the user's names."""
    inner: Any = module
    while isinstance(inner, DistributedDataParallel) or "_orig_mod" in inner._modules:
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return cast(nn.Module, inner)


def state_to_save(module: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Any], ranks: Ranks) -> State:
    """The state of a module and an optimizer, and ``others`` by section. CheckpointError if a value cannot be saved."""
    state, names = State({}, {}, {}), Names.of(module)
    layouts: dict[int, tuple[Layout, bool]] = {}
    for name, tensor in names.tensors.items():
        layout, is_saved = layout_of(tensor, ranks, name), is_saved_here(module, name)
        layouts[id(tensor)] = layout, is_saved
        state.tensors[key_of(("model", name))] = Stored(tuple(tensor.shape), own_part(tensor), layout, is_saved)
    state.aliases.update(names.aliases)
    if names.others:
        state.values["extra_state"] = _encoded(names.others, state, ranks, "extra_state")
    if isinstance(module, ParallelModule):
        state.values["random"] = {"seed": module.shardc.seed, "step": module.shardc.step}
        if residuals := module.shardc.feedback.residuals.by_name():
            encoded = state.values["residuals"] = {}
            for name, each in residuals.items():
                is_saved = is_saved_here(module, residual_owner(name))
                encoded[name] = _encoded(each, state, ranks, "residuals", name, is_saved=is_saved)
        if module.shardc.outer is not None and (early := module.shardc.outer.early_by_name()):
            state.values["outer"] = _encoded(early, state, ranks, "outer")
    if optimizer is not None:
        state.values["optimizer"] = _optimizer_values(module, names, optimizer, layouts, state)
    for section, value in others.items():
        if value is not None:
            state.values[section] = _encoded(value, state, ranks, section)
    return state


def is_saved_here(module: nn.Module, name: str) -> bool:
    """Whether this rank's stage saves a tensor that several stages of a pipeline may hold; True without a pipeline."""
    return not isinstance(module, PipelineModule) or module.shardc.is_first_home(name)


def layout_of(tensor: Tensor, ranks: Ranks, name: str, like: Layout | None = None) -> Layout:
    """The layout of a tensor: a DTensor's by its placements; a plain one is on all ranks of ``like``, or of the job."""
    if isinstance(tensor, DTensor):
        cuts = tuple(_cut_of(each, name) for each in tensor.placements)
        return Layout(*_grid_of(tensor.device_mesh), cuts, _position_in(tensor.device_mesh))
    if like is not None:
        return Layout(like.ranks, like.shape, (None,) * len(like.shape), like.position)
    return Layout(ranks.ranks, (len(ranks.ranks),), (None,), ranks.index)


def _cut_of(placement: Placement, name: str) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    dim = getattr(placement, "dim", None)
    if dim is None:
        what, problem = f"a DTensor with {placement}", "it is the part of a sum"
        raise CheckpointError(name, what, problem, "redistribute it to Replicate or Shard first")
    return Cut(dim, 1 if type(placement) is Shard else int(placement.split_factor))  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _grid_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape)


def _position_in(mesh: DeviceMesh) -> int:
    position = 0
    for index, size in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
        position = position * size + index
    return position


def _encoded(value: Any, state: State, ranks: Ranks, *path: str, is_saved: bool = True) -> Any:
    """The encoded values of a section, or of a ``path`` in it; plain tensors are equal on all ranks of the job.

    ``is_saved``: whether this rank's stage of a pipeline saves them, of several that hold them.
    """
    tensors: dict[str, Tensor] = {}
    encoded = encode(value, path, tensors)
    for key, each in tensors.items():
        state.tensors[key] = Stored(tuple(each.shape), own_part(each), layout_of(each, ranks, key), is_saved)
    return encoded


def optimizer_names(names: Names, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group. CheckpointError for one that the module does not have."""
    by_id = {id(each): name for name, each in names.tensors.items()}
    found = [[by_id.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    for i, group in enumerate(found):
        if None in group:
            what, problem = f"its parameter {group.index(None)}", "is not a parameter of the module"
            remedy = "make the optimizer from module.parameters() of the module that is saved"
            raise CheckpointError(f"optimizer, group {i}", what, problem, remedy)
    return [[name for name in group if name is not None] for group in found]


def _optimizer_values(
    module: nn.Module, names: Names, optimizer: Optimizer, layouts: Mapping[int, tuple[Layout, bool]], state: State
) -> dict[str, Any]:
    """The optimizer's values by the names of parameters: of those whose first holder is this rank's stage."""
    values: dict[str, Any] = {"state": {}, "groups": []}
    for group, group_names in zip(optimizer.param_groups, optimizer_names(names, optimizer), strict=True):
        own = [name for name in group_names if layouts[id(names.tensors[name])][1]]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if own:
            tensors, place = dict[str, Tensor](), layouts[id(names.tensors[own[0]])]
            encoded = encode(options, ("group", own[0]), tensors)
            _add(tensors, place, None, state)
            if place[0].position == 0:
                values["groups"].append({"params": own, "options": encoded})
        for name, parameter in zip(group_names, group["params"], strict=True):
            tensors, place = dict[str, Tensor](), layouts[id(parameter)]
            encoded = encode(dict(optimizer.state.get(parameter, {})), ("optimizer", name), tensors)
            _add(tensors, place, parameter, state)
            if place[1] and place[0].position == 0:
                values["state"][name] = encoded
    return values


def _add(tensors: Mapping[str, Tensor], place: tuple[Layout, bool], parameter: Tensor | None, state: State) -> None:
    layout, is_saved = place
    is_cut = isinstance(parameter, DTensor) and any(layout.cuts)
    for key, each in tensors.items():
        if is_cut and each.ndim and not isinstance(each, DTensor):
            what, problem = (
                f"a plain tensor of shape {list(each.shape)}",
                "its parameter is cut, this may be a part of it",
            )
            raise CheckpointError(key, what, problem, "use an optimizer whose state are DTensors, as in torch.optim")
        own = layout_of(each, Ranks(), key, layout)
        state.tensors[key] = Stored(tuple(each.shape), own_part(each), own, is_saved)


@torch.no_grad()
def block_of(value: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A view of a block of a tensor."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if (start, size) != (0, value.shape[dim]):
            value = value.narrow(dim, start, size)
    return value
