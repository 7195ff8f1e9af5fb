"""The predicted time of a step: links, devices, and the timeline of a rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attending import WIDTH, Attending, draw
from gpt import gpt
from targets import mlp
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero
from shardc.api import Compiled
from shardc.cli.main import main
from shardc.costs.copies import copy_seconds
from shardc.costs.count import call_seconds, collective_seconds, on_machine, update_seconds
from shardc.costs.rings import rings_of, rings_text
from shardc.costs.stages.record import StageRecord
from shardc.costs.step import StepRecord
from shardc.costs.step_time import COMPUTING, OPTIMIZER, Slice, step_timeline
from shardc.language.errors import OptionError
from shardc.language.machine import LINKS, Device, HierarchicalLink, Link, Machine, machine_of, num_steps
from shardc.language.record import json_of
from shardc.language.words import PARTS
from shardc.program.communication import is_collective

MESH = Mesh(dp=2, tp=2)


def compiled(links: Machine, mesh: Mesh = MESH) -> Compiled:
    model, args, kwargs, annotations = gpt()
    return shardc.compile(model, mesh, annotations, args=args, kwargs=kwargs, links=links)


def machine(overlap: float = 1.0) -> Machine:
    return Machine({"*": Link(1e-4, 1e8, overlap)}, Device({"float32": 1e9}, 1e9, 1e-6))


def slices(text: str) -> list[dict[str, object]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_a_collective_takes_the_steps_of_its_ring_and_its_bytes_over_the_bandwidth() -> None:
    link = Link(1e-3, 1e6)
    assert [num_steps(kind, 8) for kind in ("all_gather", "reduce_scatter", "all_to_all")] == [7, 7, 7]  # type: ignore[arg-type]
    assert num_steps("all_reduce", 8) == 14 and num_steps("collective_permute", 8) == 1
    assert link.seconds("all_reduce", 2_000_000, 2) == pytest.approx(2.002)
    assert link.seconds("all_reduce", 0, 1) == 0 and num_steps("shard_slice", 8) == 0


def test_a_group_over_several_axes_has_the_slowest_of_their_links() -> None:
    found = machine_of({"dp": "ethernet", "tp": "nvlink"}).link(("dp", "tp"), MESH)
    assert (found.latency, found.bandwidth) == (LINKS["ethernet"].latency, LINKS["ethernet"].bandwidth)
    assert machine_of("tp=nvlink,dp=ib").link(("tp",), MESH) is LINKS["nvlink"]


def test_a_machine_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    path, found = tmp_path / "links.json", machine_of({"dp": "ib", "*": Link(1e-4, 1e9, 0.25)}, "h100")
    path.write_text(json.dumps(found.to_json()))
    assert machine_of(str(path)) == machine_of(path) == found
    assert machine_of("ib") == machine_of({"*": "ib"})


@pytest.mark.parametrize(
    ("links", "device", "message"),
    [
        (
            {"tp": "nvlnk"},
            None,
            "links['tp']: 'nvlnk'\n  there is no such link\n  did you mean nvlink or nvlink5 or nvlink4?",
        ),
        ("nvlnk", None, "links: 'nvlnk'\n  No such file or directory\n  did you mean nvlink or nvlink5 or nvlink4?"),
        ({"tp": "ib"}, "h10", "device: 'h10'\n  there is no such device\n  did you mean h100 or h200 or a100?"),
    ],
)
def test_an_invalid_link_or_device_is_refused(links: object, device: str, message: str) -> None:
    with pytest.raises(ShardingError) as caught:
        machine_of(links, device)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_link_of_no_axis_of_the_mesh_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"links\['td'\]: Mesh\(dp=2, tp=2\)\n  the mesh has no such axis"):
        compiled(machine_of({"td": "ethernet"}))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ShardingError, match="no file of shardc bench-links, version 1"):
        machine_of(str(tmp_path / "x.json"))


@pytest.mark.parametrize("overlap", [1.0, 0.25])
def test_a_collective_starts_once_its_operands_are_there_and_its_readers_wait_for_it(overlap: float) -> None:
    found = compiled(machine(overlap))
    program, timeline = found.program, found.timeline
    tasks = {task.name.name: task for task in timeline.tasks if not task.name.is_share}  # type: ignore[attr-defined]
    for node in program.calls:
        for read in node.all_input_nodes:
            producer = program.value(read)[0].name
            if node.name in tasks and producer in tasks:
                assert timeline.starts[tasks[node.name].name] >= timeline.end(tasks[producer])
    sent = [
        task for task in timeline.tasks if isinstance(task.name, Slice) and task.name.kind and not task.name.is_share
    ]
    assert [task.name.name for task in sent] == [each.name for each in found.collectives]  # type: ignore[attr-defined]
    seconds = [collective_seconds(program, each) for each in found.collectives]
    assert [task.seconds for task in sent] == seconds
    busy = sum(task.seconds for task in timeline.on(COMPUTING))
    assert busy <= timeline.makespan <= busy + sum(seconds) * overlap * (1 + 1e-12)
    assert max(timeline.starts, key=timeline.starts.__getitem__).name == OPTIMIZER  # type: ignore[attr-defined]


def test_collectives_that_take_the_processor_are_not_hidden() -> None:
    hidden, shared = compiled(machine(1.0)).timeline, compiled(machine(0.0)).timeline
    sent = sum(task.seconds for task in shared.tasks if task.name.is_share)  # type: ignore[attr-defined]
    computed = sum(task.seconds for task in hidden.on(COMPUTING))
    assert shared.makespan == pytest.approx(sent + computed) and hidden.makespan < shared.makespan


def test_times_on_another_machine_are_those_of_a_program_that_was_compiled_for_it() -> None:
    slow = Machine({"*": Link(1e-3, 1e6, 0.5)}, Device({"float32": 1e8}, 1e8, 1e-5))
    moved, own = step_timeline(on_machine(compiled(machine()).program, slow)), compiled(slow).timeline
    starts, expected = ({str(name): start for name, start in each.starts.items()} for each in (moved, own))
    assert starts == expected and moved.makespan == own.makespan
    reasons, expected_reasons = (
        {str(name): str(before) for name, before in each.reasons.items()} for each in (moved, own)
    )
    assert reasons == expected_reasons and moved.makespan > 2 * compiled(machine()).timeline.makespan


def test_the_table_adds_up_to_the_step() -> None:
    found = compiled(machine(0.25))
    entry = json_of(StepRecord(found.program).entry())
    waited = sum(each["waited"] for each in entry["collectives"])
    parts = entry["computing"] + entry["optimizer"] + entry["shared"] + waited
    assert parts == pytest.approx(entry["step"], rel=1e-4)
    assert entry["step"] == pytest.approx(found.timeline.makespan, rel=5e-6)  # it is told in six digits


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module('"><script>', nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return next(self.children())(x).square().mean()


def test_a_trace_has_every_collective_once_and_lanes_whose_slices_follow_each_other() -> None:
    found = shardc.compile(Odd(), Mesh(dp=2), {"x": P("dp")}, args=(torch.ones(4, 8),), links=machine())
    events = slices(found.timeline.chrome_trace())
    kinds = [event["cat"] for event in events if event["cat"] not in ("forward", "backward", "update")]
    assert kinds == [each.kind for each in found.collectives]
    assert any(event["name"].startswith('forward/"><script>/') for event in events)  # type: ignore[attr-defined]
    for lane in {(event["pid"], event["tid"]) for event in events}:
        ends = 0.0
        for event in (event for event in events if (event["pid"], event["tid"]) == lane):
            assert event["ts"] >= ends and event["dur"] >= 0  # type: ignore[operator]
            ends = event["ts"] + event["dur"] - 1e-6  # type: ignore[operator]


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_rings_say_what_they_send_hold_and_wait_for(axis: str) -> None:
    inputs = draw(48, dtype=torch.float32)
    cut = {"x": P(None, axis)}
    found = shardc.compile(Attending(), Mesh(cp=4), cut, kwargs=inputs, links=machine(), attention="ring")
    forward, backward = entries = rings_of(found.program)
    rings = [each for each in found.collectives if each.name.startswith("ring")]
    assert [each.wire_bytes for each in entries] == [each.wire_bytes for each in rings]
    chunks = 2 * 2 * 12 * WIDTH * 4  # keys and values of 12 positions, of two samples
    assert (forward.phase, forward.steps, forward.count, forward.wire_bytes) == ("forward", 3, 1, 3 * chunks)
    assert (forward.held, backward.wire_bytes) == (2 * chunks, 6 * chunks)
    assert (forward.busiest > 1.5) == (axis == "cp") and (forward.busiest <= 1.05) == (axis != "cp")
    events = {(event["name"], event["pid"]): event for event in slices(found.timeline.chrome_trace())}
    for entry, sent in zip(entries, rings, strict=True):
        ((name, _),) = (name for name in events if name[0].endswith(f"/{sent.name}") and name[1] == 1)
        args: Any = events[name, 1]["args"]
        assert (args["steps"], args["wire_bytes"]) == (3, entry.wire_bytes)
        assert args["waited"] == pytest.approx(1e6 * (entry.waited or 0), rel=1e-3, abs=2e-3)
    (start, meets, last) = (
        events[f"forward/(model)/{name}", place]
        for name, place in (("ring_attention", 1), ("ring_attention", 0), ("ring_attention (last chunk)", 0))
    )
    assert last["ts"] == pytest.approx(start["ts"] + start["dur"], abs=2e-3)  # not before it arrives
    assert last["dur"] == pytest.approx(meets["dur"] / 3, abs=2e-3)
    text = StepRecord(found.program).text() + rings_text(entries)
    assert "busiest / mean" in text and "waited for" in text


def test_the_time_of_a_pipeline_is_that_of_its_schedule_on_the_machine() -> None:
    model, args, kwargs, _ = mlp()
    given = {"args": args, "kwargs": kwargs, "pipeline": shardc.Pipeline(microbatches=4)}
    slow, fast = (
        shardc.compile(model, Mesh(pp=2), links={"pp": Link(latency, 1e9)}, **given).timeline  # type: ignore[arg-type]
        for latency in (1e-2, 1e-6)
    )
    assert slow.makespan > fast.makespan + 1e-2


@pytest.mark.parametrize("zero", [None, 1, 3])
def test_the_time_of_a_pipeline_counts_what_is_done_once_a_step(zero: Any) -> None:
    """On one rank all of it follows each other; on two the schedule's time is between."""
    model, args, kwargs, annotations = gpt(Mesh(dp=2))
    given = {"args": args, "kwargs": kwargs, "links": machine(), "zero": zero and Zero("dp", zero)}
    for ranks in (1, 2):
        pipeline = Pipeline(microbatches=2)
        found = shardc.compile(model, Mesh(dp=2, pp=ranks), annotations, pipeline=pipeline, **given)
        record, program = StageRecord(found.program), found.program
        calls = [
            (record.times(part), node) for stage in record.stages.stages for part in PARTS for node in stage.parts[part]
        ]
        computed = sum(times * call_seconds(program, node) for times, node in calls if not is_collective(node))
        sent = sum(each.times * collective_seconds(program, each) for each in found.collectives)
        sent += sum(times * sum(copy_seconds(program, node)) for times, node in calls)
        held = [set(stage.parameters) for stage in record.stages.stages]
        total = computed + sent + sum(update_seconds(program, names) for names in held)
        if ranks == 1:
            assert found.timeline.makespan == pytest.approx(total)
        assert record.timeline.makespan < found.timeline.makespan <= total * (1 + 1e-12)


def test_the_command_writes_a_trace_and_prints_the_same_twice(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert main(["trace", "gpt:gpt", "--mesh", "dp=2,tp=2", "--links", "tp=nvlink,dp=ib", "--device", "h100"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(slices(printed[0])) > 100


def test_an_axis_that_sends_much_over_a_slow_link_is_warned_of() -> None:
    notes = compiled(machine_of({"tp": "ethernet", "dp": "nvlink"})).program.notes
    assert [note.splitlines()[0] for note in notes] == [
        "axis tp is on ethernet: 8 collectives a step send 524.3 kB over it"
    ]
    assert "takes 680.0 us a step, and 312.0 us with dp on ethernet, tp on nvlink" in notes[0]


@pytest.mark.parametrize("links", [{"tp": "nvlink", "dp": "ethernet"}, {"tp": "ethernet", "dp": "ethernet"}, {}])
def test_there_is_no_warning_where_no_alternative_is_much_faster(links: dict[str, str]) -> None:
    assert not compiled(machine_of(links)).program.notes  # type: ignore[arg-type]


def test_an_axis_of_one_rank_has_no_link_to_gain_from() -> None:
    model, args, kwargs, annotations = gpt()
    links, pipeline = {"tp": "nvlink", "dp": "nvlink", "pp": "infiniband"}, Pipeline(microbatches=2)
    mesh = Mesh(dp=1, tp=2, pp=2)
    found = shardc.compile(model, mesh, annotations, args=args, kwargs=kwargs, links=links, pipeline=pipeline)
    assert not any("lay the mesh" in note for note in found.program.notes)


def test_nodes_that_do_not_divide_the_ranks_are_refused() -> None:
    machine_of({"*": "nvlink"}, nodes=(4, "infiniband")).check(Mesh(dp=16))
    with pytest.raises(OptionError, match=r"nodes of 6: Mesh\(dp=16\)\n  its 16 ranks are no whole number"):
        machine_of({"*": "nvlink"}, nodes=(6, "infiniband")).check(Mesh(dp=16))


def test_a_pipeline_whose_messages_are_slow_is_warned_of() -> None:
    model, args, kwargs, annotations = gpt()
    links = {"pp": Link(1e-6, 1e6, name="a wire"), "tp": Link(1e-6, 1e6, name="a wire"), "dp": LINKS["nvlink"]}
    found = shardc.compile(
        model, Mesh(pp=2, tp=2, dp=2), annotations, args=args, kwargs=kwargs, links=links,
        pipeline=shardc.Pipeline(microbatches=2),
    ).program.notes  # fmt: skip
    assert "axis tp is on a wire" in found[0] and "tp on nvlink" in found[0]


def test_a_collective_over_an_axis_that_crosses_nodes_is_hierarchical() -> None:
    machine, nvlink, ib = Machine({"*": "nvlink"}, node=8, between="infiniband"), LINKS["nvlink"], LINKS["infiniband"]  # type: ignore[dict-item, arg-type]
    link, size = machine.link(("dp",), Mesh(dp=16)), 1_600_000_000  # bytes of the whole operand
    assert isinstance(link, HierarchicalLink) and (link.num_inside, link.num_nodes) == (8, 2)
    inside, between = size * 7 // 8, size // 16  # what a rank sends of it in a node, and to its peer in the other node
    for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        seconds = link.seconds(kind, times * size * 15 // 16, 16)
        parts = nvlink.seconds(kind, times * inside, 8) + ib.seconds(kind, times * between, 2)
        assert seconds == pytest.approx(parts)
        assert (
            nvlink.seconds(kind, times * size * 15 // 16, 16) < seconds < ib.seconds(kind, times * size * 15 // 16, 16)
        )
    to_peers = nvlink.seconds("all_to_all", size * 7 // 16, 8) + ib.seconds("all_to_all", size * 8 // 16, 2)
    assert link.seconds("all_to_all", size * 15 // 16, 16) == pytest.approx(to_peers)
    assert link.seconds("collective_permute", size, 16) == ib.seconds("collective_permute", size, 16)


def test_the_last_axes_of_the_mesh_fill_a_node() -> None:
    machine, mesh = machine_of("tp=nvlink", nodes=(8, "ib")), Mesh(dp=4, sp=4, tp=4)
    assert machine.link(("tp",), mesh) is LINKS["nvlink"] and machine.link(("dp",), mesh) is LINKS["infiniband"]
    found = machine.link(("sp",), mesh)
    assert isinstance(found, HierarchicalLink) and (found.num_inside, found.num_nodes) == (2, 2)
    both = machine.link(("dp", "tp"), mesh)
    assert isinstance(both, HierarchicalLink) and (both.num_inside, both.num_nodes) == (4, 4)
    assert machine.link(("sp:(2)2",), mesh) is machine.of_axis("sp")  # the two that are neighbours
    assert machine.link(("dp",), Mesh(dp=3)) is machine.of_axis("dp")
    assert machine.of_stages("pp", 16) is LINKS["infiniband"] and machine.of_stages("tp", 8) is LINKS["nvlink"]
    for node, between in ((8, None), (0, "ib"), (-1, "ib")):
        with pytest.raises(OptionError, match="a node has a size, and a link to other nodes"):
            Machine({}, node=node, between=between)  # type: ignore[arg-type]


def test_dump_and_trace_say_which_collectives_cross_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["targets:mlp", "--mesh", "dp=2,tp=4", "--links", "*=nvlink", "--nodes", "2=infiniband"]
    assert main(["dump", *command, "--only", "time"]) == 0
    assert "nvlink in nodes of 2 and infiniband between 2" in capsys.readouterr().out
    assert main(["trace", *command]) == 0
    assert "collectives over tp by nvlink in nodes of 2 and infiniband between 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["dump", *command[:-1], "2=infinband"])
    assert "did you mean infiniband" in capsys.readouterr().err
