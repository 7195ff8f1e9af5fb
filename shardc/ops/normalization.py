"""Normalizations, whose averaged dims are whole, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.language.rule import Bind, OpCall, Rule, make_rule, pointwise_rule, rule
from shardc.ops.reduction import argument, spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten


def _layer_norm_rule(spec: str, operand: int) -> Bind:
    """``X`` in the spec is the input, whose normalized dims are whole, ``S`` its statistics, ``W`` the weight.

    ``operand``: the position of the input; the argument after it is the normalized shape.
    """

    def bind(call: OpCall) -> Rule:
        ndim, num_normalized = len(call.operands[operand].shape), len(call.args[operand + 1])  # type: ignore[union-attr]
        names = dim_names(ndim)
        weight = " ".join(names[ndim - num_normalized :])
        statistics = " ".join([*names[: ndim - num_normalized], *["1"] * num_normalized])
        bound = spec.replace("X", " ".join(names)).replace("S", statistics).replace("W", weight)
        return make_rule(bound, call, whole=weight)

    return bind


rule(aten.native_layer_norm.default, _layer_norm_rule("X, W, W -> X, S, S", operand=0))
rule(aten.native_layer_norm_backward.default, _layer_norm_rule("X, X, S, S, W, W -> X, W, W", operand=1))
rule(aten._fused_rms_norm.default, _layer_norm_rule("X, W -> X, S", operand=0))
rule(aten._fused_rms_norm_backward.default, _layer_norm_rule("X, X, S, W -> X, W", operand=1))


def _group_norm_rule(op: Any, spec: str, at: int) -> None:
    """``X`` in the spec is the input: groups are free, channels and places of a group are averaged.

    ``at``: the position of the batch size in the arguments; channels follow it, and groups are at ``at + 3``.
    """

    def bind(call: OpCall) -> Rule:
        shape, groups = call.operand.shape, call.args[at + 3]
        places = " ".join(dim_names(len(shape))[2:])
        sizes = {"g": groups, "c": shape[1] // groups}
        return make_rule(spec.replace("X", f"n (g c) {places}"), call, whole=f"c {places}", sizes=sizes)

    def local(call: OpCall, shard: OpCall) -> dict[int, Any]:
        batch, channels = shard.operand.shape[:2]
        groups = call.args[at + 3] * channels // max(1, call.operand.shape[1])
        return {at: batch, at + 1: channels, at + 3: groups}

    rule(op, bind, local=local)


_group_norm_rule(aten.native_group_norm.default, "X, (g c), (g c) -> X, n g, n g", at=3)
_group_norm_rule(aten.native_group_norm_backward.default, "X, X, n g, n g, (g c) -> X, (g c), (g c)", at=5)


def _batch_norm_rule(training: int | bool) -> Bind:
    """Channels are free. In training the batch is averaged and whole. ``training``: a bool, or the argument's place."""

    def bind(call: OpCall) -> Rule:
        is_training = training if isinstance(training, bool) else call.args[training]
        x, whole = _batch_norm_dims(call.operand.shape, is_training)
        operands = [x, *["c"] * (len(call.operands) - 1)]
        results = [x, *("c" if result and result.shape != (0,) else "1" for result in call.results[1:])]
        return make_rule(f"{', '.join(operands)} -> {', '.join(results)}", call, whole=whole)

    return bind


def _batch_norm_backward_rule(call: OpCall) -> Rule:
    x, whole = _batch_norm_dims(call.operand.shape, call.args[7])
    channels = ["c" if operand and operand.shape != (0,) else "1" for operand in call.operands[2:]]
    return make_rule(f"{', '.join([x, x, *channels])} -> {x}, c, c", call, whole=whole)


def _batch_norm_dims(shape: Sequence[int], is_training: bool) -> tuple[str, str]:
    """The spec of the input, and the factors that are whole."""
    names = dim_names(len(shape))
    averaged = " ".join([*names[:1], *names[2:]])
    return " ".join([*names[:1], "c", *names[2:]]), averaged if is_training else ""


rule(aten.native_batch_norm.default, _batch_norm_rule(training=5))
rule(aten._native_batch_norm_legit_functional.default, _batch_norm_rule(training=True))  # new buffers have no batch
rule(aten._native_batch_norm_legit_no_training.default, _batch_norm_rule(training=False))
rule(aten._native_batch_norm_legit.no_stats, _batch_norm_rule(training=3))
rule(aten.native_batch_norm_backward.default, _batch_norm_backward_rule)


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
    """The gradient of a mean is whole: it divides by the number of elements of its operand."""

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
    """Scores ``x`` are ``[rows, classes]`` or ``[classes]``; ``n`` has an entry a row; so has ``l``, unless reduced."""

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
