"""The arguments of ``suggest`` as a task: devices and links by name, bytes in text, and what is fixed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from shardc.capture.call import call_leaves, flatten, rebuild
from shardc.language.errors import OptionError, did_you_mean
from shardc.language.machine import DEFAULT_DEVICE, LINKS, Device, Machine, machine_of, slowest
from shardc.language.partition import P
from shardc.options import OPTIMIZERS, Pipeline, Precision, Remat, Zero
from shardc.search.task import Objective, Task

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
AXES = ("dp", "tp", "cp", "ep", "pp")  # and dp2, ...
KINDS: Mapping[str, Any] = {"remat": Remat, "precision": Precision, "pipeline": Pipeline}


def question(
    devices: int,
    annotations: Mapping[str, P] | None,
    memory: int | str | None,
    links: Any,
    device: Device | str | None,
    nodes: int,
    fix: Mapping[str, Any],
    objective: Objective,
    optimizer: str,
    remats: Sequence[Remat],
) -> Task:
    """The task that the arguments of ``suggest`` describe. Raises an OptionError for one that has no meaning."""
    for name, count in (("devices", devices), ("nodes", nodes)):
        if type(count) is not int or count < 1:
            raise OptionError(
                f"suggest({name}={count!r})", "it counts", "it is a whole number from 1 on", f"say {name}=8"
            )
    if devices % nodes:
        remedy = f"say a number of nodes that divides {devices}"
        raise OptionError(
            f"suggest(nodes={nodes})", f"{devices} devices", "nodes have equal numbers of devices", remedy
        )
    if objective not in get_args(Objective):
        remedy = did_you_mean(str(objective), get_args(Objective)) or "say 'time' or 'memory'"
        raise OptionError("suggest", f"objective={objective!r}", "there is no such objective", remedy)
    if optimizer not in OPTIMIZERS:
        remedy = did_you_mean(str(optimizer), OPTIMIZERS) or f"say one of {', '.join(OPTIMIZERS)}"
        raise OptionError("suggest", f"optimizer={optimizer!r}", "its states are not known", remedy)
    fixed = {name: tuple(value) if isinstance(value, (list, tuple)) else (value,) for name, value in fix.items()}
    _check_fixed(fixed, devices)
    sizes = {name: values for name, values in fixed.items() if name not in ("zero", *KINDS)}
    return Task(
        devices,
        machine(links, device, devices, nodes),
        memory=float("inf") if memory is None else bytes_of(memory),
        objective=objective,
        optimizer=optimizer,
        given=dict(annotations or {}),
        sizes=sizes,
        stages=tuple(map(_stage, fixed.get("zero", (0, 1, 2, 3)))),
        remats=fixed.get("remat", (None, *remats)),
        precisions=fixed.get("precision", (None,)),
        pipelines=fixed.get("pipeline"),
    )


def _check_fixed(fixed: Mapping[str, tuple[Any, ...]], devices: int) -> None:
    """Raise an OptionError for a name or a value of ``fix`` that no plan has."""
    for name, values in fixed.items():
        who = f"fix={{{name!r}: ...}}"
        if name.rstrip("0123456789") not in (*AXES, "zero", *KINDS):
            names = (*AXES, "zero", *KINDS)
            raise OptionError(
                who,
                f"{name!r}",
                "a plan has no such part",
                did_you_mean(name, names) or f"name one of {', '.join(names)}",
            )
        for value in values:
            if name in KINDS:
                is_good, remedy = (
                    value is None or isinstance(value, KINDS[name]),
                    f"say None or a shardc.{KINDS[name].__name__}",
                )
            elif name == "zero":
                is_good, remedy = value in (None, 0, 1, 2, 3) or isinstance(value, Zero), "say a stage, 0 to 3, or None"
            else:
                is_good = type(value) is int and value > 0 and devices % value == 0
                remedy = f"say a size that divides {devices} devices"
            if not is_good:
                raise OptionError(who, f"{value!r}", "a plan cannot have it", remedy)


def _stage(value: Any) -> int:
    return value.stage if isinstance(value, Zero) else value or 0


def bytes_of(memory: int | str) -> int:
    """A number of bytes, or a text such as ``80GB``. Raises an OptionError for what is neither."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    if parts is None or parts[2].lower() not in UNITS or float(parts[1]) <= 0:
        raise OptionError("memory", repr(memory), "it is no number of bytes", "say memory='80GB', or a number of bytes")
    return int(float(parts[1]) * UNITS[parts[2].lower()])


def machine(links: Any, device: Device | str | None, devices: int, nodes: int) -> Machine:
    """The machine: ``"nvlink"`` inside a node, ``("nvlink", "infiniband")`` also between nodes, a Machine or a file."""
    if isinstance(links, Machine):
        return links if device is None else Machine(links.links, device, links.node, links.between)  # type: ignore[arg-type]
    if isinstance(links, str) and not Path(links).suffix and "=" not in links:
        links = tuple(links.split(","))
    if isinstance(links, Path) or isinstance(links, str):
        found = machine_of(links, device)
        inside: Any = found.links.get("*") or slowest(found.links.values())
        links, device = (inside, *([found.between] if found.between else [])), found.device
    if links is None:
        links = (Machine().of_axis("*"),)
    inside, *between = links if isinstance(links, (tuple, list)) else (links,)
    if nodes > 1 and not between:
        known = ", ".join(LINKS)
        raise OptionError(
            f"suggest(nodes={nodes})",
            f"links={inside!r}",
            "no link joins the nodes",
            f"say links=({inside!r}, 'infiniband'); presets: {known}",
        )
    node = devices // nodes if nodes > 1 else 0
    return Machine({"*": inside}, device or DEFAULT_DEVICE, node, between[0] if nodes > 1 else None)  # type: ignore[arg-type]


def with_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
) -> tuple[Sequence[Any], Mapping[str, Any], int]:
    """A call with ``batch`` samples, and their number: the first dim of the first tensor and of those like it."""
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
