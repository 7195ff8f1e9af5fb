"""How the benchmark divides its time among rows, when rounds end, and which ratios they give."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from bench import chosen, parse
from breakdown import Clock
from budget import AROUND, Budget, Need, Use, level
from rounds import FIRST_LOOK, SCENE, Ratio, Steps, everyone_first, is_look, ratio, take_rounds
from row import ONE_DEVICE


def by_round(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds))


def test_a_ratio_is_of_medians_and_of_rounds_with_an_interval_that_holds_it() -> None:
    found = ratio(by_round(2.0, 2.2, 1.8, 2.0, 2.1), by_round(1.0, 1.1, 0.9, 1.0, 1.0))
    assert found.medians == found.paired == 2.0 and found.low <= 2.0 <= found.high
    same = ratio(by_round(*[3.0] * 4), by_round(*[2.0] * 4))
    assert same.low == same.high == 1.5


def test_rounds_that_slow_both_down_do_not_move_the_paired_ratio() -> None:
    found = ratio(by_round(1.0, 9.0, 1.1, 7.0), {0: 1.0, 1: 9.0, 3: 7.0, 4: 50.0})
    assert found == Ratio(1.0, 1.0, 1.0, 1.0)  # rounds of one of them alone do not count


def test_a_row_has_as_many_seconds_as_each_other_that_has_more_than_its_fewest_rounds() -> None:
    assert level([10.0, 40.0, 10.0], 100.0) == 30.0  # the one that needs 40 leaves 60 to two
    assert level([10.0, 20.0], 100.0) == 50.0
    assert level([30.0, 30.0], 50.0) == 0.0


def test_time_goes_where_it_tells_something_and_what_a_row_leaves_to_those_after_it() -> None:
    now = [0.0]
    short, long = Need(fixed=5.0, round=1.0, fewest=5), Need(fixed=10.0, round=6.0, fewest=5)
    needs = [long, short, short, replace(short, use=Use.BOUND), replace(short, use=Use.IF_LEFT)]
    budget = Budget(100.0, needs, clock=lambda: now[0])
    assert budget.share() == 25.0  # less than its fewest rounds take: two have 25 each, it its 40, what is bound its 10
    now[0] = 40.0
    budget.note(rounds=5)
    assert budget.share() == 25.0
    now[0] = 55.0
    budget.note(rounds=10)
    assert budget.share() == 35.0
    now[0] = 85.0
    budget.note(rounds=25)
    assert budget.share() == 0.0  # no more than its fewest
    now[0] = 90.0
    budget.note(rounds=5)
    assert budget.left == 10.0 and budget.share() == 10.0


def test_where_time_is_short_rows_are_left_out_but_what_is_bound_is_in_every_run() -> None:
    now = [0.0]
    row = Need(fixed=0.0, round=2.0, fewest=5)
    needs = [row, row, row, replace(row, use=Use.BOUND), replace(row, use=Use.BYTES)]
    budget = Budget(60.0, needs, clock=lambda: now[0])
    assert budget.share() == 10.0 + 10.0 / 3
    now[0] = 20.0
    budget.note(rounds=5)  # half as fast as was thought: 20 s a row, 40 left
    assert budget.share() is None  # two are to come that it gives way to
    assert budget.share() == 0.0
    now[0] = 40.0
    budget.note(rounds=5)
    assert budget.share() == 0.0
    now[0] = 60.0
    budget.note(rounds=5)
    assert budget.share() is None


def test_on_slow_processors_large_rows_give_way_to_small_ones_before_and_after_them() -> None:
    now = [0.0]
    row = Need(fixed=0.0, round=2.0, fewest=5)
    budget = Budget(50.0, [row, replace(row, use=Use.LARGE), row], clock=lambda: now[0])
    assert budget.share() == 50.0 / 3
    now[0] = 20.0
    budget.note(rounds=5)  # half as fast as was thought: 20 s a row, 30 left
    assert budget.share() is None
    assert budget.share() == 30.0


def test_ten_minutes_are_enough_for_the_fewest_rounds_of_every_row_that_is_timed() -> None:
    now, rounds = [0.0], dict[str, int]()
    rows = chosen(parse([]))
    budget = Budget(600.0 - AROUND, [each for _, each in rows], clock=lambda: now[0])
    for row, needed in rows:
        share = budget.share()
        if share is None:
            assert needed.use is Use.IF_LEFT
            continue
        rounds[f"{row.plan} {row.title}"] = taken = max(needed.fewest, int((share - needed.fixed) / needed.round))
        now[0] += needed.seconds(taken)
        budget.note(taken)
    assert min(rounds.values()) >= 5 and rounds["tensor tiny x2"] >= 150
    assert 570 <= now[0] <= 600.0 - AROUND


def test_one_device_is_in_the_first_row_of_its_model_alone() -> None:
    rows = [row for row, _ in chosen(parse([]))]
    assert {row.title for row in rows if row.with_device and row.ways.microbatches == 1} == (
        {"medium x4", "small x4", "tiny x2"}
    )
    assert len({row.model for row in rows}) == sum(row.with_device for row in rows)


def test_a_ratio_is_known_by_its_width_and_not_by_the_side_of_one_on_which_it_lies() -> None:
    noise = by_round(*[1.0, 1.02, 0.98, 1.01, 0.99, 1.0] * 4)
    theirs = by_round(*[1.0] * 24)
    for scale in (0.5, 0.94, 0.99, 1.0, 1.01, 1.06, 2.0):
        found = ratio({i: scale * each for i, each in noise.items()}, theirs)
        assert found.is_within(0.015) and not found.is_within(0.001), scale
    assert not Ratio(1.0, 1.0, 0.96, 1.0).is_within(0.015)
    assert Ratio(1.0, 1.0, 0.98, 1.009).is_within(0.015)


@dataclass
class Scripted:
    """A way to train whose steps take what is written."""

    name: str
    seconds: Callable[[int], float]
    steps: dict[int, Clock] = field(default_factory=dict)

    def timed_step(self, number: int) -> None:
        self.steps[number] = Clock(self.seconds(number), 0.0, 0.0, 0.0)


@pytest.mark.parametrize("scale", [0.9, 1.0, 1.1])
def test_rounds_end_when_the_ratio_is_known_whatever_it_is(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"get_rank": lambda: 0, "broadcast": lambda *_: None, "all_reduce": lambda *_: None}
    monkeypatch.setattr("rounds.dist", SimpleNamespace(ReduceOp=dist.ReduceOp, **alone))
    device, far = Scripted(ONE_DEVICE, lambda i: 1.0), Scripted("DTensor plan", lambda i: 3.0)
    peer = Scripted("Megatron by hand", lambda i: 1.0 + i % 3)  # slow rounds are slow for both
    quiet = Scripted("shardc tp", lambda i: scale * (1.0 + i % 3))
    take_rounds([device, far, peer, quiet], Steps(least=5, most=100), time.perf_counter())
    assert len(device.steps) == len(far.steps) == SCENE
    assert len(peer.steps) == len(quiet.steps) == FIRST_LOOK
    noisy = Scripted("shardc tp", lambda i: scale * (1.0 + i % 3) * (1.0, 1.2, 0.9)[i // 3 % 3])
    peer.steps.clear()
    take_rounds([peer, noisy], Steps(least=5, most=40), time.perf_counter())
    assert len(noisy.steps) == 40
    late = Scripted("shardc tp", lambda i: scale)
    take_rounds([peer, late], Steps(least=5, most=40, seconds=0.0), time.perf_counter())
    assert len(late.steps) == 5
    for least in (1, 5):
        last = Scripted("shardc tp", lambda i: scale)
        take_rounds([peer, last], Steps(least, most=40, latest=0.0), time.perf_counter())
        assert len(last.steps) == SCENE


def test_it_is_asked_seldom_whether_enough_is_known() -> None:
    assert [i for i in range(1, 40) if is_look(i)] == [10, 12, 15, 18, 22, 27, 33]


def test_every_participant_follows_every_other() -> None:
    orders = ["".join(everyone_first("abc", i)) for i in range(4)]  # type: ignore[arg-type,type-var]
    assert orders == ["abc", "bca", "cab", "abc"]
