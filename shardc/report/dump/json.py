"""The JSON form of a program: a contract, version 1, whose schema is ``dump.schema.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc.costs.flops import flops_of
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepRecord
from shardc.costs.time import has_machine
from shardc.language.sharding import dtype_name
from shardc.program.collective import Collective
from shardc.program.program import Input, Program
from shardc.program.stages import has_stages
from shardc.program.text import op_names, rank_axes, type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.dump.selection import Only

COLLECTIVE_FIELDS = (
    "kind", "axes", "dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "wire_bytes_total", "phase",
    "node", "source", "cause",
)  # fmt: skip
NO_SECONDS: Mapping[str, float] = {}


def program_json(program: Program, seconds: Mapping[str, float] = NO_SECONDS) -> dict[str, Any]:
    """The whole JSON form. ``seconds`` are there only where given, since all else is stable to the byte."""
    form = _Form(program)
    is_there = {"schedule": form.stages is not None, "time": has_machine(program)}
    keys = [key for key in TABLES if is_there.get(key, True)]
    took = {"seconds": dict(seconds)} if seconds else {}
    return {**_heading(program), **{key: TABLES[key](form) for key in keys}, **took}


def only_json(program: Program, only: Only) -> dict[str, Any]:
    """What was asked for of the JSON form: whole tables, and of the others the entries about the values found."""
    whole, some = _Form(program), _Form(program, only)
    tables = {key for name in only.tables for key in WITH_TABLE.get(name, (name,))}
    kept = {key: whole if key in tables else some for key in TABLES if key in {*tables, *some.tables}}
    return {**_heading(program), "only": only.text, **{key: TABLES[key](form) for key, form in kept.items()}}


def _heading(program: Program) -> dict[str, Any]:
    return {"version": 1, "level": program.level, "mesh": rank_axes(program)}


@dataclass(frozen=True)
class _Form:
    """The entries of a program's tables; ``only`` those about the values that it finds."""

    program: Program
    only: Only | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """Those that have entries about some values."""
        return ABOUT_VALUES if self.only and (self.only.nodes or self.only.collectives) else ()

    def has(self, node: fx.Node) -> bool:
        """Whether a node is among them."""
        return node.op != "output" and (self.only is None or node in self.only.nodes)

    @cached_property
    def stages(self) -> StageRecord | None:
        """Of a pipeline."""
        return StageRecord(self.program) if has_stages(self.program) else None

    @cached_property
    def runs(self) -> Mapping[fx.Node, list[dict[str, Any]]]:
        """The stages of a pipeline that run a call, and in which part."""
        return self.stages.runs if self.stages else {}

    @cached_property
    def called(self) -> dict[Any, str]:
        """What each op is called."""
        return op_names(self.program)

    def collectives(self) -> list[dict[str, Any]]:
        """Those of a step, in order."""
        return [_collective(each) for each in (self.only.collectives if self.only else collectives_of(self.program))]

    def inputs(self, kind: str) -> list[dict[str, Any]]:
        """Those of one kind; a parameter with the stages that hold it."""
        ends = zip(self.program.inputs, self.program.placeholders, strict=True)
        return [self._input(given, node) for given, node in ends if given.kind == kind and self.has(node)]

    def _input(self, given: Input, node: fx.Node) -> dict[str, Any]:
        is_held = given.kind == "parameter" and node in self.runs
        stages = {"stages": [each["stage"] for each in self.runs[node]]} if is_held else {}
        return {"name": given.name, **_value(self.program, node), **stages}

    def outputs(self) -> list[dict[str, Any]]:
        """What the model returns."""
        ends = zip(self.program.outputs, self.program.results, strict=True)
        return [
            {"name": output.name, **_value(self.program, node)}
            for output, node in ends
            if output.kind == "output" and node is not None and self.has(node)
        ]

    def fallbacks(self) -> list[dict[str, Any]]:
        """The ops without a rule."""
        return [node_entry(self.program, node, self.called) for node in fallbacks_of(self.program) if self.has(node)]

    def flops(self) -> dict[str, Any]:
        """Of one rank, which a localized program knows alone, and of all ranks together."""
        program = self.program
        of_rank = self.stages.rank_flops if self.stages else flops_of(program, of_rank=True)
        return {"per_rank": of_rank, "whole": None if program.level == "localized" else flops_of(program)}

    def calls(self) -> list[dict[str, Any]]:
        """Every value, with the stages that run it."""
        values = filter(self.has, self.program.graph.nodes)
        return [
            {**node_entry(self.program, node, self.called), **({"runs": self.runs[node]} if node in self.runs else {})}
            for node in values
        ]


TABLES: Mapping[str, Callable[[_Form], Any]] = {
    "collectives": _Form.collectives,
    "parameters": lambda form: form.inputs("parameter"),
    "buffers": lambda form: form.inputs("buffer"),
    "inputs": lambda form: form.inputs("input"),
    "outputs": _Form.outputs,
    "fallbacks": _Form.fallbacks,
    "memory": lambda form: memory_of(form.program),
    "flops": _Form.flops,
    "stages": lambda form: form.stages.entries() if form.stages else [],
    "schedule": lambda form: form.stages and form.stages.schedule_entry(),
    "time": lambda form: StepRecord(form.program).entry(),
    "notes": lambda form: list(form.program.notes),
    "nodes": _Form.calls,
}
WITH_TABLE = {"parameters": ("parameters", "buffers"), "stages": ("stages", "schedule")}
ABOUT_VALUES = ("collectives", "parameters", "buffers", "inputs", "outputs", "fallbacks", "nodes")


def _collective(found: Collective) -> dict[str, Any]:
    of_pipeline = {} if found.stage is None else {"stage": found.stage, "times": found.times}
    return {"id": found.name, **{key: getattr(found, key) for key in COLLECTIVE_FIELDS}, **of_pipeline}


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


def node_entry(program: Program, node: fx.Node, called: Mapping[Any, str]) -> dict[str, Any]:
    """A value of the program; ``called`` are the names of its ops."""
    source = program.source(node)
    return {
        "name": node.name,
        "op": node.op if node.op == "placeholder" else called.get(node.target, "getitem"),
        "type": type_text(program, node),
        "operands": [operand.name for operand in node.all_input_nodes],
        "phase": source.phase,
        "module": source.module,
        "source": source.location,
    }
