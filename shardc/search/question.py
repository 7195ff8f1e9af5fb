"""Turn the arguments of ``suggest`` into a task: names of devices and links, bytes as text, and fixed parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, get_args

import torch
from torch import nn

from shardc.capture.annotations import Names, named_by
from shardc.capture.call import call_leaves
from shardc.capture.containers import flatten, rebuild
from shardc.language.cluster import cluster
from shardc.language.errors import OptionError, ShardingError, did_you_mean
from shardc.language.machine import Device
from shardc.language.partition import P
from shardc.language.text import bytes_of
from shardc.options import KINDS, OPTIMIZERS, OVERLAPS, Remat
from shardc.search.task import Objective, Task

AXES = ("dp", "tp", "cp", "ep", "pp")  # and dp2, ...
MESH = "mesh"
FIXED = {name: KINDS[name][0] for name in ("remat", "precision", "pipeline")}  # options with values of one type
NAMES = (*AXES, MESH, "zero", *FIXED, "overlap", "saved")


def question(
    devices: int,
    annotations: Mapping[str, P] | None,
    memory: float | str | None,
    links: Any,
    device: Device | str | None,
    nodes: int,
    fix: Mapping[str, Any],
    objective: Objective,
    optimizer: str,
    remats: Sequence[Remat],
) -> Task:
    """The task that the arguments of ``suggest`` describe. Raises an OptionError for an argument without a meaning."""
    machine = cluster(links, device, devices, nodes)
    if objective not in get_args(Objective):
        remedy = did_you_mean(str(objective), get_args(Objective)) or "say 'time' or 'memory'"
        raise OptionError("suggest", f"objective={objective!r}", "there is no such objective", remedy)
    if optimizer not in OPTIMIZERS:
        remedy = did_you_mean(str(optimizer), OPTIMIZERS) or f"say one of {', '.join(OPTIMIZERS)}"
        raise OptionError("suggest", f"optimizer={optimizer!r}", "its states are not known", remedy)
    given = _checked(annotations or {})
    axes = {axis for spec in given.values() for axis in spec.axes}
    fixed = _fixed(fix, axes, devices)
    sizes = {name: values for name, values in fixed.items() if _is_axis(name, axes)}
    return Task(
        devices,
        machine,
        memory=_limit(memory, machine.device),
        objective=objective,
        optimizer=optimizer,
        given=given,
        fix=fixed,
        sizes=sizes,
        meshes=[_mesh_sizes(each) for each in fixed[MESH]] if MESH in fixed else None,
        stages=tuple(map(_stage, fixed.get("zero", (0, 1, 2, 3)))),
        remats=fixed.get("remat", (None, *remats)),
        precisions=fixed.get("precision", (None,)),
        pipelines=fixed.get("pipeline"),
        overlaps=fixed.get("overlap"),
        saved=fixed.get("saved"),
    )


def sample_axes(annotations: Mapping[str, P], names: Names) -> frozenset[str]:
    """The axes by which annotations cut the first dim of an input. ``names``: names of a model's values, by kind."""
    of_inputs = [
        spec for pattern, spec in annotations.items() if any(kind == "input" for kind, _ in named_by(pattern, names))
    ]
    return frozenset(axis for spec in of_inputs for axis in P(*spec.entries[:1]).axes)


def module_patterns(fix: Any) -> list[str]:
    """The patterns of modules in the fixed values of ``remat`` and ``saved``, as annotations name modules."""
    if not isinstance(fix, Mapping):
        return []
    globs: list[Any] = []
    for value in chain.from_iterable(map(_values, (fix.get("remat"), fix.get("saved")))):
        globs += [value.blocks] if isinstance(value, Remat) else value if isinstance(value, Mapping) else []
    return [f"module:{glob}" for glob in globs if isinstance(glob, str) and glob]


def _values(allowed: Any) -> tuple[Any, ...]:
    return tuple(allowed) if isinstance(allowed, (list, tuple)) else (allowed,)


def check_counts(**counts: Any) -> None:
    """Raise an OptionError for a count that is no whole number of 1 or more."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise OptionError("suggest", f"{name}={count!r}", "it counts from 1 on", f"say {name}=8")


def _checked(annotations: Mapping[str, Any]) -> dict[str, P]:
    """The annotations. Raises a ShardingError for one that is bound to a mesh, such as DTensor's placements."""
    for pattern, spec in annotations.items():
        if not isinstance(spec, P):
            problem = "the search has many meshes, and finds the axes of an annotation by their names"
            raise ShardingError(f"annotation {pattern!r}", repr(spec), problem, "write a P, such as P('dp')")
    return dict(annotations)


def _fixed(fix: Any, axes: Collection[str], devices: int) -> dict[str, tuple[Any, ...]]:
    """The allowed values of each name in ``fix``. Raises an OptionError for a name or a value that no plan can have.

    ``axes``: the names of axes in the user's annotations.
    """
    if not isinstance(fix, Mapping):
        problem = "it gives axes their sizes, and options their values"
        raise OptionError("fix", f"of type {type(fix).__name__}", problem, "write fix={'tp': 4}")
    fixed = {name: _values(allowed) for name, allowed in fix.items()}
    for name, values in fixed.items():
        who = f"fix={{{name!r}: ...}}"
        if name not in NAMES and not _is_axis(str(name), axes):
            remedy = did_you_mean(str(name), NAMES) or f"name one of {', '.join((*NAMES, *sorted(axes)))}"
            raise OptionError(who, f"{name!r}", "a plan has no such part", remedy)
        if not values:
            raise OptionError(who, "[]", "it allows no value", "list the values that a plan may have, or leave it out")
        for value in values:
            is_good, remedy = _judged(name, value, devices)
            if not is_good:
                raise OptionError(who, f"{value!r}", "a plan cannot have it", remedy)
    return fixed


def _is_axis(name: str, axes: Collection[str]) -> bool:
    return name in axes or name.rstrip("0123456789") in AXES


def _judged(name: str, value: Any, devices: int) -> tuple[bool, str]:
    """Whether a plan can have a value of ``fix``, and the remedy if it cannot."""
    if name in FIXED:
        kind = FIXED[name]
        return value is None or isinstance(value, kind), f"say None or a shardc.{kind.__name__}"
    if name == MESH:
        return _is_mesh(value, devices), f"say sizes of its axes with the product {devices}, as 4x2"
    if name == "zero":
        is_stage = value in (None, 0, 1, 2, 3) and type(value) is not bool
        return is_stage, "say a stage, 0 to 3, or None: the search finds its axes, and offloads"
    if name == "overlap":
        return value in (None, *OVERLAPS), f"say None, or one of {', '.join(OVERLAPS)}"
    if name == "saved":
        return value is None or isinstance(value, Mapping), "say None, or {'blocks.*': 'host'}"
    is_good = type(value) is int and value > 0 and devices % value == 0
    return is_good, f"say a size that divides {devices} devices"


def _is_mesh(text: Any, devices: int) -> bool:
    sizes = str(text).split("x")
    return all(map(str.isdecimal, sizes)) and prod(map(int, sizes)) == devices


def _mesh_sizes(text: Any) -> tuple[int, ...]:
    """The sizes in ``4x2`` in ascending order, without those of one rank."""
    return tuple(sorted(int(each) for each in str(text).split("x") if each != "1"))


def _stage(value: Any) -> int:
    return value or 0


def _limit(memory: float | str | None, device: Device) -> float:
    """The bytes of memory of a rank: by default those of its device, or infinity if these are not known."""
    if memory is None:
        return device.capacity or float("inf")
    return memory if memory == float("inf") else bytes_of(memory)


def with_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
) -> tuple[Sequence[Any], Mapping[str, Any], int]:
    """The call with ``batch`` samples, and their number.

    Samples are the first dim of the first tensor, and of all tensors whose first dim has the same size.
    """
    leaves, _ = call_leaves(model.forward, args, kwargs)
    lengths = [value.shape[0] for _, value in leaves if isinstance(value, torch.Tensor) and value.ndim]
    if batch is None or not lengths:
        return args, kwargs, lengths[0] if lengths else 1
    flat, tree = flatten({"args": tuple(args), "kwargs": dict(kwargs)})
    values = [_resized(value, lengths[0], batch) for _, value in flat]
    call: Any = rebuild(tree, values)
    return call["args"], call["kwargs"], batch


def _resized(value: Any, length: int, batch: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != length:
        return value
    return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
