"""The alternatives at a collective: what the compiler chose among there, and what a rank would have sent by each.

Compiling keeps only the best answer to each question. So the questions are asked again, of the programs that the passes
had, and all answers are kept: how a reshard is brought about (the reshard planner), how an op is cut (choose_cuts),
whether an op is decomposed, and whether data or weights move (choose_sides).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from torch import fx

from shardc.compiler import Compiled
from shardc.language.cut import factor_cuts
from shardc.language.mesh import Axes
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div
from shardc.language.text import bytes_text
from shardc.passes.decompose.decompose import (
    DECOMPOSITIONS,
    WINDOWED,
    apart_bytes,
    arriving,
    cut_whole,
    gathered_bytes,
    is_scattered,
    is_stored,
    num_others,
    windows_of,
)
from shardc.passes.emitter import NEVER
from shardc.passes.propagate.cut_blocks import cut_blocks
from shardc.passes.propagate.propagate import Precedence, propagate
from shardc.passes.reshard.choose_cuts import CutPlan, Cuts, choose_cuts, num_pieces
from shardc.passes.reshard.choose_cuts import choices as choices_of_cuts
from shardc.passes.reshard.choose_sides import cheapest_plan
from shardc.passes.reshard.move_axes import Move, Space, State, moves_from
from shardc.passes.reshard.plan_reshard import collectives_of_steps, plan_reshard, search_space, steps_of
from shardc.program.collective import EXCHANGES, Step
from shardc.program.communication import axes_of, collective_at, is_collective
from shardc.program.node import op_name
from shardc.program.program import Program
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.collectives import Movement, movements

MOST = 4  # alternatives to one question


def alternatives(compiled: Compiled, name: str) -> tuple[Alternative, ...]:
    """The alternatives at one collective of a compiled model."""
    return AlternativeFinder(compiled).alternatives(name)


def choices(compiled: Compiled) -> dict[str, tuple[Alternative, ...]]:
    """The alternatives at every collective of a compiled model, by name."""
    finder = AlternativeFinder(compiled)
    return {each.name: finder.alternatives(each.name) for each in collectives_of(compiled.program)}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of several ways to do the same, and what a rank sends by it.

    ``question``: what is to be done; ``way``: how; ``note``: what else it costs.
    """

    question: str
    way: str
    wire_bytes: int
    is_chosen: bool
    note: str = ""


def alternatives_text(alternatives: Sequence[Alternative]) -> str:
    """The text form: under each question its ways, the chosen one first."""
    lines: list[str] = []
    for question in dict.fromkeys(each.question for each in alternatives):
        ways = [each for each in alternatives if each.question == question]
        sent = [bytes_text(each.wire_bytes) for each in ways]
        width, digits = max(len(each.way) for each in ways), max(map(len, sent))
        lines.append(f"ways {question}, and what a rank sends")
        for each, nbytes in zip(ways, sent, strict=True):
            note = ", ".join(filter(None, ("chosen" * each.is_chosen, each.note)))
            line = f"  {each.way.ljust(width)}  {nbytes.rjust(digits)}"
            lines.append(line + (f"  ({note})" if note else ""))
    return "".join(f"{line}\n" for line in lines)


class AlternativeFinder:
    """Finds the alternatives at the collectives of one compiled model. The plan of cuts is made again once for all."""

    def __init__(self, compiled: Compiled) -> None:
        self.whole, self.compiled = compiled.whole, compiled
        self._nodes = {node.name: node for node in self.whole.calls}

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """The alternatives at a collective; none for a message between pipeline stages."""
        node = sender(self._nodes, name)
        if node is None:
            return ()
        moved = list(movements(self.whole, node))
        ways = [*_reshard_alternatives(self.whole, moved)]
        if len(moved) == 1 and node.target not in EXCHANGES:  # what these send depends on no cut of an op
            ways += self._cut_alternatives(node, moved[0])
        questions = {each.question for each in ways}
        ways += self._decomposed_alternatives(node, moved)
        for each in moved:
            ways += self._gathered_alternatives(node, each, questions)
        return (*ways, *(way for axis in axes_of(node) for way in self._side_alternatives.get(axis, ())))

    # How an op is cut.

    @cached_property
    def plan(self) -> CutPlan:
        """The plan of how every op is cut, made again for the program that insert_reshards had."""
        return cheapest_plan(self.compiled.at("decompose").copy())

    def _cut_alternatives(self, node: fx.Node, moved: Movement) -> Iterator[Alternative]:
        """Ways to compute the op that leaves a sum open, or else the op that reads the value."""
        ops = {each.name: each for each in self.plan.ops}
        is_sum = bool(self.whole.sharding(moved.operand).partial) if not self.whole.has_many(moved.operand) else False
        near = [moved.producer] if is_sum else [user for user in moved.users if user.op != "output"]
        op = next((ops[name] for name in map(self._call_name, near) if name in ops), None)
        if op is None:
            return
        program = self.plan.program
        axes = tuple(program.mesh.axis(axis) for axis in axes_of(node)) if program.mesh else ()
        op = op_of_partial_sum(self.plan, op, axes) if is_sum else op
        ways = compare_cuts(self.plan, op, axes)
        if len(ways) < 2 or not ways[0].wire_bytes:
            return  # the collective is there for other reasons
        for way in ways[: MOST + 1]:
            note = "" if way.is_considered else "nothing that it takes or makes is cut so"
            note = f"each rank computes {way.work:.0f} times as much" if way.work > 1 else note
            yield Alternative(_question(program, op), way.text, way.wire_bytes, way.is_chosen, note)

    def _call_name(self, node: fx.Node) -> str:
        return self.whole.value(node)[0].name

    # Whether an op is decomposed.

    def _decomposed_alternatives(self, node: fx.Node, moved: list[Movement]) -> Iterator[Alternative]:
        """For an op that was decomposed and is gone: what gathering its operand would have sent."""
        before, after = self.compiled.at("propagate"), {each.name for each in self.compiled.at("decompose").calls}
        producer = node if node.target in EXCHANGES else moved[0].producer
        if len(moved) > 1 or producer.op != "call_function":
            return
        source = self.whole.source(producer)
        place = f" ({source.location or source.module})" if source.location or source.module else ""
        for op in (each for each in before.calls if each.name not in after and self._is_of(before, each, producer)):
            costs = compare_forms(before, op)
            if costs is None:
                continue
            question = f"to compute {op_name(op.target).lstrip('_')}{place}"
            sent = [each for each in self.whole.calls if is_collective(each) and self._is_of(before, op, each)]
            edges = [each for each in sent if each.target in EXCHANGES]
            announced = sum(collective_at(self.whole, each).wire_bytes for each in edges or sent)
            way = "what lies next to each piece" if edges else "local work and sums of a few numbers"
            way += f", in {len(edges)} collectives" if len(edges) > 1 else ""
            yield Alternative(question, way, announced if edges else costs.apart or announced, True)
            yield Alternative(question, "gather the whole dim", costs.gathered, False)

    def _is_of(self, before: Program, op: fx.Node, node: fx.Node) -> bool:
        """Whether a node belongs to the same call of the user's as an op of an earlier program."""
        source, other = before.source(op), self.whole.source(node)
        return (source, source.ordinal) == (other, other.ordinal)

    def _gathered_alternatives(self, node: fx.Node, moved: Movement, questions: set[str]) -> Iterator[Alternative]:
        """For an op that gathers its operand or reduces its result: what decomposing it would have sent."""
        program = self.compiled.at("decompose")
        ops = {each.name: each for each in program.calls}
        names = [self._call_name(each) for each in (*moved.users, moved.producer) if each.op == "call_function"]
        for op in (ops[name] for name in dict.fromkeys(names) if name in ops):
            costs = compare_forms(program, op)
            if costs is None or costs.axes.isdisjoint(axes_of(node)) or not (costs.apart or costs.refused):
                continue  # nothing has to be sent for it
            question = _question(program, op)
            if question not in questions:
                yield Alternative(question, "not taken apart", costs.gathered, True)
            yield Alternative(question, "taken apart, as local work and a sum", costs.apart, False, costs.refused)

    # Whether data or weights move.

    @cached_property
    def _side_alternatives(self) -> dict[str, list[Alternative]]:
        """For each axis that cuts data and weights, whether data or weights move. Bytes are those of a whole step."""
        annotated = self.compiled.at("decompose")
        of_axes = {}
        for axis in Precedence(annotated.pins).contested:
            data = choose_cuts(annotated.copy()).wire_bytes
            first = frozenset({axis})
            weights = choose_cuts(propagate(cut_blocks(annotated, first), first)).wire_bytes
            chosen, question = self.plan.wire_bytes, f"over {axis}, which cuts data and weights, in the whole step"
            ways = {"weights come to the data": data, "data come to the weights": weights}
            of_axes[axis] = [Alternative(question, way, cost, cost == chosen) for way, cost in ways.items()]
            if chosen not in ways.values():
                of_axes[axis].insert(0, Alternative(question, "each op as it costs least", chosen, True))
        return of_axes


def _question(program: Program, op: fx.Node) -> str:
    module = program.source(op).module
    return f"to compute {op.name}{f' ({module})' if module else ''}"


# How a reshard is brought about.


def _reshard_alternatives(program: Program, moved: list[Movement]) -> Iterator[Alternative]:
    """Sequences of collectives for a reshard; for those of a bucket the sequences that serve every member."""
    reshards = []
    for movement in moved:
        (producer, i), (result, j) = program.value(movement.producer), program.value(movement.result)
        src, dst = program.shardings(producer)[i], program.shardings(result)[j]
        types = program.value_type((producer, i)), program.value_type((result, j))
        if src is not None and dst is not None and src != dst and types[0] == types[1]:
            reshards.append((src, dst, types[0]))
    if not reshards:
        return
    costs: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by way, bytes sent and bytes held of each member
    chosen: set[str] = set()
    for src, dst, type_ in reshards:
        for i, steps in enumerate(compare_steps(src, dst, type_)):
            way = ", then ".join(kinds_of(steps)) or "nothing"
            costs[way].append((bytes_sent(src, steps, type_), bytes_held(src, steps, type_)))
            chosen |= {way} if i == 0 else set()
    src, dst, type_ = reshards[0]
    question = f"to bring {src.text(type_)} to {dst.text(type_)}"
    question += f" and {len(reshards) - 1} more likewise" if len(reshards) > 1 else ""
    ways = {way: each for way, each in costs.items() if way in chosen or len(each) == len(reshards)}
    least = max(nbytes for way in chosen for _, nbytes in ways[way])
    for way, each in list(ways.items())[: MOST + len(chosen)]:
        most = max(nbytes for _, nbytes in each)
        note = f"holds {bytes_text(most)} at a time" if most > least else ""
        yield Alternative(question, way, sum(sent for sent, _ in each), way in chosen, note)


@dataclass(frozen=True, slots=True)
class OpWay:
    """A way to compute an op: ``text`` says how it is cut over the axes.

    ``wire_bytes``: what a rank sends to reshard its operands and results. ``work``: how many times as much a rank
    computes as in the chosen way. ``is_considered``: an operand or a result is cut so, which is a condition for the
    compiler to consider the way.
    """

    text: str
    wire_bytes: int
    work: float
    is_chosen: bool
    is_considered: bool = True


def compare_cuts(plan: CutPlan, node: fx.Node, axes: Axes) -> tuple[OpWay, ...]:
    """The chosen way to compute an op of the plan's program, and the others over these axes, the cheapest first."""
    rule, names = plan.program.rule(node), {part.name for part in axes}
    chosen = _chosen(plan, node, rule)
    rest = {factor: cut.without(names) for factor, cut in chosen.items()}
    rest = {factor: cut for factor, cut in rest.items() if cut != WHOLE}
    now = next((factor for factor, cut in chosen.items() if {part.name for part in cut.all_axes} >= names), "")
    ways: dict[str, Cuts] = {}  # the axes cut each factor in turn that they may cut, and then none
    for factor, before in ((factor, rest.get(factor, WHOLE)) for factor in rule.sizes):
        cut = DimSharding(before.axes + axes)
        if not before.minor and rule.may_cut(factor, cut):
            ways[factor] = {**rest, factor: cut}
    ways[""] = rest
    ways.pop(now, None)
    considered = choices_of_cuts(rule, plan.arrivals.claims(node))
    others = []
    for factor, cuts in ways.items():
        cost = plan.arrivals.cost(node, plan.arrivals.op_shardings(node, cuts))
        work = num_pieces(chosen) / num_pieces(cuts)
        others.append(OpWay(_text(rule, factor, axes), cost, work, False, cuts in considered))
    way = OpWay(_text(rule, now, axes), plan.arrivals.cost(node, plan.ops[node]), 1.0, True)
    return (way, *sorted(others, key=lambda way: (way.wire_bytes, way.work)))


def op_of_partial_sum(plan: CutPlan, node: fx.Node, axes: Axes) -> fx.Node:
    """The op that left a sum open which passed through ``node``."""
    names = {part.name for part in axes}
    while True:
        operands = zip(plan.program.operand_values(node), plan.ops[node].operands, strict=True)
        partial = ((value, {part.name for part in src.partial_axes}) for value, src in operands if value and src)
        behind = next((value[0] for value, open_axes in partial if names & open_axes), None)
        if behind is None:
            return node
        node = behind


def _chosen(plan: CutPlan, node: fx.Node, rule: Rule) -> Cuts:
    """The cuts of the factors of an op in a plan."""
    program, cuts = plan.program, Cuts()
    values = [(node, i) for i in range(len(rule.results))]
    operands = zip(rule.operands, plan.ops[node].operands, program.operand_values(node), strict=True)
    results = zip(rule.results, plan.ops[node].results, values, strict=True)
    for dims, sharding, value in (*operands, *results):
        if dims is not None and sharding is not None and value is not None:
            cuts |= factor_cuts(dims, sharding.dims, program.value_type(value).shape, rule.sizes)
    return cuts


def _text(rule: Rule, factor: str, axes: Axes) -> str:
    """The cut of a factor in words, by a dim of the result or of an operand."""
    over = " and ".join(dict.fromkeys(part.name for part in axes))
    for dims in rule.results:
        for dim, factors in enumerate(dims or ()):
            if factor in factors:
                return f"cut over {over} along dim {dim} of the result"
    for i, dims in enumerate(rule.operands):
        for dim, factors in enumerate(dims or ()):
            if factor in factors:
                return f"cut over {over} along what is summed, dim {dim} of operand {i}"
    return f"not cut over {over}"


MOST_STEPS = 3  # steps of a sequence
Steps = tuple[Step, ...]


class _UnboundedSpace(Space):
    """A search space without a bound on the size of a local value."""

    @cached_property
    def bound(self) -> int:
        """The whole value."""
        return self.scale


@lru_cache(maxsize=1024)
def compare_steps(src: Sharding, dst: Sharding, type: TensorType) -> tuple[Steps, ...]:
    """The steps that ``plan_reshard`` chooses, and then other sequences, those that send fewer bytes first."""
    chosen = plan_reshard(src, dst, type)
    if not chosen or any(cut.minor for cut in src.dims + dst.dims):
        return (chosen,)
    best: dict[tuple[str, ...], Steps] = {}
    plain, atoms, active, _ = search_space(src, dst, type.shape, is_wide=True)
    space = _UnboundedSpace(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    for moves in _ways(space, space.src, ()):
        steps = tuple(steps_of(moves, space, atoms, active, src, type.shape))
        kinds = kinds_of(steps)
        if kinds not in best or bytes_sent(src, steps, type) < bytes_sent(src, best[kinds], type):
            best[kinds] = steps
    best.pop(kinds_of(chosen), None)
    sequences = [chosen]
    for steps in sorted(best.values(), key=lambda steps: (bytes_sent(src, steps, type), len(steps))):
        counts = Counter(kinds_of(steps))  # left out where another sequence needs only some of these
        if not any(Counter(kinds_of(other)) < counts for other in [*sequences, *best.values()] if other is not steps):
            sequences.append(steps)
    return tuple(sequences)


def kinds_of(steps: Steps) -> tuple[str, ...]:
    """The kinds of the steps in order, without views."""
    return tuple(step.kind for step in steps if step.kind != "view")


def bytes_sent(src: Sharding, steps: Steps, type: TensorType) -> int:
    """Bytes that one rank sends in the steps of a reshard."""
    return sum(each.wire_bytes for each in collectives_of_steps(src, steps, type))


def bytes_held(src: Sharding, steps: Steps, type: TensorType) -> int:
    """The most bytes of the value that one rank holds at a time, before, between or after the steps of a reshard."""
    local = [src.local_shape(type.shape), *(step.sharding.local_shape(step.shape) for step in steps)]
    return max(map(math.prod, local)) * type.dtype.itemsize


def _ways(space: Space, state: State, before: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """The ways from a state to the target that visit no state twice."""
    if state == space.dst:
        yield before
    elif len(before) < MOST_STEPS:
        known = {move.before for move in before}
        for move, _ in moves_from(space, state):
            if move.after not in known:
                yield from _ways(space, move.after, (*before, move))


@dataclass(frozen=True, slots=True)
class FormCosts:
    """Bytes that a rank sends over ``axes`` if an op is decomposed (``apart``), and if its operand is gathered.

    ``refused``: why the compiler does not consider decomposing it.
    """

    axes: frozenset[str]
    apart: int
    gathered: int
    refused: str = ""


def compare_forms(program: Program, node: fx.Node) -> FormCosts | None:
    """The costs of both ways for an op; None for an op that is never decomposed."""
    rule = program.rule(node)
    if node.target not in DECOMPOSITIONS and node.target not in WINDOWED:
        return None
    cuts = arriving(program, node, rule)
    whole = cut_whole(rule, cuts) if node.target in DECOMPOSITIONS else set()
    if whole and DECOMPOSITIONS[node.target].moved(program, node, whole) < NEVER:  # into local work and a sum
        count = num_pieces({factor: cuts[factor] for factor in whole})
        apart, gathered = apart_bytes(program, node, cuts, whole), gathered_bytes(program, node, rule, whole, cuts)
        refused = "not asked: positions do not follow one another" if is_scattered(node, cuts, whole) else ""
        if any(is_stored(program, node, cuts[factor]) for factor in whole):
            refused = "not asked: a table that is cut as inputs are is stored so, and gathered"
        axes = frozenset(part.name for factor in whole for part in cuts[factor].all_axes)
        return FormCosts(axes, apart * (count - 1) // count, gathered * (count - 1) // count, refused)
    windows = windows_of(program, node, rule) if node.target in WINDOWED else iter(())
    for factor, along, moved in windows:  # reads edges of neighbours; all ranks together send ``moved`` bytes
        gathered = gathered_bytes(program, node, rule, {factor}, cuts) * (along.count - 1) // along.count
        apart = ceil_div(moved, along.count * num_others(cuts, {factor}))
        return FormCosts(frozenset(part.name for part in cuts[factor].all_axes), apart, gathered)
    return None
