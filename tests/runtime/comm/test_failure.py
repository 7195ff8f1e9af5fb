"""A rank fails: the others end at once, and say which collective they waited in and which rank is gone."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from failing_job import KINDS, PHASES, PLANS, VICTIM, Failure, Report, run_job

from shardc import Mesh
from shardc.language.errors import CommunicationError
from shardc.runtime.comm.failure import waiting

SECONDS = 3.0  # from the failure to the last error
TIMEOUT = 4.0  # of the jobs whose rank is stopped
ENDINGS = {
    "killed": "is gone",
    "terminated": "is gone",
    "stopped": "is stopped",
    "raises": "failed: ValueError: this rank has a problem",
    "exits": "is gone",
    "out of memory": "failed: MemoryError",
}


def check(failure: Failure, reports: list[Report]) -> None:
    """All other ranks have named the collective, its axis, its ranks and the rank that failed, in time."""
    names = PLANS[failure.plan][0]
    others = [rank for rank in range(Mesh(**names).size) if rank != VICTIM]
    assert [each.rank for each in reports] == others, (failure, reports)
    ending = ENDINGS[failure.kind]
    if failure.phase == "optimizer" and ending.startswith("failed"):
        ending = "is gone"  # its error was raised outside of shardc, and did not end the interpreter
    what = rf"[\w ]+ \(.*\) over ({'|'.join(names)})"
    if failure.phase in ("compile", "optimizer"):  # they come to the next call, or read gradients
        what = r"the agreement of all ranks before this rank (compares|calls|reads).* of Model.*"
    for each in reports:
        if failure.phase == "compile" and ending.startswith("failed"):  # it has told them
            assert each.kind == "RankError" and each.text.startswith(f"rank {VICTIM} {ending}\n"), (failure, each)
            assert each.seconds < SECONDS, (failure, each)
            continue
        assert each.kind == "CommunicationError", (failure, each)
        assert re.fullmatch(rf"{what}, ranks [\d, ]+: rank {VICTIM} {ending}", each.text), (failure, each)
        assert failure.phase == "compile" or "/gloo/" in each.cause or "pair closure" in each.cause, (failure, each)
        assert each.seconds < SECONDS + TIMEOUT * (failure.kind == "stopped"), (failure, each)


def check_job(failure: Failure) -> list[Report]:
    reports = run_job(failure, TIMEOUT if failure.kind == "stopped" else 60)
    check(failure, reports)
    return reports


QUICK = [
    Failure("dp and tp", "killed", "forward"),
    Failure("zero 3", "raises", "first collective"),
    Failure("pipeline", "terminated", "backward"),
    Failure("dp", "out of memory", "compile"),
    Failure("tp", "stopped", "optimizer"),
]


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("failure", QUICK, ids=str)
def test_the_other_ranks_name_the_collective_and_the_rank_that_fails(failure: Failure) -> None:
    texts = [each.text for each in check_job(failure)]
    if failure.plan == "dp and tp":
        one, *others = (re.sub(r"failing_job.py:\d+", "failing_job.py:7", text) for text in texts)
        assert one == "all_reduce_tp_1 (layers.1.down, failing_job.py:7) over tp, ranks 0, 1: rank 1 is gone"
        assert others == [
            "all_reduce_dp (failing_job.py:7) over dp, ranks 0, 2: rank 1 is gone",  # a rank that never met rank 1
            "all_reduce_dp (failing_job.py:7) over dp, ranks 1, 3: rank 1 is gone",
        ]
    if failure.plan == "zero 3":
        assert re.match(
            r"all_gather_dp_bucket \(layers.0.up, failing_job.py:\d+, with layers_0_up_weight and", texts[0]
        )
    if failure.plan == "pipeline":
        assert texts[0].startswith("the message from stage 1 to stage 0 (input_gradient, microbatch 0) over pp")


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("plan", ["dp", "zero 3", "pipeline"])
def test_ctrl_c_ends_a_rank_that_waits_for_another(plan: str) -> None:
    (report,) = run_job(Failure(plan, "sleeps", "forward"), interrupted=0)
    assert report.kind == "KeyboardInterrupt" and report.seconds < SECONDS, report


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stopped"])
def test_every_kind_of_failure_at_every_phase_is_named(plan: str, kind: str) -> None:
    for phase in PHASES:
        check_job(Failure(plan, kind, phase))


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("plan", PLANS)
def test_a_stopped_rank_is_named_at_the_timeout_of_the_job(plan: str) -> None:
    failures = [Failure(plan, "stopped", phase) for phase in PHASES]
    with ThreadPoolExecutor(len(failures)) as pool:
        list(pool.map(check_job, failures))


def test_a_wait_that_fails_once_the_process_group_is_destroyed_says_so() -> None:
    """Another thread may destroy it, as Ray does when it stops its workers."""
    with pytest.raises(CommunicationError) as failed, waiting(lambda: "all_reduce_dp over dp", (0, 1)):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert str(failed.value) == "all_reduce_dp over dp, ranks 0, 1: this process has destroyed its process group"
