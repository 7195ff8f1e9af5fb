"""Where a schedule's messages stand: each is sent once it is made, and received before what goes on at that time.

All ranks' actions and messages are written down in one order, by the time at which they end. A message stands there
once for both of its ranks, so that its two ends, contracted to one, keep an order: no ranks wait in a circle, even
where a send waits for its receive. And on every channel, a pair of ranks in one direction, the order of sends is that
of receives. What is received while a rank computes is posted before that computation: it need not wait for its end.
"""

from __future__ import annotations

from dataclasses import replace

from shardc.action import Action, Schedule
from shardc.schedule_run import edges_from, run
from shardc.stage_cost import Costs, costs_for


def with_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The same computation with its messages; what messages it had are written anew, reductions stay at the end."""
    bare = schedule.compute_only()
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    leaving = edges_from(bare.crossing())
    for rank, action, _, _ in run(bare, costs_for(schedule.num_stages, costs)):
        rows[rank].append(action)
        for edge in leaving.get((action.stage, action.phase), ()) if action.makes_messages else ():
            rows[rank].append(edge.send(action.microbatch))
            rows[schedule.place[edge.target]].append(edge.receive(action.microbatch))
    for rank, action in schedule.walk():
        rows[rank] += [action] if action.kind == "REDUCE" else []
    return replace(schedule, actions=tuple(map(tuple, rows)))
