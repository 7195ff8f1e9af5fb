"""Rules for a user's own ops, checked: what does not fit is said in terms of the op's schema and the call's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import shardc.ops  # noqa: F401  (fills the table)
from shardc.error import ShardingError, did_you_mean
from shardc.rule import RULES, Call, Local, OpRule, Rule, local_sizes, make_rule, parse_groups, replicated_rule
from shardc.sharding import ReduceOp, TensorType
from shardc.spec import parse_dims

Spec = str | Callable[[Call], str | None]
_GRAMMAR = "write an entry for each tensor, as in 'b k, k n -> b n'; _ for a tensor that is not looked at"


def register_rule(
    op: Any,
    spec: Spec,
    *,
    linear: str = "",
    whole: str = "",
    reduce: ReduceOp = "sum",
    sizes: int | None = None,
    local: Local | None = None,
    uneven: bool = False,
    override: bool = False,
) -> None:
    """Say which dims an op's tensors share, so that it stays sharded instead of running whole on every rank.

    ``spec`` names a *factor* for each dim, as an einsum does, for every tensor argument in the order of the schema and
    for every result::

        shardc.register_rule(torch.ops.mine.rms_norm.default, "... d, d -> ... d", whole="d")
        shardc.register_rule(torch.ops.mine.matmul.default, "m k, k n -> m n", linear="0 1")

    A factor on results and operands may be cut with no communication. One that stands in operands alone may be cut too
    and leaves a partial result, combined by ``reduce`` (``sum``, ``max`` or ``min``). ``whole="d"`` names factors that
    must not be cut: they are gathered first. ``(b t)`` is one dim of two factors, ``1`` a dim that is never cut,
    ``...`` all leading dims, ``_`` a tensor that is not looked at and is whole on every rank; a dim of size 1 where
    others have more is broadcast. ``linear`` lists operands in which the op is linear, so that an open sum may pass:
    ``"0 1"`` in operand 0 and in operand 1, ``"01"`` in both together.

    Where the rule depends on the call, ``spec`` is a function of it (``call.args``, ``call.operands``,
    ``call.results``, tensors as types) that returns the text, or None for a call that has to run whole. An op that
    names sizes is told one rank's: ``sizes=1`` says that ``args[1]`` is the shape of the first result, and
    ``local(call, shard)`` gives any arguments that differ, by position, from the call in global and in local types.

    A reduced factor is cut only where it divides, since the op would count the padding of an uneven cut, which reads 0
    (-inf for ``max``, inf for ``min``). ``uneven=True`` says that such elements leave the result as it is; it holds by
    itself where the op is linear in operands that have the factor.

    A rule of shardc's own is replaced with ``override=True`` alone. Hold a rule to its word with
    ``shardc.check_rule(op, *args)``. Register on every rank, before the model is compiled.

    Raises a ShardingError here where the spec does not fit the op's schema, and when a model is compiled where it does
    not fit a call.
    """
    op = overload_of(op)
    who = f"register_rule({op})"
    if op in RULES and not override:
        raise ShardingError(
            who, "it has a rule", "a second one would hide it", "say override=True to put yours in its place"
        )
    for name, value in (("linear", linear), ("whole", whole)):
        if not isinstance(value, str):
            what, problem = f"{name}={value!r}", "it is text, words with blanks between them"
            raise ShardingError(who, what, problem, f"say {name}={'0 1' if name == 'linear' else 'd'!r}")
    if not isinstance(spec, str) and not callable(spec):
        raise ShardingError(who, f"spec={spec!r}", "it is no text, and no function of the call", _GRAMMAR)
    if isinstance(spec, str):
        _check_spec(who, op, spec, linear, whole, sizes is not None or local is not None)
    if reduce not in ("sum", "max", "min"):
        raise ShardingError(who, f"reduce={reduce!r}", "there is no such reduction", "say sum, max or min")

    def bind(call: Call) -> Rule:
        text = spec(call) if callable(spec) else spec
        if text is None:
            return replicated_rule(call)
        if callable(spec):
            _check_spec(who, op, text, linear, whole, sizes is not None or local is not None)
        _check_call(who, text, call)
        bound = make_rule(text, call, linear=linear, whole=whole, reduce=reduce)
        return replace(bound, sees_padding=not uneven and not _sees_no_padding(bound))

    RULES[op] = OpRule(bind, local_sizes(sizes) if sizes is not None else local)


def overload_of(op: Any) -> torch._ops.OpOverload:
    """The overload that a graph calls, of what ``torch.library.custom_op`` returns, a packet of one or an overload."""
    found = getattr(op, "_opoverload", op)
    if isinstance(found, torch._ops.OpOverloadPacket) and len(found.overloads()) == 1:
        found = getattr(found, found.overloads()[0])
    if not isinstance(found, torch._ops.OpOverload):
        named = [f"{found}.{name}" for name in found.overloads()] if hasattr(found, "overloads") else []
        raise ShardingError(
            f"op {op}",
            f"of type {type(op).__name__}",
            "a rule is for one overload of an op of torch.library",
            f"name one of {', '.join(named)}" if named else "write torch.ops.NAMESPACE.NAME.default",
        )
    return found


def _sees_no_padding(rule: Rule) -> bool:
    """Whether zeros in place of padding leave every sum as it is, since the op is linear in what has the factor."""
    partial = [name for name in rule.sizes if rule.leaves_partial(name)]
    return rule.reduce == "sum" and all(
        any(all(rule.has(factor, rule.operands[i]) for i in group) for group in rule.linear) for factor in partial
    )


def _check_spec(who: str, op: Any, spec: str, linear: str, whole: str, has_local: bool) -> None:
    """What can be seen before any call: entries against the schema, factors against each other."""

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
    factors = [_factors(side) for side in (left, right)]
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


def _check_call(who: str, spec: str, call: Call) -> None:
    """An entry for each tensor, a factor for each dim, and one size for each factor."""
    left, _, right = spec.partition("->")
    sizes: dict[str, int] = {}
    sides = ("operand", left, call.operands), ("result", right, call.results)
    for side, text, tensors in sides:
        entries = text.split(",")
        if len(entries) < len(tensors):
            raise ShardingError(
                who, f"spec {spec!r}", f"{_count(len(entries), side)} for {_count(len(tensors), 'tensor')}", _GRAMMAR
            )
        for i, (entry, tensor) in enumerate(zip(entries, tensors, strict=False)):
            if tensor is None or entry.strip() == "_":
                continue
            for factor, size in _pairs(who, spec, f"{side} {i}", entry, tensor):
                known = sizes.setdefault(factor, size)
                if 1 in (known, size):
                    sizes[factor] = max(known, size)
                elif known != size:
                    raise ShardingError(
                        f"{who}, {side} {i}",
                        f"{tensor} as {entry.strip()!r}",
                        f"factor {factor!r} is {size} here and {known} in another tensor",
                        "give the two dims different names",
                    )


def _pairs(who: str, spec: str, tensor_name: str, entry: str, tensor: TensorType) -> Iterator[tuple[str, int]]:
    """The factors that have a dim to themselves, with its size."""
    dims = parse_dims(entry.strip())
    has_dots = ("...",) in dims
    if len(dims) - has_dots > len(tensor.shape) or (not has_dots and len(dims) != len(tensor.shape)):
        raise ShardingError(
            f"{who}, {tensor_name}",
            f"{tensor} as {entry.strip()!r}",
            f"{_count(len(dims) - has_dots, 'entry')} for {_count(len(tensor.shape), 'dim')}",
            "name each dim; '...' stands for any number of leading dims",
        )
    sizes = tensor.shape[len(tensor.shape) - len(dims) + 1 :] if has_dots and dims[0] == ("...",) else tensor.shape
    named = dims[1:] if has_dots and dims[0] == ("...",) else () if has_dots else dims
    yield from ((dim[0], size) for dim, size in zip(named, sizes, strict=True) if len(dim) == 1)


def _factors(side: str) -> set[str]:
    entries = [entry.strip() for entry in side.split(",")]
    return {name for entry in entries if entry != "_" for dim in parse_dims(entry) for name in dim} - {"1"}


def _count(number: int, what: str) -> str:
    plural = what.replace("entry", "entrie") + "s"
    return f"{number} {what if number == 1 else plural}"
