"""Explanations of a pipeline: why a stage sends a value to another stage, and where a stage begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import fx

from shardc.costs.stages.record import StageRecord
from shardc.costs.stages.units import prefixes
from shardc.options import Pipeline
from shardc.program.collective import Collective
from shardc.program.node import descendants, operands
from shardc.program.program import Program
from shardc.program.provenance import Source, StageCrossing
from shardc.program.text import type_text
from shardc.report.explain.chains import Chains
from shardc.report.explain.explanation import Explanation, Reason, Side, Transmission

BALANCED = {"params": "parameters", "flops": "operations", "time": "estimated time", "memory": "memory"}


class StageExplainer:
    """Explains the messages between the stages of one program."""

    def __init__(self, program: Program, chains: Chains) -> None:
        self.program, self.chains = program, chains
        self.record = StageRecord(program)
        assert program.options.pipeline is not None
        self.pipeline: Pipeline = program.options.pipeline

    def message(self, message: Collective, sent: Transmission) -> Explanation:
        """Explain why a message is sent; if it has several values, why each is in it."""
        (cause,) = message.causes
        assert isinstance(cause, StageCrossing), message
        parts = tuple(self._value(message, cause, self.chains.nodes[name]) for name in cause.values)
        notes = tuple(self._notes(message, cause))
        if len(parts) > 1:
            return Explanation(message.name, "collective", location=message.source, sent=sent, parts=parts, notes=notes)
        (part,) = parts
        return Explanation(
            message.name, "collective", part.type, part.module, part.location, part.chains,
            sent=sent, has=part.has, wants=part.wants, reasons=part.reasons, notes=notes,
        )  # fmt: skip

    def _value(self, message: Collective, cause: StageCrossing, node: fx.Node) -> Explanation:
        side = self.chains.side(node)
        return Explanation(
            side.name, "collective", side.type, side.module, side.location, tuple(self.chains.of(node)), has=side,
            wants=self._reader(node, cause.target), reasons=(Reason(message.axes[0], "crossed", None, cause.option),),
        )  # fmt: skip

    def _reader(self, node: fx.Node, target: int) -> Side:
        """The first reader of a value in a stage, or else the stage as a whole."""
        calls = {call for part in self.record.stages.stages[target].parts.values() for call in part}
        reader = next((user for user in node.users if user in calls), None)
        name, type_ = f"stage {target}", type_text(self.program, node)
        if reader is None:
            return Side(name, type_, "", None)
        source, arguments = self.program.source(reader), operands(reader) if reader.op == "call_function" else ()
        operand = arguments.index(node) if node in arguments else None
        return Side(name, type_, self.chains.op(reader), operand, source.module, source.location)

    def _notes(self, message: Collective, cause: StageCrossing) -> Iterator[str]:
        low, high = sorted((cause.source, cause.target))
        if message.name.startswith("send_after"):
            yield from self._notes_after_the_last_microbatch(cause)
        elif cause.source > cause.target:
            yield f"the gradient of what stage {low} sends in forward goes back the same way"
        yield from map(self.beginning, range(low + 1, high + 1))

    def _notes_after_the_last_microbatch(self, cause: StageCrossing) -> Iterator[str]:
        """Notes on the results that need a value sent once, after all microbatches."""
        behind = descendants(*(self.chains.nodes[name] for name in cause.values))
        source, target = (self.record.stages.stages[stage].parameters for stage in (cause.source, cause.target))
        for output, result in zip(self.program.outputs, self.program.results, strict=True):
            if result not in behind:
                continue
            if output.kind != "gradient":
                yield f"every rank has the {output.kind} {output.name} at the end of a step"
            elif output.name in source and output.name in target:
                yield f"both stages hold {output.name}, and add up their parts of its gradient"

    # Where a stage begins.

    def stage(self, index: int, sent: Iterable[Explanation]) -> Explanation:
        """Explain where a stage begins and why. ``sent``: the explanations of its collectives."""
        path = self.record.modules[index][0]
        reasons = (Reason(self.pipeline.axis, "stages", None, self.pipeline.text),)
        notes = (self.beginning(index),)
        return Explanation(str(index), "stage", module=path, reasons=reasons, parts=tuple(sent), notes=notes)

    def beginning(self, index: int) -> str:
        """A sentence that says where a stage begins, and which option or mark puts it there."""
        if not index:
            return "stage 0 begins with the model"
        path = self.record.modules[index][0]
        return f"stage {index} begins {f'with {path}' if path else 'outside of all modules'}{self._cause(index, path)}"

    def _cause(self, index: int, path: str) -> str:
        calls = [self.record.stages.stages[stage].parts["forward"] for stage in range(index + 1)]
        sources = (map(self.program.source, each) for each in calls)
        first = [next((source for source in each if source.stage == i), Source()) for i, each in enumerate(sources)]
        paths = [each for each in prefixes(first[index].module) if len(each) >= len(path)]
        for glob in self.pipeline.cuts or ():
            if path and any(fnmatchcase(each, glob) for each in paths):
                return f": cuts={glob!r} says so"
        if first[index].marks > max(source.marks for source in first[:index]):
            return ": shardc.stage_boundary() in the model says so"
        measure = BALANCED[self.pipeline.balance]
        return f": balance={self.pipeline.balance!r} makes stages as even as can be in {measure}"
