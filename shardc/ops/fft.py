"""Fourier transforms: the dims that are transformed are whole."""

from __future__ import annotations

import torch

from shardc.ops.reduction import along
from shardc.rule import rule

aten = torch.ops.aten

for op in (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default):
    rule(op, along(lambda call: call.args[1], linear="0"))
