"""Why each axis cuts the tensors of an op as it is computed, and why an operand may not stay as it lies.

Propagate said where the axes of each value came from. The plan by which an op is computed may cut otherwise, or leave a
sum open: an axis then comes from whichever of the op's tensors had it on the factor that it now cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torch import fx

from shardc.cause import Need, NeedKind
from shardc.cut import factor_cuts
from shardc.fact import Origin
from shardc.node import is_annotation
from shardc.program import Program, Value
from shardc.rule import Dims
from shardc.sharding import DimSharding, Sharding

from .choose_cuts import Plan

Tensor = tuple[Value, Dims, Sharding]  # of an op: a value, its factors and how it lies


class OpOrigins:
    """Of one op: which axes cut which of its factors, and where each of them came from."""

    def __init__(self, program: Program, plan: Plan, node: fx.Node) -> None:
        self.program, self.plan, self.node, self.rule = program, plan, node, program.rule(node)
        self.values = program.operand_values(node)

    @cached_property
    def cuts(self) -> Mapping[str, set[str]]:
        """The factors that each axis cuts."""
        tensors = [*self._operands(self.plan.wanted[self.node]), *self._results(self.plan.made[self.node])]
        found: dict[str, set[str]] = {}
        for _, cuts in self._cuts(tensors):
            for factor, cut in cuts.items():
                for part in cut.all_axes:
                    found.setdefault(part.name, set()).add(factor)
        return found

    def results(self) -> tuple[Mapping[str, Origin], ...]:
        """For each result, for each axis that cuts it or over which a sum is open, why."""
        return tuple(
            {} if made is None else (found := self._result(i, made, known)) | {**known, **found}
            for i, (made, known) in enumerate(
                zip(self.plan.made[self.node], self.program.origins(self.node), strict=True)
            )
        )

    def _result(self, index: int, made: Sharding, known: Mapping[str, Origin]) -> dict[str, Origin]:
        wished = self.plan.wished[self.node][index]
        found: dict[str, Origin] = {}
        for part in made.partial_axes:
            found.update(self._came(part.name, index, from_operands=True))
        for part in made.cut_axes:
            is_as_wished = wished is not None and dim_of(wished, part.name) == dim_of(made, part.name)
            if not (is_as_wished and part.name in known):
                found.update(self._came(part.name, index))
        return found

    def _came(self, axis: str, index: int, from_operands: bool = False) -> dict[str, Origin]:
        claims = self._claims(axis, from_operands)
        if not claims:
            return {}
        value = (self.node.name, index)
        first = claims[0][0].through(self.node.name, value)
        others = (origin.through(self.node.name, value) for origin, is_open in claims[1:] if from_operands and is_open)
        beside = {each.annotation: each for each in others if each.annotation != first.annotation}
        return {axis: replace(first, beside=tuple(beside.values()))}

    def origin(self, axis: str) -> Origin | None:
        """Where an axis came from to the factor that it cuts."""
        return next((origin for origin, _ in self._claims(axis)), None)

    def _claims(self, axis: str, from_operands: bool = False) -> list[tuple[Origin, bool]]:
        """Where an axis came from to the factor that it cuts, by who is heard first; and whether a sum is open there.

        A result's claim is what propagate wished of it. Where a sum only rides through, from what it is open on.
        """
        lies = self.plan.seen_by(self.node)
        taken = list(self._operands([None if value is None else lies(value) for value in self.values]))
        tensors = [*taken, *([] if from_operands else self._results(self.plan.wished[self.node]))]
        claims = [
            (origin, is_open)
            for (value, _, sharding), cuts in self._cuts(tensors)
            if (origin := self._of(value).get(axis)) is not None
            and ((is_open := axis in {part.name for part in sharding.partial_axes}) or self._cuts_alike(axis, cuts))
        ]
        return sorted(claims, key=lambda claim: claim[0].rank)

    def _cuts_alike(self, axis: str, cuts: Mapping[str, DimSharding]) -> bool:
        """Whether a tensor has the axis on a factor that it cuts in the op."""
        return any(axis in {part.name for part in cuts[f].all_axes} for f in self.cuts.get(axis, ()) if f in cuts)

    def _of(self, value: Value) -> Mapping[str, Origin]:
        return self.program.origins(value[0])[value[1]]

    def _cuts(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, dict[str, DimSharding]]]:
        for tensor in tensors:
            value, dims, sharding = tensor
            yield tensor, factor_cuts(dims, sharding.dims, self.program.value_type(value).shape, self.rule.sizes)

    def _operands(self, shardings: Iterable[Sharding | None]) -> Iterator[Tensor]:
        for value, dims, sharding in zip(self.values, self.rule.operands, shardings, strict=True):
            if value is not None and dims is not None and sharding is not None:
                yield value, dims, sharding

    def _results(self, shardings: Iterable[Sharding | None]) -> Iterator[Tensor]:
        for i, (dims, sharding) in enumerate(zip(self.rule.results, shardings, strict=True)):
            if dims is not None and sharding is not None:
                yield (self.node, i), dims, sharding

    def needs(self, index: int, has: Sharding) -> tuple[Need, ...]:
        """Why an operand that lies as ``has`` is wanted otherwise, for each axis that changes."""
        wanted = self.plan.wanted[self.node][index]
        assert wanted is not None
        value = self.values[index]
        assert value is not None

        def come(axis: str) -> Origin | None:
            origin = self.origin(axis)
            return origin and origin.through(self.node.name, (value[0].name, value[1]))

        return needs(has, wanted, lambda axis, dim: self._need(index, has, axis, dim), come)

    def _need(self, index: int, has: Sharding, axis: str, dim: int | None) -> Need:
        """Why an axis may not stay on a dim of an operand, or a sum open."""
        if dim is None:
            return Need(axis, "sum")
        if is_annotation(self.node):
            return Need(axis, "placed", dim, said=self._pin())
        kind = self._kind(index, has, axis, dim)
        return Need(axis, kind, dim, self._rival(index, axis, dim) if kind == "taken" else None)

    def _kind(self, index: int, has: Sharding, axis: str, dim: int) -> NeedKind:
        dims = self.rule.operands[index]
        if self.rule.is_fallback:
            return "fallback"
        if dims is None or not dims[dim] or set(dims[dim]) & self.rule.whole:
            return "whole"
        if self._rival(index, axis, dim) is not None:
            return "taken"
        return "fewest" if all(self.rule.may_cut(factor, has.dims[dim]) for factor in dims[dim]) else "unfit"

    def _rival(self, index: int, axis: str, dim: int) -> Origin | None:
        """Where an axis came from to another factor than those of a dim of an operand."""
        dims = self.rule.operands[index]
        own = set(dims[dim]) if dims is not None else set()
        return self.origin(axis) if self.cuts.get(axis, set()) - own else None

    def _pin(self) -> str:
        return next((pin.text for pin in self.program.pins if (pin.kind, pin.name) == ("value", self.node.name)), "")


def needs(
    has: Sharding,
    wanted: Sharding,
    why: Callable[[str, int | None], Need],
    origin: Callable[[str], Origin | None],
) -> tuple[Need, ...]:
    """For each axis over which two shardings differ: ``why`` it may not stay on its dim, or where it comes from."""
    gone = [
        why(part.name, dim_of(has, part.name))
        for part in has.used_parts
        if dim_of(has, part.name) != dim_of(wanted, part.name) or part in has.partial_axes
        if part not in wanted.partial_axes
    ]
    come = [
        Need(part.name, "cut", dim_of(wanted, part.name), origin(part.name))
        for part in wanted.cut_axes
        if dim_of(has, part.name) != dim_of(wanted, part.name)
    ]
    return tuple({(need.axis, need.kind): need for need in (*gone, *come)}.values())


def dim_of(sharding: Sharding, axis: str) -> int | None:
    """The dim that an axis cuts; None where it cuts none."""
    return next((i for i, cut in enumerate(sharding.dims) if axis in {part.name for part in cut.all_axes}), None)
