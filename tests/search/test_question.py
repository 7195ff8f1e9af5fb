"""The arguments of ``suggest`` as a task: devices in nodes, their links and memory, and what is fixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardc.language.cluster import cluster
from shardc.language.errors import OptionError
from shardc.language.machine import DEFAULT_DEVICE, DEFAULT_LINK, DEVICES, LINKS, Device, Link, Machine, load
from shardc.search.question import question
from shardc.search.task import Task


def asked(**changes: Any) -> Task:
    arguments = {
        "devices": 16, "annotations": None, "memory": None, "links": "nvlink", "device": None, "nodes": 1, "fix": {},
        "objective": "time", "optimizer": "adamw", "remats": [],
    }  # fmt: skip
    return question(**{**arguments, **changes})


def test_a_device_that_is_named_has_its_memory_and_others_have_no_limit() -> None:
    assert asked(device="h200").memory == 141e9 and asked(device="h200", memory="80GB").memory == 80e9
    assert asked().memory == asked(device="h100", memory=float("inf")).memory == float("inf")
    assert asked(device=Device({"float32": 1e13}, 1e12, capacity=7)).memory == 7


@pytest.mark.parametrize(("text", "count"), [("80GB", 80e9), ("1.5 kB", 1500), ("2GiB", 2**31), (12345, 12345)])
def test_memory_is_read(text: str | int, count: float) -> None:
    assert asked(memory=text).memory == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "80 hectares", "nan"])
def test_memory_that_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="it is no number of bytes"):
        asked(memory=text)


def test_links_are_inside_a_node_and_between_nodes() -> None:
    two = Machine({"*": LINKS["nvlink"]}, DEVICES["a100"], 8, LINKS["infiniband"])
    assert cluster("nvlink,ib", "a100", 16, 2) == cluster(("nvlink", LINKS["infiniband"]), "a100", 16, 2) == two
    assert cluster(two, None, 16, 2) is two and cluster(two, "h100", 16, 2).device is DEVICES["h100"]
    assert cluster(None, None, 4, 1) == Machine({"*": DEFAULT_LINK}, DEFAULT_DEVICE)


def test_links_and_devices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    measured = Machine({"dp": Link(1e-5, 1e9), "tp": Link(1e-6, 1e10)}, DEVICES["cpu"])
    path.write_text(json.dumps(measured.to_json()))
    found = cluster(path, None, 4, 1)
    assert found.device == DEVICES["cpu"] and (found.links["*"].latency, found.links["*"].bandwidth) == (1e-5, 1e9)
    assert cluster("nvlink", str(path), 4, 1) == Machine({"*": LINKS["nvlink"]}, DEVICES["cpu"])
    assert cluster(f"{path},ethernet", None, 4, 2).between is LINKS["ethernet"]


def test_a_capacity_is_written_where_it_is_known_and_read_back(tmp_path: Path) -> None:
    known, unknown = Machine({}, DEVICES["b200"]), Machine({}, DEVICES["cpu"])
    assert "capacity" in known.to_json()["device"] and "capacity" not in unknown.to_json()["device"]
    for each in (known, unknown):
        (tmp_path / "links.json").write_text(json.dumps(each.to_json()))
        assert load(tmp_path / "links.json") == each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "devices: 0\n  it is a whole number from 1 on"),
        (
            {"nodes": 3},
            "nodes=3: 16 devices\n  nodes have equal numbers of devices\n  say a number of nodes that divides",
        ),
        ({"nodes": 2}, "no link joins the nodes"),
        ({"links": "nvlnk"}, "links: 'nvlnk'\n  there is no such link\n  did you mean nvlink"),
        ({"links": ("nvlink", "ib", "ib")}, "there is one inside a node and one between nodes"),
        ({"links": {"tp": "nvlink", "dp": "ib"}}, "axes are chosen by the search, so they have no links yet"),
        ({"device": "h10"}, "device: 'h10'\n  there is no such device\n  did you mean h100"),
        ({"fix": {"tp": 3}}, "a plan cannot have it\n  say a size that divides 16 devices"),
        ({"fix": {"tq": 4}}, "a plan has no such part\n  did you mean tp?"),
        ({"fix": {"mesh": "8x3"}}, "a plan cannot have it\n  say sizes of its axes with the product 16"),
        ({"devices": 1, "fix": {"mesh": "x"}}, "a plan cannot have it\n  say sizes of its axes with the product 1"),
        ({"fix": {"zero": 5}}, "say a stage, 0 to 3, or None"),
        ({"fix": {"remat": "h.*"}}, "say None or a shardc.Remat"),
        ({"fix": {"overlap": "rings"}}, "a plan cannot have it\n  say None, or one of auto, ring"),
        ({"fix": {"saved": "host"}}, "a plan cannot have it\n  say None, or {'blocks.*': 'host'}"),
        ({"fix": {"local": None}}, "a plan has no such part"),
        ({"fix": {"mesh2": 4}}, "a plan has no such part\n  did you mean mesh?"),
        ({"objective": "tim"}, "there is no such objective\n  did you mean time?"),
        ({"optimizer": "adamv"}, "its states are not known\n  did you mean adam"),
    ],
)
def test_an_argument_without_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        asked(**changes)
    assert message in str(raised.value)


def test_presets_are_below_their_data_sheets() -> None:
    """Nominal figures of one direction, in bytes a second, and of memory in bytes."""
    links = {
        "nvlink": 4.5e11, "nvlink3": 3e11, "nvlink5": 9e11, "pcie": 3.2e10, "pcie5": 6.4e10, "infiniband": 5e10,
        "hdr": 2.5e10, "xdr": 1e11, "ethernet": 3.125e9, "ethernet100": 1.25e10,
    }  # fmt: skip
    assert all(0.6 < LINKS[name].bandwidth / nominal < 0.95 for name, nominal in links.items())
    devices = {  # 16-bit products, float32 products, memory
        "a100": (3.12e14, 1.95e13, 2.04e12), "h100": (9.89e14, 6.7e13, 3.35e12), "h200": (9.89e14, 6.7e13, 4.8e12),
        "b200": (2.25e15, 7.5e13, 8e12), "l40s": (3.62e14, 9.16e13, 8.64e11),
    }  # fmt: skip
    for name, (half, single, memory) in devices.items():
        device = DEVICES[name]
        reached = (device.flops["bfloat16"] / half, device.flops["float32"] / single, device.memory / memory)
        assert all(0.6 < part < 0.8 for part in reached) and device.name == name and device.capacity, (name, reached)
