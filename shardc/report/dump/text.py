"""The text form of a program: its values, and tables of what it holds, does and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from torch import fx

from shardc.costs.flops import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepRecord, rank_flops
from shardc.costs.time import has_machine
from shardc.language.text import table
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
from shardc.report.dump.selection import Only


def whole_text(program: Program, seconds: Mapping[str, float]) -> str:
    """Everything: the program, then each table that has a row."""
    took = [(name, f"{its:.3f}") for name, its in seconds.items()]
    time = ("time",) if has_machine(program) else ()
    names = ("parameters", "stages", "collectives", *time, "fallbacks", "memory", "flops")
    parts = [program_text(program), *(TABLES_TEXT[name](program) for name in names)]
    return "\n".join(part for part in [*parts, table(("pass", "seconds"), took) if took else ""] if part)


def only_text(program: Program, only: Only) -> str:
    """The tables that were asked for, and the values that were, with their collectives."""
    parts = [TABLES_TEXT[name](program) or f"no {name}\n" for name in only.tables]
    parts += [program_text(program, only.nodes)] if only.nodes else []
    parts += [collectives_text(only.collectives)] if only.collectives else []
    return "\n".join(part for part in parts if part)


def _parameters(program: Program) -> str:
    return parameters_text(program, StageRecord(program).runs if has_stages(program) else None)


def _ends(program: Program, title: Literal["inputs", "outputs"]) -> str:
    """What goes into the model, or what it returns, with what one rank holds of it."""
    inputs = zip(program.inputs, program.placeholders, strict=True)
    outputs = zip(program.outputs, program.results, strict=True)
    ends: Iterable[tuple[Input | Output, fx.Node | None]] = inputs if title == "inputs" else outputs
    rows = []
    for end, node in ends:
        local = None if node is None else program.local_type(node)
        if node is not None and local is not None and end.kind == title.removesuffix("s"):
            rows.append((end.name, type_text(program, node), str(local), local.nbytes))
    return table((title.removesuffix("s"), "sharding", "on one rank", "bytes"), rows) if rows else ""


def _stages(program: Program) -> str:
    return StageRecord(program).text() if has_stages(program) else ""


def _flops(program: Program) -> str:
    return flops_text({"all ranks together would need": flops_of(program), "one rank": rank_flops(program)})


TABLES_TEXT: dict[str, Callable[[Program], str]] = {
    "parameters": _parameters,
    "inputs": lambda program: _ends(program, "inputs"),
    "outputs": lambda program: _ends(program, "outputs"),
    "stages": _stages,
    "collectives": lambda program: collectives_text(collectives_of(program)),
    "fallbacks": lambda program: fallbacks_text(program, fallbacks_of(program)),
    "memory": lambda program: memory_text(memory_of(program)),
    "flops": _flops,
    "time": lambda program: StepRecord(program).text(),
    "nodes": program_text,
    "notes": notes_text,
}
