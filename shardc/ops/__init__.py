"""The rules of all ops, one file a family. ``op_rule`` finds the rule of any op.

| file | ops |
|---|---|
| ``contraction`` | ``mm``, ``bmm``, ``addmm``, ``dot`` of programs, ``grouped_mm`` of experts, attention |
| ``index`` | ``index``, ``gather``, ``scatter``, ``index_put``, ``take``, ``searchsorted``, ``embedding`` |
| ``linalg`` | factorizations, solvers, distances, ``fft`` |
| ``normalization`` | layer, RMS, group and batch norm; ``nll_loss``, ``mse_loss`` and other losses |
| ``piece`` | ``slice``, ``select``, ``split``, ``cat``, ``stack``, ``flip``, ``roll``, ``constant_pad_nd`` |
| ``pointwise`` | ``add``, casts, copies, gradients of activations, ``full``, ``arange``, ``shardc.annotate`` |
| ``random`` | random numbers |
| ``reduction`` | ``sum``, ``amax``, ``mean``, ``cumsum``, ``sort``, ``topk``, ``softmax`` |
| ``view`` | ``view``, ``permute``, ``expand``, ``squeeze``, ``repeat``, ``diagonal`` |
| ``windowed`` | convolution, pooling, padding by values, resampling |
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from shardc.language.rule import RULES, OpRule, pointwise_rule
from shardc.ops import pointwise

for module in iter_modules(__path__):  # each file enters its rules in the table
    import_module(f"{__name__}.{module.name}")


def op_rule(target: Any) -> OpRule | None:
    """The table's entry for an op; every pointwise op has one. None for an op without a rule, which runs whole."""
    entry = RULES.get(target)
    if entry is None and pointwise.is_pointwise(target):
        entry = RULES[target] = OpRule(pointwise_rule)
    return entry
