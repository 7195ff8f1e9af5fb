"""Which stage of a pipeline each forward op belongs to, as balanced as its units allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

from torch import fx

from shardc.chain import chain, check_stages
from shardc.dag import ideals, stages_of, walk
from shardc.error import ShardingError, did_you_mean
from shardc.forward_flow import Flow, flow_of
from shardc.min_max import Walk
from shardc.node import is_getitem
from shardc.options import BALANCES
from shardc.program import Program
from shardc.ranks import Runs, balance_ranks
from shardc.stage_load import Loads, mask_of
from shardc.stage_units import units_of


def choose_stages(
    program: Program, num_stages: int, *, balance: str = "params", cuts: Sequence[str] | None = None,
    place: Sequence[int] = (), microbatches: int | None = None, max_memory: int | None = None,
) -> Mapping[fx.Node, int]:  # fmt: skip
    """The stage, from 0, of every forward call of a captured program; no less than that of any operand.

    A new stage begins where the model calls ``stage_boundary``, and at the start of each module that a glob of ``cuts``
    matches; the others begin so that stages are even. ``balance``: in what. A parameter that several units share counts
    at the first; with several stages a rank, and in memory, wherever it is held. ``place``: the rank of each stage, one
    each by default. ``max_memory``: bytes that a rank may hold of parameters, gradients, Adam's states and what is
    saved of the microbatches in flight under 1F1B. Calls of inputs alone go where their first user is. Raises a
    ShardingError for an unknown balance, a glob without a module, a model of fewer units than stages and for too little
    memory.
    """
    wish = Wish(num_stages, balance, tuple(cuts or ()), tuple(place), microbatches, max_memory)
    return split_stages(program, wish).assignment


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a split: see ``choose_stages``."""

    num_stages: int
    balance: str = "params"
    cuts: tuple[str, ...] = ()
    place: tuple[int, ...] = ()
    microbatches: int | None = None
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            remedy = did_you_mean(str(self.balance), BALANCES) or f"say one of {', '.join(BALANCES)}"
            raise ShardingError("Pipeline", f"balance={self.balance!r}", "there is no such balance", remedy)
        assert len(self.place) in (0, self.num_stages), self

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(set(self.place)) or self.num_stages


@dataclass(frozen=True)
class Stages:
    """A program's forward in stages, each a mask of units."""

    loads: Loads
    wish: Wish
    masks: tuple[int, ...]
    assignment: Mapping[fx.Node, int] = field(repr=False)

    def units(self, stage: int) -> list[int]:
        """The indices of the units of a stage."""
        return [i for i in range(len(self.loads.units)) if self.masks[stage] >> i & 1]

    def stage_of(self, units: int) -> int:
        """The stage that holds one of these units."""
        return next(stage for stage, mask in enumerate(self.masks) if mask & units)


def split_stages(program: Program, wish: Wish) -> Stages:
    """As ``choose_stages``, with the units and where they were cut."""
    flow = flow_of(program)
    places = sorted({*_places_of(flow, wish.cuts), *_marked(flow)})
    if len(places) >= wish.num_stages:
        raise _too_many(wish, [flow.program.source(flow.ops[i]).module for i in places])
    loads = Loads(flow, units_of(flow, wish.num_stages, places), wish.microbatches)
    starts = [unit.start for unit in loads.units]
    forced = tuple(starts.index(at) for at in places)
    check_stages(len(starts), wish.num_stages, forced)
    stages = _stages(loads, wish, forced)
    masks = tuple(mask_of({i for i, its in enumerate(stages) if its == stage}) for stage in range(wish.num_stages))
    return Stages(loads, wish, masks, _assignment(flow, [unit.end for unit in loads.units], stages))


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


def _marked(flow: Flow) -> set[int]:
    """The places of the first ops after the model's own marks; not the very first."""
    marks = list(accumulate((flow.program.source(node).marks for node in flow.ops), max))
    return {i for i in range(1, len(marks)) if marks[i] > marks[i - 1]}


def _too_many(wish: Wish, modules: Sequence[str]) -> ShardingError:
    return ShardingError(
        f"Pipeline(cuts={wish.cuts!r})",
        f"with the model's stage_boundary stages begin in {', '.join(modules)}, and at the start",
        f"there are {wish.num_stages} stages for these {len(modules) + 1} beginnings",
        f"say {len(modules) + 1} stages or more, or cut less",
    )


def _stages(loads: Loads, wish: Wish, forced: Sequence[int]) -> tuple[int, ...]:
    """The stage of each unit."""
    if wish.num_ranks < wish.num_stages and not forced:
        return _on_ranks(loads, wish)
    size = len(loads.units)
    masks = None if forced else ideals(size, loads.edges)
    chosen = _Walks(loads, wish, masks or [(1 << i) - 1 for i in range(size + 1)], forced, is_chain=masks is None)
    found = chosen.walk(chosen.load).best()
    if found is None:
        least = chosen.walk(chosen.memory).least()
        assert least is not None, (wish, forced)
        raise _too_little(wish, least)
    return stages_of([chosen.masks[i] for i in found], size)


@dataclass(frozen=True)
class _Walks:
    """Walks through what may be done after some stages: through ``masks``, which for a chain are its beginnings."""

    loads: Loads
    wish: Wish
    masks: Sequence[int]
    forced: Sequence[int]
    is_chain: bool

    def walk(self, load: Callable[[int, int, int], int | None]) -> Walk:
        """The walk of the least greatest load."""
        if self.is_chain:
            return chain(len(self.loads.units), self.wish.num_stages, load, self.received, self.forced)
        rises = self.wish.balance != "memory" and load == self.load
        return walk(self.masks, self.wish.num_stages, load, self.behind, self.received, rises)

    @cached_property
    def behind(self) -> list[int]:
        """What is done weighs so much."""
        each = self.loads.each(self.wish.balance)
        return [sum(weight for i, weight in enumerate(each) if mask >> i & 1) for mask in self.masks]

    def load(self, stage: int, start: int, end: int) -> int | None:
        """What a stage weighs; None where it does not fit."""
        is_memory, most = self.wish.balance == "memory", self.wish.max_memory
        held = self.memory(stage, start, end) if is_memory or most is not None else 0
        if most is not None and held > most:
            return None
        return held if is_memory else self.behind[end] - self.behind[start]

    def memory(self, stage: int, start: int, end: int) -> int:
        """The bytes that a stage holds under 1F1B."""
        return self.loads.memory(self.masks[end] & ~self.masks[start], self.wish.num_stages - stage)

    def received(self, start: int, end: int) -> int:
        """The bytes that a stage is sent."""
        return self.loads.received_bytes(self.masks[end] & ~self.masks[start])


def _on_ranks(loads: Loads, wish: Wish) -> tuple[int, ...]:
    """The stage of each unit, with several stages a rank; of every rank as many microbatches in flight as ranks."""
    readers: dict[str, list[int]] = {}
    for i, unit in enumerate(loads.units):
        for name in unit.parameters:
            readers.setdefault(name, []).append(i)
    of_name = {"params": loads.elements, "memory": loads.copies}.get(wish.balance, lambda name: 0)
    flying = min(wish.num_ranks, wish.microbatches or wish.num_ranks) if wish.balance == "memory" else 1
    weights = (
        [0] * len(loads.units) if wish.balance == "params" else [flying * each for each in loads.each(wish.balance)]
    )
    weights = [
        weight + sum(of_name(name) for name in unit.parameters if len(readers[name]) == 1)
        for weight, unit in zip(weights, loads.units, strict=True)
    ]
    shared = [(of_name(name), units) for name, units in readers.items() if len(units) > 1 and of_name(name)]

    def received(runs: Runs) -> int:
        return loads.received_bytes(mask_of({i for start, end in runs for i in range(start, end)}))

    cuts = balance_ranks(weights, wish.place, shared=shared, received=received).cuts
    stages = tuple(sum(i >= cut for cut in cuts) for i in range(len(loads.units)))
    _check_memory(loads, wish, stages)
    return stages


def _check_memory(loads: Loads, wish: Wish, stages: Sequence[int]) -> None:
    """A ShardingError where a rank with several stages holds more than is allowed."""
    ranks = [wish.place[stage] for stage in stages]
    held = [
        loads.memory(mask_of({i for i, its in enumerate(ranks) if its == rank}), wish.num_ranks) for rank in set(ranks)
    ]
    if wish.max_memory is not None and max(held) > wish.max_memory:
        raise _too_little(wish, max(held))


def _too_little(wish: Wish, least: int) -> ShardingError:
    assert wish.max_memory is not None
    return ShardingError(
        f"Pipeline(max_memory={wish.max_memory})",
        f"bytes of a rank, for {wish.num_stages} stages on {wish.num_ranks} ranks",
        f"the fullest rank holds {least} bytes, {least - wish.max_memory} more",
        f"say max_memory={least} or more, balance='memory', more stages or more ranks",
    )


def _assignment(flow: Flow, ends: Sequence[int], stages: Sequence[int]) -> Mapping[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    for i, node in enumerate(flow.ops):
        found[node] = stages[bisect_right(ends, i)]
        found.update(dict.fromkeys((user for user in node.users if is_getitem(user)), found[node]))
    for node in reversed(flow.following):
        found[node] = min((found[user] for user in node.users if user in found), default=max(stages))
    return found
