"""Dumps read back from files, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardc.json_schema import schema_of
from shardc.outcome import UsageError

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
