"""The stages of a pipeline: the calls of each, and the values that cross between them, from a program with stage tags.

A *timed* value is computed anew for each microbatch; every other value is computed once a step. A timed value that
depends on inputs and on no parameter (a mask, one-hot labels, dropout) is computed by each stage that reads it, unless
it takes much work. Any other timed value is the *own* value of one stage, which sends it to the stages that read it.

A forward call runs no earlier in the pipeline than its operands. A backward call that depends on a tangent runs no
later in the pipeline than the gradients among its operands; saved values do not matter. Any other backward call runs
where it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar

from torch import fx

from shardc.language.errors import OptionError, raise_all
from shardc.language.machine import LOCAL_KINDS
from shardc.language.mesh import MICROBATCH
from shardc.language.sharding import Sharding, dtype_name
from shardc.language.windows import overlap_add, windows
from shardc.language.words import PARTS, Part
from shardc.ops.contraction import dot
from shardc.options import Pipeline
from shardc.program.coding.nodes import codec_name
from shardc.program.collective import Collective, adds_microbatches, wire_bytes_total
from shardc.program.communication import RowCount, axes_of, collective_at, is_collective, is_sent, joined_type, members
from shardc.program.lifetime import split
from shardc.program.node import ancestors, descendants, is_getitem, operand, reached
from shardc.program.program import Program, parameters_of, residual_owner
from shardc.program.provenance import Phase, StageCrossing, cause_text

SCHEDULED: tuple[Part, ...] = ("forward", "input_gradient", "weight_gradient")
TIMED: tuple[Part, ...] = ("count", *SCHEDULED)  # run for each microbatch
PARTS_OF: Mapping[str, tuple[Part, ...]] = {  # the parts that each action of a schedule computes
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


@dataclass(frozen=True, slots=True)
class Crossing:
    """The values that one stage sends to another after a part of its work.

    Values of ``forward`` and ``input_gradient`` are sent once a microbatch, those of ``after`` once a step, at its end.
    """

    source: int
    target: int
    part: Part


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a program.

    ``parts``: its calls, in program order; a call may be in ``count`` and in ``forward``. ``sums``: the reductions over
    microbatches, by the part that adds to them; they are in no part. ``parameters``: the names of those that it holds.
    """

    parts: Mapping[Part, tuple[fx.Node, ...]]
    sums: Mapping[Part, tuple[fx.Node, ...]]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a program, and the values of each crossing, in program order.

    ``home``: for each output that microbatches cut, by its index, the stage that computes it.
    """

    program: Program
    stages: tuple[Stage, ...]
    crossings: Mapping[Crossing, tuple[fx.Node, ...]]
    home: Mapping[int, int]

    @property
    def holders(self) -> dict[str, frozenset[int]]:
        """The stages that hold each parameter, for all parameters that are read."""
        read = [name for name, node in parameters_of(self.program).items() if node.users]
        return {name: frozenset(i for i, stage in enumerate(self.stages) if name in stage.parameters) for name in read}


def has_stages(program: Program) -> bool:
    """Whether a program is that of a pipeline, and lowered or localized, so that ``stages_of`` applies."""
    return program.options.pipeline is not None and program.level in ("lowered", "localized")


def is_cut_in_time(sharding: Sharding | None) -> bool:
    """Whether microbatches cut a value, or leave it partial."""
    return sharding is not None and any(part.name == MICROBATCH for part in sharding.used_parts)


STAGE_SUFFIX = "_stage_"  # with the stage, it ends the name of a collective that an earlier stage runs too


def collectives_of_stages(program: Program, count_rows: RowCount) -> Iterator[Collective]:
    """The collectives of each stage of a lowered or localized program, and the messages that it sends."""
    stages = stages_of(program)
    assert program.options.pipeline is not None
    pipeline, names = program.options.pipeline, set[str]()
    rank_of = pipeline.place(program.num_stages)
    for i, stage in enumerate(stages.stages):
        for part, calls in stage.parts.items():
            times = pipeline.microbatches if part in TIMED else 1
            sent = [collective_at(program, node, count_rows) for node in calls if is_collective(node, count_rows)]
            for crossing, nodes in stages.crossings.items():
                if (crossing.source, crossing.part) == (i, part) and rank_of[i] != rank_of[crossing.target]:
                    sent.append(_message(program, crossing, nodes, pipeline))
            for each in sent:
                name = f"{each.name}{STAGE_SUFFIX}{i}" if each.name in names else each.name
                names.add(name)
                yield replace(each, name=name, stage=i, times=times)


def sender(nodes: Mapping[str, fx.Node], name: str) -> fx.Node | None:
    """The node of a collective by its name, which may end in a stage; None for a message."""
    return nodes.get(name) or nodes.get(name.rpartition(STAGE_SUFFIX)[0])


def _message(program: Program, crossing: Crossing, nodes: tuple[fx.Node, ...], pipeline: Pipeline) -> Collective:
    """The message that carries all values of a crossing."""
    types = [type_ for type_ in map(program.local_type, nodes) if type_ is not None]
    nbytes, joined = sum(type_.nbytes for type_ in types), joined_type(types)
    shape = types[0].shape if len(types) == 1 else joined.shape
    sources = dict.fromkeys(filter(None, (program.source(node).location for node in nodes)))
    phases = {program.source(node).phase for node in nodes}
    phase: Phase = "backward" if crossing.part == "input_gradient" or "backward" in phases else "forward"
    assert program.mesh is not None
    total = wire_bytes_total(program.mesh, "send", (), nbytes)
    return Collective(
        "send", (pipeline.axis,), dtype_name(joined.dtype), shape, shape, nbytes, nbytes, total,
        name=f"send_{crossing.part}_{crossing.source}_to_{crossing.target}", phase=phase,
        node=", ".join(node.name for node in nodes), source=", ".join(sources),
        causes=(StageCrossing(crossing.source, crossing.target, tuple(node.name for node in nodes), pipeline.text),),
        codec=next(filter(None, map(codec_name, nodes)), ""),
    )  # fmt: skip


Result = TypeVar("Result")


def cached_on_program(function: Callable[[Program], Result]) -> Callable[[Program], Result]:
    """The function with its result kept in ``Program.cache``, for programs that no pass changes any more."""

    @wraps(function)
    def cached(program: Program) -> Result:
        if cached not in program.cache:
            program.cache[cached] = function(program)
        result: Result = program.cache[cached]
        return result

    return cached


Calls = dict[Part, tuple[fx.Node, ...]]
OF_PARAMETERS = ("gradient", "computed", "residual")  # kinds of results that belong to a parameter


@cached_on_program
def stages_of(program: Program) -> Stages:
    """The stages of a lowered or localized program.

    Raises an OptionError for each op that needs the whole batch while microbatches still run.
    """
    kinds = ValueKinds(program)
    kinds.check()
    assignment = StageAssignment(kinds)
    holders = assignment.holders()
    crossings, stages = assignment.crossings(), []
    for i in range(program.num_stages):
        closing, received = _closing(assignment, i, holders)
        for source, node in received:
            crossings[Crossing(source, i, "after")].add(node)
        names = tuple(name for node, name in kinds.parameters.items() if i in holders[node])
        stages.append(Stage(*_parts(assignment, i, closing), names))
    sent = {crossing: tuple(sorted(nodes)) for crossing, nodes in crossings.items()}
    return Stages(program, tuple(stages), sent, assignment.home())


class ValueKinds:
    """The values of a program by the time at which they are computed.

    ``timed``: values that are computed for each microbatch; ``own``: the timed values that one stage computes.
    ``closing``: sums of own values over microbatches; ``late``: everything that depends on them. ``parameters``: the
    name of each parameter, by its placeholder.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = {node: name for name, node in parameters_of(program).items()}
        self.timed: set[fx.Node] = set()
        for node in program.graph.nodes:
            if node.op == "output" or adds_microbatches(node):
                continue
            shardings = (program.sharding(node),) if is_getitem(node) else program.shardings(node)
            if any(map(is_cut_in_time, shardings)) or not self.timed.isdisjoint(node.all_input_nodes):
                self.timed.add(node)
        edges = (windows, overlap_add)  # few bytes; every stage that needs edges of inputs may send them itself
        work = [node for node in self.timed if node.target is dot or (is_sent(node) and node.target not in edges)]
        self.own = self.timed & descendants(*self.parameters, *work)
        self.closing = {node for node in program.calls if adds_microbatches(node) and operand(node) in self.own}
        self.late = descendants(*self.closing)

    def check(self) -> None:
        """Raise an OptionError for ops that need the whole batch in the middle of a step."""
        counts = {node for node in self.program.calls if adds_microbatches(node)} - self.closing
        twice = {operand(node) for node in counts} & descendants(*counts)
        timed_late = self.timed & self.late
        whole_batch = {
            node
            for node in self.program.calls
            if (not adds_microbatches(node) and MICROBATCH in axes_of(node)) or node in twice or node in timed_late
        }
        read = {node: {self.program.value(each)[0] for each in node.all_input_nodes} for node in whole_batch}
        first = [node for node in sorted(whole_batch) if whole_batch.isdisjoint(read[node])]
        errors: dict[str, OptionError] = {}  # the first at each location
        problem = "it needs the whole batch in the middle of a step, and a microbatch is a part of one"
        for node in first:
            source = self.program.source(node)
            where = ", ".join(word for word in (source.module, source.location) if word) or "the model"
            sums = ", ".join(str(each) for each in node.all_input_nodes if each in self.late)
            what = f"{node.target} reads {sums}, made of a sum over the batch" if sums else f"{node.target}"
            what = cause_text(self.program.causes(node)) or what
            remedy = "compute it of each sample by itself, or leave pipeline out"
            errors.setdefault(where, OptionError(f"{node.name} in {where}", what, problem, remedy))
        raise_all(list(errors.values()))


class StageAssignment:
    """The ``stage`` and the ``part`` of each own value of a program; ``own``: these values in program order.

    ``calls``: those of each stage and part.
    """

    def __init__(self, kinds: ValueKinds) -> None:
        self.kinds, self.program = kinds, kinds.program
        self.own = [node for node in self.program.graph.nodes if node in kinds.own]
        self.stage: dict[fx.Node, int] = {}
        self.part: dict[fx.Node, Part] = {}
        self._find_stages()
        sent = [node for way, nodes in self.crossings().items() if way.part != "forward" for node in nodes]
        for node in ancestors(*sent):  # backward that another stage's backward needs
            if self.part.get(node) == "weight_gradient":
                self.part[node] = "input_gradient"
        for node in self.own:
            if is_getitem(node):
                self.part[node] = self.part[operand(node)]
        self.calls: dict[tuple[int, Part], set[fx.Node]] = defaultdict(set)
        for node in self.own:
            self.calls[self.stage[node], self.part[node]].add(node)

    def _find_stages(self) -> None:
        tangents = [node for (kind, _), node in self.program.named_inputs.items() if kind == "tangent"]
        forward, gradients, last = set(split(self.program).forward), descendants(*tangents), self.program.num_stages - 1
        for node in self.own:
            before = [each for each in node.all_input_nodes if each in self.stage]
            if node in forward:
                self.stage[node] = max([self._tag(node, 0), *map(self.stage.__getitem__, before)])
            elif node in gradients:
                above = [self.stage[each] for each in before if each in gradients]
                self.stage[node] = min([self._tag(node, last), *above])
            self.part[node] = "forward" if node in forward else "weight_gradient"
        for node in reversed(self.own):
            if node not in self.stage:
                read = [self.stage[user] for user in node.users if user in self.stage]
                self.stage[node] = max(read, default=self._tag(node, last))
            elif node in gradients and any(member.kind in LOCAL_KINDS for member in members(node)):
                if self.program.local_type(node) == self.program.local_type(operand(node)):  # runs where it is read
                    own = self.stage[node]  # also where a sum over microbatches reads it
                    self.stage[node] = min(own, max((self.stage.get(user, own) for user in node.users), default=last))

    def _tag(self, node: fx.Node, default: int) -> int:
        source = self.program.source(operand(node) if is_getitem(node) else node)
        return default if source.stage < 0 else source.stage

    def crossings(self) -> dict[Crossing, set[fx.Node]]:
        """The values that a stage sends to another for each microbatch."""
        crossings: dict[Crossing, set[fx.Node]] = defaultdict(set)
        for node in self.own:
            for user in node.users:
                if user in self.stage and self.stage[user] != self.stage[node]:
                    is_down = self.stage[user] < self.stage[node]
                    assert is_down or self.part[node] == "forward", f"{node}, read by {user}"
                    part: Part = "input_gradient" if is_down else "forward"
                    crossings[Crossing(self.stage[node], self.stage[user], part)].add(node)
        return crossings

    def holders(self) -> dict[fx.Node, set[int]]:
        """The stages that read each parameter; the first stage if none does."""
        holders: dict[fx.Node, set[int]] = {node: set() for node in self.kinds.parameters}
        for stage in range(self.program.num_stages):
            own = {node for node in self.own if self.stage[node] == stage}
            for node in reached(own, _down(self.kinds.own - own)) & set(holders):
                holders[node].add(stage)
        return {node: stages or {0} for node, stages in holders.items()}

    def home(self) -> dict[int, int]:
        """The stage of each output that microbatches cut, by the output's index."""
        last, ends = self.program.num_stages - 1, enumerate(self.program.results)
        return {i: self.stage.get(node, last) for i, node in ends if node is not None and node in self.kinds.timed}


def _closing(
    assignment: StageAssignment, stage: int, holders: Mapping[fx.Node, set[int]]
) -> tuple[set[fx.Node], list[tuple[int, fx.Node]]]:
    """The calls of a stage at the end of a step, and the values it then receives, each with the stage that sends it."""
    kinds = assignment.kinds

    def step(node: fx.Node) -> Iterable[fx.Node]:
        return () if node in kinds.closing else (each for each in node.all_input_nodes if each not in kinds.timed)

    needed = reached(_results(kinds, stage, holders), step)
    sums = [(assignment.stage[operand(node)], node) for node in needed & kinds.closing]
    parameters = [(min(holders[node]), node) for node in needed & set(holders) if stage not in holders[node]]
    return needed, [(source, node) for source, node in (*sums, *parameters) if source != stage]


def _results(kinds: ValueKinds, stage: int, holders: Mapping[fx.Node, set[int]]) -> Iterator[fx.Node]:
    """The results that a stage returns once a step. Of the stages on one rank, the first that can returns each."""
    parameters, pipeline = parameters_of(kinds.program), kinds.program.options.pipeline
    assert pipeline is not None
    rank_of = pipeline.place(kinds.program.num_stages)
    here = [each for each, rank in enumerate(rank_of) if rank == rank_of[stage]]
    for node, output in zip(kinds.program.results, kinds.program.outputs, strict=True):
        owner = parameters.get(residual_owner(output.name)) if output.kind in OF_PARAMETERS else None
        first = min((each for each in here if owner is None or each in holders[owner]), default=None)
        if node is not None and node not in kinds.timed and first == stage:
            yield node


def _parts(assignment: StageAssignment, stage: int, closing: set[fx.Node]) -> tuple[Calls, Calls]:
    """The calls of each part of a stage's work, and the sums that each part adds to."""
    kinds, parts = assignment.kinds, {part: set[fx.Node]() for part in PARTS}
    done, lasting = set[fx.Node](), set[fx.Node]()  # timed calls of earlier parts; calls that run once a step
    home = assignment.home()
    results = {node for i, node in enumerate(kinds.program.results) if node is not None and home.get(i) == stage}
    for part in SCHEDULED:
        own = assignment.calls[stage, part]
        read = reached(own | (results - kinds.own if part == "forward" else set()), _down(kinds.own - own))
        parts[part] = (read & kinds.timed) - done
        done |= parts[part]
        lasting |= read - kinds.timed
    counts = {node for node in lasting | closing if adds_microbatches(node)} - kinds.closing
    counted = reached(map(operand, counts), _down(set()))
    parts["count"], lasting = counted & kinds.timed, lasting | (counted - kinds.timed)
    settled = descendants(*counts)
    parts["settle"], parts["once"] = (lasting & settled) - counts, lasting - settled
    parts["after"] = closing - lasting - counts - kinds.closing
    sums = {part: set[fx.Node]() for part in PARTS}
    sums["count"] = counts
    for node in kinds.closing:
        if assignment.stage[operand(node)] == stage:
            sums[assignment.part[operand(node)]].add(node)
    return _in_order(parts), _in_order(sums)


def _down(without: set[fx.Node]) -> Callable[[fx.Node], Iterable[fx.Node]]:
    """The step from a node to its operands, except ``without``, and except past a sum over microbatches."""
    return lambda node: () if adds_microbatches(node) else [x for x in node.all_input_nodes if x not in without]


def _in_order(parts: Mapping[Part, set[fx.Node]]) -> Calls:
    return {part: tuple(sorted(node for node in nodes if node.op != "placeholder")) for part, nodes in parts.items()}
