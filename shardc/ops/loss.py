"""Losses: rows are free or reduced; a mean divides by the number of all of them, so its rows are whole."""

from __future__ import annotations

import torch

from shardc.language.rule import Bind, OpCall, Rule, make_rule, pointwise_rule, rule
from shardc.ops.reduction import argument, spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten

NONE, MEAN, SUM = range(3)  # at::Reduction


def _whole_rule(call: OpCall) -> Rule:
    def side(tensors: tuple[object, ...]) -> str:
        return ", ".join(" ".join(["1"] * len(getattr(tensor, "shape", ()))) for tensor in tensors)

    return make_rule(f"{side(call.operands)} -> {side(call.results)}", call)


def _loss_rule(reduction: int, sees_padding: bool = False) -> Bind:
    """``reduction``: the position of that argument, a mean by default. ``sees_padding``: the loss of zeros is not 0."""

    def bind(call: OpCall) -> Rule:
        how = argument(call, reduction, MEAN)
        if how == SUM:
            return make_rule(f"{', '.join(['...'] * len(call.operands))} -> ", call, sees_padding=sees_padding)
        return pointwise_rule(call) if how == NONE else _whole_rule(call)

    return bind


def _loss_backward_rule(reduction: int) -> Bind:
    """The gradient of a mean divides by the number of elements that it is given."""

    def bind(call: OpCall) -> Rule:
        how = argument(call, reduction, MEAN)
        return _whole_rule(call) if how == MEAN else pointwise_rule(call)

    return bind


def _nll_specs(call: OpCall, operand: int) -> tuple[str, str]:
    """The specs of the log probabilities and of the target, whose dims are the rows."""
    scores = call.operands[operand]
    assert scores is not None
    names = dim_names(len(scores.shape))
    classes = min(1, len(names) - 1)
    return spec_with(names, classes, "1"), " ".join([*names[:classes], *names[classes + 1 :]])


def _nll_loss_rule(call: OpCall) -> Rule:
    """Both results are sums over rows; a mean divides one by the other."""
    scores, rows = _nll_specs(call, 0)
    how = call.args[3]
    result = rows if how == NONE else ""
    return make_rule(f"{scores}, {rows}, 1 -> {result}, ", call, whole=rows if how == MEAN else "", sees_padding=True)


def _nll_loss_backward_rule(call: OpCall) -> Rule:
    """Rows are free even for a mean: the total weight is an operand."""
    scores, rows = _nll_specs(call, 1)
    grad = rows if call.args[4] == NONE else ""
    return make_rule(f"{grad}, {scores}, {rows}, 1,  -> {scores}", call)


def _margin_rule(spec: str, reduction: int) -> Bind:
    """Scores ``x`` are ``[rows, classes]`` or ``[classes]``; ``n`` has an entry a row, ``l`` too or is reduced."""

    def bind(call: OpCall) -> Rule:
        how = argument(call, reduction, MEAN)
        has_rows = any(operand is not None and len(operand.shape) == 2 for operand in call.operands)
        loss = "n" if how == NONE and has_rows else ""
        names = {"x": "n 1", "n": "n", "l": loss} if has_rows else {"x": "1", "n": "", "l": ""}
        named = [[names.get(name, name) for name in side.split(", ")] for side in spec.split(" -> ")]
        return make_rule(" -> ".join(map(", ".join, named)), call, whole="n" if how == MEAN else "", sees_padding=True)

    return bind


rule(aten.multi_margin_loss.default, _margin_rule("x, n, 1 -> l", reduction=5))
rule(aten.multi_margin_loss_backward.default, _margin_rule("l, x, n, 1 -> x", reduction=6))
rule(aten.multilabel_margin_loss_forward.default, _margin_rule("x, x -> l, x", reduction=2))
rule(aten.multilabel_margin_loss_backward.default, _margin_rule("l, x, x, x -> x", reduction=3))
rule(aten.soft_margin_loss.default, _loss_rule(reduction=2, sees_padding=True))
rule((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll_loss_rule)
rule((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _nll_loss_backward_rule)
rule((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss_rule(reduction=2))
for op in (
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
):  # fmt: skip
    rule(op, _loss_backward_rule(reduction=3))
rule(aten.binary_cross_entropy.default, _loss_rule(reduction=3))
rule(aten.binary_cross_entropy_backward.default, _loss_backward_rule(reduction=4))
rule(aten.binary_cross_entropy_with_logits.default, _loss_rule(reduction=4, sees_padding=True))
