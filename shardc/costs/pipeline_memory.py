"""The bytes alive on a rank of a pipeline, call by call: the runner's step without values.

State: *blocks*, memory that some values share; a block is alive as long as something holds it. Envs hold the values of
a stage (``base``, made once a step) and of a stage for one microbatch (``envs``), by node, those of every result; sums
hold what is added up; ``waiting`` messages are made and not sent, ``posted`` ones have memory to be received in.
Invariant: ``now`` is the bytes of all blocks that are held, inputs included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardc.costs.count import nbytes
from shardc.costs.time import PART_OF_PHASE
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_parts
from shardc.language.sharding import ceil_div, chunk_of, num_shards
from shardc.program.collective import mask_padding
from shardc.program.lifetime import dies_at, is_whole, owners_of
from shardc.program.node import is_getitem, operand
from shardc.program.program import Program, Value, parameters_of
from shardc.program.stages import PARTS, PARTS_OF, SCHEDULED, Crossing, Part, Stages, is_cut_in_time
from shardc.schedules.schedule import ALL, COMPUTE, SENDS, Action, Schedule


@dataclass(eq=False, slots=True)
class Block:
    """Memory, and how many hold it."""

    nbytes: int
    holders: int = 0


Blocks = tuple[Block, ...]
Env = dict[fx.Node, Blocks]


@dataclass(slots=True)
class Memory:
    """What is held ``now``; its ``peak``; ``high``, the most since that was last asked for."""

    now: int = 0
    peak: int = 0
    high: int = 0

    def take_high(self) -> int:
        """The most bytes since this was last asked."""
        high, self.high = self.high, self.now
        return high

    def hold(self, blocks: Blocks) -> None:
        """One more holds each of them."""
        for block in blocks:
            self.now += 0 if block.holders else block.nbytes
            block.holders += 1
        self.high = max(self.high, self.now)
        self.peak = max(self.peak, self.now)

    def drop(self, blocks: Blocks) -> None:
        """One less holds each of them."""
        for block in blocks:
            block.holders -= 1
            self.now -= 0 if block.holders else block.nbytes

    def put(self, env: Env, node: fx.Node, blocks: Blocks) -> None:
        """In place of what was there."""
        self.hold(blocks)
        self.drop(env.get(node, ()))
        env[node] = blocks

    def free(self, env: Env, nodes: Iterable[fx.Node]) -> None:
        """What an env itself holds of them."""
        for node in nodes:
            self.drop(env.pop(node, ()))


Key = tuple[Crossing, int]  # of a microbatch; of none, ALL, once a step


def rank_bytes(
    stages: Stages, schedule: Schedule, owners: Mapping[Value, Value] | None = None
) -> Iterator[tuple[int, int]]:
    """For each rank of a pipeline ``saved`` and ``peak``; ``owners``, where they are known: see ``owners_of``.

    ``saved``: the most that lives between two of its actions of what microbatches under way have made; ``peak``: the
    most that lives at any time, inputs (of all microbatches), gradients and messages included. A message lives from
    where it is made until it is sent, and from where its receive is posted until it is read for the last time. Of
    stages that are offloaded nothing lives on the rank's device while they are idle.
    """
    for replay in _replays(stages, schedule, owners):
        yield replay.saved, replay.memory.peak


def bytes_over_time(stages: Stages, schedule: Schedule) -> Iterator[list[tuple[str, int]]]:
    """For each rank, in order, each of its actions with the most bytes that live in it.

    Before them is ``begin``, what is done once a step, and after them ``end``; the highest is the rank's ``peak``.
    """
    for replay in _replays(stages, schedule):
        yield replay.highs


def _replays(stages: Stages, schedule: Schedule, owners: Mapping[Value, Value] | None = None) -> Iterator[_Replay]:
    pipeline = stages.program.options.pipeline
    is_offloaded = pipeline is not None and pipeline.offload
    if owners is None:
        owners = owners_of(stages.program, (node for node in stages.program.graph.nodes if node.op == "call_function"))
    for rank in range(schedule.num_ranks):
        turns = Turns(turns_of(stages, schedule, rank)) if is_offloaded else None
        replay = _Replay(stages, schedule, rank, owners, turns)
        replay.run()
        yield replay


@dataclass(slots=True)
class _Replay:
    stages: Stages
    schedule: Schedule
    rank: int
    owners: Mapping[Value, Value]
    turns: Turns | None = None  # where stages are moved away
    away: set[int] = field(default_factory=set)  # stages that are in host memory
    given: set[Block] = field(default_factory=set)  # inputs that never move
    base: dict[int, Env] = field(default_factory=dict)
    envs: dict[tuple[int, int], Env] = field(default_factory=dict)
    sums: dict[int, Env] = field(default_factory=dict)
    own: set[tuple[int, fx.Node]] = field(default_factory=set)  # sums in memory of their own, by stage
    waiting: dict[Key, Blocks] = field(default_factory=dict)
    posted: dict[Key, Blocks] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    saved: int = 0
    highs: list[tuple[str, int]] = field(default_factory=list)
    program: Program = field(init=False)
    parameters: Mapping[fx.Node, str] = field(init=False)
    calls: dict[int, Mapping[Part, Dying]] = field(default_factory=dict)
    forgotten: dict[int, Mapping[Part, set[fx.Node]]] = field(default_factory=dict)
    in_place: dict[int, Mapping[Part, set[fx.Node]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = self.stages.program
        self.parameters = {node: name for name, node in parameters_of(self.program).items()}

    def run(self) -> None:
        """The whole step."""
        here = self.schedule.stages_on(self.rank)
        given = dict(self._inputs(here))
        for node, blocks in given.items():
            if self.turns is None or node not in self.parameters:
                self.memory.hold(blocks)
                self.given |= set(blocks)
        for stage in here:
            self.base[stage], self.sums[stage] = self._at_first(stage, given), {}
            self.away |= {stage} if self.turns else set()
        for stage in here:
            self.calls[stage], kept = with_deaths(self.stages, stage), kept_after(self.stages, stage)
            self.forgotten[stage] = {part: read_beside(self.stages, stage, part) - kept[part] for part in kept}
            self.in_place[stage] = {part: sums_in_place(self.stages, stage, part) for part in kept}
            self._begin(stage)
        self.highs.append(("begin", self.memory.take_high()))
        for action in self.schedule.actions[self.rank]:
            self._do(action)
            self.saved = max(self.saved, self._kept())
            self.highs.append((str(action), self.memory.take_high()))
        self._close(here)
        self.highs.append(("end", self.memory.take_high()))

    def _inputs(self, here: Iterable[int]) -> Iterator[tuple[fx.Node, Blocks]]:
        """Of parameters those of our stages; of what microbatches cut the pieces of all of them."""
        count, held = self.schedule.num_microbatches, {name for i in here for name in self.stages.stages[i].parameters}
        for node in self.program.placeholders:
            times = count if is_cut_in_time(self.program.sharding(node)) else 1
            is_absent = self.parameters.get(node, "") not in held | {""}
            yield node, (Block(0 if is_absent else times * nbytes(self.program.local_type(node))),)

    def _at_first(self, stage: int, given: Env) -> Env:
        """What a stage has before it begins: of what may move, parameters, blocks of its own."""
        if self.turns is None:
            return dict(given)
        held = self.stages.stages[stage].parameters
        moving = {node: (Block(given[node][0].nbytes),) for node, name in self.parameters.items() if name in held}
        return {node: blocks for node, blocks in given.items() if node not in self.parameters} | moving

    def _take_turn(self) -> None:
        """Stages that are idle leave the device, and then those that are next come there."""
        if self.turns is None:
            return
        leaving, coming = self.turns.take()
        for env in (env for stage in leaving for env in self._envs_of(stage)):
            for blocks in env.values():
                self.memory.drop(tuple(block for block in blocks if block not in self.given))
        self.away |= set(leaving)
        for stage in coming:
            self._bring_back(stage)

    def _bring_back(self, stage: int) -> None:
        """Blocks that values share are shared again; a parameter that another stage has is there already."""
        base, moved = self.base[stage], dict[Block, Block]()
        for other in self.base.keys() - self.away:
            shared = self.base[other].keys() & base.keys() & self.parameters.keys()
            moved |= {base[node][0]: self.base[other][node][0] for node in shared}
        moved |= {block: block for block in self.given}
        for env in self._envs_of(stage):
            for node, blocks in env.items():
                env[node] = tuple(moved.setdefault(block, Block(block.nbytes)) for block in blocks)
                self.memory.hold(tuple(block for block in env[node] if block not in self.given))
        self.away -= {stage}

    def _envs_of(self, stage: int) -> Iterator[Env]:
        yield from (self.base[stage], self.sums[stage])
        yield from (env for (its, _), env in self.envs.items() if its == stage)

    def _begin(self, stage: int) -> None:
        base = self.base[stage]
        self._take_turn()
        self._run(stage, "once", base)
        for microbatch in range(self.schedule.num_microbatches if self.stages.stages[stage].sums["count"] else 0):
            env: Env = {}
            self._run(stage, "count", env, microbatch)
            self._add(stage, "count", env)
            self._forget(stage, "count", env)
        self._take_sums(stage)
        self._run(stage, "settle", base)

    def _do(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self._take_turn()
            for part in PARTS_OF[action.kind]:
                self._compute(action.stage, action.microbatch, part)
        elif action.kind in SENDS:
            way = Crossing(action.stage, action.peer or 0, PART_OF_PHASE[action.phase])
            self.memory.drop(self.waiting.pop((way, action.microbatch)))
        else:
            self._post((Crossing(action.peer or 0, action.stage, PART_OF_PHASE[action.phase]), action.microbatch))

    def _post(self, key: Key) -> None:
        blocks = tuple(Block(nbytes(self.program.local_type(node))) for node in self.stages.crossings[key[0]])
        self.posted[key] = blocks
        self.memory.hold(blocks)

    def _compute(self, stage: int, microbatch: int, part: Part) -> None:
        env = self.envs.setdefault((stage, microbatch), {})
        for way in self.stages.crossings:
            if (way.target, way.part) == (stage, part):
                self._receive((way, microbatch), env)
        self._run(stage, part, env, microbatch)
        self._add(stage, part, env)
        for way in self.stages.crossings:
            if (way.source, way.part) == (stage, part):
                self._hand_over((way, microbatch), env)
        self._forget(stage, part, env)

    def _hand_over(self, key: Key, env: Env) -> None:
        """To a stage of the same rank at once; else it waits to be sent."""
        way = key[0]
        blocks = tuple(block for node in self.stages.crossings[way] for block in self._find(way.source, env, node))
        self.memory.hold(blocks)
        is_here = self.schedule.place[way.target] == self.rank
        (self.posted if is_here else self.waiting)[key] = blocks

    def _receive(self, key: Key, env: Env) -> None:
        blocks = self.posted.pop(key)
        for node, block in zip(self.stages.crossings[key[0]], blocks, strict=True):
            self.memory.put(env, node, (block,))
        self.memory.drop(blocks)

    def _run(self, stage: int, part: Part, env: Env, microbatch: int = ALL) -> None:
        for node, dead in self.calls[stage][part]:
            is_shown = node.target is mask_padding and microbatch != ALL and self._is_full(node, microbatch)
            made = self._find(stage, env, operand(node)) if is_shown else self._made(stage, env, node)
            self.memory.put(env, node, made)
            self.memory.free(env, dead)

    def _is_full(self, node: fx.Node, microbatch: int) -> bool:
        """Whether no rank has padding in a microbatch; the last one has least data."""
        (_, axes, _, size, *_), mesh = node.args, self.program.mesh
        assert mesh is not None and isinstance(axes, tuple) and isinstance(size, int), node
        parts, ranks = parse_parts(axes, mesh), mesh.size // mesh.axis_size(MICROBATCH)
        length = chunk_of(size, parts, mesh, (microbatch + 1) * ranks - 1)[1]
        return length == ceil_div(size, num_shards(parts))

    def _made(self, stage: int, env: Env, node: fx.Node) -> Blocks:
        """What a call returns: memory of its own, or that of an operand that it shows."""
        if is_getitem(node):
            return (self._find(stage, env, operand(node))[int(node.args[1])],)  # type: ignore[arg-type]
        shown = {self.owners[self.program.value(each)]: each for each in node.all_input_nodes}
        found = []
        for i, type_ in enumerate(self.program.types(node)):
            source = None if type_ is None else shown.get(self.owners[node, i])
            new = Block(nbytes(self.program.local_type(node, i)))
            found.append(new if source is None else self._find(stage, env, source)[0])
        return tuple(found)

    def _add(self, stage: int, part: Part, env: Env) -> None:
        """To the sums over microbatches: the first summand is kept, the second makes a sum that others are added to."""
        sums = self.sums[stage]
        in_place = self.in_place[stage][part]
        for into in self.stages.stages[stage].sums[part]:
            before, added = sums.get(into), operand(into)
            if before is None:
                self.memory.put(sums, into, self._find(stage, env, added))
                self.own |= {(stage, into)} if into in in_place else set()
            elif (stage, into) not in self.own or into.args[2] != "sum":
                self.own.add((stage, into))
                self.memory.put(sums, into, (Block(nbytes(self.program.local_type(added))),))

    def _close(self, here: Iterable[int]) -> None:
        """What stages sum together, reductions over ranks, gradients."""
        for way in ways_after(self.stages):
            if way.source in here:
                self._take_turn()
                self._take_sums(way.source)
                self._hand_over((way, ALL), self.base[way.source])
            elif way.target in here:
                self._post((way, ALL))
        for stage in here:
            self._take_turn()
            self._take_sums(stage)
            for way in self.stages.crossings:
                if (way.target, way.part) == (stage, "after"):
                    self._receive((way, ALL), self.base[stage])
            self._run(stage, "after", self.base[stage])

    def _take_sums(self, stage: int) -> None:
        for into, blocks in self.sums[stage].items():
            self.memory.put(self.base[stage], into, blocks)

    def _forget(self, stage: int, part: Part, env: Env) -> None:
        """What was read right after a part and is not read again."""
        self.memory.free(env, self.forgotten[stage][part])

    def _find(self, stage: int, env: Env, node: fx.Node) -> Blocks:
        return env.get(node) or self.base[stage][node]

    def _kept(self) -> int:
        """Bytes of what microbatches have made, and only they hold."""
        here = self.base.keys() - self.away
        base = {block for stage in here for held in self.base[stage].values() for block in held}
        envs = (env for (stage, _), env in self.envs.items() if stage in here)
        blocks = {block for env in envs for held in env.values() for block in held} - base
        return sum(block.nbytes for block in blocks)


Dying = Sequence[tuple[fx.Node, tuple[fx.Node, ...]]]  # calls in order, each with the values that die after it


def read_beside(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """What is read right after a part: what it adds to sums, and what is sent then."""
    ways = stages.crossings.items()
    sent = {node for way, nodes in ways if (way.source, way.part) == (index, part) for node in nodes}
    return sent | {operand(node) for node in stages.stages[index].sums[part]}


def kept_after(stages: Stages, index: int) -> dict[Part, set[fx.Node]]:
    """For each part that runs for every microbatch, the values that later parts of it read, or that are returned."""
    kept: dict[Part, set[fx.Node]] = {"count": set()}
    results = enumerate(stages.program.results)
    later = {node for i, node in results if node is not None and stages.home.get(i) == index}
    for part in reversed(SCHEDULED):
        kept[part] = later
        read = {each for node in stages.stages[index].parts[part] for each in node.all_input_nodes}
        later = later | read | read_beside(stages, index, part)
    return kept


def sums_in_place(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """Of the sums that a part adds to, those that may be made in the memory of their first summand."""
    program, calls = stages.program, stages.stages[index].parts[part]
    places = {node: i for i, node in enumerate(calls)}
    found: set[fx.Node] = set()
    for into in stages.stages[index].sums[part]:
        added = operand(into)
        if is_whole(added, program) and dies_at(added, into, places | {into: len(calls)}):
            found.add(into)
    return found


def with_deaths(stages: Stages, index: int) -> Mapping[Part, Dying]:
    """The calls of each part of a stage; what is made once a step lives to its end."""
    kept = kept_after(stages, index)
    found: dict[Part, Dying] = {part: [(node, ()) for node in stages.stages[index].parts[part]] for part in PARTS}
    for part, later in kept.items():
        seen, dying = later | read_beside(stages, index, part), list[tuple[fx.Node, tuple[fx.Node, ...]]]()
        for node in reversed(stages.stages[index].parts[part]):
            used = {node, *node.all_input_nodes}
            dying.append((node, tuple(used - seen)))
            seen |= used
        found[part] = dying[::-1]
    return found


def ways_after(stages: Stages) -> list[Crossing]:
    """What stages send each other once all microbatches are done, in the order in which it is sent."""
    return sorted((way for way in stages.crossings if way.part == "after"), key=lambda way: (way.source, way.target))


def turns_of(stages: Stages, schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank in the order in which it works on them in a step.

    Each begins; then come the computations of the schedule; then what is sent once all microbatches are done; then each
    stage closes.
    """
    here = tuple(schedule.stages_on(rank))
    scheduled = (action.stage for action in schedule.actions[rank] if action.kind in COMPUTE)
    sending = (way.source for way in ways_after(stages) if way.source in here)
    return (*here, *scheduled, *sending, *here)


class Turns:
    """The stages of a rank that are on its device: the one whose turn it is, and the one whose turn is next.

    State: ``here``, these; ``left``, the turns to come.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self.left, self.here = list(reversed(turns)), tuple[int, ...]()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Begin the next turn: the stages that leave the device, and after that those that come there."""
        before, turn = self.here, self.left.pop()
        self.here = tuple(dict.fromkeys((turn, *self.left[-1:])))
        leave = tuple(stage for stage in before if stage not in self.here)
        return leave, tuple(stage for stage in self.here if stage not in before)
