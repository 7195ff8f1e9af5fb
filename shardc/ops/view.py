"""Views: ops that only rename, reorder, merge, split or repeat dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.language.rule import Bind, OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.language.size import common_divisor

aten = torch.ops.aten


def view_spec(src: Sequence[int], dst: Sequence[int]) -> tuple[str, dict[str, int], str]:
    """The spec of a view from one shape to another, the sizes of its factors, and the factors that are whole.

    Both shapes are walked from the major end. Each time the greatest common divisor of the rests of the two dims
    becomes a factor of both: ``[8] -> [2, 4]`` gives ``(a b) -> a b``. If there is none, the rest of a dim is a factor
    of one side alone, and whole, until the two line up again: ``[4, 6] -> [6, 4]`` gives ``(a i) j -> (a k) l``. A dim
    of size 1 has a factor if the other side has such a dim in the same place. This follows Shardy's rule for reshape.
    """
    left, right = _Walk(src), _Walk(dst)
    sizes: dict[str, int] = {}
    whole: list[str] = []
    while left.rest > 1 or right.rest > 1:
        name = f"f{len(sizes)}"
        common = common_divisor(left.size, right.size) if left.rest == right.rest else 1
        ahead, behind = (left, right) if left.rest >= right.rest else (right, left)
        sizes[name] = common if common > 1 else ahead.until(behind.rest)
        whole += [name] * (common == 1)
        for side in (left, right) if common > 1 else (ahead,):
            side.take(sizes[name], name)
    left_ones, right_ones = left.ones(), right.ones()
    for place in [place for place in left_ones if place in right_ones]:
        name = f"f{len(sizes)}"
        sizes[name] = 1
        left.factors[left_ones[place]] = right.factors[right_ones[place]] = [name]
    return f"{left.text} -> {right.text}", sizes, " ".join(whole)


class _Walk:
    """A shape whose dims are split into factors from the major end.

    ``size`` is the rest of the current dim, ``rest`` that of all dims together.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self.sizes = list(shape)
        self.factors: list[list[str]] = [[] for _ in shape]
        self.rest = math.prod(shape)

    @property
    def size(self) -> int:
        return next((size for size in self.sizes if size > 1), 1)

    def until(self, rest: int) -> int:
        """The factor of the current dim that leaves ``rest`` of all dims together; the whole dim if there is none."""
        part, over = self.rest // rest, self.rest % rest
        return part if part > 1 and not over and self.size % part == 0 else self.size

    def take(self, size: int, name: str) -> None:
        dim = next(i for i, left in enumerate(self.sizes) if left > 1)
        self.factors[dim].append(name)
        self.sizes[dim] //= size
        self.rest //= size

    def ones(self) -> dict[tuple[int, int], int]:
        """The dims of size 1 by place: the number of elements before a dim, and its index among dims with as many."""
        places: dict[tuple[int, int], int] = {}
        for dim, size in enumerate(self.shape):
            if size == 1:
                before = math.prod(self.shape[:dim])
                places[before, sum(elements == before for elements, _ in places)] = dim
        return places

    @property
    def text(self) -> str:
        return " ".join(f"({' '.join(factors)})" if factors else "1" for factors in self.factors)


def dim_names(ndim: int) -> list[str]:
    """A factor for every dim."""
    return [f"d{i}" for i in range(ndim)]


def _view_rule(call: OpCall) -> Rule:
    spec, sizes, whole = view_spec(call.operand.shape, call.result.shape)
    return make_rule(spec, call, linear="0", whole=whole, sizes=sizes)


def _permute_rule(call: OpCall) -> Rule:
    names = dim_names(len(call.operand.shape))
    return make_rule(f"{' '.join(names)} -> {' '.join(names[dim] for dim in call.args[1])}", call, linear="0")


def _transpose_rule(call: OpCall) -> Rule:
    names = dim_names(len(call.operand.shape))
    dims, result = call.args[1:3] or (0, -1), [*names]  # t() names no dims
    if names:
        result[dims[0]], result[dims[1]] = names[dims[1]], names[dims[0]]
    return make_rule(f"{' '.join(names)} -> {' '.join(result)}", call, linear="0")


def _expand_rule(call: OpCall) -> Rule:
    """Not linear, though it could be: that would enlarge the value to be reduced."""
    shape, names = call.operand.shape, dim_names(len(call.result.shape))
    lead = len(names) - len(shape)
    triples = zip(names[lead:], shape, call.result.shape[lead:], strict=True)
    remaining = [name if size == new else "1" for name, size, new in triples]
    return make_rule(f"{' '.join(remaining)} -> {' '.join(names)}", call)


def _unsqueeze_rule(call: OpCall) -> Rule:
    names = dim_names(len(call.operand.shape))
    new = call.args[1] % len(call.result.shape)
    return make_rule(f"{' '.join(names)} -> {' '.join([*names[:new], '1', *names[new:]])}", call, linear="0")


def _squeeze_rule(call: OpCall) -> Rule:
    """A dim that the op names is whole: if it were cut to one element a rank, it would vanish."""
    ndim = len(call.operand.shape)
    named = call.args[1] if len(call.args) > 1 else range(ndim)
    dims = {dim % ndim for dim in ([named] if isinstance(named, int) else named)} if ndim else set()
    names = ["1" if dim in dims else name for dim, name in enumerate(dim_names(ndim))]
    remaining = [name for name, size in zip(names, call.operand.shape, strict=True) if name != "1" or size != 1]
    return make_rule(f"{' '.join(names)} -> {' '.join(remaining)}", call, linear="0")


def _repeat_rule(call: OpCall) -> Rule:
    """A dim that is repeated holds its copies as the major factor, which is whole."""
    names = dim_names(len(call.result.shape))
    lead = len(names) - len(call.operand.shape)
    copied = " ".join(f"(r{name} {name})" for name in names[lead:])
    new = " ".join(f"r{name}" for name in names[:lead])
    whole = " ".join(f"r{name}" for name in names)
    return make_rule(f"{' '.join(names[lead:])} -> {new} {copied}", call, whole=whole)


def _diagonal_rule(spec: str, at: int, *defaults: int, linear: str = "0") -> Bind:
    """``L`` in the spec is a tensor with two whole dims, ``S`` its diagonal along them, as the last dim.

    ``args[at]`` and the argument after it are the two dims; ``defaults`` stand in if they are left out.
    """

    def bind(call: OpCall) -> Rule:
        names = dim_names(len((call.operand if spec.startswith("L") else call.result).shape))
        named = call.args[at : at + 2]
        whole = {dim % len(names) for dim in (*named, *defaults[len(named) :])}
        large = " ".join("1" if dim in whole else name for dim, name in enumerate(names))
        small = " ".join([*(name for dim, name in enumerate(names) if dim not in whole), "1"])
        return make_rule(spec.replace("L", large).replace("S", small), call, linear=linear)

    return bind


def _unfold_rule(spec: str, x: TensorType, dim: int, call: OpCall) -> Rule:
    """``X`` in the spec are the dims of ``x``; the places of a window are the last dim, ``1``."""
    names = dim_names(len(x.shape))
    chunks = {names[dim]: 1} if names else {}
    return make_rule(spec.replace("X", " ".join(names)), call, linear="0", chunks=chunks)


rule((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view_rule, sizes=1)
rule(aten.permute.default, _permute_rule)
rule((aten.transpose.int, aten.t.default), _transpose_rule)
rule(aten.expand.default, _expand_rule, sizes=1)
rule(aten.unsqueeze.default, _unsqueeze_rule)
rule((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeeze_rule)
rule(aten.repeat.default, _repeat_rule)
rule(aten.diagonal.default, _diagonal_rule("L -> S", 2, 0, 1))
rule(aten.diagonal_backward.default, _diagonal_rule("S -> L", 3), sizes=1)
rule(aten.diagonal_scatter.default, _diagonal_rule("L, S -> L", 3, 0, 1, linear="01"))
rule(aten.diag_embed.default, _diagonal_rule("S -> L", 2, -2, -1))
rule(aten.unfold.default, lambda call: _unfold_rule("X -> X 1", call.operand, call.args[1], call))
rule(aten.unfold_backward.default, lambda call: _unfold_rule("X 1 -> X", call.result, call.args[2], call), sizes=1)
rule(aten.view_as_real.default, "... -> ... 1", linear="0")
rule(aten.view_as_complex.default, "... 1 -> ...", linear="0")
