"""Resampling, windows and padding by the input's own values: batch and channels are free, positions are whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.language.windows import Windows, overlap_add, windows
from shardc.ops.view import dim_names

aten = torch.ops.aten


def sums_over_kernel(kernel: int, result: int, is_transposed: bool) -> bool:
    """Whether a place is best cut where it is summed over: the kernel is larger than the result, as for a gradient."""
    return kernel > result and not is_transposed


def _convolution_rule(call: OpCall) -> Rule:
    """With a bias the input's channels are whole: were they cut, every shard would add it."""
    whole = "i" if call.operands[2] is not None else ""
    specs, sizes, chunks = _specs(call.operands[0], call.operands[1], call.result, call.args[6], call.args[8])
    spec = "{x}, {weight}, {bias} -> {result}".format(**specs)
    return make_rule(spec, call, whole=whole, linear="" if whole else "0 1", sizes=sizes, chunks=chunks)


def _convolution_backward_rule(call: OpCall) -> Rule:
    """With a bias the input's channels are whole: the bias's gradient lacks them and is no sum over them."""
    specs, sizes, chunks = _specs(call.operands[1], call.operands[2], call.operand, call.args[7], call.args[9])
    spec = "{result}, {x}, {weight} -> {x}, {weight}, {bias}".format(**specs)
    return make_rule(spec, call, whole="i" if call.args[10][2] else "", sizes=sizes, chunks=chunks)


def _specs(
    x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool, groups: int
) -> tuple[Mapping[str, str], dict[str, int], dict[str, int]]:
    """The specs of input ``n (g i)``, weight ``(g o) i`` and result ``n (g o)``; sizes of factors; and those in chunks.

    A place is a factor of input and result, or of input and kernel; it has another size on each.
    """
    assert x is not None and weight is not None and result is not None
    shapes = list(zip(x.shape, weight.shape, result.shape, strict=True))[2:]
    names = [_place(i, *sizes, is_transposed) for i, sizes in enumerate(shapes)]
    of_x, of_weight, of_result = (" ".join(place[i] for place in names) for i in range(3))
    specs = {
        "x": f"n (g i) {of_x}",
        "weight": f"(g i) o {of_weight}" if is_transposed else f"(g o) i {of_weight}",
        "bias": "(g o)",
        "result": f"n (g o) {of_result}",
    }
    chunks = {place[0]: 1 for place in names if place[0] != "1"}
    return specs, {"g": groups, "i": x.shape[1] // groups, "o": result.shape[1] // groups}, chunks


def _place(i: int, x: int, kernel: int, result: int, is_transposed: bool) -> tuple[str, str, str]:
    """The factor of a place on input, weight and result."""
    if min(x, kernel) > 1 and sums_over_kernel(kernel, result, is_transposed):
        return f"k{i}", f"k{i}", "1"
    return (f"s{i}", "1", f"s{i}") if min(x, result) > 1 else ("1", "1", "1")


def _num_groups(x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool) -> int:
    """How many groups tensors have: their channels by those of one group in the weight."""
    channels = result if is_transposed else x
    assert channels is not None and weight is not None
    return channels.shape[1] // max(1, weight.shape[1])


def _local_convolution(call: OpCall, shard: OpCall) -> dict[int, Any]:
    x, weight = shard.operands[:2]
    return {8: _num_groups(x, weight, shard.result, call.args[6])}


def _local_convolution_backward(call: OpCall, shard: OpCall) -> dict[int, Any]:
    grad, x, weight = shard.operands[:3]
    groups = _num_groups(x, weight, grad, call.args[7])
    return {9: groups} if call.args[3] is None else {3: [shard.operand.shape[1]], 9: groups}


rule(aten.convolution.default, _convolution_rule, local=_local_convolution)
rule(aten.convolution_backward.default, _convolution_backward_rule, local=_local_convolution_backward)


def over_places(sides: str, count: int, linear: str) -> Callable[[OpCall], Rule]:
    """``"y x -> x"``: tensors of the places before, x, and after, y: the last ``count`` dims."""

    def bind(call: OpCall) -> Rule:
        names = sides.replace("->", "").split()
        tensors = dict(zip(names, (*call.operands, *call.results), strict=True))
        x, y = tensors["x"], tensors["y"]
        assert x is not None and y is not None
        spec, chunks = places(x, y, count)
        left, right = (", ".join([f"... {spec}"] * len(side.split())) for side in sides.split("->"))
        return make_rule(f"{left} -> {right}", call, linear=linear, chunks=chunks)

    return bind


def _enter(name: str, sides: str, count: int, linear: str = "0") -> None:
    rule(getattr(aten, name).default, over_places(sides, count, linear))


_enter("max_pool2d_with_indices", "x -> y y", 2, linear="")
_enter("max_pool3d_with_indices", "x -> y y", 3, linear="")
_enter("max_pool2d_with_indices_backward", "y x y -> x", 2)
_enter("max_pool3d_with_indices_backward", "y x y -> x", 3)
_enter("avg_pool2d", "x -> y", 2)
_enter("avg_pool3d", "x -> y", 3)
_enter("avg_pool2d_backward", "y x -> x", 2)
_enter("avg_pool3d_backward", "y x -> x", 3)
_enter("_adaptive_avg_pool2d", "x -> y", 2)
_enter("_adaptive_avg_pool2d_backward", "y x -> x", 2)


def _overloads(names: str, ndim: int) -> Iterable[Any]:
    """The ops of these names for images of so many dims."""
    return [getattr(aten, name.replace("#", str(ndim))).default for name in names.split()]


def _padding_rule(bind: Callable[[OpCall], Rule], at: int) -> Callable[[OpCall], Rule]:
    """A place that ``args[at]``, two numbers for each dim from the last, does not pad is a factor like others."""

    def padding(call: OpCall) -> Rule:
        found, pads, shape = bind(call), call.args[at], call.result.shape
        assert found.results[0] is not None
        names = found.results[0][::-1]
        kept = {
            names[i][0]: shape[-1 - i] for i in range(len(pads) // 2) if not any(pads[2 * i : 2 * i + 2]) and names[i]
        }
        chunks = {factor: count for factor, count in found.chunks.items() if factor not in kept}
        return replace(found, sizes={**found.sizes, **kept}, chunks=chunks)

    return padding


for ndim in (1, 2, 3):
    for op in _overloads("upsample_nearest#d _upsample_nearest_exact#d", ndim):
        rule(op, over_places("x -> y", ndim, linear="0"))
    for op in _overloads("upsample_nearest#d_backward _upsample_nearest_exact#d_backward", ndim):
        rule(op, over_places("y -> x", ndim, linear="0"), sizes=2)
    for op in _overloads("reflection_pad#d replication_pad#d", ndim):
        rule(op, _padding_rule(over_places("x -> y", ndim, linear="0"), 1))
    for op in _overloads("reflection_pad#d_backward replication_pad#d_backward", ndim):
        rule(op, _padding_rule(over_places("y x -> x", ndim, linear="0"), 2))
for name, ndim in (
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("_upsample_bilinear2d_aa", 2),
    ("upsample_bicubic2d", 2),
    ("_upsample_bicubic2d_aa", 2),
    ("upsample_trilinear3d", 3),
):
    rule(getattr(aten, name).default, over_places("x -> y", ndim, linear="0"))
    rule(getattr(aten, f"{name}_backward").default, over_places("y -> x", ndim, linear="0"), sizes=2)

# Each point of the grid looks up the image by itself.
rule(aten.grid_sampler_2d.default, "n c 1 1, n h w 1 -> n c h w", linear="0")
rule(aten.grid_sampler_2d_backward.default, "n c h w, n c 1 1, n h w 1 -> n c 1 1, n h w 1")
rule(aten.grid_sampler_3d.default, "n c 1 1 1, n d h w 1 -> n c d h w", linear="0")
rule(aten.grid_sampler_3d_backward.default, "n c d h w, n c 1 1 1, n d h w 1 -> n c 1 1 1, n d h w 1")

# Pooling by the greatest, and back.
rule(aten.adaptive_max_pool2d.default, "... 1 1 -> ... 1 1, ... 1 1")
rule(aten.adaptive_max_pool2d_backward.default, "... 1 1, ... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.adaptive_max_pool3d.default, "... 1 1 1 -> ... 1 1 1, ... 1 1 1")
rule(aten.adaptive_max_pool3d_backward.default, "... 1 1 1, ... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten.fractional_max_pool2d.default, "... 1 1, ... 1 -> ... 1 1, ... 1 1")
rule(aten.fractional_max_pool2d_backward.default, "... 1 1, ... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.fractional_max_pool3d.default, "... 1 1 1, ... 1 -> ... 1 1 1, ... 1 1 1")
rule(aten.fractional_max_pool3d_backward.default, "... 1 1 1, ... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten.max_unpool2d.default, "... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.max_unpool3d.default, "... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten._adaptive_avg_pool3d.default, "... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten._adaptive_avg_pool3d_backward.default, "... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")


# Channels that hold pixels or windows: the window is the minor factor.


def _shuffle_rule(spec: str) -> Callable[[OpCall], Rule]:
    def bind(call: OpCall) -> Rule:
        factor = call.args[1]
        return make_rule(spec, call, linear="0", whole="r s", sizes={"r": factor, "s": factor})

    return bind


def _columns_rule(spec: str, kernel: int) -> Callable[[OpCall], Rule]:
    def bind(call: OpCall) -> Rule:
        return make_rule(spec, call, linear="0", whole="k", sizes={"k": math.prod(call.args[kernel])})

    return bind


rule(aten.pixel_shuffle.default, _shuffle_rule("... (c r s) h w -> ... c (h r) (w s)"))
rule(aten.pixel_unshuffle.default, _shuffle_rule("... c (h r) (w s) -> ... (c r s) h w"))
rule(
    aten.channel_shuffle.default,
    lambda call: make_rule("n (g c) ... -> n (c g) ...", call, linear="0", whole="g", sizes={"g": call.args[1]}),
)
rule(aten.im2col.default, _columns_rule("... c 1 1 -> ... (c k) 1", kernel=1))
rule(aten.col2im.default, _columns_rule("... (c k) 1 -> ... c 1 1", kernel=2))


def places(x: TensorType, y: TensorType, count: int) -> tuple[str, dict[str, int]]:
    """A factor for each of the last ``count`` dims, which two tensors have, each of its own size; and the chunks."""
    pairs = list(zip(x.shape, y.shape, strict=True))[len(x.shape) - count :]
    names = [f"s{i}" if min(pair) > 1 else "1" for i, pair in enumerate(pairs)]
    return " ".join(names), {name: 1 for name in names if name != "1"}


def _names(call: OpCall) -> tuple[str, str]:
    """The specs of the tensor with the dim, and of the one with its windows."""
    names, dim = dim_names(len(call.operand.shape)), call.args[2] % len(call.operand.shape)
    before, after = names[:dim], names[dim + 1 :]
    return " ".join([*before, "n", *after]), " ".join([*before, "(n w)", *after])


def _window_rule(spec: str, call: OpCall, linear: str) -> Rule:
    window = Windows(*call.args[3])
    sizes = {"n": window.count, "w": window.size}
    return make_rule(spec, call, linear=linear, whole="w", sizes=sizes, chunks={"n": window.count})


def _windows_rule(call: OpCall) -> Rule:
    dim, joined = _names(call)
    return _window_rule(f"{dim} -> {joined}", call, linear="0" if call.args[4] == 0 else "")


def _overlap_add_rule(call: OpCall) -> Rule:
    dim, joined = _names(call)
    return _window_rule(f"{joined} -> {dim}", call, linear="0")


rule(windows, _windows_rule)
rule(overlap_add, _overlap_add_rule)
