"""What the compiler chose among, where a collective stands: the questions of the passes asked again, all answers kept.

Compiling keeps no answer but the best one. So the reshard planner, the choice of how an op is cut, that of taking an op
apart and that between data and weights are asked once more, of the program that they were asked of, for one collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardc.compiler import Compiled
from shardc.language.sharding import Sharding, TensorType
from shardc.passes.propagate.cut_blocks import cut_blocks
from shardc.passes.propagate.pins import Precedence
from shardc.passes.propagate.propagate import propagate
from shardc.passes.reshard.choose_cuts import CutPlan, choose_cuts
from shardc.passes.reshard.choose_sides import cheapest_plan
from shardc.program.collective import EXCHANGES
from shardc.program.communication import axes_of, collective_at, is_collective
from shardc.program.node import op_name
from shardc.program.program import Program
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.report.explain.compare import compare_cuts, compare_forms, compare_steps, held, kinds_of, sent, where_summed
from shardc.report.explain.movement import Movement, movements

MOST = 4  # alternatives of a question
Pair = tuple[Sharding, Sharding, TensorType]


class Chooser:
    """Answers for the collectives of one compiled model; the plan is made once more, for all of them."""

    def __init__(self, compiled: Compiled) -> None:
        self.whole, self.compiled = compiled.whole, compiled
        self._nodes = {node.name: node for node in self.whole.calls}

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """What was chosen among at a collective; nothing for a message of a pipeline."""
        node = sender(self._nodes, name)
        if node is None:
            return ()
        moved = list(movements(self.whole, node))
        found = [*_of_steps(self.whole, moved)]
        if len(moved) == 1 and node.target not in EXCHANGES:  # what these send is of no way to compute an op
            found += self._of_op(node, moved[0])
        found += [*self._of_form(node, moved), *(way for each in moved for way in self._of_gather(node, each, found))]
        return (*found, *self._of_sides(node))

    @cached_property
    def plan(self) -> CutPlan:
        """How every op is cut, decided again for the program that insert_reshards was given."""
        return cheapest_plan(self.compiled.at("decompose").copy())

    def _of_op(self, node: fx.Node, moved: Movement) -> Iterator[Alternative]:
        """How the op could be computed that leaves a sum open, or that wants the value as it comes."""
        named = {each.name: each for each in self.plan.ops}
        is_sum = bool(self.whole.sharding(moved.operand).partial) if not self.whole.has_many(moved.operand) else False
        asked = [moved.producer] if is_sum else [user for user in moved.users if user.op != "output"]
        op = next((named[name] for name in (self._producer(each) for each in asked) if name in named), None)
        if op is None:
            return
        program = self.plan.program
        axes = tuple(program.mesh.axis(axis) for axis in axes_of(node)) if program.mesh else ()
        op = where_summed(self.plan, op, axes) if is_sum else op
        module = program.source(op).module
        question = f"to compute {op.name}{f' ({module})' if module else ''}"
        ways = compare_cuts(self.plan, op, axes)
        for way in (
            ways[: MOST + 1] if len(ways) > 1 and ways[0].wire_bytes else ()
        ):  # else it is sent for other reasons
            unasked = "" if way.is_considered or way.work > 1 else "nothing that it takes or makes is cut so"
            note = f"each rank computes {way.work:.0f} times as much" if way.work > 1 else unasked
            yield Alternative(question, way.text, way.wire_bytes, way.is_chosen, note)

    def _producer(self, node: fx.Node) -> str:
        return self.whole.value(node)[0].name

    def _of_form(self, node: fx.Node, moved: list[Movement]) -> Iterator[Alternative]:
        """What gathering would have cost of an op that was taken apart: of one on the user's line that is gone."""
        before, after = self.compiled.at("propagate"), {each.name for each in self.compiled.at("decompose").calls}
        made = node if node.target in EXCHANGES else moved[0].producer
        if len(moved) > 1 or made.op != "call_function":
            return
        source = self.whole.source(made)
        for gone in (each for each in before.calls if each.name not in after and self._is_of(before, each, made)):
            costs = compare_forms(before, gone)
            if costs is not None:
                place = f" ({source.location or source.module})" if source.location or source.module else ""
                question = f"to compute {op_name(gone.target).lstrip('_')}{place}"
                sent = [each for each in self.whole.calls if is_collective(each) and self._is_of(before, gone, each)]
                edges = [each for each in sent if each.target in EXCHANGES]
                way = _edges_text(len(edges)) if edges else "local work and sums of a few numbers"
                announced = sum(collective_at(self.whole, each).wire_bytes for each in edges or sent)
                yield Alternative(question, way, announced if edges else costs.apart or announced, True)
                yield Alternative(question, "gather the whole dim", costs.gathered, False)

    def _is_of(self, before: Program, op: fx.Node, node: fx.Node) -> bool:
        """Whether a node of the whole program is made for the call of an op of an earlier one."""
        source, other = before.source(op), self.whole.source(node)
        return (source, source.ordinal) == (other, other.ordinal)

    def _of_gather(self, node: fx.Node, moved: Movement, found: list[Alternative]) -> Iterator[Alternative]:
        """What taking an op apart would cost that gathers, or that adds up what it makes of what it has."""
        program = self.compiled.at("decompose")
        named = {each.name: each for each in program.calls}
        asked = [self._producer(each) for each in (*moved.users, moved.producer) if each.op == "call_function"]
        for op in (named[name] for name in dict.fromkeys(asked) if name in named):
            costs = compare_forms(program, op)
            if costs is None or costs.axes.isdisjoint(axes_of(node)) or not (costs.apart or costs.refused):
                continue  # of what nothing has to be sent for
            module = program.source(op).module
            question = f"to compute {op.name}{f' ({module})' if module else ''}"
            if question not in {each.question for each in found}:
                yield Alternative(question, "not taken apart", costs.gathered, True)
            yield Alternative(question, "taken apart, as local work and a sum", costs.apart, False, costs.refused)

    def _of_sides(self, node: fx.Node) -> Iterator[Alternative]:
        """Over an axis that cuts data and weights: who comes to whom. Bytes are those of the whole step."""
        for axis in (axis for axis in axes_of(node) if axis in self._sides):
            yield from self._sides[axis]

    @cached_property
    def _sides(self) -> dict[str, list[Alternative]]:
        annotated = self.compiled.at("decompose")
        found = {}
        for axis in Precedence(annotated.pins).contested:
            data = choose_cuts(annotated.copy()).wire_bytes
            first = frozenset({axis})
            weights = choose_cuts(propagate(cut_blocks(annotated, first), first)).wire_bytes
            chosen, question = self.plan.wire_bytes, f"over {axis}, which cuts data and weights, in the whole step"
            ways = {"weights come to the data": data, "data come to the weights": weights}
            found[axis] = [Alternative(question, way, cost, cost == chosen) for way, cost in ways.items()]
            if chosen not in ways.values():
                found[axis].insert(0, Alternative(question, "each op as it costs least", chosen, True))
        return found


def _edges_text(count: int) -> str:
    return "what lies next to each piece" + (f", in {count} collectives" if count > 1 else "")


def _of_steps(program: Program, moved: list[Movement]) -> Iterator[Alternative]:
    """Sequences of collectives that bring the values there; of several values those that serve each of them."""
    pairs = [pair for pair in (_ends(program, each) for each in moved) if pair is not None]
    if not pairs:
        return
    sums: dict[str, list[tuple[int, int]]] = defaultdict(list)
    chosen: set[str] = set()
    for src, dst, type_ in pairs:
        for i, steps in enumerate(compare_steps(src, dst, type_)):
            way = ", then ".join(kinds_of(steps)) or "nothing"
            sums[way].append((sent(src, steps, type_), held(src, steps, type_)))
            chosen |= {way} if i == 0 else set()
    src, dst, type_ = pairs[0]
    question = f"to bring {src.text(type_)} to {dst.text(type_)}"
    question += f" and {len(pairs) - 1} more likewise" if len(pairs) > 1 else ""
    full = {way: costs for way, costs in sums.items() if way in chosen or len(costs) == len(pairs)}
    least = max(one for way in chosen for _, one in full[way])
    for way, costs in list(full.items())[: MOST + len(chosen)]:
        most = max(one for _, one in costs)
        note = f"holds {most} B at a time" if most > least else ""
        yield Alternative(question, way, sum(cost for cost, _ in costs), way in chosen, note)


def _ends(program: Program, moved: Movement) -> Pair | None:
    """How a value was made and how it is wanted, where nothing but steps of a reshard lies between."""
    made, come = program.value(moved.producer), program.value(moved.result)
    src, dst = program.shardings(made[0])[made[1]], program.shardings(come[0])[come[1]]
    types = program.value_type(made), program.value_type(come)
    return None if src is None or dst is None or src == dst or types[0] != types[1] else (src, dst, types[0])


def alternatives(compiled: Compiled, name: str) -> tuple[Alternative, ...]:
    """What the compiler chose among where a collective of a compiled model stands."""
    return Chooser(compiled).alternatives(name)


def choices(compiled: Compiled) -> dict[str, tuple[Alternative, ...]]:
    """For each collective of a compiled model, by name, what the compiler chose among there."""
    chooser = Chooser(compiled)
    return {each.name: chooser.alternatives(each.name) for each in collectives_of(compiled.program)}


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


def alternatives_text(found: Sequence[Alternative]) -> str:
    """Under each question its ways, the chosen one first."""
    lines: list[str] = []
    for question in dict.fromkeys(each.question for each in found):
        asked = [each for each in found if each.question == question]
        width, digits = max(len(each.way) for each in asked), max(len(str(each.wire_bytes)) for each in asked)
        lines.append(f"ways {question}, and what a rank sends")
        for each in asked:
            remark = ", ".join(filter(None, ("chosen" * each.is_chosen, each.note)))
            line = f"  {each.way.ljust(width)}  {str(each.wire_bytes).rjust(digits)} B"
            lines.append(line + (f"  ({remark})" if remark else ""))
    return "".join(f"{line}\n" for line in lines)
