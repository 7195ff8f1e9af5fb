"""The record of a pipeline for dumps: what each stage holds, computes and sends, and the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardc.costs.count import flops_of_call, nbytes
from shardc.costs.records import RunEntry, ScheduleEntry, SentEntry, SentValue, StageEntry
from shardc.costs.stages.schedule import schedule_of, stage_costs
from shardc.costs.stages.units import prefixes
from shardc.language.text import bytes_text, count_text, table
from shardc.language.words import Part
from shardc.program.program import Program, parameters_of
from shardc.program.stages import TIMED, Crossing, Stage, Stages, has_stages, stages_of
from shardc.program.text import value_names
from shardc.schedules.schedule import Schedule, to_csv
from shardc.schedules.simulate import simulate
from shardc.schedules.timeline import Timeline, rounded, timeline_text


@dataclass(frozen=True)
class StageRecord:
    """The stages and the schedule of a lowered or localized program. Times are estimates."""

    program: Program

    @cached_property
    def stages(self) -> Stages:
        """The calls of each stage, and the values that cross between stages."""
        return stages_of(self.program)

    @cached_property
    def schedule(self) -> Schedule:
        """The order in which each rank works."""
        return schedule_of(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the schedule."""
        return simulate(self.schedule, stage_costs(self.stages))

    @cached_property
    def flops(self) -> list[int]:
        """For each stage the floating-point operations of a step on one rank."""
        by_part = ([(self.times(part), calls) for part, calls in stage.parts.items()] for stage in self.stages.stages)
        return [sum(n * flops_of_call(self.program, node) for n, calls in parts for node in calls) for parts in by_part]

    @property
    def rank_flops(self) -> int:
        """The operations of the rank that has most of them."""
        ranks = range(self.schedule.num_ranks)
        return max(sum(self.flops[stage] for stage in self.schedule.stages_on(rank)) for rank in ranks)

    def times(self, part: Part) -> int:
        """The number of times that a part of a stage runs in a step."""
        return self.schedule.num_microbatches if part in TIMED else 1

    def entries(self) -> tuple[StageEntry, ...]:
        """An entry for each stage."""
        return tuple(self._entry(i, stage) for i, stage in enumerate(self.stages.stages))

    def _entry(self, index: int, stage: Stage) -> StageEntry:
        rank, parameters = self.schedule.place[index], [self._parameters[name] for name in stage.parameters]
        return StageEntry(
            stage=index,
            rank=rank,
            modules=self.modules[index],
            parameters=tuple(stage.parameters),
            elements=sum(self.program.global_type(node).numel for node in parameters),
            parameter_bytes=sum(nbytes(self.program.local_type(node)) for node in parameters),
            flops=self.flops[index],
            calls={part: len(calls) for part, calls in stage.parts.items()},
            sent=tuple(self._sent(*each) for each in self.stages.crossings.items() if each[0].source == index),
            actions=tuple(str(action) for action in self.schedule.actions[rank] if action.stage == index),
        )

    def _sent(self, way: Crossing, nodes: Iterable[fx.Node]) -> SentEntry:
        place, pipeline = self.schedule.place, self.program.options.pipeline
        assert pipeline is not None
        types = [(node.name, self.program.local_type(node)) for node in nodes]
        return SentEntry(
            to=way.target,
            after=way.part,
            times=self.times(way.part),
            over=pipeline.axis if place[way.source] != place[way.target] else None,
            values=tuple(SentValue(name, str(type_), nbytes(type_)) for name, type_ in types),
        )

    def schedule_entry(self) -> ScheduleEntry:
        """The entry of the schedule."""
        return ScheduleEntry(
            name=self.schedule.name,
            microbatches=self.schedule.num_microbatches,
            place=tuple(self.schedule.place),
            rows=tuple(to_csv(self.schedule).splitlines()),
            makespan=rounded(self.timeline.makespan),
            bubble=rounded(self.timeline.bubble),
        )

    @cached_property
    def runs(self) -> Mapping[fx.Node, list[RunEntry]]:
        """For each call the stages that run it and the part in which; for each parameter the stages that hold it."""
        runs: dict[fx.Node, list[RunEntry]] = {}
        for i, stage in enumerate(self.stages.stages):
            for part in stage.parts:
                for node in (*stage.parts[part], *stage.sums[part]):
                    runs.setdefault(node, []).append(RunEntry(i, part))
            for name in stage.parameters:
                runs.setdefault(self._parameters[name], []).append(RunEntry(i))
        return runs

    def text(self) -> str:
        """A table of stages, one of the values that cross between them, and the schedule as a picture."""
        schedule, pipeline = self.schedule, self.program.options.pipeline
        assert pipeline is not None
        stages, ranks = f"{schedule.num_stages} stage", f"{schedule.num_ranks} rank"
        microbatches = f"{schedule.num_microbatches} microbatch{'es' * (schedule.num_microbatches != 1)}"
        title = (
            f"{stages}{'s' * (schedule.num_stages != 1)} on {ranks}{'s' * (schedule.num_ranks != 1)} "
            f"along {pipeline.axis}, {microbatches} by {schedule.name}, times estimated"
        )
        return f"{title}\n{self._stage_table()}\n{self._crossing_table()}\n{timeline_text(self.timeline)}"

    def _stage_table(self) -> str:
        entries, whole = self.entries(), sum(self.flops) or 1
        rows = [
            (each.stage, each.rank, *(path or "(model)" for path in each.modules), count_text(each.elements),
             bytes_text(each.parameter_bytes), f"{each.flops / whole:.1%}", *each.calls.values())
            for each in entries
        ]  # fmt: skip
        header = ["stage", "rank", "first module", "last module", "parameters", "bytes", "FLOPs", *entries[0].calls]
        empty = {i for i, column in enumerate(zip(*rows, strict=True)) if i > 3 and not any(column)}
        return table(header, [["" if i in empty else cell for i, cell in enumerate(row)] for row in rows])

    def _crossing_table(self) -> str:
        names = {node.name: shown for node, shown in value_names(self.program).items()}
        rows = [
            (entry.stage, sent.to, sent.after, names[value.name], value.type, bytes_text(value.bytes), sent.times,
             sent.over or "on one rank")
            for entry in self.entries() for sent in entry.sent for value in sent.values
        ]  # fmt: skip
        header = ("from", "to", "after", "value", "type", "bytes", "times", "over")
        return table(header, rows) if rows else "no value crosses between stages\n"

    @cached_property
    def _parameters(self) -> dict[str, fx.Node]:
        return parameters_of(self.program)

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """For each stage the largest module that begins in it and the largest that ends in it."""
        paths: list[list[str]] = []
        for i, stage in enumerate(self.stages.stages):
            sources = map(self.program.source, stage.parts["forward"])
            paths.append([source.module for source in sources if source.stage == i])
        above = [{prefix for path in stage_paths for prefix in prefixes(path)} for stage_paths in paths]
        return [(_largest(each[:1], above[:i]), _largest(each[-1:], above[i + 1 :])) for i, each in enumerate(paths)]


def _largest(paths: Sequence[str], others: Sequence[set[str]]) -> str:
    """The shortest prefix of a path that no other stage has."""
    above = prefixes(paths[0]) if paths else []
    return next((each for each in above if not any(each in other for other in others)), paths[0] if paths else "")


def calls_of_step(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Each call, with the number of times that it runs in a step."""
    if not has_stages(program):
        yield from ((node, 1) for node in program.calls)
        return
    record = StageRecord(program)
    for stage in record.stages.stages:
        for part, calls in stage.parts.items():
            yield from ((node, record.times(part)) for node in calls)
