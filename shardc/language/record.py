"""Records: dataclasses whose fields alone define a JSON form, its JSON Schema, and how it is read.

A field's name is its key, without a trailing underscore (``from_``). A field whose default is None is left out if it is
None; any other field that may be None is null. ``name``: texts in the docstring describe the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Schema = dict[str, Any]

Count = Annotated[int, ("minimum", 0)]
Size = Annotated[int, ("minimum", 1)]
Amount = Annotated[float, ("minimum", 0)]
Rate = Annotated[float, ("exclusiveMinimum", 0)]

FURTHER: Mapping[str, bool] = {"further": True}  # metadata of a mapping whose entries are written like other fields
DEFINITIONS = "#/$defs/"
TYPES: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
PYTHON_TYPES: Mapping[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": NoneType,
}  # fmt: skip
_DESCRIBED = re.compile(r"((?:``\w+``, )*``\w+``): ")


# The JSON form.


def json_of(value: Any) -> Any:
    """The JSON form of a record or of a field's value: dicts, lists, strings and numbers."""
    if is_dataclass(value):
        found: dict[str, Any] = {}
        for field in fields(value):
            entry = getattr(value, field.name)
            if "further" in field.metadata:
                found |= json_of(entry)
            elif entry is not None or field.default is not None:
                found[_key(field)] = json_of(entry)
        return found
    if isinstance(value, Mapping):
        return {key: json_of(entry) for key, entry in value.items()}
    return list(map(json_of, value)) if isinstance(value, (list, tuple)) else value


def json_text(record: Any) -> str:
    """The JSON form as text: a line for each key, and for each entry of the lists in it."""

    def entry(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        return json.dumps(value)

    entries = (f"{json.dumps(key)}: {entry(value)}" for key, value in json_of(record).items())
    return "{\n " + ",\n ".join(entries) + "\n}\n"


def read(type_: Any, value: Any) -> Any:
    """Read a record from a JSON value that agrees with its schema. Unknown keys are ignored."""
    make, args = type_, get_args(type_)
    if value is None:
        return None
    if is_dataclass(type_):
        hints = _hints(make)
        given = (field for field in fields(type_) if field.init and _key(field) in value)
        return make(**{field.name: read(hints[field.name], value[_key(field)]) for field in given})
    if not args:
        return value
    match get_origin(type_):
        case origin if origin in (Union, UnionType):
            (type_,) = (each for each in args if each is not NoneType)
            return read(type_, value)
        case origin if origin is tuple:
            types = args[:1] * len(value) if args[-1] is ... else args
            return tuple(read(each, entry) for each, entry in zip(types, value, strict=True))
        case origin if origin is Mapping:
            return {key: read(args[1], entry) for key, entry in value.items()}
    return value


@cache
def _hints(type_: Any) -> dict[str, Any]:
    return get_type_hints(type_, include_extras=True)


def _key(field: Field[Any]) -> str:
    return field.name.removesuffix("_")


# The schema.


def schema_of(type_: Any, title: str) -> Schema:
    """The JSON Schema of a record, or of a union of records. It forbids keys that no field has."""
    definitions: dict[str, Schema] = {}
    schema = _object(type_, definitions) if is_dataclass(type_) else _schema(type_, definitions)
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**heading, **schema, **({"$defs": definitions} if definitions else {})}


def _schema(type_: Any, definitions: dict[str, Schema]) -> Schema:
    """The schema of a type; schemas of dataclasses are added to the ``definitions``."""
    args = get_args(type_)
    if is_dataclass(type_):
        name = definition_name(type_)
        if name not in definitions:
            definitions[name] = {}  # first, since a record may hold others of its type
            definitions[name] |= _object(type_, definitions)
        return {"$ref": DEFINITIONS + name}
    match get_origin(type_):
        case origin if origin is Annotated:
            return {**_schema(args[0], definitions), **dict(args[1:])}
        case origin if origin is Literal:
            return {"const": args[0]} if len(args) == 1 else {"enum": [*args]}
        case origin if origin in (Union, UnionType):
            return _union([_schema(each, definitions) for each in args])
        case origin if origin is tuple and args[-1] is ...:
            return {"type": "array", "items": _schema(args[0], definitions)}
        case origin if origin is tuple:
            entries = [_schema(each, definitions) for each in args]
            items = {"items": entries[0]} if entries == entries[:1] * len(args) else {"prefixItems": entries}
            return {"type": "array", **items, "minItems": len(args), "maxItems": len(args)}
        case origin if origin is Mapping:
            names = {} if args[0] is str else {"propertyNames": _schema(args[0], definitions)}
            return {"type": "object", **names, "additionalProperties": _schema(args[1], definitions)}
    return {} if type_ is Any else {"type": TYPES[type_]}


def _union(ways: list[Schema]) -> Schema:
    """One of several schemas: a type or null, or any of them."""
    first, *others = ways
    if others == [{"type": "null"}] and isinstance(first.get("type"), str):
        return {**first, "type": [first["type"], "null"]}
    return {"anyOf": ways}


def _object(type_: Any, definitions: dict[str, Schema]) -> Schema:
    """The schema of a dataclass as an object, with its own ``CONDITIONS`` if it has any."""
    summary, described = _descriptions(type_)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    further: bool | Schema = False
    for field in fields(type_):
        hint, key = _hints(type_)[field.name], _key(field)
        if "further" in field.metadata:
            further = _schema(get_args(hint)[1], definitions)
            continue
        if field.default is None:
            hint = Union[tuple(each for each in get_args(hint) if each is not NoneType)]  # noqa: UP007
        else:
            required.append(key)
        text = described.pop(field.name, "")
        properties[key] = {**_schema(hint, definitions), **({"description": text} if text else {})}
    assert not described, f"{type_} has no field {', '.join(described)}"
    return {
        "description": summary, "type": "object", "properties": properties, "required": required,
        "additionalProperties": further, **getattr(type_, "CONDITIONS", {}),
    }  # fmt: skip


def definition_name(type_: Any) -> str:
    """The name of a type in a schema: ``changed_value`` for ``ChangedValue``, ``node`` for ``NodeEntry``."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type_.__name__.removesuffix("Entry")).lower()


def _descriptions(type_: Any) -> tuple[str, dict[str, str]]:
    """The description of the object and of each field, from the docstring of the class, or base, that has the field."""
    summary, texts = "", dict[str, str]()
    for each in filter(is_dataclass, reversed(type_.__mro__)):
        summary, *parts = (part.strip() for part in _DESCRIBED.split(" ".join(str(each.__doc__).split())))
        for names, text in zip(parts[::2], parts[1::2], strict=True):
            plain = text.replace("``", "")
            texts |= dict.fromkeys(re.findall(r"\w+", names), plain[:1].upper() + plain[1:])
    return summary.replace("``", ""), texts


def violations(value: Any, schema: Schema, definitions: Mapping[str, Schema], place: str = "") -> Iterator[str]:
    """A message for each wrong type, enum value or list length, and each missing key. Further keys are allowed."""
    schema = definitions[schema["$ref"].removeprefix(DEFINITIONS)] if "$ref" in schema else schema
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    shown = json.dumps(value)[:40]
    ways = [list(violations(value, way, definitions, place)) for way in schema.get("anyOf", ())]
    if types and not any(isinstance(value, PYTHON_TYPES[each]) for each in types):
        yield f"{place or 'it'} is {shown}, no {' or '.join(types)}"
    elif value not in schema.get("enum", [value]):
        yield f"{place} is {shown}, none of {', '.join(schema['enum'])}"
    elif ways and all(ways):
        yield from ways[0]
    elif isinstance(value, list) and len(value) != schema.get("maxItems", len(value)):
        yield f"{place} is {shown}, no list of {schema['maxItems']}"
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from violations(entry, schema.get("items", {}), definitions, f"{place}[{i}]")
    elif isinstance(value, dict):
        yield from (f"{place or 'it'} has no {key!r}" for key in schema.get("required", ()) if key not in value)
        further = schema.get("additionalProperties")
        for key, entry in value.items():
            inside = schema.get("properties", {}).get(key, further if isinstance(further, dict) else {})
            yield from violations(entry, inside, definitions, f"{place}.{key}".lstrip("."))
