"""The mark that ``shardc.annotate`` leaves in a graph: a copy, which lies as the user said."""

from __future__ import annotations

import torch

from shardc.annotations import annotate_op
from shardc.ops.pointwise import pointwise
from shardc.rule import rule

annotate_op()
rule(torch.ops.shardc.annotate.default, pointwise())  # not linear: what the user placed is no open sum
