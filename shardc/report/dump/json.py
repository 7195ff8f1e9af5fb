"""The JSON form of a program: a contract, version 1, whose schema is ``dump.schema.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import fx

from shardc.costs.count import flops_of, memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepRecord, has_machine
from shardc.language.errors import UsageError
from shardc.language.sharding import dtype_name
from shardc.program.collective import Collective
from shardc.program.program import Input, Program
from shardc.program.stages import has_stages
from shardc.program.text import op_names, rank_axes, type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.dump.selection import Only

COLLECTIVE_FIELDS = (
    "kind", "axes", "dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "wire_bytes_total", "phase",
    "node", "source", "cause",
)  # fmt: skip
NO_SECONDS: Mapping[str, float] = {}


def program_json(program: Program, seconds: Mapping[str, float] = NO_SECONDS) -> dict[str, Any]:
    """The whole JSON form. ``seconds`` are there only where given, since all else is stable to the byte."""
    form = _Form(program)
    is_there = {"schedule": form.stages is not None, "time": has_machine(program)}
    keys = [key for key in TABLES if is_there.get(key, True)]
    took = {"seconds": dict(seconds)} if seconds else {}
    return {**_heading(program), **{key: TABLES[key](form) for key in keys}, **took}


def only_json(program: Program, only: Only) -> dict[str, Any]:
    """What was asked for of the JSON form: whole tables, and of the others the entries about the values found."""
    whole, some = _Form(program), _Form(program, only)
    tables = {key for name in only.tables for key in WITH_TABLE.get(name, (name,))}
    kept = {key: whole if key in tables else some for key in TABLES if key in {*tables, *some.tables}}
    return {**_heading(program), "only": only.text, **{key: TABLES[key](form) for key, form in kept.items()}}


def _heading(program: Program) -> dict[str, Any]:
    return {"version": 1, "level": program.level, "mesh": rank_axes(program)}


@dataclass(frozen=True)
class _Form:
    """The entries of a program's tables; ``only`` those about the values that it finds."""

    program: Program
    only: Only | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """Those that have entries about some values."""
        return ABOUT_VALUES if self.only and (self.only.nodes or self.only.collectives) else ()

    def has(self, node: fx.Node) -> bool:
        """Whether a node is among them."""
        return node.op != "output" and (self.only is None or node in self.only.nodes)

    @cached_property
    def stages(self) -> StageRecord | None:
        """Of a pipeline."""
        return StageRecord(self.program) if has_stages(self.program) else None

    @cached_property
    def runs(self) -> Mapping[fx.Node, list[dict[str, Any]]]:
        """The stages of a pipeline that run a call, and in which part."""
        return self.stages.runs if self.stages else {}

    @cached_property
    def called(self) -> dict[Any, str]:
        """What each op is called."""
        return op_names(self.program)

    def collectives(self) -> list[dict[str, Any]]:
        """Those of a step, in order."""
        return [_collective(each) for each in (self.only.collectives if self.only else collectives_of(self.program))]

    def inputs(self, kind: str) -> list[dict[str, Any]]:
        """Those of one kind; a parameter with the stages that hold it."""
        ends = zip(self.program.inputs, self.program.placeholders, strict=True)
        return [self._input(given, node) for given, node in ends if given.kind == kind and self.has(node)]

    def _input(self, given: Input, node: fx.Node) -> dict[str, Any]:
        is_held = given.kind == "parameter" and node in self.runs
        stages = {"stages": [each["stage"] for each in self.runs[node]]} if is_held else {}
        return {"name": given.name, **_value(self.program, node), **stages}

    def outputs(self) -> list[dict[str, Any]]:
        """What the model returns."""
        ends = zip(self.program.outputs, self.program.results, strict=True)
        return [
            {"name": output.name, **_value(self.program, node)}
            for output, node in ends
            if output.kind == "output" and node is not None and self.has(node)
        ]

    def fallbacks(self) -> list[dict[str, Any]]:
        """The ops without a rule."""
        return [node_entry(self.program, node, self.called) for node in fallbacks_of(self.program) if self.has(node)]

    def flops(self) -> dict[str, Any]:
        """Of one rank, which a localized program knows alone, and of all ranks together."""
        program = self.program
        of_rank = self.stages.rank_flops if self.stages else flops_of(program, of_rank=True)
        return {"per_rank": of_rank, "whole": None if program.level == "localized" else flops_of(program)}

    def calls(self) -> list[dict[str, Any]]:
        """Every value, with the stages that run it."""
        values = filter(self.has, self.program.graph.nodes)
        return [
            {**node_entry(self.program, node, self.called), **({"runs": self.runs[node]} if node in self.runs else {})}
            for node in values
        ]


TABLES: Mapping[str, Callable[[_Form], Any]] = {
    "collectives": _Form.collectives,
    "parameters": lambda form: form.inputs("parameter"),
    "buffers": lambda form: form.inputs("buffer"),
    "inputs": lambda form: form.inputs("input"),
    "outputs": _Form.outputs,
    "fallbacks": _Form.fallbacks,
    "memory": lambda form: memory_of(form.program),
    "flops": _Form.flops,
    "stages": lambda form: form.stages.entries() if form.stages else [],
    "schedule": lambda form: form.stages and form.stages.schedule_entry(),
    "time": lambda form: StepRecord(form.program).entry(),
    "notes": lambda form: list(form.program.notes),
    "nodes": _Form.calls,
}
WITH_TABLE = {"parameters": ("parameters", "buffers"), "stages": ("stages", "schedule")}
ABOUT_VALUES = ("collectives", "parameters", "buffers", "inputs", "outputs", "fallbacks", "nodes")


def _collective(found: Collective) -> dict[str, Any]:
    of_pipeline = {} if found.stage is None else {"stage": found.stage, "times": found.times}
    return {"id": found.name, **{key: getattr(found, key) for key in COLLECTIVE_FIELDS}, **of_pipeline}


def _value(program: Program, node: fx.Node) -> dict[str, Any]:
    producer, index = program.value(node)
    type_, local = program.types(producer)[index], program.local_type(node)
    assert type_ is not None and local is not None, node
    shardings = program.shardings(producer)
    sharding = shardings[index] if shardings else None
    return {
        "shape": type_.shape,
        "dtype": dtype_name(type_.dtype),
        "sharding": None if sharding is None or program.level == "localized" else sharding.text(type_),
        "local_shape": local.shape,
    }


def node_entry(program: Program, node: fx.Node, called: Mapping[Any, str]) -> dict[str, Any]:
    """A value of the program; ``called`` are the names of its ops."""
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


TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def is_dump(argument: str) -> bool:
    """Whether an argument names a file of JSON, and no target."""
    return argument.endswith(".json")


def read_dump(path: str) -> dict[str, Any]:
    """The JSON form of a program that ``dump --format json`` wrote; a UsageError where the file has none."""
    remedy = "write one with shardc dump TARGET --format json -o FILE.json"
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(path, f"{error.strerror}", "it cannot be read", remedy) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(path, f"{error}", "it is no JSON", remedy) from None
    if not isinstance(record, dict) or not {"version", "level", "mesh"} <= set(record):
        raise UsageError(path, _of_json(record), "it is no dump of a program", remedy)
    again = "dump the program again with this shardc"
    if record["version"] != 1:
        raise UsageError(path, f"version {record['version']!r}", "this shardc reads version 1", again)
    schema = schema_of("dump")
    if misfit := next(_misfits(record, schema, schema["$defs"], ""), None):
        raise UsageError(path, misfit, "it is not as shardc dump --schema says", again)
    return record


def _of_json(value: Any) -> str:
    """What a value of JSON is."""
    if isinstance(value, dict):
        shown = ", ".join([*value][:6]) + ", ..." * (len(value) > 6)
        return f"keys {shown}" if any(value) else "an object without keys"
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _misfits(value: Any, schema: Mapping[str, Any], named: Mapping[str, Any], place: str) -> Iterator[str]:
    """Where a value is of another type than the schema says, or lacks what it must have; what is more is let be."""
    schema = named[schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(isinstance(value, TYPES[each]) for each in types):
        yield f"{place or 'it'} is {_shown(value)}, no {' or '.join(types)}"
    elif value not in schema.get("enum", [value]):
        yield f"{place} is {_shown(value)}, none of {', '.join(schema['enum'])}"
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _misfits(entry, schema.get("items", {}), named, f"{place}[{i}]")
    elif isinstance(value, dict):
        ways = [each["required"] for each in schema.get("anyOf", [{"required": ()}])]
        lost = [] if any(set(way) <= set(value) for way in ways) else ways[-1]
        needed = (*schema.get("required", ()), *lost)
        yield from (f"{place or 'it'} has no {key!r}" for key in needed if key not in value)
        further = schema.get("additionalProperties")
        for key, entry in value.items():
            inside = schema.get("properties", {}).get(key, further if isinstance(further, dict) else {})
            yield from _misfits(entry, inside, named, f"{place}.{key}".lstrip("."))


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


HERE = "#/$defs/"


def schema_of(name: str) -> dict[str, Any]:
    """The schema of that name, which refers to no other file.

    A file may say ``dump.schema.json#/$defs/node`` of what a dump has; that, and what it refers to itself, is then
    under its own ``$defs``.
    """
    schema = _read(name)
    named = schema.setdefault("$defs", {})
    wanted = [*_references(schema)]
    while wanted:
        file, _, key = wanted.pop().partition(HERE)
        if file and key not in named:
            named[key] = _read(file.removesuffix(".schema.json"))["$defs"][key]
            wanted += [f"{file}{each}" if each.startswith("#") else each for each in _references(named[key])]
    return _here(schema) if named else {key: value for key, value in schema.items() if key != "$defs"}


def schema_text(name: str) -> str:
    """The schema as ``--schema`` prints it."""
    return json.dumps(schema_of(name), indent=1) + "\n"


def _read(name: str) -> dict[str, Any]:
    return dict(
        json.loads((files("shardc.report.dump") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    )


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from [schema["$ref"]] if "$ref" in schema else []
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _here(schema: Any) -> Any:
    """The same, with references to the ``$defs`` of files as references to its own."""
    if isinstance(schema, dict):
        return {key: HERE + each.partition(HERE)[2] if key == "$ref" else _here(each) for key, each in schema.items()}
    return [_here(each) for each in schema] if isinstance(schema, list) else schema
