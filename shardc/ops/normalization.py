"""Normalizations: the dims that are averaged are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardc.language.rule import Call, Rule, make_rule, pointwise_rule, rule
from shardc.ops.view import dim_names

aten = torch.ops.aten


def _layer_norm_dims(call: Call, operand: int = 0) -> tuple[str, str, str]:
    """The specs of the input, of its statistics and of the weight; normalized dims are whole."""
    shape = call.operands[operand].shape  # type: ignore[union-attr]
    normalized = len(call.args[operand + 1])
    lead = len(shape) - normalized
    names = dim_names(len(shape))
    return " ".join(names), " ".join([*names[:lead], *["1"] * normalized]), " ".join(names[lead:])


def _layer_norm_rule(call: Call) -> Rule:
    x, stat, weight = _layer_norm_dims(call)
    return make_rule(f"{x}, {weight}, {weight} -> {x}, {stat}, {stat}", call, whole=weight)


def _layer_norm_backward_rule(call: Call) -> Rule:
    x, stat, weight = _layer_norm_dims(call, operand=1)
    return make_rule(f"{x}, {x}, {stat}, {stat}, {weight}, {weight} -> {x}, {weight}, {weight}", call, whole=weight)


def _rms_norm_rule(call: Call) -> Rule:
    x, stat, weight = _layer_norm_dims(call)
    return make_rule(f"{x}, {weight} -> {x}, {stat}", call, whole=weight)


def _rms_norm_backward_rule(call: Call) -> Rule:
    x, stat, weight = _layer_norm_dims(call, operand=1)
    return make_rule(f"{x}, {x}, {stat}, {weight} -> {x}, {weight}", call, whole=weight)


def _group_norm_rule(call: Call) -> Rule:
    """Groups are free, the channels and places of one are averaged."""
    x, sizes, whole = _group_norm_dims(call.operand.shape, groups=call.args[6])
    return make_rule(f"{x}, (g c), (g c) -> {x}, n g, n g", call, whole=whole, sizes=sizes)


def _group_norm_backward_rule(call: Call) -> Rule:
    x, sizes, whole = _group_norm_dims(call.operand.shape, groups=call.args[8])
    return make_rule(f"{x}, {x}, n g, n g, (g c) -> {x}, (g c), (g c)", call, whole=whole, sizes=sizes)


def _group_norm_dims(shape: Sequence[int], groups: int) -> tuple[str, dict[str, int], str]:
    """The spec of the input, sizes of factors, and those that are averaged."""
    places = dim_names(len(shape))[2:]
    return " ".join(["n", "(g c)", *places]), {"g": groups, "c": shape[1] // groups}, " ".join(["c", *places])


def _local_group_norm(at: int) -> Callable[[Call, Call], dict[int, Any]]:
    """Group norm names the sizes of batch and channels, and how many groups there are; ``at``: from which position."""

    def local(call: Call, shard: Call) -> dict[int, Any]:
        batch, channels = shard.operand.shape[:2]
        whole = call.operand.shape[1]
        return {at: batch, at + 1: channels, at + 3: call.args[at + 3] * channels // max(1, whole)}

    return local


def _batch_norm_rule(training: int | bool) -> Callable[[Call], Rule]:
    """Channels are free. In training the batch is averaged and whole. ``training``: a fact, or the argument's place."""

    def bind(call: Call) -> Rule:
        is_training = training if isinstance(training, bool) else call.args[training]
        x, whole = _batch_norm_dims(call.operand.shape, is_training)
        operands = [x, *["c"] * (len(call.operands) - 1)]
        results = [x, *("c" if result and result.shape != (0,) else "1" for result in call.results[1:])]
        return make_rule(f"{', '.join(operands)} -> {', '.join(results)}", call, whole=whole)

    return bind


def _batch_norm_backward_rule(call: Call) -> Rule:
    x, whole = _batch_norm_dims(call.operand.shape, call.args[7])
    channels = ["c" if operand and operand.shape != (0,) else "1" for operand in call.operands[2:]]
    return make_rule(f"{', '.join([x, x, *channels])} -> {x}, c, c", call, whole=whole)


def _batch_norm_dims(shape: Sequence[int], is_training: bool) -> tuple[str, str]:
    names = dim_names(len(shape))
    names[1] = "c"
    return " ".join(names), " ".join(name for name in names if name != "c") if is_training else ""


# Kernels that refuse operands of any other layout; no program says layouts, so what runs one makes them so.
TAKE_CONTIGUOUS = frozenset({aten.native_group_norm.default, aten.native_group_norm_backward.default})

rule(aten.native_layer_norm.default, _layer_norm_rule)
rule(aten.native_layer_norm_backward.default, _layer_norm_backward_rule)
rule(aten._fused_rms_norm.default, _rms_norm_rule)
rule(aten._fused_rms_norm_backward.default, _rms_norm_backward_rule)
rule(aten.native_group_norm.default, _group_norm_rule, local=_local_group_norm(3))
rule(aten.native_group_norm_backward.default, _group_norm_backward_rule, local=_local_group_norm(5))
rule(aten.native_batch_norm.default, _batch_norm_rule(training=5))
rule(aten._native_batch_norm_legit_functional.default, _batch_norm_rule(training=True))  # new buffers have no batch
rule(aten._native_batch_norm_legit_no_training.default, _batch_norm_rule(training=False))
rule(aten._native_batch_norm_legit.no_stats, _batch_norm_rule(training=3))
rule(aten.native_batch_norm_backward.default, _batch_norm_backward_rule)


NONE, MEAN, SUM = range(3)  # at::Reduction


def _whole_rule(call: Call) -> Rule:
    def side(tensors: tuple[object, ...]) -> str:
        return ", ".join(" ".join(["1"] * len(getattr(tensor, "shape", ()))) for tensor in tensors)

    return make_rule(f"{side(call.operands)} -> {side(call.results)}", call)


def _loss_rule(reduction: int, sees_padding: bool = False) -> Callable[[Call], Rule]:
    """``reduction``: the position of that argument, a mean by default. ``sees_padding``: zeros lose something."""

    def bind(call: Call) -> Rule:
        how = call.args[reduction] if len(call.args) > reduction else MEAN
        if how == SUM:
            return make_rule(f"{', '.join(['...'] * len(call.operands))} -> ", call, sees_padding=sees_padding)
        return pointwise_rule(call) if how == NONE else _whole_rule(call)

    return bind


def _loss_backward_rule(reduction: int) -> Callable[[Call], Rule]:
    """The gradient of a mean divides by the number of elements that it is given."""

    def bind(call: Call) -> Rule:
        how = call.args[reduction] if len(call.args) > reduction else MEAN
        return _whole_rule(call) if how == MEAN else pointwise_rule(call)

    return bind


def _nll_names(call: Call, operand: int) -> tuple[str, str, str]:
    """The specs of the log probabilities, of the target, and the names of the rows."""
    scores = call.operands[operand]
    assert scores is not None
    names = dim_names(len(scores.shape))
    classes = min(1, len(names) - 1)
    rows = [*names[:classes], *names[classes + 1 :]]
    return " ".join([*rows[:classes], "1", *rows[classes:]]), " ".join(rows), " ".join(rows)


def _nll_loss_rule(call: Call) -> Rule:
    """Both results are sums over rows; a mean divides one by the other."""
    scores, target, rows = _nll_names(call, 0)
    how = call.args[3]
    result = rows if how == NONE else ""
    return make_rule(f"{scores}, {target}, 1 -> {result}, ", call, whole=rows if how == MEAN else "", sees_padding=True)


def _nll_loss_backward_rule(call: Call) -> Rule:
    """Rows are free even for a mean: the total weight is an operand."""
    scores, target, rows = _nll_names(call, 1)
    grad = rows if call.args[4] == NONE else ""
    return make_rule(f"{grad}, {scores}, {target}, 1,  -> {scores}", call)


def _margin_rule(spec: str, reduction: int) -> Callable[[Call], Rule]:
    """Scores ``x`` are ``[rows, classes]`` or ``[classes]``; ``n`` has an entry a row, ``l`` too or is reduced."""

    def bind(call: Call) -> Rule:
        how = call.args[reduction] if len(call.args) > reduction else MEAN
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
rule(aten.soft_margin_loss_backward.default, _loss_backward_rule(reduction=3))
rule(aten.nll_loss_forward.default, _nll_loss_rule)
rule(aten.nll_loss_backward.default, _nll_loss_backward_rule)
rule(aten.nll_loss2d_forward.default, _nll_loss_rule)
rule(aten.nll_loss2d_backward.default, _nll_loss_backward_rule)
rule(aten.mse_loss.default, _loss_rule(reduction=2))
rule(aten.mse_loss_backward.default, _loss_backward_rule(reduction=3))
rule(aten.smooth_l1_loss.default, _loss_rule(reduction=2))
rule(aten.smooth_l1_loss_backward.default, _loss_backward_rule(reduction=3))
rule(aten.huber_loss.default, _loss_rule(reduction=2))
rule(aten.huber_loss_backward.default, _loss_backward_rule(reduction=3))
rule(aten.binary_cross_entropy.default, _loss_rule(reduction=3))
rule(aten.binary_cross_entropy_backward.default, _loss_backward_rule(reduction=4))
rule(aten.binary_cross_entropy_with_logits.default, _loss_rule(reduction=4, sees_padding=True))
