"""shardc's plans: mesh axis, annotations and options of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt import DATA, MEGATRON
from torch import nn
from trainer import PIPED, Job, Size, Trainer, batches

import shardc
from shardc import P, Precision, Remat, Zero
from shardc.options import Pipeline

FSDP = DATA | {"param:*": P("dp")}
TENSOR = MEGATRON | {"tokens.weight": P("tp"), "head.weight": P("tp")}  # the vocabulary is cut too
SEQUENCE = TENSOR | {"module:tokens": P(None, "tp")}
EXPERT = {"ids": P("ep"), "targets": P("ep"), "param:*.mlp.up": P("ep")}
INDUCTOR = {"compile": "inductor"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as a user writes it: the only axis of the mesh, annotations, and further options of ``parallelize``.

    ``bound``: the most that a rank may send in a step, times ranks / (ranks - 1), in elements per parameter.
    """

    axis: str
    annotations: Mapping[str, P]
    options: Mapping[str, Any] = field(default_factory=dict)
    bound: float | None = None

    def trainer(self, model: nn.Module, job: Job, size: Size) -> Trainer:
        """A trainer of the parallelized model."""
        example = tuple(batches(size, job.device, job.microbatches)[0][0])
        parallel = shardc.parallelize(model, job.mesh(self.axis), self.annotations, args=example, **self.options)
        times = {"forward": job.microbatches}  # gradients are reduced and parameters gathered once a step
        announced = sum(each.wire_bytes * times.get(each.phase, 1) for each in parallel.program.collectives)
        return Trainer(parallel, job.adamw(parallel.parameters()), announced=announced)


@dataclass(frozen=True, slots=True)
class Piped:
    """A pipeline whose stages have equally many blocks, like its peers'."""

    schedule: str
    bound: float | None = None

    def trainer(self, model: Any, job: Job, size: Size) -> Trainer:
        """A trainer of the model with one stage on each rank."""
        cuts = tuple(f"blocks.{rank * len(model.blocks) // job.ranks}" for rank in range(1, job.ranks))
        pipeline = Pipeline(microbatches=PIPED, schedule=self.schedule, cuts=cuts)
        example = tuple(batches(size, job.device)[0][0])
        parallel = shardc.parallelize(model, job.mesh("pp"), pipeline=pipeline, args=example)
        announced = sum(each.wire_bytes * each.times for each in parallel.program.collectives)  # bytes of all stages
        return Trainer(parallel, job.adamw(parallel.parameters()), announced=announced // job.ranks)


PLANS: dict[str, Plan | Piped] = {
    "shardc dp": Plan("dp", DATA, bound=2),
    "shardc zero1": Plan("dp", DATA, {"zero": Zero("dp", 1)}, bound=2),
    "shardc zero2": Plan("dp", DATA, {"zero": Zero("dp", 2)}, bound=2),
    "shardc zero3": Plan("dp", DATA, {"zero": Zero("dp", 3)}, bound=3),
    "shardc fsdp, gathered once": Plan("dp", FSDP, bound=2),
    "shardc zero3 bf16": Plan("dp", DATA, {"zero": Zero("dp", 3), "precision": Precision()}, bound=2),
    "shardc dp remat": Plan("dp", DATA, {"remat": Remat("blocks.*")}, bound=2),
    "shardc tp": Plan("tp", TENSOR),
    "shardc tp + sequence": Plan("tp", SEQUENCE),
    "shardc ep": Plan("ep", EXPERT),
    "shardc 1f1b": Piped("1f1b"),
    "shardc gpipe": Piped("gpipe"),
    "shardc dp inductor": Plan("dp", DATA, INDUCTOR, bound=2),
    "shardc zero3 inductor": Plan("dp", DATA, {"zero": Zero("dp", 3)} | INDUCTOR, bound=3),
    "shardc tp inductor": Plan("tp", TENSOR, INDUCTOR),
}
