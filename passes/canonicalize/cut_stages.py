"""cut_stages: captured -> captured. Each call gets its stage of the pipeline.

``fastest_stages`` chooses the stage of each forward call; a backward call has the stage of the forward call that it
differentiates::

    h = mm(x, a);  y = mm(h, b)        ->        h = mm(x, a)    # stage 0        y = mm(h, b)    # stage 1
    da = mm(x, dh)                               da = mm(x, dh)  # stage 0

A call that a later pass inserts gets the stage of the call that it is inserted for. Invariant: the graph stays in one
piece and unchanged. The values that cross between stages are read off it at the end (shardc/program/stages.py).
"""

from __future__ import annotations

from shardc.costs.stages.choose import SplitOptions
from shardc.costs.stages.fastest import fastest_stages
from shardc.language.sharding import num_shards
from shardc.program.program import Program

from ..propagate.cut_blocks import cut_blocks
from ..propagate.propagate import propagate
from .canonicalize import canonicalize
from .keep_dims import keep_dims


def cut_stages(program: Program) -> Program:
    """The program with a stage for each call; unchanged without a pipeline."""
    pipeline = program.options.pipeline
    if pipeline is None:
        return program
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
    pipeline, stages = fastest_stages(program, options, lambda: _annotated(program))
    return stages.tag(program, pipeline)


def _annotated(program: Program) -> Program:
    """The program without stages, in the ops and shardings that its calls are timed in."""
    return propagate(cut_blocks(keep_dims(canonicalize(program.copy()))))
