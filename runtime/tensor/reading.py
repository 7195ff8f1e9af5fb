"""Readings that communicate: all ranks make them together, or all raise an error that names them."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate

from ..agreement.agreement import agreement_on
from ..agreement.entry import Entry, Kind
from ..agreement.gate import Gate


def enter_reading(tensor: DTensor, op: str) -> None:
    """Enter an op that needs other ranks' pieces of a tensor, together with all ranks of its mesh.

    Raises a ShardingError on every rank if one of them makes another op, reads another tensor or calls a module.
    """
    agreement = None if tensor.is_meta else agreement_on(tensor._spec.mesh)
    if agreement is not None:
        gate = Gate(agreement, f"`{op}` of {describe(tensor)}", "1")
        gate.enter(Entry(Kind.READ, gate.digest))


def describe(tensor: DTensor) -> str:
    """A tensor as text: ``output 'logits' of shape [8, 512], cut over dp``."""
    spec = tensor._spec
    names = spec.mesh.mesh_dim_names or tuple(map(str, range(spec.mesh.ndim)))
    axes = [axis for axis, placement in zip(names, spec.placements, strict=True) if type(placement) is not Replicate]
    return f"{getattr(tensor, 'label', 'a tensor')} of shape {list(tensor.shape)}, cut over {' and '.join(axes)}"
