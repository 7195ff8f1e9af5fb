"""The record of a program, or of a selection: tables filled from the program and its costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc.costs.count import flops_of, has_machine
from shardc.costs.memory import memory_of
from shardc.costs.records import Copies, FlopsEntry, MemoryEntry, RunEntry
from shardc.costs.rings import rings_of
from shardc.costs.stages.record import StageRecord
from shardc.costs.step import StepRecord, copies_of
from shardc.language.sharding import dtype_name
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import op_names, rank_axes, type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.dump.records import CollectiveEntry, Dump, NodeEntry, ParameterEntry, ValueEntry
from shardc.report.dump.selection import Selection

SAME_FIELDS = (  # fields that a Collective and its entry share
    "kind", "axes", "dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "wire_bytes_total", "phase",
    "node", "source", "cause",
)  # fmt: skip
NO_SECONDS: Mapping[str, float] = {}


def program_record(program: Program, seconds: Mapping[str, float] = NO_SECONDS) -> Dump:
    """The whole record. It has ``seconds`` of passes only if given: all other fields are reproducible to the byte."""
    tables = _Tables(program)
    exists = {"schedule": tables.stages is not None, "time": has_machine(program)}
    entries = {key: make(tables) for key, make in TABLES.items() if exists.get(key, True)}
    return Dump(program.level, rank_axes(program), **entries, seconds=dict(seconds) or None)


def selected_record(program: Program, selection: Selection) -> Dump:
    """The selected tables in full, and from the other tables the entries about selected values."""
    whole, part = _Tables(program), _Tables(program, selection)
    names = {key for name in selection.tables for key in WITH_TABLE.get(name, (name,))}
    partial_names = ABOUT_VALUES if selection.nodes or selection.collectives else ()
    sources = {key: whole if key in names else part for key in TABLES if key in {*names, *partial_names}}
    entries = {key: TABLES[key](tables) for key, tables in sources.items()}
    return Dump(program.level, rank_axes(program), selection.text, **entries)


@dataclass(frozen=True)
class _Tables:
    """The tables of a program with their entries; with a selection, only entries about the selected values."""

    program: Program
    selection: Selection | None = None

    def has(self, node: fx.Node) -> bool:
        """Whether a node has an entry."""
        return node.op != "output" and (self.selection is None or node in self.selection.nodes)

    @cached_property
    def stages(self) -> StageRecord | None:
        """The stages of a pipeline."""
        return StageRecord(self.program) if has_stages(self.program) else None

    @cached_property
    def runs(self) -> Mapping[fx.Node, list[RunEntry]]:
        """The runs of each call: the pipeline stages that run it, and the part of a step in which they do."""
        return self.stages.runs if self.stages else {}

    @cached_property
    def ops(self) -> dict[Any, str]:
        """The name of each op."""
        return op_names(self.program)

    def collectives(self) -> tuple[CollectiveEntry, ...]:
        """The collectives of a step, in order."""
        entries = []
        for each in self.selection.collectives if self.selection else collectives_of(self.program):
            times = None if each.stage is None else each.times
            same: dict[str, Any] = {key: getattr(each, key) for key in SAME_FIELDS}
            rest: dict[str, Any] = {
                "times": times,
                "steps": each.steps if each.steps > 1 else None,
                "codec": each.codec or None,
            }
            entries.append(CollectiveEntry(each.name, **same, stage=each.stage, **rest))
        return tuple(entries)

    def inputs(self, kind: str) -> tuple[ValueEntry, ...]:
        """The inputs of one kind; parameters with the stages that hold them."""
        entries: list[ValueEntry] = []
        for input_, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            if input_.kind == kind and self.has(node):
                value = _value(self.program, node)
                stages = tuple(each.stage for each in self.runs[node]) if node in self.runs else None
                is_parameter = kind == "parameter"
                entries.append(
                    ParameterEntry(input_.name, *value, stages) if is_parameter else ValueEntry(input_.name, *value)
                )
        return tuple(entries)

    def outputs(self) -> tuple[ValueEntry, ...]:
        """The outputs of the model."""
        return tuple(
            ValueEntry(output.name, *_value(self.program, node))
            for output, node in zip(self.program.outputs, self.program.results, strict=True)
            if output.kind == "output" and node is not None and self.has(node)
        )

    def fallbacks(self) -> tuple[NodeEntry, ...]:
        """The ops without a rule."""
        return tuple(node_entry(self.program, node, self.ops) for node in fallbacks_of(self.program) if self.has(node))

    def flops(self) -> FlopsEntry:
        """Operations of one rank and of all ranks together; a localized program does not know the latter."""
        program = self.program
        of_rank = self.stages.rank_flops if self.stages else flops_of(program, of_rank=True)
        return FlopsEntry(of_rank, None if program.level == "localized" else flops_of(program))

    def copies(self) -> tuple[Copies, ...] | None:
        """Copies between the device and the tier below; None if there are none."""
        return copies_of(self.program) or None

    def nodes(self) -> tuple[NodeEntry, ...]:
        """Every value, with the stages that run it."""
        nodes = filter(self.has, self.program.graph.nodes)
        return tuple(node_entry(self.program, node, self.ops, self.runs.get(node)) for node in nodes)


TABLES: Mapping[str, Callable[[_Tables], Any]] = {
    "collectives": _Tables.collectives,
    "parameters": lambda tables: tables.inputs("parameter"),
    "buffers": lambda tables: tables.inputs("buffer"),
    "inputs": lambda tables: tables.inputs("input"),
    "outputs": _Tables.outputs,
    "fallbacks": _Tables.fallbacks,
    "memory": lambda tables: MemoryEntry(**memory_of(tables.program)),
    "copies": _Tables.copies,
    "flops": _Tables.flops,
    "stages": lambda tables: tables.stages.entries() if tables.stages else (),
    "schedule": lambda tables: tables.stages and tables.stages.schedule_entry(),
    "time": lambda tables: StepRecord(tables.program).entry(),
    "rings": lambda tables: rings_of(tables.program) or None,
    "notes": lambda tables: tuple(tables.program.notes),
    "nodes": _Tables.nodes,
}
WITH_TABLE = {
    "parameters": ("parameters", "buffers"),
    "memory": ("memory", "copies"),
    "stages": ("stages", "schedule"),
    "time": ("time", "rings"),
}
ABOUT_VALUES = ("collectives", "parameters", "buffers", "inputs", "outputs", "fallbacks", "nodes")


def _value(program: Program, node: fx.Node) -> tuple[tuple[int, ...], str, str | None, tuple[int, ...]]:
    """The shape, the dtype, the sharding and the local shape of a value."""
    producer, index = program.value(node)
    type_, local = program.types(producer)[index], program.local_type(node)
    assert type_ is not None and local is not None, node
    shardings = program.shardings(producer)
    sharding = shardings[index] if shardings else None
    text = None if sharding is None or program.level == "localized" else sharding.text(type_)
    return type_.shape, dtype_name(type_.dtype), text, local.shape


def node_entry(
    program: Program, node: fx.Node, ops: Mapping[Any, str], runs: Sequence[RunEntry] | None = None
) -> NodeEntry:
    """The entry of a value; ``ops`` are the names of the program's ops."""
    source = program.source(node)
    return NodeEntry(
        node.name, node.op if node.op == "placeholder" else ops.get(node.target, "getitem"), type_text(program, node),
        tuple(operand.name for operand in node.all_input_nodes), source.phase, source.module, source.location,
        None if runs is None else tuple(runs),
    )  # fmt: skip
