"""Dumps read back from files, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardc.outcome import UsageError


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
    if record["version"] != 1:
        problem = "this shardc reads version 1"
        raise UsageError(path, f"version {record['version']!r}", problem, "dump the program again with this shardc")
    return record
