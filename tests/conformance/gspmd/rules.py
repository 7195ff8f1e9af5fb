"""Shardy's rules of ops: a factor that may be cut there, even if that leaves a partial sum, may be cut here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rule_case import Case as Call
from rule_case import case_of
from torch import Tensor

from shardc.ops.contraction import dot
from shardc.ops.index import put_at

from ..suite import Result

aten = torch.ops.aten
Place = tuple[str, int, int]  # "operand" or "result", its index, and the index of its dim
Tensors = list[Tensor]


@dataclass(frozen=True)
class Shared:
    """A rule of Shardy: the factors of every tensor's dims, their sizes, the summed ones and those that are not cut."""

    operands: list[list[str]]
    results: list[list[str]]
    sizes: dict[str, int]
    summed: set[str]
    kept: set[str]

    @staticmethod
    def parse(text: str) -> Shared:
        """Parse ``([i, k], [k, j])->([i, j]) {i=8, j=16, k=32} reduction={k}``; a factor is one letter."""
        tensors, _, rest = text.partition("{")
        left, right = (
            [dims.replace(" ", "").split(",") if dims else [] for dims in re.findall(r"\[(.*?)\]", side)]
            for side in tensors.split("->")
        )
        sizes = {name: int(size) for name, size in re.findall(r"(\w)=(\d+)", rest)}

        def named(kinds: str) -> set[str]:
            return set("".join(re.findall(rf"(?:{kinds})={{(.*?)}}", rest))) - set(", ")

        return Shared(left, right, sizes, named("reduction"), named("need_replication|permutation"))

    def tensors(self) -> Tensors:
        """The operands as meta tensors."""
        shapes = [[math.prod(self.sizes[factor] for factor in dim) for dim in dims] for dims in self.operands]
        return [torch.empty(shape, device="meta") for shape in shapes]

    def links(self) -> dict[str, frozenset[Place]]:
        """The dims of every factor that may be cut. A factor of operands alone may be cut if it is summed."""
        found = {name: at for name, at in _links(self.operands, self.results).items() if self.sizes[name] > 1}
        both = {name for name, at in found.items() if len({side for side, *_ in at}) == 2}
        return {name: at for name, at in found.items() if name in (both | self.summed) - self.kept}


def _links(operands: Sequence[Any], results: Sequence[Any]) -> dict[str, frozenset[Place]]:
    found: dict[str, set[Place]] = {}
    for side, tensors in (("operand", operands), ("result", results)):
        for i, dims in enumerate(tensors):
            for at, dim in enumerate(dims or ()):
                for factor in dim:
                    found.setdefault(factor, set()).add((side, i, at))
    return {name: frozenset(at) for name, at in found.items()}


@dataclass(frozen=True)
class Torch:
    """The op in torch. ``args``: its arguments by Shardy's operands. ``order``: the index of each operand in Shardy."""

    op: Any
    args: Callable[[Tensors], tuple[Any, ...]] = lambda ts: tuple(ts)
    order: tuple[int, ...] = ()  # empty if equal; -1: an operand that Shardy does not have
    dims: tuple[tuple[int, ...], ...] = ()  # for each tensor, results last: the dim in Shardy of each dim
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def check(fields: Mapping[str, Any]) -> Result:
    """Check that every factor that Shardy may cut may be cut on the same dims here."""
    name, shared = fields["name"].removeprefix("sdy/rule/"), Shared.parse(fields["rule"])
    found = CALLS.get(name)
    if found is None:
        return Result(name, "apart", APART.get(name, "no op of torch's, or several"))
    call = case_of(found.op, found.args(shared.tensors()), found.kwargs)
    ours = set(_allowed(call, found))
    missing = ", ".join(factor for factor, at in shared.links().items() if at not in ours)
    if missing and name in APART:
        return Result(name, "apart", f"{APART[name]}: {missing}")
    return Result(name, "wrong" if missing else "right", missing and f"{missing} cannot be cut")


def _allowed(call: Call, torch_op: Torch) -> Iterator[frozenset[Place]]:
    rule = call.rule
    order = torch_op.order or range(len(rule.operands))
    dims = torch_op.dims or [()] * (len(rule.operands) + len(rule.results))
    tensors = [
        None if dims_ is None else [dims_[place.index(at)] if place else dims_[at] for at in range(len(dims_))]
        for dims_, place in zip((*rule.operands, *rule.results), dims, strict=True)
    ]
    operands: list[Any] = [()] * (max(order, default=-1) + 1)
    for i, given in zip(order, tensors, strict=False):
        if i >= 0:
            operands[i] = given
    for factor, at in _links(operands, tensors[len(rule.operands) :]).items():
        if factor not in rule.whole:
            yield at


def _mixed(ts: Tensors) -> tuple[Any, ...]:
    return (*ts, "i j k l o n, m n o j i -> i j k l m")


def _updated(ts: Tensors) -> tuple[Any, ...]:
    """The arguments of ``put_at``: operands, indices, the position numbers of the indexed dims, and these dims."""
    index = torch.zeros(2, dtype=torch.int64, device="meta")
    rows = [torch.empty(ts[0].shape[dim], dtype=torch.int64, device="meta") for dim in (1, 2)]
    return *ts[:2], index[:1, None], index, *rows, (1, 2)


def _convolved(groups: int) -> Callable[[Tensors], tuple[Any, ...]]:
    def args(ts: Tensors) -> tuple[Any, ...]:
        x, w = ts[0].permute(0, 3, 1, 2), ts[1].permute(3, 2, 0, 1)
        return x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], groups

    return args


def _view(*shape: int) -> Torch:
    return Torch(aten.reshape.default, lambda ts: (ts[0], list(shape)))


def _cat(dim: int) -> Torch:
    return Torch(aten.cat.default, lambda ts: (ts, dim))


NHWC = (0, 3, 1, 2), (3, 2, 0, 1), (), (0, 3, 1, 2)  # dims of input, kernel, no bias, and result
CALLS: dict[str, Torch] = {
    "broadcast_in_dim_no_broadcast_dims": Torch(aten.expand.default, lambda ts: (ts[0], [2, 1, 13])),
    "broadcast_in_dim_input_dim_expanded": Torch(aten.expand.default, lambda ts: (ts[0], [2, 64, 13])),
    "clamp_scalar_min_max": Torch(aten.clamp.Tensor, lambda ts: (ts[1], ts[0], ts[2]), (1, 0, 2)),
    "concat_operands_dim_size_one": _cat(1),
    "concat_gcd_is_greater_than_all_operand_dims": _cat(1),
    "concat_operands_are_from_slices_of_the_same_tensor": _cat(1),
    "concat_not_all_operands_are_results_of_slices": _cat(1),
    "conv_simple": Torch(aten.convolution.default, _convolved(1), dims=NHWC),
    "conv_feature_group_count": Torch(aten.convolution.default, _convolved(16), dims=NHWC),
    "custom_call_x64_combine": Torch(aten.complex.default),
    "custom_call_move_to_device": Torch(aten._to_copy.default),
    "custom_call_move_to_host": Torch(aten._to_copy.default),
    "custom_call_qr": Torch(aten.linalg_qr.default),
    "custom_call_householder_product": Torch(
        aten.linalg_householder_product.default, lambda ts: (ts[0].mT, ts[1]), dims=((0, 2, 1), (0, 1), (0, 2, 1))
    ),
    "custom_call_topk_of_1d": Torch(aten.topk.default, lambda ts: (ts[0], 1)),
    "custom_call_top2_of_2d": Torch(aten.topk.default, lambda ts: (ts[0], 2)),
    "dot_vector_matrix": Torch(dot, lambda ts: (*ts, "j, j i -> i")),
    "dot_matrix_matrix": Torch(aten.mm.default),
    "dot_general_no_batching_dims": Torch(dot, lambda ts: (*ts, "i k, k j -> i j")),
    "dot_general_many_mixed_dims": Torch(dot, _mixed),
    "dynamic_update_slice": Torch(put_at, _updated, (0, 1, -1, -1, -1, -1)),
    "fft_inverse": Torch(aten._fft_c2c.default, lambda ts: (ts[0] * 1j, [1, 2], 0, False)),
    "fft_single_fft_dimension": Torch(aten._fft_c2c.default, lambda ts: (ts[0] * 1j, [2], 0, True)),
    "reduce_single_result": Torch(aten.sum.dim_IntList, lambda ts: (ts[0], [1])),
    "reduce_size_one_dim": Torch(aten.sum.dim_IntList, lambda ts: (ts[0], [1])),
    "reshape_split_dim": _view(2, 4),
    "reshape_swap_with_dim_before_and_in_between": _view(5, 3, 5, 2),
    "reshape_swap_and_merge": _view(3, 4, 4),
    "reshape_size_one_dims": _view(8, 1, 4, 1),
    "reverse": Torch(aten.flip.default, lambda ts: (ts[0], [1, 3])),
    "select": Torch(aten.where.self, lambda ts: (ts[0] > 0, *ts[1:])),
    "slice": Torch(aten.slice.Tensor, lambda ts: (ts[0], 2, 4, 8, 2)),
}
for transposed, name in enumerate(("left_side_no_transpose", "left_side_transpose")):
    CALLS[f"triangular_solve_{name}"] = Torch(
        aten.linalg_solve_triangular.default,
        lambda ts, transposed=transposed: (ts[0].mT if transposed else ts[0], ts[1]),
        kwargs={"upper": False},
    )
TAPS = "places of a kernel are not cut: shardc cuts those of the input, with its neighbours' edges"
APART = {
    "custom_call_eigh": "Shardy lets the dims of a matrix be cut, of which no piece has its eigenvalues",
    "broadcast_in_dim_size_zero_dim": "two ops in torch, unsqueeze and expand",
    "dynamic_update_slice_constant_indices": "two ops in torch, a slice_scatter for each dim",
    "conv_simple": TAPS,
    "conv_feature_group_count": TAPS,
}
