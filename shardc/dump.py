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

COLLECTIVE_COLOR, FALLBACK_COLOR = "#f4a261", "#e76f51"


def dump(compiled: Compiled, format: str = "text", after: str = "", only: str = "", verbose: bool = False) -> str:
    """The program after the pass named ``after`` as ``text``, ``json`` or ``dot``.

    Without ``after`` it is the last one in global shapes, which has every collective. ``only="collectives"`` leaves out
    all else; ``verbose`` adds the seconds that each pass took.
    """
    program = compiled.at(after) if after else _last_in_global_shapes(compiled.stages)
    seconds = compiled.seconds if verbose else {}
    if format == "json":
        return json_text(_only_collectives(program) if only else program_json(program, seconds))
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
    return collectives_text(collectives_of(program)) if only else _whole_text(program, seconds)


def _last_in_global_shapes(stages: Mapping[str, Program]) -> Program:
    return [program for program in stages.values() if program.level != "localized"][-1]


def _whole_text(program: Program, seconds: Mapping[str, float]) -> str:
    operations = [("all ranks together would need", flops_of(program)), ("one rank", flops_of(program, of_rank=True))]
    parts = [
        program_text(program),
        parameters_text(program),
        collectives_text(collectives_of(program)),
        fallbacks_text(program, fallbacks_of(program)),
        memory_text(memory_of(program)),
        table(("floating-point operations", "count"), operations),
        table(("pass", "seconds"), [(name, f"{took:.3f}") for name, took in seconds.items()]) if seconds else "",
    ]
    return "\n".join(part for part in parts if part)


def fallbacks_of(program: Program) -> list[fx.Node]:
    """The ops that have no rule and so run whole on every rank."""
    ours = {*COLLECTIVES, bucket, reshard, fit}
    return [node for node in program.calls if node.target not in ours and program.is_fallback(node)]


# JSON.


def program_json(program: Program, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The JSON form of a program. ``seconds`` are there only where given, since all else is stable to the byte."""
    called = op_names(program)
    return {
        **_only_collectives(program),
        "parameters": list(_inputs(program, "parameter")),
        "buffers": list(_inputs(program, "buffer")),
        "inputs": list(_inputs(program, "input")),
        "outputs": list(_outputs(program)),
        "fallbacks": [_node(program, node, called) for node in fallbacks_of(program)],
        "memory": memory_of(program),
        "flops": {
            "per_rank": flops_of(program, of_rank=True),
            "whole": None if program.level == "localized" else flops_of(program),
        },
        "stages": [],
        "nodes": [_node(program, node, called) for node in program.graph.nodes if node.op != "output"],
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


def _without_name(collective: dict[str, Any]) -> dict[str, Any]:
    of_pipeline = () if collective["stage"] is not None else ("stage", "times")
    return {key: value for key, value in collective.items() if key not in ("name", *of_pipeline)}


def _inputs(program: Program, kind: str) -> Iterator[dict[str, Any]]:
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if given.kind == kind:
            yield {"name": given.name, **_value(program, node)}


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


def _node(program: Program, node: fx.Node, called: Mapping[Any, str]) -> dict[str, Any]:
    source = program.source(node)
    return {
        "name": node.name,
        "op": node.op if node.op == "placeholder" else called.get(node.target, "getitem"),
        "type": type_text(program, node),
        "operands": [operand.name for operand in node.all_input_nodes],
        "phase": source.phase,
        "module": source.module,
        "source": source.location,
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
