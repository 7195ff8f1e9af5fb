"""Trains a character-level GPT on four local ranks and on one device; compares losses, and sent bytes with the plan.

The ranks are processes of this machine that communicate through gloo, data parallel over dp and tensor parallel over
tp. Both runs begin with the same weights and see the same batches. The exit code is 1 if losses or bytes differ.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from gpt import DATA, GPT, MEGATRON, Config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardc
from shardc import Collective
from shardc.language.text import bytes_text, table
from shardc.runtime.comm.launch import launch
from shardc.runtime.comm.messages import private_loopback, sent_bytes

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters
LOSS_BOUND, BYTES_BOUND = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of both runs. ``batch``: the global batch size."""

    steps: int = 100
    batch: int = 16
    learning_rate: float = 5e-4
    log_every: int = 10
    dp: int = 2
    tp: int = 2
    config: Config = field(default_factory=lambda: Config(len(ALPHABET), context=128, layers=2, heads=4, width=256))

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run: the loss and the seconds of each step, and the bytes of the parameters on one rank."""

    parameter_bytes: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShardedRun:
    """The report of rank 0. ``wire_bytes``: sent by all ranks in a step; None if the kernel does not count them."""

    run: Run
    compile_seconds: float
    collectives: tuple[Collective, ...]
    wire_bytes: float | None
    state: dict[str, Tensor]


def main() -> int:
    settings = _parse()
    alone = train_alone(settings)
    print(f"starting {settings.num_ranks} processes", file=sys.stderr)
    with private_loopback():  # if the system allows it, bytes of other programs are not counted
        sharded: ShardedRun = launch(train_sharded, settings.num_ranks, settings)[0]
    tables = (
        losses_table(settings, alone, sharded.run),
        bytes_table(settings, sharded),
        facts(settings, alone, sharded),
    )
    print("\n".join(tables))
    print("written by the trained shards\n")
    print(textwrap.indent(sample(settings.config, sharded.state), "  "))
    return 0 if is_good(settings, alone, sharded) else 1


def _parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("steps", "batch", "dp", "tp"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings(), name))
    settings = Settings(**vars(parser.parse_args()))
    if settings.steps < 2 * settings.log_every:
        parser.error(
            f"--steps {settings.steps}: bytes are counted over {settings.log_every} steps, after as many others"
        )
    return settings


# The data: English text that ships with Python, and the same batches for every run.


def corpus() -> Tensor:
    """Python's own help topics as indices into ALPHABET; other characters are left out."""
    index = {char: i for i, char in enumerate(ALPHABET)}
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([index[char] for char in text if char in index])


def batches(settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batch of each step: ``ids`` and the characters that follow, ``[batch, context]``."""
    data, context = corpus(), settings.config.context
    random = torch.Generator().manual_seed(0)
    for _ in range(settings.steps):
        starts = torch.randint(len(data) - context, (settings.batch,), generator=random)
        windows = data[starts[:, None] + torch.arange(context + 1)]
        yield windows[:, :-1], windows[:, 1:]


def new_model(settings: Settings) -> GPT:
    """A model with the same weights in every call."""
    torch.manual_seed(0)
    return GPT(settings.config)


# The runs.


def train_alone(settings: Settings) -> Run:
    """Train in plain PyTorch on one device, with one thread like every rank."""
    torch.set_num_threads(1)
    return train(settings, new_model(settings), Progress("one device", settings.steps))


def train(
    settings: Settings, model: nn.Module, progress: Progress, after: Callable[[int], None] = lambda step: None
) -> Run:
    """The training loop of both runs; ``after`` is called with the number of steps after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    run = Run(sum(local(parameter).nbytes for parameter in model.parameters()))
    for step, (ids, targets) in enumerate(batches(settings), 1):
        start = time.perf_counter()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
        progress.show(step, f"loss {run.losses[-1]:.4f}")
        after(step)
    return run


def train_sharded(settings: Settings) -> ShardedRun:
    """Train on one rank of the job: the same loop over a parallelized model. Every rank passes the global batch."""
    mesh = init_device_mesh("cpu", (settings.dp, settings.tp), mesh_dim_names=("dp", "tp"))
    start = time.perf_counter()
    model = shardc.parallelize(new_model(settings), mesh, DATA | MEGATRON, args=next(batches(settings)))
    compile_seconds = time.perf_counter() - start

    readings: list[int | None] = []
    after = partial(read_counter, readings, settings.log_every)
    run = train(settings, model, Progress(f"{mesh.size()} ranks", settings.steps, mesh.get_rank() == 0), after)
    return ShardedRun(
        run,
        compile_seconds,
        model.program.collectives,
        bytes_a_step(readings, settings.log_every),
        {name: value.full_tensor() for name, value in model.state_dict().items()},
    )


def local(x: Tensor) -> Tensor:
    """The shard of a tensor on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def bytes_a_step(readings: list[int | None], num_steps: int) -> float | None:
    """Bytes of a step, from the smallest difference of two readings, since other programs can only add bytes."""
    counted = [reading for reading in readings if reading is not None]
    return min(b - a for a, b in pairwise(counted)) / num_steps if counted else None


def read_counter(readings: list[int | None], every: int, step: int) -> None:
    """After every ``every`` steps, read how many bytes the loopback interface has sent, while all ranks wait."""
    if step % every == 0:
        dist.barrier()
        readings.append(sent_bytes())
        dist.barrier()


class Progress:
    """A progress bar on stderr: redrawn in place on a terminal, else printed as a line at each tenth."""

    def __init__(self, title: str, total: int, is_shown: bool = True) -> None:
        self.title, self.total, self.is_shown = title, total, is_shown

    def show(self, done: int, remark: str = "") -> None:
        """Show the number of steps done."""
        in_place = sys.stderr.isatty()
        if not self.is_shown or not (in_place or done * 10 // self.total > (done - 1) * 10 // self.total):
            return
        bar = ("#" * (done * 30 // self.total)).ljust(30, ".")
        end = "\n" if not in_place or done == self.total else ""
        lead = "\r" if in_place else ""
        print(f"{lead}{self.title:12} [{bar}] {done}/{self.total}  {remark}", end=end, file=sys.stderr, flush=True)


# The report.


def losses_table(settings: Settings, alone: Run, run: Run) -> str:
    """A table of both losses at each logged step."""
    steps = sorted({1, settings.steps, *range(settings.log_every, settings.steps + 1, settings.log_every)})
    pairs = [(step, alone.losses[step - 1], run.losses[step - 1]) for step in steps]
    rows = [(step, f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}") for step, a, b in pairs]
    return table(("step", "one device", f"{settings.num_ranks} ranks", "difference"), rows)


def bytes_table(settings: Settings, sharded: ShardedRun) -> str:
    """A table of the collectives of one step by kind, with the bytes of all ranks as announced and as counted."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for found in sharded.collectives:
        sent = found.wire_bytes * settings.num_ranks
        kinds.setdefault((found.kind, "+".join(found.axes), found.phase), []).append(sent)
    rows = [(*kind, str(len(sent)), bytes_text(sum(sent))) for kind, sent in kinds.items()]
    total = announced_bytes(settings, sharded)
    rows.append(("announced, all ranks", "", "", str(len(sharded.collectives)), bytes_text(total)))
    counted = "no counter" if sharded.wire_bytes is None else bytes_text(sharded.wire_bytes)
    rows.append(("counted on the wire", "", "", "", counted))
    return table(("collective", "axes", "phase", "a step", "bytes a step"), rows)


def facts(settings: Settings, alone: Run, sharded: ShardedRun) -> str:
    """A table of the compared quantities with their bounds, and the time and memory of both runs."""
    rows = [
        ("largest difference of losses", f"{loss_difference(alone, sharded.run):.1e}", f"<= {LOSS_BOUND:.0e}"),
        ("bytes counted against announced", f"{bytes_difference(settings, sharded):+.2%}", f"<= {BYTES_BOUND:.0%}"),
        ("parameters on one device", bytes_text(alone.parameter_bytes), ""),
        ("parameters a rank", bytes_text(sharded.run.parameter_bytes), ""),
        ("seconds to compile", f"{sharded.compile_seconds:.1f}", ""),
        ("seconds a step, one device", f"{statistics.median(alone.seconds):.3f}", ""),
        (f"seconds a step, {settings.num_ranks} ranks", f"{statistics.median(sharded.run.seconds):.3f}", ""),
    ]
    return table(("", "", "bound"), rows)


def is_good(settings: Settings, alone: Run, sharded: ShardedRun) -> bool:
    """Whether losses and bytes are within their bounds; nan is not. Bytes are compared if the system counts them."""
    are_bytes_good = sharded.wire_bytes is None or abs(bytes_difference(settings, sharded)) <= BYTES_BOUND
    return loss_difference(alone, sharded.run) <= LOSS_BOUND and are_bytes_good


def announced_bytes(settings: Settings, sharded: ShardedRun) -> int:
    """The bytes that all ranks send in one step by the plan."""
    return sum(found.wire_bytes for found in sharded.collectives) * settings.num_ranks


def bytes_difference(settings: Settings, sharded: ShardedRun) -> float:
    """How much more was counted than announced, relative to the plan; nan if nothing was counted."""
    return (sharded.wire_bytes or math.nan) / announced_bytes(settings, sharded) - 1


def loss_difference(alone: Run, sharded: Run) -> float:
    """The largest difference between the losses of a step; nan if a loss is nan."""
    return (torch.tensor(alone.losses) - torch.tensor(sharded.losses)).abs().max().item()


def sample(config: Config, state: dict[str, Tensor], length: int = 160) -> str:
    """Text generated by a model with these weights."""
    model = GPT(config)
    model.load_state_dict(state)
    random, ids = torch.Generator().manual_seed(0), torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(length):
            odds = F.softmax(model(ids[:, -config.context :])[0, -1] / 0.8, dim=-1)
            ids = torch.cat((ids, torch.multinomial(odds, 1, generator=random)[None]), dim=1)
    return "".join(ALPHABET[i] for i in ids[0].tolist()).strip()


if __name__ == "__main__":
    sys.exit(main())
