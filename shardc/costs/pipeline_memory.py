"""Bytes alive on a rank of a pipeline, call by call: the runner's step, replayed with blocks of memory for values.

State: a *block* is memory that some values share; it is alive as long as something holds it. An ``Env`` maps nodes to
the blocks of their results: ``base`` of a stage (values made once a step), ``envs`` of a stage for one microbatch,
``sums`` of what is added up. ``waiting`` messages are computed and not yet sent; ``posted`` ones have memory to be
received in. Invariant: ``memory.now`` is the bytes of all blocks that are held, inputs included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.costs.count import nbytes
from shardc.costs.stage_schedule import PART_OF_PHASE
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_parts
from shardc.language.sharding import ceil_div, chunk_of, num_shards
from shardc.language.words import PARTS, Part
from shardc.program.collective import mask_padding
from shardc.program.lifetime import dies_at, is_whole, owners_of
from shardc.program.node import is_getitem, operand
from shardc.program.program import Value, parameters_of
from shardc.program.stages import PARTS_OF, SCHEDULED, Crossing, Stages, is_cut_in_time
from shardc.schedules.schedule import ALL, COMPUTE, SENDS, Action, Schedule


def rank_bytes(
    stages: Stages, schedule: Schedule, owners: Mapping[Value, Value] | None = None
) -> Iterator[tuple[int, int]]:
    """For each rank of a pipeline the bytes ``saved`` and ``peak``; ``owners``: see ``owners_of``, if known already.

    ``saved``: the most that microbatches under way keep between two actions of the rank. ``peak``: the most that is
    alive at any time, with the inputs of all microbatches, gradients and messages. A message is alive from its
    computation until it is sent, and from its receive until its last reader. An offloaded stage has no memory on the
    device while it is idle.
    """
    for replay in _replays(stages, schedule, owners):
        yield replay.saved, replay.memory.peak


def bytes_over_time(stages: Stages, schedule: Schedule) -> Iterator[list[tuple[str, int]]]:
    """For each rank its actions in order, each with the most bytes that are alive while it runs.

    ``begin`` before them and ``end`` after them are what runs once a step. The highest value is the rank's ``peak``.
    """
    for replay in _replays(stages, schedule):
        yield replay.highs


def _replays(stages: Stages, schedule: Schedule, owners: Mapping[Value, Value] | None = None) -> Iterator[_Replay]:
    pipeline = stages.program.options.pipeline
    is_offloaded = pipeline is not None and pipeline.offload
    if owners is None:
        owners = owners_of(stages.program, (node for node in stages.program.graph.nodes if node.op == "call_function"))
    for rank in range(schedule.num_ranks):
        resident = ResidentStages(stage_turns(stages, schedule, rank)) if is_offloaded else None
        replay = _Replay(stages, schedule, rank, owners, resident)
        replay.run()
        yield replay


@dataclass(eq=False, slots=True)
class Block:
    """Memory, and the number of its holders."""

    nbytes: int
    holders: int = 0


Blocks = tuple[Block, ...]
Env = dict[fx.Node, Blocks]
Message = tuple[Crossing, int]  # of a microbatch, or ALL for one that is sent once a step


@dataclass(slots=True)
class Memory:
    """The bytes held ``now``, their ``peak``, and ``high``: the most since ``take_high`` was last called."""

    now: int = 0
    peak: int = 0
    high: int = 0

    def take_high(self) -> int:
        """The most bytes since the last call."""
        high, self.high = self.high, self.now
        return high

    def hold(self, blocks: Blocks) -> None:
        """Add a holder to each block."""
        for block in blocks:
            self.now += 0 if block.holders else block.nbytes
            block.holders += 1
        self.high = max(self.high, self.now)
        self.peak = max(self.peak, self.now)

    def drop(self, blocks: Blocks) -> None:
        """Remove a holder from each block."""
        for block in blocks:
            block.holders -= 1
            self.now -= 0 if block.holders else block.nbytes

    def put(self, env: Env, node: fx.Node, blocks: Blocks) -> None:
        """Replace the blocks of a node."""
        self.hold(blocks)
        self.drop(env.get(node, ()))
        env[node] = blocks

    def free(self, env: Env, nodes: Iterable[fx.Node]) -> None:
        """Remove nodes from an env."""
        for node in nodes:
            self.drop(env.pop(node, ()))


class _Replay:
    """One rank's step; see the state and the invariant above."""

    def __init__(
        self, stages: Stages, schedule: Schedule, rank: int, owners: Mapping[Value, Value],
        resident: ResidentStages | None,
    ) -> None:  # fmt: skip
        self.stages, self.program, self.schedule, self.rank = stages, stages.program, schedule, rank
        self.owners, self.resident = owners, resident  # resident: where stages are offloaded
        self.parameters = {node: name for name, node in parameters_of(self.program).items()}
        self.away: set[int] = set()  # stages in host memory
        self.fixed: set[Block] = set()  # inputs that are never offloaded
        self.base: dict[int, Env] = {}
        self.envs: dict[tuple[int, int], Env] = {}
        self.sums: dict[int, Env] = {}
        self.own: set[tuple[int, fx.Node]] = set()  # sums in memory of their own, by stage
        self.waiting: dict[Message, Blocks] = {}
        self.posted: dict[Message, Blocks] = {}
        self.calls: dict[int, Mapping[Part, CallsWithDeaths]] = {}
        self.forgotten: dict[int, Mapping[Part, set[fx.Node]]] = {}  # what is read right after a part and not again
        self.in_place: dict[int, Mapping[Part, set[fx.Node]]] = {}
        self.memory, self.saved = Memory(), 0
        self.highs: list[tuple[str, int]] = []

    def run(self) -> None:
        """Replay the whole step."""
        here = self.schedule.stages_on(self.rank)
        names = {name for stage in here for name in self.stages.stages[stage].parameters}
        inputs: Env = {}  # empty for parameters of other ranks; of data, the pieces of all microbatches
        for node in self.program.placeholders:
            times = self.schedule.num_microbatches if is_cut_in_time(self.program.sharding(node)) else 1
            is_absent = node in self.parameters and self.parameters[node] not in names
            inputs[node] = (Block(0 if is_absent else times * nbytes(self.program.local_type(node))),)
            if self.resident is None or node not in self.parameters:
                self.memory.hold(inputs[node])
                self.fixed |= set(inputs[node])
        for stage in here:
            self.base[stage], self.sums[stage] = dict(inputs), {}
            if self.resident is not None:  # it has blocks of its own for its parameters, and none for others
                own = self.stages.stages[stage].parameters
                for node, name in self.parameters.items():
                    (block,) = self.base[stage].pop(node)
                    self.base[stage] |= {node: (Block(block.nbytes),)} if name in own else {}
                self.away.add(stage)
        for stage in here:
            kept = kept_after(self.stages, stage)
            self.calls[stage] = with_deaths(self.stages, stage)
            self.forgotten[stage] = {part: read_beside(self.stages, stage, part) - kept[part] for part in kept}
            self.in_place[stage] = {part: sums_in_place(self.stages, stage, part) for part in kept}
            self._begin(stage)
        self.highs.append(("begin", self.memory.take_high()))
        for action in self.schedule.actions[self.rank]:
            self._do(action)
            on_device = self.base.keys() - self.away
            lasting = {block for stage in on_device for blocks in self.base[stage].values() for block in blocks}
            envs = (env for (stage, _), env in self.envs.items() if stage in on_device)
            saved = {block for env in envs for blocks in env.values() for block in blocks} - lasting
            self.saved = max(self.saved, sum(block.nbytes for block in saved))  # only microbatches under way hold these
            self.highs.append((str(action), self.memory.take_high()))
        self._end(here)
        self.highs.append(("end", self.memory.take_high()))

    def _take_turn(self) -> None:
        """Move idle stages to the host, and then the next one back to the device."""
        if self.resident is None:
            return
        leaving, returning = self.resident.advance()
        for env in (env for stage in leaving for env in self._envs_of(stage)):
            for blocks in env.values():
                self.memory.drop(tuple(block for block in blocks if block not in self.fixed))
        self.away |= set(leaving)
        for stage in returning:
            self._bring_back(stage)

    def _bring_back(self, stage: int) -> None:
        """Allocate new blocks, shared as before. A parameter that another stage has is on the device already."""
        base, moved = self.base[stage], dict[Block, Block]()
        for other in self.base.keys() - self.away:
            shared = self.base[other].keys() & base.keys() & self.parameters.keys()
            moved |= {base[node][0]: self.base[other][node][0] for node in shared}
        moved |= {block: block for block in self.fixed}
        for env in self._envs_of(stage):
            for node, blocks in env.items():
                env[node] = tuple(moved.setdefault(block, Block(block.nbytes)) for block in blocks)
                self.memory.hold(tuple(block for block in env[node] if block not in self.fixed))
        self.away -= {stage}

    def _envs_of(self, stage: int) -> Iterator[Env]:
        yield from (self.base[stage], self.sums[stage])
        yield from (env for (owner, _), env in self.envs.items() if owner == stage)

    def _begin(self, stage: int) -> None:
        """Run what a stage does once a step before its first microbatch."""
        base = self.base[stage]
        self._take_turn()
        self._run(stage, "once", base)
        for microbatch in range(self.schedule.num_microbatches if self.stages.stages[stage].sums["count"] else 0):
            env: Env = {}
            self._run(stage, "count", env, microbatch)
            self._add(stage, "count", env)
            self.memory.free(env, self.forgotten[stage]["count"])
        self._take_sums(stage)
        self._run(stage, "settle", base)

    def _do(self, action: Action) -> None:
        """Run one action of the schedule."""
        if action.kind in COMPUTE:
            self._take_turn()
            for part in PARTS_OF[action.kind]:
                self._compute(action.stage, action.microbatch, part)
        elif action.kind in SENDS:
            way = Crossing(action.stage, action.peer or 0, PART_OF_PHASE[action.phase])
            self.memory.drop(self.waiting.pop((way, action.microbatch)))
        else:
            self._post((Crossing(action.peer or 0, action.stage, PART_OF_PHASE[action.phase]), action.microbatch))

    def _post(self, message: Message) -> None:
        """Allocate the memory in which a message is received."""
        blocks = tuple(Block(nbytes(self.program.local_type(node))) for node in self.stages.crossings[message[0]])
        self.posted[message] = blocks
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
        self.memory.free(env, self.forgotten[stage][part])

    def _hand_over(self, message: Message, env: Env) -> None:
        """Give a message to a stage of the same rank at once, or let it wait until it is sent."""
        way = message[0]
        blocks = tuple(block for node in self.stages.crossings[way] for block in self._find(way.source, env, node))
        self.memory.hold(blocks)
        is_here = self.schedule.place[way.target] == self.rank
        (self.posted if is_here else self.waiting)[message] = blocks

    def _receive(self, message: Message, env: Env) -> None:
        blocks = self.posted.pop(message)
        for node, block in zip(self.stages.crossings[message[0]], blocks, strict=True):
            self.memory.put(env, node, (block,))
        self.memory.drop(blocks)

    def _run(self, stage: int, part: Part, env: Env, microbatch: int = ALL) -> None:
        for node, dead in self.calls[stage][part]:
            has_no_padding = node.target is mask_padding and microbatch != ALL and self._is_full(node, microbatch)
            blocks = self._find(stage, env, operand(node)) if has_no_padding else self._results(stage, env, node)
            self.memory.put(env, node, blocks)
            self.memory.free(env, dead)

    def _is_full(self, node: fx.Node, microbatch: int) -> bool:
        """Whether no rank has padding in a microbatch. The last rank has the least data."""
        (_, axes, _, size, *_), mesh = node.args, self.program.mesh
        assert mesh is not None and isinstance(axes, tuple) and isinstance(size, int), node
        parts, ranks = parse_parts(axes, mesh), mesh.size // mesh.axis_size(MICROBATCH)
        length = chunk_of(size, parts, mesh, (microbatch + 1) * ranks - 1)[1]
        return length == ceil_div(size, num_shards(parts))

    def _results(self, stage: int, env: Env, node: fx.Node) -> Blocks:
        """The blocks of a call's results: new ones, or those of the operand that a view shows."""
        if is_getitem(node):
            return (self._find(stage, env, operand(node))[int(node.args[1])],)  # type: ignore[arg-type]
        shown = {self.owners[self.program.value(each)]: each for each in node.all_input_nodes}
        results = []
        for i, type_ in enumerate(self.program.types(node)):
            source = None if type_ is None else shown.get(self.owners[node, i])
            new = Block(nbytes(self.program.local_type(node, i)))
            results.append(new if source is None else self._find(stage, env, source)[0])
        return tuple(results)

    def _add(self, stage: int, part: Part, env: Env) -> None:
        """Add to the sums over microbatches: the first summand is kept, the second allocates the sum."""
        sums, in_place = self.sums[stage], self.in_place[stage][part]
        for into in self.stages.stages[stage].sums[part]:
            before, added = sums.get(into), operand(into)
            if before is None:
                self.memory.put(sums, into, self._find(stage, env, added))
                self.own |= {(stage, into)} if into in in_place else set()
            elif (stage, into) not in self.own or into.args[2] != "sum":
                self.own.add((stage, into))
                self.memory.put(sums, into, (Block(nbytes(self.program.local_type(added))),))

    def _end(self, here: Iterable[int]) -> None:
        """Run what stages do once a step after the last microbatch: sums over stages and over ranks."""
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

    def _find(self, stage: int, env: Env, node: fx.Node) -> Blocks:
        return env.get(node) or self.base[stage][node]


CallsWithDeaths = Sequence[tuple[fx.Node, tuple[fx.Node, ...]]]  # in order, each with the values that die after it


def with_deaths(stages: Stages, index: int) -> Mapping[Part, CallsWithDeaths]:
    """The calls of each part of a stage with the values that die after them. Values made once a step never die."""
    kept = kept_after(stages, index)
    parts = stages.stages[index].parts
    calls: dict[Part, CallsWithDeaths] = {part: [(node, ()) for node in parts[part]] for part in PARTS}
    for part, later in kept.items():
        live, dying = later | read_beside(stages, index, part), list[tuple[fx.Node, tuple[fx.Node, ...]]]()
        for node in reversed(parts[part]):
            used = {node, *node.all_input_nodes}
            dying.append((node, tuple(used - live)))
            live |= used
        calls[part] = dying[::-1]
    return calls


def kept_after(stages: Stages, index: int) -> dict[Part, set[fx.Node]]:
    """For each part that runs for every microbatch, the values that later parts of it read, or that are returned."""
    kept: dict[Part, set[fx.Node]] = {"count": set()}
    results = enumerate(stages.program.results)
    later = {node for i, node in results if node is not None and stages.home.get(i) == index}
    for part in reversed(SCHEDULED):
        kept[part] = later
        reads = {read for node in stages.stages[index].parts[part] for read in node.all_input_nodes}
        later = later | reads | read_beside(stages, index, part)
    return kept


def read_beside(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """The values that are read right after a part: those that are sent, and those that are added to sums."""
    ways = [way for way in stages.crossings if (way.source, way.part) == (index, part)]
    sent = {node for way in ways for node in stages.crossings[way]}
    return sent | {operand(node) for node in stages.stages[index].sums[part]}


def sums_in_place(stages: Stages, index: int, part: Part) -> set[fx.Node]:
    """The sums of a part that may be accumulated in the memory of their first summand."""
    program, calls = stages.program, stages.stages[index].parts[part]
    positions = {node: i for i, node in enumerate(calls)}
    return {
        sum_
        for sum_ in stages.stages[index].sums[part]
        if is_whole(operand(sum_), program) and dies_at(operand(sum_), sum_, positions | {sum_: len(calls)})
    }


def ways_after(stages: Stages) -> list[Crossing]:
    """The crossings that are sent once all microbatches are done, in the order in which they are sent."""
    return sorted((way for way in stages.crossings if way.part == "after"), key=lambda way: (way.source, way.target))


def stage_turns(stages: Stages, schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank in the order in which it works on them in a step.

    Each stage begins. Then come the computations of the schedule, the messages after all microbatches, and the end of
    each stage.
    """
    here = tuple(schedule.stages_on(rank))
    scheduled = (action.stage for action in schedule.actions[rank] if action.kind in COMPUTE)
    sending = (way.source for way in ways_after(stages) if way.source in here)
    return (*here, *scheduled, *sending, *here)


class ResidentStages:
    """The stages of a rank that are on its device if idle stages are offloaded: the current one and the next one.

    State: ``here``, these two; ``left``, the coming turns, last one first.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self.left, self.here = list(reversed(turns)), tuple[int, ...]()

    def advance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Begin the next turn. The stages that leave the device, and then those that come back to it."""
        before, turn = self.here, self.left.pop()
        self.here = tuple(dict.fromkeys((turn, *self.left[-1:])))
        leaving = tuple(stage for stage in before if stage not in self.here)
        return leaving, tuple(stage for stage in self.here if stage not in before)
