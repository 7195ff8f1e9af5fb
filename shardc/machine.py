"""The machine that times are estimated for: a link for each mesh axis, and the device of a rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardc.device import DEVICES, Device
from shardc.error import OptionError, did_you_mean
from shardc.link import LINKS, SHORT, Link, slowest
from shardc.mesh import MICROBATCH, Mesh
from shardc.partition import parse_part
from shardc.text import table

ANY = "*"  # every axis that is not named
VERSION = 1
ALL = "all"  # kinds of collectives
DEFAULT_LINK = Link(1e-5, 6.25e10, name="a link of 62.5 GB/s")
DEFAULT_DEVICE = Device({"float32": 1e14}, 1e12, 5e-6, name="a GPU of 2020")


@dataclass(frozen=True, slots=True)
class Machine:
    """``links`` by mesh axis, ``"*"`` being every other one, and the ``device`` of a rank; presets by their names.

    ``Machine({"tp": "nvlink", "dp": "infiniband"}, "h100")``. By default, about a GPU of 2020 and a sixteenth of its
    memory's rate between ranks.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    device: Device = DEFAULT_DEVICE

    def __post_init__(self) -> None:
        given: Mapping[str, Any] = self.links
        object.__setattr__(self, "links", {axis: _link(axis, each) for axis, each in given.items()})
        object.__setattr__(self, "device", _device(self.device))

    def link(self, axes: Iterable[str], mesh: Mesh) -> Link:
        """What joins the ranks of a group along these axis parts, as printed: the slowest where it is several."""
        names = [part.name for axis in axes if (part := parse_part(axis, mesh)).name != MICROBATCH and part.size > 1]
        return slowest([self.of_axis(name) for name in names] or [self.of_axis(ANY)])

    def of_axis(self, name: str) -> Link:
        """The link of one axis."""
        return self.links.get(name) or self.links.get(ANY, DEFAULT_LINK)

    def check(self, mesh: Mesh) -> None:
        """An OptionError for a link of an axis that the mesh does not have."""
        for axis in self.links:
            if axis not in (*mesh.axis_names, ANY):
                remedy = did_you_mean(axis, mesh.axis_names) or f"name one of {', '.join(mesh.axis_names)}, or '{ANY}'"
                raise OptionError(f"links[{axis!r}]", f"{mesh}", "the mesh has no such axis", remedy)

    def text(self) -> str:
        """Two tables: the links, and the device."""
        links = [
            (axis if kind == ALL else "", kind, f"{1e6 * latency:.1f}", f"{bandwidth / 1e9:.2f}", overlap)
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
        return {
            "version": VERSION,
            "links": {axis: asdict(link) for axis, link in self.links.items()},
            "device": asdict(self.device),
        }


Links = Machine | Mapping[str, "Link | str"] | str | Path | None  # as a user gives them


def machine_of(links: Links, device: Device | str | None = None) -> Machine:
    """What a user says: links by axis, ``tp=nvlink,dp=ib``, a file of ``shardc bench-links``, or a machine.

    A ``device`` stands above that of a file.
    """
    found = links if isinstance(links, Machine) else _read(links)
    return Machine(found.links, found.device if device is None else _device(device))


def _read(links: Mapping[str, Link | str] | str | Path | None) -> Machine:
    if isinstance(links, Path) or (isinstance(links, str) and "=" not in links):
        return load(links)
    if isinstance(links, str):
        pairs = [each.partition("=") for each in links.split(",")]
        twice = [axis for i, (axis, *_) in enumerate(pairs) if axis in [other for other, *_ in pairs[:i]]]
        if twice:
            raise OptionError("links", repr(links), f"it names {twice[0]!r} twice", "say one link for each axis")
        return Machine({axis: _link(axis, name) for axis, _, name in pairs})
    if links is not None and not isinstance(links, Mapping):
        raise OptionError("links", repr(links), "it maps axes to links", "say links={'tp': 'nvlink'}, or name a file")
    return Machine(dict(links or {}))  # type: ignore[arg-type]


def load(path: str | Path) -> Machine:
    """The machine of a file that ``shardc bench-links`` wrote."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        assert found["version"] == VERSION, found["version"]
        return Machine({axis: _link_of(**each) for axis, each in found["links"].items()}, Device(**found["device"]))
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise _unreadable(path, f"it is no file of shardc bench-links, version {VERSION}") from None


def _link_of(kinds: Iterable[Iterable[Any]] = (), **given: Any) -> Link:
    return Link(**given, kinds=tuple((str(kind), float(latency), float(rate)) for kind, latency, rate in kinds))


def _unreadable(path: str | Path, problem: str) -> OptionError:
    remedy = did_you_mean(str(path), (*LINKS, *SHORT))
    remedy = f"say links by axis, as tp={path}" if str(path) in (*LINKS, *SHORT) else remedy
    return OptionError("links", f"{str(path)!r}", problem, remedy or "run shardc bench-links -o FILE, or say tp=nvlink")


def _link(axis: str, link: Link | str) -> Link:
    if isinstance(link, Link):
        return link
    found = LINKS.get(SHORT.get(link, link)) if isinstance(link, str) else None
    if found is None:
        remedy = did_you_mean(str(link), LINKS) or f"say one of {', '.join(LINKS)}"
        raise OptionError(f"links[{axis!r}]", f"{link!r}", "there is no such link", remedy)
    return found


def _device(device: Device | str) -> Device:
    if isinstance(device, Device):
        return device
    if not isinstance(device, str) or device not in DEVICES:
        remedy = did_you_mean(str(device), DEVICES) or f"say one of {', '.join(DEVICES)}"
        raise OptionError("device", f"{device!r}", "there is no such device", remedy)
    return DEVICES[device]
