"""Why an op's operands are resharded: which axes cut which of its factors, and the annotation that each came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torch import fx

from shardc.language.cut import factor_cuts
from shardc.language.mesh import AxisPart
from shardc.language.rule import Dims
from shardc.language.sharding import DimSharding, Sharding
from shardc.program.node import is_annotation
from shardc.program.program import Value
from shardc.program.provenance import Need, Origin

from .choose_cuts import CutPlan

Tensor = tuple[Value, Dims, Sharding]  # of an op: a value, its factors and its sharding


class OpReasons:
    """The reasons of one op of a plan. Made before the op's shardings in the program become those of the plan."""

    def __init__(self, plan: CutPlan, node: fx.Node) -> None:
        self.program, self.node, self.rule = plan.program, node, plan.program.rule(node)
        self.op, self.propagated = plan.ops[node], plan.program.shardings(node)
        self.values = plan.program.operand_values(node)
        self.arriving = [None if value is None else plan.arrivals.sharding(node, value) for value in self.values]

    def result_origins(self) -> tuple[Mapping[str, Origin], ...]:
        """For each result, the origin of each axis that cuts it or over which a sum is open.

        An axis that cuts the dim it was propagated to keeps its propagated origin.
        """
        origins: list[dict[str, Origin]] = []
        for i, (result, known) in enumerate(zip(self.op.results, self.program.origins(self.node), strict=True)):
            propagated, new = self.propagated[i], dict[str, Origin]()
            if result is None:
                origins.append(new)
                continue
            for part in result.partial_axes:
                new |= self._through(part.name, i, is_sum=True)
            for part in result.cut_axes:
                is_same = propagated is not None and dim_of(propagated, part.name) == dim_of(result, part.name)
                if not (is_same and part.name in known):
                    new |= self._through(part.name, i, is_sum=False)
            origins.append(new | {**known, **new})
        return tuple(origins)

    def _through(self, axis: str, index: int, is_sum: bool) -> dict[str, Origin]:
        """The origin of an axis on a result; of a sum of several open sums, those of the others beside it."""
        claims = self._claims(axis, of_operands=is_sum)
        if not claims:
            return {}
        value = (self.node.name, index)
        first = claims[0][0].through(self.node.name, value)
        others = (origin.through(self.node.name, value) for origin, is_open in claims[1:] if is_sum and is_open)
        beside = {each.annotation: each for each in others if each.annotation != first.annotation}
        return {axis: replace(first, addends=tuple(beside.values()))}

    def needs(self, index: int, current: Sharding) -> tuple[Need, ...]:
        """Why an operand may not stay in its current sharding, for each axis that changes."""
        target, value = self.op.operands[index], self.values[index]
        assert target is not None and value is not None

        def origin(axis: str) -> Origin | None:
            known = self._origin(axis)
            return known and known.through(self.node.name, (value[0].name, value[1]))

        return needs(current, target, lambda axis, dim: self._need(index, current, axis, dim), origin)

    def _need(self, index: int, current: Sharding, axis: str, dim: int | None) -> Need:
        """Why an axis may not stay on a dim of an operand, or a sum open."""
        if dim is None:
            return Need(axis, "sum")
        if is_annotation(self.node):
            pins = (pin.text for pin in self.program.pins if (pin.kind, pin.name) == ("value", self.node.name))
            return Need(axis, "placed", dim, stated=next(pins, ""))
        dims = self.rule.operands[index]
        factors = () if dims is None else dims[dim]
        if self.rule.is_fallback:
            return Need(axis, "fallback", dim)
        if not factors or set(factors) & self.rule.whole:
            return Need(axis, "whole", dim)
        rival = self._origin(axis) if self._cuts.get(axis, set()) - set(factors) else None
        if rival is not None:
            return Need(axis, "taken", dim, rival)
        is_fit = all(self.rule.may_cut(factor, current.dims[dim]) for factor in factors)
        return Need(axis, "fewest" if is_fit else "unfit", dim)

    @cached_property
    def _cuts(self) -> Mapping[str, set[str]]:
        """The factors that each axis cuts in the plan."""
        factors: dict[str, set[str]] = {}
        for _, cuts in self._factor_cuts(self.op.operands, self.op.results):
            for factor, cut in cuts.items():
                for part in cut.all_axes:
                    factors.setdefault(part.name, set()).add(factor)
        return factors

    def _origin(self, axis: str) -> Origin | None:
        """The origin of an axis on the factor that it cuts."""
        return next((origin for origin, _ in self._claims(axis)), None)

    def _claims(self, axis: str, of_operands: bool = False) -> list[tuple[Origin, bool]]:
        """The origins of the axis on the op's tensors that have the factor it cuts, the lowest rank first.

        With each, whether a sum is open there. Results count with their propagated sharding, unless ``of_operands``.
        """
        claims = []
        for (value, _, sharding), cuts in self._factor_cuts(self.arriving, () if of_operands else self.propagated):
            origin = self.program.origins(value[0])[value[1]].get(axis)
            is_open = axis in _names(sharding.partial_axes)
            factors = self._cuts.get(axis, set()) & cuts.keys()
            if origin is not None and (is_open or any(axis in _names(cuts[factor].all_axes) for factor in factors)):
                claims.append((origin, is_open))
        return sorted(claims, key=lambda claim: claim[0].rank)

    def _factor_cuts(
        self, operands: Iterable[Sharding | None], results: Iterable[Sharding | None]
    ) -> Iterator[tuple[Tensor, dict[str, DimSharding]]]:
        """The op's tensors in given shardings, and how each factor is cut in each."""
        tensors = [*zip(self.values, self.rule.operands, operands, strict=True)]
        tensors += (((self.node, i), *pair) for i, pair in enumerate(zip(self.rule.results, results, strict=False)))
        for value, dims, sharding in tensors:
            if value is not None and dims is not None and sharding is not None:
                shape = self.program.value_type(value).shape
                yield (value, dims, sharding), factor_cuts(dims, sharding.dims, shape, self.rule.sizes)


def _names(parts: Iterable[AxisPart]) -> set[str]:
    return {part.name for part in parts}


def needs(
    src: Sharding,
    dst: Sharding,
    reason: Callable[[str, int | None], Need],
    origin: Callable[[str], Origin | None],
) -> tuple[Need, ...]:
    """For each axis over which two shardings differ: why it may not stay on its dim, and where a new cut comes from."""
    gone = [
        reason(part.name, dim_of(src, part.name))
        for part in src.used_parts
        if dim_of(src, part.name) != dim_of(dst, part.name) or part in src.partial_axes
        if part not in dst.partial_axes
    ]
    new = [
        Need(part.name, "cut", dim_of(dst, part.name), origin(part.name))
        for part in dst.cut_axes
        if dim_of(src, part.name) != dim_of(dst, part.name)
    ]
    return tuple({(need.axis, need.kind): need for need in (*gone, *new)}.values())


def dim_of(sharding: Sharding, axis: str) -> int | None:
    """The dim that an axis cuts; None where it cuts none."""
    return next((i for i, cut in enumerate(sharding.dims) if axis in _names(cut.all_axes)), None)
