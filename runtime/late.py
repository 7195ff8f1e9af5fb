"""A loss whose sum over ranks is under way: a tensor like any other, which is waited for by what first reads it.

::

    loss = model(ids, targets)     # the sum is asked for
    (loss / 8).backward()          # needs no loss, and does not wait
    optimizer.step()
    print(loss.item())             # waits

Else every rank would stand still for the slowest one between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

UNREAD = {  # what training calls of a loss, and reads no value
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("device", "dtype", "grad_fn", "requires_grad", "shape")),
}
BY_NUMBER = {Tensor.div, Tensor.__truediv__, torch.div, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}


@dataclass(slots=True)
class Arrival:
    """The memory of a value, and what makes the value; None once it is there."""

    memory: Tensor
    make: Callable[[], Tensor] | None

    def wait(self) -> Tensor:
        """The value."""
        if self.make is not None:
            make, self.make = self.make, None
            self.memory.copy_(make())
        return self.memory


class LateTensor(Tensor):
    """A tensor whose value arrives; once it is read it is a plain one. State: ``_arrival``, until then.

    Every op and every method of a tensor comes by ``__torch_function__``; what no one has listed here is a read.
    """

    _arrival: Arrival

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, on values that are there if it may read them."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.detach:
                return _as_late(func(*args), args[0]._arrival)
            if func in BY_NUMBER and not kwargs and isinstance(args[1], Number) and isinstance(args[0], LateTensor):
                return _scaled(func, *args)
            if func not in UNREAD:
                for each in pytree.tree_leaves((args, kwargs)):
                    if isinstance(each, LateTensor):
                        each._arrive()
            return func(*args, **kwargs or {})

    def _arrive(self) -> None:
        self._arrival.wait()
        self.__class__ = Tensor  # type: ignore[assignment]
        del self._arrival


LateTensor.__module__ = "torch"  # for libraries that know a tensor by its type's name, as loggers do


def late(like: Tensor, results: Callable[[], Sequence[Tensor]]) -> Tensor:
    """A tensor with the value of the one of ``results``, which are waited for, and are ``like`` an operand."""
    made = torch.empty_like(like)
    if torch.is_inference_mode_enabled():  # none that is made here may be written later
        return made.copy_(results()[0])
    return _as_late(made, Arrival(made.data, lambda: results()[0]))


def _as_late(tensor: Tensor, arrival: Arrival) -> Tensor:
    tensor.__class__ = LateTensor
    assert isinstance(tensor, LateTensor)
    tensor._arrival = arrival
    return tensor


def _scaled(func: Callable[..., Tensor], tensor: LateTensor, number: Any) -> Tensor:
    """A late tensor times a number: late too, since its gradient needs no value of it."""
    made, arrival = func(tensor, number), tensor._arrival
    return _as_late(made, Arrival(made.data, lambda: func(arrival.wait(), number)))
