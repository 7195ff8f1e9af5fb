"""Causal attention over cut positions: shardc's ways compared with torch's ring and a handwritten ring.

    python benchmarks/attention.py                                   # 2 ranks, 4096 positions
    python benchmarks/attention.py --ranks 4 --share                 # half a processor for each rank (Linux, as root)
    python benchmarks/attention.py --positions 16384 --rounds 5

The model is layers of multi-head attention with projections; a step is forward and backward with batch 1. All ways
live in the same processes and take their steps in turn. Prints for each way: the median step of the slowest rank; the
processor time of the busiest rank; the ratio to its step of the steps of shardc's ring, zigzag ring and all_to_all
(``attention="ulysses"``); the bytes that a rank sends and those of the formula; and the largest error of loss and
gradients relative to one device.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from bench import network
from breakdown import Clock
from peers.context import Attend, attention_by_hand, balanced, in_order, torch_attention
from processors import shares_left_behind, take_share
from rounds import everyone_first, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc import P
from shardc.language.text import table
from shardc.runtime.comm.launch import Workers
from shardc.runtime.comm.messages import sent_bytes

RING, ULYSSES, ZIGZAG = "shardc ring", "shardc ulysses", "shardc zigzag"
OURS = (RING, ZIGZAG, ULYSSES, "shardc gather")
PEERS: dict[str, tuple[Attend, Callable[[Tensor], Tensor]]] = {
    "torch allgather": (torch_attention("allgather"), balanced),
    "torch alltoall": (torch_attention("alltoall"), balanced),
    "by hand": (attention_by_hand, in_order),
}
CUT, CUT_IN_ZIGZAG = P(None, "cp"), P(None, "cp:zigzag")
CAUSAL: Attend = partial(scaled_dot_product_attention, is_causal=True)


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its input, ``[1, positions, width]``."""

    positions: int
    layers: int
    width: int
    heads: int


class Attention(nn.Module):
    """Causal multi-head attention with projections, and a residual connection."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, position, width]`` in and out."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + out


class Model(nn.Module):
    """Layers of attention, with the same weights at every call."""

    def __init__(self, size: Size, attend: Attend = CAUSAL) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(size, attend) for _ in range(size.layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return mse_loss(x, target)


@dataclass(slots=True)
class Measured:
    """The measurements of one way, on all ranks.

    ``error``: the largest relative error of loss and gradients. ``sent``: bytes that a rank sends in a step. By round:
    ``seconds`` of the slowest rank, and ``busy``, the seconds of processor time of the busiest rank.
    """

    error: float = 0.0
    sent: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)


Values = Sequence[Tensor]  # a loss, and the gradients of all parameters


class Runner:
    """Runs one way on this rank."""

    def __init__(self, name: str, size: Size, ranks: int) -> None:
        inputs = _inputs(size)
        if name in PEERS:
            attend, part = PEERS[name]
            self.model: Any = DistributedDataParallel(Model(size, attend), gradient_as_bucket_view=True)
            self.inputs = [part(x) for x in inputs]
        else:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
            is_zigzag = name == ZIGZAG
            annotations = dict.fromkeys(("x", "target"), CUT_IN_ZIGZAG if is_zigzag else CUT)
            way = "ring" if is_zigzag else name.split()[-1]
            self.model = shardc.parallelize(Model(size), mesh, annotations, args=tuple(inputs), attention=way)
            self.inputs = inputs

    def step(self) -> Tensor:
        """Forward and backward; returns the loss."""
        self.model.zero_grad()
        loss: Tensor = self.model(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def error(self, expected: Values) -> float:
        """Take a step; returns the largest error on any rank, relative to the largest number of its tensor."""
        loss = self.step().clone()
        if isinstance(self.model, DistributedDataParallel):  # its loss is the mean over this rank's positions
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        found = [loss, *(_local(x.grad) for x in self.model.parameters())]
        pairs = zip(found, expected, strict=True)
        return _most(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))

    def sent(self) -> float:
        """Take a step; returns the bytes that a rank sent, headers included."""
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        self.step()
        dist.barrier()
        after = sent_bytes()
        dist.barrier()
        return float("nan") if before is None or after is None else (after - before) / dist.get_world_size()

    def timed_step(self, number: int, into: Measured) -> None:
        """Time the step of a round, which all ranks begin together."""
        dist.barrier()
        start = Clock.now()
        self.step()
        clock = start.until_now()
        into.seconds[number], into.busy[number] = _most(clock.seconds), _most(clock.busy)


def measure(size: Size, names: Sequence[str], rounds: int) -> dict[str, Measured]:
    """Measure the ways with these names, on this rank."""
    torch.set_num_threads(1)
    ranks, expected = dist.get_world_size(), _of_one_device(size)
    runners = {name: Runner(name, size, ranks) for name in names}
    found = {name: Measured(runner.error(expected), runner.sent()) for name, runner in runners.items()}
    for i in range(rounds):
        for name in everyone_first(names, i):
            runners[name].timed_step(i, found[name])
    return found


def by_formula(name: str, size: Size, ranks: int) -> float:
    """Bytes that a rank sends in a step: messages of attention, and an all_reduce of the weights' gradients.

    The unit is a rank's chunk of keys. A ring sends keys and values past all other ranks: once in forward, and in
    backward once more with their gradients. torch's ring sends the gradients one step further than necessary.
    """
    others = ranks - 1
    chunks = {
        "ring": 6 * others,
        "zigzag": 6 * others,
        "ulysses": 8 * others / ranks,
        "gather": 4 * others,
        "hand": 6 * others,
    }
    moved = chunks.get(name.split()[-1], 4 * others + 2 * ranks) * size.positions / ranks * size.width
    weights = 4 * size.width * (size.width + 1)
    return 4 * size.layers * (moved + 2 * others / ranks * weights)


def report(found: Mapping[str, Measured], size: Size, ranks: int) -> str:
    """A table with a row for each way."""
    rows = []
    for name, way in found.items():
        others = [found[each].seconds if each in found and each != name else None for each in (RING, ZIGZAG, ULYSSES)]
        beside = [_beside(other, way.seconds) if other else "" for other in others]
        sent, formula = way.sent / 1e6, by_formula(name, size, ranks) / 1e6
        numbers = f"{sent:.2f}", f"{formula:.2f}", f"{sent / formula - 1:+.1%}", f"{way.error:.0e}"
        rows.append((name, _ms(way.seconds), _ms(way.busy), *beside, *numbers))
    header = (
        "way, ms",
        "step",
        "busiest",
        "ring beside it",
        "zigzag beside it",
        "ulysses beside it",
        "MB sent",
        "formula",
        "off by",
        "error",
    )
    return table(header, rows)


def _beside(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """The ratio of medians, then the median of the ratios of all rounds with its interval."""
    found = ratio(ours, theirs)
    return f"{found.medians:.2f}, {found}"


def _ms(seconds: Mapping[int, float]) -> str:
    """The median of the rounds in milliseconds."""
    return f"{1e3 * median(seconds.values()):.0f}"


def _of_one_device(size: Size) -> Values:
    """The loss and gradients on one device, which rank 0 computes and broadcasts."""
    model = Model(size)
    if dist.get_rank() == 0:
        loss = model(*_inputs(size))
        loss.backward()
        values = [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]
    else:
        values = [torch.empty([]), *(torch.empty_like(x) for x in model.parameters())]
    for value in values:
        dist.broadcast(value, 0)
    return values


def _inputs(size: Size) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, size.positions, size.width, generator=random) for _ in range(2)]


def _local(x: Any) -> Tensor:
    local: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local


def _most(number: float) -> float:
    """The largest number of any rank."""
    most = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mbit", type=int, help="limit the ranks' network to so many Mbit/s (Linux, as root)")
    parser.add_argument("--share", action="store_true", help="a share of the processors for each rank (Linux, as root)")
    options = parser.parse_args()
    size = Size(options.positions, options.layers, options.width, options.heads)
    with network(options.mbit), shares_left_behind(), Workers(options.ranks) as workers:
        if options.share:
            workers.run(take_share)
        found = workers.run(measure, size, options.ways, options.rounds)[0]
    print(f"{size}, {options.ranks} ranks, medians of {options.rounds} rounds")
    print(report(found, size, options.ranks))


if __name__ == "__main__":
    main()
