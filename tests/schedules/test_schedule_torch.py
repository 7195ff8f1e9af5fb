"""Schedules against torch.distributed.pipelining's own parser, orders and lowering, whose classes are private."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

import shardc
from shardc import Schedule
from shardc.language.errors import ShardingError
from shardc.schedules.orders import CHUNKED, ORDERS
from shardc.schedules.simulate import Costs, StageCost


def of_torch(kind: type, num_ranks: int, num_chunks: int, count: int) -> Schedule:
    """Its order, through the text that it writes."""
    rounds = max(1, count // num_ranks)
    stages = num_ranks * num_chunks
    myself = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=num_chunks,
        _n_microbatches=count,
        number_of_rounds=rounds,
        microbatches_per_round=count // rounds,
        num_stages=stages,
        _num_stages=stages,
    )
    rows = [kind._calculate_single_rank_operations(myself, rank) for rank in range(num_ranks)]
    lines = (",".join("" if action is None else str(action) for action in row) for row in rows)
    return Schedule.from_csv("\n".join(lines), kind.__name__)


@pytest.mark.parametrize("name", ORDERS)
def test_torch_reads_what_we_write_and_writes_it_back(name: str) -> None:
    num_stages = 8 if name in CHUNKED else 4
    schedule = shardc.schedule(name, num_stages, 6)
    for one in (schedule, schedule.with_messages().with_reductions()):
        rows = [line.split(",") for line in one.to_csv().splitlines()]
        read = {rank: [torchs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        assert Schedule.from_csv("\n".join(",".join(map(str, row)) for row in read.values()), name) == one
    places = torchs._validate_schedule(read, 4, num_stages, 6)
    assert tuple(places[stage] for stage in range(num_stages)) == schedule.place


@pytest.mark.parametrize("name", ORDERS)
def test_our_messages_are_those_that_torch_would_send(name: str) -> None:
    """The same ones on every rank, and before each computation all that it reads."""
    num_stages = 8 if name in CHUNKED else 4
    schedule = shardc.schedule(name, num_stages, 6)
    compute = {
        rank: [torchs._Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.actions)
    }
    lowered = torchs._add_send_recv(compute, lambda stage: schedule.place[stage], num_stages)
    theirs = Schedule.from_csv("\n".join(",".join(map(str, lowered[rank])) for rank in range(4)), name).check()
    ours = schedule.with_messages()
    assert [sorted(map(str, row)) for row in ours.actions] == [sorted(map(str, row)) for row in theirs.actions]
    assert ours.simulate().makespan <= theirs.simulate().makespan


V = (torchs.ScheduleZBVZeroBubble, torchs.ScheduleDualPipeV)
LOOPED = (torchs.ScheduleInterleaved1F1B, torchs.ScheduleInterleavedZeroBubble)


@pytest.mark.parametrize(
    ("kind", "num_chunks"), [*((kind, 2) for kind in (*V, *LOOPED)), *((kind, 3) for kind in LOOPED)]
)
def test_auto_is_never_slower_than_an_order_of_torch(kind: type, num_chunks: int) -> None:
    stages = tuple(StageCost(10 + 3 * (s % 3), 11 + s % 2, 8, saved=4, held=3) for s in range(4 * num_chunks))
    for count, costs in ((8, None), (12, Costs(stages)), (8, Costs(stages, latency=2))):
        theirs = of_torch(kind, 4, num_chunks, count)
        ours = shardc.schedule("auto", 4 * num_chunks, count, num_ranks=4, costs=costs)
        assert ours.simulate(costs).makespan <= theirs.check().simulate(costs).makespan


def test_an_order_of_torch_that_leaves_work_out_is_refused() -> None:
    """Nine microbatches on four ranks, which its constructor refuses and its generator does not."""
    with pytest.raises(
        ShardingError, match="stage 0, microbatch 8: 1 F\n  every microbatch goes through every stage once"
    ):
        of_torch(torchs.ScheduleInterleaved1F1B, 4, 2, 9).check()


@pytest.mark.parametrize("kind", V)
def test_receives_that_torch_defers_are_refused(kind: type) -> None:
    """With ``defer_pp_recv`` receives come in another order than sends, and torch trains on the wrong microbatches."""
    schedule = of_torch(kind, 4, 2, 8)
    compute = {
        rank: [torchs._Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.actions)
    }
    lowered = torchs._add_send_recv(compute, lambda stage: schedule.place[stage], 8)
    deferred = torchs._defer_recv_ops(lowered, lambda stage: schedule.place[stage])
    written = Schedule.from_csv("\n".join(",".join(map(str, deferred[rank])) for rank in range(4)), kind.__name__)
    with pytest.raises(ShardingError, match="is received as"):
        written.check()


def test_overlapped_and_storage_actions_are_read() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD,0RESHARD\n")
    assert schedule.to_csv() == "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n"
