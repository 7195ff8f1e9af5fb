"""``dump``: a program as text, JSON (a contract, version 1), a Graphviz drawing or a page for a browser; here the text.

Facts: the program after a pass (``Compiled.after``), and tables that ``shardc/costs`` computes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from torch import fx

from shardc.costs.flops import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepRecord, rank_flops
from shardc.costs.time import has_machine
from shardc.language.errors import OptionError, did_you_mean
from shardc.language.text import json_text, table
from shardc.program.program import Input, Output, Program
from shardc.program.stages import has_stages
from shardc.program.text import (
    fallbacks_text,
    flops_text,
    memory_text,
    notes_text,
    parameters_text,
    program_text,
    type_text,
)
from shardc.program.traffic import collectives_of, collectives_text, fallbacks_of
from shardc.report.dump.dot import program_dot
from shardc.report.dump.html import html_report
from shardc.report.dump.json import program_json, selected_json
from shardc.report.dump.schema import FORMATS
from shardc.report.dump.selection import Selection

if TYPE_CHECKING:
    from shardc.compiler import Compiled


def dump(
    compiled: Compiled, format: str = "text", after: str = "", only: str = "", verbose: bool = False, explain: str = ""
) -> str:
    """The program after the pass named ``after`` in one of ``FORMATS``.

    Without ``after`` it is the last one in global shapes, which has every collective. ``only`` selects tables and
    values (see ``Selection``). ``verbose`` adds the seconds of each pass. ``explain``: the command line that explains
    what is named after it, for the page. Raises an OptionError for a format or a pass that there is not.
    """
    program = compiled.at(after) if after else compiled.whole
    seconds, selection = compiled.seconds if verbose else {}, Selection.of(program, only) if only else None
    if format == "json":
        return json_text(selected_json(program, selection) if selection else program_json(program, seconds))
    if format == "dot":
        return program_dot(program, selection)
    if format == "html":
        return html_report(compiled, program, selection, explain)
    if format != "text":
        what, remedy = f"dump knows {', '.join(FORMATS)}", did_you_mean(format, FORMATS) or "name one of them"
        raise OptionError(f"format {format!r}", what, "there is no such format", remedy)
    if selection:
        parts = [TABLE_TEXTS[name](program) or f"no {name}\n" for name in selection.tables]
        parts += [program_text(program, selection.nodes)] if selection.nodes else []
        parts += [collectives_text(selection.collectives)] if selection.collectives else []
    else:  # the program, then each table that has a row
        time = ("time",) if has_machine(program) else ()
        names = ("parameters", "stages", "collectives", *time, "fallbacks", "memory", "flops")
        passes = table(("pass", "seconds"), ((name, f"{each:.3f}") for name, each in seconds.items()))
        parts = [program_text(program), *(TABLE_TEXTS[name](program) for name in names), passes]
    return "\n".join(filter(None, parts))


def _inputs_or_outputs(program: Program, kind: Literal["input", "output"]) -> str:
    """The inputs or outputs of the model, and what one rank holds of each."""
    inputs = zip(program.inputs, program.placeholders, strict=True)
    outputs = zip(program.outputs, program.results, strict=True)
    pairs: Iterable[tuple[Input | Output, fx.Node | None]] = inputs if kind == "input" else outputs
    rows = []
    for each, node in pairs:
        local = None if node is None else program.local_type(node)
        if node is not None and local is not None and each.kind == kind:
            rows.append((each.name, type_text(program, node), str(local), local.nbytes))
    return table((kind, "sharding", "on one rank", "bytes"), rows)


TABLE_TEXTS: dict[str, Callable[[Program], str]] = {
    "parameters": lambda program: parameters_text(program, StageRecord(program).runs if has_stages(program) else None),
    "inputs": lambda program: _inputs_or_outputs(program, "input"),
    "outputs": lambda program: _inputs_or_outputs(program, "output"),
    "stages": lambda program: StageRecord(program).text() if has_stages(program) else "",
    "collectives": lambda program: collectives_text(collectives_of(program)),
    "fallbacks": lambda program: fallbacks_text(program, fallbacks_of(program)),
    "memory": lambda program: memory_text(memory_of(program)),
    "flops": lambda program: flops_text(
        {"all ranks together would need": flops_of(program), "one rank": rank_flops(program)}
    ),
    "time": lambda program: StepRecord(program).text(),
    "nodes": program_text,
    "notes": notes_text,
}
