"""Replays of a step that write ledgers: a program's calls in order, or the actions of each rank of a pipeline.

State: an ``Env`` maps nodes to the blocks of their results; ``base`` has the blocks that live for the whole step. In a
pipeline each stage has its ``base``, an env for each microbatch, and ``sums`` over microbatches. ``waiting`` messages
are computed and not yet sent; ``posted`` ones have memory to be received in. Invariant: all blocks that these hold,
inputs included, are alive in the ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

from torch import fx

from shardc.costs.count import nbytes
from shardc.costs.ledger import WORKSPACE, Block, Blocks, Env, Ledger
from shardc.costs.stages.lifetime import (
    ResidentStages,
    kept_after,
    read_beside,
    stage_turns,
    sums_in_place,
    ways_after,
)
from shardc.costs.stages.schedule import PART_OF_PHASE, schedule_of
from shardc.language.mesh import MICROBATCH
from shardc.language.partition import parse_parts
from shardc.language.sharding import ceil_div, chunk_of, num_shards
from shardc.language.words import PARTS, Part
from shardc.ops.attention.kernels import TILED_FAMILY
from shardc.ops.attention.products import tiled_workspace
from shardc.ops.attention.ring import TILE, mask_workspace, ring_workspace, tile_workspace
from shardc.ops.attention.rules import ring_attention_backward
from shardc.ops.attention.tiled import TILED, TILED_BACKWARD, TILED_MASK_BACKWARD
from shardc.ops.contraction import DOT_RINGS, dots_workspace
from shardc.ops.tier import MOST_UNDER_WAY, offload
from shardc.program.collective import mask_padding
from shardc.program.communication import (
    goes_round,
    is_collective,
    is_gathered_early,
    is_saved,
    local_types,
    num_chunks,
    ring_of,
)
from shardc.program.lifetime import Parts, owners_of, split, stored_below
from shardc.program.node import ancestors, arguments, is_getitem, operand
from shardc.program.program import Program, Value, inputs_of, parameters_of, residuals_of
from shardc.program.stages import PARTS_OF, TIMED, Crossing, Stages, has_stages, is_cut_in_time, stages_of
from shardc.schedules.schedule import ALL, COMPUTE, SENDS, Action, Schedule

CallsWithDeaths = Sequence[tuple[fx.Node, Collection[fx.Node]]]  # in order, each with the values that die after it
Message = tuple[Crossing, int]  # with its microbatch, or ALL if it is sent once a step


def ledgers_of(program: Program) -> list[Ledger]:
    """The ledger of each rank of a lowered pipeline; a single one for other programs, whose ranks are all alike."""
    parts = split(program)
    if has_stages(program):
        stages, schedule = stages_of(program), schedule_of(program)
        return [_RankReplay(stages, schedule, rank, parts).run() for rank in range(schedule.num_ranks)]
    owners = owners_of(program, (node for node in program.graph.nodes if node.op == "call_function"))
    return [_Replay(program, owners, _kinds(program, parts, owners), parameters_of(program)).step(parts)]


def _kinds(program: Program, parts: Parts, owners: Mapping[Value, Value]) -> dict[Value, str]:
    """The class of each value's bytes: that of the value whose memory it shares.

    ``owners``: those of one rank. Values that another rank's backward reads are saved too.
    """
    parameters, update, forward = set(parameters_of(program).values()), set(parts.update), set(parts.forward)
    reads = {read for node in parts.backward for read in node.all_input_nodes if not is_getitem(node)}
    saved = {owners.get(program.value(node)) for node in reads}
    results = {owners.get(program.value(node)) for node in program.results if node is not None}
    early = {
        node
        for node in {node for node, _ in owners.values()}
        if is_gathered_early(node)
        and program.source(node).phase != "update"
        and not ancestors(node).isdisjoint(parameters)
    }

    def kind(value: Value) -> str:
        node = value[0]
        if node.op == "placeholder":
            return "parameters" if node in parameters else "inputs"
        if node in early:
            return "gathered"
        if node in forward and value in saved:
            return "saved"
        if value not in results:
            return "working"
        return "parameters" if node in update else "outputs" if node in forward else "gradients"

    of_owner = {owner: kind(owner) for owner in set(owners.values())}
    return {value: of_owner[owner] for value, owner in owners.items()}


def with_deaths(calls: Sequence[fx.Node], later: Collection[fx.Node]) -> CallsWithDeaths:
    """Calls, each with the values that it is the last to read, apart from those that are read ``later``."""
    live, dying = set(later), list[tuple[fx.Node, Collection[fx.Node]]]()
    for node in reversed(calls):
        used = {node, *node.all_input_nodes}
        dying.append((node, used - live or ()))
        live |= used
    return dying[::-1]


class _Replay:
    """Runs calls on blocks. ``owners``: see ``owners_of``; ``kinds``: the class of each value's bytes.

    Facts of a call are computed once for all microbatches: ``sources``, ``workspace``, ``nbytes``.
    """

    def __init__(
        self, program: Program, owners: Mapping[Value, Value], kinds: Mapping[Value, str], parameters: Collection[str]
    ) -> None:
        self.program, self.owners, self.kinds = program, owners, kinds
        self.parameters = {node: name for name, node in parameters_of(program).items() if name in parameters}
        self.below = stored_below(program)
        self.ledger = Ledger(parameters)
        self.sources, self.workspace = cache(partial(_sources_of, program, owners)), cache(partial(workspace, program))
        self.nbytes = cache(lambda value: nbytes(program.local_type(*value)))

    def step(self, parts: Parts) -> Ledger:
        """Run a program without stages."""
        calls = with_deaths((*parts.update, *parts.forward, *parts.backward), set(filter(None, self.program.results)))
        start, env = len(calls) - len(parts.backward), Env()
        base: Env = {node: (self.new((node, 0)),) for node in self.program.placeholders}
        for blocks in base.values():
            self.ledger.hold(blocks)
        self.run_calls(calls[:start], env, base)
        reads = {read for node in parts.backward for read in node.all_input_nodes}
        forward = set(parts.forward)
        kept = (block for node in reads for block in env.get(node, ()) if block.value[0] in forward)
        self.ledger.note_saved(dict.fromkeys(kept))
        self.run_calls(calls[start:], env, base)
        self.ledger.gathered = self.ledger.most(lambda block: block.kind == "gathered")
        return self.ledger

    def run_calls(self, calls: CallsWithDeaths, env: Env, base: Env, unchanged: Collection[fx.Node] = ()) -> None:
        """Run calls; those in ``unchanged`` return their operand.

        A value that goes to the tier below is held until its copy is waited for, at the latest at the end of all calls.
        """
        leaving = deque[Blocks]()
        for node, dead in calls:
            if node.target is offload and is_saved(node):
                if len(leaving) == MOST_UNDER_WAY:
                    self.ledger.drop(leaving.popleft())
                leaving.append(find(env, base, operand(node)))
                self.ledger.hold(leaving[-1])
            blocks = find(env, base, operand(node)) if node in unchanged else self._results(env, base, node)
            self.ledger.put(env, node, blocks)
            held = self.workspace(node)
            work = (Block((node, WORKSPACE), held, "working"),) if held else ()
            self.ledger.hold(work)
            self.ledger.end_call(node)
            self.ledger.drop(work)
            self.ledger.free(env, dead)
        for blocks in leaving:
            self.ledger.drop(blocks)

    def _results(self, env: Env, base: Env, node: fx.Node) -> Blocks:
        """The blocks of a call's results: new ones, or those of the operand that a view shows."""
        if is_getitem(node):
            return (find(env, base, operand(node))[int(node.args[1])],)  # type: ignore[arg-type]
        pairs = self.sources(node)
        return tuple(self.new(value) if shown is None else find(env, base, shown)[0] for value, shown in pairs)

    def new(self, value: Value, of: Value | None = None) -> Block:
        """A block for a value, of its own class or that of ``of``; a value in the tier below has no bytes here."""
        size, is_below = self.nbytes(value), value[0] in self.below
        return Block(value, 0 if is_below else size, self.kinds.get(of or value, "working"), below=size * is_below)


def _sources_of(
    program: Program, owners: Mapping[Value, Value], node: fx.Node
) -> tuple[tuple[Value, fx.Node | None], ...]:
    """The results of a call, each with the operand that it is a view of, if it is one."""
    shown = {owners.get(program.value(each)): each for each in node.all_input_nodes}
    values = [(node, i) for i in range(len(program.types(node)))]
    return tuple([(value, shown.get(owners.get(value, value))) for value in values])  # only tensors have owners


def workspace(program: Program, node: fx.Node) -> int:
    """Bytes that a call holds besides operands and results while it runs: chunks that come round, and scores."""
    ring, tiled = ring_of(node), (TILED, TILED_BACKWARD, TILED_MASK_BACKWARD)
    nbytes = bytes_in_ring(program, node)
    is_backward = node.target in (ring_attention_backward, *tiled[1:])
    types = [program.local_type(each) for each in node.args if isinstance(each, fx.Node)]
    if ring is not None and ring.mask is not None:
        before = 6 if is_backward else 3  # q, k, v; in backward the gradient, the result and its logsumexp too
        nbytes += tile_workspace(ring, list(filter(None, types[before : before + len(ring.mask.leaves)])))
    if node.target in tiled or (ring is not None and ring.family == TILED_FAMILY):
        q, k = types[is_backward:][:2]
        assert q is not None and k is not None
        given = {} if ring is not None else arguments(node)
        dropout, text = (ring.dropout, ring.score_text) if ring else (given["dropout_p"], given["score_mod"])
        nbytes += tiled_workspace(q, k, TILE, dropout, text, is_backward=is_backward)
    has_mask = node.target is TILED_MASK_BACKWARD or (ring is not None and ring.of_mask)
    if has_mask and (of_mask := program.local_type(node, 3)):
        nbytes = mask_workspace(of_mask, nbytes)
    return nbytes


def bytes_in_ring(program: Program, node: fx.Node) -> int:
    """Bytes of travelling chunks that a rank holds while a ring runs, besides its own; 0 for other calls."""
    if node.target in DOT_RINGS:
        return dots_workspace(node.target, node.args, num_chunks(program, node), *local_types(program, node))
    ring = ring_of(node)
    if ring is None or not is_collective(node):
        return 0
    keys, values = (program.local_type(each) for each in goes_round(node)[:2])
    assert keys is not None and values is not None
    return ring_workspace(ring, keys, values, is_backward=node.target is ring_attention_backward)


def _calls_of(stages: Stages, here: Collection[int]) -> Iterator[fx.Node]:
    """The calls of some stages, in program order."""
    calls = {
        node
        for stage in here
        for of_part in (stages.stages[stage].parts, stages.stages[stage].sums)
        for nodes in of_part.values()
        for node in nodes
    }
    return (node for node in stages.program.graph.nodes if node in calls)


def _received(stages: Stages, schedule: Schedule, rank: int) -> set[fx.Node]:
    """The values that a rank receives from others."""
    place = schedule.place
    return {
        node
        for way, nodes in stages.crossings.items()
        if place[way.target] == rank != place[way.source]
        for node in nodes
    }


def find(env: Env, base: Env, node: fx.Node) -> Blocks:
    """The blocks of a node."""
    return env.get(node) or base[node]


class _RankReplay(_Replay):
    """One rank of a pipeline; see the state and the invariant above.

    ``resident``: the stages on the device, if stages are offloaded. ``away``: the stages in host memory; ``fixed``: the
    blocks of inputs that never go there. ``own``: sums in memory of their own, by stage; ``in_place``: sums that may
    use the memory of their first summand. ``forgotten``: by stage and part, the values that are read right after the
    part and not again.
    """

    def __init__(self, stages: Stages, schedule: Schedule, rank: int, parts: Parts) -> None:
        here = tuple(schedule.stages_on(rank))
        names = {name for stage in here for name in stages.stages[stage].parameters}
        owners = owners_of(stages.program, _calls_of(stages, here), _received(stages, schedule, rank))
        super().__init__(stages.program, owners, _kinds(stages.program, parts, owners), names)
        self.stages, self.schedule, self.rank, self.here = stages, schedule, rank, here
        pipeline = self.program.options.pipeline
        self.resident = ResidentStages(stage_turns(stages, schedule, rank)) if pipeline and pipeline.offload else None
        self.away, self.fixed = set[int](), set[Block]()
        self.base: dict[int, Env] = {}
        self.envs: dict[tuple[int, int], Env] = {}
        self.sums: dict[int, Env] = {stage: {} for stage in here}
        self.waiting, self.posted = dict[Message, Blocks](), dict[Message, Blocks]()
        self.own: set[tuple[int, fx.Node]] = set()
        kept = {stage: kept_after(stages, stage) for stage in here}
        beside = {(stage, part): read_beside(stages, stage, part) for stage in here for part in TIMED}
        self.forgotten = {(stage, part): nodes - kept[stage][part] for (stage, part), nodes in beside.items()}
        self.in_place = {each: sums_in_place(stages, *each) for each in beside}
        self.calls: dict[tuple[int, Part], CallsWithDeaths] = {}
        for stage, part in product(here, PARTS):  # values made once a step never die
            calls, each = stages.stages[stage].parts[part], (stage, part)
            later = kept[stage][part] | beside[each] if each in beside else None
            self.calls[each] = [(node, ()) for node in calls] if later is None else with_deaths(calls, later)

    def run(self) -> Ledger:
        """Run the whole step."""
        self._hold_inputs()
        for stage in self.here:
            self._begin(stage)
        self.ledger.end_action("begin")
        for action in self.schedule.actions[self.rank]:
            self._do(action)
            if action.kind in COMPUTE:
                self.ledger.note_saved(self._kept())
            self.ledger.end_action(str(action))
        self._end()
        self.ledger.end_action("end")
        lasting = {block for base in self.base.values() for blocks in base.values() for block in blocks}
        self.ledger.gathered = [block for block in lasting if block.kind == "gathered"]
        return self.ledger

    def _hold_inputs(self) -> None:
        """Allocate the inputs, data for all microbatches. If stages are offloaded, each has its own parameters."""
        inputs, parameters = Env(), set(parameters_of(self.program).values())
        away = {*inputs_of(self.program, "residual").values()}.difference(
            residuals_of(self.program, self.ledger.parameters)
        )
        for node in (each for each in self.program.placeholders if each not in away):
            times = self.schedule.num_microbatches if is_cut_in_time(self.program.sharding(node)) else 1
            if node not in parameters or (self.resident is None and node in self.parameters):
                inputs[node] = tuple(self.new((node, 0)) for _ in range(times))
                self.ledger.hold(inputs[node])
                self.fixed |= set(inputs[node])
        for stage in self.here:
            self.base[stage] = dict(inputs)
            if self.resident is not None:
                own = set(self.stages.stages[stage].parameters)
                here = (node for node, name in self.parameters.items() if name in own)
                self.base[stage] |= {node: (self.new((node, 0)),) for node in here}
                self.away.add(stage)

    def _kept(self) -> set[Block]:
        """The blocks that microbatches under way keep on the device, without those that live for the whole step."""
        on_device = self.base.keys() - self.away
        envs = (env for (stage, _), env in self.envs.items() if stage in on_device)
        lasting = {block for stage in on_device for blocks in self.base[stage].values() for block in blocks}
        return {block for env in envs for blocks in env.values() for block in blocks} - lasting

    def _take_turn(self) -> None:
        """Move idle stages to the host, and then the next one back to the device."""
        if self.resident is None:
            return
        leaving, returning = self.resident.advance()
        for env in (env for stage in leaving for env in self._envs_of(stage)):
            for blocks in env.values():
                self.ledger.drop(tuple(block for block in blocks if block not in self.fixed))
        self.away |= set(leaving)
        for stage in returning:
            self._bring_back(stage)

    def _bring_back(self, stage: int) -> None:
        """Allocate new blocks, shared as before. A parameter that a stage on the device shares is there already."""
        base, moved = self.base[stage], dict[Block, Block]()
        for other in self.base.keys() - self.away:
            shared = self.base[other].keys() & base.keys() & self.parameters.keys()
            moved |= {base[node][0]: self.base[other][node][0] for node in shared}
        moved |= {block: block for block in self.fixed}
        for env in self._envs_of(stage):
            for node, blocks in env.items():
                env[node] = tuple(moved.setdefault(block, replace(block, holders=0)) for block in blocks)
                self.ledger.hold(tuple(block for block in env[node] if block not in self.fixed))
        self.away -= {stage}

    def _envs_of(self, stage: int) -> Iterator[Env]:
        yield from (self.base[stage], self.sums[stage])
        yield from (env for (owner, _), env in self.envs.items() if owner == stage)

    def _begin(self, stage: int) -> None:
        """Run the parts of a stage that come before the schedule: ``once``, ``count`` and ``settle``."""
        base = self.base[stage]
        self._take_turn()
        self._run(stage, "once", base)
        for microbatch in range(self.schedule.num_microbatches if self.stages.stages[stage].sums["count"] else 0):
            env: Env = {}
            self._run(stage, "count", env, microbatch)
            self._add(stage, "count", env)
            self.ledger.free(env, self.forgotten[stage, "count"])
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
            self.ledger.drop(self.waiting.pop((way, action.microbatch)))
        else:
            self._post((Crossing(action.peer or 0, action.stage, PART_OF_PHASE[action.phase]), action.microbatch))

    def _post(self, message: Message) -> None:
        """Allocate the memory in which a message is received."""
        blocks = tuple(self.new(self.program.value(node)) for node in self.stages.crossings[message[0]])
        self.posted[message] = blocks
        self.ledger.hold(blocks)

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
        self.ledger.free(env, self.forgotten[stage, part])

    def _hand_over(self, message: Message, env: Env) -> None:
        """Give a message to a stage of the same rank at once, or let it wait until it is sent."""
        way = message[0]
        blocks = tuple(block for node in self.stages.crossings[way] for block in find(env, self.base[way.source], node))
        self.ledger.hold(blocks)
        is_here = self.schedule.place[way.target] == self.rank
        (self.posted if is_here else self.waiting)[message] = blocks

    def _receive(self, message: Message, env: Env) -> None:
        blocks = self.posted.pop(message)
        for node, block in zip(self.stages.crossings[message[0]], blocks, strict=True):
            self.ledger.put(env, node, (block,))
        self.ledger.drop(blocks)

    def _run(self, stage: int, part: Part, env: Env, microbatch: int = ALL) -> None:
        calls = self.calls[stage, part]
        unpadded = {node for node, _ in calls if node.target is mask_padding and self._is_full(node, microbatch)}
        self.run_calls(calls, env, self.base[stage], unpadded)

    def _is_full(self, node: fx.Node, microbatch: int) -> bool:
        """Whether no rank has padding in a microbatch. The last rank has the least data."""
        if microbatch == ALL:
            return False
        (_, axes, _, size, *_), mesh = node.args, self.program.mesh
        assert mesh is not None and isinstance(axes, tuple) and isinstance(size, int), node
        parts, ranks = parse_parts(axes, mesh), mesh.size // mesh.axis_size(MICROBATCH)
        length = chunk_of(size, parts, mesh, (microbatch + 1) * ranks - 1)[1]
        return length == ceil_div(size, num_shards(parts))

    def _add(self, stage: int, part: Part, env: Env) -> None:
        """Add to the sums over microbatches: the first summand is kept, the second allocates the sum."""
        sums, in_place = self.sums[stage], self.in_place[stage, part]
        for into in self.stages.stages[stage].sums[part]:
            before, added = sums.get(into), operand(into)
            if before is None:
                self.ledger.put(sums, into, find(env, self.base[stage], added))
                self.own |= {(stage, into)} if into in in_place else set()
            elif (stage, into) not in self.own or into.args[2] != "sum":
                self.own.add((stage, into))
                self.ledger.put(sums, into, (self.new(self.program.value(added), self.program.value(into)),))

    def _end(self) -> None:
        """Run the part of stages that comes after the last microbatch: sums over stages and over ranks."""
        for way in ways_after(self.stages):
            if way.source in self.here:
                self._take_turn()
                self._take_sums(way.source)
                self._hand_over((way, ALL), self.base[way.source])
            elif way.target in self.here:
                self._post((way, ALL))
        for stage in self.here:
            self._take_turn()
            self._take_sums(stage)
            for way in self.stages.crossings:
                if (way.target, way.part) == (stage, "after"):
                    self._receive((way, ALL), self.base[stage])
            self._run(stage, "after", self.base[stage])

    def _take_sums(self, stage: int) -> None:
        for into, blocks in self.sums[stage].items():
            self.ledger.put(self.base[stage], into, blocks)
