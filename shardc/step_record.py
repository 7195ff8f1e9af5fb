"""What a dump says of a step's predicted time: how long a rank computes, sends, and waits for what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc.machine import Machine
from shardc.program import Program
from shardc.stage import has_stages
from shardc.step_time import COMPUTING, OPTIMIZER, OVER, Slice, step_timeline
from shardc.text import table
from shardc.timeline import Task, Timeline, rounded


def has_machine(program: Program) -> bool:
    """Whether a lowered program was compiled for a machine that was named, so that its times mean something."""
    return program.level in ("lowered", "localized") and program.options.machine != Machine()


@dataclass(frozen=True)
class StepRecord:
    """One step on the machine that a program was compiled for: of one rank, of a pipeline of all."""

    program: Program

    @cached_property
    def timeline(self) -> Timeline:
        """When all of it happens."""
        return step_timeline(self.program)

    def entry(self) -> dict[str, Any]:
        """The JSON form, in seconds; of a pipeline its ``step`` alone, see its schedule.

        ``computing``: of forward and backward. ``shared``: of collectives that take the rank's own processor.
        ``collectives``: by axes, how many, how long they take, and for how long nothing is computed because of them.
        """
        if has_stages(self.program):
            return {"step": rounded(self.timeline.makespan)}
        waited = self._waited
        lanes = dict.fromkeys(lane for task in self.timeline.tasks for lane in task.lanes if lane != COMPUTING)
        return {
            "step": rounded(self.timeline.makespan),
            "computing": self._sum("computing"),
            "optimizer": self._sum(OPTIMIZER),
            "shared": self._sum("shared"),
            "collectives": [
                {
                    "axes": str(lane).removeprefix(OVER),
                    "count": len(self.timeline.on(lane)),
                    "seconds": rounded(sum(task.seconds for task in self.timeline.on(lane))),
                    "waited": rounded(waited[lane]),
                }
                for lane in lanes
            ],
        }

    def text(self) -> str:
        """A table, in milliseconds."""
        found = self.entry()
        rows = [(name, "", _ms(found[name]), "") for name in ("computing", "shared", "optimizer") if found.get(name)]
        rows += [
            (OVER + e["axes"], e["count"], _ms(e["seconds"]), _ms(e["waited"])) for e in found.get("collectives", ())
        ]
        return table(("predicted step", "count", "ms", "waited for"), [*rows, ("total", "", _ms(found["step"]), "")])

    def _sum(self, kind: str) -> float:
        return rounded(sum(task.seconds for task in self.timeline.on(COMPUTING) if _kind(task) == kind))

    @cached_property
    def _waited(self) -> Counter[object]:
        """For each lane how long the computing one stands still until something on it has ended."""
        lanes = {task.name: task.lanes[0] for task in self.timeline.tasks}
        waited, now = Counter[object](), 0.0
        for task in self.timeline.on(COMPUTING):
            start = self.timeline.starts[task.name]
            if start > now:
                waited[lanes[self.timeline.reasons[task.name]]] += start - now  # type: ignore[assignment]
            now = self.timeline.end(task)
        if self.timeline.makespan > now:
            last = max(self.timeline.tasks, key=self.timeline.end)
            waited[last.lanes[0]] += self.timeline.makespan - now  # type: ignore[assignment]
        return waited


def _kind(task: Task) -> str:
    name = task.name
    assert isinstance(name, Slice), name
    return "shared" if name.is_share else OPTIMIZER if name.name == OPTIMIZER else "computing"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
