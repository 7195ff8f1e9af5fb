"""What the stages of a pipeline announce: their ranks' collectives, and what they send to other stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from shardc.announcement import collective_at, is_collective, joined_type
from shardc.cause import Crossed
from shardc.collective import Collective
from shardc.fact import Phase
from shardc.options import Pipeline
from shardc.permutation import wire_bytes_total
from shardc.program import Program
from shardc.sharding import dtype_name
from shardc.stage import TIMED, Crossing
from shardc.stage_cut import stages_of

OF_STAGE = "_stage_"  # and its number: after the name of a collective that an earlier stage has too


def collectives_of_stages(program: Program) -> Iterator[Collective]:
    """The collectives of each stage of a lowered or localized program, and the messages that it sends."""
    stages = stages_of(program)
    assert program.options.pipeline is not None
    pipeline, named = program.options.pipeline, set[str]()
    place = pipeline.place(program.num_stages)
    for i, stage in enumerate(stages.stages):
        for part, calls in stage.parts.items():
            times = pipeline.microbatches if part in TIMED else 1
            found = [collective_at(program, node) for node in calls if is_collective(node)]
            for way, nodes in stages.crossings.items():
                if (way.source, way.part) == (i, part) and place[i] != place[way.target]:
                    found.append(_message(program, way, nodes, pipeline))
            for each in found:
                name = f"{each.name}{OF_STAGE}{i}" if each.name in named else each.name
                named.add(name)
                yield replace(each, name=name, stage=i, times=times)


def sender(nodes: Mapping[str, fx.Node], name: str) -> fx.Node | None:
    """Of ``nodes`` by name the one that sends a collective, which several stages may run; a message has none."""
    return nodes.get(name) or nodes.get(name.rpartition(OF_STAGE)[0])


def _message(program: Program, crossing: Crossing, nodes: tuple[fx.Node, ...], pipeline: Pipeline) -> Collective:
    """What one stage sends to another, all of it together."""
    types = [type_ for type_ in map(program.local_type, nodes) if type_ is not None]
    nbytes, joined = sum(type_.nbytes for type_ in types), joined_type(types)
    shape = types[0].shape if len(types) == 1 else joined.shape
    sources = dict.fromkeys(filter(None, (program.source(node).location for node in nodes)))
    phases = {program.source(node).phase for node in nodes}
    phase: Phase = "backward" if crossing.part == "input_gradient" or "backward" in phases else "forward"
    assert program.mesh is not None
    total = wire_bytes_total(program.mesh, "send", (), nbytes)
    return Collective(
        "send", (pipeline.axis,), dtype_name(joined.dtype), shape, shape, nbytes, nbytes, total,
        name=f"send_{crossing.part}_{crossing.source}_to_{crossing.target}", phase=phase,
        node=", ".join(node.name for node in nodes), source=", ".join(sources),
        causes=(Crossed(crossing.source, crossing.target, tuple(node.name for node in nodes), pipeline.text),),
    )  # fmt: skip
