"""Ops that read a window around each position: convolution, pooling, padding by the input's own values, resampling.

Batch and channels are free. Positions are factors in chunks if decompose can fetch the edges of the neighbours' chunks,
else whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardc.language.rule import Bind, OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.language.windows import Windows, overlap_add, windows
from shardc.ops.reduction import spec_with
from shardc.ops.view import dim_names

aten = torch.ops.aten


# Convolution.


def _convolution_rule(call: OpCall) -> Rule:
    """With a bias the input's channels are whole: if they were cut, every shard would add it."""
    x, weight, bias = call.operands
    specs, sizes, chunks = _convolution_specs(x, weight, call.result, call.args[6], call.args[8])
    spec = "{x}, {weight}, {bias} -> {result}".format(**specs)
    whole, linear = ("i", "") if bias is not None else ("", "0 1")
    return make_rule(spec, call, whole=whole, linear=linear, sizes=sizes, chunks=chunks)


def _convolution_backward_rule(call: OpCall) -> Rule:
    """With a bias the input's channels are whole: the bias's gradient lacks them and is no sum over them."""
    gradient, x, weight = call.operands[:3]
    specs, sizes, chunks = _convolution_specs(x, weight, gradient, call.args[7], call.args[9])
    spec = "{result}, {x}, {weight} -> {x}, {weight}, {bias}".format(**specs)
    return make_rule(spec, call, whole="i" if call.args[10][2] else "", sizes=sizes, chunks=chunks)


def _convolution_specs(
    x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool, groups: int
) -> tuple[Mapping[str, str], dict[str, int], dict[str, int]]:
    """The specs of input ``n (g i)``, weight ``(g o) i`` and result ``n (g o)``; sizes of factors; factors in chunks.

    A place (a spatial dim) is a factor of input and result, or of input and kernel, with another size on each.
    """
    assert x is not None and weight is not None and result is not None
    shapes = list(zip(x.shape, weight.shape, result.shape, strict=True))[2:]
    places = [_place(i, *sizes, is_transposed) for i, sizes in enumerate(shapes)]
    of_x, of_weight, of_result = (" ".join(place[i] for place in places) for i in range(3))
    specs = {
        "x": f"n (g i) {of_x}",
        "weight": f"(g i) o {of_weight}" if is_transposed else f"(g o) i {of_weight}",
        "bias": "(g o)",
        "result": f"n (g o) {of_result}",
    }
    chunks = {place[0]: 1 for place in places if place[0] != "1"}
    return specs, {"g": groups, "i": x.shape[1] // groups, "o": result.shape[1] // groups}, chunks


def _place(i: int, x: int, kernel: int, result: int, is_transposed: bool) -> tuple[str, str, str]:
    """The factor of a place on input, weight and result."""
    if min(x, kernel) > 1 and sums_over_kernel(kernel, result, is_transposed):
        return f"k{i}", f"k{i}", "1"
    return (f"s{i}", "1", f"s{i}") if min(x, result) > 1 else ("1", "1", "1")


def sums_over_kernel(kernel: int, result: int, is_transposed: bool) -> bool:
    """Whether a place is best cut in the kernel, over which it is summed: if that is larger, as for a gradient."""
    return kernel > result and not is_transposed


def _num_groups(x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool) -> int:
    """The number of groups: the channels divided by those of one group in the weight."""
    channels = result if is_transposed else x
    assert channels is not None and weight is not None
    return channels.shape[1] // max(1, weight.shape[1])


def _local_convolution_backward(call: OpCall, shard: OpCall) -> dict[int, Any]:
    grad, x, weight = shard.operands[:3]
    groups = _num_groups(x, weight, grad, call.args[7])
    return {9: groups} if call.args[3] is None else {3: [shard.operand.shape[1]], 9: groups}


rule(
    aten.convolution.default,
    _convolution_rule,
    local=lambda call, shard: {8: _num_groups(shard.operand, shard.operands[1], shard.result, call.args[6])},
)
rule(aten.convolution_backward.default, _convolution_backward_rule, local=_local_convolution_backward)


# Pooling and resampling.


def _over_places(sides: str, count: int, linear: str = "0") -> Bind:
    """``"y x -> x"``: ``x`` and ``y`` are tensors before and after; their last ``count`` dims are places in chunks."""

    def bind(call: OpCall) -> Rule:
        names = sides.replace("->", "").split()
        tensors = dict(zip(names, (*call.operands, *call.results), strict=True))
        x, y = tensors["x"], tensors["y"]
        assert x is not None and y is not None
        pairs = list(zip(x.shape, y.shape, strict=True))[len(x.shape) - count :]
        places = [f"s{i}" if min(pair) > 1 else "1" for i, pair in enumerate(pairs)]
        left, right = (", ".join([f"... {' '.join(places)}"] * len(side.split())) for side in sides.split("->"))
        chunks = {place: 1 for place in places if place != "1"}
        return make_rule(f"{left} -> {right}", call, linear=linear, chunks=chunks)

    return bind


def _overloads(names: str, ndim: int) -> tuple[Any, ...]:
    """The ops of these names for images of ``ndim`` dims."""
    return tuple(getattr(aten, name.replace("#", str(ndim))).default for name in names.split())


for ndim in (2, 3):
    rule(_overloads("max_pool#d_with_indices", ndim), _over_places("x -> y y", ndim, linear=""))
    rule(_overloads("max_pool#d_with_indices_backward", ndim), _over_places("y x y -> x", ndim))
    rule(_overloads("avg_pool#d", ndim), _over_places("x -> y", ndim))
    rule(_overloads("avg_pool#d_backward", ndim), _over_places("y x -> x", ndim))
    x = " ".join(["...", *["1"] * ndim])
    rule(_overloads("adaptive_max_pool#d", ndim), f"{x} -> {x}, {x}")
    rule(_overloads("fractional_max_pool#d", ndim), f"{x}, ... 1 -> {x}, {x}")
    max_backward = _overloads("adaptive_max_pool#d_backward fractional_max_pool#d_backward", ndim)
    rule(max_backward, f"{x}, {x}, {x} -> {x}", linear="0")
    rule(_overloads("max_unpool#d", ndim), f"{x}, {x} -> {x}", linear="0")
rule(aten._adaptive_avg_pool2d.default, _over_places("x -> y", 2))
rule(aten._adaptive_avg_pool2d_backward.default, _over_places("y x -> x", 2))
rule(aten._adaptive_avg_pool3d.default, "... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten._adaptive_avg_pool3d_backward.default, "... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")

for ndim, names in (
    (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa"),
    (2, "upsample_bicubic2d _upsample_bicubic2d_aa"),
    (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
):
    for name in names.split():
        rule(getattr(aten, name).default, _over_places("x -> y", ndim))
        rule(getattr(aten, f"{name}_backward").default, _over_places("y -> x", ndim), sizes=2)

# Each point of the grid looks up the image by itself.
rule(aten.grid_sampler_2d.default, "n c 1 1, n h w 1 -> n c h w", linear="0")
rule(aten.grid_sampler_2d_backward.default, "n c h w, n c 1 1, n h w 1 -> n c 1 1, n h w 1")
rule(aten.grid_sampler_3d.default, "n c 1 1 1, n d h w 1 -> n c d h w", linear="0")
rule(aten.grid_sampler_3d_backward.default, "n c d h w, n c 1 1 1, n d h w 1 -> n c 1 1 1, n d h w 1")


# Padding by the input's own values.


def _padding_rule(bind: Bind, at: int) -> Bind:
    """Unpadded places are plain factors. ``args[at]``: two numbers of padding for each dim, from the last dim on."""

    def padding(call: OpCall) -> Rule:
        bound, pads, shape = bind(call), call.args[at], call.result.shape
        assert bound.results[0] is not None
        unpadded = {
            factors[0]: shape[-1 - i]
            for i, factors in enumerate(bound.results[0][::-1][: len(pads) // 2])
            if factors and not any(pads[2 * i : 2 * i + 2])
        }
        chunks = {factor: count for factor, count in bound.chunks.items() if factor not in unpadded}
        return replace(bound, sizes={**bound.sizes, **unpadded}, chunks=chunks)

    return padding


for ndim in (1, 2, 3):
    rule(_overloads("reflection_pad#d replication_pad#d", ndim), _padding_rule(_over_places("x -> y", ndim), 1))
    backward = _overloads("reflection_pad#d_backward replication_pad#d_backward", ndim)
    rule(backward, _padding_rule(_over_places("y x -> x", ndim), 2))


# Channels that hold pixels or windows: the window is the minor factor.


def _grouped_rule(spec: str, sizes: Callable[[OpCall], dict[str, int]]) -> Bind:
    """A rule whose factors in ``sizes`` are whole."""
    return lambda call: make_rule(spec, call, linear="0", whole=" ".join(sizes(call)), sizes=sizes(call))


def _pixels(call: OpCall) -> dict[str, int]:
    return {"r": call.args[1], "s": call.args[1]}


rule(aten.pixel_shuffle.default, _grouped_rule("... (c r s) h w -> ... c (h r) (w s)", _pixels))
rule(aten.pixel_unshuffle.default, _grouped_rule("... c (h r) (w s) -> ... (c r s) h w", _pixels))
rule(aten.channel_shuffle.default, _grouped_rule("n (g c) ... -> n (c g) ...", lambda call: {"g": call.args[1]}))
rule(aten.im2col.default, _grouped_rule("... c 1 1 -> ... (c k) 1", lambda call: {"k": math.prod(call.args[1])}))
rule(aten.col2im.default, _grouped_rule("... (c k) 1 -> ... c 1 1", lambda call: {"k": math.prod(call.args[2])}))


# Windows of a cut dim, and their adjoint.


def _window_rule(spec: str) -> Bind:
    """``X`` in the spec is the tensor with the dim, ``W`` the one with its windows; only a fill of 0 is linear."""

    def bind(call: OpCall) -> Rule:
        names, window = dim_names(len(call.operand.shape)), Windows(*call.args[3])
        x, joined = (spec_with(names, call.args[2], factors) for factors in ("n", "(n w)"))
        sizes, chunks = {"n": window.count, "w": window.size}, {"n": window.count}
        bound, linear = spec.replace("X", x).replace("W", joined), "" if any(call.args[4:]) else "0"
        return make_rule(bound, call, linear=linear, whole="w", sizes=sizes, chunks=chunks)

    return bind


rule(windows, _window_rule("X -> W"))
rule(overlap_add, _window_rule("W -> X"))
