"""Copies between a device and the tier below it: host memory, or files.

``to``: which, of what the option ``saved`` puts there; of parameters and gradients ``Zero.to`` says it.
"""

from __future__ import annotations

from torch import Tensor

from shardc.language.rule import rule


def fetch(x: Tensor, to: str | None = None) -> Tensor:
    """A copy on the device of what is in the tier below."""
    return x.clone()


def offload(x: Tensor, to: str | None = None) -> Tensor:
    """A copy in the tier below of what is on the device."""
    return x.clone()


TRANSFERS = (fetch, offload)
MOST_UNDER_WAY = 8  # copies of what is saved; what is copied lives on the device until computation waits for the copy

rule(TRANSFERS, "... -> ...", linear="0")
