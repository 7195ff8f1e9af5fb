"""The tensors that users hold on real ranks: parameters, buffers, gradients and outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardc.language.errors import ShardingError

from .dispatch import dispatch
from .piece import as_dtensor, is_cut_alike, is_whole, piece_of, spec_like, whole
from .reading import enter_reading
from .reduction import complete_norms


class GlobalTensor(DTensor):
    """A DTensor that reads like the whole tensor on one device, for all ops, methods and conversions.

    Ops communicate to get other ranks' pieces, so that all ranks must make the same readings. A tensor without dims is
    always whole on every rank.
    """

    is_copy = False  # whether it should be a view of a cut tensor, but is a copy
    label = "a tensor"  # its name in errors

    @staticmethod
    def of(tensor: DTensor) -> GlobalTensor:
        """The same tensor as a GlobalTensor, which passes its gradient on; partial sums are added up."""
        if any(placement.is_partial() for placement in tensor._spec.placements):
            complete = [Replicate() if each.is_partial() else each for each in tensor._spec.placements]
            tensor = tensor.redistribute(placements=complete)
        if torch.is_grad_enabled() and tensor.requires_grad:
            result: GlobalTensor = _OfDTensor.apply(tensor)
            return result
        return new_global_tensor(tensor._local_tensor, tensor._spec)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op, below autograd."""
        return dispatch(new_global_tensor, func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor as a plain one, on every rank; its gradient must be the same on all of them."""
        if grad_placements is not None:
            return _to_dtensor(self).full_tensor(grad_placements=grad_placements)
        complete_norms()
        result: Tensor = _Whole.apply(self)
        return result

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's piece as a plain tensor."""
        return _to_dtensor(self).to_local(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """The same tensor with other placements."""
        if not is_whole(self):
            enter_reading(self, "redistribute")
        return GlobalTensor.of(_to_dtensor(self).redistribute(*args, **kwargs))

    def tolist(self) -> Any:
        """The whole tensor as nested lists."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array."""
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.full_tensor().__array__(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values if this rank has all of them; else shape and placements, since printing must not communicate."""
        if is_whole(self):
            return repr(self._local_tensor)
        what = f"shape={list(self.shape)}, dtype={self.dtype}, placements={tuple(self._spec.placements)}"
        return f"GlobalTensor({what}, values=.full_tensor())"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write elements: a cut tensor is gathered, written and cut again."""
        if is_whole(self):
            super().__setitem__(index, value)
            return
        if torch.is_grad_enabled() and self.requires_grad:
            what, problem = f"of shape {list(self.shape)}, which requires grad", "no gradient can pass such a write"
            raise ShardingError("x[index] = value of a cut tensor", what, problem, "write under torch.no_grad()")
        values = self.full_tensor()
        values[index] = value
        self.copy_(values)

    @property
    def data(self) -> Tensor:
        """The tensor without its gradient, in the same memory; a write to it counts as a write to this tensor."""
        tensor: Any = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        tensor._local_tensor = self._local_tensor
        return tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take other values, which are cut like this tensor."""
        if value.shape != self.shape:
            what, problem = f"a tensor of shape {list(value.shape)}", f"the tensor has shape {list(self.shape)}"
            raise ShardingError("x.data = value", what, problem, "give a tensor of the same shape")
        if not isinstance(value, DTensor):
            piece = piece_of(value.detach(), self._spec, self.shape)
        elif is_cut_alike(value._spec, self._spec):
            piece = value._local_tensor
        else:
            piece = piece_of(whole(value, "data"), self._spec, self.shape)
        other = new_global_tensor(piece, spec_like(self._spec, self._spec.placements, piece, self.shape))
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = piece, other._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        twin: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            twin._is_param = True
        memo[id(self)] = twin
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole tensor as a plain one, so that no reader mistakes a part for the whole."""
        return self.full_tensor().detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def new_global_tensor(piece: Tensor, spec: Any) -> GlobalTensor:
    """Make a global tensor without calling ``__init__``, which does nothing and costs as much as a small op."""
    result: Any = GlobalTensor.__new__(GlobalTensor, piece, spec, requires_grad=False)
    return result


def _to_dtensor(tensor: GlobalTensor) -> DTensor:
    """The tensor as a DTensor, for torch's own methods."""
    complete_norms()
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return as_dtensor(tensor)
    result: DTensor = _ToDTensor.apply(tensor)
    return result


class _Whole(torch.autograd.Function):
    """The whole of a global tensor as a plain one, whose gradient is cut like the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.spec, ctx.shape = tensor._spec, tensor.shape
        value = whole(tensor, "full_tensor")
        return value.view_as(value)  # a new object, since autograd writes its metadata to it

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if isinstance(gradient, DTensor):
            return gradient
        spec = spec_like(ctx.spec, ctx.spec.placements, gradient, ctx.shape)
        return new_global_tensor(piece_of(gradient, spec, ctx.shape), spec)


class _ToDTensor(torch.autograd.Function):
    """A global tensor as a DTensor, whose gradient is a global tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return as_dtensor(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return GlobalTensor.of(gradient)


class _OfDTensor(torch.autograd.Function):
    """A DTensor as a global tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return new_global_tensor(tensor._local_tensor, tensor._spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return as_dtensor(gradient)
