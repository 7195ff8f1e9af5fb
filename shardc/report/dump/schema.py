"""The form of a dump: its formats, tables and JSON schema, and reading a JSON file back. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardc.costs.records import Cost, CutStages, SymbolicCost
from shardc.language.errors import UsageError
from shardc.language.machine import MachineEntry
from shardc.language.record import Schema, read, schema_of, violations
from shardc.language.text import read_file
from shardc.report.dump.budget import Check
from shardc.report.dump.records import Difference, Dump
from shardc.report.explain.records import Explained, ExplainedCollective
from shardc.report.suggest.records import Suggested
from shardc.schedules.trace import Trace

FORMATS = ("text", "json", "dot", "html")
TABLES = (
    "collectives", "parameters", "inputs", "outputs", "fallbacks", "memory", "flops", "stages", "time", "nodes",
    "notes",
)  # fmt: skip
FORMS: Mapping[str, tuple[str, Any]] = {  # titles, and the types of records
    "check": ("shardc check --format json", Check),
    "cost": ("shardc cost --format json", Cost | SymbolicCost),
    "diff": ("shardc diff --format json", Difference),
    "dump": ("shardc dump --format json", Dump),
    "explain": ("shardc explain --format json", Explained | ExplainedCollective),
    "links": ("shardc bench-links", MachineEntry),
    "stages": ("shardc stages --format json", CutStages),
    "suggest": ("shardc suggest --format json", Suggested),
    "trace": ("shardc trace", Trace),
}


def schema_text(name: str) -> str:
    """The schema of a form as ``--schema`` prints it."""
    return json.dumps(form_schema(name), indent=1) + "\n"


def form_schema(name: str) -> Schema:
    """The JSON Schema of a command's output."""
    title, type_ = FORMS[name]
    return schema_of(type_, title)


def is_dump(argument: str) -> bool:
    """Whether an argument names a dump, FILE.json, rather than a target."""
    return argument.endswith(".json")


def read_dump(path: str) -> Dump:
    """Read a dump that ``shardc dump --format json`` wrote. Raises a UsageError if the file is no dump."""
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
    schema = form_schema("dump")
    if violation := next(violations(record, schema, schema["$defs"]), None):
        raise UsageError(path, violation, "it is not as shardc dump --schema says", again)
    return read(Dump, record)


def _kind_text(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if isinstance(value, dict):
        shown = ", ".join([*value][:6]) + ", ..." * (len(value) > 6)
        return f"keys {shown}" if any(value) else "an object without keys"
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
