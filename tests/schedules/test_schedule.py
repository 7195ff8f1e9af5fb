"""Schedules as data: the actions of each, their order, and their text form."""

import pytest

import shardc
from shardc import Schedule
from shardc.language.errors import ShardingError
from shardc.schedules.schedule import Action, Edge, parse_action

NAMED = ("gpipe", "1f1b")  # backward in one, a stage a rank


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 3), (2, 1), (4, 2), (4, 9)])
def test_every_stage_computes_every_microbatch_once(name: str, num_stages: int, num_microbatches: int) -> None:
    schedule = shardc.schedule(name, num_stages, num_microbatches)
    done = [(action.kind, action.stage, action.microbatch) for _, action in schedule.walk()]
    wanted = {(kind, s, i) for kind in "FB" for s in range(num_stages) for i in range(num_microbatches)}
    assert set(done) == wanted and len(done) == len(wanted)


def test_1f1b_alternates_once_it_is_full() -> None:
    rows = [" ".join(map(str, row)) for row in shardc.schedule("1f1b", 3, 4).actions]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_messages_stand_behind_what_made_them_and_before_what_reads_them() -> None:
    schedule = shardc.schedule("1f1b", 2, 2).with_messages()
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_a_skip_goes_straight_to_the_stage_that_reads_it() -> None:
    plain = shardc.schedule("gpipe", 4, 1)
    schedule = plain.with_messages((*plain.edges, Edge(0, 3, "F"), Edge(3, 0, "B")))
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0SEND_F0 0SEND_F0>3 0RECV_B0>3 0RECV_B0 0B0"
    assert Schedule.from_csv(schedule.to_csv(), "gpipe") == schedule


def test_reductions_come_last() -> None:
    schedule = shardc.schedule("gpipe", 2, 1).with_reductions().with_messages()
    assert [str(row[-1]) for row in schedule.actions] == ["0REDUCE_GRAD", "1REDUCE_GRAD"]


def test_evaluation_is_the_forward_part() -> None:
    schedule = shardc.schedule("1f1b", 3, 4).with_messages().forward_only()
    assert {action.kind for _, action in schedule.walk()} == {"F", "SEND_F", "RECV_F"}
    assert schedule.is_forward_only and schedule.with_messages().crossing() == schedule.edges[:2]


@pytest.mark.parametrize("name", NAMED)
def test_text_round_trips(name: str) -> None:
    schedule = shardc.schedule(name, 4, 5)
    for one in (schedule, schedule.with_messages(), schedule.with_messages().with_reductions()):
        assert Schedule.from_csv(one.to_csv(), name) == one


@pytest.mark.parametrize("text", ["", "F0", "0F", "0Q1", "0F-1", "0F1>", "0SEND_F"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ShardingError, match="it is no action"):
        parse_action(text)


@pytest.mark.parametrize("text", ["", "1F0\n", "0F0\n2F0\n"])
def test_a_csv_without_a_stage_is_refused(text: str) -> None:
    with pytest.raises(ShardingError, match="numbered from 0 without a gap"):
        Schedule.from_csv(text)


def test_an_action_prints_as_torch_writes_it() -> None:
    assert [str(Action("F", 2, 0)), str(Action("SEND_B", 3, 1, 2))] == ["2F0", "3SEND_B1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f2b", 2, 2), "did you mean 1f1b"),
        (("gpipe", 0, 2), "say num_stages=1 or more"),
        (("gpipe", 2, 0), "say num_microbatches=1 or more"),
        (("zb-v", 5, 2), "say num_stages as a multiple of num_ranks"),
    ],
)
def test_an_impossible_schedule_is_refused(arguments: tuple[str, int, int], problem: str) -> None:
    with pytest.raises(ShardingError, match=problem):
        shardc.schedule(*arguments)
