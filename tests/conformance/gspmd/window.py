"""XLA's convolution and sum-pooling in torch, parsed from the text of their dims and windows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The size of a window in each dim, its strides, padding and dilations, and whether it is reversed."""

    size: list[int]
    stride: list[int]
    pad: list[tuple[int, int]]
    lhs_dilate: list[int]
    rhs_dilate: list[int]
    is_reversed: bool

    @staticmethod
    def parse(text: str) -> Window:
        found = re.search(r"window{(.*?)}", text)
        assert found
        said = dict(part.split("=") for part in found[1].split())

        def listed(name: str) -> list[int] | None:
            return [int(n) for n in said[name].split("x")] if name in said else None

        size = listed("size") or []
        ones = [1] * len(size)
        edges = [edge.split("_") for edge in said["pad"].split("x")] if "pad" in said else [["0", "0"]] * len(size)
        return Window(
            size,
            listed("stride") or ones,
            [(int(low), int(high)) for low, high in edges],
            listed("lhs_dilate") or ones,
            listed("rhs_dilate") or ones,
            "rhs_reversal" in said,
        )


def convolution(text: str, x: Tensor, w: Tensor) -> Tensor:
    """A convolution of ``dim_labels=b01f_01io->b01f`` with a window, and groups of features or of the batch."""
    labels, window = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text), Window.parse(text)
    assert labels
    a, b, out = labels.groups()
    places = "".join(sorted(letter for letter in a if letter.isdigit()))
    x, w = (t.permute([own.index(c) for c in want + places]) for t, own, want in ((x, a, "bf"), (w, b, "oi")))
    groups, batch_groups = (_number(text, name) for name in (r"\bgroups", "batch_groups"))
    if not places:
        return F.linear(x, w).permute([out.index(c) for c in "bf"])
    if batch_groups > 1:  # groups of the batch become groups of channels
        x = x.unflatten(0, (batch_groups, -1)).movedim(0, 1).flatten(1, 2)
    x = _edges(x, window)
    w = w.flip([*range(2, w.ndim)]) if window.is_reversed else w
    conv = (F.conv1d, F.conv2d)[len(places) - 1]
    edge = [low if (low, low) == pad else 0 for low, pad in zip((p[0] for p in window.pad), window.pad, strict=True)]
    found = conv(
        x, w, stride=window.stride, padding=[max(0, n) for n in edge], dilation=window.rhs_dilate,
        groups=groups * batch_groups,
    )  # fmt: skip
    return found.permute([("bf" + places).index(letter) for letter in out])


def pool(text: str, x: Tensor) -> Tensor:
    """The sums over a window in the dims where its size is above 1."""
    window = Window.parse(text)
    dims = [i for i, size in enumerate(window.size) if size > 1]
    rest = [i for i in range(x.ndim) if i not in dims]
    lead = [x.shape[i] for i in rest]
    inner = Window(*([field[i] for i in dims] for field in _lists(window)), is_reversed=False)
    flat = x.permute(rest + dims).reshape([1, -1, *(x.shape[i] for i in dims)])
    if len(dims) == 1:
        flat, inner = flat.unsqueeze(-1), _with_column(inner)
    flat = _zeros_at_the_edges(flat, inner)
    found = F.avg_pool2d(flat, inner.size, inner.stride, divisor_override=1)
    found = found.squeeze(-1) if len(dims) == 1 else found
    return found.reshape([*lead, *found.shape[2:]]).permute([(rest + dims).index(i) for i in range(x.ndim)])


def _lists(window: Window) -> list[list]:
    return [window.size, window.stride, window.pad, window.lhs_dilate, window.rhs_dilate]


def _with_column(window: Window) -> Window:
    """A window over one dim, extended by a second dim of one element."""
    fillings: list = [1, 1, (0, 0), 1, 1]
    return Window(*([*field, filling] for field, filling in zip(_lists(window), fillings, strict=True)), False)


def _edges(x: Tensor, window: Window) -> Tensor:
    """``x`` with zeros between its elements, and at edges that the convolution cannot pad itself."""
    pads = [(0, 0) if low == high >= 0 else (low, high) for low, high in window.pad]
    return _padded(_dilated(x, window.lhs_dilate), pads)


def _zeros_at_the_edges(x: Tensor, window: Window) -> Tensor:
    return _padded(_dilated(x, window.lhs_dilate), window.pad)


def _padded(x: Tensor, pads: list[tuple[int, int]]) -> Tensor:
    flat = [n for low_high in reversed(pads) for n in low_high]
    return F.pad(x, flat) if any(flat) else x


def _dilated(x: Tensor, steps: list[int]) -> Tensor:
    """``x`` with ``step - 1`` zeros between the elements of each of the last dims."""
    for dim, step in zip(range(x.ndim - len(steps), x.ndim), steps, strict=True):
        if step > 1:
            spread = F.pad(x.unsqueeze(dim + 1), [0, 0] * (x.ndim - dim - 1) + [0, step - 1]).flatten(dim, dim + 1)
            x = spread.narrow(dim, 0, (x.shape[dim] - 1) * step + 1)
    return x


def _number(text: str, name: str) -> int:
    found = re.search(rf"{name}=(\d+)", text)
    return int(found[1]) if found else 1
