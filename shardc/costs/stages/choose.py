"""Chooses the stage of each forward op of a pipeline, as balanced as its units allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise

from torch import fx

from shardc.costs.stages.units import Flow, StageLoads, flow_of, mask_of, prefixes, units_of
from shardc.language.errors import OptionError, did_you_mean
from shardc.options import BALANCES, Balance, Pipeline
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.schedules.balance import (
    MOST_LOOPED,
    Load,
    MinMaxPath,
    Ranges,
    Split,
    balance_ranks,
    chain_path,
    ideal_path,
    ideals,
    stages_after,
)

WORTH = 0.98  # of the heaviest stage's weight: a split with more crossings must be lighter than this


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options for splitting a model into stages.

    ``balance``: the quantity to make even, one of ``BALANCES``. A parameter that several units share counts at the
    first; with several stages a rank, and in memory, it counts wherever it is held. ``cuts``: globs of module paths at
    whose start a stage begins. ``place``: the rank of each stage, by default one each. ``max_memory``: bytes that a
    rank may hold of parameters, gradients, Adam's states and activations of the ``microbatches`` in flight under 1F1B.
    ``pieces``: the number of pieces, over ranks and microbatches, of the program's batch; by default it is one
    microbatch. ``homes``: by parameter name, the stages that hold it already, and read it if possible.
    """

    num_stages: int
    balance: Balance = "params"
    cuts: tuple[str, ...] = ()
    place: tuple[int, ...] = ()
    microbatches: int | None = None
    max_memory: int | None = None
    pieces: int = 1
    homes: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            remedy = did_you_mean(str(self.balance), BALANCES) or f"say one of {', '.join(BALANCES)}"
            raise OptionError("Pipeline", f"balance={self.balance!r}", "there is no such balance", remedy)
        assert len(self.place) in (0, self.num_stages), self

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(set(self.place)) or self.num_stages


@dataclass(frozen=True)
class ChosenStages:
    """A program's forward in stages.

    ``masks``: for each stage a bit mask of units. ``assignment``: the stage of each forward call. ``heaviest``: the
    weight of the heaviest stage or rank. ``bound``: no split that was searched is lighter.
    """

    loads: StageLoads
    options: SplitOptions
    masks: tuple[int, ...]
    assignment: Mapping[fx.Node, int] = field(repr=False)
    heaviest: float
    bound: float

    def units(self, stage: int) -> list[int]:
        """The indices of the units of a stage."""
        return [i for i in range(len(self.loads.units)) if self.masks[stage] >> i & 1]

    def stage_of(self, units: int) -> int:
        """The stage that holds one of these units."""
        return next(stage for stage, mask in enumerate(self.masks) if mask & units)

    def tag(self, program: Program, pipeline: Pipeline) -> Program:
        """A copy of the captured program, or of the program after a few passes, whose calls have these stages."""
        captured, num_stages = self.loads.flow.program, self.options.num_stages
        by_ordinal = {captured.source(node).ordinal: stage for node, stage in self.assignment.items()}
        is_captured = program.level == captured.level
        by_name = {node.name: stage for node, stage in self.assignment.items() if is_captured}
        program = replace(program.copy(), num_stages=num_stages, options=replace(program.options, pipeline=pipeline))
        for node in program.graph.nodes:
            source = program.source(node)
            stage = by_name.get(node.name, by_ordinal.get(source.ordinal, -1))
            program.set_source(node, replace(source, stage=stage))
        return program


def choose_stages(program: Program, options: SplitOptions, flow: Flow | None = None) -> ChosenStages:
    """The stage, counted from 0, of every forward call of a captured program; none precedes that of an operand.

    A stage begins where the model calls ``stage_boundary``, and where ``options.cuts`` say. The others begin so that
    stages are even. A call that reads only inputs is in the stage of its first user. ``flow``: the program's, if it is
    known. Raises an OptionError for an unknown balance, a glob that matches no module, fewer units than stages, and too
    little memory.
    """
    flow = flow or flow_of(program)
    positions = _cut_positions(flow, options.cuts, options.num_stages)
    homes = options.homes
    stages_of_op = [frozenset(homes[name] for name in names if name in homes) for names in flow.parameters]
    constrained = [i for i, stages in enumerate(stages_of_op) if stages]
    # between two ops whose parameters different stages hold, a unit begins at the narrowest cut
    changes = [range(a + 1, b + 1) for a, b in pairwise(constrained) if stages_of_op[a] != stages_of_op[b]]
    forced = [*positions, *(min(change, key=flow.crossing.__getitem__) for change in changes)]
    fine, whole = (
        StageLoads(flow, units_of(flow, options.num_stages, forced, is_fine), options.microbatches, options.pieces)
        for is_fine in (True, False)
    )
    starts = [unit.start for unit in fine.units]
    loads, split = split_units(fine, whole, options, [starts.index(position) for position in positions])
    units = range(len(loads.units))
    masks = tuple(mask_of(i for i in units if split.stages[i] == stage) for stage in range(options.num_stages))
    assignment: dict[fx.Node, int] = {}
    ends = [unit.end for unit in loads.units]
    for i, node in enumerate(flow.ops):
        stage = split.stages[bisect_right(ends, i)]
        assignment |= dict.fromkeys((node, *filter(is_getitem, node.users)), stage)
    for node in reversed(flow.cheap):
        readers = [assignment[user] for user in node.users if user in assignment]
        assignment[node] = min(readers, default=max(split.stages))
    return ChosenStages(loads, options, masks, assignment, split.heaviest, split.bound)


def split_units(
    fine: StageLoads, whole: StageLoads, options: SplitOptions, forced: Sequence[int] = ()
) -> tuple[StageLoads, Split]:
    """The stages of units, and the units: the ``fine`` ones, or the ``whole`` blocks if these are too many.

    ``forced``: the fine units with which a stage begins.
    """
    num_units, num_stages, num_ranks = len(fine.units), options.num_stages, options.num_ranks
    if num_stages < 1 or num_units < num_stages:
        parts = f"{num_units} part{'s' * (num_units != 1)} that compute"
        what = f"it has {parts}, for {num_stages} stages on {num_ranks} rank{'s' * (num_ranks != 1)}"
        fewer = f"say from 1 to {num_units} stages: a smaller axis, or fewer chunks"
        remedy = fewer if num_units else "compute something"
        raise OptionError("the model", what, "every stage computes something", remedy)
    if num_ranks < num_stages and not forced and not options.homes:
        loads = fine if num_units <= MOST_LOOPED else whole
        return loads, _split_on_ranks(loads, options)
    searches = [in_order(fine, options, forced)]
    if not forced and (graph := side_by_side(fine, options) or side_by_side(whole, options)):
        searches.append(graph)
    splits = [(search.loads, split) for search in searches if (split := search.best()) is not None]
    if not splits and options.homes:
        return split_units(fine, whole, replace(options, homes={}), forced)
    if not splits:
        raise _too_little_memory(options, min(search.least_memory() for search in searches))
    (loads, split), (other_loads, other) = splits[0], splits[-1]
    if other.heaviest <= WORTH * split.heaviest:  # parallel towers are worth their additional crossings
        loads, split = other_loads, other
    else:
        split = replace(split, bound=min(split.bound, other.bound))
    if not forced and len(searches) == 1:  # at least the heaviest unit, or the mean weight
        weights = fine.unit_weights(options.balance)
        bound = max(*weights, sum(weights) / num_stages)
        if options.balance == "memory":
            bound = max(fine.memory(1 << i, 1) for i in range(num_units))
        split = replace(split, bound=bound)
    return loads, split


def in_order(loads: StageLoads, options: SplitOptions, forced: Sequence[int] = ()) -> SplitSearch:
    """The search among splits that keep the order of units."""
    beginnings = [(1 << i) - 1 for i in range(len(loads.units) + 1)]
    return SplitSearch(loads, options, beginnings, forced, is_chain=True)


def side_by_side(loads: StageLoads, options: SplitOptions) -> SplitSearch | None:
    """The search among all splits in which no unit comes before its operands; None if these are too many."""
    masks = ideals(len(loads.units), loads.edges)
    return None if masks is None else SplitSearch(loads, options, masks, (), is_chain=False)


@dataclass(frozen=True)
class SplitSearch:
    """The search for the best split whose stages are differences of ``masks``: sets of units that may come first."""

    loads: StageLoads
    options: SplitOptions
    masks: Sequence[int]
    forced: Sequence[int]
    is_chain: bool

    def best(self) -> Split | None:
        """The best split; None if none fits into memory."""
        states = self._path(self.load).best()
        if states is None:
            return None
        steps = enumerate(pairwise((0, *states, len(self.masks) - 1)))
        weights = [self.load(stage, start, end) for stage, (start, end) in steps]
        heaviest = max(weight for weight in weights if weight is not None)
        return Split(stages_after([self.masks[i] for i in states], len(self.loads.units)), heaviest, heaviest)

    def least_memory(self) -> int:
        """The least bytes that the fullest stage can hold."""
        least = self._path(self._memory).least()
        assert least is not None, self.options
        return least

    def _path(self, load: Load) -> MinMaxPath:
        num_stages = self.options.num_stages

        def received_bytes(start: int, end: int) -> int:
            return self.loads.received_bytes(self.masks[end] & ~self.masks[start])

        if self.is_chain:
            return chain_path(len(self.loads.units), num_stages, load, received_bytes, self.forced)
        is_monotone = self.options.balance != "memory" and load == self.load
        return ideal_path(self.masks, num_stages, load, self._weights, received_bytes, is_monotone)

    @cached_property
    def _weights(self) -> list[int]:
        """The weight of each mask."""
        weights = self.loads.unit_weights(self.options.balance)
        return [sum(weight for i, weight in enumerate(weights) if mask >> i & 1) for mask in self.masks]

    def load(self, stage: int, start: int, end: int) -> int | None:
        """The weight of a stage; None if it does not fit, or reads a parameter that only other stages hold."""
        if self._barred[stage] & self.masks[end] & ~self.masks[start]:
            return None
        is_memory, most = self.options.balance == "memory", self.options.max_memory
        memory = self._memory(stage, start, end) if is_memory or most is not None else 0
        if most is not None and memory > most:
            return None
        return memory if is_memory else self._weights[end] - self._weights[start]

    @cached_property
    def _barred(self) -> list[int]:
        """For each stage the units that read parameters which only other stages hold."""
        homes = self.options.homes
        units = self.loads.units if homes else ()
        stages = [[homes[name] for name in unit.parameters if name in homes] for unit in units]
        return [
            mask_of(i for i, holders in enumerate(stages) if any(stage not in each for each in holders))
            for stage in range(self.options.num_stages)
        ]

    def _memory(self, stage: int, start: int, end: int) -> int:
        """The bytes that a stage holds under 1F1B."""
        return self.loads.memory(self.masks[end] & ~self.masks[start], self.options.num_stages - stage)


def _split_on_ranks(loads: StageLoads, options: SplitOptions) -> Split:
    """The split with several stages a rank; each rank has as many microbatches in flight as there are ranks."""
    readers: dict[str, list[int]] = {}
    for i, unit in enumerate(loads.units):
        for name in unit.parameters:
            readers.setdefault(name, []).append(i)
    weight_of = {"params": loads.elements, "memory": loads.training_bytes}.get(options.balance, lambda name: 0)
    if options.balance == "params":
        weights = [0] * len(loads.units)
    else:
        ranks = options.num_ranks
        in_flight = min(ranks, options.microbatches or ranks) if options.balance == "memory" else 1
        weights = [in_flight * weight for weight in loads.unit_weights(options.balance)]
    for i, unit in enumerate(loads.units):
        weights[i] += sum(weight_of(name) for name in unit.parameters if len(readers[name]) == 1)
    shared = [(weight_of(name), units) for name, units in readers.items() if len(units) > 1 and weight_of(name)]

    def received(ranges: Ranges) -> int:
        return loads.received_bytes(mask_of(i for start, end in ranges for i in range(start, end)))

    split = balance_ranks(weights, options.place, shared=shared, received=received)
    rank_of = [options.place[stage] for stage in split.stages]
    masks = (mask_of(i for i, home in enumerate(rank_of) if home == rank) for rank in set(rank_of))
    fullest = max(loads.memory(mask, options.num_ranks) for mask in masks)
    if options.max_memory is not None and fullest > options.max_memory:
        raise _too_little_memory(options, fullest)
    return split


def _too_little_memory(options: SplitOptions, least: int) -> OptionError:
    assert options.max_memory is not None
    return OptionError(
        f"Pipeline(max_memory={options.max_memory})",
        f"bytes of a rank, for {options.num_stages} stages on {options.num_ranks} ranks",
        f"the fullest rank holds {least} bytes, {least - options.max_memory} more",
        f"say max_memory={least} or more, balance='memory', more stages or more ranks",
    )


def _cut_positions(flow: Flow, cuts: Sequence[str], num_stages: int) -> list[int]:
    """The positions at which the user lets stages begin, rising, without the very first.

    Raises an OptionError for a glob that matches no module, and if there are more beginnings than stages.
    """
    marks = list(accumulate((flow.program.source(node).marks for node in flow.ops), max))
    starts = {i for i in range(1, len(marks)) if marks[i] > marks[i - 1]}
    begin: dict[str, int] = {}
    for i in reversed(range(len(flow.ops))):
        begin.update(dict.fromkeys(prefixes(flow.modules[i]) or [""], i))
    for pattern in cuts:  # of nested modules the outermost
        matches = {path for path in begin if fnmatchcase(path, pattern)}
        if not matches:
            who, known = f"Pipeline(cuts={tuple(cuts)!r})", [path for path in reversed(begin) if path]
            remedy = did_you_mean(pattern, known) or f"use one of {', '.join(known[:8])}"
            raise OptionError(who, f"{pattern!r} is a glob over {len(known)} modules", "it matches nothing", remedy)
        starts |= {begin[path] for path in matches if not any(path.startswith(f"{above}.") for above in matches)}
    positions = sorted(starts - {0})
    if len(positions) >= num_stages:
        count = len(positions) + 1
        names = ", ".join(flow.modules[i] for i in positions)
        what = f"with the model's stage_boundary stages begin in {names}, and at the start"
        problem = f"there are {num_stages} stages for these {count} beginnings"
        raise OptionError(f"Pipeline(cuts={tuple(cuts)!r})", what, problem, f"say {count} stages or more, or cut less")
    return positions
