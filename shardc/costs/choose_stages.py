"""Which stage of a pipeline each forward op belongs to, as balanced as its units allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise

from torch import fx

from shardc.costs.stage_units import Flow, StageLoads, flow_of, mask_of, units_of
from shardc.language.errors import OptionError, did_you_mean
from shardc.options import BALANCES
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.schedules.balance import MinMaxPath, Split, chain_path, ideal_path, ideals, stages_after
from shardc.schedules.balance_ranks import MOST_LOOPED, Ranges, balance_ranks

WORTH = 0.98  # of the weight of the heaviest stage: what crosses more cuts must save that much


def choose_stages(
    program: Program, num_stages: int, *, balance: str = "params", cuts: Sequence[str] | None = None,
    place: Sequence[int] = (), microbatches: int | None = None, max_memory: int | None = None, pieces: int = 1,
    homes: Mapping[str, frozenset[int]] | None = None,
) -> Mapping[fx.Node, int]:  # fmt: skip
    """The stage, from 0, of every forward call of a captured program; no less than that of any operand.

    A new stage begins where the model calls ``stage_boundary``, and at the start of each module that a glob of ``cuts``
    matches; the others begin so that stages are even. ``balance``: in what. A parameter that several units share counts
    at the first; with several stages a rank, and in memory, wherever it is held. ``place``: the rank of each stage, one
    each by default. ``max_memory``: bytes that a rank may hold of parameters, gradients, Adam's states and what is
    saved of the microbatches in flight under 1F1B. ``pieces``: in how many, over ranks and microbatches, the program's
    batch is cut; by default it is one microbatch. ``homes``: for parameters by name the stages that hold them already,
    and read them where that can be. Calls of inputs alone go where their first user is. Raises an
    OptionError for an unknown balance, a glob without a module, a model of fewer units than stages and for too little
    memory.
    """
    wish = Wish(num_stages, balance, tuple(cuts or ()), tuple(place), microbatches, max_memory, pieces, homes or {})
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
    """A program's forward in stages, each a mask of units.

    ``heaviest``: what the heaviest stage or rank weighs, in what is even; no split that was looked for is below
    ``bound``.
    """

    loads: StageLoads
    wish: Wish
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


def split_stages(program: Program, wish: Wish) -> ChosenStages:
    """As ``choose_stages``, with the units and where they were cut."""
    flow = flow_of(program)
    places = places_of_cuts(flow, wish.cuts, wish.num_stages)
    starting = [*places, *places_of_homes(flow, wish.homes)]
    fine, whole = (
        StageLoads(flow, units_of(flow, wish.num_stages, starting, is_fine), wish.microbatches, wish.pieces)
        for is_fine in (True, False)
    )
    starts = [unit.start for unit in fine.units]
    loads, found = split_units(fine, whole, wish, [starts.index(at) for at in places])
    masks = tuple(mask_of({i for i, its in enumerate(found.stages) if its == s}) for s in range(wish.num_stages))
    ends = [unit.end for unit in loads.units]
    return ChosenStages(loads, wish, masks, _assignment(flow, ends, found.stages), found.heaviest, found.bound)


def split_units(
    fine: StageLoads, whole: StageLoads, wish: Wish, forced: Sequence[int] = ()
) -> tuple[StageLoads, Split]:
    """The stages of units, and which units: those that are ``fine``, or the ``whole`` blocks where these are too many.

    ``forced``: the fine units with which a stage begins.
    """
    _check_stages(len(fine.units), wish)
    if wish.num_ranks < wish.num_stages and not forced and not wish.homes:
        loads = fine if len(fine.units) <= MOST_LOOPED else whole
        return loads, _on_ranks(loads, wish)
    walks = [in_order(fine, wish, forced)]
    walks += filter(None, [] if forced else [side_by_side(fine, wish) or side_by_side(whole, wish)])
    found = [(each.loads, best) for each in walks if (best := each.best()) is not None]
    if not found and wish.homes:
        return split_units(fine, whole, replace(wish, homes={}), forced)
    if not found:
        raise _too_little(wish, min(each.least_memory() for each in walks))
    loads, best = _lightest(found)
    return loads, best if forced or len(walks) > 1 else replace(best, bound=_bound(fine, wish))


def in_order(loads: StageLoads, wish: Wish, forced: Sequence[int] = ()) -> Walks:
    """The walks through the units in their order."""
    beginnings = [(1 << i) - 1 for i in range(len(loads.units) + 1)]
    return Walks(loads, wish, beginnings, forced, is_chain=True)


def side_by_side(loads: StageLoads, wish: Wish) -> Walks | None:
    """The walks through all that may be done before the rest, if that can be counted."""
    masks = ideals(len(loads.units), loads.edges)
    return None if masks is None else Walks(loads, wish, masks, (), is_chain=False)


def _lightest(found: Sequence[tuple[StageLoads, Split]]) -> tuple[StageLoads, Split]:
    """Units in their order, unless the heaviest stage is lighter by enough where towers go side by side."""
    (_, first), (_, last) = found[0], found[-1]
    if last.heaviest <= WORTH * first.heaviest:
        return found[-1]
    return found[0][0], replace(first, bound=min(first.bound, last.bound))


def _bound(loads: StageLoads, wish: Wish) -> float:
    """The mean or the heaviest unit; of memory the heaviest unit alone."""
    if wish.balance == "memory":
        return max(loads.memory(1 << i, 1) for i in range(len(loads.units)))
    each = loads.each(wish.balance)
    return max(*each, sum(each) / wish.num_stages)


@dataclass(frozen=True)
class Walks:
    """Walks through what may be done after some stages: through ``masks``, which for a chain are its beginnings."""

    loads: StageLoads
    wish: Wish
    masks: Sequence[int]
    forced: Sequence[int]
    is_chain: bool

    def walk(self, load: Callable[[int, int, int], int | None]) -> MinMaxPath:
        """The walk of the least greatest load."""
        if self.is_chain:
            return chain_path(len(self.loads.units), self.wish.num_stages, load, self.received, self.forced)
        rises = self.wish.balance != "memory" and load == self.load
        return ideal_path(self.masks, self.wish.num_stages, load, self.behind, self.received, rises)

    @cached_property
    def behind(self) -> list[int]:
        """What is done weighs so much."""
        each = self.loads.each(self.wish.balance)
        return [sum(weight for i, weight in enumerate(each) if mask >> i & 1) for mask in self.masks]

    def best(self) -> Split | None:
        """The best split; None where none fits into memory."""
        found = self.walk(self.load).best()
        if found is None:
            return None
        states = (0, *found, len(self.masks) - 1)
        weights = [self.load(stage, start, end) for stage, (start, end) in enumerate(pairwise(states))]
        heaviest = max(weight for weight in weights if weight is not None)
        return Split(stages_after([self.masks[i] for i in found], len(self.loads.units)), heaviest, heaviest)

    def least_memory(self) -> int:
        """What the fullest stage holds at least."""
        least = self.walk(self.memory).least()
        assert least is not None, self.wish
        return least

    def load(self, stage: int, start: int, end: int) -> int | None:
        """What a stage weighs; None where it does not fit, or where another stage holds what it reads."""
        if self.barred[stage] & self.masks[end] & ~self.masks[start]:
            return None
        is_memory, most = self.wish.balance == "memory", self.wish.max_memory
        held = self.memory(stage, start, end) if is_memory or most is not None else 0
        if most is not None and held > most:
            return None
        return held if is_memory else self.behind[end] - self.behind[start]

    @cached_property
    def barred(self) -> list[int]:
        """For each stage the units that read what only others hold."""
        known = self.wish.homes
        units = self.loads.units if known else ()
        held = [[known[name] for name in unit.parameters if name in known] for unit in units]
        return [
            mask_of({i for i, homes in enumerate(held) if any(stage not in home for home in homes)})
            for stage in range(self.wish.num_stages)
        ]

    def memory(self, stage: int, start: int, end: int) -> int:
        """The bytes that a stage holds under 1F1B."""
        return self.loads.memory(self.masks[end] & ~self.masks[start], self.wish.num_stages - stage)

    def received(self, start: int, end: int) -> int:
        """The bytes that a stage is sent."""
        return self.loads.received_bytes(self.masks[end] & ~self.masks[start])


def _on_ranks(loads: StageLoads, wish: Wish) -> Split:
    """Several stages a rank; of every rank as many microbatches are in flight as there are ranks."""
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

    def received(runs: Ranges) -> int:
        return loads.received_bytes(mask_of({i for start, end in runs for i in range(start, end)}))

    found = balance_ranks(weights, wish.place, shared=shared, received=received)
    _check_memory(loads, wish, found.stages)
    return found


def _check_memory(loads: StageLoads, wish: Wish, stages: Sequence[int]) -> None:
    """An OptionError where a rank with several stages holds more than is allowed."""
    ranks = [wish.place[stage] for stage in stages]
    held = [
        loads.memory(mask_of({i for i, its in enumerate(ranks) if its == rank}), wish.num_ranks) for rank in set(ranks)
    ]
    if wish.max_memory is not None and max(held) > wish.max_memory:
        raise _too_little(wish, max(held))


def _check_stages(num_units: int, wish: Wish) -> None:
    if wish.num_stages < 1 or num_units < wish.num_stages:
        raise OptionError(
            "the model",
            f"it has {num_units} part{'s' * (num_units != 1)} that compute, for {wish.num_stages} stages on "
            f"{wish.num_ranks} rank{'s' * (wish.num_ranks != 1)}",
            "every stage computes something",
            f"say from 1 to {num_units} stages: a smaller axis, or fewer chunks" if num_units else "compute something",
        )


def _too_little(wish: Wish, least: int) -> OptionError:
    assert wish.max_memory is not None
    return OptionError(
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


def places_of_cuts(flow: Flow, cuts: Sequence[str], num_stages: int) -> list[int]:
    """The places of the ops with which the user lets a stage begin, rising, the very first left out.

    ``cuts``: globs of module paths. An OptionError for one that matches nothing and for more places than cuts.
    """
    places = sorted({*_matched(flow, cuts), *_marked(flow)})
    if len(places) >= num_stages:
        raise _too_many(cuts, [flow.program.source(flow.ops[i]).module for i in places], num_stages)
    return places


def places_of_homes(flow: Flow, homes: Mapping[str, frozenset[int]]) -> list[int]:
    """The places where units begin so that stages may hold what they hold: ``homes`` of parameters by name.

    Between two ops of which other stages hold the parameters it is where the fewest bytes cross.
    """
    held = [frozenset(homes[name] for name in names if name in homes) for names in flow.parameters]
    readers = [i for i, stages in enumerate(held) if stages]
    return [min(range(a + 1, b + 1), key=flow.crossing.__getitem__) for a, b in pairwise(readers) if held[a] != held[b]]


def _matched(flow: Flow, cuts: Sequence[str]) -> set[int]:
    """The places at which modules that the globs match begin, of nested ones the outermost; not the very first."""
    begin: dict[str, int] = {}
    for i in reversed(range(len(flow.ops))):
        path = flow.program.source(flow.ops[i]).module
        begin.update({path[:end]: i for end, letter in enumerate(f"{path}.") if letter == "."})
    found: set[int] = set()
    for pattern in cuts:
        matched = {path for path in begin if fnmatchcase(path, pattern)}
        if not matched:
            who, known = f"Pipeline(cuts={tuple(cuts)!r})", [path for path in dict.fromkeys(reversed(begin)) if path]
            remedy = did_you_mean(pattern, known) or f"use one of {', '.join(known[:8])}"
            raise OptionError(who, f"{pattern!r} is a glob over {len(known)} modules", "it matches nothing", remedy)
        found |= {begin[path] for path in matched if not any(path.startswith(f"{above}.") for above in matched)}
    return found - {0}


def _marked(flow: Flow) -> set[int]:
    """The places of the first ops after the model's own marks; not the very first."""
    marks = list(accumulate((flow.program.source(node).marks for node in flow.ops), max))
    return {i for i in range(1, len(marks)) if marks[i] > marks[i - 1]}


def _too_many(cuts: Sequence[str], modules: Sequence[str], num_stages: int) -> OptionError:
    return OptionError(
        f"Pipeline(cuts={tuple(cuts)!r})",
        f"with the model's stage_boundary stages begin in {', '.join(modules)}, and at the start",
        f"there are {num_stages} stages for these {len(modules) + 1} beginnings",
        f"say {len(modules) + 1} stages or more, or cut less",
    )
