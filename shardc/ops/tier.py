"""Copies between a device and the tier below it: host memory, or files. A runtime knows which (``Zero.to``)."""

from __future__ import annotations

from torch import Tensor

from shardc.language.rule import rule


def fetch(x: Tensor) -> Tensor:
    """A copy on the device of what is in the tier below."""
    return x.clone()


def offload(x: Tensor) -> Tensor:
    """A copy in the tier below of what is on the device."""
    return x.clone()


TRANSFERS = (fetch, offload)

rule(TRANSFERS, "... -> ...", linear="0")
