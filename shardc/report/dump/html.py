"""What the HTML report is drawn from: the JSON dump of a program, and beside it what a picture needs."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardc.costs.memory import memory_by_rank, memory_curve
from shardc.costs.parameter_bytes import nbytes
from shardc.costs.pipeline_memory import bytes_over_time
from shardc.costs.stage_record import StageRecord
from shardc.costs.step_time import COMPUTING, OVER, Slice, step_timeline
from shardc.costs.time import has_machine
from shardc.language.errors import OptionError
from shardc.language.sharding import Sharding
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import call_text, op_names, value_names
from shardc.report.dump.json import program_json
from shardc.report.dump.selection import Only
from shardc.report.explain.alternatives import Alternative, choices
from shardc.report.explain.collectives import why_needed
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import Chain, ChainStep, Explanation, reason_text
from shardc.report.explain.strict import strict_offences
from shardc.schedules.schedule import Action
from shardc.schedules.timeline import Task, Timeline, rounded

if TYPE_CHECKING:
    from shardc.compiler import Compiled


def report_record(compiled: Compiled, program: Program, asking: str = "") -> dict[str, Any]:
    """``program_json``, and under ``report`` what else the page shows; a program in global shapes.

    ``inputs``: by node the user's name and kind. ``calls``: by node, as the text form prints them.
    ``annotations``, ``steps``, ``why``, ``because``: see ``why_record``.
    ``layouts``: see ``_layout``. ``curve``: see ``MemoryCurve``; of a pipeline instead ``ranks`` and ``timeline``.
    ``lanes``: see ``step_lanes``, where the machine is known. ``asking``: what one types before and after the name of a
    collective to learn what would remove it, on the command line or else in Python.
    """
    return {
        **program_json(program),
        "report": {
            "model": type(compiled.model).__name__,
            "asking": [f"{asking} ", ""] if asking else ["print(program.advise('", "').text())"],
            "device_ids": program.mesh and program.mesh.device_ids,
            "inputs": _inputs(program),
            "calls": _calls(program),
            "pins": [{"kind": pin.kind, "name": pin.name, "text": pin.text} for pin in program.pins],
            "offences": _offences(compiled),
            **why_record(program, choices(compiled) if program.level == "lowered" else {}),
            "layouts": dict(_layouts(program)),
            **_over_time(program),
        },
    }


def _inputs(program: Program) -> dict[str, dict[str, Any]]:
    """Of each input by its node's name; ``bytes`` on one rank and of the whole value."""
    return {
        node.name: {
            "kind": put.kind,
            "name": put.name,
            "bytes": nbytes(program.local_type(node)),
            "whole_bytes": program.global_type(node).nbytes,
        }
        for put, node in zip(program.inputs, program.placeholders, strict=True)
    }


def _calls(program: Program) -> dict[str, str]:
    names, called = value_names(program), op_names(program)
    return {node.name: call_text(node, names, called) for node in program.graph.nodes if node.op == "call_function"}


def _offences(compiled: Compiled) -> list[dict[str, str]]:
    """What ``strict`` would refuse."""
    return [
        {"who": each.who, "what": each.what, "problem": each.problem, "remedy": each.remedy}
        for each in strict_offences(compiled)
    ]


# Layout.


def _layouts(program: Program) -> Iterator[tuple[str, Any]]:
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        if put.kind in ("parameter", "buffer") and program.shardings(node):
            yield node.name, _layout(program.sharding(node), program.global_type(node).shape)


def _layout(sharding: Sharding, shape: tuple[int, ...]) -> list[list[Any]]:
    """For each dim its subdims, each with its size and the parts that cut it: ``[size, [[axis, pre, size], ...]]``."""
    return [
        [[size, [[part.name, part.pre, part.size] for part in axes]] for size, axes in dim.subdims(whole)]
        for dim, whole in zip(sharding.dims, shape, strict=True)
    ]


# Memory and time.


def _over_time(program: Program) -> dict[str, Any]:
    if has_stages(program):
        return {"timeline": schedule_lanes(program), "ranks": _ranks(program)}
    predicted = {"lanes": step_lanes(program)} if has_machine(program) else {}
    return {"curve": memory_curve(program).record(), **predicted}


def _ranks(program: Program) -> list[dict[str, Any]]:
    """By rank of a pipeline, bytes by class, and the most of them in each of its actions."""
    record = StageRecord(program)
    curves = bytes_over_time(record.stages, record.schedule)
    return [{"memory": memory, "curve": curve} for memory, curve in zip(memory_by_rank(program), curves, strict=True)]


SCRIPTS = (
    "element.js",
    "format.js",
    "index.js",
    "layout.js",
    "overview.js",
    "look.js",
    "step.js",
    "tree.js",
    "table.js",
    "schedule.js",
    "time.js",
    "inspector.js",
    "details.js",
    "search.js",
    "start.js",
)  # in the order in which the browser reads them, all in one scope
POLICY = (
    "default-src 'none'; img-src data:; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
)
STYLES = ("theme.css", "frame.css", "parts.css", "screen.css")
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_report(compiled: Compiled, program: Program, only: Only | None = None, asking: str = "") -> str:
    """The page of a compiled model's ``program``, whole. Raises an OptionError where a part is asked for.

    ``asking``: the command line that explains what is named after it, if there is one.
    """
    if only:
        raise OptionError(
            f"only={only.text!r}",
            "format 'html'",
            "the report is of the whole program, and finds what one looks for by its search box",
            "leave out only, or say format text, json or dot",
        )
    return page(report_record(compiled, program, asking))


def page(record: Mapping[str, Any]) -> str:
    """The page of what ``report_record`` gives."""
    style = "".join(map(_file, STYLES))
    script = "(() => {\n'use strict';\n" + "".join(map(_file, SCRIPTS)) + "})();\n"
    filled = {
        "policy": POLICY.format(script=_hash(script), style=_hash(style)),
        "title": escape(f"{record['report']['model']} on {_mesh(record['mesh'])}"),
        "style": style,
        "data": _safe(json.dumps(record, separators=(",", ":"))),
        "script": script,
    }
    return re.sub(r"{{(\w+)}}", lambda found: filled[found[1]], _file("page.html"))


def _mesh(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _file(name: str) -> str:
    return files("shardc.report.dump").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _safe(text: str) -> str:
    """JSON in which nothing can end the script element that holds it."""
    for letter, code in UNSAFE.items():
        text = text.replace(letter, code)
    return text


SMALLEST = 5e-4  # of a step: a gap shorter than that parts no boxes


def schedule_lanes(program: Program) -> dict[str, Any]:
    """``ranks``: by rank of a pipeline what it computes when; ``idle``: the part of all their time."""
    found = StageRecord(program).timeline
    critical = {task.name for task in found.critical_path}
    return {
        "makespan": rounded(found.makespan),
        "idle": rounded(found.idle_fraction),
        "ranks": [
            [_action(found, task, task.name in critical) for task in found.on(rank) if task.seconds]
            for rank in found.ranks
        ],
    }


def _action(found: Timeline, task: Task, is_critical: bool) -> dict[str, Any]:
    action = task.name
    assert isinstance(action, Action), action
    return {
        "name": str(action),
        "kind": action.kind,
        "stage": action.stage,
        "microbatch": action.microbatch,
        "start": rounded(found.starts[task.name]),
        "seconds": rounded(task.seconds),
        "critical": is_critical,
    }


def step_lanes(program: Program) -> dict[str, Any]:
    """``computing``: boxes ``[phase, start, seconds]``; ``collectives``: by axes ``[name, start, seconds]`` of each."""
    found = step_timeline(program)
    lanes = dict.fromkeys(lane for task in found.tasks for lane in task.lanes if lane != COMPUTING)
    return {
        "makespan": rounded(found.makespan),
        "computing": list(_boxes(found)),
        "collectives": {_axes(lane): [_collective(found, task) for task in found.on(lane)] for lane in lanes},
    }


def _boxes(found: Timeline) -> Iterator[list[Any]]:
    """Computations of one phase that follow each other as one."""
    end, number, numbered = 0.0, 0, []
    for task in found.on(COMPUTING):
        number += found.starts[task.name] - end > SMALLEST * found.makespan
        end = found.end(task)
        numbered.append((number, task))
    for (_, phase), group in groupby(numbered, lambda each: (each[0], _slice(each[1]).phase)):
        tasks = [task for _, task in group]
        start = found.starts[tasks[0].name]
        yield [phase, rounded(start), rounded(found.end(tasks[-1]) - start)]


def _collective(found: Timeline, task: Task) -> list[Any]:
    return [_slice(task).name, rounded(found.starts[task.name]), rounded(task.seconds)]


def _slice(task: Task) -> Slice:
    assert isinstance(task.name, Slice), task
    return task.name


def _axes(lane: Hashable) -> str:
    return str(lane).removeprefix(OVER)


Choices = Mapping[str, Sequence[Alternative]]


def why_record(program: Program, choices: Choices) -> dict[str, Any]:
    """``why``: of each value its chains, each the axis and the place of its last step in ``steps``.

    A step is ``[annotation, value, role, via, call, before]``: the place in ``annotations``, fields of ``ChainStep``,
    and the place of the step before it, -1 on the annotated value. ``because``: of each collective its parts (see
    ``_part``), its predicted ``seconds``, ``choices`` with the fields of ``Alternative``, ``notes`` of its
    ``Explanation``, and ``needed``, the sentence of ``why_needed``.
    """
    table, explainer = _Steps(), Explainer(program)
    nodes = [node for node in program.graph.nodes if node.op != "output" and any(program.origins(node))]
    why = {node.name: table.chains(tuple(explainer.chains.of(node))) for node in nodes}
    because = {}
    for name in explainer.collectives:
        found = explainer.explain(f"value:{name}")
        because[name] = {
            "seconds": found.sent and float(f"{found.sent.seconds:.3g}"),
            "parts": [_part(part, table) for part in found.parts or (found,)],
            "choices": list(map(asdict, choices.get(name, ()))),
            "notes": list(found.notes),
            "needed": _needed(program, explainer, name),
        }
    return {"annotations": list(table.annotations), "steps": list(table.rows), "why": why, "because": because}


def _needed(program: Program, explainer: Explainer, name: str) -> str:
    """Of a lowered program, whose types are global; a message between stages is needed for what its notes say."""
    node = explainer.node_of(name)
    return why_needed(program, node) if node is not None and program.level == "lowered" else ""


def _part(found: Explanation, table: _Steps) -> dict[str, Any]:
    """What is sent for one value: what it ``has``, who ``wants`` it how, sentences why, and the ``chains``."""
    return {
        "has": found.has and asdict(found.has),
        "wants": found.wants and asdict(found.wants),
        "reasons": [reason_text(reason, found.wants) for reason in found.reasons],
        "chains": table.chains(found.chains),
    }


class _Steps:
    """Steps, each once for what came before it: values share those that they come from."""

    def __init__(self) -> None:
        self.annotations: dict[str, int] = {}
        self.rows: dict[tuple[int, str, str, str, str, int], int] = {}

    def chains(self, found: Sequence[Chain]) -> list[list[Any]]:
        """The chains as the page has them."""
        return [[chain.axis, self._last(chain)] for chain in found]

    def _last(self, chain: Chain) -> int:
        before = -1
        for step in chain.steps:
            before = self.rows.setdefault((*self._row(chain, step), before), len(self.rows))
        return before

    def _row(self, chain: Chain, step: ChainStep) -> tuple[int, str, str, str, str]:
        annotation = self.annotations.setdefault(chain.end, len(self.annotations))
        return annotation, step.value, step.role, step.via, step.call
