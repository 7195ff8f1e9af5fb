"""What ``dump`` gives: the program as text, as JSON (a contract, version 1) or as a graphviz drawing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.announcement import collectives_of, is_collective
from shardc.bucket import bucket
from shardc.collective import COLLECTIVES, reshard
from shardc.cost import flops_of, memory_of
from shardc.error import ShardingError, did_you_mean
from shardc.ops.padding import fit
from shardc.program import Program
from shardc.stage import has_stages
from shardc.stage_record import StageRecord
from shardc.text import (
    bytes_text,
    collectives_text,
    fallbacks_text,
    memory_text,
    op_names,
    parameters_text,
    program_text,
    table,
    type_text,
)

if TYPE_CHECKING:
    from shardc.api import Compiled

Runs = Mapping[fx.Node, list[dict[str, Any]]]  # the stages of a pipeline that run a call, and in which part
NO_STAGES: Runs = {}
COLLECTIVE_COLOR, FALLBACK_COLOR = "#f4a261", "#e76f51"


def dump(compiled: Compiled, format: str = "text", after: str = "", only: str = "", verbose: bool = False) -> str:
    """The program after the pass named ``after`` as ``text``, ``json`` or ``dot``.

    Without ``after`` it is the last one in global shapes, which has every collective. ``only="collectives"`` and
    ``only="stages"`` leave out all else; ``verbose`` adds the seconds that each pass took.
    """
    program = compiled.at(after) if after else compiled.whole
    seconds = compiled.seconds if verbose else {}
    if format == "json":
        return json_text(_only(program, only) if only else program_json(program, seconds))
    if format == "dot":
        return program_dot(program)
    if format != "text":
        formats = ("text", "json", "dot")
        raise ShardingError(
            f"format {format!r}",
            f"dump knows {', '.join(formats)}",
            "there is no such format",
            did_you_mean(format, formats) or "name one of them",
        )
    if only == "stages":
        return _stages_of(program).text()
    return collectives_text(collectives_of(program)) if only else _whole_text(program, seconds)


def _whole_text(program: Program, seconds: Mapping[str, float]) -> str:
    stages = StageRecord(program) if has_stages(program) else None
    operations = [("all ranks together would need", flops_of(program)), ("one rank", _rank_flops(program, stages))]
    parts = [
        program_text(program),
        parameters_text(program, stages.runs if stages else None),
        stages.text() if stages else "",
        collectives_text(collectives_of(program)),
        fallbacks_text(program, fallbacks_of(program)),
        memory_text(memory_of(program)),
        table(("floating-point operations", "count"), operations),
        table(("pass", "seconds"), [(name, f"{took:.3f}") for name, took in seconds.items()]) if seconds else "",
    ]
    return "\n".join(part for part in parts if part)


def _rank_flops(program: Program, stages: StageRecord | None) -> int:
    """Those of a step; in a pipeline, of the rank that has most of them."""
    return stages.rank_flops if stages else flops_of(program, of_rank=True)


def fallbacks_of(program: Program) -> list[fx.Node]:
    """The ops that have no rule and so run whole on every rank."""
    ours = {*COLLECTIVES, bucket, reshard, fit}
    return [node for node in program.calls if node.target not in ours and program.is_fallback(node)]


# JSON.


def program_json(program: Program, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The JSON form of a program. ``seconds`` are there only where given, since all else is stable to the byte."""
    called, stages = op_names(program), StageRecord(program) if has_stages(program) else None
    runs = stages.runs if stages else {}
    return {
        **_only_collectives(program),
        "parameters": list(_inputs(program, "parameter", runs)),
        "buffers": list(_inputs(program, "buffer")),
        "inputs": list(_inputs(program, "input")),
        "outputs": list(_outputs(program)),
        "fallbacks": [_node(program, node, called) for node in fallbacks_of(program)],
        "memory": memory_of(program),
        "flops": {
            "per_rank": _rank_flops(program, stages),
            "whole": None if program.level == "localized" else flops_of(program),
        },
        "stages": stages.entries() if stages else [],
        **({"schedule": stages.schedule_entry()} if stages else {}),
        "nodes": [_node(program, node, called, runs) for node in program.graph.nodes if node.op != "output"],
        **({"seconds": dict(seconds)} if seconds else {}),
    }


def _only_collectives(program: Program) -> dict[str, Any]:
    mesh = program.mesh
    return {
        "version": 1,
        "level": program.level,
        "mesh": {} if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "collectives": [{"id": found.name, **_without_name(asdict(found))} for found in collectives_of(program)],
    }


def _only(program: Program, only: str) -> dict[str, Any]:
    if only == "collectives":
        return _only_collectives(program)
    stages = _stages_of(program)
    return {"version": 1, "stages": stages.entries(), "schedule": stages.schedule_entry()}


def _stages_of(program: Program) -> StageRecord:
    if has_stages(program):
        return StageRecord(program)
    what = f"a program that is {program.level}, with {program.options.pipeline or 'no pipeline'}"
    raise ShardingError(
        "--only stages", what, "it has no stages yet", "say --pipeline, and no --after before lower_reshards"
    )


def _without_name(collective: dict[str, Any]) -> dict[str, Any]:
    of_pipeline = () if collective["stage"] is not None else ("stage", "times")
    return {key: value for key, value in collective.items() if key not in ("name", *of_pipeline)}


def _inputs(program: Program, kind: str, runs: Runs = NO_STAGES) -> Iterator[dict[str, Any]]:
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if given.kind == kind:
            stages = {"stages": [each["stage"] for each in runs[node]]} if node in runs else {}
            yield {"name": given.name, **_value(program, node), **stages}


def _outputs(program: Program) -> Iterator[dict[str, Any]]:
    for output, node in zip(program.outputs, program.results, strict=True):
        if output.kind == "output" and node is not None:
            yield {"name": output.name, **_value(program, node)}


def _value(program: Program, node: fx.Node) -> dict[str, Any]:
    producer, index = program.value(node)
    type_, local = program.types(producer)[index], program.local_type(node)
    assert type_ is not None and local is not None, node
    shardings = program.shardings(producer)
    sharding = shardings[index] if shardings else None
    return {
        "shape": type_.shape,
        "dtype": str(type_.dtype).removeprefix("torch."),
        "sharding": None if sharding is None or program.level == "localized" else sharding.text(type_),
        "local_shape": local.shape,
    }


def _node(program: Program, node: fx.Node, called: Mapping[Any, str], runs: Runs = NO_STAGES) -> dict[str, Any]:
    source = program.source(node)
    return {
        "name": node.name,
        "op": node.op if node.op == "placeholder" else called.get(node.target, "getitem"),
        "type": type_text(program, node),
        "operands": [operand.name for operand in node.all_input_nodes],
        "phase": source.phase,
        "module": source.module,
        "source": source.location,
        **({"runs": runs[node]} if node in runs else {}),
    }


def json_text(record: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a list, so that two dumps compare line by line."""

    def entry(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        return json.dumps(value)

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {entry(value)}" for key, value in record.items()) + "\n}\n"


# Drawing.


def program_dot(program: Program) -> str:
    """The graph for graphviz: a box for each module, collectives and ops without a rule coloured."""
    called = op_names(program)
    colors = dict.fromkeys(fallbacks_of(program), FALLBACK_COLOR)
    colors |= {node: COLLECTIVE_COLOR for node in program.calls if node.target in COLLECTIVES or is_collective(node)}
    moved = {found.name: f"\n{bytes_text(found.wire_bytes)}" for found in collectives_of(program)}
    clusters: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            fill = f', style=filled, fillcolor="{colors[node]}"' if node in colors else ""
            op = node.op if node.op == "placeholder" else called.get(node.target, "getitem")
            label = f"{node.name}\n{op} {type_text(program, node)}{moved.get(node.name, '')}"
            box = f"{_quoted(node.name)} [label={_quoted(label)}{fill}];"
            clusters.setdefault(program.source(node).module, []).append(box)
    edges = [
        f"  {_quoted(operand.name)} -> {_quoted(node.name)};"
        for node in program.graph.nodes
        if node.op != "output"
        for operand in node.all_input_nodes
    ]
    boxes = [line for i, (module, nodes) in enumerate(clusters.items()) for line in _cluster(i, module, nodes)]
    return "\n".join(["digraph program {", "  node [shape=box, fontname=monospace];", *boxes, *edges, "}"]) + "\n"


def _cluster(number: int, module: str, nodes: list[str]) -> list[str]:
    if not module:
        return [f"  {node}" for node in nodes]
    lines = [f"    {node}" for node in nodes]
    return [f"  subgraph cluster_{number} {{", f"    label={_quoted(module)};", *lines, "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text)
