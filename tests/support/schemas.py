"""Compares a JSON Schema with values: the properties that it defines, and those that a value uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

Properties = set[tuple[str, str]]


def errors(record: Any, schema: Any) -> list[str]:
    """The messages of a record's violations of a schema."""
    return [error.message for error in Draft202012Validator(schema).iter_errors(record)]


def met(record: Any, schema: Any) -> Properties:
    """The properties of the schema that a record has, each with the place of its object."""
    return set(_met(record, schema, "", schema))


def said(schema: Any) -> Properties:
    """Every property that the schema defines, each with the place of its object."""
    return set(_said(schema, "", schema, set()))


def objects(schema: Any) -> list[dict[str, Any]]:
    """All subschemas of type ``object``."""
    return [each for each in _schemas(schema) if each.get("type") == "object"]


def _resolved(schema: Any, place: str, whole: Any) -> tuple[Any, str]:
    if "$ref" not in schema:
        return schema, place
    name = schema["$ref"].removeprefix("#/$defs/")
    return whole["$defs"][name], name


def _met(value: Any, schema: Any, place: str, whole: Any) -> Iterator[tuple[str, str]]:
    schema, place = _resolved(schema, place, whole)
    for way in schema.get("oneOf", schema.get("anyOf", ())):
        if not errors(value, {"$defs": whole.get("$defs", {}), **way}):
            yield from _met(value, way, place, whole)
    if isinstance(value, list):
        for entry in value:
            yield from _met(entry, schema.get("items", {}), place, whole)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key in schema.get("properties", {}):
                yield place, key
                yield from _met(entry, schema["properties"][key], f"{place}.{key}", whole)
            elif isinstance(schema.get("additionalProperties"), dict):
                yield from _met(entry, schema["additionalProperties"], f"{place}.*", whole)


def _said(schema: Any, place: str, whole: Any, seen: set[str]) -> Iterator[tuple[str, str]]:
    if schema.get("$ref") in seen:
        return
    seen = seen | {schema.get("$ref", "")} if "$ref" in schema else seen
    schema, place = _resolved(schema, place, whole)
    for key, entry in schema.get("properties", {}).items():
        yield place, key
        yield from _said(entry, f"{place}.{key}", whole, seen)
    further = schema.get("additionalProperties")
    inner = [("", schema["items"])] if "items" in schema else []
    inner += [(".*", further)] if isinstance(further, dict) else []
    inner += [("", way) for way in (*schema.get("oneOf", ()), *schema.get("anyOf", ()))]
    for suffix, each in inner:
        yield from _said(each, place + suffix, whole, seen)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _schemas(each)
