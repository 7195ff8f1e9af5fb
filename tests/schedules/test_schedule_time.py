"""The simulator gives published formulas exactly, and ``auto`` is at least as fast as every named schedule."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardc
from shardc import Schedule
from shardc.language.errors import ShardingError
from shardc.schedules.clock import Task
from shardc.schedules.orders import LINEAR, ORDERS, fits
from shardc.schedules.schedule import Action, Edge
from shardc.schedules.search import lower_bound
from shardc.schedules.simulate import Costs, StageCost, Step, costs_for, makespan
from shardc.schedules.timeline import timeline

SIZES = [(1, 1), (2, 4), (3, 7), (4, 8), (4, 16), (6, 12), (8, 24)]


@pytest.mark.parametrize(("k", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_k_minus_1_turns(name: str, k: int, m: int) -> None:
    found = shardc.schedule(name, k, m).simulate(StageCost(2, 3, 1))
    assert found.bubble == found.gap == (k - 1) * (2 + 3 + 1)
    assert 1 - found.idle_fraction == pytest.approx(m / (m + k - 1))


@pytest.mark.parametrize(("k", "efficiency"), [(2, 0.889), (4, 0.842), (8, 0.821)])
def test_gpipe_with_four_microbatches_a_stage(k: int, efficiency: float) -> None:
    assert round(1 - shardc.schedule("gpipe", k, 4 * k).simulate().idle_fraction, 3) == efficiency


@pytest.mark.parametrize(("k", "m"), SIZES)
def test_stage_i_keeps_as_many_microbatches_alive_as_the_schedule_says(k: int, m: int) -> None:
    """GPipe saves all microbatches; 1F1B min(M, K - i)."""
    assert shardc.schedule("gpipe", k, m).simulate().peak_bytes == (m,) * k
    assert shardc.schedule("1f1b", k, m).simulate().peak_bytes == tuple(min(m, k - i) for i in range(k))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("k", "m"), [(2, 4), (3, 6), (4, 8), (4, 9), (4, 11), (6, 13)])
def test_interleaved_stages_divide_the_bubble(k: int, m: int, chunks: int) -> None:
    """(1/v)(K-1)/M of the work, for every M of K or more: each of v stages a rank takes 1/v of the time."""
    found = shardc.schedule("interleaved", k * chunks, m, num_ranks=k).simulate()
    assert found.bubble * chunks * m == (k - 1) * max(found.work)


@pytest.mark.parametrize(("k", "m"), [(2, 4), (3, 7), (4, 8), (6, 12), (8, 24)])
def test_zero_bubble_schedules_leave_the_gaps_of_the_paper(k: int, m: int) -> None:
    """F = I = W = 1: 1F1B 3(K-1), ZB-H1 K-1, ZB-H2 and ZB-V none; and their memory."""
    gaps = {name: shardc.schedule(name, k, m).simulate().gap for name in ("1f1b", "zb-h1", "zb-h2")}
    assert gaps == {"1f1b": 3 * (k - 1), "zb-h1": k - 1, "zb-h2": 0 if m >= 2 * k - 1 else gaps["zb-h2"]}
    peaks = {name: max(shardc.schedule(name, k, m).simulate().peak_bytes) for name in ("zb-h1", "zb-h2")}
    assert peaks == {"zb-h1": min(m, k), "zb-h2": min(m, 2 * k - 1)}
    v = shardc.schedule("zb-v", 2 * k, m).simulate()
    assert max(v.peak_bytes) == 2 * min(m, k) and (v.gap == 0 or m < 2 * k - 1)


@pytest.mark.parametrize(
    ("name", "num_stages", "fractions"),
    [
        ("gpipe", 1, (0.2727, 0.2258)),
        ("1f1b", 1, (0.2727, 0.2258)),
        ("interleaved", 2, (0.1579, 0.1273)),
        ("interleaved-zb", 2, (0.0588, 0.0464)),
        ("zb-h1", 1, (0.1111, 0.0886)),
        ("zb-h2", 1, (0.1111, 0.0886)),
        ("zb-v", 2, (0.0588, 0.0464)),
    ],
)
def test_idle_times_equal_those_of_an_independent_simulator(
    name: str, num_stages: int, fractions: tuple[float, float]
) -> None:
    found = [
        shardc.schedule(name, num_stages * k, m, num_ranks=k).simulate().idle_fraction for k, m in ((4, 8), (8, 24))
    ]
    assert found == pytest.approx(fractions, abs=5e-5)


def test_with_latency_1f1b_is_slower_than_gpipe_unless_more_microbatches_may_be_in_flight() -> None:
    costs = Costs((StageCost(),) * 4, latency=0.2)
    plain, more = (shardc.schedule("1f1b", 4, 16, in_flight=cap).simulate(costs).makespan for cap in (4, 8))
    assert more == shardc.schedule("gpipe", 4, 16).simulate(costs).makespan < plain


def test_messages_share_a_channel_one_after_the_other() -> None:
    """Two edges from rank 0 to rank 1: the second transfer starts when the first has ended; another way is free."""
    rows = ((Action("F", 0, 0),), (Action("F", 1, 0), Action("F", 2, 0)))
    edges = (Edge(0, 1, "F"), Edge(0, 2, "F"))
    costs = Costs((StageCost(1),) * 3, latency=1, bandwidth=10, message_bytes={edges[0]: 20, edges[1]: 10})
    found = Schedule("two", rows, (0, 1, 1), 1, edges).simulate(costs)
    assert [found.starts[action] for action in rows[1]] == [4, 6] and found.makespan == 7


def test_a_message_takes_memory_until_it_is_sent_and_from_its_receive_until_it_is_read() -> None:
    edge = Edge(0, 1, "F")
    costs = Costs((StageCost(saved=10, held=4, resident=100),) * 2, message_bytes={edge: 3})
    found = shardc.schedule("zb-h1", 2, 1).simulate(costs)
    assert found.peak_bytes == (113, 110)
    assert shardc.schedule("zb-h1", 2, 1).forward_only().simulate(costs).peak_bytes == (103, 103)


def test_each_task_on_the_critical_path_starts_when_the_one_before_it_ends() -> None:
    found = shardc.schedule("zb-h2", 4, 8).simulate(Costs(tuple(StageCost(3 + s, 2, 1) for s in range(4)), latency=0.5))
    path = found.critical_path
    assert found.starts[path[0].name] == 0 and found.end(path[-1]) == found.makespan
    assert all(found.end(before) == found.starts[after.name] for before, after in pairwise(path))


def test_tasks_in_a_circle_or_of_dead_values_are_refused() -> None:
    with pytest.raises(ShardingError, match="a waits for b waits for a"):
        timeline([Task("a", (0,), after=("b",)), Task("b", (1,), after=("a",))], [0, 1])
    with pytest.raises(ShardingError, match="a reads or frees x"):
        timeline([Task("a", (0,), reads=("x",))], [0])
    with pytest.raises(ShardingError, match="a waits for b"):
        timeline([Task("a", (0,), after=("b",))], [0])


stage_costs = st.builds(
    StageCost, *[st.integers(0, 9)] * 4, saved=st.integers(2, 9), held=st.integers(0, 2), resident=st.integers(0, 9)
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A named schedule, maybe with a skip, and any costs; whole numbers, so that sums are exact."""
    name, ranks = draw(st.sampled_from(sorted(ORDERS))), draw(st.integers(1, 5))
    num_stages = ranks * next(n for n in (1, 2) if fits(name, n * ranks, ranks))
    edges = shardc.schedule(name, num_stages, 1, num_ranks=ranks).edges
    schedule = shardc.schedule(name, num_stages, draw(st.integers(1, 9)), num_ranks=ranks)
    if num_stages > 2 and draw(st.booleans()):
        source, target = sorted(draw(st.sets(st.integers(0, num_stages - 1), min_size=2, max_size=2)))
        edges = tuple(dict.fromkeys((*edges, Edge(source, target, "F"), Edge(target, source, "B"))))
    sizes = {edge: draw(st.integers(0, 5)) for edge in edges}
    costs = Costs(tuple(draw(stage_costs) for _ in range(num_stages)), draw(st.integers(0, 5)), 1, sizes)
    return schedule.with_messages(edges, costs), costs


@given(cases())
@settings(max_examples=40, deadline=None)
def test_writing_messages_down_costs_no_time_and_any_costs_leave_the_schedule_right(
    case: tuple[Schedule, Costs],
) -> None:
    """Messages that leave at once and those whose receives are posted end together."""
    schedule, costs = case
    found = schedule.check().simulate(costs)
    bare = schedule.compute_only()
    step = Step(bare, costs)
    ends = dict(zip(step.tasks.names, step.run(bare).ends, strict=True))
    assert {task.name: found.end(task) for task in found.tasks if task.name in ends} == ends


@given(cases())
@settings(max_examples=30, deadline=None)
def test_no_rank_ends_before_its_work_and_nothing_stays_alive(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    found = schedule.simulate(costs)
    assert all(work <= span <= found.makespan for work, span in zip(found.work, found.span, strict=True))
    for rank in found.ranks:
        tasks = [task for task in found.tasks if task.touches(rank)]
        assert {value for task in tasks for value in task.makes} == {value for task in tasks for value in task.frees}


def grid() -> list[tuple[int, int, int, Costs, int | None]]:
    """200 of (ranks, stages, microbatches, costs, cap in bytes): even and uneven stages, latency, tight and free."""
    rng, found = random.Random(5), []
    while len(found) < 200:
        ranks, chunks, count = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 5, 8, 12))
        same = StageCost(10, rng.choice((8, 10, 14)), rng.choice((6, 8, 10)), saved=4, held=3)
        times = (StageCost(*(rng.randint(4, 16) for _ in range(3)), saved=rng.randint(2, 6), held=2) for _ in range(99))
        stages = tuple(same if rng.random() < 0.5 else next(times) for _ in range(ranks * chunks))
        costs = Costs(stages, rng.choice((0, 0, 1, 2, 5)))
        least = max(sum(costs.stages[s].saved for s in range(r, len(stages), ranks)) for r in range(ranks))
        found.append((ranks, len(stages), count, costs, rng.choice((None, ranks * least, 3 * ranks * least // 2))))
    return found


@pytest.mark.sweep
def test_auto_is_never_slower_than_a_named_schedule_and_stays_under_the_cap() -> None:
    for ranks, num_stages, count, costs, memory in grid():
        chosen = shardc.schedule("auto", num_stages, count, num_ranks=ranks, costs=costs, memory=memory).check()
        found = chosen.simulate(costs)
        assert memory is None or max(found.peak_bytes) <= memory, chosen.name
        for name in (name for name in ORDERS if fits(name, num_stages, ranks)):
            for cap in (None, 1, ranks + 1, 2 * ranks) if name in LINEAR else (None,):
                rival = shardc.schedule(name, num_stages, count, num_ranks=ranks, in_flight=cap)
                if makespan(rival, costs) < found.makespan:
                    assert memory is not None and max(rival.simulate(costs).peak_bytes) > memory, (name, cap)


@pytest.mark.parametrize(
    ("k", "m", "times", "latency", "cap", "optimum"),
    [
        (4, 8, (10, 10, 10), 0, 4, 270),
        (4, 8, (10, 12, 8), 0, 4, 282),
        (4, 8, (10, 12, 8), 2, 6, 278),
        (4, 12, (10, 12, 8), 2, 6, 398),
        (4, 12, (10, 14, 6), 1, 6, 408),
        (8, 16, (10, 12, 8), 2, 12, 574),
    ],
)
def test_auto_reaches_what_no_schedule_can_beat(
    k: int, m: int, times: tuple[int, int, int], latency: int, cap: int, optimum: int
) -> None:
    costs = Costs((StageCost(*times),) * k, latency)
    chosen = shardc.schedule("auto", k, m, costs=costs, memory=cap)
    assert chosen.simulate(costs).makespan == lower_bound(chosen, costs, cap) == optimum


@given(cases())
@settings(max_examples=40, deadline=None)
def test_no_schedule_beats_the_lower_bound(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    found = schedule.simulate(costs)
    assert lower_bound(schedule, costs, max(found.peak_bytes)) <= found.makespan


def test_auto_orders_two_towers_that_meet_at_the_end() -> None:
    """Stages 0 and 1 do not wait for each other; both send to stage 2."""
    edges = (Edge(0, 2, "F"), Edge(1, 2, "F"), Edge(2, 0, "B"), Edge(2, 1, "B"))
    chosen = shardc.schedule("auto", 3, 4, edges=edges, costs=StageCost(), memory=9).check()
    assert chosen.edges == edges and chosen.simulate().makespan < shardc.schedule("auto", 3, 4).simulate().makespan


def test_auto_is_the_same_every_time() -> None:
    costs = Costs(tuple(StageCost(3 + s % 2, 4, 2) for s in range(8)), latency=0.3)
    first, second = (shardc.schedule("auto", 8, 6, num_ranks=4, costs=costs) for _ in range(2))
    assert first == second


def test_a_cap_that_nothing_fits_names_the_least_that_does() -> None:
    with pytest.raises(ShardingError, match="allow 7 bytes"):
        shardc.schedule("auto", 3, 4, costs=StageCost(saved=7, held=2), memory=6)
    assert shardc.schedule("auto", 3, 4, costs=StageCost(saved=7, held=2), memory=7).check()


def test_costs_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ShardingError, match=r"forward=-1"):
        StageCost(forward=-1)
    with pytest.raises(ShardingError, match="bandwidth=0"):
        Costs((), bandwidth=0)
    with pytest.raises(ShardingError, match="give 3 of them"):
        costs_for(3, Costs((StageCost(),)))
