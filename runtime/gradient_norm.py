"""The norm of gradients that lie on the ranks of all stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .placement import local


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
