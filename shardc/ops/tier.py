"""Copies between a device and the tier below it: host memory, or files.

``to``: the tier of values that the option ``saved`` stores there; for parameters and gradients it is ``Zero.to``.
"""

from __future__ import annotations

from torch import Tensor

from shardc.language.rule import rule


def fetch(x: Tensor, to: str | None = None) -> Tensor:
    """Copy a value from the tier below to the device."""
    return x.clone()


def offload(x: Tensor, to: str | None = None) -> Tensor:
    """Copy a value from the device to the tier below."""
    return x.clone()


TRANSFERS = (fetch, offload)
MOST_UNDER_WAY = 8  # copies of saved values; their sources live on the device until computation waits for the copy

rule(TRANSFERS, "... -> ...", linear="0")
