"""Fused optimizer steps over DTensors that lie alike: one kernel over their pieces, with nothing to propagate.

DTensor's own dispatch makes a spec for each parameter's plain ``step`` anew, which costs as much as the kernel itself
on a small model.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..comm.dtensor import local

OPS = [
    getattr(packet, overload)
    for name in ("adam", "adamw", "sgd", "adagrad")
    if (packet := getattr(torch.ops.aten, f"_fused_{name}_", None)) is not None
    for overload in packet.overloads()
    if "out" not in overload
]
ALIKE: dict[tuple[int, ...], list[Any]] = {}  # specs of lists that were seen to lie alike, by their ids
MAX_KNOWN = 64


def step_on_pieces() -> None:
    """Let the kernels that update each tensor of a list by those at its place in other lists take the pieces."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(OPS, _step))


def _step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update in place. Where parameter, gradient and state lie otherwise than each other, DTensor does it."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(each, DTensor) for each in arg)]
    if _lie_alike(lists) and not any(isinstance(v, DTensor) for v in kwargs.values()):
        op(*map(_pieces, args), **kwargs)
        return
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    del handlers[op]
    try:
        op(*args, **kwargs)
    finally:
        handlers[op] = _step


def _lie_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether what is updated together is cut alike, and nothing is a partial sum."""
    specs = [getattr(tensor, "_spec", None) for tensor in chain.from_iterable(lists)]
    key = tuple(map(id, specs))
    if key not in ALIKE:
        if not all(map(_are_alike, zip(*lists, strict=True))):
            return False
        if len(ALIKE) == MAX_KNOWN:
            ALIKE.clear()
        ALIKE[key] = specs  # which so keep their ids
    return True


def _are_alike(tensors: tuple[Tensor, ...]) -> bool:
    first: Any = getattr(tensors[0], "_spec", None)
    for tensor in tensors:
        spec = getattr(tensor, "_spec", None)
        if spec is None or spec.placements != first.placements:
            return False
        if spec.mesh is not first.mesh and spec.mesh != first.mesh:
            return False
    return not any(placement.is_partial() for placement in first.placements)


def _pieces(arg: Any) -> Any:
    if not isinstance(arg, (list, tuple)):
        return arg
    return [each._local_tensor if isinstance(each, DTensor) else each for each in arg]


_LINES: dict[DeviceMesh, ProcessGroup] = {}  # of a stage's mesh, the pipeline's ranks
CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_UNSCALE = torch.amp.GradScaler._unscale_grads_


def watch_overflows() -> None:
    """Let the check of gradients ask all ranks over which one of them is cut, and all stages of a pipeline."""
    DTensor._op_dispatcher._custom_op_handlers[CHECK] = _check_and_unscale
    torch.amp.GradScaler._unscale_grads_ = _unscale_in_all_stages  # type: ignore[assignment,method-assign]


def join_lines(stage: DeviceMesh, line: ProcessGroup) -> None:
    """Let an overflow on a stage's mesh be seen by all ranks of a pipeline."""
    _LINES[stage] = line


def _check_and_unscale(op_call: Any, args: Any, kwargs: Any) -> None:
    """Unscale every gradient in place; ``found`` is 1 on every rank if any is not finite on one."""
    gradients: list[DTensor] = args[0]
    found: Tensor = args[1]
    op_call([gradient._local_tensor for gradient in gradients], found, args[2], **kwargs)
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients):
        lies = [gradient.placements for gradient in gradients if gradient.device_mesh == mesh]
        asked: list[Placement] = [
            Replicate() if all(each.is_replicate() for each in axis) else Partial("max")
            for axis in zip(*lies, strict=True)
        ]
        found.copy_(DTensor.from_local(found.to(mesh.device_type), mesh, asked, run_check=False).full_tensor())


def _unscale_in_all_stages(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, is_fp16: bool
) -> dict[torch.device, Tensor]:
    """By device whether an overflow was found, on any rank of a pipeline; of none where there is no gradient."""
    by_device = _UNSCALE(scaler, optimizer, inv_scale, found_inf, is_fp16)
    parameters = (each for group in optimizer.param_groups for each in group["params"] if isinstance(each, DTensor))
    for mesh in dict.fromkeys(each.device_mesh for each in parameters if each.device_mesh in _LINES):
        found = torch.stack([found_inf, *(each.to(found_inf.device) for each in by_device.values())]).amax()
        found = found.to(mesh.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX, _LINES[mesh])
        by_device = {device: found.to(device) for device in by_device or (found.device,)}
    return by_device


class StepWatcher:
    """Is told of steps of the optimizers that hold one of the parameters that it watches, for as long as it lives.

    State: ``_watched``, the parameters.
    """

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Tensor]] = []
        _watchers.add(self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these, and no others."""
        self._watched = [weakref.ref(parameter) for parameter in parameters]

    def watched(self) -> list[Tensor]:
        """Those of the parameters that are alive."""
        return [tensor for tensor in (reference() for reference in self._watched) if tensor is not None]

    def note_step(self) -> None:
        """An optimizer has written parameters."""
        raise NotImplementedError


_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watching = [(watcher, tensors) for watcher in _watchers if (tensors := watcher.watched())]
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]} if watching else ()
    for watcher, tensors in watching:
        if any(id(tensor) in stepped for tensor in tensors):
            watcher.note_step()


register_optimizer_step_post_hook(_tell)


def norm_over_stages(
    gradients: Sequence[DTensor], norm_type: float, device: torch.device, line: ProcessGroup
) -> Tensor:
    """The norm over what all ranks give, those of a stage and those of the ``line`` of stages, in float64 on all.

    Pieces are measured where they lie and the numbers are exchanged on the device: of gradients in host memory too, so
    that these need no backend of their own; and in one dtype, whatever dtypes stages have and where one has none.
    """
    is_max = math.isinf(norm_type)
    pieces: dict[tuple[bool, ...], list[Tensor]] = {}  # by which axes cut them
    for gradient in gradients:
        cut = tuple(not each.is_replicate() for each in gradient.placements)
        pieces.setdefault(cut, []).append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for cut, held in pieces.items():
        norm = nn.utils.get_total_norm([each for each in held if each.numel()], norm_type).to(device, torch.float64)
        lies: list[Placement] = [Partial("max" if is_max else "sum") if each else Replicate() for each in cut]
        mine = norm if is_max else norm**norm_type
        part = DTensor.from_local(mine, gradients[0].device_mesh, lies, run_check=False).full_tensor()
        total = torch.maximum(total, part) if is_max else total + part
    dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, line)
    return total if is_max else total ** (1 / norm_type)
