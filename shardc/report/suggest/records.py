"""Records of suggested plans, from which the JSON form of ``shardc suggest`` and its schema follow. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardc.costs.records import MemoryEntry
from shardc.language.machine import MachineEntry
from shardc.language.record import Amount, Count, Size
from shardc.options.saved import tier_text
from shardc.options.zero import HOST


@dataclass(frozen=True, slots=True)
class ZeroEntry:
    """Stored state is cut over ``axis``; all else as in ``shardc.Zero``.

    Several axes are joined by ``+``. ``gather_over``: absent where all axes are alike; ``offload``: where nothing is
    offloaded.
    """

    axis: str
    stage: Literal[1, 2, 3]
    gather_over: str | None = None
    offload: Literal["optimizer", "parameters"] | None = None


@dataclass(frozen=True, slots=True)
class PipelineEntry:
    """Stages along ``axis``. ``balance``: what is even over them."""

    axis: str
    microbatches: Size
    schedule: str
    balance: str


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Predicted seconds of a step on one rank.

    ``computing``: with the optimizer's step. ``exposed``: it waits for collectives. ``bubble``: the busiest rank of a
    pipeline is idle.
    """

    step: Amount
    computing: Amount
    exposed: Amount
    bubble: Amount


@dataclass(frozen=True, slots=True)
class SuggestionEntry:
    """A plan that was compiled whole, with its cost.

    ``mesh``: the axes with their sizes. ``links``: by axis. ``annotations``, ``remat``, ``precision``: as Python.
    ``wire``: the codecs of what is sent, by key; absent where all is sent as it is. ``overlap``: absent where products
    are plain. ``saved``: by glob the axes that cut what is saved for backward, and where it is, joined by ``+``; absent
    where it is whole on the device.
    ``excess``: the bytes by which the plan does not fit in memory. ``wire_bytes``, ``flops``: of one rank.
    ``collectives``: how many a rank starts in a step. ``reasons``: a sentence for each choice. ``python``: code that
    can be pasted. ``hints``: a sentence for each option that would make it faster and changes numbers; absent where
    there is none.
    """

    mesh: Mapping[str, Size]
    zero: ZeroEntry | None
    remat: str | None
    precision: str | None
    pipeline: PipelineEntry | None
    links: Mapping[str, str]
    annotations: Mapping[str, str]
    seconds: TimeParts
    memory: MemoryEntry
    excess: Count
    wire_bytes: Count
    collectives: Count
    flops: Count
    reasons: tuple[str, ...]
    python: str
    wire: Mapping[str, str | None] | None = None
    overlap: Literal["auto", "ring"] | None = None
    saved: Mapping[str, str | None] | None = None
    hints: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that the search priced.

    ``text``: its mesh and options. ``seconds``: of a step. ``peak``: bytes of a rank.
    """

    text: str
    seconds: Amount
    peak: Count


@dataclass(frozen=True, slots=True)
class Suggested:
    """What ``shardc suggest`` found, the best plan first.

    ``model``: its class. ``devices``: ranks. ``memory``: bytes that each has; null for no limit. ``machine``: links and
    device. ``bound``: seconds below which no plan of the search can fall; 0 where none is known. ``compiled``: programs
    that were compiled for the answer. ``candidates``: the plans that were compared.
    """

    version: Literal[1] = field(default=1, init=False)
    model: str
    devices: Size
    memory: Size | None
    machine: MachineEntry
    bound: Amount
    compiled: Count
    suggestions: tuple[SuggestionEntry, ...]
    candidates: tuple[Candidate, ...]


def mesh_text(plan: SuggestionEntry) -> str:
    """``dp=2, tp=8``."""
    return ", ".join(f"{name}={size}" for name, size in plan.mesh.items())


def options_text(plan: SuggestionEntry) -> str:
    """The options of a plan in a few words; empty where it has none."""
    found = [f"ZeRO {plan.zero.stage} over {plan.zero.axis.replace('+', ' and ')}"] if plan.zero else []
    found += [f"{plan.zero.offload} in host memory"] if plan.zero and plan.zero.offload else []
    if plan.pipeline is not None:
        found.append(f"{plan.pipeline.schedule} of {plan.pipeline.microbatches} microbatches")
    rings = ["products in rings"] * bool(plan.overlap)
    saved = [_saved_text(entry) for entry in (plan.saved or {}).values() if entry]
    return ", ".join([*found, *filter(None, (plan.remat, plan.precision)), *rings, *saved])


def _saved_text(entry: str) -> str:
    """``tp+host`` in words."""
    axes, slash, path = entry.partition("/")
    names = axes.split("+")
    to = slash + path or (HOST if HOST in names else "")
    names = [name for name in names if name not in ("", HOST)]
    cut, where = f"cut over {' and '.join(names)}" * bool(names), f"in {tier_text(to)}" if to else ""
    return " ".join(filter(None, ("saved", cut, where)))


def machine_text(suggested: Suggested) -> str:
    """``16 x h100 in 2 nodes, nvlink, infiniband between nodes; 80.0 GB a rank``, without the memory."""
    machine, devices = suggested.machine, suggested.devices
    links = ", ".join(dict.fromkeys(link.name for link in machine.links.values()))
    nodes = "" if machine.node is None else f" in {devices // machine.node} nodes"
    between = "" if machine.between is None else f", {machine.between.name} between nodes"
    return f"{devices} x {machine.device.name}{nodes}, {links}{between}"
