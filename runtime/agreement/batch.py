"""Checksums of the plain inputs of a call. These are the whole batch, so all ranks must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm.checksum import checksum
from .entry import WIDE_DIGEST

Check = Literal["first", "always", "never"]
CHECK: tuple[str, ...] = get_args(Check)


@dataclass(frozen=True, slots=True)
class Batch:
    """The checksums of plain inputs, by name."""

    numbers: dict[str, int]

    @property
    def digest(self) -> bytes:
        """A digest of the checksums; empty if there are none."""
        if not self.numbers:
            return b""
        return hashlib.blake2b(repr(self.numbers).encode(), digest_size=WIDE_DIGEST).digest()

    def __str__(self) -> str:
        return "\n".join(f"input {name!r}: {number}" for name, number in self.numbers.items())


class BatchCheck:
    """Chooses the calls whose inputs are compared, and the entries of the module that compare them.

    ``mode``: compare in the ``first`` call of each request, ``always``, or ``never``. Inputs on an accelerator are
    compared one entry after that of their call, in backward's, so that the host does not wait for them at the start of
    a step; in the first call of a request it does. State: ``_known``, the requests so far; ``_batch``, the checksums
    for the next entry; ``_late``, those for the entry after it: names, and checksums on their way to the host.
    """

    def __init__(self, mode: str) -> None:
        self.mode, self._known = mode, set[bytes]()
        self._batch = Batch({})
        self._late: tuple[list[str], Tensor, Any] | None = None

    def note(self, inputs: Sequence[tuple[str, Tensor]], request: bytes) -> None:
        """Note the inputs of a call that is about to enter; DTensors among them are not compared."""
        self._batch = self._arrived()
        is_first = request not in self._known
        self._known.add(request)
        plain = [(name, each) for name, each in inputs if not isinstance(each, DTensor) and not each.is_meta]
        if self.mode == "never" or not plain or (self.mode == "first" and not is_first):
            return
        names, sums = [name for name, _ in plain], [checksum(each) for _, each in plain]
        device = next((each.device for each in sums if each.device.type != "cpu"), None)
        if device is None or is_first:
            numbers = {name: int(each) for name, each in zip(names, sums, strict=True)}
            self._batch = Batch({**self._batch.numbers, **numbers})
            return
        stacked = torch.stack([each.to(device, non_blocking=True) for each in sums])
        on_host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True).copy_(stacked, non_blocking=True)
        self._late = names, on_host, torch.get_device_module(device).current_stream(device).record_event()

    def take(self, is_forward: bool) -> Batch:
        """Take the checksums that the next entry compares."""
        batch, self._batch = self._batch, Batch({})
        return batch if is_forward or batch.numbers else self._arrived()

    def _arrived(self) -> Batch:
        """Wait for the checksums on their way to the host, and return them."""
        if self._late is None:
            return Batch({})
        (names, on_host, event), self._late = self._late, None
        event.synchronize()
        return Batch(dict(zip(names, on_host.tolist(), strict=True)))
