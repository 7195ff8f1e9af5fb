"""Reads the stages of a pipeline off a program whose calls have stages.

A value that microbatches cut or leave open is *timed*: made anew for each of them; all others are made once a step. A
timed value that depends on inputs and not on parameters (a mask, one-hot labels, dropout) is *shared*: each stage that
reads it makes it, unless that is much work. Any other is one stage's *own*, and is sent to the stages that read it.

A call of forward is as far down the pipeline as its operands at least. Of backward, what a tangent reaches is as far up
as the gradients that it takes at most: values that forward saved have no say. What else there is in backward is where
it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, TypeVar

from torch import fx

from shardc.language.collective_kind import LOCAL_KINDS
from shardc.language.errors import OptionError, raise_all
from shardc.language.mesh import MICROBATCH
from shardc.language.sharding import Sharding, dtype_name
from shardc.ops.contraction import dot
from shardc.options import Pipeline
from shardc.program.collective import Collective, adds_microbatches, wire_bytes_total
from shardc.program.communication import RowCount, axes_of, collective_at, is_collective, is_sent, joined_type, members
from shardc.program.lifetime import split
from shardc.program.node import ancestors, descendants, is_getitem, operand, reached
from shardc.program.program import Program
from shardc.program.provenance import Phase, StageCrossing, cause_text

Part = Literal["once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after"]
PARTS: tuple[Part, ...] = ("once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after")
SCHEDULED: tuple[Part, ...] = ("forward", "input_gradient", "weight_gradient")
TIMED: tuple[Part, ...] = ("count", *SCHEDULED)  # run for each microbatch
PARTS_OF: Mapping[str, tuple[Part, ...]] = {  # what a schedule's action computes
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


@dataclass(frozen=True, slots=True)
class Crossing:
    """A way from one stage to another.

    Values go once a microbatch, after the part ``forward`` or ``input_gradient`` of its source; those ``after`` go once
    a step, when all microbatches are done.
    """

    source: int
    target: int
    part: Part


@dataclass(frozen=True, slots=True)
class Stage:
    """``parts``: its calls, in program order; one may be in ``count`` and in ``forward``. ``parameters`` that it holds.

    ``sums``: by the part that adds to them, reductions over microbatches, which are among no part's calls.
    """

    parts: Mapping[Part, tuple[fx.Node, ...]]
    sums: Mapping[Part, tuple[fx.Node, ...]]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a program, and the values that cross, in program order.

    ``home``: by index, for each output of which every microbatch has a part, the stage that makes it.
    """

    program: Program
    stages: tuple[Stage, ...]
    crossings: Mapping[Crossing, tuple[fx.Node, ...]]
    home: Mapping[int, int]

    @property
    def holders(self) -> dict[str, frozenset[int]]:
        """For each parameter that is read the stages that hold it."""
        inputs = zip(self.program.inputs, self.program.placeholders, strict=True)
        read = [put.name for put, node in inputs if put.kind == "parameter" and node.users]
        return {name: frozenset(i for i, stage in enumerate(self.stages) if name in stage.parameters) for name in read}


def has_stages(program: Program) -> bool:
    """Whether a program is a pipeline's, and so far that its stages can be read off it."""
    return program.options.pipeline is not None and program.level in ("lowered", "localized")


def is_cut_in_time(sharding: Sharding | None) -> bool:
    """Whether every microbatch has a part of its own of a value."""
    return sharding is not None and any(part.name == MICROBATCH for part in sharding.used_parts)


OF_STAGE = "_stage_"  # and its number: after the name of a collective that an earlier stage has too


def collectives_of_stages(program: Program, count_rows: RowCount) -> Iterator[Collective]:
    """The collectives of each stage of a lowered or localized program, and the messages that it sends."""
    stages = stages_of(program)
    assert program.options.pipeline is not None
    pipeline, named = program.options.pipeline, set[str]()
    place = pipeline.place(program.num_stages)
    for i, stage in enumerate(stages.stages):
        for part, calls in stage.parts.items():
            times = pipeline.microbatches if part in TIMED else 1
            found = [collective_at(program, node, count_rows) for node in calls if is_collective(node, count_rows)]
            for way, nodes in stages.crossings.items():
                if (way.source, way.part) == (i, part) and place[i] != place[way.target]:
                    found.append(_message(program, way, nodes, pipeline))
            for each in found:
                name = f"{each.name}{OF_STAGE}{i}" if each.name in named else each.name
                named.add(name)
                yield replace(each, name=name, stage=i, times=times)


def sender(nodes: Mapping[str, fx.Node], name: str) -> fx.Node | None:
    """Of ``nodes`` by name the one that sends a collective, which several stages may run; a message has none."""
    return nodes.get(name) or nodes.get(name.rpartition(OF_STAGE)[0])


def _message(program: Program, crossing: Crossing, nodes: tuple[fx.Node, ...], pipeline: Pipeline) -> Collective:
    """What one stage sends to another, all of it together."""
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
    )  # fmt: skip


Found = TypeVar("Found")


def kept(find: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """The function, with what it found of a program kept there: of one that no pass changes any more."""

    @wraps(find)
    def found(program: Program) -> Found:
        if find not in program.known:
            program.known[find] = find(program)
        result: Found = program.known[find]
        return result

    return found


Calls = dict[Part, tuple[fx.Node, ...]]


@kept
def stages_of(program: Program) -> Stages:
    """The stages of a lowered or localized program.

    Raises an OptionError for each op that needs the whole batch before its last microbatch is done.
    """
    kinds = Kinds(program)
    kinds.check()
    places = Places(kinds)
    holders = places.holders()
    crossings, stages = places.crossings(), []
    for i in range(program.num_stages):
        closing, taken = _closing(places, i, holders)
        for source, node in taken:
            crossings[Crossing(source, i, "after")].add(node)
        names = tuple(name for node, name in kinds.parameters.items() if i in holders[node])
        stages.append(Stage(*_parts(places, i, closing), names))
    sent = {crossing: tuple(sorted(nodes)) for crossing, nodes in crossings.items()}
    return Stages(program, tuple(stages), sent, places.home())


class Kinds:
    """What kind of value each node of a program is; a call is ``timed`` and ``shared``, ``timed`` and ``own``, or once.

    ``closing``: sums over microbatches of own values; ``late``: what depends on them.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        inputs = zip(program.inputs, program.placeholders, strict=True)
        self.parameters = {node: put.name for put, node in inputs if put.kind == "parameter"}
        self.timed = self._find_timed()
        self.own = self._find_own()
        self.closing = {node for node in program.calls if adds_microbatches(node) and operand(node) in self.own}
        self.late = descendants(*self.closing)

    def _find_timed(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "output" or adds_microbatches(node):
                continue
            shardings = (self.program.sharding(node),) if is_getitem(node) else self.program.shardings(node)
            if any(map(is_cut_in_time, shardings)) or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _find_own(self) -> set[fx.Node]:
        of_parameters = descendants(*self.parameters)
        work = [node for node in self.timed if node.target is dot or is_sent(node)]
        return self.timed & (of_parameters | descendants(*work))

    def check(self) -> None:
        """An OptionError for what needs the whole batch in the middle of a step."""
        counts = {node for node in self.program.calls if adds_microbatches(node)} - self.closing
        twice = {operand(node) for node in counts} & descendants(*counts)
        found = {
            node
            for node in self.program.calls
            if (not adds_microbatches(node) and MICROBATCH in axes_of(node))
            or node in twice
            or node in self.timed & self.late
        }
        first = [node for node in sorted(found) if found.isdisjoint(node.all_input_nodes)]
        by_place = {self._where(node): node for node in reversed(first)}  # in each place the first
        raise_all([self._needs_all(*each) for each in reversed(by_place.items())])

    def _where(self, node: fx.Node) -> str:
        source = self.program.source(node)
        return ", ".join(word for word in (source.module, source.location) if word) or "the model"

    def _needs_all(self, where: str, node: fx.Node) -> OptionError:
        sums = ", ".join(str(each) for each in node.all_input_nodes if each in self.late)
        what = f"{node.target} reads {sums}, made of a sum over the batch" if sums else f"{node.target}"
        return OptionError(
            f"{node.name} in {where}", cause_text(self.program.causes(node)) or what,
            "it needs the whole batch in the middle of a step, and a microbatch is a part of one",
            "compute it of each sample by itself, or leave pipeline out",
        )  # fmt: skip


class Places:
    """The ``stage`` and ``part`` of each own value of a program; ``own``, these in program order."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.program = kinds, kinds.program
        self.own = [node for node in self.program.graph.nodes if node in kinds.own]
        self.stage: dict[fx.Node, int] = {}
        self.part: dict[fx.Node, Part] = {}
        self._find_stages()
        self._split_backward()

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
            elif node in gradients and self._is_mask(node):
                self.stage[node] = min(self.stage[node], max(self._readers(node), default=last))

    def _is_mask(self, node: fx.Node) -> bool:
        """Whether a call is a rank's own work that leaves a value as large as it is: done where it is read."""
        is_local = any(member.kind in LOCAL_KINDS for member in members(node))
        return is_local and self.program.local_type(node) == self.program.local_type(operand(node))

    def _readers(self, node: fx.Node) -> list[int]:
        """The stages that read a value; its own if it is among what microbatches add up."""
        return [self.stage.get(user, self.stage[node]) for user in node.users]

    def _tag(self, node: fx.Node, default: int) -> int:
        source = self.program.source(operand(node) if is_getitem(node) else node)
        return default if source.stage < 0 else source.stage

    def _split_backward(self) -> None:
        """Of a stage's backward, what another stage's backward needs is its input gradient."""
        sent = [node for crossing, nodes in self.crossings().items() if crossing.part != "forward" for node in nodes]
        for node in ancestors(*sent):
            if self.part.get(node) == "weight_gradient":
                self.part[node] = "input_gradient"
        for node in self.own:
            if is_getitem(node):
                self.part[node] = self.part[operand(node)]

    def crossings(self) -> dict[Crossing, set[fx.Node]]:
        """The values that other stages read than the one that makes them, in the course of the microbatches."""
        found: dict[Crossing, set[fx.Node]] = defaultdict(set)
        for node in self.own:
            for user in node.users:
                if user in self.stage and self.stage[user] != self.stage[node]:
                    is_down = self.stage[user] < self.stage[node]
                    assert is_down or self.part[node] == "forward", f"{node}, read by {user}"
                    part: Part = "input_gradient" if is_down else "forward"
                    found[Crossing(self.stage[node], self.stage[user], part)].add(node)
        return found

    def holders(self) -> dict[fx.Node, set[int]]:
        """The stages that read each parameter; the first one if none does."""
        found: dict[fx.Node, set[int]] = {node: set() for node in self.kinds.parameters}
        for stage in range(self.program.num_stages):
            own = {node for node in self.own if self.stage[node] == stage}
            for node in reached(own, _down(self.kinds.own - own)) & set(found):
                found[node].add(stage)
        return {node: stages or {0} for node, stages in found.items()}

    def home(self) -> dict[int, int]:
        """The stage of each output of which every microbatch has a part."""
        last, ends = self.program.num_stages - 1, enumerate(self.program.results)
        return {i: self.stage.get(node, last) for i, node in ends if node is not None and node in self.kinds.timed}


def _closing(
    places: Places, stage: int, holders: Mapping[fx.Node, set[int]]
) -> tuple[set[fx.Node], list[tuple[int, fx.Node]]]:
    """What a stage closes a step with, and of this what it is sent, after the stage that has it."""
    kinds = places.kinds

    def step(node: fx.Node) -> Iterable[fx.Node]:
        return () if node in kinds.closing else (each for each in node.all_input_nodes if each not in kinds.timed)

    found = reached(_results(kinds, stage, holders), step)
    sums = [(places.stage[operand(node)], node) for node in found & kinds.closing]
    lacking = [(min(holders[node]), node) for node in found & set(holders) if stage not in holders[node]]
    return found, [(source, node) for source, node in (*sums, *lacking) if source != stage]


def _results(kinds: Kinds, stage: int, holders: Mapping[fx.Node, set[int]]) -> Iterator[fx.Node]:
    """What a stage returns once a step: gradients of its parameters, all else; of a rank the first stage that may."""
    parameters, pipeline = {name: node for node, name in kinds.parameters.items()}, kinds.program.options.pipeline
    assert pipeline is not None
    place = pipeline.place(kinds.program.num_stages)
    here = [each for each, rank in enumerate(place) if rank == place[stage]]
    for node, output in zip(kinds.program.results, kinds.program.outputs, strict=True):
        of = parameters.get(output.name) if output.kind in ("gradient", "computed") else None
        first = min((each for each in here if of is None or each in holders[of]), default=None)
        if node is not None and node not in kinds.timed and first == stage:
            yield node


def _parts(places: Places, stage: int, closing: set[fx.Node]) -> tuple[Calls, Calls]:
    """The calls of each part of a stage's work, and the sums that each part adds to."""
    kinds, parts = places.kinds, {part: set[fx.Node]() for part in PARTS}
    made, lasting = set[fx.Node](), set[fx.Node]()  # for a microbatch, in a part before; once a step
    results = {node for i, node in enumerate(kinds.program.results) if node and places.home().get(i) == stage}
    for part in SCHEDULED:
        own = {node for node in places.own if (places.stage[node], places.part[node]) == (stage, part)}
        read = reached(own | (results - kinds.own if part == "forward" else set()), _down(kinds.own - own))
        parts[part] = (read & kinds.timed) - made
        made |= parts[part]
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
        if places.stage[operand(node)] == stage:
            sums[places.part[operand(node)]].add(node)
    return _in_order(parts), _in_order(sums)


def _down(without: set[fx.Node]) -> Callable[[fx.Node], Iterable[fx.Node]]:
    """A step to what a node needs, but not to ``without``, and not past a sum over microbatches."""
    return lambda node: (
        () if adds_microbatches(node) else (each for each in node.all_input_nodes if each not in without)
    )


def _in_order(parts: Mapping[Part, set[fx.Node]]) -> Calls:
    return {part: tuple(sorted(node for node in nodes if node.op != "placeholder")) for part, nodes in parts.items()}
