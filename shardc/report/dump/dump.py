"""What ``dump`` gives, by format: the program as text, JSON (a contract, version 1), a graphviz drawing or a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.text import json_text
from shardc.report.dump.dot import program_dot
from shardc.report.dump.json import only_json, program_json
from shardc.report.dump.selection import Only
from shardc.report.dump.text import only_text, whole_text

if TYPE_CHECKING:
    from shardc.compiler import Compiled

FORMATS = ("text", "json", "dot", "html")


def dump(
    compiled: Compiled, format: str = "text", after: str = "", only: str = "", verbose: bool = False, asking: str = ""
) -> str:
    """The program after the pass named ``after`` as ``text``, ``json``, ``dot`` or ``html``, a page for a browser.

    Without ``after`` it is the last one in global shapes, which has every collective. ``only`` leaves out all else
    than what it names (see ``Only``); ``verbose`` adds the seconds that each pass took. ``asking``: the command line
    that explains what is named after it, for the report.
    """
    program = compiled.at(after) if after else compiled.whole
    seconds, chosen = compiled.seconds if verbose else {}, Only.of(program, only) if only else None
    if format == "json":
        return json_text(only_json(program, chosen) if chosen else program_json(program, seconds))
    if format == "dot":
        return program_dot(program, chosen)
    if format == "html":
        from shardc.report.dump.html import html_report

        return html_report(compiled, program, chosen, asking)
    if format == "text":
        return only_text(program, chosen) if chosen else whole_text(program, seconds)
    raise OptionError(
        f"format {format!r}",
        f"dump knows {', '.join(FORMATS)}",
        "there is no such format",
        did_you_mean(format, FORMATS) or "name one of them",
    )
