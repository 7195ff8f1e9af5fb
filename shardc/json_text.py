"""JSON as it is written: with one line for each entry of a list, so that two files compare line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(record: Mapping[str, Any]) -> str:
    """An object as JSON: a line for each entry of the lists in it."""

    def entry(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        return json.dumps(value)

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {entry(value)}" for key, value in record.items()) + "\n}\n"
