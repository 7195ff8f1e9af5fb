"""Hints: options that would make a plan faster but change its numerical results, so that the user has to choose them.

They concern the gradients and parameters that ranks with different samples send each other. Each hint is compiled for
the whole model, so its figures are those of ``shardc.compile``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.costs.count import collective_seconds
from shardc.costs.step import outer_entry
from shardc.language.mesh import AxisPart, axis_of
from shardc.language.partition import P
from shardc.language.text import seconds_text
from shardc.options import Local
from shardc.program.coding.content import Contents
from shardc.program.program import Program, inputs_of
from shardc.program.stages import sender
from shardc.program.traffic import collectives_of
from shardc.search.pricing.compiling import REFUSALS
from shardc.search.pricing.whole import Cost, WholePlans, cost_of
from shardc.search.space.plan import Plan
from shardc.wire import ACTIVATIONS

GAIN = 0.1  # fraction of a step that a hint has to save
CODEC, EVERY = "int8", 20


def hints(whole: WholePlans, plan: Plan) -> tuple[str, ...]:
    """A sentence for each option that would make a plan clearly faster."""
    cost, links = whole.costs[plan], whole.task.machine.links.values()
    least = GAIN * cost.seconds
    if whole.task.objective != "time" or (cost.exposed < least and all(link.overlap == 1 for link in links)):
        return ()
    program = whole.compiler.compiled(plan).whole
    axes = _slow_axes(program, plan)
    sent = _sent(program, axes)
    if sum(sent.values()) < least:
        return ()
    return (*_in_codes(whole, plan, axes, sent), *_in_groups(whole, plan, axes, program))


def _slow_axes(program: Program, plan: Plan) -> list[str]:
    """The axes that cut samples and cross nodes; if none crosses nodes, all axes that cut samples."""
    machine, inputs = program.options.machine, inputs_of(program, "input").values()
    of_samples = {part.name for node in inputs for part in _first_cut(program, node)}
    axes = [axis.name for axis in plan.axes if axis.name in of_samples]
    return [name for name in axes if machine.link((name,), plan.mesh) != machine.of_axis(name)] or axes


def _sent(program: Program, axes: Sequence[str]) -> Counter[str]:
    """Seconds on the links in a step, by content (gradients, parameters), of collectives over any of these axes."""
    nodes, contents, sent = {node.name: node for node in program.calls}, Contents(program), Counter[str]()
    for each in collectives_of(program):
        node = sender(nodes, each.name)
        if node is not None and not {*map(axis_of, each.axes)}.isdisjoint(axes):
            sent[contents.content(node)] += each.times * collective_seconds(program, each)  # type: ignore[assignment]
    del sent[ACTIVATIONS]
    return sent


def _in_codes(whole: WholePlans, plan: Plan, axes: Sequence[str], sent: Mapping[str, float]) -> Iterator[str]:
    wire = {f"{axis} {content}": CODEC for axis in axes for content in sorted(sent)}
    if whole.task.wire is None and (cost := _changed(whole, plan, whole.costs[plan], wire=wire)) is not None:
        machine = whole.task.machine
        links = " and ".join(dict.fromkeys(machine.link((axis,), plan.mesh).name for axis in axes))
        what = f"{' and '.join(sorted(sent))} over {' and '.join(axes)} ({links})"
        took = (
            f"{seconds_text(sum(sent.values()))} on their links in a step of {seconds_text(whole.costs[plan].seconds)}"
        )
        yield f"wire={wire!r}: {what} take {took}; in codes {_gain(cost, whole.costs[plan])}"


def _in_groups(whole: WholePlans, plan: Plan, axes: Sequence[str], program: Program) -> Iterator[str]:
    stored_over = plan.zero.axes if plan.zero else ()
    for axis in [axis for axis in axes if axis not in stored_over][:1]:
        local, inferred = Local(axis, EVERY), _inferred(plan, program, axis)
        written = tuple({**plan.annotations, **inferred}.items())
        if (cost := _changed(whole, replace(plan, written=written), whole.costs[plan], local=local)) is not None:
            further = f", with annotations {inferred!r} too" if inferred else ""
            how = f"groups along {axis} train by themselves and meet once in {EVERY} steps"
            yield f"local={local.text}{further}: {how}; {_gain(cost, whole.costs[plan])}"


def _inferred(plan: Plan, program: Program, axis: str) -> dict[str, P]:
    """Annotations for the inputs that are cut over the axis by inference alone; groups need them spelled out."""
    annotated = {pattern.removeprefix("input:") for pattern in plan.annotations}
    inputs = {name: node for name, node in inputs_of(program, "input").items() if name not in annotated}
    axes = plan.stage_mesh.axis_names  # without the axis of microbatches
    firsts = {name: [part.name for part in _first_cut(program, node)] for name, node in inputs.items()}
    cuts = {name: tuple(each for each in names if each in axes) for name, names in firsts.items()}
    return {name: P(names if len(names) > 1 else axis, ...) for name, names in cuts.items() if axis in names}


def _first_cut(program: Program, node: fx.Node) -> Sequence[AxisPart]:
    """The axes that cut the first dim of an input."""
    dims = program.sharding(node).dims
    return dims[0].all_axes if dims else ()


def _changed(whole: WholePlans, plan: Plan, before: Cost, **options: Any) -> Cost | None:
    """The cost of a step with further options, its share of an outer step included; None if they are of no use."""
    try:
        compiled = whole.compiler.compiled(plan, **options)
    except REFUSALS:
        return None
    cost, outer = cost_of(compiled.program), outer_entry(compiled.whole)
    if outer is not None:
        wire_bytes = cost.wire_bytes + outer.wire_bytes // outer.every
        cost = replace(cost, seconds=cost.seconds + outer.seconds / outer.every, wire_bytes=wire_bytes)
    is_faster = cost.seconds <= (1 - GAIN) * before.seconds
    return cost if is_faster and cost.memory["peak"] <= whole.task.memory else None


def _gain(cost: Cost, before: Cost) -> str:
    faster, fewer = cost.seconds / before.seconds - 1, cost.wire_bytes / before.wire_bytes
    return f"a step takes {seconds_text(cost.seconds)} ({faster:+.1%}), and a rank sends {fewer:.1%} of the bytes"
