"""The JSON Schemas of what commands write, each in a file of its own; what one has of another is put in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

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
    return dict(json.loads((files("shardc") / f"{name}.schema.json").read_text(encoding="utf-8")))


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
