"""shardc's plans: annotations, and options where there are any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt import DATA, MEGATRON
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from trainer import Trainer, adamw
from workload import Size, batches

import shardc
from shardc import P

VOCABULARY = {"tokens.weight": P("tp"), "head.weight": P("tp")}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a user writes: the mesh's one axis, annotations, and ``parallelize``'s other options, made when needed."""

    axis: str
    annotations: Mapping[str, P]
    options: Callable[[], dict[str, Any]] = field(default=dict)

    def trainer(self, model: nn.Module, ranks: int, kernel: str, size: Size) -> Trainer:
        """The model parallelized for the batches of a size."""
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(self.axis,))
        example = tuple(batches(size)[0])
        parallel = shardc.parallelize(model, mesh, self.annotations, args=example, **self.options())
        announced = sum(each.wire_bytes for each in parallel.program.collectives)
        return Trainer(parallel, adamw(parallel.parameters(), kernel), announced=announced)


PLANS = {
    "shardc dp": Plan("dp", DATA),
    "shardc fsdp": Plan("dp", DATA | {"param:*": P("dp")}),
    "shardc tp": Plan("tp", MEGATRON | VOCABULARY),
    "shardc dp inductor": Plan("dp", DATA, lambda: {"compile": "inductor"}),
    "shardc fsdp inductor": Plan("dp", DATA | {"param:*": P("dp")}, lambda: {"compile": "inductor"}),
    "shardc tp inductor": Plan("tp", MEGATRON | VOCABULARY, lambda: {"compile": "inductor"}),
}
