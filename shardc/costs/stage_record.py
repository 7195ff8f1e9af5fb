"""What a dump says of a pipeline: what each stage holds and does, what crosses between stages, and the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from shardc.costs.count import flops_of_call, nbytes, resident_bytes
from shardc.costs.stage_units import prefixes
from shardc.costs.time import costs_of, edges_of
from shardc.language.text import table
from shardc.program.program import Program, parameters_of
from shardc.program.stages import TIMED, Crossing, Part, Stage, Stages, kept, stages_of
from shardc.program.text import value_names
from shardc.schedules.check import check
from shardc.schedules.events import with_messages
from shardc.schedules.named import schedule
from shardc.schedules.picture import timeline_text
from shardc.schedules.schedule import Schedule, to_csv
from shardc.schedules.simulate import simulate
from shardc.schedules.timeline import Timeline, rounded


@dataclass(frozen=True)
class StageRecord:
    """The stages of a lowered or localized program, by the schedule that they run by. Its times are estimates."""

    program: Program

    @cached_property
    def stages(self) -> Stages:
        """What each stage does, and what crosses."""
        return stages_of(self.program)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of each rank's work."""
        return schedule_of(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        """When all of it happens."""
        return simulate(self.schedule, costs_of(self.stages))

    @cached_property
    def flops(self) -> list[int]:
        """For each stage the floating-point operations of a step on one rank."""
        return [sum(self._flops(stage, part) for part in stage.parts) for stage in self.stages.stages]

    def _flops(self, stage: Stage, part: Part) -> int:
        return sum(flops_of_call(self.program, node) for node in stage.parts[part]) * self.times(part)

    @property
    def rank_flops(self) -> int:
        """Those of the rank that has most of them."""
        place = self.schedule.place
        return max(sum(f for f, its in zip(self.flops, place, strict=True) if its == rank) for rank in set(place))

    def times(self, part: Part) -> int:
        """How often in a step a part of a stage's work is done."""
        return self.schedule.num_microbatches if part in TIMED else 1

    # JSON.

    def entries(self) -> list[dict[str, Any]]:
        """The JSON form, an object a stage.

        ``modules``: the first and the last. ``parameter_bytes``: on one rank. ``flops``: of a step on one rank.
        ``calls``: how many each part has. ``sent``: to which stage, after which part, how often, over the axis
        unless that stage is on the same rank. ``actions``: in the cells of torch.distributed.pipelining.
        """
        return [self._entry(i, stage) for i, stage in enumerate(self.stages.stages)]

    def _entry(self, index: int, stage: Stage) -> dict[str, Any]:
        rank = self.schedule.place[index]
        return {
            "stage": index,
            "rank": rank,
            "modules": list(self.modules[index]),
            "parameters": list(stage.parameters),
            "elements": sum(self.program.global_type(self._parameters[name]).numel for name in stage.parameters),
            "parameter_bytes": sum(self._nbytes(self._parameters[name]) for name in stage.parameters),
            "flops": self.flops[index],
            "calls": {part: len(calls) for part, calls in stage.parts.items()},
            "sent": [self._sent(*each) for each in self.stages.crossings.items() if each[0].source == index],
            "actions": [str(action) for action in self.schedule.actions[rank] if action.stage == index],
        }

    def _sent(self, way: Crossing, nodes: Iterable[fx.Node]) -> dict[str, Any]:
        place, pipeline = self.schedule.place, self.program.options.pipeline
        assert pipeline is not None
        values = [
            {"name": node.name, "type": str(self.program.local_type(node)), "bytes": self._nbytes(node)}
            for node in nodes
        ]
        is_far = place[way.source] != place[way.target]
        return {"to": way.target, "after": way.part, "times": self.times(way.part),
                "over": pipeline.axis if is_far else None, "values": values}  # fmt: skip

    def schedule_entry(self) -> dict[str, Any]:
        """The JSON form of the schedule: ``place``, the rank of each stage; ``rows``, a CSV line a rank; seconds."""
        return {
            "name": self.schedule.name,
            "microbatches": self.schedule.num_microbatches,
            "place": list(self.schedule.place),
            "rows": to_csv(self.schedule).splitlines(),
            "makespan": rounded(self.timeline.makespan),
            "bubble": rounded(self.timeline.bubble),
        }

    @cached_property
    def runs(self) -> Mapping[fx.Node, list[dict[str, Any]]]:
        """For each call the stages that run it, each with its part; for a parameter those that hold it."""
        found: dict[fx.Node, list[dict[str, Any]]] = {}
        for i, stage in enumerate(self.stages.stages):
            for part in stage.parts:
                for node in (*stage.parts[part], *stage.sums[part]):
                    found.setdefault(node, []).append({"stage": i, "part": part})
            for name in stage.parameters:
                found.setdefault(self._parameters[name], []).append({"stage": i})
        return found

    # Text.

    def text(self) -> str:
        """A table of stages, one of what crosses between them, and the schedule as a picture."""
        found, axis = self.schedule, self.program.options.pipeline
        assert axis is not None
        title = (
            f"{_counted(found.num_stages, 'stage')} on {_counted(found.num_ranks, 'rank')} along {axis.axis}, "
            f"{_counted(found.num_microbatches, 'microbatch')} by {found.name}, times estimated"
        )
        return f"{title}\n{self._stage_table()}\n{self._crossing_table()}\n{timeline_text(self.timeline)}"

    def _stage_table(self) -> str:
        entries, whole = self.entries(), sum(self.flops) or 1
        rows = [
            (each["stage"], each["rank"], *(path or "(model)" for path in each["modules"]), each["elements"],
             each["parameter_bytes"], f"{each['flops'] / whole:.1%}", *each["calls"].values())
            for each in entries
        ]  # fmt: skip
        header = ["stage", "rank", "first module", "last module", "parameters", "bytes", "FLOPs", *entries[0]["calls"]]
        empty = {i for i, column in enumerate(zip(*rows, strict=True)) if i > 3 and not any(column)}
        return table(header, [["" if i in empty else cell for i, cell in enumerate(row)] for row in rows])

    def _crossing_table(self) -> str:
        names = {node.name: shown for node, shown in value_names(self.program).items()}
        rows = [
            (entry["stage"], sent["to"], sent["after"], names[value["name"]], value["type"], value["bytes"],
             sent["times"], sent["over"] or "on one rank")
            for entry in self.entries() for sent in entry["sent"] for value in sent["values"]
        ]  # fmt: skip
        header = ("from", "to", "after", "value", "type", "bytes", "times", "over")
        return table(header, rows) if rows else "no value crosses between stages\n"

    # What a stage is.

    def _nbytes(self, node: fx.Node) -> int:
        return nbytes(self.program.local_type(node))

    @cached_property
    def _parameters(self) -> dict[str, fx.Node]:
        return parameters_of(self.program)

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """For each stage the largest module that begins in it and the largest that ends in it."""
        paths = [list(self._paths(i, stage)) for i, stage in enumerate(self.stages.stages)]
        above = [{prefix for path in its for prefix in prefixes(path)} for its in paths]
        return [(_largest(its[:1], above[:i]), _largest(its[-1:], above[i + 1 :])) for i, its in enumerate(paths)]

    def _paths(self, index: int, stage: Stage) -> Iterator[str]:
        sources = map(self.program.source, stage.parts["forward"])
        return (source.module for source in sources if source.stage == index)


def _largest(paths: Sequence[str], others: Sequence[set[str]]) -> str:
    """The shortest prefix of a path that no other stage has."""
    above = prefixes(paths[0]) if paths else []
    return next((each for each in above if not any(each in other for other in others)), paths[0] if paths else "")


def _counted(count: int, name: str) -> str:
    ending = "" if count == 1 else "es" if name.endswith("ch") else "s"
    return f"{count} {name}{ending}"


@kept
def schedule_of(program: Program) -> Schedule:
    """The schedule of a localized program's stages, proven, with its messages in the order of what stages cost.

    Which rank holds which stage depends on the option alone, and is the same for all programs of a model.
    """
    stages, pipeline = stages_of(program), program.options.pipeline
    assert pipeline is not None
    costs, edges, place = costs_of(stages), edges_of(stages), pipeline.place(program.num_stages)
    stored = resident_bytes(program, stages.stages, place)
    full = tuple(replace(cost, resident=nbytes) for cost, nbytes in zip(costs.stages, stored, strict=True))
    found = schedule(
        pipeline.schedule, program.num_stages, pipeline.microbatches, num_ranks=max(place) + 1, edges=edges,
        costs=replace(costs, stages=full), memory=pipeline.max_memory, place=place,
    )  # fmt: skip
    assert found.place == place, (found.place, place)
    trains = any(put.kind == "tangent" for put in program.inputs)
    complete = with_messages(found if trains else found.forward_only(), costs)
    check(complete)
    return complete
