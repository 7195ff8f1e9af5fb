"""GradScaler over DTensors: an overflow in any gradient on any rank is seen by all ranks, which then all skip a step.

DTensor's own handler of the check asks as many ranks as the first gradient needs: where that one is replicated, no rank
hears of an overflow in another rank's piece of a later one. And a scaler asks no one where it finds no gradient, as on
a rank of a pipeline whose stages are frozen: there too the ranks of the other stages are asked, once for all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

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
