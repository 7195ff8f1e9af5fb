"""The form of a dump: its formats, tables and JSON schema, and reading a JSON file back. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from shardc.language.errors import UsageError
from shardc.language.text import read_file

FORMATS = ("text", "json", "dot", "html")
TABLES = (
    "collectives", "parameters", "inputs", "outputs", "fallbacks", "memory", "flops", "stages", "time", "nodes",
    "notes",
)  # fmt: skip
DEFINITIONS = "#/$defs/"
TYPES: Mapping[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None),
}  # fmt: skip


def schema_text(name: str) -> str:
    """The schema of a form as ``--schema`` prints it."""
    return json.dumps(schema_of(name), indent=1) + "\n"


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of a form, which refers to no other file.

    A file may refer to ``dump.schema.json#/$defs/node``. That definition, and those that it refers to itself, are then
    copied under ``$defs``.
    """
    schema = _read(name)
    definitions = schema.setdefault("$defs", {})
    references = [*_references(schema)]
    while references:
        file, _, key = references.pop().partition(DEFINITIONS)
        if file and key not in definitions:
            definitions[key] = _read(file.removesuffix(".schema.json"))["$defs"][key]
            further = _references(definitions[key])
            references += [f"{file}{each}" if each.startswith("#") else each for each in further]
    return _with_own_references(schema if definitions else {k: each for k, each in schema.items() if k != "$defs"})


def _read(name: str) -> dict[str, Any]:
    path = files("shardc.report.dump") / "schemas" / f"{name}.schema.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from [schema["$ref"]] if "$ref" in schema else []
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for child in children:
        yield from _references(child)


def _with_own_references(schema: Any) -> Any:
    """The schema with references to definitions of other files replaced by references to its own."""
    if isinstance(schema, list):
        return list(map(_with_own_references, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        key: DEFINITIONS + each.partition(DEFINITIONS)[2] if key == "$ref" else _with_own_references(each)
        for key, each in schema.items()
    }


def is_dump(argument: str) -> bool:
    """Whether an argument names a dump, FILE.json, and no target."""
    return argument.endswith(".json")


def read_dump(path: str) -> dict[str, Any]:
    """Read a dump that ``shardc dump --format json`` wrote. Raises a UsageError where the file is none."""
    remedy = "write one with shardc dump TARGET --format json -o FILE.json"
    try:
        record = json.loads(read_file(path))
    except OSError as error:
        raise UsageError(path, f"{error.strerror}", "it cannot be read", remedy) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(path, f"{error}", "it is no JSON", remedy) from None
    if not isinstance(record, dict) or not {"version", "level", "mesh"} <= set(record):
        raise UsageError(path, _kind_text(record), "it is no dump of a program", remedy)
    again = "dump the program again with this shardc"
    if record["version"] != 1:
        raise UsageError(path, f"version {record['version']!r}", "this shardc reads version 1", again)
    schema = schema_of("dump")
    if violation := next(_violations(record, schema, schema["$defs"], ""), None):
        raise UsageError(path, violation, "it is not as shardc dump --schema says", again)
    return record


def _kind_text(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if isinstance(value, dict):
        shown = ", ".join([*value][:6]) + ", ..." * (len(value) > 6)
        return f"keys {shown}" if any(value) else "an object without keys"
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _violations(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str) -> Iterator[str]:
    """Where a value has another type than its schema, or lacks a required key. Further keys are allowed."""
    schema = definitions[schema["$ref"].removeprefix(DEFINITIONS)] if "$ref" in schema else schema
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    shown = json.dumps(value)[:40]
    if types and not any(isinstance(value, TYPES[each]) for each in types):
        yield f"{place or 'it'} is {shown}, no {' or '.join(types)}"
    elif value not in schema.get("enum", [value]):
        yield f"{place} is {shown}, none of {', '.join(schema['enum'])}"
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _violations(entry, schema.get("items", {}), definitions, f"{place}[{i}]")
    elif isinstance(value, dict):
        ways = [each["required"] for each in schema.get("anyOf", [{"required": ()}])]
        lacking = [] if any(set(way) <= set(value) for way in ways) else ways[-1]
        required = (*schema.get("required", ()), *lacking)
        yield from (f"{place or 'it'} has no {key!r}" for key in required if key not in value)
        further = schema.get("additionalProperties")
        for key, entry in value.items():
            inside = schema.get("properties", {}).get(key, further if isinstance(further, dict) else {})
            yield from _violations(entry, inside, definitions, f"{place}.{key}".lstrip("."))
