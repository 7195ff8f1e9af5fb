"""Pictures of a schedule: text, SVG and a Chrome trace."""

import json
from xml.etree import ElementTree

import shardc
from shardc.schedules.simulate import Costs, StageCost


def test_text_shows_each_rank_over_time() -> None:
    assert shardc.schedule("zb-h1", 3, 3).simulate().text() == (
        "rank 0 F0-F1-F2-......I0-W0-I1-W1-I2-W2-\n"
        "rank 1 ...F0-F1-...I0-F2-I1-W0-I2-W1-W2-\n"
        "rank 2 ......F0-I0-F1-I1-F2-I2-W0-W1-W2-\n"
        "makespan 11 s, bubble 2 s, longest gap 2 s, idle 18.18%\n"
        "peak 3 B, 3 B, 3 B\n"
    )


def test_text_keeps_to_its_width_and_shows_the_kind_where_there_is_no_room() -> None:
    lines = shardc.schedule("1f1b", 2, 12).simulate().text(width=40).splitlines()
    assert all(len(line) <= 47 for line in lines[:2]) and lines[0].startswith("rank 0 FF")


def test_svg_has_a_box_for_every_computation() -> None:
    found = shardc.schedule("1f1b", 3, 4).with_reductions().simulate(StageCost(reduce=1))
    boxes = ElementTree.fromstring(found.svg()).findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 3 * 4 * 2 + 3
    assert sum(box.get("stroke") == "black" for box in boxes) == sum(bool(t.seconds) for t in found.critical_path)


def test_the_trace_has_every_computation_and_message_in_microseconds() -> None:
    found = shardc.schedule("gpipe", 2, 3).simulate(Costs((StageCost(),) * 2, latency=0.5))
    events = json.loads(found.chrome_trace())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * 3 * 2 + 2 * 3
    assert max(event["ts"] + event["dur"] for event in slices) == found.makespan * 1e6
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        "rank 0",
        "rank 1",
        "channel (0, 1)",
        "channel (1, 0)",
    ]
