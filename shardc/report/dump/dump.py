"""``dump``: a program as text, JSON (a contract, version 1), a Graphviz drawing or a page. This file has the text form.

Facts: the program after a pass (``Compiled.after``), and tables that ``shardc/costs`` computes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from torch import fx

from shardc.costs.count import flops_of, has_machine
from shardc.costs.memory import memory_of
from shardc.costs.records import BalanceEntry, CutStage, CutStages, ReceivedValue, SharedParameter
from shardc.costs.rings import rings_of, rings_text
from shardc.costs.stages.choose import ChosenStages
from shardc.costs.stages.record import StageRecord
from shardc.costs.step import StepRecord, copies_of, copies_text, rank_flops
from shardc.language.errors import OptionError, did_you_mean
from shardc.language.record import json_text
from shardc.language.text import bytes_text, count_text, operations_text, table
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
from shardc.report.dump.program_record import program_record, selected_record
from shardc.report.dump.schema import FORMATS
from shardc.report.dump.selection import Selection

if TYPE_CHECKING:
    from shardc.compiler import Compiled


def dump(
    compiled: Compiled, format: str = "text", after: str = "", only: str = "", verbose: bool = False, explain: str = ""
) -> str:
    """The program after the pass named ``after`` in one of ``FORMATS``.

    Without ``after`` it is the last program in global shapes, which has every collective. ``only`` selects tables and
    values (see ``Selection``). ``verbose`` adds the seconds of each pass. ``explain``: the command line of ``shardc
    explain`` up to the name, for the page. Raises an OptionError for an unknown format or pass.
    """
    program = compiled.at(after) if after else compiled.whole
    seconds, selection = compiled.seconds if verbose else {}, Selection.of(program, only) if only else None
    if format == "json":
        return json_text(selected_record(program, selection) if selection else program_record(program, seconds))
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
    """The inputs or outputs of the model, and the part of each that one rank holds."""
    inputs = zip(program.inputs, program.placeholders, strict=True)
    outputs = zip(program.outputs, program.results, strict=True)
    pairs: Iterable[tuple[Input | Output, fx.Node | None]] = inputs if kind == "input" else outputs
    rows = []
    for each, node in pairs:
        local = None if node is None else program.local_type(node)
        if node is not None and local is not None and each.kind == kind:
            rows.append((each.name, type_text(program, node), str(local), bytes_text(local.nbytes)))
    return table((kind, "sharding", "on one rank", "bytes"), rows)


def _memory_texts(program: Program) -> Iterator[str]:
    """Bytes by class, and the copies to the tier below and back."""
    yield memory_text(memory_of(program))
    if copies := copies_of(program):
        yield copies_text(copies)


def _stages_of_values(program: Program) -> Mapping[fx.Node, Sequence[int]]:
    """The stages that hold or run each parameter and call of a pipeline."""
    runs = StageRecord(program).runs if has_stages(program) else {}
    return {node: [run.stage for run in its] for node, its in runs.items()}


def _time_texts(program: Program) -> Iterator[str]:
    yield StepRecord(program).text()
    if rings := rings_of(program):
        yield rings_text(rings, has_stages(program))


TABLE_TEXTS: dict[str, Callable[[Program], str]] = {
    "parameters": lambda program: parameters_text(program, _stages_of_values(program)),
    "inputs": lambda program: _inputs_or_outputs(program, "input"),
    "outputs": lambda program: _inputs_or_outputs(program, "output"),
    "stages": lambda program: StageRecord(program).text() if has_stages(program) else "",
    "collectives": lambda program: collectives_text(collectives_of(program)),
    "fallbacks": lambda program: fallbacks_text(program, fallbacks_of(program)),
    "memory": lambda program: "\n".join(_memory_texts(program)),
    "flops": lambda program: flops_text(
        {"all ranks together would need": flops_of(program), "one rank": rank_flops(program)}
    ),
    "time": lambda program: "\n".join(_time_texts(program)),
    "nodes": program_text,
    "notes": notes_text,
}


HEADER = ("stage", "first module", "last module", "parameters", "FLOPs", "time", "activations", "memory", "received")


def stages_text(stages: ChosenStages, format: str = "text") -> str:
    """The stages as ``text`` or ``json``."""
    record = stages_record(stages)
    if format == "json":
        return json_text(record)
    rows = ((each.name, count_text(each.parameters), ", ".join(map(str, each.stages))) for each in record.shared)
    shared = table(("shared parameter", "parameters", "stages"), rows)
    return "\n".join(filter(None, [_stage_table(record), _crossing_table(record), shared]))


def stages_record(stages: ChosenStages) -> CutStages:
    """The record of stages, before a schedule is chosen."""
    entries = tuple(_entry(stages, stage) for stage in range(len(stages.masks)))
    names_of_stages = [stages.loads.parameters_of(mask) for mask in stages.masks]
    shared = tuple(
        SharedParameter(name, stages.loads.elements(name), readers)
        for name in stages.loads.parameters
        if len(readers := tuple(stage for stage, names in enumerate(names_of_stages) if name in names)) > 1
    )
    return CutStages(
        by=stages.options.balance,
        balance=BalanceEntry(
            params=_unevenness([entry.parameters for entry in entries]),
            flops=_unevenness([entry.flops for entry in entries]),
            time=_unevenness([entry.time for entry in entries]),
            memory=_unevenness([entry.memory_bytes for entry in entries]),
        ),
        bound=round(stages.bound / stages.heaviest, 4) if stages.heaviest else 1.0,
        stages=entries,
        shared=shared,
    )


def _unevenness(parts: Sequence[float]) -> float:
    """The ratio of the largest part to the mean."""
    return round(max(parts) * len(parts) / sum(parts), 4) if sum(parts) else 1.0


def _entry(stages: ChosenStages, stage: int) -> CutStage:
    loads, mask = stages.loads, stages.masks[stage]
    all_time = sum(loads.unit_weights("time")) or 1
    # runs of consecutive units
    runs = [
        [unit for _, unit in run] for _, run in groupby(enumerate(stages.units(stage)), lambda pair: pair[1] - pair[0])
    ]
    return CutStage(
        stage=stage,
        modules=tuple((loads.units[run[0]].first, loads.units[run[-1]].last) for run in runs),
        parameters=loads.weight("params", mask),
        flops=loads.weight("flops", mask),
        time=round(loads.weight("time", mask) / all_time, 4),
        activation_bytes=loads.saved_bytes(mask),
        memory_bytes=loads.memory(mask, len(stages.masks) - stage),
        received_bytes=loads.received_bytes(mask),
        received=tuple(ReceivedValue(c.name, c.type, stages.stage_of(c.maker), c.nbytes) for c in loads.received(mask)),
    )


# Text.


def _stage_table(record: CutStages) -> str:
    rows = [
        (
            entry.stage,
            ", ".join(first or "(model)" for first, _ in entry.modules),
            ", ".join(last or "(model)" for _, last in entry.modules),
            count_text(entry.parameters), operations_text(entry.flops), f"{entry.time:.1%}",
            *map(bytes_text, (entry.activation_bytes, entry.memory_bytes, entry.received_bytes)),
        )
        for entry in record.stages
    ]  # fmt: skip
    uneven = ", ".join(f"{value:.2f} in {name}" for name, value in asdict(record.balance).items())
    better = f"a heaviest stage below {record.bound:.1%} of this one is ruled out\n" if record.bound < 1 else ""
    return f"{len(rows)} stages, even in {record.by}\n{table(HEADER, rows)}max/mean: {uneven}\n{better}"


def _crossing_table(record: CutStages) -> str:
    rows = (
        (entry.stage, each.from_, each.value, each.type, bytes_text(each.bytes))
        for entry in record.stages
        for each in entry.received
    )
    return table(("to stage", "from", "value", "type", "bytes"), rows) or "no value crosses a cut\n"
