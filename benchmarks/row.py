"""The rows of the benchmark: for each plan, the peers and shardc's ways that it compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ours import PLANS
from peers import data, expert, pipeline, tensor
from torch import Tensor
from trainer import SIZES, Job, Size, Trainer, batches, new_model

ONE_DEVICE = "one device"
PEERS = {
    ONE_DEVICE: data.one_device,
    "DDP": data.ddp,
    "DDP + checkpoint": data.ddp_checkpoint,
    "DDP compiled": data.ddp_compiled,
    "DDP + ZeroRedundancyOptimizer": data.ddp_zero,
    "FSDP2": data.fsdp2,
    "FSDP2, gathered once": data.fsdp2_kept,
    "FSDP2 bf16": data.fsdp2_bf16,
    "FSDP2 compiled": data.fsdp2_compiled,
    "Megatron by hand": tensor.by_hand,
    "Megatron by hand compiled": tensor.by_hand_compiled,
    "DTensor plan": tensor.dtensor_plan,
    "DTensor plan compiled": tensor.dtensor_plan_compiled,
    "DTensor sequence plan": tensor.dtensor_sequence_plan,
    "DTensor weights": tensor.dtensor_weights,
    "experts by hand": expert.by_hand,
    "DTensor expert weights": expert.dtensor_weights,
    "torch 1F1B": pipeline.one_forward_one_backward,
    "torch GPipe": pipeline.gpipe,
}


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to train one model by one plan, and the highest allowed ratio of shardc's step to the best peer's.

    ``far``: peers that are known to be far slower.
    """

    names: tuple[str, ...]
    far: tuple[str, ...] = ()
    limit: float = 1.00
    has_experts: bool = False
    microbatches: int = 1


ROWS = {
    "data": Ways(("DDP", "shardc dp")),
    "accumulate": Ways(("DDP", "shardc dp"), microbatches=8),
    "zero1": Ways(("DDP + ZeroRedundancyOptimizer", "shardc zero1", "shardc zero2")),
    "zero3": Ways(("FSDP2", "shardc zero3"), limit=0.95),
    "zero3-kept": Ways(("FSDP2, gathered once", "shardc fsdp, gathered once")),
    "precision": Ways(("FSDP2 bf16", "shardc zero3 bf16"), limit=0.95),
    "remat": Ways(("DDP + checkpoint", "shardc dp remat")),
    "tensor": Ways(("Megatron by hand", "shardc tp"), far=("DTensor plan", "DTensor weights")),
    "sequence": Ways(("DTensor sequence plan", "shardc tp + sequence")),
    "expert": Ways(("experts by hand", "shardc ep"), far=("DTensor expert weights",), has_experts=True),
    "pipeline": Ways(("torch 1F1B", "shardc 1f1b"), far=("torch GPipe", "shardc gpipe")),
    "data-compiled": Ways(("DDP compiled", "shardc dp inductor")),
    "zero3-compiled": Ways(("FSDP2 compiled", "shardc zero3 inductor"), limit=0.95),
    "tensor-compiled": Ways(("Megatron by hand compiled", "shardc tp inductor"), far=("DTensor plan compiled",)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One plan at one size in one job.

    ``is_full``: the far slower peers take part. ``with_device``: one device takes part; its steps are the same in all
    rows of one ``model``.
    """

    plan: str
    size: str
    job: Job
    is_full: bool = True
    with_device: bool = True

    @property
    def title(self) -> str:
        """Size and number of ranks, as in ``small x2``."""
        return f"{self.size} x{self.job.ranks}"

    @property
    def ways(self) -> Ways:
        """The ways that the row compares."""
        return ROWS[self.plan]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all ways that take part: one device, the peers, shardc's ways."""
        device = (ONE_DEVICE,) if self.with_device else ()
        return (*device, *(self.ways.far if self.is_full else ()), *self.ways.names)

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that shardc is compared to."""
        return tuple(name for name in self.names if name != ONE_DEVICE and not is_ours(name))

    @property
    def model(self) -> tuple[str, bool, int]:
        """The key of the model that one device trains: size, experts, microbatches."""
        return self.size, self.ways.has_experts, self.ways.microbatches

    def trainer(self, name: str) -> Trainer:
        """A trainer of the way with this name, on this rank."""
        job = replace(self.job, microbatches=self.ways.microbatches)
        return new_trainer(name, self._size, job, self.ways.has_experts)

    def batches(self) -> list[Tensor]:
        """The batches that all ways train on."""
        return batches(self._size, self.job.device, self.ways.microbatches)

    @property
    def _size(self) -> Size:
        return SIZES[self.size].shorter(self.ways.microbatches)


def is_ours(name: str) -> bool:
    """Whether a name is that of one of shardc's ways."""
    return name.startswith("shardc")


def new_trainer(name: str, size: Size, job: Job, has_experts: bool = False) -> Trainer:
    """A trainer of the way with this name, with a new model."""
    model = new_model(size, has_experts).to(job.device, job.dtype)
    return PLANS[name].trainer(model, job, size) if name in PLANS else PEERS[name](model, job)
