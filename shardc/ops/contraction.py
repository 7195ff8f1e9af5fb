"""Contractions: ``dot``, an einsum over named factors, its rings, the aten products that it replaces, and experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardc.language.rule import Bind, OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType

aten = torch.ops.aten


Names = tuple[str, ...]


def dot(a: Tensor, b: Tensor, spec: str) -> Tensor:
    """Contract two tensors: ``dot(x, w, "b t k, k n -> b t n")``.

    A factor appears at most once in a tensor. A factor of both operands that the result lacks is contracted; no factor
    may be in one operand alone. Runs one mm, or one bmm when operands and result share factors.
    """
    return BoundDot(spec, a.shape, b.shape)(a, b)


Steps = tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # a permutation and a shape, None for no change


class BoundDot:
    """``dot`` of one spec for operands of known shapes, on tensors or on their proxies in a graph.

    ``left`` and ``right``: the steps from the operands to matrices. A ``bias``, if the spec takes one, is added along
    the last dim, in the product's own kernel.
    """

    def __init__(self, spec: str, a: Sequence[int], b: Sequence[int]) -> None:
        self.plan = plan = _plan(spec)
        sizes = dict(zip(plan.a + plan.b, (*a, *b), strict=True))
        self.left, self.right = _steps(plan.a, plan.left, sizes), _steps(plan.b, plan.right, sizes)
        is_matrix = len(plan.product) == 2 + bool(plan.left[0]) and len(plan.left[0]) < 2
        self._shape = None if is_matrix else tuple(sizes[name] for name in plan.product)
        self._order = None if plan.order == tuple(range(len(plan.order))) else plan.order

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The contraction."""
        result: Tensor = self.product(stepped(a, self.left), stepped(b, self.right), bias)
        return result

    def product(self, left: Any, right: Any, bias: Any = None) -> Any:
        """The contraction, from the matrices of the operands."""
        left, right = (right.mT, left.mT) if self.plan.is_swapped else (left, right)
        product = self._multiply(left, right) if bias is None else torch.addmm(bias, left, right)
        product = product if self._shape is None else product.view(self._shape)
        return product if self._order is None else product.permute(self._order)

    def put(self, a: Tensor, b: Tensor, place: Tensor) -> None:
        """Write the contraction into ``place``, directly from its kernel if possible."""
        matrix = place_matrix(self.plan, place)
        if matrix is None:
            place.copy_(self(a, b))
            return
        left, right = stepped(a, self.left), stepped(b, self.right)
        left, right = (right.mT, left.mT) if self.plan.is_swapped else (left, right)
        self._multiply(left, right, out=matrix)

    @property
    def _multiply(self) -> Any:
        return torch.bmm if self.plan.left[0] else torch.mm


def place_matrix(plan: _Plan, place: Tensor) -> Tensor | None:
    """The view of ``place`` as the matrix, or batch of them, that a product's kernel writes; None if there is none."""
    dims = [plan.out.index(name) for name in plan.product]
    sizes = [place.shape[dim] for dim in dims]
    num_batch = len(plan.left[0])
    middle = num_batch + len(plan.right[2] if plan.is_swapped else plan.left[1])
    batch, first, second = sizes[:num_batch], sizes[num_batch:middle], sizes[middle:]
    shape = [math.prod(group) for group in ((batch,) if batch else ()) + (first, second)]
    try:
        return place.permute(dims).view(shape)
    except RuntimeError:  # dims do not merge
        return None


def names_of(spec: str) -> tuple[Names, Names, Names]:
    """The factors of the operands and of the result of a contraction."""
    plan = _plan(spec)
    return plan.a, plan.b, plan.out


def takes_bias(spec: str) -> bool:
    """Whether the columns of a contraction's product are the result's last dim."""
    plan = _plan(spec)
    is_in_order = not plan.is_swapped and plan.order == tuple(range(len(plan.out)))
    return not plan.left[0] and is_in_order and plan.right[2] == plan.out[-1:]


def stepped(x: Any, steps: Steps) -> Any:
    """The matrix of an operand."""
    order, shape = steps
    x = x if order is None else x.permute(order)
    return x if shape is None else x.reshape(shape)


def _steps(names: Names, groups: tuple[Names, Names, Names], sizes: dict[str, int]) -> Steps:
    order = tuple(names.index(name) for group in groups for name in group)
    shape = tuple(math.prod(sizes[name] for name in group) for group in groups)[0 if groups[0] else 1 :]
    is_matrix = [len(group) for group in groups] in ([1, 1, 1], [0, 1, 1])
    return None if list(order) == sorted(order) else order, None if is_matrix else shape


@dataclass(frozen=True, slots=True)
class _Plan:
    """A spec as a matrix product.

    ``left`` and ``right``: the factors of the operands' matrices, as (batch, rows, columns). ``product``: the factors
    of the product, ``order`` its permutation to ``out``. ``is_swapped``: the product is that of the transposes, so
    that it has the result's order.
    """

    a: Names
    b: Names
    out: Names
    left: tuple[Names, Names, Names]
    right: tuple[Names, Names, Names]
    product: Names
    order: tuple[int, ...]
    is_swapped: bool


@functools.lru_cache(maxsize=4096)
def _plan(spec: str) -> _Plan:
    operands, _, result = spec.partition("->")
    a, b = (tuple(side.split()) for side in operands.split(","))
    out = tuple(result.split())
    assert set(out) | (set(a) & set(b)) == set(a) | set(b), f"{spec}: a factor that one operand has alone"
    assert all(len(set(names)) == len(names) for names in (a, b, out)), f"{spec}: a factor twice in a tensor"
    batch = tuple(name for name in out if name in a and name in b)
    contracted = tuple(name for name in a if name in b and name not in out)
    rows, columns = (tuple(name for name in out if name in own and name not in batch) for own in (a, b))
    is_swapped = bool(columns and rows) and out.index(columns[0]) < out.index(rows[0])
    product = batch + (columns + rows if is_swapped else rows + columns)
    order = tuple(product.index(name) for name in out)
    return _Plan(a, b, out, (batch, rows, contracted), (batch, contracted, columns), product, order, is_swapped)


def _biased_rule(product: str, ndim: int, contracted: str = "k") -> Bind:
    """A product added to a tensor; contracted factors are whole, or every shard would add the tensor."""

    def bind(call: OpCall) -> Rule:
        bias = " ".join(product.split("->")[1].split()[ndim - len(call.operand.shape) :])
        return make_rule(f"{bias}, {product}", call, whole=contracted, linear="01 02")

    return bind


def _trilinear_rule(call: OpCall) -> Rule:
    """The product of three tensors whose missing dims are named, summed over some dims."""
    expanded, summed = call.args[3:6], call.args[6]
    names = [f"d{i}" for i in range(len(call.operand.shape) + len(expanded[0]))]
    specs = [" ".join(name for i, name in enumerate(names) if i not in missing) for missing in expanded]
    result = " ".join(name for i, name in enumerate(names) if i not in summed)
    return make_rule(f"{', '.join(specs)} -> {result}", call, linear="0 1 2")


rule(dot, lambda call: make_rule(call.args[2], call, linear="0 1"))
rule(aten.mm.default, "m k, k n -> m n", linear="0 1")
rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0 1")
rule(aten.mv.default, "m k, k -> m", linear="0 1")
rule(aten.dot.default, "k, k -> ", linear="0 1")
rule(aten.vdot.default, "k, k -> ")
rule(aten._trilinear.default, _trilinear_rule)
rule(aten.addmv.default, _biased_rule("m k, k -> m", ndim=1))
rule(aten.addbmm.default, _biased_rule("b m k, b k n -> m n", ndim=2, contracted="b k"))
rule(aten.addmm.default, _biased_rule("m k, k n -> m n", ndim=2))
rule(aten.baddbmm.default, _biased_rule("b m k, b k n -> b m n", ndim=3))


# Rings of products: one chunk is sent while another is computed. On whole values nothing is sent.


def gather_dots(
    x: Tensor, axes: tuple[str, ...], dim: int, specs: tuple[str, ...], keeps: bool, *others: Tensor
) -> tuple[Tensor, ...]:
    """``dot(x, other, spec)`` for each of ``others``, with ``x`` gathered over ``axes``, which cut its ``dim``.

    ``keeps``: the gathered ``x`` is the first result. No other operand has the factor of that dim, and all results do.
    """
    return (*([x] if keeps else ()), *map(dot, [x] * len(others), others, specs))


def dots_scatter(
    a: Tensor, axes: tuple[str, ...], dim: int, specs: tuple[str, ...], b: Tensor, *others: Tensor
) -> Tensor:
    """The sum of ``dot(a, b, spec)`` over all specs, reduced over ``axes``, which cut its ``dim``.

    ``others``: the operands of further products, in pairs. One operand of each product has the factor of that dim.
    """
    operands = [a, b, *others]
    total, *products = map(dot, operands[::2], operands[1::2], specs)
    return functools.reduce(torch.add, products, total)


DOT_RINGS = (gather_dots, dots_scatter)


def gathered_dims(dim: int, specs: Sequence[str], keeps: bool) -> tuple[int, ...]:
    """The dim of each result of ``gather_dots`` along which its chunks follow each other."""
    plans = map(_plan, specs)
    return (*([dim] if keeps else ()), *(plan.out.index(plan.a[dim]) for plan in plans))


def gathered_shapes(
    dim: int, specs: Sequence[str], keeps: bool, count: int, x: Tensor, others: Sequence[Tensor]
) -> Iterator[tuple[int, ...]]:
    """The shapes of the results of ``gather_dots``, if ``x`` is one of ``count`` chunks."""
    whole = (*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :])
    if keeps:
        yield whole
    for plan, other in zip(map(_plan, specs), others, strict=True):
        sizes = dict(zip(plan.a + plan.b, (*whole, *other.shape), strict=True))
        yield tuple(sizes[name] for name in plan.out)


def scattered_dims(dim: int, specs: Sequence[str]) -> tuple[int | None, ...]:
    """For each operand of ``dots_scatter`` the dim that is cut in chunks as ``dim`` of the sum; None if it lacks it."""
    pairs = ((names, plan.out[dim]) for plan in map(_plan, specs) for names in (plan.a, plan.b))
    return tuple(names.index(factor) if factor in names else None for names, factor in pairs)


def dots_flops(target: Any, args: tuple[Any, ...], results: Sequence[Any]) -> int:
    """FLOPs of a ring of products on one rank, from its arguments and results with shapes in place of tensors."""
    specs: tuple[str, ...] = args[3]
    plans = list(map(_plan, specs))
    if target is gather_dots:
        triples = zip(plans, args[5:], results[-len(specs) :], strict=True)
        sizes = [dict(zip(plan.b + plan.out, (*b, *out), strict=True)) for plan, b, out in triples]
    else:
        operands = [args[0], *args[4:]]
        triples = zip(plans, operands[::2], operands[1::2], strict=True)
        sizes = [dict(zip(plan.a + plan.b, (*a, *b), strict=True)) for plan, a, b in triples]
    return sum(2 * math.prod(each.values()) for each in sizes)


@dataclass(frozen=True, slots=True)
class _ChunkDot:
    """One chunk of a product in a ring: its operands, on meta, and ``made``, the bytes of its result.

    ``is_in_place``: its kernel writes the result into its place.
    """

    plan: _Plan
    a: Tensor
    b: Tensor
    made: int
    is_in_place: bool = False

    @property
    def flops(self) -> int:
        """The FLOPs of the product."""
        return 2 * math.prod(self._sizes.values())

    @property
    def nbytes(self) -> int:
        """The bytes that the product reads and writes."""
        return self.a.nbytes + self.b.nbytes + self.made

    @property
    def copied(self) -> int:
        """The bytes of the operands' matrices that are copies, not views."""
        plan, sizes = self.plan, self._sizes
        sides = (self.a, plan.a, plan.left), (self.b, plan.b, plan.right)
        matrices = [(x, stepped(x, _steps(names, groups, sizes))) for x, names, groups in sides]
        return sum(y.nbytes for x, y in matrices if x.untyped_storage()._cdata != y.untyped_storage()._cdata)

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.plan.a + self.plan.b, (*self.a.shape, *self.b.shape), strict=True))


def _chunk_dots(
    target: Any, args: tuple[Any, ...], count: int, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> list[_ChunkDot]:
    dim, specs = args[2:4]
    if target is gather_dots:
        x, *others = (_piece(each) for each in operands)
        dims, made = gathered_dims(dim, specs, keeps=False), results[-len(specs) :]
        places = [_piece(each, at, count) for each, at in zip(made, dims, strict=True)]
        products = zip(map(_plan, specs), others, places, strict=True)
        return [
            _ChunkDot(plan, x, other, place.nbytes, place_matrix(plan, place) is not None)
            for plan, other, place in products
        ]
    pieces = [_piece(x, at, count) for x, at in zip(operands, scattered_dims(dim, specs), strict=True)]
    pairs = zip(specs, pieces[::2], pieces[1::2], strict=True)
    return [_ChunkDot(_plan(spec), a, b, results[0].nbytes) for spec, a, b in pairs]


def _piece(x: TensorType, dim: int | None = None, count: int = 1) -> Tensor:
    whole = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return whole if dim is None else whole.narrow(dim, 0, x.shape[dim] // count)


def chunk_calls(
    target: Any, args: tuple[Any, ...], count: int, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> Iterator[tuple[int, int]]:
    """The FLOPs of each call for one chunk of a ring, and the bytes that it reads and writes.

    The result of a gathered chunk may be copied to its place; parts of a sum are added.
    """
    for each in _chunk_dots(target, args, count, operands, results):
        yield each.flops, each.nbytes
        if not each.is_in_place:
            yield 0, 2 * each.made if target is gather_dots else 3 * each.made
    if target is gather_dots and len(results) > len(args[3]):
        yield 0, 2 * operands[0].nbytes


def dots_workspace(
    target: Any, args: tuple[Any, ...], count: int, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> int:
    """Bytes that a rank holds while a ring of products runs, besides its operands and results.

    A gather holds the chunk that it multiplies and the next one, which is on its way, and one chunk of a product, if
    that is copied to its place. A sum holds the chunk that is sent, the one that arrives, and a further product. Both
    hold the copies of operands that a product makes.
    """
    dots = _chunk_dots(target, args, count, operands, results)
    if target is gather_dots:
        return min(2, count - 1) * operands[0].nbytes + max(
            each.copied + each.made * (not each.is_in_place) for each in dots
        )
    chunk, order = results[0].nbytes, dots[-1].plan.order
    most = max(chunk * bool(i) + each.copied for i, each in enumerate(dots))
    is_permuted = order != tuple(range(len(order)))
    return 2 * chunk + max(most, chunk * is_permuted)


def _gather_rule(call: OpCall) -> Rule:
    """Dims of the gathered value have the same names in all products. With several results all other factors are whole.

    The gathered dim has another size on a rank.
    """
    _, _, dim, specs, keeps, *_ = call.args
    gathered = " ".join(f"x{i}" for i in range(len(call.operand.shape)))
    plans = list(enumerate(map(_plan, specs)))
    known = {i: {name: f"x{j}" for j, name in enumerate(plan.a)} for i, plan in plans}
    sides = [[gathered, *(_renamed(plan.b, known[i], i) for i, plan in plans)]]
    sides.append([*([gathered] if keeps else ()), *(_renamed(plan.out, known[i], i) for i, plan in plans)])
    own = {name for spec in sides[0][1:] for name in spec.split()} - set(gathered.split())
    return make_rule(_spec_of(sides), call, whole=" ".join(own if len(sides[1]) > 1 else ()), chunks={f"x{dim}": 1})


def _scatter_rule(call: OpCall) -> Rule:
    """Dims of the sum have the same names in all products. With several products contracted factors are whole.

    The scattered dim has another size on a rank.
    """
    _, _, dim, specs, *_ = call.args
    plans = list(enumerate(map(_plan, specs)))
    known = {i: {name: f"y{j}" for j, name in enumerate(plan.out)} for i, plan in plans}
    operands = [_renamed(names, known[i], i) for i, plan in plans for names in (plan.a, plan.b)]
    result = _renamed(plans[0][1].out, known[0], 0)
    own = {name for spec in operands for name in spec.split()} - set(result.split())
    whole = " ".join(own if len(plans) > 1 else ())
    return make_rule(_spec_of([operands, [result]]), call, whole=whole, chunks={f"y{dim}": 1})


def _renamed(names: Names, known: dict[str, str], index: int) -> str:
    return " ".join(known.get(name, f"{name}{index}") for name in names)


def _spec_of(sides: Sequence[Sequence[str]]) -> str:
    return " -> ".join(map(", ".join, sides))


rule(gather_dots, _gather_rule)
rule(dots_scatter, _scatter_rule)


# Products of experts: each row is multiplied by the weight of its own expert.


@torch.library.custom_op("shardc::expert_product", mutates_args=())
def expert_product(x: Tensor, weight: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """``x[i] @ weight[j]`` for each row ``i``, where ``experts[j] == expert[i]``; 0 if there is no such ``j``.

    ``x``: [rows, k]. ``weight``: [experts here, k, n]. ``expert``: the number of each row's expert. ``experts``: the
    numbers of the experts here. ``num_experts``: the count of experts on all ranks.
    """
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for j, rows in _rows_of(expert, experts):
        result[rows] += x[rows] @ weight[j]  # padding among the experts repeats one of them, and adds zeros
    return result


@torch.library.custom_op("shardc::expert_sum", mutates_args=())
def expert_sum(x: Tensor, y: Tensor, expert: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """The sum of ``outer(x[i], y[i])`` over the rows of each expert here: the gradient of ``expert_product``'s weight.

    ``x``: [rows, k]. ``y``: [rows, n]. The result is [experts here, k, n].
    """
    result = x.new_zeros(experts.shape[0], x.shape[1], y.shape[1])
    for j, rows in _rows_of(expert, experts):
        result[j] = x[rows].T @ y[rows]
    return result


def _rows_of(expert: Tensor, experts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The index of each expert here that has rows, and the numbers of these rows."""
    order = expert.argsort(stable=True)
    bounds = torch.stack([torch.searchsorted(expert[order], experts, right=right) for right in (False, True)]).tolist()
    for j, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start < end:
            yield j, order[start:end]


expert_product.register_fake(lambda x, weight, *others: x.new_empty(x.shape[0], weight.shape[2]))
expert_sum.register_fake(lambda x, y, expert, experts, *others: x.new_empty(experts.shape[0], x.shape[1], y.shape[1]))


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``aten._grouped_mm`` with the group of each row; ``offs``: the end of each group in the ragged dim.

    The ragged dim is the rows for [m, k] and [groups, k, n], the columns for [groups, m, k] and [k, n], and the
    contracted dim for two matrices. Results beyond the last group are 0.
    """
    assert bias is None and (offs is not None or a.ndim == b.ndim == 3), (a.shape, b.shape)
    if offs is None:
        result = a @ b
    elif a.ndim == 2 and b.ndim == 3:
        result = expert_product(a, b, *_groups(offs, a.shape[0]))
    elif a.ndim == 3:
        result = expert_product(b.T, a.transpose(1, 2), *_groups(offs, b.shape[1])).T
    else:
        result = expert_sum(a.T, b, *_groups(offs, b.shape[0]))
    return result if out_dtype is None else result.to(out_dtype)


def _groups(offs: Tensor, num_rows: int) -> tuple[Tensor, Tensor, int]:
    """The group of each row, the numbers of the groups, and the count of groups."""
    rows = torch.arange(num_rows, dtype=offs.dtype, device=offs.device)
    return torch.searchsorted(offs, rows, right=True), torch.arange(offs.shape[0], device=offs.device), offs.shape[0]


def _flops(x: Any, y: Any, expert: Any, experts: Any, num_experts: int, **result: Any) -> int:
    """A multiply and an add for each term of a row's product, for the average share of rows whose expert is here."""
    return 2 * x[0] * x[1] * y[-1] * experts[0] // num_experts


register_flop_formula([torch.ops.shardc.expert_product, torch.ops.shardc.expert_sum])(_flops)
rule(torch.ops.shardc.expert_product.default, "s k, e k n, s, e -> s n", linear="0 1")
rule(torch.ops.shardc.expert_sum.default, "s k, s n, s, e -> e k n", linear="0 1")
