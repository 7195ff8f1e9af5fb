"""Fused weights for ``torch.distributed.checkpoint``, which expects one block of a tensor from each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils import _pytree as pytree

from shardc.language.errors import CheckpointError

from ..comm.dtensor import local
from .ranks import Ranks
from .state import block_of, layout_of


def checkpointable(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for ``torch.distributed.checkpoint``, in which a tensor that is cut in blocks lists each of them.

    ``dcp.save(shardc.checkpointable(module.state_dict()))``. The blocks share the module's memory, so that
    ``dcp.load`` of such a dict fills the module. Tensors of which each rank has one block stay as they are.

    Args:
        state_dict: that of a parallel module.

    Returns:
        The state dict, with a DTensor of this rank's blocks for each tensor that is cut in blocks.
    """
    if not isinstance(state_dict, Mapping):
        what, remedy = f"of type {type(state_dict).__name__}", "give it module.state_dict()"
        raise CheckpointError("checkpointable", what, "it maps names to tensors", remedy)
    result: dict[str, Any] = pytree.tree_map_only(DTensor, _in_blocks, dict(state_dict))
    return result


def _in_blocks(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), type(tensor)
    stored = [each for each in layout_of(tensor, Ranks(), "value").blocks(tuple(tensor.shape)) if each.block.numel]
    if len(stored) < 2:
        return tensor
    views = [block_of(local(tensor), each.offsets, each.block.sizes) for each in stored]
    wrapper: Tensor = LocalShardsWrapper(views, [each.block.offsets for each in stored])
    result: Tensor = DTensor.__new__(DTensor, wrapper, tensor._spec, requires_grad=False)
    return result
