"""cut_stages: captured -> captured. Each call gets the stage of the pipeline that it is part of.

A call of forward has the stage that ``choose_stages`` chooses; a call of backward has that of the call of forward that
it differentiates::

    h = mm(x, a);  y = mm(h, b)        ->        h = mm(x, a)    # stage 0        y = mm(h, b)    # stage 1
    da = mm(x, dh)                               da = mm(x, dh)  # stage 0

Later passes give what they insert the stage of the call that it is inserted for. Invariant: the graph stays one and as
it was. Which values cross from stage to stage is read off it at the end (shardc/program/stages.py).
"""

from __future__ import annotations

from dataclasses import replace

from shardc.costs.choose_stages import SplitOptions, choose_stages
from shardc.language.sharding import num_shards
from shardc.program.program import Program


def cut_stages(program: Program) -> Program:
    """The program with a stage for each call; the same without a pipeline."""
    pipeline = program.options.pipeline
    if pipeline is None:
        return program
    program = program.copy()
    options = SplitOptions(
        program.num_stages,
        balance=pipeline.balance,
        cuts=tuple(pipeline.cuts or ()),
        place=pipeline.place(program.num_stages),
        microbatches=pipeline.microbatches,
        max_memory=pipeline.max_memory,
        homes={pin.name: pin.stages for pin in program.pins if pin.stages},
        pieces=max((num_shards(pin.sharding.cut_axes) for pin in program.pins if pin.kind == "input"), default=1),
    )
    assignment = choose_stages(program, options).assignment
    by_ordinal = {program.source(node).ordinal: stage for node, stage in assignment.items()}
    for node in program.graph.nodes:
        source = program.source(node)
        program.set_source(node, replace(source, stage=assignment.get(node, by_ordinal.get(source.ordinal, -1))))
    return program
