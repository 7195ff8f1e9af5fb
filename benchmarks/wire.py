"""Data parallelism and ZeRO 3 whose collectives send codes (``wire=``), compared with DDP with torch's hooks.

    python benchmarks/wire.py --size medium --mbit 200            # the time and the bytes of a step
    python benchmarks/wire.py --size small --train 300            # the loss that training reaches
    python benchmarks/wire.py --size small --mbit 200 --train 300 # both, and the seconds to that loss

To time steps, all ways live in the same processes and take steps in turn. Prints for each way the median step of the
slowest rank, the ratio of shardc's step without codes to it, the bytes that a rank sends and those that its plan
announces, and their ratio to the bytes without codes. DDP is compared with shardc's data parallelism.

To measure losses, a GPT is trained on the source text of shardc, word by word, in one way after the other, from the
same weights and on the same batches, without a limit of the network. Prints the mean loss of the last steps, and the
loss of the final weights on text that was not trained on; beside each the mean of its ratios to the loss without codes,
with the least and the largest if there are several ``--seeds``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # the models; child processes inherit the path
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from bench import network
from breakdown import Clock
from gpt import DATA
from ours import Plan
from rounds import everyone_first, ratio
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from trainer import LEARNING_RATE, SIZES, Job, Size, Trainer, batches, new_model, own_rows

from shardc import Local, Momentum, Zero
from shardc.language.text import table
from shardc.runtime.comm.launch import Workers
from shardc.runtime.comm.messages import sent_bytes

ROOT = Path(__file__).parent.parent
WORD = re.compile(r"\w+|\s+|[^\w\s]")
WHOLE = 1 << 20  # MB, more than all gradients
LAST = 20  # steps whose mean loss is printed
TRAINED, HELD_OUT = ("shardc", "passes", "runtime"), ("examples", "benchmarks")  # folders of the text
WARM_UP = 0.1  # part of the steps in which the learning rate rises; then it falls by a cosine
EVALUATED = 40  # batches on which the final weights are evaluated
UNCOMPRESSED = 2  # the first steps of PowerSGD, the fewest that torch allows


@dataclass(frozen=True, slots=True)
class Hooked:
    """DDP with a hook that reduces its gradients, and a function that makes the hook's state.

    ``bucket``: its size in MB. PowerSGD has one bucket for all gradients: its hook sends from callbacks. With several
    buckets their order can differ between ranks, and then gloo ends the process.
    """

    hook: Callable[[Any, Any], Future[Tensor]] | None = None
    state: Callable[[], Any] = lambda: None
    bucket: int | None = None

    def trainer(self, model: nn.Module, job: Job, size: Size) -> Trainer:
        """A trainer of the model."""
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket)
        if self.hook is not None:
            parallel.register_comm_hook(self.state(), self.hook)
        return Trainer(parallel, job.adamw(parallel.parameters()), own_rows)


ZERO = {"zero": Zero("dp", 3)}
FROZEN = Momentum(after=100, before={"dp": "int8"})  # 1-bit Adam
FROZEN_LATER = replace(FROZEN, after=200)
RENEWED = Momentum(after=40, every=8, before={"dp": "int8"})
MEAN = partial(torch.optim.SGD, lr=1.0)  # an outer step that takes the mean of the groups
POWER = partial(powerSGD_hook.PowerSGDState, None, start_powerSGD_iter=UNCOMPRESSED)  # all else as torch sets it
WAYS: dict[str, Plan | Hooked] = {
    "dp": Plan("dp", DATA),
    "dp bf16": Plan("dp", DATA, {"wire": {"dp": "bf16"}}),
    "dp int8": Plan("dp", DATA, {"wire": {"dp": "int8"}}),
    "dp int4": Plan("dp", DATA, {"wire": {"dp": "int4"}}),
    "dp 1bit": Plan("dp", DATA, {"wire": {"dp": "1bit"}}),
    "dp 1-bit Adam": Plan("dp", DATA, {"wire": {"dp": "1bit"}, "momentum": FROZEN}),
    "dp 1-bit Adam, after 200": Plan("dp", DATA, {"wire": {"dp": "1bit"}, "momentum": FROZEN_LATER}),
    "dp topk": Plan("dp", DATA, {"wire": {"dp": "topk:0.01"}}),
    "dp 0/1 Adam": Plan("dp", DATA, {"wire": {"dp": "1bit"}, "momentum": RENEWED}),
    "dp DiLoCo": Plan("dp", DATA, {"local": Local("dp", 20)}),
    "dp mean of each step": Plan("dp", DATA, {"local": Local("dp", 1, outer=MEAN)}),
    "dp DiLoCo, mean": Plan("dp", DATA, {"local": Local("dp", 20, outer=MEAN)}),
    "dp DiLoCo, after 100": Plan("dp", DATA, {"local": Local("dp", 20, outer=MEAN, after=100)}),
    "dp DiLoCo int8": Plan("dp", DATA, {"local": Local("dp", 20, wire="int8")}),
    "zero3": Plan("dp", DATA, ZERO),
    "zero3 int8": Plan("dp", DATA, ZERO | {"wire": {"dp": "int8"}}),
    "zero3 squeezed": Plan("dp", DATA, ZERO | {"wire": {"dp parameters": "int8", "dp gradients": "int4"}}),
    "DDP": Hooked(),
    "DDP bf16": Hooked(default_hooks.bf16_compress_hook),
    "DDP fp16": Hooked(default_hooks.fp16_compress_hook),
    "DDP powerSGD": Hooked(powerSGD_hook.powerSGD_hook, POWER, WHOLE),
    "DDP batched powerSGD": Hooked(powerSGD_hook.batched_powerSGD_hook, POWER, WHOLE),
}


@dataclass(slots=True)
class Measured:
    """The measurements of one way on this rank.

    ``announced``: bytes that a rank sends in a step according to the plan. ``seconds`` and ``sent``: the time and the
    bytes of a rank, by round. ``losses``: the mean loss of the last steps of training, by seed. ``final``: the loss of
    the final weights on other text, by seed. ``failed``: the first line of the error of a way that cannot run.
    """

    announced: int | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def mean_sent(self) -> float:
        """The mean of the bytes that a rank sends in a step."""
        return fmean(self.sent)

    def timed_step(self, number: int, trainer: Trainer, batch: Tensor) -> None:
        """Take the step of a round, which all ranks begin together, and count the bytes they send, headers included."""
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        start = Clock.now()
        trainer.step(batch)
        self.seconds[number] = start.until_now().seconds
        dist.barrier()
        after = sent_bytes()
        dist.barrier()
        self.sent.append(float("nan") if before is None or after is None else (after - before) / dist.get_world_size())


Found = Mapping[str, Measured]


def measure(size: Size, names: Sequence[str], rounds: int) -> Found:
    """Measure the steps of the ways with these names, on this rank."""
    found, trainers, data = {name: Measured() for name in names}, dict[str, Trainer](), batches(size)
    for name, way in found.items():
        is_ours = isinstance(WAYS[name], Plan)
        with _reported(way):
            trainer = _trainer(name, size)
            for batch in data[: 1 if is_ours else UNCOMPRESSED + 1]:
                trainer.step(batch)
            way.announced, trainers[name] = trainer.announced, trainer
    for i in range(rounds):
        for name in everyone_first(names, i):
            if name in trainers:
                found[name].timed_step(i, trainers[name], data[i % len(data)])
    return found


def train(size: Size, names: Sequence[str], steps: int, seeds: int) -> Found:
    """Train in the ways with these names, one after the other, on this rank, from ``seeds`` initial weights."""
    text, held_out = numbered_words(source_text(TRAINED), source_text(HELD_OUT), size.config.vocab)
    found = {name: Measured() for name in names}
    for seed, (name, way) in product(range(seeds), found.items()):
        with _reported(way):
            trainer = _trainer(name, size, seed)
            rate = OneCycleLR(trainer.optimizer, LEARNING_RATE, steps, pct_start=WARM_UP, cycle_momentum=False)
            losses = []
            for batch in text_batches(size, steps, text, seed):
                losses.append(trainer.step(batch))
                rate.step()
            way.losses.append(fmean(losses[-LAST:]))
            way.final.append(fmean(map(trainer.loss, text_batches(size, EVALUATED, held_out, seed=0))))
        if dist.get_rank() == 0:
            print(name, *way.losses[-1:], *way.final[-1:], way.failed, file=sys.stderr)
    return found


def numbered_words(text: str, other: str, count: int) -> tuple[Tensor, Tensor]:
    """The numbers of the words of both texts, ``[word]``.

    Runs of spaces and signs are words too. The most frequent words of the first text have the numbers from 1 to
    ``count - 1``; all others have the number 0.
    """
    words = WORD.findall(text)
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(count - 1), start=1)}

    def numbered(words: Sequence[str]) -> Tensor:
        return torch.tensor([numbers.get(word, 0) for word in words])

    return numbered(words), numbered(WORD.findall(other))


def text_batches(size: Size, steps: int, text: Tensor, seed: int) -> Iterator[Tensor]:
    """A batch of windows of the text for each step: words, and the words that follow them, ``[1, 2, row, token]``."""
    random, window = torch.Generator().manual_seed(1 + seed), torch.arange(size.config.context + 1)
    for _ in range(steps):
        rows = text[torch.randint(len(text) - len(window), (size.batch, 1), generator=random) + window]
        yield torch.stack([rows[:, :-1], rows[:, 1:]])[None]


def source_text(folders: Sequence[str]) -> str:
    """The Python files in folders of the project."""
    files = sorted(each for folder in folders for each in (ROOT / folder).rglob("*.py"))
    return "".join(each.read_text() for each in files)


def steps_report(ranks: Sequence[Found]) -> str:
    """A table of steps with a row for each way, from the measurements of all ranks."""
    rows, seconds, plans = [], slowest(ranks), ranks[0]
    for name, way in plans.items():
        step, sent, announced, off, beside, part = [""] * 6
        if name in seconds:
            step, sent = f"{median(seconds[name].values()):.2f}", f"{way.mean_sent / 1e6:.2f}"
        if way.announced is not None:
            announced, off = f"{way.announced / 1e6:.2f}", f"{way.mean_sent / way.announced - 1:+.1%}"
        plain = uncompressed(name)
        if name in seconds and plain in seconds and plain != name:
            beside, part = str(ratio(seconds[plain], seconds[name])), f"{way.mean_sent / plans[plain].mean_sent:.3f}"
        rows.append((name, step, beside, sent, announced, off, part, way.failed))
    header = ("way", "step, s", "without codes beside it", "MB sent", "announced", "off by", "part of bytes", "failed")
    return table(header, rows)


def losses_report(ranks: Sequence[Found], took: Mapping[str, float]) -> str:
    """A table of losses with a row for each way; ``took``: the seconds of training, if steps were timed."""
    rows = []
    losses = {name: _of_ranks([rank[name].losses for rank in ranks]) for name in ranks[0]}
    final = {name: _of_ranks([rank[name].final for rank in ranks]) for name in ranks[0]}
    for name, way in ranks[0].items():
        seconds = f"{took[name]:.0f}" if name in took else ""
        rows.append((name, *_cells(losses, name), *_cells(final, name), seconds, way.failed))
    beside = "beside without codes"
    return table(("way", "loss", beside, "of final weights", beside, "seconds to it", "failed"), rows)


def _cells(losses: Mapping[str, Sequence[float]], name: str) -> tuple[str, str]:
    """The mean loss of a way over its seeds, and its ratios to the loss without codes."""
    own, plain = losses[name], losses.get(uncompressed(name), [])
    ratios = [mine / other for mine, other in zip(own, plain, strict=False) if name != uncompressed(name)]
    beside = f"{fmean(ratios):.4f}" if ratios else ""
    beside += f" ({min(ratios):.4f} to {max(ratios):.4f})" if len(ratios) > 1 else ""
    return f"{fmean(own):.4f}" if own else "", beside


def _of_ranks(losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean over ranks, by seed."""
    return [fmean(each) for each in zip(*losses, strict=True)]


def slowest(ranks: Sequence[Found]) -> dict[str, dict[int, float]]:
    """For each way that runs, the seconds of the slowest rank by round."""
    ways = {name: [rank[name].seconds for rank in ranks] for name, way in ranks[0].items() if way.seconds}
    return {name: {i: max(each[i] for each in of_ranks) for i in of_ranks[0]} for name, of_ranks in ways.items()}


def uncompressed(name: str) -> str:
    """The name of shardc's way with the same plan and without codes."""
    return "zero3" if name.startswith("zero3") else "dp"


def _trainer(name: str, size: Size, seed: int = 0) -> Trainer:
    torch.set_num_threads(1)
    return WAYS[name].trainer(new_model(size, seed=seed), Job(dist.get_world_size()), size)


@contextmanager
def _reported(way: Measured) -> Iterator[None]:
    """Record an error in the block as that of the way; it must occur on all ranks."""
    try:
        yield
    except (AssertionError, RuntimeError, TypeError) as error:
        way.failed = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")


def main() -> None:
    """Measure, train, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="by default all")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows of a batch; by default those of the size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=int, help="limit the ranks' network to so many Mbit/s (Linux, as root)")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train for so many steps; without --mbit, only that")
    parser.add_argument("--seeds", type=int, default=1, help="train from so many initial weights, on other batches")
    options = parser.parse_args()
    size, took = SIZES[options.size], dict[str, float]()
    size = replace(size, batch=options.batch or size.batch)
    title = f"{options.size}, {options.ranks} ranks"
    if options.mbit is not None or options.train is None:
        with network(options.mbit), Workers(options.ranks) as workers:
            ranks = workers.run(measure, size, options.ways, options.rounds)
        limit = "no limit of the network" if options.mbit is None else f"{options.mbit} Mbit/s"
        print(f"{title}, {limit}, medians of {options.rounds} rounds\n{steps_report(ranks)}", flush=True)
        took = {name: median(rounds.values()) * (options.train or 0) for name, rounds in slowest(ranks).items()}
    if options.train is not None:
        with Workers(options.ranks) as workers:
            ranks = workers.run(train, size, options.ways, options.train, options.seeds)
        print(f"{title}, {options.train} steps, means of the last {LAST}\n{losses_report(ranks, took)}")


if __name__ == "__main__":
    main()
