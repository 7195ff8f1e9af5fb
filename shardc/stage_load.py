"""What a set of units weighs as a stage: parameters, operations, time, bytes in memory, bytes that it is sent.

A set is a mask: bit i is unit i.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardc.fact import Input
from shardc.forward_flow import Flow
from shardc.lifetime import storages
from shardc.program import Value
from shardc.sharding import ceil_div
from shardc.stage_units import Unit

COPIES = 4  # of a trained parameter: itself, its gradient and the two states of Adam


@dataclass(frozen=True)
class CrossingValue:
    """A value that another unit than its own reads."""

    name: str
    type: str
    nbytes: int
    maker: int
    readers: int


@dataclass(frozen=True)
class StageLoads:
    """Of the units of a program's forward. ``microbatches``: how many there are, if that is known.

    ``pieces``: in how many the batch is cut; what is saved is of one of them.
    """

    flow: Flow
    units: tuple[Unit, ...]
    microbatches: int | None = None
    pieces: int = 1
    counted: dict[tuple[str, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def parameters(self) -> dict[str, Input]:
        """The program's parameters by name."""
        return {put.name: put for put in self.flow.program.inputs if put.kind == "parameter"}

    @cached_property
    def crossings(self) -> tuple[CrossingValue, ...]:
        """Every value that crosses from a unit to others."""
        starts = [unit.start for unit in self.units]

        def found() -> Iterator[CrossingValue]:
            for value, places in self.flow.readers.items():
                maker, *readers = (bisect_right(starts, at) - 1 for at in (self.flow.place[value[0]], *places))
                if others := {reader for reader in readers if reader != maker}:
                    yield self._crossing(value, 1 << maker, mask_of(others))

        return tuple(found())

    def _crossing(self, value: Value, maker: int, readers: int) -> CrossingValue:
        node, index = value
        name = f"{node.name}[{index}]" if self.flow.program.has_many(node) else node.name
        return CrossingValue(name, str(self.flow.program.value_type(value)), self.flow.nbytes(value), maker, readers)

    @cached_property
    def edges(self) -> set[tuple[int, int]]:
        """Pairs of a unit and one that reads from it."""
        every = range(len(self.units))
        return {(c.maker.bit_length() - 1, i) for c in self.crossings for i in every if c.readers >> i & 1}

    @cached_property
    def made(self) -> tuple[int, ...]:
        """For each unit the bytes that it makes of one piece of a batch and backward reads."""
        starts, made = [unit.start for unit in self.units], [0] * len(self.units)
        for storage in storages(self.flow.program):
            place = self.flow.place.get(storage.value[0])
            if storage.is_saved and place is not None:
                made[bisect_right(starts, place) - 1] += storage.nbytes
        return tuple(ceil_div(each, self.pieces) for each in made)

    def received(self, stage: int) -> tuple[CrossingValue, ...]:
        """What a stage is sent, each value once."""
        return tuple(c for c in self.crossings if c.readers & stage and not c.maker & stage)

    def received_bytes(self, stage: int) -> int:
        """The bytes of that."""
        return self._known("received", stage, lambda: sum(c.nbytes for c in self.received(stage)))

    def each(self, balance: str) -> list[int]:
        """For each unit its parameters, those that it is first to read; its operations; its time; its saved bytes."""
        if balance == "params":
            return [sum(self.elements(name) for name in names) for names in self._new_parameters()]
        if balance == "memory":
            return list(self.made)
        return [unit.flops if balance == "flops" else unit.time for unit in self.units]

    def total(self, balance: str, stage: int) -> int:
        """Of a stage, of what ``each`` says of units."""
        return sum(weight for i, weight in enumerate(self.each(balance)) if stage >> i & 1)

    def elements(self, name: str) -> int:
        """The size of a parameter."""
        return self.parameters[name].type.numel

    def held(self, stage: int) -> frozenset[str]:
        """The parameters that a stage reads, those too that others read."""
        return frozenset().union(*(unit.parameters for i, unit in enumerate(self.units) if stage >> i & 1))

    def copies(self, name: str) -> int:
        """The bytes of a parameter with what training keeps beside it."""
        put = self.parameters[name]
        return put.type.nbytes * (COPIES if put.requires_grad else 1)

    def saved(self, stage: int) -> int:
        """The bytes that a stage keeps of one microbatch for backward; what it was sent is among them."""
        made = self._known("made", stage, lambda: sum(made for i, made in enumerate(self.made) if stage >> i & 1))
        return made + ceil_div(self.received_bytes(stage), self.pieces)

    def memory(self, stage: int, in_flight: int) -> int:
        """The bytes of a stage in training, with so many microbatches between their forward and backward."""
        flying = min(in_flight, self.microbatches or in_flight)
        copies = self._known("copies", stage, lambda: sum(map(self.copies, self.held(stage))))
        return copies + flying * self.saved(stage)

    def _known(self, kind: str, stage: int, count: Callable[[], int]) -> int:
        if (kind, stage) not in self.counted:
            self.counted[kind, stage] = count()
        return self.counted[kind, stage]

    def _new_parameters(self) -> Iterator[frozenset[str]]:
        met: set[str] = set()
        for unit in self.units:
            yield unit.parameters - met
            met |= unit.parameters


def mask_of(units: Sequence[int] | set[int]) -> int:
    """The set of these units."""
    return sum(1 << i for i in units)
