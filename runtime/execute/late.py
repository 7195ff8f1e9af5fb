"""A loss whose sum over ranks is under way: a tensor like any other, which is waited for by what first reads it.

::

    loss = model(ids, targets)     # the sum is asked for
    (loss / 8).backward()          # needs no loss, and waits for it once all else is done
    print(loss.item())             # before backward it would wait

Else every rank would stand still for the slowest one between forward and backward.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import nan
from numbers import Number
from threading import Lock
from typing import Any
from weakref import WeakSet

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


class Arrival:
    """What a value is made by, and the memory that it is put in.

    State: ``_value``, once it is there; ``_multiples``, the arrivals of what was made of it, which come with it.

    No one else writes ``_value``; whoever has the memory may, as with ``loss += other``. Threads wait for each other.
    """

    def __init__(self, memory: Tensor, make: Callable[[], Tensor]) -> None:
        self._memory, self._make, self._lock = memory, make, Lock()
        self._value: Tensor | None = None
        self._multiples: WeakSet[Arrival] = WeakSet()

    def value(self) -> Tensor:
        """The value, which is waited for; the error that kept it away, at every call."""
        with self._lock:
            if self._value is None:
                value = self._make()
                self._memory.copy_(value)
                self._value = value
            return self._value

    def wait(self) -> None:
        """For the value, and for its multiples."""
        self.value()
        for each in list(self._multiples):
            self._multiples.discard(each)
            each.wait()

    def times(self, memory: Tensor, by: Callable[[Tensor], Tensor]) -> Arrival:
        """The arrival of what is made of the value."""
        made = Arrival(memory, lambda: by(self.value()))
        self._multiples.add(made)
        return made


class UnderWay:
    """The late outputs of one program's calls: its backward waits for them when what it sent after them is there.

    So a loss is late for no one from then on, also for a function of C++, which takes its memory as it is.
    State: ``_calls``, the first first, that may still be waited for.
    """

    def __init__(self) -> None:
        self._calls: list[list[Arrival]] = []

    def note(self, outputs: Iterable[Any]) -> None:
        """A call has given these."""
        self.wait(but=1)
        self._calls.append([arrival for each in outputs if (arrival := _arrival(each)) is not None])

    def wait(self, but: int = 0) -> None:
        """For all, ``but`` the latest."""
        while len(self._calls) > but:
            for each in self._calls.pop(0):
                each.wait()


LATEST: deque[Arrival] = deque(maxlen=4)  # backends finish collectives in about the order of their start


class LateTensor(Tensor):
    """A tensor whose value arrives; once it is read it is a plain one. State: ``_arrival``, until then.

    Every op and every method of a tensor comes by ``__torch_function__``; what no one has listed here is a read. What
    reads memory past it before backward is done, as ``torch.tensor(loss)`` and functions of C++, finds no number there.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, on values that are there if it may read them."""
        with torch._C.DisableTorchFunctionSubclass():
            arrival = _arrival(args[0]) if args else None
            if arrival is not None and func is Tensor.detach:
                return _as_late(func(*args), arrival)
            if arrival is not None and func in BY_NUMBER and _is_by_number(args, kwargs):
                return _scaled(func, args[0], args[1], arrival)
            read = args[1:] if func in UNREAD else args
            if read or kwargs:
                arrive(*pytree.tree_leaves((read, kwargs)))
            return func(*args, **kwargs or {})


LateTensor.__module__ = "torch"  # for libraries that know a tensor by its type's name, as loggers do


def late(like: Tensor, results: Callable[[], Sequence[Tensor]]) -> Tensor:
    """A tensor with the value of the one of ``results``, which are waited for, and are ``like`` an operand."""
    is_whole = not (like.is_floating_point() or like.is_complex())
    made = torch.full_like(like, torch.iinfo(like.dtype).min if is_whole else nan)
    if torch.is_inference_mode_enabled():  # none that is made here may be written later
        return made.copy_(results()[0])
    LATEST.append(Arrival(made.data, lambda: results()[0]))
    return _as_late(made, LATEST[-1])


@atexit.register
def _finish() -> None:
    """Take part in sums to their end, also in those that this rank does not read: others may."""
    for arrival in LATEST:
        with suppress(RuntimeError):  # another rank is gone, which has no one to tell it to
            arrival.wait()


def _arrival(tensor: Any) -> Arrival | None:
    """None of what has arrived, or was never late."""
    found: Arrival | None = vars(tensor).get("_arrival") if isinstance(tensor, LateTensor) else None
    return found


def arrive(*values: Any) -> None:
    """Wait for the tensors that are late among values; another thread may be doing so."""
    for each in values:
        if (arrival := _arrival(each)) is not None:
            arrival.wait()
            each.__class__ = Tensor
            vars(each).pop("_arrival", None)


def _as_late(tensor: Tensor, arrival: Arrival) -> Tensor:
    tensor.__class__ = LateTensor
    vars(tensor)["_arrival"] = arrival
    return tensor


def _is_by_number(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    return len(args) == 2 and isinstance(args[1], Number) and not kwargs and not torch.is_inference_mode_enabled()


def _scaled(func: Callable[..., Any], tensor: Tensor, number: Any, arrival: Arrival) -> Tensor:
    """A late tensor times a number: late too, since its gradient needs no value of it."""
    made = func(tensor, number)
    return _as_late(made, arrival.times(made.data, lambda value: func(value, number)))
