"""Enlarging an image by a whole factor along a cut place: each chunk by itself, or with the elements beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardc.sharding import TensorType
from shardc.window import EDGE, Windows

from .along import Along, Reach, Windowed

aten = torch.ops.aten


def _sizes(along: Along) -> tuple[int, int]:
    """The size of the dim in the image and in the enlarged one."""
    given = along.given
    large = along.at(given["output_size"])
    return (along.size(given["self"]) if "self" in given else given["input_size"][along.dim]), large


def _image_window(along: Along, beside: int) -> Windows:
    """Of the image what each chunk of it is enlarged from: the chunk, and ``beside`` elements at either end."""
    size, _ = _sizes(along)
    return Windows(along.count, size, size, -beside, 1, 2 * beside + 1, EDGE)


def _enlarged_window(along: Along) -> Windows:
    """Of the enlarged image what each chunk of the image becomes."""
    size, large = _sizes(along)
    return Windows(along.count, large, size, 0, large // size, large // size)


def _reach(beside: int) -> Reach:
    def reach(along: Along) -> list[tuple[Windows, TensorType]]:
        size, large = _sizes(along)
        node = along.node
        types = [along.emit.type(along.given.get("self", node)), along.emit.type(along.given.get("grad_output", node))]
        scale = along.given[along.at(_scales(along))]
        if large % size or scale not in (None, large / size) or along.given.get("align_corners"):
            return []
        return list(zip((_image_window(along, beside), _enlarged_window(along)), types, strict=True))

    return reach


def _scales(along: Along) -> list[str]:
    """The names of the arguments that are scales, one a place."""
    return [name for name in along.given if name.startswith("scales")]


def _arguments(along: Along, beside: int) -> tuple[list[int], list[Any]]:
    """The enlarged size of a window, and all arguments that follow it; the scale is that of the sizes."""
    given, (size, large) = along.given, _sizes(along)
    ours = along.at(_scales(along))
    scales = [None if name == ours else given[name] for name in _scales(along)]
    enlarged = _image_window(along, beside).size * (large // size)
    corners = [given["align_corners"]] if "align_corners" in given else []
    return along.without(given["output_size"], enlarged), [*corners, *scales]


def _edged(along: Along, x: fx.Node, edge: int) -> fx.Node:
    """With ``edge`` zeros at either end of the dim; less than none are cut off."""
    return along.padded(x, edge, edge) if edge else x


def _forward(op: Any, beside: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        size, rest = _arguments(along, beside)
        window, enlarged = _image_window(along, beside), _enlarged_window(along)
        result = along.emit(op, along.windows(along.given["self"], window), size, *rest)
        return along.overlap_add(_edged(along, result, -beside * enlarged.stride), enlarged)

    return expand


def _backward(op: Any, beside: int) -> Callable[[Along], fx.Node]:
    def expand(along: Along) -> fx.Node:
        size, rest = _arguments(along, beside)
        window, enlarged = _image_window(along, beside), _enlarged_window(along)
        gradient = _edged(along, along.windows(along.given["grad_output"], enlarged), beside * enlarged.stride)
        shape = along.without(along.given["input_size"], window.size)
        shape[0] *= along.count
        return along.overlap_add(along.emit(op, gradient, size, shape, *rest), window)

    return expand


def _entries() -> dict[Any, Windowed]:
    nearest = [f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)]
    linear = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    found: dict[Any, Windowed] = {}
    for name in nearest + linear:
        op, backward = (getattr(aten, f"{name}{suffix}").default for suffix in ("", "_backward"))
        beside = int(name in linear)
        found[op] = Windowed(_reach(beside), _forward(op, beside))
        found[backward] = Windowed(_reach(beside), _backward(backward, beside))
    return found


RESAMPLINGS = _entries()
