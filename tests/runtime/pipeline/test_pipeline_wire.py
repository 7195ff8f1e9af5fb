"""A pipeline on gloo ranks sends the bytes that it announces."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from shardc import Mesh
from shardc.options import Pipeline
from shardc.runtime.comm.distributed import make_device_mesh

BATCH, TIME, WIDTH, STAGES, MICROBATCHES = 8, 5, 6, 4, 4
CUTS = ("layers.2", "layers.4", "layers.6")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(each for _ in range(STAGES) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean()
        return result


def new_pipeline(schedule: str) -> Any:
    mesh = make_device_mesh(Mesh(pp=STAGES))
    pipeline = Pipeline(microbatches=MICROBATCHES, schedule=schedule, cuts=CUTS)
    return shardc.parallelize(Model(), mesh, pipeline=pipeline)


def compiled(schedule: str) -> shardc.api.Compiled:
    pipeline = Pipeline(microbatches=MICROBATCHES, schedule=schedule, cuts=CUTS)
    return shardc.compile(Model(), Mesh(pp=STAGES), args=(data(),), pipeline=pipeline)


def data() -> Tensor:
    return torch.ones(BATCH, TIME, WIDTH)


def run_sent() -> int:
    """The bytes that this rank sends in a step, its first and its second alike."""
    piped, sent = new_pipeline("1f1b"), []
    for _ in range(2):
        before = piped.shardc.conversion.channel.sent_bytes
        piped(data()).backward()
        sent.append(piped.shardc.conversion.channel.sent_bytes - before)
    assert sent[0] == sent[1]
    return sent[0]


class Pair(nn.Module):
    """Two values of unlike dtypes go from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x, dtype=torch.float64)
        for layer in self.layers:
            x = layer(x).tanh()
            y = y + x.double()
        return y.square().mean()


def run_pair() -> tuple[int, float]:
    """How many messages this rank sends in a step, and how far its gradients are off one device."""
    mesh = make_device_mesh(Mesh(pp=STAGES))
    pipeline = Pipeline(microbatches=MICROBATCHES, cuts=("layers.1", "layers.2", "layers.3"))
    piped, alone = shardc.parallelize(Pair(), mesh, pipeline=pipeline), Pair()
    with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
        piped(data()).backward()
    alone(data()).backward()
    expected = {name: each.grad for name, each in alone.named_parameters()}
    ours = [(each.grad.to_local(), expected[name]) for name, each in piped.named_parameters()]
    return isend.call_count, max(float((one - other).abs().max()) for one, other in ours)


def test_small_values_between_the_same_stages_go_in_one_message(gloo: Any) -> None:
    """For each microbatch two values down the chain, and a gradient up it; the other's goes straight to every stage."""
    results = gloo.run(run_pair)
    assert all(off < 1e-6 for _, off in results)
    once_a_step = 3  # the loss, from the last stage to the others
    assert [count / MICROBATCHES for count, _ in results] == [1, 2, 2, 3 + once_a_step / MICROBATCHES]


def test_the_bytes_that_stages_send_are_those_announced(gloo: Any) -> None:
    """Activations down the chain and gradients up it; and once a step the loss, to every stage."""
    sends = [each for each in compiled("1f1b").collectives if each.kind == "send"]
    announced = sum(each.wire_bytes * each.times for each in sends)
    assert announced == 2 * (STAGES - 1) * BATCH * TIME * WIDTH * 4 + (STAGES - 1) * 4
    assert sum(gloo.run(run_sent)) == announced
