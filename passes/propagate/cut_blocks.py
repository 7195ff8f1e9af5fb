"""cut_blocks: canonical -> canonical. A plain cut of a fused parameter becomes a cut of each block that ops take.

A model with one weight for q, k and v splits the product into three blocks of columns. ``P(None, "tp")`` on the weight
would cut across the blocks, and each would have to be gathered. The pin cuts each block instead, and a note of the
program says so::

    # pin of w: f32[6, 24@tp]                                   # pin of w: f32[6, (3 8@tp)]
    dot: f32[8, 24] = dot(x, w, "a b, b c -> a c")       ->     dot: f32[8, 24] = dot(x, w, "a b, b c -> a c")
    split: (f32[8, 8], ...) = split(dot, 8, -1)                 split: (f32[8, 8], ...) = split(dot, 8, -1)

Whether the cut reaches the op that takes blocks depends on all other pins, so the pass propagates once and reads the
origins of the cuts. Invariants: the graph does not change; a changed pin cuts the same dim by the same axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardc.language.rule import Rule
from shardc.language.sharding import DimSharding, num_shards
from shardc.program.program import Pin, Program, Value

from .propagate import PARAMETER_KINDS, pinned_values, propagated


def cut_blocks(program: Program, first: frozenset[str] = frozenset()) -> Program:
    """The program with pins of fused parameters cut in blocks; ``first`` as in ``propagate``."""
    stored = [pin for pin in program.pins if pin.kind in PARAMETER_KINDS]
    pins = dict(zip(pinned_values(program, stored), stored, strict=True))
    tensors = [(pin.sharding.dims, program.value_type(value).shape) for value, pin in pins.items()]
    cuts = {(cut, size) for dims, shape in tensors for cut, size in zip(dims, shape, strict=True) if cut.axes}
    if not cuts or not any(blocks.fit(cut, size) for blocks in _blocks_taken(program) for cut, size in cuts):
        return program
    by_name = {value[0].name: (pin, program.value_type(value).shape) for value, pin in pins.items()}
    changes = _changes(propagated(program, first), by_name)
    notes = tuple(
        f"{pin.name}: {pin.text} cuts each block that the model takes apart, {new.sharding}, not the whole dim"
        for pin, new in changes.items()
    )
    new_pins = tuple(changes.get(pin, pin) for pin in program.pins)
    return replace(program, pins=new_pins, notes=program.notes + notes)


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` equal blocks of ``size`` elements that an op takes apart along a dim of a value.

    ``is_separate``: the op makes a value of each block, rather than a dim over the blocks.
    """

    value: Value
    dim: int
    count: int
    size: int
    is_separate: bool

    def fit(self, cut: DimSharding, size: int) -> bool:
        """Whether a cut of a parameter's dim of ``size`` elements goes across its blocks and could cut each instead."""
        shards = num_shards(cut.axes)
        is_across = self.is_separate or bool(self.count % shards and shards % self.count)
        is_plain = bool(cut.axes) and not cut.minor
        return is_plain and is_across and self.count > 1 and self.count * self.size == size and self.size % shards == 0


def _blocks_taken(program: Program) -> Iterator[Blocks]:
    """The blocks that ops take apart: by a split, or by a view such as ``(3, heads, width)``."""
    for node in program.calls:
        rule = program.rule(node)
        if _block_dims not in rule.known:
            rule.known[_block_dims] = list(_block_dims(rule))
        for tensor, dim, count, is_separate in rule.known[_block_dims]:
            values = program.operand_values(node)
            value = values[tensor] if tensor < len(values) else (node, tensor - len(values))
            if value is not None:
                size = program.value_type(value).shape[dim] // max(1, count)
                yield Blocks(value, dim, count, size, is_separate)


def _block_dims(rule: Rule) -> Iterator[tuple[int, int, int, bool]]:
    """The dims that may hold blocks: tensor, dim, number of blocks, and whether the op makes a value of each block."""
    for tensor, dims in enumerate(rule.operands + rule.results):
        for dim, factors in enumerate(dims or ()):
            is_separate = len(factors) > 1 and factors[0] in rule.whole
            if is_separate or len(factors) > 2:
                yield tensor, dim, rule.sizes[factors[0]], is_separate


def _changes(annotated: Program, pins: Mapping[str, tuple[Pin, tuple[int, ...]]]) -> dict[Pin, Pin]:
    """The pins whose own cut goes across blocks of some value, each with its replacement.

    ``pins``: by the name of the parameter's node, with the parameter's shape.
    """
    changes: dict[Pin, Pin] = {}
    for blocks in _blocks_taken(annotated):
        node, index = blocks.value
        sharding = annotated.shardings(node)[index]
        assert sharding is not None, node
        cut = sharding.dims[blocks.dim]
        origin = annotated.origins(node)[index].get(cut.axes[0].name) if cut.axes else None
        root, _ = origin.chain[0].value if origin else ("", 0)
        if root in pins and cut in pins[root][0].sharding.dims:
            pin, shape = pins[root]
            dim = pin.sharding.dims.index(cut)
            if blocks.fit(cut, shape[dim]):
                within = DimSharding((), ((blocks.size, cut.axes),))
                changes[pin] = replace(pin, sharding=pin.sharding.with_dim(dim, within))
    return changes
