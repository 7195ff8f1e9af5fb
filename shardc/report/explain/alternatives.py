"""The alternatives at a collective: the ways that the compiler could choose from, and the bytes a rank sends by each.

Passes record their choices: how an op is cut (``Program.cut_choice``), whether it is taken apart
(``Program.forms``), and whether data or weights move (``Program.sides``). This file prices these records and puts them
in words. Ways to bring a value from one sharding to another follow from the two shardings alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache

from torch import fx

from shardc.compiler import Compiled
from shardc.language.cut import factor_cuts
from shardc.language.mesh import Axes
from shardc.language.rule import Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType
from shardc.language.text import bytes_text
from shardc.passes.decompose.attention import way_text
from shardc.passes.decompose.decompose import decompose
from shardc.passes.reshard.choose_cuts import choose_cuts, num_pieces, op_bytes, op_shardings
from shardc.passes.reshard.choose_sides import with_parameters_first
from shardc.passes.reshard.move_axes import Move, Space, State, moves_from
from shardc.passes.reshard.plan_reshard import collectives_of_steps, plan_reshard, search_space, steps_of
from shardc.program.collective import EXCHANGES, Step
from shardc.program.communication import axes_of, collective_at, goes_round, is_collective, ring_of
from shardc.program.node import is_free, operand, operands
from shardc.program.program import Program
from shardc.program.provenance import CutChoice, Cuts, FormChoice, Source
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.collectives import Movement, movements, producer_of
from shardc.report.explain.records import Alternative

MOST = 4  # alternatives for one question


def alternatives(compiled: Compiled, name: str) -> tuple[Alternative, ...]:
    """The alternatives at one collective of a compiled model."""
    return AlternativeFinder(compiled).alternatives(name)


def choices(compiled: Compiled) -> dict[str, tuple[Alternative, ...]]:
    """The alternatives at every collective of a compiled model, by name."""
    finder = AlternativeFinder(compiled)
    return {each.name: finder.alternatives(each.name) for each in collectives_of(compiled.program)}


class AlternativeFinder:
    """Finds the alternatives at the collectives of one compiled model."""

    def __init__(self, compiled: Compiled) -> None:
        self.program, self._compiled = compiled.whole, compiled
        self._nodes = {node.name: node for node in self.program.calls}
        self._forms = {each.op: each for each in self.program.forms}

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """The alternatives at a collective; none for a message between pipeline stages."""
        node = sender(self._nodes, name)
        if node is None:
            return ()
        moved = list(movements(self.program, node))
        ways = [*_reshard_alternatives(self.program, moved)]
        if of_attention := [*self._attention_alternatives(node, moved)]:
            return (*ways, *of_attention)
        if len(moved) == 1 and node.target not in EXCHANGES:  # these send the same for any cut of an op
            ways += _cut_alternatives(self.program, node, moved[0])
        questions = {each.question for each in ways}
        if len(moved) == 1:
            ways += self._decomposed_alternatives(node if node.target in EXCHANGES else moved[0].producer)
        for each in moved:
            ways += self._gathered_alternatives(node, each, questions)
        return (*ways, *(way for axis in axes_of(node) for way in self._side_alternatives.get(axis, ())))

    def _attention_alternatives(self, node: fx.Node, moved: Sequence[Movement]) -> Iterator[Alternative]:
        """For operands and results of attention: a ring, heads shared by ranks, or keys gathered by each rank."""
        near = [node] if node.target in EXCHANGES else [op for each in moved for op in (*each.users, each.producer)]
        near = [self._behind_views(self.program.value(each)[0]) for each in near if each.op == "call_function"]
        for form in (each for each in self._forms.values() if each.ways):
            if any(form.op == op.name or self._is_of(form, op) for op in near):
                question = f"to compute {form.target.lstrip('_')}{_place(form.source)}"
                for i, (way, nbytes) in enumerate(form.ways):
                    yield Alternative(question, way, nbytes, i == 0)
                return
        if (ring := ring_of(node)) is not None and any(ring.in_zigzag):  # no ranks share heads there
            question = f"to compute {node.name}{_place(self.program.source(node))}"
            chunks = [type_ for each in goes_round(node)[:2] if (type_ := self.program.local_type(each))]
            gathered = (ring.count - 1) * sum(type_.nbytes for type_ in chunks)
            sent = collective_at(self.program, node).wire_bytes
            yield Alternative(question, way_text(ring.count, 1, travels=True), sent, True)
            yield Alternative(question, way_text(ring.count, 1, travels=False), gathered, False)

    def _behind_views(self, node: fx.Node) -> fx.Node:
        while node.op == "call_function" and is_free(node) and not is_collective(node):
            node = self.program.value(operand(node))[0]
        return node

    def _decomposed_alternatives(self, producer: fx.Node) -> Iterator[Alternative]:
        """For an op that was taken apart and is gone: the bytes if its operand were gathered instead."""
        for form in (each for each in self._forms.values() if each.is_apart and self._is_of(each, producer)):
            sent = [each for each in self.program.calls if is_collective(each) and self._is_of(form, each)]
            edges = [each for each in sent if each.target in EXCHANGES]
            announced = sum(collective_at(self.program, each).wire_bytes for each in edges or sent)
            way = "what lies next to each piece" if edges else "local work and sums of a few numbers"
            way += f", in {len(edges)} collectives" if len(edges) > 1 else ""
            question = f"to compute {form.target.lstrip('_')}{_place(form.source)}"
            yield Alternative(question, way, announced if edges else form.apart_bytes or announced, True)
            yield Alternative(question, "gather the whole dim", form.gathered_bytes, False)

    def _is_of(self, form: FormChoice, node: fx.Node) -> bool:
        """Whether a node belongs to the user's call that was taken apart."""
        source = self.program.source(node)
        return node.op == "call_function" and (form.source, form.source.ordinal) == (source, source.ordinal)

    def _gathered_alternatives(self, node: fx.Node, moved: Movement, questions: set[str]) -> Iterator[Alternative]:
        """For an op that gathers its operand or reduces its result: the bytes if it were taken apart instead."""
        ops = (self.program.value(each)[0] for each in (*moved.users, moved.producer) if each.op == "call_function")
        for op in dict.fromkeys(ops):
            form = self._forms.get(op.name)
            if form is None or form.axes.isdisjoint(axes_of(node)) or not (form.apart_bytes or form.refused):
                continue  # nothing has to be sent for it
            question = _question(self.program, op)
            if question not in questions:
                yield Alternative(question, "not taken apart", form.gathered_bytes, True)
            yield Alternative(question, "taken apart, as local work and a sum", form.apart_bytes, False, form.refused)

    @cached_property
    def _side_alternatives(self) -> dict[str, list[Alternative]]:
        """For each axis that cuts data and weights, whether data or weights move. Bytes are those of a whole step."""
        of_axes = {}
        for side in self.program.sides:
            first = with_parameters_first(self._compiled.at(decompose), side.axis)
            ways = {
                "weights come to the data": side.data_bytes,
                "data come to the weights": choose_cuts(first).wire_bytes,
            }
            question = f"over {side.axis}, which cuts data and weights, in the whole step"
            if side.wire_bytes not in ways.values():
                ways = {"each op as it costs least": side.wire_bytes, **ways}
            of_axes[side.axis] = [Alternative(question, way, n, n == side.wire_bytes) for way, n in ways.items()]
        return of_axes


def _place(source: Source) -> str:
    place = source.location or source.module
    return f" ({place})" if place else ""


def _question(program: Program, op: fx.Node) -> str:
    module = program.source(op).module
    return f"to compute {op.name}{f' ({module})' if module else ''}"


# Ways to carry out a reshard.


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
    costs: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by way: bytes sent and bytes held for each member
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


# Ways to cut an op.


def _cut_alternatives(program: Program, node: fx.Node, moved: Movement) -> list[Alternative]:
    """Ways to compute the op that leaves a sum open, or else the op that reads the value."""
    is_sum = not program.has_many(moved.operand) and bool(program.sharding(moved.operand).partial)
    near = [moved.producer] if is_sum else [user for user in moved.users if user.op != "output"]
    choices = ((op, program.cut_choice(op)) for op in (program.value(each)[0] for each in near))
    op, choice = next(((op, choice) for op, choice in choices if choice is not None), (node, None))
    axes = tuple(program.mesh.axis(axis) for axis in axes_of(node)) if program.mesh else ()
    if choice is not None and is_sum:
        op, choice = _where_sum_opens(program, op, choice, axes)
    ways = [] if choice is None else _ways_to_cut(choice, axes, _question(program, op))
    return ways[: MOST + 1] if len(ways) > 1 and ways[0].wire_bytes else []  # else the collective has other reasons


def _ways_to_cut(choice: CutChoice, axes: Axes, question: str) -> list[Alternative]:
    """The chosen way to compute an op, and the others over these axes, the cheapest first."""
    tensors, rule, names = choice.tensors, choice.tensors.rule, {part.name for part in axes}
    chosen = _chosen_cuts(choice)
    rest = {factor: cut.without(names) for factor, cut in chosen.items()}
    rest = {factor: cut for factor, cut in rest.items() if cut != WHOLE}
    now = next((factor for factor, cut in chosen.items() if {part.name for part in cut.all_axes} >= names), "")
    ways: dict[str, Cuts] = {}  # the axes cut in turn each factor that they may cut, and then none
    for factor, before in ((factor, rest.get(factor, WHOLE)) for factor in rule.sizes):
        cut = DimSharding(before.axes + axes)
        if not before.minor and rule.may_cut(factor, cut):
            ways[factor] = {**rest, factor: cut}
    ways[""] = rest
    ways.pop(now, None)
    others: list[tuple[float, Alternative]] = []
    for factor, cuts in ways.items():
        work = num_pieces(chosen) / num_pieces(cuts)
        note = "" if cuts in choice.considered else "nothing that it takes or makes is cut so"
        note = f"each rank computes {work:.0f} times as much" if work > 1 else note
        sent = op_bytes(tensors, op_shardings(tensors, cuts))
        others.append((work, Alternative(question, _cut_text(rule, factor, axes), sent, False, note)))
    others.sort(key=lambda pair: (pair[1].wire_bytes, pair[0]))
    way = Alternative(question, _cut_text(rule, now, axes), op_bytes(tensors, choice), True)
    return [way, *(way for _, way in others)]


def _where_sum_opens(program: Program, op: fx.Node, choice: CutChoice, axes: Axes) -> tuple[fx.Node, CutChoice | None]:
    """The op that opened the sum that passes through ``op``, and its choice."""
    names = {part.name for part in axes}
    through = (
        producer_of(program, operand)
        for operand, sharding in zip(operands(op), choice.operands, strict=True)
        if operand is not None and sharding is not None and names & {part.name for part in sharding.partial_axes}
    )
    before = next(through, None)
    if before is None:
        return op, choice
    producer = program.value(before)[0]
    opened = program.cut_choice(producer)
    return (producer, None) if opened is None else _where_sum_opens(program, producer, opened, axes)


def _chosen_cuts(choice: CutChoice) -> Cuts:
    """The chosen cuts of the factors of an op."""
    rule, tensors, cuts = choice.tensors.rule, choice.tensors, Cuts()
    operands = zip(rule.operands, choice.operands, tensors.operand_types, strict=True)
    results = zip(rule.results, choice.results, tensors.result_types, strict=True)
    for dims, sharding, type_ in (*operands, *results):
        if dims is not None and sharding is not None and type_ is not None:
            cuts |= factor_cuts(dims, sharding.dims, type_.shape, rule.sizes)
    return cuts


def _cut_text(rule: Rule, factor: str, axes: Axes) -> str:
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


MOST_STEPS = 3  # most steps of a sequence
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
