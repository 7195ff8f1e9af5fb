"""The proof of a schedule agrees with an interpreter that runs it with blocking, unnamed messages."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

import shardc
from shardc import Schedule
from shardc.language.errors import ShardingError
from shardc.schedules.orders import CHUNKED, ORDERS
from shardc.schedules.schedule import SENDS, Action, Edge, edge_of

SKIP = (Edge(0, 3, "F"), Edge(3, 0, "B"))


def named(name: str, num_ranks: int, num_microbatches: int, *, skip: bool = False) -> Schedule:
    """With messages; two stages a rank where the schedule has them."""
    num_stages = 2 * num_ranks if name in CHUNKED else num_ranks
    schedule = shardc.schedule(name, num_stages, num_microbatches)
    return schedule.with_messages((*schedule.edges, *SKIP) if skip else None)


def interpret(schedule: Schedule) -> bool:
    """Whether every rank ends with every stage's work done on the right values; a send waits for its receive."""
    at, boxes, done = [0] * schedule.num_ranks, [set() for _ in schedule.actions], Counter()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            if at[rank] == len(row):
                continue
            action = row[at[rank]]
            if action.kind in SENDS:
                other = schedule.place[action.peer]
                receive = schedule.actions[other][at[other]] if at[other] < len(schedule.actions[other]) else None
                if receive is None or receive.kind[:4] != "RECV" or schedule.place[receive.peer] != rank:
                    continue
                value = action.stage, action.phase, action.microbatch
                if value not in boxes[rank] or _expected(receive) != value:
                    return False
                boxes[other].add(value)
                at[other] += 1
            elif action.kind[:4] == "RECV":
                continue
            elif not _compute(schedule, action, boxes[rank]):
                return False
            done[action] += 1
            at[rank] += 1
            moved = True
    units = Counter()
    for action, count in done.items():
        weight = {"F": 1, "I": 2, "W": 4, "B": 6}.get(action.kind, 0)
        units[action.stage, action.microbatch] += weight * count
    wanted = {(s, i): 7 for s in range(schedule.num_stages) for i in range(schedule.num_microbatches)}
    return at == list(map(len, schedule.actions)) and units == Counter(wanted) and max(done.values()) == 1


def _expected(receive: Action) -> tuple[int, str, int]:
    edge = edge_of(receive)
    return edge.source, edge.phase, receive.microbatch


def _compute(schedule: Schedule, action: Action, box: set[tuple[int, str, int]]) -> bool:
    """Take what it reads from the rank's values and put what it makes there."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        return (stage, "B", microbatch) in box
    reads = {
        (edge.source, edge.phase, microbatch)
        for edge in schedule.edges
        if (edge.target, edge.phase) == (stage, action.phase)
    }
    reads |= {(stage, "F", microbatch)} if action.phase == "B" else set()
    box.add((stage, action.phase, microbatch))
    return reads <= box


Corruption = Callable[[random.Random, list[list[Action]]], None]


def swapped(rng: random.Random, rows: list[list[Action]]) -> None:
    row = rng.choice(rows)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def dropped(rng: random.Random, rows: list[list[Action]]) -> None:
    row = rng.choice(rows)
    del row[rng.randrange(len(row))]


def duplicated(rng: random.Random, rows: list[list[Action]]) -> None:
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))


def reordered(rng: random.Random, rows: list[list[Action]]) -> None:
    """Two receives of one rank change places."""
    row = rng.choice([row for row in rows if sum(a.kind[:4] == "RECV" for a in row) > 1])
    i, j = rng.sample([at for at, action in enumerate(row) if action.kind[:4] == "RECV"], 2)
    row[i], row[j] = row[j], row[i]


def cyclic(rng: random.Random, rows: list[list[Action]]) -> None:
    """A computation comes before what it reads."""
    row = rng.choice(rows)
    at = rng.randrange(len(row) // 2, len(row))
    row.insert(rng.randrange(at), row.pop(at))


def renumbered(rng: random.Random, rows: list[list[Action]]) -> None:
    row = rng.choice(rows)
    at = rng.randrange(len(row))
    row[at] = replace(row[at], microbatch=row[at].microbatch + rng.choice((-1, 1)))


CORRUPTIONS = (swapped, dropped, duplicated, reordered, cyclic, renumbered)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_a_corrupted_schedule_is_refused_unless_it_runs_right_all_the_same(name: str, corrupt: Corruption) -> None:
    rng = random.Random(f"{name} {corrupt.__name__}")
    refused = 0
    while refused < 20:  # of 42 cases: 840
        schedule = named(name, rng.choice((2, 3, 4)), rng.choice((2, 3, 5)))
        rows = [list(row) for row in schedule.actions]
        corrupt(rng, rows)
        corrupted = replace(schedule, actions=tuple(map(tuple, rows)))
        if interpret(corrupted):
            corrupted.check()
            continue
        with pytest.raises(ShardingError):
            corrupted.check()
        refused += 1


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_every_named_schedule_is_proven_with_any_number_of_microbatches(name: str, num_ranks: int) -> None:
    for num_microbatches in (1, 2, 3, 5, 7, 8, 13):
        schedule = named(name, num_ranks, num_microbatches, skip=num_ranks > 3)
        assert interpret(schedule.check())
        schedule.with_reductions().check()
        schedule.forward_only().check()
        schedule.compute_only().check()


def test_a_circle_is_printed_with_its_ranks() -> None:
    rows = [list(row) for row in named("1f1b", 2, 2).actions]
    rows[0].insert(0, rows[0].pop(rows[0].index(Action("RECV_B", 0, 0, 1))))
    with pytest.raises(ShardingError) as caught:
        replace(named("1f1b", 2, 2), actions=tuple(map(tuple, rows))).check()
    assert str(caught.value).splitlines()[-2:] == [
        "  these wait for each other for ever",
        "  order the actions otherwise, or let with_messages() say where messages stand",
    ]
    assert "rank 0: 0RECV_B0" in str(caught.value) and "rank 1: 1F0" in str(caught.value)


def test_sends_that_wait_for_each_other_are_refused() -> None:
    """Each rank sends before it receives: that ends only where a send does not wait."""
    edges = (Edge(0, 1, "F"), Edge(2, 3, "F"))
    rows = (
        (Action("F", 0, 0), Action("SEND_F", 0, 0, 1), Action("RECV_F", 3, 0, 2), Action("F", 3, 0)),
        (Action("F", 2, 0), Action("SEND_F", 2, 0, 3), Action("RECV_F", 1, 0, 0), Action("F", 1, 0)),
    )
    with pytest.raises(ShardingError, match="rank 0 and rank 1: 0SEND_F0 = 1RECV_F0"):
        Schedule("both send", rows, (0, 1, 1, 0), 1, edges).check()


def test_receives_in_another_order_than_the_sends_name_the_channel() -> None:
    schedule = named("gpipe", 2, 2)
    rows = [list(row) for row in schedule.actions]
    first, second = (rows[1].index(Action("RECV_F", 1, i, 0)) for i in range(2))
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    with pytest.raises(ShardingError, match="rank 0 to rank 1, message 0: 0SEND_F0 is received as 1RECV_F1"):
        replace(schedule, actions=tuple(map(tuple, rows))).check()


@pytest.mark.parametrize(
    ("stranger", "problem"),
    [
        (Action("F", 9, 0), "there are 2 stages"),
        (Action("F", 0, 9), "there are 2 microbatches"),
        (Action("F", 1, 0), "stage 1 is on rank 1"),
        (Action("F", 0, 0, 1), "only messages have a peer"),
        (Action("SEND_B", 0, 0, 1), "no such edge between ranks"),
        (Action("JUMP", 0, 0), "there is no such kind of action"),
    ],
)
def test_an_impossible_action_is_refused(stranger: Action, problem: str) -> None:
    schedule = named("gpipe", 2, 2)
    with pytest.raises(ShardingError, match=problem):
        replace(schedule, actions=((*schedule.actions[0], stranger), schedule.actions[1])).check()


def test_receives_without_sends_are_refused() -> None:
    schedule = named("gpipe", 2, 1)
    rows = [[action for action in row if action.kind not in SENDS] for row in schedule.actions]
    with pytest.raises(ShardingError, match="0SEND_F0 0 times, 1RECV_F0 1 times\n  each comes once"):
        replace(schedule, actions=tuple(map(tuple, rows))).check()


def test_an_order_that_cannot_run_is_named_by_its_tasks() -> None:
    schedule = shardc.schedule("gpipe", 2, 1)
    backward_first = replace(schedule, actions=tuple(row[::-1] for row in schedule.actions))
    with pytest.raises(
        ShardingError, match="schedule gpipe: 0F0 waits for 0B0 waits for 0F0\n  no task of a circle can start"
    ):
        backward_first.with_messages()
    with pytest.raises(ShardingError, match="schedule gpipe: 1F0 waits for 0→1 F0\n  no such task runs"):
        replace(schedule, actions=((), schedule.actions[1])).with_messages()
