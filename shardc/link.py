"""Links: what joins the ranks along a mesh axis, and how long a collective takes there by the ring algorithms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from shardc.collective import LOCAL_KINDS, Kind
from shardc.error import OptionError, raise_all


@dataclass(frozen=True, slots=True)
class Link:
    """``latency``: seconds of one step of a ring. ``bandwidth``: bytes a second that one rank sends.

    ``overlap``: for which part of a collective's time its rank computes on as if nothing were sent, from 0 to 1: all of
    it where the network works by itself, less where the ranks' own processors do its work. ``kinds``: latency and
    bandwidth of kinds of collectives that were measured by themselves. ``name`` is for messages.
    """

    latency: float
    bandwidth: float
    overlap: float = 1.0
    name: str = "a link"
    kinds: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        problems = {
            "latency": ("seconds are 0 or more", self.latency >= 0 and isfinite(self.latency)),
            "bandwidth": ("bytes a second are more than 0", self.bandwidth > 0),
            "overlap": ("a part of the time is from 0 to 1", 0 <= self.overlap <= 1),
        }
        wrong = [(name, problem) for name, (problem, is_good) in problems.items() if not is_good]
        remedy = "say Link(latency=5e-6, bandwidth=4e10), or name a preset"
        raise_all([OptionError("Link", f"{name}={getattr(self, name)!r}", what, remedy) for name, what in wrong])

    def seconds(self, kind: Kind, wire_bytes: int, num_ranks: int) -> float:
        """Of a collective over so many ranks, each of which sends so many bytes."""
        latency, bandwidth = self.of_kind(kind)
        return num_steps(kind, num_ranks) * latency + wire_bytes / bandwidth

    def of_kind(self, kind: str) -> tuple[float, float]:
        """Latency and bandwidth of one kind of collective."""
        return next(((each[1], each[2]) for each in self.kinds if each[0] == kind), (self.latency, self.bandwidth))


def num_steps(kind: Kind, num_ranks: int) -> int:
    """Messages that follow each other: in a ring every rank sends n-1, for an all_reduce twice as many."""
    if kind in LOCAL_KINDS or num_ranks == 1:
        return 0
    if kind in ("collective_permute", "rechunk", "send", "recv"):
        return 1
    return (2 if kind == "all_reduce" else 1) * (num_ranks - 1)


def slowest(links: Iterable[Link]) -> Link:
    """What a group of ranks has that is joined by several."""
    found = tuple(dict.fromkeys(links))
    if len(found) == 1:
        return found[0]
    names = dict.fromkeys(kind for link in found for kind, *_ in link.kinds)
    worst = {kind: _worst([link.of_kind(kind) for link in found]) for kind in ("", *names)}
    return Link(
        *worst[""],
        overlap=min(link.overlap for link in found),
        name=" and ".join(link.name for link in found),
        kinds=tuple((kind, *worst[kind]) for kind in names),
    )


def _worst(found: list[tuple[float, float]]) -> tuple[float, float]:
    return max(latency for latency, _ in found), min(bandwidth for _, bandwidth in found)


# What a rank reaches in one direction, not what the data sheet says. Latencies are those of a step in NCCL's own cost
# model, between its protocols for short and for long messages.
LINKS = {
    "nvlink": Link(2e-6, 3.5e11, name="nvlink"),  # of an H100, 450 GB/s nominal
    "pcie": Link(4e-6, 2e10, name="pcie"),  # of generation 4, 32 GB/s nominal
    "infiniband": Link(5e-6, 4.5e10, name="infiniband"),  # an adapter of 400 Gbit/s a rank
    "ethernet": Link(3e-5, 2.8e9, name="ethernet"),  # 25 Gbit/s a rank, TCP
    "loopback": Link(1e-4, 1.5e9, overlap=0.0, name="loopback"),  # gloo between processes of one host
}
SHORT = {"ib": "infiniband", "nv": "nvlink", "eth": "ethernet", "gloo": "loopback"}
