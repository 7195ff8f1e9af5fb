"""The rule of an op: the factors that dims of operands and results share, and the cuts that each factor allows.

A rule reads like an einsum over *factors*: ``"m k, k n -> m n"``. A factor in operands only is *reduced*: cutting it
leaves a partial result. A factor named in ``whole`` must not be cut. Every other factor is *free*: it may be cut on
every tensor that has it, with no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from shardc.language.sharding import DimSharding, ReduceOp, TensorType, num_shards

Dims = tuple[tuple[str, ...], ...]  # for each dim of a tensor, its factors, major first
Side = tuple[Dims | None, ...]  # the dims of each operand, or of each result
Groups = tuple[frozenset[int], ...]  # sets of operands


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: its arguments, with a TensorType for every tensor, its operands and its results.

    ``operands`` follow the op's schema: one entry for each tensor argument (a list argument adds one for each
    element), None where an optional tensor is absent. ``results`` likewise.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorType | None, ...]
    results: tuple[TensorType | None, ...]

    @property
    def operand(self) -> TensorType:
        """The first operand."""
        assert self.operands[0] is not None
        return self.operands[0]

    @property
    def result(self) -> TensorType:
        """The first result."""
        assert self.results[0] is not None
        return self.results[0]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule bound to one call: factors for every dim, and the size of every factor.

    A dim without factors is never cut. The rule does not constrain a tensor whose dims are None; such a result is
    equal on all ranks. ``whole``: factors that must not be cut. ``reduce``: how a reduced factor's partial results
    combine. ``linear``: groups of operands; a partial sum may pass through the op when it is open on all operands of
    one group and on none outside it. ``is_fallback``: the op has no rule of its own, so all operands are gathered.
    ``chunks``: the number of chunks of each factor whose dim has another size on each tensor. Such a factor is cut in
    exactly that many chunks, as ``torch.chunk`` cuts each dim, or not at all. It is 1 if the op cannot run on chunks
    until it is decomposed. ``is_even``: the op raises errors for some values, and padding may have any value, so
    factors are cut evenly or not at all. ``sees_padding``: added zeros change a sum, so factors that leave a result
    partial are cut evenly. ``contiguous``: factors whose shards must each be one run of positions, so that they are not
    cut in blocks. ``known``: a cache of facts about the op on tensors that are cut in some way. Equal calls share one
    rule, in every layer and whenever a model is compiled again.
    """

    operands: Side
    results: Side
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduce: ReduceOp = "sum"
    linear: Groups = ()
    is_fallback: bool = False
    chunks: Mapping[str, int] = field(default_factory=dict)
    is_even: bool = False
    sees_padding: bool = False
    contiguous: frozenset[str] = frozenset()
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        return tuple(self.sizes)

    def has(self, factor: str, dims: Dims | None) -> bool:
        """Whether a tensor has the factor."""
        return dims is not None and any(factor in dim for dim in dims)

    def may_cut(self, factor: str, cut: DimSharding) -> bool:
        """Whether the op runs on tensors with this cut of the factor.

        A factor of one element is not cut. If any factor has size 0 and any dim has several factors, none is cut: such
        a cut has no form.
        """
        if factor in self.chunks:
            return cut == DimSharding(cut.axes) and num_shards(cut.axes) in (1, self.chunks[factor])
        needs_even = self.is_even or (self.sees_padding and self.leaves_partial(factor))
        if needs_even and not cut.is_even(self.sizes[factor]):
            return False
        if factor in self.whole or self.sizes[factor] == 1 or (factor in self.contiguous and cut.minor):
            return False
        tensors = self.operands + self.results if 0 in self.sizes.values() else ()
        return not any(len(dim) > 1 for tensor in tensors if tensor for dim in tensor)

    def may_pass(self, factor: str, cut: DimSharding) -> bool:
        """Whether the op runs on tensors with this cut of the factor, or may once it is decomposed."""
        return (self.chunks.get(factor) == 1 and not cut.minor) or self.may_cut(factor, cut)

    def is_reduced(self, factor: str) -> bool:
        """Whether no result has the factor, so that cutting it leaves every result partial."""
        return factor not in self.whole and not any(self.has(factor, dims) for dims in self.results)

    def leaves_partial(self, factor: str) -> bool:
        """Whether cutting the factor leaves any result partial."""
        return any(self.is_partial(factor, result) for result in range(len(self.results)))

    def is_partial(self, factor: str, result: int) -> bool:
        """Whether cutting the factor leaves this result partial: operands have it and the result has not.

        In ``layer_norm_backward`` over ``b d``, the input's gradient has ``b``, and the weight's is partial over it.
        """
        dims = self.results[result]
        if factor in self.whole or dims is None or self.has(factor, dims):
            return False
        return any(self.has(factor, operand) for operand in self.operands)


Bind = Callable[[OpCall], Rule]
Local = Callable[[OpCall, OpCall], dict[int, Any]]  # from a call and one rank's call to the arguments that differ


@dataclass(frozen=True, slots=True)
class OpRule:
    """The table's entry of an op: ``bind`` makes the rule of a call, and ``local`` makes its arguments local.

    ``local(call, shard)`` takes the call with global types and the call with one rank's types. It returns the arguments
    that differ on a rank, by position: a size, a start or a count. A position may be one past the last argument.
    ``is_users``: a user has registered it.
    """

    bind: Bind
    local: Local | None = None
    is_users: bool = False


RULES: dict[Any, OpRule] = {}


def rule(
    op: Any,
    spec: str | Bind,
    *,
    linear: str = "",
    whole: str = "",
    reduce: ReduceOp = "sum",
    sizes: int | None = None,
    local: Local | None = None,
    is_even: bool = False,
) -> None:
    """Enter the rule of an op, or of each op of a tuple, in the table.

    ``spec`` is the einsum over factors, or a function of the call. In a spec ``(b t)`` is a dim of two factors, ``1``
    a dim that is never cut, ``...`` the leading dims, ``_`` a tensor without a constraint. A dim of size 1 does not
    have a factor that is larger elsewhere (it is broadcast). ``linear="0 1"`` lists groups of operands, ``"01"`` one
    group of two. ``whole="k"`` names factors that must not be cut. ``sizes=1``: ``args[1]`` is the shape of the first
    result, which becomes local. ``is_even``: see ``Rule``.
    """

    def bind(call: OpCall) -> Rule:
        if callable(spec):
            bound = spec(call)
        else:
            bound = make_rule(spec, call, linear=linear, whole=whole, reduce=reduce)
        return replace(bound, is_even=True) if is_even else bound

    for each in op if isinstance(op, tuple) else (op,):
        assert each not in RULES, f"{each} has two rules"
        RULES[each] = OpRule(bind, local_sizes(sizes) if sizes is not None else local)


def local_sizes(arg: int) -> Local:
    """The ``local`` of an op whose argument at a position is the shape of its first result."""
    return lambda call, shard: {arg: list(shard.result.shape)}


def make_rule(
    spec: str,
    call: OpCall,
    *,
    linear: str | Groups = "",
    whole: str = "",
    reduce: ReduceOp = "sum",
    sizes: Mapping[str, int] | None = None,
    chunks: Mapping[str, int] | None = None,
    sees_padding: bool = False,
    contiguous: str = "",
) -> Rule:
    """Bind a spec to a call. ``sizes`` gives the sizes of factors that dims of several factors leave open.

    A group of ``linear`` that names an absent operand (a number in its place) is dropped: ``x + 2`` is not linear.
    """
    operands, results, factor_sizes = bind_spec(spec, call.operands, call.results, sizes or {}, chunks or {})
    return Rule(
        operands, results, factor_sizes, frozenset(whole.split()), reduce, _present_groups(linear, call),
        chunks=chunks or {}, sees_padding=sees_padding, contiguous=frozenset(contiguous.split()),
    )  # fmt: skip


def pointwise_rule(call: OpCall, linear: str | Groups = "") -> Rule:
    """Dims are shared from the right, with broadcasting: an operand's dim is shared if it has the result's size.

    A linear group whose operands are all smaller than the result is dropped: it would enlarge the value to be reduced.
    """
    shape = call.result.shape
    names = [f"d{i}" for i in range(len(shape))]

    def dims(tensor: TensorType | None) -> Dims | None:
        if tensor is None:
            return None
        lead = len(shape) - len(tensor.shape)
        return tuple((names[lead + i],) if size == shape[lead + i] else () for i, size in enumerate(tensor.shape))

    operands, results = tuple(map(dims, call.operands)), tuple(map(dims, call.results))
    large = {i for i, each in enumerate(call.operands) if each is not None and each.has_shape_of(call.result)}
    groups = tuple(group for group in _present_groups(linear, call) if group & large)
    return Rule(operands, results, dict(zip(names, shape, strict=True)), linear=groups)


def replicated_rule(call: OpCall) -> Rule:
    """The fallback: every operand whole, every result whole."""
    sizes: dict[str, int] = {}

    def dims(tensor: TensorType | None) -> Dims | None:
        if tensor is None:
            return None
        names = [f"w{len(sizes) + i}" for i in range(len(tensor.shape))]
        sizes.update(zip(names, tensor.shape, strict=True))
        return tuple((name,) for name in names)

    operands, results = tuple(map(dims, call.operands)), tuple(map(dims, call.results))
    has_more = any(size > 1 for size in sizes.values())  # else nothing could be cut
    return Rule(operands, results, sizes, frozenset(sizes), is_fallback=has_more)


def _present_groups(linear: str | Groups, call: OpCall) -> Groups:
    """The groups of operands that are all present."""
    groups = linear if isinstance(linear, tuple) else parse_groups(linear)
    return tuple(group for group in groups if all(call.operands[i] is not None for i in group))


@lru_cache(maxsize=1024)
def parse_groups(linear: str) -> Groups:
    """``"0 12"`` as groups of operands."""
    return tuple(frozenset(int(digit) for digit in group) for group in linear.split())


# The text form.


def bind_spec(
    text: str,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType | None],
    known: Mapping[str, int],
    chunks: Container[str] = (),
) -> tuple[Side, Side, dict[str, int]]:
    """The factors of every operand and result, and the size of every factor; ``known`` has sizes that dims leave open.

    A dim whose only factor is one of the ``chunks`` may have any size.

    >>> bind_spec("b k, k n -> b n", (f32[8, 4], f32[4, 6]), (f32[8, 6],), {})
    (((b,), (k,)), ((k,), (n,))), (((b,), (n,)),), {b: 8, k: 4, n: 6}
    """
    left, _, right = text.partition("->")
    tensors = (*operands, *results)
    sides = (*_parse_side(left, operands), *_parse_side(right, results))
    sizes = _factor_sizes(sides, tensors, known)

    def bind_dim(factors: tuple[str, ...], size: int) -> tuple[str, ...]:
        product = math.prod(sizes[factor] for factor in factors)
        if not factors or (len(factors) == 1 and factors[0] in chunks):
            return factors
        assert product == size or size == 1, (factors, size, sizes)
        return factors if product == size else ()

    bound = tuple(
        None if dims is None or tensor is None else tuple(map(bind_dim, dims, tensor.shape))
        for dims, tensor in zip(sides, tensors, strict=True)
    )
    return bound[: len(operands)], bound[len(operands) :], sizes


def _parse_side(text: str, tensors: Sequence[TensorType | None]) -> Side:
    specs = [spec.strip() for spec in text.split(",")]
    assert len(specs) >= len(tensors), (text, tensors)
    return tuple(
        None if tensor is None or spec == "_" else _expand_leading(parse_dims(spec), len(tensor.shape))
        for spec, tensor in zip(specs, tensors, strict=False)
    )


@lru_cache(maxsize=4096)
def parse_dims(spec: str) -> Dims:
    """The factors of each dim of one tensor: ``(b t) 1 d`` is ``((b, t), (), (d,))``."""
    dims: list[tuple[str, ...]] = []
    while spec:
        outside, _, rest = spec.partition("(")
        dims += [() if name == "1" else (name,) for name in outside.split()]
        inside, closing, spec = rest.partition(")")
        dims += [tuple(inside.split())] if closing else []
    return tuple(dims)


def _expand_leading(dims: Dims, ndim: int) -> Dims:
    """Replace ``...`` by named leading dims, counted from the right so that all tensors of a call agree.

    A tensor with fewer dims than the other names is whole: some ops return an empty tensor for an unrequested result.
    """
    if ("...",) not in dims:
        return dims
    i = dims.index(("...",))
    count = ndim - (len(dims) - 1)
    if count < 0:
        return ((),) * ndim
    return (*dims[:i], *((f"...{count - k}",) for k in range(count)), *dims[i + 1 :])


def _factor_sizes(sides: Side, tensors: Sequence[TensorType | None], known: Mapping[str, int]) -> dict[str, int]:
    """Sizes of factors with a dim to themselves, then of the one unknown factor of each dim of several factors."""
    pairs = [
        (factors, size)
        for dims, tensor in zip(sides, tensors, strict=True)
        if dims is not None and tensor is not None
        for factors, size in zip(dims, tensor.shape, strict=True)
    ]
    sizes: dict[str, int] = {}
    for (factor,), size in [pair for pair in pairs if len(pair[0]) == 1]:
        sizes[factor] = size if sizes.get(factor, 1) == 1 else sizes[factor]
    sizes.update(known)
    for factors, size in pairs:
        for factor in [factor for factor in factors if factor not in sizes][:1]:
            sizes[factor] = size // math.prod(sizes[other] for other in factors if other != factor)
    return sizes
