"""Measuring a machine: fits to given times, and a real measurement with two processes."""

import json
import time
from pathlib import Path

import pytest
from gloo_pool import GlooPool

from shardc import Mesh
from shardc.cli.main import main
from shardc.language.machine import Link, machine_of
from shardc.program.collective import wire_bytes
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh
from shardc.runtime.measure.links import Bench, Beside, Case, Computed, Sent, fitted_device, fitted_link, time_together

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def sent(link: Link, noise: float = 1.0) -> list[Sent]:
    """What a link takes, every second collective longer by a part."""
    found = []
    for i, payload in enumerate((2**12, 2**16, 2**20, 2**24)):
        for kind in KINDS:
            nbytes = wire_bytes(kind, payload, 4)  # type: ignore[arg-type]
            seconds = link.seconds(kind, nbytes, 4) * (noise if i % 2 else 1)  # type: ignore[arg-type]
            found.append(Sent("dp", kind, 4, nbytes, (seconds, seconds * 9, seconds / 9)))  # type: ignore[arg-type]
    return found


def test_a_fit_finds_the_link_that_made_the_times() -> None:
    link = Link(2e-4, 1.5e9)
    found = fitted_link(sent(link), [Beside("dp", (0.02,), (0.01,), (0.0275,))])
    assert (found.latency, found.bandwidth) == (pytest.approx(2e-4), pytest.approx(1.5e9))
    assert found.overlap == pytest.approx(0.25)
    rough = fitted_link(sent(link, noise=1.2), [])
    assert rough.latency == pytest.approx(2e-4, rel=0.2) and rough.bandwidth == pytest.approx(1.5e9, rel=0.2)


def test_messages_to_one_rank_have_a_rate_of_their_own() -> None:
    link = Link(2e-4, 1e9, kinds=(("send", 1e-4, 4e9),))
    messages = [Sent("dp", "send", 4, size, (link.seconds("send", size, 4),)) for size in (2**12, 2**16, 2**20, 2**24)]
    found = fitted_link([*sent(link), *messages], [])
    assert (found.latency, found.bandwidth) == (pytest.approx(2e-4), pytest.approx(1e9))
    for kind in ("send", "recv", "collective_permute"):
        assert found.of_kind(kind) == (pytest.approx(1e-4), pytest.approx(4e9))


@pytest.mark.parametrize("link", [Link(0, 1e9), Link(1e-3, 1e15)])
def test_a_link_that_is_all_bandwidth_or_all_latency_has_no_negative_part(link: Link) -> None:
    found = fitted_link(sent(link, noise=1.3), [])
    assert found.latency >= 0 and found.bandwidth > 0


def test_a_device_has_the_rates_of_all_calls_together() -> None:
    device = fitted_device(
        [
            Computed("mm", "flops", 100, 0, (1.0,)),
            Computed("mm", "flops", 300, 0, (1.0,)),
            Computed("mm", "flops", 100, 0, (1.0,), "float64"),
            Computed("attention", "attention", 50, 0, (0.5,)),
            Computed("add", "memory", 0, 40, (2.0,)),
            Computed("AdamW", "update", 0, 60, (2.0,)),
            Computed("add", "call", 0, 0, (0.1, 0.2, 5.0)),
        ],
        "it",
    )
    assert device.flops == {"float32": 200, "float64": 100} and device.attention == 0.5
    assert (device.memory, device.update, device.call) == (20, 30, 0.2)


def test_a_wait_for_a_shared_processor_counts_for_all_computation_alike() -> None:
    def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def compute_and_wait() -> None:
        compute(0.04)
        time.sleep(0.12)  # as a rank does while others run

    once, twice, waiting = Case(lambda: compute(0.02)), Case(lambda: compute(0.02), 2), Case(compute_and_wait)
    start = time.perf_counter()
    time_together([once, twice, waiting])
    took = time.perf_counter() - start
    (first,), (second,), (third,) = once.seconds, twice.seconds, waiting.seconds
    assert first + 2 * second + third == pytest.approx(took, rel=0.02)
    assert second == pytest.approx(first, rel=0.1) and third == pytest.approx(2 * first, rel=0.1)


def measured(mesh: Mesh) -> dict[str, object]:
    bench = Bench(TorchComm(make_device_mesh(mesh)))
    bench.round()
    return bench.machine().to_json()


@pytest.mark.sweep
def test_all_ranks_agree_on_a_link_for_each_axis(gloo: GlooPool) -> None:
    first, *others = gloo.run(measured, Mesh(dp=2, tp=2))
    assert all(each == first for each in others)
    assert list(first["links"]) == ["dp", "tp"]
    assert all(0 < link["bandwidth"] < 1e11 for link in first["links"].values())
    assert 1e8 < first["device"]["flops"]["float32"] < 1e13


@pytest.mark.sweep
def test_the_command_measures_local_processes_and_other_commands_read_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "links.json")
    assert main(["bench-links", "--ranks", "2", "--rounds", "1", "-o", path]) == 0
    assert list(machine_of(path).links) == ["*"]
    capsys.readouterr()
    command = ["dump", "gpt:gpt", "--mesh", "dp=2,tp=2", "--links", path, "--only", "time", "--format", "json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["time"]["step"] > 0
