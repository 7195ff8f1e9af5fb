"""What the HTML report is drawn from: the JSON dump of a program, and beside it what a picture needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardc.cost import nbytes
from shardc.dump_json import program_json
from shardc.memory_curve import memory_curve
from shardc.program import Program
from shardc.report_time import schedule_lanes, step_lanes
from shardc.report_why import why_record
from shardc.sharding import Sharding
from shardc.stage import has_stages
from shardc.stage_ledger import bytes_over_time
from shardc.stage_memory import memory_by_rank
from shardc.stage_record import StageRecord
from shardc.step_record import has_machine
from shardc.strict import offences
from shardc.text import call_text, op_names, value_names

if TYPE_CHECKING:
    from shardc.api import Compiled


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
            **why_record(program, compiled.choices() if program.level == "lowered" else {}),
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
    lowered = compiled.stages["fuse_collectives"]
    found = offences(lowered, [*lowered.pins, *(pin for pin in compiled.program.pins if pin.kind == "value")])
    return [{"who": e.who, "what": e.what, "problem": e.problem, "remedy": e.remedy} for e in found]


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
