"""A compiled program as lines of text, which must be equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor, fx

from shardc.capture.values.refusals import Guard
from shardc.costs.stages.schedule import schedule_of
from shardc.program.opaque import Opaque
from shardc.program.program import Program
from shardc.program.text import call_text, op_names, value_names

from ..comm.checksum import bytes_of, raw_bytes
from .gate import COMMENT
from .request import text_of


@dataclass(frozen=True)
class ProgramText:
    """The parts of a program that must be equal on every rank. ``constants``: buffers that the model does not have."""

    program: Program
    constants: Mapping[str, Tensor]

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of all lines, without their comments."""
        lines = (line.partition(COMMENT)[0] for line in self.lines())
        return hashlib.sha256("\n".join(lines).encode()).digest()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Mesh, options, inputs, ops, outputs, fixed shardings and schedule; modules and source lines as comments."""
        program = self.program
        yield f"mesh {program.mesh}, {program.num_stages} stages"
        for name in ("zero", "precision", "remat", "bucket"):
            yield f"option {name}={getattr(program.options, name)}"
        if (pipeline := program.options.pipeline) is not None:
            chosen = {each.name: getattr(pipeline, each.name) for each in fields(pipeline) if each.name != "loss_scale"}
            yield f"Pipeline({', '.join(f'{name}={text_of(value)}' for name, value in chosen.items())})"
        for put, node in zip(program.inputs, program.placeholders, strict=True):
            constant = self.constants.get(put.name) if put.kind == "buffer" else None
            checksum = "" if constant is None else f", values {checksum_of(constant)}"
            gradient = ", with a gradient" if put.requires_grad else ""
            comment = "; ".join(pin.text for pin in program.pins if (pin.kind, pin.name) == (put.kind, put.name))
            yield f"{put.kind} {put.name}: {self._types(node)}{gradient}{checksum}{COMMENT}{comment}"
        yield from self._calls()
        names = value_names(program)
        for output, result in zip(program.outputs, program.results, strict=True):
            value = "None" if result is None else f"{self._types(result)} = {names[result]}"
            yield f"{output.kind} {output.name}: {value}"
        for pin in program.pins:
            stages = f", stages {sorted(pin.stages)}" if pin.stages else ""
            yield f"{pin.kind} {pin.name!r} is {pin.sharding.text()}{stages}{COMMENT}{pin.text}"
        if pipeline is not None:
            schedule = schedule_of(program)
            yield f"stages are on ranks {list(schedule.place)} of {pipeline.axis!r}"
            for rank, actions in enumerate(schedule.actions):
                yield f"rank {rank} of {pipeline.axis!r} runs {' '.join(map(str, actions))}"

    def _calls(self) -> Iterator[str]:
        program, names, called = self.program, value_names(self.program), op_names(self.program)
        is_cut = program.options.pipeline is not None
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            source = program.source(node)
            place = ", ".join(filter(None, [source.module, source.location]))
            stage = f", stage {source.stage}" if is_cut else ""
            run = node.target.run if isinstance(node.target, Opaque) else None
            guard = f", gives {run.expected}" if isinstance(run, Guard) else ""
            call = f"{names[node]} = {call_text(node, names, called)}"
            yield f"{call}: {self._types(node)}, {source.phase}{stage}{guard}{COMMENT}{place}"

    def _types(self, node: fx.Node) -> str:
        """The global types of a node's results with their shardings."""
        program = self.program
        producer, index = program.value(node)
        shardings = program.shardings(producer) or (None,) * len(program.types(producer))
        indices = range(len(shardings)) if producer is node else [index]
        return ", ".join(self._type(producer, i) for i in indices)

    def _type(self, node: fx.Node, index: int) -> str:
        shardings = self.program.shardings(node)
        type_, sharding = self.program.global_type(node, index), shardings[index] if shardings else None
        return str(type_) if type_ is None or sharding is None else sharding.text(type_)


def guards_of(program: Program) -> list[Guard]:
    """The guards of a program; none with a pipeline, where no rank runs all of them."""
    if program.options.pipeline is not None:
        return []
    opaque = (node.target.run for node in program.calls if isinstance(node.target, Opaque))
    return [run for run in opaque if isinstance(run, Guard)]


def checksum_of(tensor: Tensor) -> str:
    """The first 16 hex digits of the SHA-256 of a tensor's bytes; ``on meta`` for a meta tensor."""
    if tensor.is_meta:
        return "on meta"
    data = raw_bytes(tensor.cpu())
    return hashlib.sha256(bytes_of(data)).hexdigest()[:16]
