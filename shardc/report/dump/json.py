"""The JSON form of a program: a contract, version 1. Its schema is ``schemas/dump.schema.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc.costs.count import flops_of, has_machine
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepRecord
from shardc.language.sharding import dtype_name
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import op_names, rank_axes, type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.dump.selection import Selection

COLLECTIVE_FIELDS = (
    "kind", "axes", "dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "wire_bytes_total", "phase",
    "node", "source", "cause",
)  # fmt: skip
NO_SECONDS: Mapping[str, float] = {}


def program_json(program: Program, seconds: Mapping[str, float] = NO_SECONDS) -> dict[str, Any]:
    """The whole JSON form. It has ``seconds`` of passes only if they are given: all else is stable to the byte."""
    tables = _Tables(program)
    exists = {"schedule": tables.stages is not None, "time": has_machine(program)}
    entries = {key: make(tables) for key, make in TABLES.items() if exists.get(key, True)}
    return {**_heading(program), **entries, **({"seconds": dict(seconds)} if seconds else {})}


def selected_json(program: Program, selection: Selection) -> dict[str, Any]:
    """The selected tables whole, and of the others the entries about selected values."""
    whole, part = _Tables(program), _Tables(program, selection)
    names = {key for name in selection.tables for key in WITH_TABLE.get(name, (name,))}
    partial_names = ABOUT_VALUES if selection.nodes or selection.collectives else ()
    sources = {key: whole if key in names else part for key in TABLES if key in {*names, *partial_names}}
    entries = {key: TABLES[key](tables) for key, tables in sources.items()}
    return {**_heading(program), "only": selection.text, **entries}


def _heading(program: Program) -> dict[str, Any]:
    return {"version": 1, "level": program.level, "mesh": rank_axes(program)}


@dataclass(frozen=True)
class _Tables:
    """The tables of a program, each a list of entries; with a selection those about the selected values."""

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
    def runs(self) -> Mapping[fx.Node, list[dict[str, Any]]]:
        """For each call the pipeline stages that run it, and in which part."""
        return self.stages.runs if self.stages else {}

    @cached_property
    def ops(self) -> dict[Any, str]:
        """The name of each op."""
        return op_names(self.program)

    def collectives(self) -> list[dict[str, Any]]:
        """The collectives of a step, in order."""
        entries = []
        for each in self.selection.collectives if self.selection else collectives_of(self.program):
            of_stage = {} if each.stage is None else {"stage": each.stage, "times": each.times}
            entries.append({"id": each.name, **{key: getattr(each, key) for key in COLLECTIVE_FIELDS}, **of_stage})
        return entries

    def inputs(self, kind: str) -> list[dict[str, Any]]:
        """The inputs of one kind; parameters with the stages that hold them."""
        entries = []
        for input_, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            if input_.kind == kind and self.has(node):
                entries.append({"name": input_.name, **_value(self.program, node)})
                if kind == "parameter" and node in self.runs:
                    entries[-1]["stages"] = [each["stage"] for each in self.runs[node]]
        return entries

    def outputs(self) -> list[dict[str, Any]]:
        """The outputs of the model."""
        pairs = zip(self.program.outputs, self.program.results, strict=True)
        return [
            {"name": output.name, **_value(self.program, node)}
            for output, node in pairs
            if output.kind == "output" and node is not None and self.has(node)
        ]

    def fallbacks(self) -> list[dict[str, Any]]:
        """The ops without a rule."""
        return [node_entry(self.program, node, self.ops) for node in fallbacks_of(self.program) if self.has(node)]

    def flops(self) -> dict[str, Any]:
        """Operations of one rank and of all ranks together, which a localized program does not know."""
        program = self.program
        of_rank = self.stages.rank_flops if self.stages else flops_of(program, of_rank=True)
        return {"per_rank": of_rank, "whole": None if program.level == "localized" else flops_of(program)}

    def nodes(self) -> list[dict[str, Any]]:
        """Every value, with the stages that run it."""
        return [
            {**node_entry(self.program, node, self.ops), **({"runs": self.runs[node]} if node in self.runs else {})}
            for node in filter(self.has, self.program.graph.nodes)
        ]


TABLES: Mapping[str, Callable[[_Tables], Any]] = {
    "collectives": _Tables.collectives,
    "parameters": lambda tables: tables.inputs("parameter"),
    "buffers": lambda tables: tables.inputs("buffer"),
    "inputs": lambda tables: tables.inputs("input"),
    "outputs": _Tables.outputs,
    "fallbacks": _Tables.fallbacks,
    "memory": lambda tables: memory_of(tables.program),
    "flops": _Tables.flops,
    "stages": lambda tables: tables.stages.entries() if tables.stages else [],
    "schedule": lambda tables: tables.stages and tables.stages.schedule_entry(),
    "time": lambda tables: StepRecord(tables.program).entry(),
    "notes": lambda tables: list(tables.program.notes),
    "nodes": _Tables.nodes,
}
WITH_TABLE = {"parameters": ("parameters", "buffers"), "stages": ("stages", "schedule")}
ABOUT_VALUES = ("collectives", "parameters", "buffers", "inputs", "outputs", "fallbacks", "nodes")


def _value(program: Program, node: fx.Node) -> dict[str, Any]:
    producer, index = program.value(node)
    type_, local = program.types(producer)[index], program.local_type(node)
    assert type_ is not None and local is not None, node
    shardings = program.shardings(producer)
    sharding = shardings[index] if shardings else None
    return {
        "shape": type_.shape,
        "dtype": dtype_name(type_.dtype),
        "sharding": None if sharding is None or program.level == "localized" else sharding.text(type_),
        "local_shape": local.shape,
    }


def node_entry(program: Program, node: fx.Node, ops: Mapping[Any, str]) -> dict[str, Any]:
    """The entry of a value; ``ops`` are the names of the program's ops."""
    source = program.source(node)
    return {
        "name": node.name, "op": node.op if node.op == "placeholder" else ops.get(node.target, "getitem"),
        "type": type_text(program, node), "operands": [operand.name for operand in node.all_input_nodes],
        "phase": source.phase, "module": source.module, "source": source.location,
    }  # fmt: skip
