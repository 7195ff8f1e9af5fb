"""On GPUs, check that every plan of the benchmark trains as the plain model does and that its steps do not stall.

    torchrun --standalone --nproc-per-node gpu benchmarks/on_gpus.py

Each plan and the plain model take four steps on the same GPU. In the last step torch raises an error if the host waits
for the device in forward or backward. All plans run in one job: NCCL would hang if ranks started their collectives in
different orders. On one GPU the ranks are virtual; their copies of a value are compared, so the host may wait, as it
may where backward steps the optimizer. ``--device cpu`` tests only the script, over gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
import torch.distributed as dist
from gpt import DATA
from ours import PLANS, SEQUENCE, TENSOR, Plan
from torch import Tensor, nn
from trainer import SIZES, Job, Trainer, batches, new_model

import shardc
from shardc import Mesh, Momentum, P, Pipeline, Zero, step_in_backward
from shardc.runtime.comm.distributed import start_job

SIZE, STEPS, VIRTUAL_RANKS = SIZES["tiny"], 4, 4
OFFLOADING = Plan("pp", {}, {"pipeline": Pipeline(microbatches=8, schedule="zb-v", offload=True)})
CODED = {
    f"shardc zero3 {codec}": Plan("dp", DATA, {"zero": Zero("dp", 3), "wire": {"dp": codec}})
    for codec in ("fp16", "fp8", "int8", "int4")
}
FEEDBACK: dict[str, dict[str, Any]] = {
    "shardc dp 1bit": {"wire": {"dp": "1bit"}},
    "shardc dp topk": {"wire": {"dp": "topk:0.1"}},
    "shardc dp 1-bit Adam": {"wire": {"dp": "1bit"}, "momentum": Momentum(after=2)},
}
BELOW = {  # state in host memory, the tier below the device's memory
    f"shardc zero3, {what} in host memory": Plan("dp", DATA, {"zero": Zero("dp", 3, offload=what)})
    for what in ("optimizer", "parameters")
}
STEPPED = {f"{name}, stepped in backward": plan for name, plan in BELOW.items()}
SAVED_BELOW = Plan("tp", TENSOR, {"saved": {"*": "host", "blocks.*": ("tp", "host")}})
RINGS = Plan("tp", SEQUENCE, {"overlap": "ring"})
OWN_PLANS = {
    **PLANS, "shardc zb-v, offloaded": OFFLOADING, **CODED, **BELOW, **STEPPED,
    "shardc tp, saved on the host": SAVED_BELOW, "shardc tp + sequence, in rings": RINGS,
    **{name: Plan("dp", DATA, options) for name, options in FEEDBACK.items()},
}  # fmt: skip
NORM = "shardc dp, batch norm"


class VirtualJob(Job):
    """A job whose ranks are all in this process, on one device."""

    def mesh(self, axis: str) -> Any:
        """A mesh of virtual ranks."""
        return Mesh(device_ids=None, **{axis: self.ranks})


def main() -> int:
    """Run every plan and print how far its losses are from the plain model's; returns 1 if one exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="plans whose name contains this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was checked", file=sys.stderr)
        return 1
    start_job(options.device)
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    ranks = dist.get_world_size()
    job = Job(ranks, "loop", options.device) if ranks > 1 else VirtualJob(VIRTUAL_RANKS, "loop", options.device)
    wrong = []
    for name, plan in {**OWN_PLANS, NORM: None}.items():
        if options.only not in name or (ranks == 1 and "inductor" in name):
            continue
        distance = difference_of_norm(job) if plan is None else difference(name, plan, job)
        bound = 5e-3 if "bf16" in name or name in {**CODED, **FEEDBACK} else 1e-4
        wrong += [name] if distance > bound else []
        if dist.get_rank() == 0:
            print(f"{name}: losses differ by {distance:.1e} of at most {bound:.0e}", flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


def difference(name: str, plan: Any, job: Job) -> float:
    """The largest relative difference of a plan's losses from those of the plain model."""
    has_experts = name == "shardc ep"
    plain, model = (new_model(SIZE, has_experts).to(job.device) for _ in range(2))
    expected = losses(Trainer(plain, job.adamw(plain.parameters())), job.device)
    trainer, may_wait = plan.trainer(model, job, SIZE), isinstance(job, VirtualJob) or name in STEPPED
    found = losses(trainer, job.device, may_wait, name in STEPPED)
    return max(abs(one - other) / other for one, other in zip(found, expected, strict=True))


class Normed(nn.Module):
    """A convolution and a batch norm, which the language models of the other plans do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of images."""
        result: Tensor = self.norm(self.convolution(x)).sin().square().mean()
        return result


def difference_of_norm(job: Job) -> float:
    """The relative difference of the last loss of a model with a batch norm and a cut batch from the plain model's."""
    torch.manual_seed(0)
    plain, x = Normed().to(job.device), torch.randn(16, 3, 16, 16).to(job.device)
    parallel = shardc.parallelize(deepcopy(plain), job.mesh("dp"), {"x": P("dp")})
    results = []
    for model in (plain, parallel):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(STEPS):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(float(loss.detach()))
    return abs(results[1] - results[0]) / results[0]


def losses(trainer: Any, device: str, may_wait: bool = False, is_stepped: bool = False) -> list[float]:
    """The loss of each step. Unless ``may_wait``, the host must not wait in forward and backward of the last step.

    ``is_stepped``: backward steps the optimizer.
    """
    results, model = list[Tensor](), trainer.model
    for i, microbatches in enumerate(batches(SIZE, device)[:STEPS]):
        with no_wait("cpu" if may_wait or i < STEPS - 1 else device):
            loss = model(*microbatches[0])
            with step_in_backward(model, trainer.optimizer) if is_stepped else nullcontext():
                loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        results.append(loss)
    return [float(loss.detach()) for loss in results]


@contextmanager
def no_wait(device: str) -> Iterator[None]:
    """Within the block, torch raises an error if the host waits for a GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    sys.exit(main())
