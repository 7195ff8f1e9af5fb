"""How fast a schedule can be at best: what no order of computation can beat, so that a gap can be stated."""

from __future__ import annotations

from shardc.action import Edge, Schedule
from shardc.schedule_run import edges_from, edges_into
from shardc.stage_cost import Costs, StageCost, costs_for


def lower_bound(frame: Schedule, costs: Costs | StageCost | None = None, memory: int | None = None) -> float:
    """Seconds that any order takes, with the frame's place, edges and microbatches, within so many bytes a rank.

    A rank computes everything after the first microbatch has come down to it. And a stage alone on its rank does all F
    and I, and as many W as do not fit into memory any more, before its last I has been done; then that microbatch goes
    on up to the first stage, whose W comes last.
    """
    known = costs_for(frame.num_stages, costs)
    first, last = _heads(frame, known), _tails(frame, known)
    return max(_rank_bound(frame, known, memory, rank, first, last) for rank in range(frame.num_ranks))


def _rank_bound(
    frame: Schedule, costs: Costs, memory: int | None, rank: int, heads: list[float], tails: list[float]
) -> float:
    stages = frame.stages_on(rank)
    count, own = frame.num_microbatches, [costs.stages[stage] for stage in stages]
    head = min(heads[stage] for stage in stages)
    all_work = head + count * sum(cost.forward + cost.input + cost.weight for cost in own)
    if len(stages) > 1:
        return all_work
    (cost,) = own
    room = count if memory is None or not cost.held else (memory - cost.resident) // cost.held
    done = max(0, count - room) * cost.weight
    return max(all_work, head + count * (cost.forward + cost.input) + done + tails[stages[0]])


def _heads(frame: Schedule, costs: Costs) -> list[float]:
    """When the first microbatch reaches each stage at the earliest; stages read of those before them."""
    entering, heads = edges_into(frame.edges), [0.0] * frame.num_stages
    for stage in range(frame.num_stages):
        for edge in entering.get((stage, "F"), ()):
            made = heads[edge.source] + costs.stages[edge.source].forward
            heads[stage] = max(heads[stage], made + _transfer(frame, costs, edge))
    return heads


def _tails(frame: Schedule, costs: Costs) -> list[float]:
    """How long it takes at least from a stage's last I until all is done: its W, or what the stages before it do."""
    leaving, tails = edges_from(frame.edges), [cost.weight for cost in costs.stages]
    for stage in range(frame.num_stages):
        for edge in leaving.get((stage, "B"), ()):
            after = costs.stages[edge.target].input + tails[edge.target]
            tails[stage] = max(tails[stage], _transfer(frame, costs, edge) + after)
    return tails


def _transfer(frame: Schedule, costs: Costs, edge: Edge) -> float:
    return 0 if frame.place[edge.source] == frame.place[edge.target] else costs.transfer_seconds(edge)
