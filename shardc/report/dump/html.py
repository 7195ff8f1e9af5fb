"""The HTML report: one page with the JSON dump of a program and the further data that its pictures need.

``page/`` has the styles and scripts. ``report_record`` collects the data, ``html_report`` puts all into one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardc.costs.count import has_machine, nbytes
from shardc.costs.memory import memory_curve, memory_on
from shardc.costs.replay import ledgers_of
from shardc.costs.stages.record import StageRecord
from shardc.costs.step_time import COMPUTING, Slice, axes_and_link, step_timeline
from shardc.language.errors import OptionError
from shardc.language.record import json_of
from shardc.language.sharding import Sharding
from shardc.program.program import Program
from shardc.program.stages import has_stages, sender
from shardc.program.text import call_text, op_names, value_names
from shardc.report.dump.page_file import filled, hash_of, page_file
from shardc.report.dump.program_record import program_record
from shardc.report.dump.selection import Selection
from shardc.report.explain.alternatives import choices
from shardc.report.explain.collectives import why_needed
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import Chain, Explanation, reason_text
from shardc.report.explain.records import Alternative
from shardc.report.explain.strict import strict_offences
from shardc.schedules.clock import Task
from shardc.schedules.schedule import Action
from shardc.schedules.timeline import rounded

if TYPE_CHECKING:
    from shardc.compiler import Compiled

SMALLEST_GAP = 5e-4  # fraction of a step: a shorter gap does not separate two boxes
POLICY = (
    "default-src 'none'; img-src data:; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
)
STYLES = ("theme.css", "frame.css", "parts.css", "screen.css")
SCRIPTS = (  # in the order in which the browser reads them, all in one scope
    "element.js", "format.js", "index.js", "layout.js", "overview.js", "look.js", "step.js", "tree.js", "table.js",
    "schedule.js", "time.js", "rings.js", "inspector.js", "details.js", "search.js", "start.js",
)  # fmt: skip
UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}  # these could end the script element


def html_report(compiled: Compiled, program: Program, selection: Selection | None = None, explain: str = "") -> str:
    """The page of a compiled model's ``program``. Raises an OptionError for a selection: the page shows all of it.

    ``explain``: the command line of ``shardc explain`` up to the name, if there is one.
    """
    if selection:
        problem = "the report is of the whole program, and finds what one looks for by its search box"
        remedy = "leave out only, or say format text, json or dot"
        raise OptionError(f"only={selection.text!r}", "format 'html'", problem, remedy)
    record = report_record(compiled, program, explain)
    style = "".join(map(page_file, STYLES))
    script = "(() => {\n'use strict';\n" + "".join(map(page_file, SCRIPTS)) + "})();\n"
    mesh = ", ".join(f"{name}={size}" for name, size in record["mesh"].items())
    contents = {
        "policy": POLICY.format(script=hash_of(script), style=hash_of(style)),
        "title": escape(f"{record['report']['model']} on {mesh}"),
        "style": style,
        "data": json.dumps(record, separators=(",", ":")).translate(UNSAFE),
        "script": script,
    }
    return filled(page_file("page.html"), contents)


# The data of the page.


def report_record(compiled: Compiled, program: Program, explain: str = "") -> dict[str, Any]:
    """``program_record`` of a program in global shapes, and under ``report`` the further data of the page.

    ``inputs``: by node, the user's name and kind, and bytes. ``calls``: by node, as the text form prints them.
    ``annotations``, ``steps``, ``why``, ``because``: see ``_why``. ``layouts``: see ``_layout``. ``curve``: memory over
    time; for a pipeline, ``ranks`` and ``timeline`` instead. ``lanes``: the predicted timeline, if the machine is
    known. ``optimizer``: its name. ``asking``: the text that a user types before and after the name of a collective for
    advice to remove it.
    """
    names, ops = value_names(program), op_names(program)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    inputs, layouts = {}, {}
    for input_, node in zip(program.inputs, program.placeholders, strict=True):
        sizes = {"bytes": nbytes(program.local_type(node)), "whole_bytes": program.global_type(node).nbytes}
        inputs[node.name] = {"kind": input_.kind, "name": input_.name, **sizes}
        if input_.kind in ("parameter", "buffer") and program.shardings(node):
            layouts[node.name] = _layout(program.sharding(node), program.global_type(node).shape)
    return {
        **json_of(program_record(program)),
        "report": {
            "model": type(compiled.model).__name__,
            "asking": [f"{explain} ", ""] if explain else ["print(program.advise('", "').text())"],
            "optimizer": program.options.optimizer,
            "device_ids": program.mesh and program.mesh.device_ids,
            "inputs": inputs,
            "calls": {node.name: call_text(node, names, ops) for node in calls},
            "pins": [{"kind": pin.kind, "name": pin.name, "text": pin.text} for pin in program.pins],
            "offences": [
                {"who": each.who, "what": each.what, "problem": each.problem, "remedy": each.remedy}
                for each in strict_offences(compiled)
            ],
            **_why(program, choices(compiled) if program.level == "lowered" else {}),
            "layouts": layouts,
            **_over_time(program),
        },
    }


def _layout(sharding: Sharding, shape: tuple[int, ...]) -> list[list[Any]]:
    """For each dim its subdims, each with its size and the parts that cut it: ``[size, [[axis, pre, size], ...]]``."""
    return [
        [[size, [[part.name, part.pre, part.size] for part in axes]] for size, axes in dim.subdims(whole)]
        for dim, whole in zip(sharding.dims, shape, strict=True)
    ]


# Memory and time.


def _over_time(program: Program) -> dict[str, Any]:
    if not has_stages(program):
        lanes = {"lanes": _step_lanes(program)} if has_machine(program) else {}
        return {"curve": memory_curve(program).record(), **lanes}
    record = StageRecord(program)
    ranks = []
    for ledger in ledgers_of(program):
        memory, curve = memory_on(program, ledger), ledger.highs()
        states = memory["peak"] - max(nbytes for _, nbytes in curve)  # of the optimizer, held all the time
        ranks.append({"memory": memory, "curve": [(action, nbytes + states) for action, nbytes in curve]})
    return {"timeline": _schedule_lanes(record), "ranks": ranks}


def _schedule_lanes(record: StageRecord) -> dict[str, Any]:
    """``ranks``: the timed actions of each rank of a pipeline. ``idle``: the idle fraction of all ranks' time."""
    timeline = record.timeline
    critical = {task.name for task in timeline.critical_path}

    def entry(task: Task) -> dict[str, Any]:
        action = task.name
        assert isinstance(action, Action), action
        return {
            "name": str(action), "kind": action.kind, "stage": action.stage, "microbatch": action.microbatch,
            "start": rounded(timeline.starts[action]), "seconds": rounded(task.seconds),
            "critical": action in critical,
        }  # fmt: skip

    return {
        "makespan": rounded(timeline.makespan),
        "idle": rounded(timeline.idle_fraction),
        "ranks": [[entry(task) for task in timeline.on(rank) if task.seconds] for rank in timeline.ranks],
    }


def _step_lanes(program: Program) -> dict[str, Any]:
    """``computing``: boxes ``[phase, start, seconds]``; ``collectives``: entries ``[name, start, seconds]`` by axes."""
    timeline = step_timeline(program)
    collectives: dict[str, list[list[Any]]] = {}
    for lane in dict.fromkeys(lane for task in timeline.tasks for lane in task.lanes if lane != COMPUTING):
        collectives[axes_and_link(lane)[0]] = [
            [_slice(task).name, rounded(timeline.starts[task.name]), rounded(task.seconds)]
            for task in timeline.on(lane)
        ]
    boxes, numbered, number, end = [], [], 0, 0.0  # successive computations of one phase are one box
    for task in timeline.on(COMPUTING):
        number += timeline.starts[task.name] - end > SMALLEST_GAP * timeline.makespan
        end = timeline.end(task)
        numbered.append((number, task))
    for (_, phase), group in groupby(numbered, lambda each: (each[0], _slice(each[1]).phase)):
        tasks = [task for _, task in group]
        start = timeline.starts[tasks[0].name]
        boxes.append([phase, rounded(start), rounded(timeline.end(tasks[-1]) - start)])
    return {"makespan": rounded(timeline.makespan), "computing": boxes, "collectives": collectives}


def _slice(task: Task) -> Slice:
    assert isinstance(task.name, Slice), task
    return task.name


# Explanations.


def _why(program: Program, alternatives: Mapping[str, Sequence[Alternative]]) -> dict[str, Any]:
    """``why``: the chains of each value, each as its axis and the index of its last step in ``steps``.

    A step is ``[annotation, value, role, via, call, before]``: the index in ``annotations``, fields of ``ChainStep``,
    and the index of the step before it, -1 for the annotated value. ``because``: for each collective, its ``parts``
    (see ``_part``), its predicted ``seconds``, ``choices`` with the fields of ``Alternative``, ``notes`` of its
    ``Explanation``, and ``needed``, the sentence of ``why_needed``.
    """
    steps, explainer = _ChainSteps(), Explainer(program)
    nodes = [node for node in program.graph.nodes if node.op != "output" and any(program.origins(node))]
    why = {node.name: steps.chains(tuple(explainer.chains.of(node))) for node in nodes}
    because = {}
    for name in explainer.collectives:
        explanation, node = explainer.explain(f"value:{name}"), sender(explainer.chains.nodes, name)
        because[name] = {
            "seconds": explanation.sent and float(f"{explanation.sent.seconds:.3g}"),
            "parts": [_part(part, steps) for part in explanation.parts or (explanation,)],
            "choices": list(map(asdict, alternatives.get(name, ()))),
            "notes": list(explanation.notes),
            "needed": why_needed(program, node) if node is not None and program.level == "lowered" else "",
        }
    return {"annotations": list(steps.annotations), "steps": list(steps.rows), "why": why, "because": because}


def _part(part: Explanation, steps: _ChainSteps) -> dict[str, Any]:
    """One value that is sent: the sides in ``has`` and ``wants``, ``reasons`` as sentences, and ``chains``."""
    return {
        "has": part.has and asdict(part.has),
        "wants": part.wants and asdict(part.wants),
        "reasons": [reason_text(reason, part.wants) for reason in part.reasons],
        "chains": steps.chains(part.chains),
    }


class _ChainSteps:
    """The steps of all chains as a prefix tree: chains with the same beginning share its steps."""

    def __init__(self) -> None:
        self.annotations: dict[str, int] = {}
        self.rows: dict[tuple[int, str, str, str, str, int], int] = {}

    def chains(self, chains: Sequence[Chain]) -> list[list[Any]]:
        """Each chain as its axis and the index of its last step."""
        places: list[list[Any]] = []
        for chain in chains:
            before = -1
            for step in chain.steps:
                annotation = self.annotations.setdefault(chain.end, len(self.annotations))
                row = (annotation, step.value, step.role, step.via, step.call, before)
                before = self.rows.setdefault(row, len(self.rows))
            places.append([chain.axis, before])
        return places
