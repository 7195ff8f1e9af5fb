"""Of a pipeline: why a value is sent from one stage to another, and where a stage begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import fx

from shardc.costs.stage_record import StageRecord
from shardc.costs.stage_units import prefixes
from shardc.options import Pipeline
from shardc.program.collective import Collective
from shardc.program.node import descendants, operands
from shardc.program.program import Program
from shardc.program.provenance import Source, StageCrossing
from shardc.program.text import type_text
from shardc.report.explain.chains import Chains
from shardc.report.explain.explanation import End, Explanation, Reason, Sent

EVEN = {"params": "parameters", "flops": "operations", "time": "estimated time", "memory": "memory"}


class StageExplainer:
    """Explains what the stages of one program send to each other."""

    def __init__(self, program: Program, chains: Chains) -> None:
        self.program, self.chains = program, chains
        self.record = StageRecord(program)
        assert program.options.pipeline is not None
        self.pipeline: Pipeline = program.options.pipeline

    def message(self, found: Collective, sent: Sent) -> Explanation:
        """Why a message is there; of several values, why each is in it."""
        (cause,) = found.causes
        assert isinstance(cause, StageCrossing), found
        parts = tuple(self._value(found, cause, self.chains.nodes[name]) for name in cause.values)
        notes = tuple(self._notes(found, cause))
        if len(parts) == 1:
            return Explanation(
                found.name, "collective", parts[0].type, parts[0].module, parts[0].location, parts[0].chains,
                sent=sent, has=parts[0].has, wants=parts[0].wants, reasons=parts[0].reasons, notes=notes,
            )  # fmt: skip
        return Explanation(found.name, "collective", location=found.source, sent=sent, parts=parts, notes=notes)

    def _value(self, found: Collective, cause: StageCrossing, node: fx.Node) -> Explanation:
        source, type_, name = self.program.source(node), type_text(self.program, node), self.chains.names[node]
        has = End(name, type_, self.chains.op(node), None, source.module, source.location)
        return Explanation(
            name, "collective", type_, source.module, source.location, tuple(self.chains.of(node)), has=has,
            wants=self._reader(node, cause.target), reasons=(Reason(found.axes[0], "crossed", end=cause.option),),
        )  # fmt: skip

    def _reader(self, node: fx.Node, target: int) -> End:
        """Who takes a value in a stage: its first reader there, else the stage as a whole."""
        parts = self.record.stages.stages[target].parts.values()
        calls = {call for part in parts for call in part}
        reader = next((user for user in node.users if user in calls), None)
        name, type_ = f"stage {target}", type_text(self.program, node)
        if reader is None:
            return End(name, type_)
        source, taken = self.program.source(reader), operands(reader) if reader.op == "call_function" else ()
        operand = taken.index(node) if node in taken else None
        return End(name, type_, self.chains.op(reader), operand, source.module, source.location)

    def _notes(self, found: Collective, cause: StageCrossing) -> Iterator[str]:
        low, high = sorted((cause.source, cause.target))
        if found.name.startswith("send_after"):
            yield from self._ends(cause)
        elif cause.source > cause.target:
            yield f"the gradient of what stage {low} sends in forward goes back the same way"
        yield from (self.beginning(stage) for stage in range(low + 1, high + 1))

    def _ends(self, cause: StageCrossing) -> Iterator[str]:
        """What a value is of that is sent once, when all microbatches are done."""
        nodes = [self.chains.nodes[name] for name in cause.values]
        behind = descendants(*nodes)
        ends = zip(self.program.outputs, self.program.results, strict=True)
        held = set(self._held(cause.source)) & set(self._held(cause.target))
        for put, result in ends:
            if result in behind and put.kind != "gradient":
                yield f"every rank has the {put.kind} {put.name} at the end of a step"
            elif result in behind and put.name in held:
                yield f"both stages hold {put.name}, and add up their parts of its gradient"

    def _held(self, stage: int) -> tuple[str, ...]:
        return self.record.stages.stages[stage].parameters

    # Where a stage begins.

    def stage(self, index: int, sent: Iterable[Explanation]) -> Explanation:
        """Where a stage begins and who says so; ``sent``: what explains each of its collectives."""
        path = self.record.modules[index][0]
        reasons = (Reason(self.pipeline.axis, "stages", end=self.pipeline.text),)
        return Explanation(
            f"{index}", "stage", module=path, reasons=reasons, parts=tuple(sent), notes=(self.beginning(index),)
        )

    def beginning(self, index: int) -> str:
        """Where a stage begins, and what of the user's puts it there."""
        path = self.record.modules[index][0]
        place = f"stage {index} begins with {path}" if path else f"stage {index} begins outside of all modules"
        return f"{place if index else 'stage 0 begins with the model'}{self._who(index, path) if index else ''}"

    def _who(self, index: int, path: str) -> str:
        globs = self.pipeline.cuts or ()
        first = [self._first(stage) for stage in range(index + 1)]
        paths = [each for each in prefixes(first[index].module) if len(each) >= len(path)]
        for glob in globs:
            if path and any(fnmatchcase(each, glob) for each in paths):
                return f": cuts={glob!r} says so"
        if first[index].marks > max(source.marks for source in first[:index]):
            return ": shardc.stage_boundary() in the model says so"
        return f": balance={self.pipeline.balance!r} makes stages as even as can be in {EVEN[self.pipeline.balance]}"

    def _first(self, stage: int) -> Source:
        """Where the first call of a stage's forward comes from."""
        sources = map(self.program.source, self.record.stages.stages[stage].parts["forward"])
        return next((source for source in sources if source.stage == stage), Source())
