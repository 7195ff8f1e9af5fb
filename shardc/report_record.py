"""What the HTML report is drawn from: the JSON dump of a program, and beside it what a picture needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardc.action import Action
from shardc.cost import nbytes
from shardc.dump_json import program_json
from shardc.fact import Origin
from shardc.memory_curve import memory_curve
from shardc.node import is_getitem
from shardc.program import Program
from shardc.sharding import Sharding
from shardc.stage import has_stages
from shardc.stage_ledger import bytes_over_time
from shardc.stage_memory import memory_by_rank
from shardc.stage_record import StageRecord
from shardc.strict import offences
from shardc.text import call_text, op_names, value_names
from shardc.timeline import Task, Timeline

if TYPE_CHECKING:
    from shardc.api import Compiled


def report_record(compiled: Compiled, program: Program) -> dict[str, Any]:
    """``program_json``, and under ``report`` what else the page shows; a program in global shapes.

    ``inputs``: by node the user's name and kind.
    ``calls``: by node, as the text form prints them. ``annotations``, ``origins``, ``why``: see ``_origins``.
    ``layouts``: see ``_layout``. ``curve``: see ``MemoryCurve``, of a pipeline instead ``ranks``.
    """
    return {
        **program_json(program),
        "report": {
            "model": type(compiled.model).__name__,
            "device_ids": program.mesh and program.mesh.device_ids,
            "inputs": _inputs(program),
            "calls": _calls(program),
            "pins": [{"kind": pin.kind, "name": pin.name, "text": pin.text} for pin in program.pins],
            "offences": _offences(compiled),
            **_origins(program),
            "layouts": dict(_layouts(program)),
            **(_pipeline(program) if has_stages(program) else _curve(program)),
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


# Why.


def _origins(program: Program) -> dict[str, Any]:
    """``why``: for each node by axis the place of its origin in ``origins``, in each of its results.

    An origin is ``[annotation, value, via, before]``: a place in ``annotations``, the value that it is of, the call
    that it came through, and the place of the origin before it, -1 on the annotated value itself. Values share the
    origins of those that they come from, so that the table is as long as the program and not as all its chains.
    """
    names = _result_names(program)
    table: dict[tuple[int, str, str, int], int] = {}
    annotations: dict[str, int] = {}
    places: dict[int, int] = {}  # by the identity of an origin, all of which the program holds

    def place(origin: Origin) -> int:
        new = [each for each in origin.chain if id(each) not in places]
        for each in new:
            before = -1 if each.before is None else places[id(each.before)]
            annotation = annotations.setdefault(each.annotation, len(annotations))
            key = annotation, names.get(each.value, each.value[0]), each.via, before
            places[id(each)] = table.setdefault(key, len(table))
        return places[id(origin)]

    why = {
        node.name: [{axis: place(origin) for axis, origin in found.items()} for found in program.origins(node)]
        for node in program.graph.nodes
        if node.op != "output" and any(program.origins(node))
    }
    return {"annotations": list(annotations), "origins": list(table), "why": why}


def _result_names(program: Program) -> dict[tuple[str, int], str]:
    """What the dump calls each result of a call that has several: the getitem that picks it."""
    picked = ((*program.value(node), node) for node in program.graph.nodes if is_getitem(node))
    return {(producer.name, index): node.name for producer, index, node in picked}


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


def _curve(program: Program) -> dict[str, Any]:
    return {"curve": memory_curve(program).record()}


def _pipeline(program: Program) -> dict[str, Any]:
    """``timeline``: what each rank does when; ``ranks``: by rank, bytes by class and after each of its actions."""
    record = StageRecord(program)
    curves = bytes_over_time(record.stages, record.schedule)
    return {
        "timeline": _timeline(record.timeline),
        "ranks": [
            {"memory": memory, "curve": curve} for memory, curve in zip(memory_by_rank(program), curves, strict=True)
        ],
    }


def _timeline(found: Timeline) -> dict[str, Any]:
    critical = {task.name for task in found.critical_path}
    return {
        "makespan": _digits(found.makespan),
        "idle": _digits(found.idle_fraction),
        "ranks": [
            [_box(found, task, task.name in critical) for task in found.on(rank) if task.seconds]
            for rank in found.ranks
        ],
    }


def _box(found: Timeline, task: Task, is_critical: bool) -> dict[str, Any]:
    action = task.name
    assert isinstance(action, Action), action
    return {
        "name": str(action),
        "kind": action.kind,
        "stage": action.stage,
        "microbatch": action.microbatch,
        "start": _digits(found.starts[task.name]),
        "seconds": _digits(task.seconds),
        "critical": is_critical,
    }


def _digits(number: float) -> float:
    """Six of them: what estimates have, the same on every machine."""
    return float(f"{number:.6g}")
