"""Kinds of collectives, and the machine that times are estimated for: links of mesh axes and the device of a rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, isfinite, prod
from pathlib import Path
from typing import Annotated, Any, Literal

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import MICROBATCH, AxisPart, Mesh
from shardc.language.partition import parse_part
from shardc.language.record import Amount, Rate, Size, json_of
from shardc.language.text import read_file, table


@dataclass(frozen=True, slots=True)
class Link:
    """The network between the ranks of one mesh axis.

    ``latency``: seconds of one step of a ring. ``bandwidth``: bytes a second that one rank sends. ``overlap``: the part
    of a collective's time, from 0 to 1, in which its rank computes at full speed: all of it where the network works by
    itself, less where the ranks' own processors do its work. ``kinds``: kind, latency and bandwidth of the kinds of
    collectives that were measured apart. ``name``: for messages.
    """

    latency: Amount
    bandwidth: Rate
    overlap: Annotated[float, ("minimum", 0), ("maximum", 1)] = 1.0
    name: str = "a link"
    kinds: tuple[tuple[str, Amount, Rate], ...] = ()

    def __post_init__(self) -> None:
        problems = {
            "latency": ("seconds are 0 or more", self.latency >= 0 and isfinite(self.latency)),
            "bandwidth": ("bytes a second are more than 0", self.bandwidth > 0),
            "overlap": ("a part of the time is from 0 to 1", 0 <= self.overlap <= 1),
        }
        wrong = [(name, problem) for name, (problem, is_good) in problems.items() if not is_good]
        remedy = "say Link(latency=5e-6, bandwidth=4e10), or name a preset"
        raise_all([OptionError("Link", f"{name}={getattr(self, name)!r}", what, remedy) for name, what in wrong])

    def seconds(self, kind: CollectiveKind, wire_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective over ``num_ranks`` ranks, each of which sends ``wire_bytes``."""
        latency, bandwidth = self.of_kind(kind)
        return num_steps(kind, num_ranks) * latency + wire_bytes / bandwidth

    def of_kind(self, kind: str) -> tuple[float, float]:
        """Latency and bandwidth of one kind of collective; all kinds of messages to one rank count as ``send``."""
        kind = "send" if kind in WHOLE_PAYLOAD else kind
        return next(((each[1], each[2]) for each in self.kinds if each[0] == kind), (self.latency, self.bandwidth))


@dataclass(frozen=True, slots=True)
class HierarchicalLink:
    """The network of a group of ranks in ``num_nodes`` nodes, with ``num_inside`` ranks in each.

    A reduction runs inside each node first, then between nodes on each rank's part, and back. A gather runs the other
    way round. Each rank has its own link to other nodes.
    """

    inside: Link
    between: Link
    num_inside: int
    num_nodes: int

    @property
    def overlap(self) -> float:
        """The part of a collective's time in which its rank computes at full speed."""
        return min(self.inside.overlap, self.between.overlap)

    @property
    def name(self) -> str:
        """Both links with the number of ranks or nodes that each joins, for messages."""
        return f"{self.inside.name} in nodes of {self.num_inside} and {self.between.name} between {self.num_nodes}"

    def seconds(self, kind: CollectiveKind, wire_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective over ``num_ranks`` ranks, each of which sends ``wire_bytes``."""
        if kind in (*WHOLE_PAYLOAD, "rechunk"):  # some rank's whole payload goes to another node
            return self.between.seconds(kind, wire_bytes, num_ranks)
        # An all_to_all exchanges one part with each peer inside the node, all other kinds one part for each node.
        num_peers = self.num_inside - 1
        parts = num_peers * (1 if kind == "all_to_all" else self.num_nodes)
        bytes_inside = wire_bytes * parts / (num_ranks - 1)
        seconds_inside = self.inside.seconds(kind, bytes_inside, self.num_inside)
        return seconds_inside + self.between.seconds(kind, wire_bytes - bytes_inside, self.num_nodes)


def slowest(links: Iterable[Link]) -> Link:
    """One link for a group of ranks that several links join, with their worst latency, bandwidth and overlap."""
    links = tuple(dict.fromkeys(links))
    if len(links) == 1:
        return links[0]

    def worst(kind: str) -> tuple[float, float]:
        latencies, bandwidths = zip(*(link.of_kind(kind) for link in links), strict=True)
        return max(latencies), min(bandwidths)

    kinds = dict.fromkeys(kind for link in links for kind, *_ in link.kinds)
    return Link(
        *worst(""),
        overlap=min(link.overlap for link in links),
        name=" and ".join(link.name for link in links),
        kinds=tuple((kind, *worst(kind)) for kind in kinds),
    )


# Bandwidths are those that a rank reaches in one direction. The nominal figure is beside them, from a data sheet or
# standard: a rank reaches 78 % of NVLink, 62 % of PCIe, 90 % of a network adapter. Latencies are those of a step in
# NCCL's own cost model, between its protocols for short and for long messages.
LINKS = {
    "nvlink": Link(2e-6, 3.5e11, name="nvlink"),  # generation 4: NVIDIA H100 SXM and H200 data sheets, 450 GB/s of 900
    "nvlink3": Link(2e-6, 2.3e11, name="nvlink3"),  # NVIDIA A100 SXM data sheet, 300 GB/s of 600 in both directions
    "nvlink5": Link(2e-6, 7.0e11, name="nvlink5"),  # NVIDIA HGX B200 data sheet, 900 GB/s of 1.8 TB/s
    "pcie": Link(4e-6, 2e10, name="pcie"),  # generation 4, 16 lanes: 32 GB/s of 64 (A100 PCIe, L40S data sheets)
    "pcie5": Link(4e-6, 4e10, name="pcie5"),  # generation 5, 16 lanes: 64 GB/s of 128 (H100 PCIe data sheet)
    "infiniband": Link(5e-6, 4.5e10, name="infiniband"),  # NVIDIA ConnectX-7 data sheet, NDR: 400 Gbit/s a rank
    "hdr": Link(5e-6, 2.2e10, name="hdr"),  # InfiniBand, NVIDIA ConnectX-6 data sheet: 200 Gbit/s a rank
    "xdr": Link(5e-6, 9e10, name="xdr"),  # InfiniBand, NVIDIA ConnectX-8 data sheet: 800 Gbit/s a rank
    "ethernet": Link(3e-5, 2.8e9, name="ethernet"),  # IEEE 802.3by: 25 Gbit/s a rank, TCP
    "ethernet100": Link(3e-5, 1.1e10, name="ethernet100"),  # IEEE 802.3bj: 100 Gbit/s a rank, TCP
    "loopback": Link(1e-4, 1.5e9, overlap=0.0, name="loopback"),  # gloo between processes of one host
}
SHORT = {
    "ib": "infiniband", "ndr": "infiniband", "nv": "nvlink", "nvlink4": "nvlink", "pcie4": "pcie", "eth": "ethernet",
    "gloo": "loopback",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """The processor of one rank.

    ``flops``: floating-point operations a second of contractions, by dtype; one that is not named runs as float32.
    ``attention``: the part of that rate which fused attention reaches. ``memory``: bytes a second that all other ops
    read and write. ``update``: bytes a second of the optimizer's step; as ``memory`` where it is 0. ``call``: seconds
    of the shortest call. ``capacity``: bytes that it holds, where that is known. ``host`` and ``files``: bytes a second
    between it and host memory, and files; as ``memory``, and as an NVMe disk, where that is not said. ``packs``: the
    values of a bucket are copied into one buffer and out of it, as for NCCL; gloo sends most of them from where they
    are.
    """

    flops: Mapping[str, Rate]
    memory: Rate
    call: Amount = 0.0
    attention: Rate = 1.0
    update: Amount = 0.0
    name: str = field(default="a device", compare=False)
    capacity: Size | None = None
    host: Rate | None = None
    files: Rate | None = None
    packs: bool = True

    def __post_init__(self) -> None:
        rates = {"memory": self.memory, "attention": self.attention, **self.flops}
        rates |= {name: rate for name in ("host", "files") if (rate := getattr(self, name)) is not None}
        wrong = [f"{name}={rate!r}" for name, rate in rates.items() if not rate > 0]
        wrong += [f"{name}={each!r}" for name in ("call", "update") if not (each := getattr(self, name)) >= 0]
        wrong += [] if self.capacity is None or self.capacity > 0 else [f"capacity={self.capacity!r}"]
        wrong += [] if isinstance(self.packs, bool) else [f"packs={self.packs!r}"]
        wrong += [] if "float32" in self.flops else [f"flops={dict(self.flops)!r}"]
        remedy = "say Device(flops={'float32': 1e13}, memory=1e12), rates a second and above 0, or name a preset"
        raise_all([OptionError("Device", what, "it gives no time", remedy) for what in wrong])

    def seconds(self, flops: int, nbytes: int, dtype: str = "float32", is_attention: bool = False) -> float:
        """Seconds of a call: the longest of ``call``, computing, and moving operands and results; 0 without work."""
        if not flops and not nbytes:
            return 0.0
        rate = self.flops.get(dtype, self.flops["float32"]) * (self.attention if is_attention else 1)
        return max(self.call, flops / rate, nbytes / self.memory)

    def update_seconds(self, nbytes: int, is_on_host: bool = False, in_files: bool = False) -> float:
        """Seconds of an optimizer's step that reads and writes ``nbytes``, on the device or in the tier below."""
        rate = HOST_UPDATE if is_on_host else self.update or self.memory
        return nbytes / (min(rate, self.files or FILES) if in_files else rate)

    def transfer_seconds(self, nbytes: int, in_files: bool) -> float:
        """Seconds of a copy between the device and host memory or files."""
        rate = self.host or self.memory
        return nbytes / (min(rate, self.files or FILES) if in_files else rate)


FILES = 4e9  # bytes a second, below Samsung's data sheet of a PM9A3: an NVMe disk that reads 6.8 GB/s and writes 4 GB/s
HOST_UPDATE = 2.5e10  # bytes a second that the optimizer's step reads and writes in host memory, as on one ``cpu``

# Rates are those that kernels reach. The nominal figures of the data sheet are above them (dense 16-bit, float32,
# memory): kernels reach about 61 % for 16-bit products, 67 % for others, 78 % for memory; on an A100 70, 77 and 69 %.
# Capacities are nominal. ``host`` is the bandwidth of the device's link, pcie or pcie5. ``cpu`` is one core.
DEVICES = {
    # NVIDIA A100 80GB SXM: 312 TFLOP/s, 19.5 TFLOP/s (float64 on tensor cores as well), 2.04 TB/s
    "a100": Device(
        {"float32": 1.5e13, "bfloat16": 2.2e14, "float16": 2.2e14, "float64": 1.5e13}, 1.4e12, 5e-6, 0.6,
        name="a100", capacity=80 * 10**9, host=2e10,
    ),
    # NVIDIA H100 SXM: 989 TFLOP/s, 67 TFLOP/s (float64 on tensor cores as well), 3.35 TB/s
    "h100": Device(
        {"float32": 4.5e13, "bfloat16": 6.0e14, "float16": 6.0e14, "float64": 4.5e13}, 2.6e12, 5e-6, 0.6,
        name="h100", capacity=80 * 10**9, host=4e10,
    ),
    # NVIDIA H200 SXM: as H100, 4.8 TB/s
    "h200": Device(
        {"float32": 4.5e13, "bfloat16": 6.0e14, "float16": 6.0e14, "float64": 4.5e13}, 3.7e12, 5e-6, 0.6,
        name="h200", capacity=141 * 10**9, host=4e10,
    ),
    # NVIDIA HGX B200, one of 8: 2250 TFLOP/s, 75 TFLOP/s (float64 37), 8 TB/s
    "b200": Device(
        {"float32": 5.0e13, "bfloat16": 1.36e15, "float16": 1.36e15, "float64": 2.5e13}, 6.2e12, 5e-6, 0.6,
        name="b200", capacity=180 * 10**9, host=4e10,
    ),
    # NVIDIA L40S: 362 TFLOP/s, 91.6 TFLOP/s (float64 a 64th), 864 GB/s
    "l40s": Device(
        {"float32": 6.1e13, "bfloat16": 2.2e14, "float16": 2.2e14, "float64": 9.6e11}, 6.7e11, 5e-6, 0.6,
        name="l40s", capacity=48 * 10**9, host=2e10,
    ),
    "cpu": Device({"float32": 1.0e11, "float64": 5.0e10}, 8e9, 5e-6, 0.6, 2.5e10, name="cpu", packs=False),
}  # fmt: skip


ANY = "*"  # every axis that is not named
VERSION = 1
ALL = "all"  # kinds of collectives
DEFAULT_LINK = Link(1e-5, 6.25e10, name="a link of 62.5 GB/s")
DEFAULT_DEVICE = Device({"float32": 1e14}, 1e12, 5e-6, name="a GPU of 2020")


@dataclass(frozen=True, slots=True)
class Machine:
    """``links`` by mesh axis, with ``"*"`` for all other axes, and the ``device`` of a rank; presets by their names.

    ``Machine({"tp": "nvlink", "dp": "infiniband"}, "h100")``. The default is about a GPU of 2020 with links of a
    sixteenth of its memory's rate. ``node``: the number of devices in a node. Consecutive ranks fill it, so it holds
    the last axes of the mesh. ``links`` are then those inside a node, and ``between`` is the one between nodes:
    ``Machine({"*": "nvlink"}, "h100", node=8, between="infiniband")``.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    device: Device = DEFAULT_DEVICE
    node: int = 0
    between: Link | None = None

    def __post_init__(self) -> None:
        links: Mapping[str, Any] = self.links
        object.__setattr__(self, "links", {axis: link_named(f"links[{axis!r}]", each) for axis, each in links.items()})
        object.__setattr__(self, "device", _device(self.device))
        between: Any = self.between
        if type(self.node) is not int or self.node < 0 or bool(self.node) != (between is not None):
            what, problem = f"node={self.node!r}, between={between!r}", "a node has a size, and a link to other nodes"
            raise OptionError("Machine", what, problem, "say both, as node=8, between='infiniband', or neither")
        object.__setattr__(self, "between", None if between is None else link_named("links['between']", between))

    def link(self, axes: Iterable[str], mesh: Mesh) -> Link | HierarchicalLink:
        """The link of a group of ranks along these printed axis parts; the slowest if there are several.

        It is hierarchical if the group is in several nodes with several ranks in each.
        """
        parts = [part for axis in axes if (part := parse_part(axis, mesh)).name != MICROBATCH and part.size > 1]
        inside = slowest([self.of_axis(part.name) for part in parts] or [self.of_axis(ANY)])
        if self.between is None:
            return inside
        num_inside, num_ranks = prod(self._num_in_node(part, mesh) for part in parts), prod(part.size for part in parts)
        if num_inside == 1 < num_ranks:
            return self.between
        is_in_one = num_inside == num_ranks
        return inside if is_in_one else HierarchicalLink(inside, self.between, num_inside, num_ranks // num_inside)

    def _num_in_node(self, part: AxisPart, mesh: Mesh) -> int:
        """The number of ranks along an axis part that are in one node."""
        behind = prod(mesh.shape[mesh.axis_names.index(part.name) :])  # ranks of the axis and of those after it
        stride = behind // (part.pre * part.size)
        return part.size if part.size * stride <= self.node else gcd(part.size, max(1, self.node // stride))

    def of_stages(self, axis: str, num_ranks: int) -> Link:
        """The link between the stages of a pipeline on ``num_ranks`` ranks; ``axis`` is theirs, the mesh's first."""
        return self.between if self.between is not None and num_ranks > self.node else self.of_axis(axis)

    def of_axis(self, name: str) -> Link:
        """The link of one axis."""
        return self.links.get(name) or self.links.get(ANY, DEFAULT_LINK)

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError for a link of an axis that the mesh lacks, or for nodes that do not divide its ranks."""
        if mesh.size > self.node > 0 and mesh.size % self.node:
            problem = f"its {mesh.size} ranks are no whole number of such nodes"
            raise OptionError(f"nodes of {self.node}", f"{mesh}", problem, f"say a size that divides {mesh.size}")
        for axis in self.links:
            if axis not in (*mesh.axis_names, ANY):
                remedy = did_you_mean(axis, mesh.axis_names) or f"name one of {', '.join(mesh.axis_names)}, or '{ANY}'"
                raise OptionError(f"links[{axis!r}]", f"{mesh}", "the mesh has no such axis", remedy)

    def text(self) -> str:
        """Two tables as text: the links, and the device."""
        links = [
            (axis if kind == ALL else "", kind, f"{1e6 * latency:.1f}", f"{bandwidth / 1e9:.3g}", overlap)
            for axis, link in self.links.items()
            for kind, latency, bandwidth, overlap in (
                (ALL, link.latency, link.bandwidth, f"{link.overlap:.0%}"), *((*each, "") for each in link.kinds)
            )
        ]  # fmt: skip
        device = self.device
        rates = [(f"{dtype} products, GFLOP/s", f"{rate / 1e9:.1f}") for dtype, rate in device.flops.items()]
        rates += [("attention, of that", f"{device.attention:.0%}"), ("memory, GB/s", f"{device.memory / 1e9:.2f}")]
        rates += [("optimizer, GB/s", f"{device.update / 1e9:.2f}")] if device.update else []
        rates += [("shortest call, us", f"{1e6 * device.call:.1f}")]
        header = ("axis", "collectives", "latency us", "bandwidth GB/s", "computes beside")
        return f"{table(header, links)}\n{table((device.name, 'rate'), rates)}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form, version 1, which ``shardc bench-links`` writes."""
        found: dict[str, Any] = json_of(MachineEntry(self.links, self.device, self.node or None, self.between))
        return found


@dataclass(frozen=True, slots=True)
class MachineEntry:
    """A machine as it was measured: what ``--links FILE`` reads.

    ``links``: by mesh axis; * is every other one. ``node``: the devices in a node. ``between``: the link between nodes.
    """

    version: Literal[1] = field(default=1, init=False)
    links: Mapping[str, Link]
    device: Device
    node: Size | None = None
    between: Link | None = None


Links = Machine | Mapping[str, "Link | str"] | str | Path | None  # what a user may pass as links=


def machine_of(links: Links, device: Device | str | None = None, nodes: tuple[int, str] | None = None) -> Machine:
    """The machine that a user describes: links by axis, ``tp=nvlink,dp=ib``, a ``shardc bench-links`` file, a Machine.

    ``device`` and ``nodes``, the devices in each and the link between them, replace those of a file or a Machine.
    """
    machine = links if isinstance(links, Machine) else _read(links)
    node, between = (
        (machine.node, machine.between) if nodes is None else (nodes[0], link_named("links['between']", nodes[1]))
    )
    return Machine(machine.links, machine.device if device is None else _device(device), node, between)


def _read(links: Mapping[str, Link | str] | str | Path | None) -> Machine:
    if isinstance(links, str) and SHORT.get(links, links) in LINKS:
        return Machine({"*": link_named("links", links)})
    if isinstance(links, Path) or (isinstance(links, str) and "=" not in links):
        return load(links)
    if isinstance(links, str):
        pairs = [each.partition("=") for each in links.split(",")]
        twice = [axis for i, (axis, *_) in enumerate(pairs) if axis in [other for other, *_ in pairs[:i]]]
        if twice:
            raise OptionError("links", repr(links), f"it names {twice[0]!r} twice", "say one link for each axis")
        return Machine({axis: link_named(f"links[{axis!r}]", name) for axis, _, name in pairs})
    if links is not None and not isinstance(links, Mapping):
        raise OptionError("links", repr(links), "it maps axes to links", "say links={'tp': 'nvlink'}, or name a file")
    return Machine(dict(links or {}))  # type: ignore[arg-type]


def load(path: str | Path) -> Machine:
    """The machine of a file that ``shardc bench-links`` wrote."""
    try:
        record = json.loads(read_file(path))
        assert record["version"] == VERSION, record["version"]
        links = {axis: _link_of(**each) for axis, each in record["links"].items()}
        between = _link_of(**record["between"]) if "between" in record else None
        return Machine(links, Device(**record["device"]), record.get("node", 0), between)
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise _unreadable(path, f"it is no file of shardc bench-links, version {VERSION}") from None


def _link_of(kinds: Iterable[Iterable[Any]] = (), **fields: Any) -> Link:
    return Link(**fields, kinds=tuple((str(kind), float(latency), float(rate)) for kind, latency, rate in kinds))


def _unreadable(path: str | Path, problem: str) -> OptionError:
    remedy = did_you_mean(str(path), (*LINKS, *SHORT)) or "run shardc bench-links -o FILE, or say nvlink"
    return OptionError("links", f"{str(path)!r}", problem, remedy)


def link_named(who: str, link: Link | str) -> Link:
    """A Link as it is, or the preset of this name. Raises an OptionError about ``who`` if there is none."""
    if isinstance(link, Link):
        return link
    preset = LINKS.get(SHORT.get(link, link)) if isinstance(link, str) else None
    if preset is None:
        remedy = did_you_mean(str(link), (*LINKS, *SHORT)) or f"say one of {', '.join(LINKS)}"
        raise OptionError(who, f"{link!r}", "there is no such link", remedy)
    return preset


def _device(device: Device | str) -> Device:
    if isinstance(device, Device):
        return device
    if not isinstance(device, str) or device not in DEVICES:
        remedy = did_you_mean(str(device), DEVICES) or f"say one of {', '.join(DEVICES)}"
        raise OptionError("device", f"{device!r}", "there is no such device", remedy)
    return DEVICES[device]


SentKind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "send", "recv"]
CollectiveKind = Literal[SentKind, "shard_slice", "mask_padding", "rechunk"]
WHOLE_PAYLOAD = ("collective_permute", "send", "recv")  # a rank sends its whole operand
LOCAL_KINDS = ("shard_slice", "mask_padding")  # nothing is sent: a rank's own work, by its position on the mesh


def num_steps(kind: CollectiveKind, num_ranks: int) -> int:
    """The number of consecutive messages of a rank: n - 1 in a ring, twice as many for an all_reduce."""
    if kind in LOCAL_KINDS or num_ranks == 1:
        return 0
    if kind in (*WHOLE_PAYLOAD, "rechunk"):
        return 1
    return (2 if kind == "all_reduce" else 1) * (num_ranks - 1)
