"""Chooses the number of stages a rank, and where stages begin, so that the schedule ends first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardc.costs.stages.choose import WORTH, ChosenStages, SplitOptions, choose_stages
from shardc.costs.stages.schedule import stage_costs, stage_edges
from shardc.costs.stages.units import Flow, flow_of, items_of
from shardc.options import Pipeline
from shardc.program.program import Program
from shardc.program.stages import stages_of
from shardc.schedules.orders import schedule_named
from shardc.schedules.schedule import Schedule
from shardc.schedules.search import estimate
from shardc.schedules.simulate import makespan

MOST_CHUNKS = 2  # most stages a rank that ``auto`` chooses by itself: with more, no named order goes in a V


def fastest_stages(
    program: Program, options: SplitOptions, annotated: Callable[[], Program]
) -> tuple[Pipeline, ChosenStages]:
    """The stages of a captured program, and its pipeline with the number of stages a rank.

    One stage a rank is as even as ``choose_stages`` makes it. Several stages a rank can be even over ranks or over
    stages, and begin within blocks or between them. Of these cuts, the one whose schedule ends first is chosen, or the
    first of nearly equal ones. ``auto`` without ``chunks`` compares one stage and two stages a rank. Nothing is
    compared if the user says where stages begin or how much memory there is, if earlier calls gave parameters to
    stages, or if nothing is trained. ``annotated``: makes the program with a sharding of every value, whose calls are
    timed.
    """
    pipeline, flow = program.options.pipeline, flow_of(program)
    assert pipeline is not None
    is_free = not (options.cuts or options.homes or options.max_memory or options.balance == "memory")
    is_free = is_free and not any(program.source(node).marks for node in flow.ops)
    is_free = is_free and any(put.kind == "tangent" for put in program.inputs)
    plans = [_with_chunks(pipeline, options, n) for n in _chunks(pipeline, options, flow, is_free)]
    candidates = [(each, stages) for each, split in plans for stages in _cuts(program, flow, split, is_free)]
    if len(candidates) == 1:
        return candidates[0]
    timed = annotated()
    best, least = candidates[0], _seconds(timed, *candidates[0])
    for candidate in candidates[1:]:
        seconds = _seconds(timed, *candidate)
        if seconds < WORTH * least:
            best, least = candidate, seconds
    return best


def _chunks(pipeline: Pipeline, options: SplitOptions, flow: Flow, is_free: bool) -> list[int]:
    """The numbers of stages a rank to compare. Later calls keep the number of earlier ones."""
    ranks = options.num_ranks
    if pipeline.schedule != "auto" or pipeline.chunks is not None:
        return [pipeline.chunks_a_rank]
    if options.homes:
        return [1 + max(stage for stages in options.homes.values() for stage in stages) // ranks]
    most = MOST_CHUNKS if is_free and ranks > 1 else 1
    return [n for n in range(1, most + 1) if n == 1 or n * ranks <= len(flow.ops)]


def _with_chunks(pipeline: Pipeline, options: SplitOptions, chunks: int) -> tuple[Pipeline, SplitOptions]:
    if chunks == pipeline.chunks_a_rank:
        return pipeline, options
    pipeline, num_stages = replace(pipeline, chunks=chunks), chunks * options.num_ranks
    return pipeline, replace(options, num_stages=num_stages, place=pipeline.place(num_stages))


def _cuts(program: Program, flow: Flow, options: SplitOptions, is_free: bool) -> Iterator[ChosenStages]:
    """The cuts to compare, preferred ones first: equal numbers of blocks a stage, even over stages, even over ranks."""
    num_stages, items = options.num_stages, items_of(flow)
    is_chunked = is_free and options.num_ranks < num_stages
    if is_chunked and len(items) >= num_stages:
        begin = tuple(items[stage * len(items) // num_stages] for stage in range(1, num_stages))
        yield choose_stages(program, replace(options, cuts=begin), flow)
    for balance in dict.fromkeys((options.balance, "time")) if is_chunked else ():
        yield choose_stages(program, replace(options, balance=balance, place=()), flow)
    yield choose_stages(program, options, flow)


def _seconds(annotated: Program, pipeline: Pipeline, stages: ChosenStages) -> float:
    """The estimated time of a step in these stages."""
    program = stages.tag(annotated, pipeline)
    found, place = stages_of(program), pipeline.place(program.num_stages)
    costs, edges, ranks = stage_costs(found), tuple(stage_edges(found)), max(place) + 1
    if pipeline.schedule == "auto":
        return estimate(Schedule("auto", ((),) * ranks, place, pipeline.microbatches, edges), costs)
    return makespan(schedule_named(pipeline.schedule, edges, len(place), pipeline.microbatches, ranks), costs)
