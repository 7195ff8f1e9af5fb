"""The HTML report: one file that needs nothing beside itself, and that runs no script but its own.

The page's template, style and scripts are in ``page/``; here they are put together with what is to be shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardc.error import OptionError
from shardc.only import Only
from shardc.program import Program
from shardc.report_record import report_record

if TYPE_CHECKING:
    from shardc.api import Compiled

SCRIPTS = (
    "element.js",
    "format.js",
    "index.js",
    "layout.js",
    "overview.js",
    "look.js",
    "step.js",
    "tree.js",
    "table.js",
    "schedule.js",
    "time.js",
    "inspector.js",
    "details.js",
    "search.js",
    "start.js",
)  # in the order in which the browser reads them, all in one scope
POLICY = (
    "default-src 'none'; img-src data:; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
)
STYLES = ("theme.css", "frame.css", "parts.css", "screen.css")
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_report(compiled: Compiled, program: Program, only: Only | None = None, asking: str = "") -> str:
    """The page of a compiled model's ``program``, whole. Raises an OptionError where a part is asked for.

    ``asking``: the command line that explains what is named after it, if there is one.
    """
    if only:
        raise OptionError(
            f"only={only.text!r}",
            "format 'html'",
            "the report is of the whole program, and finds what one looks for by its search box",
            "leave out only, or say format text, json or dot",
        )
    return page(report_record(compiled, program, asking))


def page(record: Mapping[str, Any]) -> str:
    """The page of what ``report_record`` gives."""
    style = "".join(map(_file, STYLES))
    script = "(() => {\n'use strict';\n" + "".join(map(_file, SCRIPTS)) + "})();\n"
    filled = {
        "policy": POLICY.format(script=_hash(script), style=_hash(style)),
        "title": escape(f"{record['report']['model']} on {_mesh(record['mesh'])}"),
        "style": style,
        "data": _safe(json.dumps(record, separators=(",", ":"))),
        "script": script,
    }
    return re.sub(r"{{(\w+)}}", lambda found: filled[found[1]], _file("page.html"))


def _mesh(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _file(name: str) -> str:
    return files("shardc").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _safe(text: str) -> str:
    """JSON in which nothing can end the script element that holds it."""
    for letter, code in UNSAFE.items():
        text = text.replace(letter, code)
    return text
