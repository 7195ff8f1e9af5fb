"""cut_stages: captured -> captured. Each call gets the stage of the pipeline that it is part of.

A call of forward is where ``choose_stages`` puts it; a call of backward is where the call of forward is that it
differentiates. Later passes give what they make the stage of what they make it of. The graph stays one: which values
cross from stage to stage is read off it at the end (shardc/stage.py).
"""

from __future__ import annotations

from dataclasses import replace

from shardc.costs.choose_stages import choose_stages
from shardc.language.sharding import num_shards
from shardc.program.program import Program


def cut_stages(program: Program) -> Program:
    """The program with a stage for each call; the same without a pipeline."""
    pipeline = program.options.pipeline
    if pipeline is None:
        return program
    program = program.copy()
    chosen = choose_stages(
        program,
        program.num_stages,
        balance=pipeline.balance,
        cuts=pipeline.cuts,
        place=pipeline.place(program.num_stages),
        microbatches=pipeline.microbatches,
        max_memory=pipeline.max_memory,
        homes={pin.name: pin.stages for pin in program.pins if pin.stages},
        pieces=max((num_shards(pin.sharding.cut_axes) for pin in program.pins if pin.kind == "input"), default=1),
    )
    by_ordinal = {program.source(node).ordinal: stage for node, stage in chosen.items()}
    for node in program.graph.nodes:
        source = program.source(node)
        program.set_source(node, replace(source, stage=chosen.get(node, by_ordinal.get(source.ordinal, -1))))
    return program
