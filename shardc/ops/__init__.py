"""The rules of all ops, one file a family. ``op_rule`` finds the rule of any op.

| file | ops |
|---|---|
| ``attention`` | torch's fused attention, attention with dropout, and attention over cut positions |
| ``contraction`` | ``mm``, ``bmm``, ``addmm``, ``dot`` of programs, ``grouped_mm`` of experts |
| ``index`` | ``index``, ``gather``, ``scatter``, ``index_put``, ``take``, ``searchsorted``, ``embedding`` |
| ``linalg`` | factorizations, solvers, distances, ``fft`` |
| ``normalization`` | layer, RMS, group and batch norm; ``nll_loss``, ``mse_loss`` and other losses |
| ``piece`` | ``slice``, ``select``, ``split``, ``cat``, ``stack``, ``flip``, ``roll``, ``constant_pad_nd`` |
| ``pointwise`` | ``add``, casts, copies, gradients of activations, ``full``, ``arange``, ``shardc.annotate`` |
| ``random`` | random numbers |
| ``reduction`` | ``sum``, ``amax``, ``mean``, ``cumsum``, ``sort``, ``topk``, ``softmax`` |
| ``tier`` | copies between a device and host memory or files |
| ``view`` | ``view``, ``permute``, ``expand``, ``squeeze``, ``repeat``, ``diagonal`` |
| ``windowed`` | convolution, pooling, padding by values, resampling |
| ``zigzag`` | positions into zigzag and back in order |
"""

from typing import Any

from shardc.language.rule import RULES, OpRule, pointwise_rule
from shardc.ops import (  # each file enters its rules in the table
    contraction,  # noqa: F401
    index,  # noqa: F401
    linalg,  # noqa: F401
    normalization,  # noqa: F401
    piece,  # noqa: F401
    pointwise,
    random,  # noqa: F401
    reduction,  # noqa: F401
    tier,  # noqa: F401
    view,  # noqa: F401
    windowed,  # noqa: F401
    zigzag,  # noqa: F401
)
from shardc.ops.attention import rules  # noqa: F401

POINTWISE = OpRule(pointwise_rule)


def op_rule(target: Any) -> OpRule | None:
    """The table's entry for an op, or that of pointwise ops. None for an op without a rule: its operands are whole."""
    entry = RULES.get(target)
    return POINTWISE if entry is None and pointwise.is_pointwise(target) else entry
