"""The rules of all ops, one file a family. ``op_rule`` finds the rule of any op.

| file | ops |
|---|---|
| ``annotation`` | ``shardc.annotate`` |
| ``attention`` | fused scaled dot product attention |
| ``contraction`` | ``mm``, ``bmm``, ``addmm``, ``dot``: a program's products |
| ``index`` | ``index``, ``gather``, ``scatter``, ``index_put``, ``take``, ``searchsorted``, ``embedding`` |
| ``linalg`` | factorizations, solvers, distances, ``fft`` |
| ``normalization`` | layer, RMS, group and batch norm; losses |
| ``piece`` | ``slice``, ``select``, ``split``, ``cat``, ``stack``, ``flip``, ``roll``, ``constant_pad_nd`` |
| ``pointwise`` | ``add``, ``mul``, ``where``, casts, copies, gradients of activations, ``full``, ``arange`` |
| ``random`` | random numbers |
| ``reduction`` | ``sum``, ``amax``, ``mean``, ``cumsum``, ``sort``, ``topk``, ``softmax`` |
| ``view`` | ``view``, ``permute``, ``expand``, ``squeeze``, ``repeat``, ``diagonal`` |
| ``windowed`` | convolution, pooling, padding by values, resampling |
"""

from typing import Any

from shardc.language.rule import RULES, OpRule, pointwise_rule
from shardc.ops import annotation as annotation
from shardc.ops import attention as attention
from shardc.ops import contraction as contraction
from shardc.ops import index as index
from shardc.ops import linalg as linalg
from shardc.ops import normalization as normalization
from shardc.ops import piece as piece
from shardc.ops import pointwise as pointwise
from shardc.ops import random as random
from shardc.ops import reduction as reduction
from shardc.ops import view as view
from shardc.ops import windowed as windowed


def op_rule(target: Any) -> OpRule | None:
    """The table's entry for an op; every pointwise op has one. None for an op without a rule, which runs whole."""
    entry = RULES.get(target)
    if entry is None and pointwise.is_pointwise(target):
        entry = RULES[target] = OpRule(pointwise_rule)
    return entry
