"""The rows of the benchmark: for each plan the ways to train it that are held against each other."""

from __future__ import annotations

from dataclasses import dataclass

import peer_data
import peer_expert
import peer_tensor
from ours import PLANS
from trainer import Job, Trainer
from workload import SIZES, Size, new_model

PEERS = {
    "one device": peer_data.one_device,
    "DDP": peer_data.ddp,
    "DDP compiled": peer_data.ddp_compiled,
    "DDP + ZeroRedundancyOptimizer": peer_data.ddp_zero,
    "FSDP2": peer_data.fsdp2,
    "FSDP2 compiled": peer_data.fsdp2_compiled,
    "Megatron by hand": peer_tensor.by_hand,
    "Megatron by hand compiled": peer_tensor.by_hand_compiled,
    "DTensor plan": peer_tensor.dtensor_plan,
    "DTensor plan compiled": peer_tensor.dtensor_plan_compiled,
    "DTensor sequence plan": peer_tensor.dtensor_sequence_plan,
    "DTensor weights": peer_tensor.dtensor_weights,
    "experts by hand": peer_expert.by_hand,
}
ROWS = {
    "data": ("DDP", "shardc dp"),
    "zero1": ("DDP + ZeroRedundancyOptimizer", "shardc zero1", "shardc zero2"),
    "zero3": ("FSDP2", "shardc zero3", "shardc fsdp, gathered once"),
    "tensor": ("Megatron by hand", "DTensor plan", "DTensor weights", "shardc tp"),
    "sequence": ("DTensor sequence plan", "shardc tp + sequence"),
    "expert": ("experts by hand", "shardc ep"),
    "data-compiled": ("DDP compiled", "shardc dp inductor"),
    "zero3-compiled": ("FSDP2 compiled", "shardc zero3 inductor"),
    "tensor-compiled": ("Megatron by hand compiled", "DTensor plan compiled", "shardc tp inductor"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One plan at one size by one job."""

    plan: str
    size: str
    job: Job

    @property
    def title(self) -> str:
        """``small x2``."""
        return f"{self.size} x{self.job.ranks}"

    @property
    def names(self) -> tuple[str, ...]:
        """Who takes part: one device, the peers, shardc."""
        return ("one device", *ROWS[self.plan])

    def trainer(self, name: str) -> Trainer:
        """One of them, on this rank."""
        return new_trainer(name, SIZES[self.size], self.job, has_experts=self.plan == "expert")


def new_trainer(name: str, size: Size, job: Job, has_experts: bool = False) -> Trainer:
    """A way to train, by its name, with a new model."""
    model = new_model(size, has_experts).to(job.device, job.dtype)
    return PLANS[name].trainer(model, job, size) if name in PLANS else PEERS[name](model, job)
