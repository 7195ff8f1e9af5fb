"""Resampling, windows and padding by the input's own values: batch and channels are free, positions are whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from shardc.ops.pool import over_places
from shardc.rule import Call, Rule, make_rule, rule

aten = torch.ops.aten


def _overloads(names: str, ndim: int) -> Iterable[Any]:
    """The ops of these names for images of so many dims."""
    return [getattr(aten, name.replace("#", str(ndim))).default for name in names.split()]


def _padding_rule(bind: Callable[[Call], Rule], at: int) -> Callable[[Call], Rule]:
    """A place that ``args[at]``, two numbers for each dim from the last, does not pad is a factor like others."""

    def padding(call: Call) -> Rule:
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


def _shuffle_rule(spec: str) -> Callable[[Call], Rule]:
    def bind(call: Call) -> Rule:
        factor = call.args[1]
        return make_rule(spec, call, linear="0", whole="r s", sizes={"r": factor, "s": factor})

    return bind


def _window_rule(spec: str, kernel: int) -> Callable[[Call], Rule]:
    def bind(call: Call) -> Rule:
        return make_rule(spec, call, linear="0", whole="k", sizes={"k": math.prod(call.args[kernel])})

    return bind


rule(aten.pixel_shuffle.default, _shuffle_rule("... (c r s) h w -> ... c (h r) (w s)"))
rule(aten.pixel_unshuffle.default, _shuffle_rule("... c (h r) (w s) -> ... (c r s) h w"))
rule(
    aten.channel_shuffle.default,
    lambda call: make_rule("n (g c) ... -> n (c g) ...", call, linear="0", whole="g", sizes={"g": call.args[1]}),
)
rule(aten.im2col.default, _window_rule("... c 1 1 -> ... (c k) 1", kernel=1))
rule(aten.col2im.default, _window_rule("... (c k) 1 -> ... c 1 1", kernel=2))
