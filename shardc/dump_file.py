"""Dumps read back from files, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

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
    except ValueError as error:
        raise UsageError(path, f"{error}", "it is no JSON", remedy) from None
    if not isinstance(record, dict) or not {"version", "level", "mesh"} <= set(record):
        what = f"keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UsageError(path, what, "it is no dump of a program", remedy)
    again = "dump the program again with this shardc"
    if record["version"] != 1:
        raise UsageError(path, f"version {record['version']!r}", "this shardc reads version 1", again)
    schema = dump_schema()
    if misfit := next(_misfits(record, schema, schema["$defs"], ""), None):
        raise UsageError(path, misfit, "it is not as shardc dump --schema says", again)
    return record


def dump_schema() -> dict[str, Any]:
    """The JSON Schema of a dump."""
    return dict(json.loads((files("shardc") / "dump.schema.json").read_text(encoding="utf-8")))


def _misfits(value: Any, schema: Mapping[str, Any], named: Mapping[str, Any], place: str) -> Iterator[str]:
    """Where a value is of another type than the schema says, or lacks what it must have; what is more is let be."""
    schema = named[schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    types = schema.get("type", [])
    if types and not any(isinstance(value, TYPES[each]) for each in ([types] if isinstance(types, str) else types)):
        yield f"{place} is {json.dumps(value)[:40]}, no {types}"
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _misfits(entry, schema.get("items", {}), named, f"{place}[{i}]")
    elif isinstance(value, dict):
        yield from (f"{place or 'it'} has no {key!r}" for key in schema.get("required", ()) if key not in value)
        for key, entry in value.items():
            inside = schema.get("properties", {}).get(key, {})
            yield from _misfits(entry, inside, named, f"{place}.{key}".lstrip("."))
