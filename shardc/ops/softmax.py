"""Softmax and its kin: the normalized dim is whole."""

from __future__ import annotations

import torch

from shardc.ops.reduction import along
from shardc.rule import rule

aten = torch.ops.aten

rule(aten._softmax.default, along(lambda call: call.args[1]))
rule(aten._log_softmax.default, along(lambda call: call.args[1]))
rule(aten._safe_softmax.default, along(lambda call: call.args[1]))
rule(aten._softmax_backward_data.default, along(lambda call: call.args[2], linear="0"))
rule(aten._log_softmax_backward_data.default, along(lambda call: call.args[2], linear="0"))
