"""Which stage of a pipeline each forward op belongs to, as balanced as its units allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, get_args

from torch import fx

from shardc.chain import chain, check_stages
from shardc.error import ShardingError, did_you_mean
from shardc.forward_flow import Flow, flow_of
from shardc.node import is_getitem
from shardc.program import Program
from shardc.stage_units import Unit, units_of

Balance = Literal["params", "flops", "time", "memory"]
BALANCES: tuple[str, ...] = get_args(Balance)
COPIES = 4  # of a trained parameter: itself, its gradient and the two states of Adam


def choose_stages(
    program: Program, num_stages: int, *, balance: str = "params", cuts: Sequence[str] | None = None,
    place: Sequence[int] = (),
) -> Mapping[fx.Node, int]:  # fmt: skip
    """The stage, from 0, of every forward call of a captured program; no less than that of any operand.

    ``balance``: what is to be as even as can be; a parameter that several units share counts at the first. ``cuts``:
    globs of module paths, at whose start a new stage begins. ``place``: the rank of each stage, one each by default.
    Calls of inputs alone go where their first user is. Raises a ShardingError for an unknown balance, a glob without a
    module and a model of fewer units than stages.
    """
    return split_stages(program, num_stages, balance=balance, cuts=cuts, place=place).assignment


@dataclass(frozen=True, slots=True)
class Stages:
    """A program's forward in stages: ``ends`` are the indices of units between them, from 0 to their number."""

    flow: Flow
    units: tuple[Unit, ...]
    ends: tuple[int, ...]
    assignment: Mapping[fx.Node, int]


def split_stages(
    program: Program, num_stages: int, *, balance: str = "params", cuts: Sequence[str] | None = None,
    place: Sequence[int] = (),
) -> Stages:  # fmt: skip
    """As ``choose_stages``, with the units and where they were cut."""
    if balance not in BALANCES:
        remedy = did_you_mean(str(balance), BALANCES) or f"say one of {', '.join(BALANCES)}"
        raise ShardingError("Pipeline", f"balance={balance!r}", "there is no such balance", remedy)
    flow = flow_of(program)
    places = _places_of(flow, cuts or ())
    units = units_of(flow, num_stages, places)
    starts = [unit.start for unit in units]
    forced = tuple(starts.index(at) for at in places)
    check_stages(len(units), num_stages, forced)
    received = _Received(flow, units)
    load = _Load(program, units, num_stages, balance, received)
    found = chain(len(units), num_stages, load, received, forced).best()
    assert found is not None, (num_stages, forced)
    ends = (0, *found, len(units))
    return Stages(flow, units, ends, _assignment(flow, units, ends))


def _places_of(flow: Flow, cuts: Sequence[str]) -> list[int]:
    """The places at which modules that the globs match begin, of nested ones the outermost; not the very first."""
    begin: dict[str, int] = {}
    for i in reversed(range(len(flow.ops))):
        path = flow.program.source(flow.ops[i]).module
        begin.update({path[:end]: i for end, letter in enumerate(f"{path}.") if letter == "."})
    found: set[int] = set()
    for pattern in cuts:
        matched = {path for path in begin if fnmatchcase(path, pattern)}
        if not matched:
            who, known = f"Pipeline(cuts={tuple(cuts)!r})", list(dict.fromkeys(reversed(begin)))
            remedy = did_you_mean(pattern, known) or f"use one of {', '.join(known[:8])}"
            raise ShardingError(who, f"{pattern!r} is a glob over {len(known)} modules", "it matches nothing", remedy)
        found |= {begin[path] for path in matched if not any(path.startswith(f"{above}.") for above in matched)}
    return sorted(found - {0})


class _Received:
    """The bytes that a stage of the units from ``start`` to before ``end`` is sent: each value once."""

    def __init__(self, flow: Flow, units: Sequence[Unit]) -> None:
        starts = [unit.start for unit in units]
        self.known: dict[tuple[int, int], int] = {}
        self.crossing = []  # for each value that another unit reads: its bytes, its unit, those that read it
        for value, places in flow.readers.items():
            maker, *readers = (bisect_right(starts, at) - 1 for at in (flow.place[value[0]], *places))
            if readers[-1] > maker:
                self.crossing.append((flow.nbytes(value), maker, tuple(dict.fromkeys(readers))))

    def __call__(self, start: int, end: int) -> int:
        if (start, end) not in self.known:
            self.known[start, end] = sum(
                nbytes
                for nbytes, maker, readers in self.crossing
                if maker < start and any(start <= reader < end for reader in readers)
            )
        return self.known[start, end]


class _Load:
    """What a stage weighs, by its number and its units."""

    def __init__(
        self, program: Program, units: Sequence[Unit], num_stages: int, balance: str, received: _Received
    ) -> None:
        self.units, self.num_stages, self.balance, self.received = units, num_stages, balance, received
        inputs = {put.name: put for put in program.inputs if put.kind == "parameter"}
        self.copied = {name: put.type.nbytes * (COPIES if put.requires_grad else 1) for name, put in inputs.items()}
        self.elements = {name: prod(put.type.shape) for name, put in inputs.items()}
        self.behind = list(accumulate(self._additive(), initial=0))

    def __call__(self, stage: int, start: int, end: int) -> int:
        return self._memory(stage, start, end) if self.balance == "memory" else self.behind[end] - self.behind[start]

    def _additive(self) -> Iterator[int]:
        met: set[str] = set()
        for unit in self.units:
            new = unit.parameters - met
            met |= new
            elements = sum(self.elements[name] for name in new)
            yield {"params": elements, "flops": unit.flops, "time": unit.time, "memory": unit.saved}[self.balance]

    def _memory(self, stage: int, start: int, end: int) -> int:
        """Bytes: the parameters with gradient and optimizer, and what is saved of each microbatch that is in flight."""
        held = frozenset().union(*(unit.parameters for unit in self.units[start:end]))
        saved = self.behind[end] - self.behind[start] + self.received(start, end)
        return sum(self.copied[name] for name in held) + (self.num_stages - stage) * saved


def _assignment(flow: Flow, units: Sequence[Unit], ends: Sequence[int]) -> Mapping[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    for stage, (start, end) in enumerate(pairwise(ends)):
        for node in flow.ops[units[start].start : units[end - 1].end]:
            found[node] = stage
            found.update(dict.fromkeys((user for user in node.users if is_getitem(user)), stage))
    last = len(ends) - 2
    for node in reversed(flow.following):
        stages = [found[user] for user in node.users if user in found]
        found[node] = min(stages, default=last)
    return found
