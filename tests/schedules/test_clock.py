"""The clock: tasks keep the order of their lanes, wait for each other, and say so when they never start."""

import random

import pytest

from shardc.language.errors import ShardingError
from shardc.schedules.clock import Clock, Task, Tasks


def ends(*tasks: Task) -> dict[object, float]:
    found = Tasks(tasks)
    return dict(zip(found.names, found.run(found.rows()).ends, strict=True))


def test_a_lane_runs_its_tasks_in_the_order_given() -> None:
    """b comes first on its lane though it waits for c, and a could start at once."""
    assert ends(Task("b", (0,), 1, ("c",)), Task("a", (0,), 2), Task("c", (1,), 5)) == {"c": 5, "b": 6, "a": 8}


def test_messages_of_a_link_follow_each_other() -> None:
    made = Task("a", (0,), 1), Task("b", (0,), 1)
    sent = Task("send a", ("link",), 3, ("a",)), Task("send b", ("link",), 3, ("b",))
    assert ends(*made, *sent) == {"a": 1, "b": 2, "send a": 4, "send b": 7}


def test_a_task_on_several_lanes_waits_for_all_of_them_and_occupies_them() -> None:
    meeting = Task("meeting", (0, 1), 2)
    found = ends(Task("a", (0,), 1), Task("b", (1,), 4), meeting, Task("c", (0,), 1), Task("d", (1,), 2))
    assert found == {"a": 1, "b": 4, "meeting": 6, "c": 7, "d": 8}


def test_the_reason_of_a_task_is_what_ended_last_of_all_that_it_waited_for() -> None:
    found = Tasks([Task("a", (0,), 1), Task("b", (1,), 2), Task("c", (0,), 1, ("b",)), Task("d", (2,), 1, ("a", "b"))])
    assert found.run(found.rows()).reasons() == {2: 1, 3: 1}


def test_the_order_of_rows_is_another_than_that_of_the_tasks_if_they_say_so() -> None:
    found = Tasks([Task("a", (0,), 1), Task("b", (0,), 2), Task("c", (1,), 1, ("b",))])
    assert found.run({0: [0, 1], 1: [2]}).ends == [1, 3, 4]
    assert found.run({0: [1, 0], 1: [2]}).ends == [3, 2, 3]


def test_a_run_stops_once_a_lane_cannot_end_by_the_limit() -> None:
    found = Tasks([Task("a", (0,), 1), Task("b", (1,), 1, ("a",)), Task("c", (1,), 7)])
    assert found.run(found.rows(), 9).is_done
    late = found.run(found.rows(), 8.5)
    assert not late.is_done and late.order == [0]  # b ends at 2, and 7 seconds of its lane are left


def test_a_circle_is_named_by_its_tasks_alone() -> None:
    """d and e wait for the circle, and are none of it; lanes count as well as predecessors."""
    outside = Task("d", (3,), 1, ("a",)), Task("e", (3,), 1)
    with pytest.raises(ShardingError) as caught:
        ends(
            *outside,
            Task("a", (0,), 1, ("b",)),
            Task("b", (1,), 1, ("c",)),
            Task("x", (2,), 1, ("a",)),
            Task("c", (2,), 1),
        )
    assert str(caught.value) == (
        "timeline: a waits for b waits for c waits for x waits for a\n"
        "  no task of a circle can start\n  order the lanes otherwise"
    )


def test_a_task_that_is_not_there_is_named_with_who_waits_for_it() -> None:
    with pytest.raises(ShardingError, match="the step: a waits for b, c\n  no such task runs"):
        Tasks([Task("a", (0,), 1, ("b", "a2", "c")), Task("a2", (1,), 1)], "the step")


def test_tasks_started_one_by_one_end_as_those_of_rows() -> None:
    """In any order in which every task comes after those that it waits for, as a list scheduler starts them."""
    rng = random.Random(3)
    for _ in range(50):
        tasks = [
            Task(i, (rng.randrange(3),), rng.randrange(4), tuple({rng.randrange(i) for _ in range(2)} if i else ()))
            for i in range(12)
        ]
        found = Tasks(tasks)
        clock = Clock(found)
        for number in range(12):
            clock.start(number)
        assert clock.is_done and clock.ends == found.run(found.rows()).ends
    with pytest.raises(AssertionError):
        Clock(Tasks([Task("a", (0,)), Task("b", (1,), after=("a",))])).start(1)
