"""The benchmark: its smallest rows run, and their figures are right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from breakdown import STEP, Clock, Event, Spent, own_times, spent
from figures import Figures, figures, is_fast, is_small, summary, verdicts
from measure import Report, measure
from ours import PLANS
from predict import compare
from report import HEADER, brief, markdown, write
from rounds import Ratio, Steps, ratio, ratio_apart
from row import PEERS, ROWS, Row, is_ours
from trainer import SIZES, Job, batches

from shardc.runtime.comm.launch import launch

DATA = Row("data", "small", Job(2))


def by_round(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds))


def a_figure(name: str, seconds: float, peer: float = 1.0, **changes: object) -> Figures:
    times, theirs = by_round(*[seconds] * 5), by_round(*[peer] * 5)
    found = ratio(times, theirs)
    held = ("DDP", found) if is_ours(name) else (None, None)
    figure = Figures(
        name, seconds, seconds, found, *held, 1.0, 21.0e6, 21_000_000, 2.0, 2, 80, 200, 0.0, Spent(0.5), times
    )
    return replace(figure, **changes)


@pytest.mark.sweep
def test_everyone_in_a_row_trains_alike_and_is_weighed(tmp_path: Path) -> None:
    row = Row("data", "tiny", Job(2))
    found = figures(row, launch(measure, 2, row, Steps(least=2, most=3), private_network=True))
    assert [each.name for each in found] == ["one device", *ROWS["data"].names]
    assert max(each.loss_difference for each in found) <= 1e-5
    for each in found[1:]:
        check(each)
    write(tmp_path, [(row, found)])
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["results"][1]["name"] == row.names[1]
    assert len(markdown([(row, found)]).splitlines()) == 2 + len(found)


@pytest.mark.sweep
def test_a_pipeline_sends_what_enters_each_stage_and_its_gradient_alone() -> None:
    row = Row("pipeline", "tiny", Job(2))
    found = figures(row, launch(measure, 2, row, Steps(least=2, most=3), private_network=True))
    assert max(each.loss_difference for each in found) <= 1e-5
    config, batch = SIZES["tiny"].config, SIZES["tiny"].batch
    both_ways = 2 * batch * config.context * config.width * 4
    for each in found:
        if each.is_ours:
            assert each.announced is not None and 0 <= 2 * each.announced - both_ways <= 16, each.name  # and the loss
            assert each.wire is None or each.wire <= 1.2 * each.announced


def check(figure: Figures) -> None:
    assert figure.collectives > 0 and 0 < figure.persistent < figure.peak
    assert (figure.announced is not None) == figure.is_ours
    assert figure.spent.products > 0 and figure.spent.optimizer > 0
    if figure.announced and figure.wire and figure.multiple:  # small messages: headers and acknowledgements count too
        assert 1 <= figure.wire / figure.announced < 1.2
        assert 2 <= figure.multiple < 2.4


def test_the_best_peer_is_one_that_took_part_to_the_end() -> None:
    def report(*seconds: float, losses: tuple[float, ...] = (3.0, 2.0), wire: int = 0) -> Report:
        steps = {i: Clock(each, each, each, 0.0) for i, each in enumerate(seconds)}
        return Report(parameters=1000, losses=list(losses), steps=steps, wire=[wire])

    row = Row("tensor", "small", Job(2))
    seconds = {"one device": (2.0, 2.0), "DTensor plan": (0.9, 0.9), "DTensor weights": (3.0, 3.0)}
    seconds |= {"Megatron by hand": (1.0, 1.0, 1.0), "shardc tp": (1.0, 1.1, 0.9)}
    first = {name: report(*each, wire=16_000) for name, each in seconds.items()}
    second = {name: report(*each) for name, each in seconds.items()}
    ours = figures(row, [first, second | {"shardc tp": report(1.0, 1.2, 0.8, losses=(3.0, 2.5))}])[-1]
    assert ours.peer == "Megatron by hand" and ours.samples == {0: 1.0, 1: 1.2, 2: 0.9}
    assert ours.wire == 8000 and ours.multiple == 4.0
    assert ours.loss_difference == 0.25


@pytest.mark.parametrize(
    ("found", "limit", "holds"),
    [
        (Ratio(1.00, 1.02, 1.01, 1.03), 1.0, True),
        (Ratio(1.02, 1.02, 0.99, 1.05), 1.0, True),
        (Ratio(1.02, 1.02, 1.01, 1.05), 1.0, False),
        (Ratio(1.05, 1.04, 0.90, 1.20), 1.0, False),
        (Ratio(0.95, 0.96, 0.90, 1.01), 0.95, True),
        (Ratio(0.97, 0.96, 0.90, 1.01), 0.95, False),
    ],
)
def test_a_ratio_holds_within_its_limit_or_as_a_draw(found: Ratio, limit: float, holds: bool) -> None:
    assert is_fast(found, limit) is holds


def test_counted_bytes_are_held_to_those_announced_and_to_the_bound() -> None:
    good = a_figure("shardc dp", 1.0)
    assert is_small(good) is is_small(replace(good, wire=21.1e6)) is True
    assert is_small(replace(good, wire=22.0e6)) is is_small(replace(good, multiple=2.1)) is False
    assert is_small(replace(good, wire=None)) is is_small(replace(good, announced=9_000_000)) is None


def test_a_verdict_names_ratio_limit_and_wire_and_says_why_a_peer_is_ahead() -> None:
    ahead = [a_figure("one device", 1.5), a_figure("DDP", 1.0), a_figure("shardc dp", 0.9)]
    behind = [*ahead[:2], a_figure("shardc dp", 1.2, multiple=2.5)]
    assert verdicts(DATA, ahead) == [
        "data, small x2: shardc dp: 0.90 of DDP, paired 0.90 (0.90 to 0.90) by 5 rounds, at most 1.00: holds; "
        "wire +0.0% of what is announced, 2.00 Psi of 2.00: holds"
    ]
    lines = verdicts(DATA, behind)
    assert "does not; wire" in lines[0] and "2.50 Psi of 2.00: does not" in lines[0]
    assert lines[1].startswith("  DDP, ms a step: 1000.0; products 500.0, ") and lines[2].startswith("  shardc dp, ")
    assert len(verdicts(DATA, ahead, with_profile=True)) == 3
    medium = replace(DATA, size="medium")
    assert summary([(DATA, ahead), (medium, behind)]) == (
        "step time holds in 1 of 2; does not: data medium x2 (shardc dp)\n"
        "wire holds in 1 of 2; does not: data medium x2 (shardc dp)"
    )
    short = [*ahead[:2], replace(ahead[2], samples=by_round(0.9, 0.9))]
    assert "by 2 rounds, at most 1.00: too few rounds; wire" in verdicts(DATA, short)[0]
    assert summary([(DATA, short)]).startswith("step time holds in 0 of 0\n")
    assert {len(line.split(" | ")) for line in markdown([(DATA, ahead)]).splitlines()} == {len(HEADER)}


def test_in_brief_each_of_ours_stands_beside_its_peer() -> None:
    found = [a_figure("one device", 2.0), a_figure("DDP", 1.0), a_figure("shardc dp", 0.9, wire=10.6e6)]
    *_, line = brief([(DATA, found)]).splitlines()
    assert line == "| shardc dp | DDP | small x2 | 0.90 | 0.90 (0.90 to 0.90) | 5 | 10.60 | 21.00 | 0.00 | 0.00 |"


def test_each_row_holds_a_plan_of_ours_to_a_peer() -> None:
    for plan, ways in ROWS.items():
        assert all(name in (PLANS if is_ours(name) else PEERS) for name in (*ways.far, *ways.names)), plan
        assert 0 < sum(map(is_ours, ways.names)) < len(ways.names)


def test_microbatches_have_as_many_tokens_as_the_batch() -> None:
    (one, *_), (eight, *_) = (batches(SIZES["tiny"].shorter(parts), microbatches=parts) for parts in (1, 8))
    assert one.shape == (1, 2, 8, 64) and eight.shape == (8, 2, 8, 8)


def test_a_row_without_one_device_is_held_to_its_losses_and_steps_in_another() -> None:
    def report(seconds: float, losses: tuple[float, ...]) -> Report:
        return Report(1000, losses=list(losses), steps={i: Clock(seconds, seconds, 0.0, 0.0) for i in range(5)})

    row = Row("data", "small", Job(2), with_device=False)
    rank = {"DDP": report(1.0, (3.0, 2.0)), "shardc dp": report(1.0, (3.0, 2.25))}
    found = figures(row, [rank, rank], report(2.0, (3.0, 2.0, 1.0)))
    assert [each.name for each in found] == ["DDP", "shardc dp"] == list(row.names)
    assert found[1].to_device == ratio_apart([1.0], [2.0]) == Ratio(0.5, 0.5, 0.5, 0.5)
    assert len(markdown([(row, found)]).splitlines()) == 2 + len(found)
    assert found[1].loss_difference == 0.25 and found[1].to_peer == Ratio(1.0, 1.0, 1.0, 1.0)


def test_where_time_goes_is_told_from_nested_events() -> None:
    events = [
        Event(STEP, 0, 10_000_000_000),
        Event("aten::linear", 0, 3_000_000_000),
        Event("aten::addmm", 0, 2_000_000_000),
        Event("c10d::allreduce_", 4_000_000_000, 1_000_000_000),
        Event("aten::copy_", 4_000_000_000, 500_000_000),
        Event("Optimizer.step#AdamW.step", 6_000_000_000, 2_000_000_000),
        Event("aten::mul", 6_000_000_000, 1_000_000_000),
    ]
    times = {path[-1]: duration / 1e9 for path, duration in own_times(events)}
    assert times[STEP] == 4 and times["aten::linear"] == 1 and times["c10d::allreduce_"] == 0.5
    profiled, timed = Clock(10, 8, 4, 4), Clock(9, 8, 6, 1)  # half of the profiled step no processor was free
    assert spent(events, profiled, [timed]) == Spent(1.0, 0.5, 1.0, dispatch=3.5, waiting=2.0, network=2.0)


@pytest.mark.sweep
def test_a_prediction_stands_beside_every_measured_step() -> None:
    row = Row("data", "tiny", Job(2), is_full=False)
    machine, found = launch(compare, 2, [row], 1, 1)[0]
    assert set(machine.links) == {"*"}
    for name, entry, seconds in found:
        assert is_ours(name) and len(seconds) == 1
        assert entry["step"] > entry["computing"] > 0 and entry["optimizer"] > 0
