"""Sharding rules of users' own ops: their registration, and a check that an op on pieces equals the op on the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.rule import (
    RULES,
    Dims,
    Local,
    OpCall,
    OpRule,
    Rule,
    local_sizes,
    make_rule,
    parse_dims,
    parse_groups,
    replicated_rule,
)
from shardc.language.sharding import ReduceOp, TensorType
from shardc.ops import op_rule
from shardc.ops.piece import neutral
from shardc.program.node import operands
from shardc.program.program import Program

Spec = str | Callable[[OpCall], str | None]
_GRAMMAR = "write an entry for each tensor, as in 'b k, k n -> b n'; _ for a tensor that is not looked at"


def has_user_rules() -> bool:
    """Whether the table has rules that are not shardc's own."""
    return any(rule.is_users for rule in RULES.values())


def register_rule(
    op: Any, spec: Spec, *, linear: str = "", whole: str = "", reduce: ReduceOp = "sum", sizes: int | None = None,
    local: Local | None = None, uneven: bool = False, override: bool = False,
) -> None:  # fmt: skip
    """Register which dims an op's tensors share, so that it stays sharded instead of running whole on every rank.

    ``spec`` names a *factor* for each dim, as an einsum does, for every tensor argument in the order of the schema and
    for every result::

        shardc.register_rule(torch.ops.mine.rms_norm.default, "... d, d -> ... d", whole="d")
        shardc.register_rule(torch.ops.mine.matmul.default, "m k, k n -> m n", linear="0 1")

    A factor in results and operands may be cut without communication. A factor in operands alone may be cut too, and
    leaves a partial result. ``(b t)`` is one dim of two factors, ``1`` a dim that is never cut, ``...`` all leading
    dims, ``_`` a tensor that the rule ignores and that is whole on every rank. A dim of size 1 is broadcast if others
    of its factor have more. Check a rule with ``shardc.check_rule(op, *args)``. Register on every rank, before the
    model is compiled.

    A reduced factor is cut only if the cut is even, since the op would count the padding of an uneven cut. Padding is 0
    (-inf for ``max``, inf for ``min``).

    Args:
        op: an overload of an op.
        spec: the text of the rule. If the rule depends on the call, a function of it (``call.args``, ``call.operands``,
            ``call.results``, tensors as types) that returns the text, or None for a call that has to run whole.
        linear: operands in which the op is linear, so that a partial sum may pass: ``"0 1"`` in operand 0 and in
            operand 1, ``"01"`` in both together.
        whole: factors that must not be cut, ``"d"``: they are gathered first.
        reduce: ``sum``, ``max`` or ``min``, which combines a partial result.
        sizes: for an op that takes sizes, which must be those of one rank: ``sizes=1`` says that ``args[1]`` is the
            shape of the first result.
        local: ``local(call, shard)`` returns the arguments that differ on one rank, by position, given the call in
            global and in local types.
        uneven: the padding of an uneven cut leaves the result as it is. Not needed if the op is linear in operands that
            have the factor.
        override: replace a rule of shardc's own.

    Raises:
        ShardingError: if the spec does not fit the op's schema; when a model is compiled, if it does not fit a call.
    """
    op = overload_of(op)
    who = f"register_rule({op})"
    if op_rule(op) is not None and not override:
        remedy = "say override=True to put yours in its place"
        raise ShardingError(who, "it has a rule", "a second one would hide it", remedy)
    for name, value in (("linear", linear), ("whole", whole)):
        if not isinstance(value, str):
            what, problem = f"{name}={value!r}", "it is text, words with blanks between them"
            raise ShardingError(who, what, problem, f"say {name}={'0 1' if name == 'linear' else 'd'!r}")
    if not isinstance(spec, str) and not callable(spec):
        raise ShardingError(who, f"spec={spec!r}", "it is no text, and no function of the call", _GRAMMAR)
    has_local = sizes is not None or local is not None
    if isinstance(spec, str):
        _check_spec(who, op, spec, linear, whole, has_local)
    if reduce not in ("sum", "max", "min"):
        raise ShardingError(who, f"reduce={reduce!r}", "there is no such reduction", "say sum, max or min")

    def bind(call: OpCall) -> Rule:
        text = _text_for(who, spec, call) if callable(spec) else spec
        if text is None:
            return replicated_rule(call)
        if callable(spec):
            _check_spec(who, op, text, linear, whole, has_local)
        _check_call(who, text, call)
        bound = make_rule(text, call, linear=linear, whole=whole, reduce=reduce)
        reduced = [name for name in bound.sizes if bound.leaves_partial(name)]
        is_linear = reduce == "sum" and all(  # in operands with the factor, so that zeros leave each sum as it is
            any(all(bound.has(name, bound.operands[i]) for i in group) for group in bound.linear) for name in reduced
        )
        return replace(bound, sees_padding=not uneven and not is_linear)

    RULES[op] = OpRule(bind, local_sizes(sizes) if sizes is not None else local, is_users=True)


def _text_for(who: str, spec: Callable[[OpCall], str | None], call: OpCall) -> str | None:
    """The rule that a user's function returns for a call; a ShardingError if the function raises."""
    try:
        return spec(call)
    except ShardingError:
        raise
    except Exception as error:
        shapes = ", ".join("none" if each is None else str(list(each.shape)) for each in call.operands)
        problem, remedy = f"it raised {type(error).__name__}: {error}", "let it return the text of a rule, or None"
        raise ShardingError(who, f"spec of operands {shapes}", problem, remedy) from error


def overload_of(op: Any) -> torch._ops.OpOverload:
    """The overload of a ``torch.library.custom_op`` or of a packet with one overload, or the overload itself."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, torch._ops.OpOverloadPacket) and len(overload.overloads()) == 1:
        overload = getattr(overload, overload.overloads()[0])
    if not isinstance(overload, torch._ops.OpOverload):
        named = [f"{overload}.{name}" for name in overload.overloads()] if hasattr(overload, "overloads") else []
        problem = "a rule is for one overload of an op of torch.library"
        remedy = f"name one of {', '.join(named)}" if named else "write torch.ops.NAMESPACE.NAME.default"
        raise ShardingError(f"op {op}", f"of type {type(op).__name__}", problem, remedy)
    return overload


def _check_spec(who: str, op: Any, spec: str, linear: str, whole: str, has_local: bool) -> None:
    """Check a spec before any call: its entries against the schema, its factors against each other."""

    def refuse(problem: str, remedy: str) -> None:
        raise ShardingError(who, f"spec {spec!r} for {op._schema}", problem, remedy)

    if op._schema.is_mutable:
        refuse("the op changes its operands", "make it return what it computes")
    left, arrow, right = spec.partition("->")
    if not arrow or "->" in right or any(side.count("(") != side.count(")") for side in (left, right)):
        refuse("it does not read like operands -> results", _GRAMMAR)
    for side, entries, declared in (
        ("operand", left.split(","), [argument.type for argument in op._schema.arguments]),
        ("result", right.split(","), [result.type for result in op._schema.returns]),
    ):
        tensors = [str(type_) for type_ in declared if "Tensor" in str(type_)]
        is_list = any("List" in type_ for type_ in tensors)
        if len(entries) != len(tensors) and not (is_list and len(entries) >= len(tensors) - 1):
            refuse(f"{_count(len(entries), side)} for {_count(len(tensors), 'tensor')} of the schema", _GRAMMAR)
    dims = [[dim for entry in side.split(",") if entry.strip() != "_" for dim in parse_dims(entry.strip())]
            for side in (left, right)]  # fmt: skip
    factors = [{name for dim in side for name in dim} - {"1"} for side in dims]
    if not has_local and (alone := factors[1] - factors[0]):
        refuse(
            f"factor {min(alone)!r} stands in results alone, so that the op must be told one rank's size of it",
            "give local= or sizes=, or write 1 for a dim that is never cut",
        )
    for name in whole.split():
        if name not in factors[0] | factors[1]:
            remedy = did_you_mean(name, factors[0] | factors[1]) or "name factors of the spec"
            refuse(f"whole={whole!r} names {name!r}, which is no factor of it", remedy)
    if not linear.replace(" ", "").isdigit() and linear:
        refuse(f"linear={linear!r} does not list operands", "write '0 1' for two groups, '01' for one group of two")
    outside = [i for group in parse_groups(linear) for i in group if i >= len(left.split(","))]
    if outside:
        refuse(f"linear={linear!r} names operand {outside[0]}", f"there are operands 0 to {len(left.split(',')) - 1}")


def _check_call(who: str, spec: str, call: OpCall) -> None:
    """Check a spec against a call: an entry for each tensor, a factor for each dim, and one size for each factor."""
    left, _, right = spec.partition("->")
    sizes: dict[str, int] = {}
    for side, text, tensors in (("operand", left, call.operands), ("result", right, call.results)):
        entries = text.split(",")
        if len(entries) < len(tensors):
            problem = f"{_count(len(entries), side)} for {_count(len(tensors), 'tensor')}"
            raise ShardingError(who, f"spec {spec!r}", problem, _GRAMMAR)
        for i, (entry, tensor) in enumerate(zip(entries, tensors, strict=False)):
            if tensor is None or entry.strip() == "_":
                continue
            for factor, size in _pairs(f"{who}, {side} {i}", entry.strip(), tensor):
                known = sizes.setdefault(factor, size)
                if 1 in (known, size):
                    sizes[factor] = max(known, size)
                elif known != size:
                    what, remedy = f"{tensor} as {entry.strip()!r}", "give the two dims different names"
                    problem = f"factor {factor!r} is {size} here and {known} in another tensor"
                    raise ShardingError(f"{who}, {side} {i}", what, problem, remedy)


def _pairs(who: str, entry: str, tensor: TensorType) -> Iterator[tuple[str, int]]:
    """The factors that are alone in a dim, each with the size of the dim."""
    dims = parse_dims(entry)
    has_dots = ("...",) in dims
    if len(dims) - has_dots > len(tensor.shape) or (not has_dots and len(dims) != len(tensor.shape)):
        problem = f"{_count(len(dims) - has_dots, 'entry')} for {_count(len(tensor.shape), 'dim')}"
        remedy = "name each dim; '...' stands for any number of leading dims"
        raise ShardingError(who, f"{tensor} as {entry!r}", problem, remedy)
    sizes = tensor.shape[len(tensor.shape) - len(dims) + 1 :] if has_dots and dims[0] == ("...",) else tensor.shape
    named = dims[1:] if has_dots and dims[0] == ("...",) else () if has_dots else dims
    yield from ((dim[0], size) for dim, size in zip(named, sizes, strict=True) if len(dim) == 1)


def _count(number: int, what: str) -> str:
    plural = what.replace("entry", "entrie") + "s"
    return f"{number} {what if number == 1 else plural}"


# Checking a rule on example arguments.

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2}
_REDUCE: Mapping[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def check_rule(op: Any, *args: Any, **kwargs: Any) -> None:
    """Check an op's rule on example arguments: ``check_rule(torch.ops.mine.norm.default, x, weight)``.

    Each factor that may be cut is cut in 2 and in 3 pieces where that divides it, and every two factors at once; the op
    runs on every piece, the results are put together as the rule says, and compared with the op on the whole. Operands
    named in ``linear`` are split in two terms. Choose sizes that 2 and 3 divide, and float64.

    Args:
        op: an overload of an op.
        *args: the arguments of a call, by position.
        **kwargs: the arguments of a call, by name.

    Raises:
        ShardingError: if the rule is wrong, with the factor that shows it, or if it has no factor to cut.

    Examples:
        >>> import torch, shardc
        >>> shardc.check_rule(torch.ops.aten.mm.default, torch.ones(6, 12).double(), torch.ones(12, 6).double())
    """
    case = case_of(overload_of(op), args, kwargs)
    remedy = "name the factor in whole=, or give it another place in the spec"
    if not any(case.rule.sizes[factor] % count == 0 for factor in cuttable(case.rule) for count in (2, 3)):
        sizes = ", ".join(f"{factor}={size}" for factor, size in case.rule.sizes.items()) or "none"
        problem = "its rule lets nothing be cut" if not cuttable(case.rule) else "no size divides by 2 or by 3"
        raise ShardingError(f"check_rule({op})", f"factors {sizes}", problem, "give sizes of 6 or 12")
    try:
        check(case)
    except WrongRule as error:
        raise ShardingError(f"check_rule({op})", error.what, str(error.__cause__), remedy) from error


class WrongRule(AssertionError):
    """A rule that does not hold; ``what`` names the cut or split that shows it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def check(case: Case) -> None:
    """Check every factor in 2 and in 3 pieces, every two at once, every linear group; raises a WrongRule."""
    rule, factors = case.rule, cuttable(case.rule)
    checks: list[tuple[str, Callable[[], None]]] = []
    cuts = [{factor: count} for factor in factors for count in (2, 3)]
    cuts += [{one: 2, other: 3} for one, other in itertools.combinations(factors, 2)]
    for pieces in cuts:
        if all(rule.sizes[factor] % count == 0 for factor, count in pieces.items()):
            what = " and ".join(f"{factor} in {count} pieces" for factor, count in pieces.items())
            checks.append((what, partial(_check_cuts, case, pieces)))
    dims = [dim for tensor in (*rule.operands, *rule.results) if tensor is not None for dim in tensor]
    for factor in factors:
        is_alone = all(len(dim) == 1 for dim in dims if factor in dim)
        if is_alone and not rule.sees_padding and not rule.is_even and rule.leaves_partial(factor):
            checks.append((f"{factor} with padding", partial(_check_padding, case, factor)))
    for group in rule.linear:
        if all(_is_number(case.tensors[i]) for i in group):  # masks are never partial sums
            checks.append((f"operands {sorted(group)} as sums of two terms", partial(_check_linear, case, group)))
    for what, run in checks:
        try:
            run()
        except (AssertionError, RuntimeError) as error:
            raise WrongRule(what) from error


def cuttable(rule: Rule) -> list[str]:
    """The factors that may be cut."""
    return [f for f, size in rule.sizes.items() if f not in rule.whole and f not in rule.chunks and size > 1]


def _check_cuts(case: Case, pieces: Mapping[str, int]) -> None:
    """Cut each factor into its number of pieces, run every piece, put the results together, and compare."""
    sizes = {factor: size // pieces.get(factor, 1) for factor, size in case.rule.sizes.items()}
    arguments = _local_arguments(case, sizes)
    results_at: dict[Any, list[Tensor | None]] = {}
    for index in itertools.product(*map(range, pieces.values())):
        tensors, whole_sizes = list(case.tensors), dict(case.rule.sizes)
        for (factor, count), i in zip(pieces.items(), index, strict=True):
            for t, (tensor, dims) in enumerate(zip(tensors, case.rule.operands, strict=True)):
                if tensor is not None and dims is not None and case.rule.has(factor, dims):
                    piece = _refine(tensor, dims, whole_sizes).chunk(count, _place(dims, factor))[i]
                    tensors[t] = _merge(piece, dims)
            whole_sizes[factor] //= count
        results_at[index] = case.run(tensors, arguments)
    for r, (whole, dims) in enumerate(zip(case.results, case.rule.results, strict=True)):
        if whole is not None and dims is not None:
            parts = {index: part for index, results in results_at.items() if (part := results[r]) is not None}
            assert {tuple(part.shape) for part in parts.values()} == {_local_shape(dims, whole.shape, sizes)}
            if not whole.is_meta:
                _assert_same(case, _put_together(case.rule, r, parts, list(pieces), dict(sizes)), whole)


def _put_together(rule: Rule, r: int, parts: dict[Any, Tensor], factors: list[str], sizes: dict[str, int]) -> Tensor:
    """Join the parts of result ``r`` along the last factor, then the one before; ``sizes`` are those of a part."""
    if not factors:
        return parts[()]
    *first, last = factors
    groups: dict[Any, list[Tensor]] = {}
    for index in sorted(parts):
        groups.setdefault(index[:-1], []).append(parts[index])
    joined = {index: _join(rule, r, group, last, sizes) for index, group in groups.items()}
    sizes[last] = rule.sizes[last]
    return _put_together(rule, r, joined, first, sizes)


def _join(rule: Rule, r: int, parts: list[Tensor], factor: str, sizes: Mapping[str, int]) -> Tensor:
    dims = rule.results[r]
    if dims is not None and rule.has(factor, dims):
        return _merge(torch.cat([_refine(part, dims, sizes) for part in parts], _place(dims, factor)), dims)
    if rule.is_partial(factor, r):
        return _REDUCE[rule.reduce](torch.stack(parts), 0)
    assert all(torch.equal(part, parts[0]) for part in parts), f"{factor} is no part of result {r}, yet it differs"
    return parts[0]


def _refine(tensor: Tensor, dims: Dims, sizes: Mapping[str, int]) -> Tensor:
    """The tensor with one dim for each factor; a dim without factors stays."""
    pairs = zip(dims, tensor.shape, strict=True)
    return tensor.reshape([s for factors, size in pairs for s in ([sizes[f] for f in factors] or [size])])


def _merge(tensor: Tensor, dims: Dims) -> Tensor:
    """The inverse of ``_refine``, also for a tensor that was cut."""
    sizes = iter(tensor.shape)
    return tensor.reshape([math.prod(next(sizes) for _ in factors or ("one",)) for factors in dims])


def _place(dims: Dims, factor: str) -> int:
    return [name for factors in dims for name in factors or ("one",)].index(factor)


def _local_shape(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    pairs = zip(dims, shape, strict=True)
    return tuple(math.prod(sizes[f] for f in factors) if factors else size for factors, size in pairs)


def _local_types(
    types: Sequence[TensorType | None], sides: Sequence[Dims | None], sizes: Mapping[str, int]
) -> tuple[TensorType | None, ...]:
    return tuple(
        type_ if type_ is None or dims is None else replace(type_, shape=_local_shape(dims, type_.shape, sizes))
        for type_, dims in zip(types, sides, strict=True)
    )


def _local_arguments(case: Case, sizes: Mapping[str, int]) -> dict[int, Any]:
    entry = op_rule(case.op)
    if entry is None or entry.local is None:
        return {}
    operands = _local_types(case.call.operands, case.rule.operands, sizes)
    results = _local_types(case.call.results, case.rule.results, sizes)
    return entry.local(case.call, replace(case.call, operands=operands, results=results))


def _assert_same(case: Case, result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    if "empty" not in str(case.op):
        scale = max([1.0, *expected.abs().flatten().tolist()]) if _is_number(expected) else 1
        tolerance = TOLERANCE.get(expected.dtype, 0) * scale
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance, equal_nan=True)


def _is_number(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _check_padding(case: Case, factor: str) -> None:
    """Check that one more element with the fill of padding leaves the results without the factor as they are."""
    tensors, sizes = list(case.tensors), dict(case.rule.sizes)
    for i, (tensor, dims) in enumerate(zip(case.tensors, case.rule.operands, strict=True)):
        if tensor is not None and dims is not None and case.rule.has(factor, dims):
            place, fill = _place(dims, factor), neutral(case.rule.reduce, tensor.dtype)
            one = tensor.new_full([*tensor.shape[:place], 1, *tensor.shape[place + 1 :]], fill)
            tensors[i] = torch.cat([tensor, one], place)
    sizes[factor] += 1
    for i, result in enumerate(case.run(tensors, _local_arguments(case, sizes))):
        expected = case.results[i]
        if result is not None and expected is not None and not expected.is_meta and case.rule.is_partial(factor, i):
            _assert_same(case, result, expected)


def _check_linear(case: Case, group: frozenset[int]) -> None:
    """Check that the results on two terms of these operands add up to the result on their sum."""
    draw = torch.Generator().manual_seed(len(group))
    terms = [list(case.tensors), list(case.tensors)]
    for i in group:
        whole = case.tensors[i]
        assert whole is not None
        term = torch.randn(whole.shape, dtype=torch.float64, generator=draw).to(whole)
        terms[0][i], terms[1][i] = term, whole - term
    for one, other, expected in zip(case.run(terms[0]), case.run(terms[1]), case.results, strict=True):
        if one is not None and other is not None and expected is not None:
            _assert_same(case, one + other, expected)


@dataclass(frozen=True)
class Case:
    """A call of an op with real arguments, and its rule, bound as in a program."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: OpCall
    rule: Rule
    tensors: tuple[Tensor | None, ...]  # the operands
    results: tuple[Tensor | None, ...]

    def run(self, tensors: Sequence[Tensor | None], changed: Mapping[int, Any] | None = None) -> list[Tensor | None]:
        """The results for other operands, and with other arguments at the positions in ``changed``."""
        new = {id(old): new for old, new in zip(self.tensors, tensors, strict=True) if new is not None}
        args, kwargs = _map_tensors(lambda tensor: new[id(tensor)].clone(), (self.args, dict(self.kwargs)))
        args = list(args)
        for position, argument in sorted((changed or {}).items()):
            args[position : position + 1] = [argument]
        return _as_results(self.op(*args, **kwargs))


def _as_results(returned: Any) -> list[Tensor | None]:
    entries = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [entry if isinstance(entry, Tensor) else None for entry in entries]


def case_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: Any = None) -> Case:
    """The case of a call with real arguments; ``rule`` binds another rule than the op's own."""
    graph = fx.Graph()
    program = Program(graph, (), ())
    tensors: dict[fx.Node, Tensor] = {}

    def placeholder(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(tensors)}")
        program.set_type(node, TensorType.of(tensor))
        tensors[node] = tensor
        return node

    own_args, own_kwargs = _map_tensors(torch.clone, (args, dict(kwargs)))  # the op may write to them
    results = _as_results(returned := op(*own_args, **own_kwargs))
    args, kwargs = _map_tensors(torch.clone, (args, dict(kwargs)))  # no tensor twice
    node = graph.call_function(op, *_map_tensors(placeholder, (args, kwargs)))
    types = tuple(None if result is None else TensorType.of(result) for result in results)
    program.set_type(node, types if isinstance(returned, (tuple, list)) else types[0])
    bound: Rule = rule(program.call(node)) if rule else program.rule(node)

    def without_chunks(dims: Dims | None) -> Dims | None:
        """The dims without factors in chunks, which differ in size on each tensor and are checked elsewhere."""
        return dims and tuple(() if len(dim) == 1 and dim[0] in bound.chunks else dim for dim in dims)

    operand_dims, result_dims = (tuple(map(without_chunks, side)) for side in (bound.operands, bound.results))
    bound = replace(bound, operands=operand_dims, results=result_dims)
    values = tuple(None if operand is None else tensors[operand] for operand in operands(node))
    return Case(op, args, kwargs, program.call(node), bound, values, tuple(results))


def _map_tensors(change: Callable[[Tensor], Any], argument: Any) -> Any:
    return map_aggregate(argument, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)
