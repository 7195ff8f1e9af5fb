"""Makes global tensors from this rank's pieces."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.language.sharding import Sharding

from ..comm.dtensor import placements
from .global_tensor import GlobalTensor, new_global_tensor


def to_global(
    piece: Tensor, sharding: Sharding, shape: tuple[int, ...], device_mesh: DeviceMesh, name: str = "value"
) -> GlobalTensor:
    """A tensor of global ``shape`` from this rank's piece; nothing is sent or checked."""
    return GlobalTensorMaker(sharding, shape, device_mesh, name)(piece)


class GlobalTensorMaker:
    """Makes tensors of one sharding and shape. Only the first of a dtype calls the slow ``DTensor.from_local``."""

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], device_mesh: DeviceMesh, name: str) -> None:
        self.device_mesh, self.shape = device_mesh, torch.Size(shape)
        self.stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self.placements = placements(sharding, shape, name)
        self.name = name
        self._specs: dict[torch.dtype, Any] = {}

    def __call__(self, piece: Tensor) -> GlobalTensor:
        """Make the tensor from this rank's piece."""
        if (spec := self._specs.get(piece.dtype)) is None:
            made = DTensor.from_local(
                piece, self.device_mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )
            spec = self._specs[piece.dtype] = made._spec
            if piece.requires_grad:
                return GlobalTensor.of(made)
        result = new_global_tensor(piece, spec)
        result.label = self.name
        return result
