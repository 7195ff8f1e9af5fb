"""A cluster: devices in nodes, with the links inside a node and between nodes, by name, as values or from files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardc.language.errors import OptionError
from shardc.language.machine import (
    DEFAULT_DEVICE,
    DEFAULT_LINK,
    LINKS,
    Device,
    Link,
    Machine,
    link_named,
    load,
    machine_of,
    slowest,
)


def cluster(links: Any, device: Device | str | None, devices: int, nodes: int) -> Machine:
    """The machine with ``devices`` devices, spread evenly over ``nodes`` nodes.

    ``links``: the link inside a node, ``"nvlink"``, or that and the one between nodes, ``("nvlink", "infiniband")``.
    Each is a preset, a ``Link`` or a file that ``shardc bench-links`` wrote. A Machine keeps its links and nodes.
    ``device``: a preset, a ``Device`` or such a file; by default the device of a file in ``links``. Raises an
    OptionError for arguments that describe no machine.
    """
    for name, count in (("devices", devices), ("nodes", nodes)):
        if type(count) is not int or count < 1:
            problem = "it is a whole number from 1 on"
            raise OptionError(name, f"{count!r}", problem, f"say {name}={8 if name == 'devices' else 2}")
    if devices % nodes:
        remedy = f"say a number of nodes that divides {devices}"
        raise OptionError(f"nodes={nodes}", f"{devices} devices", "nodes have equal numbers of devices", remedy)
    if device is not None and not isinstance(device, Device) and _is_file(device):
        device = load(device).device
    if isinstance(links, Machine):
        return links if device is None else machine_of(links, device)
    listed = _each(links)
    inside, between, measured = _links(listed)
    if nodes == 1 and len(listed) > 1:
        problem, remedy = "one node has no link to another", "say 2 nodes, or one link alone"
        raise OptionError("links", f"{links!r}, of 1 node", problem, remedy)
    if nodes > 1 and between is None:
        known = ", ".join(LINKS)
        remedy = f"say a second one, as in nvlink,infiniband; presets: {known}"
        raise OptionError("links", f"{links!r}, of {nodes} nodes", "no link joins the nodes", remedy)
    node = devices // nodes if nodes > 1 else 0
    device = device or measured or DEFAULT_DEVICE
    return Machine({"*": inside or DEFAULT_LINK}, device, node, between if node else None)  # type: ignore[arg-type]


def _each(links: Any) -> tuple[Any, ...]:
    """The links one by one: two names may be one text, with a comma."""
    if isinstance(links, str) and "=" not in links:
        return tuple(links.split(","))
    return tuple(links) if isinstance(links, (tuple, list)) else () if links is None else (links,)


def _links(links: Sequence[Any]) -> tuple[Link | None, Link | None, Device | None]:
    """The links inside a node and between nodes, and the device of a file among them."""
    if len(links) > 2:
        problem = "there is one inside a node and one between nodes"
        raise OptionError("links", f"{links!r}", problem, "say one or two, as in nvlink,infiniband")
    found: list[Link] = []
    between: Link | None = None
    device: Device | None = None
    for each in links:
        if isinstance(each, Link) or (isinstance(each, str) and "=" not in each and not _is_file(each)):
            found.append(link_named("links", each))
            continue
        machine = machine_of(each)  # a file, or links by axis
        if not _is_file(each) and set(machine.links) != {"*"}:
            problem = "axes are chosen by the search, so they have no links yet"
            remedy = "say those inside and between nodes, as in nvlink,infiniband"
            raise OptionError("links", f"{each!r}", problem, remedy)
        found.append(machine.links.get("*") or slowest(machine.links.values() or [DEFAULT_LINK]))
        between = between or machine.between
        device = device or (machine.device if _is_file(each) else None)
    inside, *further = [*found, None][: max(1, len(found))]
    return inside, further[0] if further else between, device


def _is_file(name: Any) -> bool:
    return isinstance(name, Path) or (isinstance(name, str) and (bool(Path(name).suffix) or os.path.isfile(name)))
