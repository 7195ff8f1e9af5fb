"""accumulate: agreed -> agreed. A sum over microbatches is added up before anything else is done with it.

::

    y: f32[64, 64]{sum microbatch dp}                 y: f32[64, 64]{sum microbatch dp}
    z: f32[64, 64] = reshard(y)                ->     a: f32[64, 64]{sum dp} = reshard(y);  z: f32[64, 64] = reshard(a)

So ranks exchange it once a step and not once a microbatch. Invariant: every value that was there lies as before.
"""

from __future__ import annotations

from dataclasses import replace

from shardc.collective import reshard
from shardc.mesh import MICROBATCH
from shardc.node import operand
from shardc.program import Program


def accumulate(program: Program) -> Program:
    """The program with reshards that reduce over microbatches alone; the same without a pipeline."""
    if program.options.pipeline is None:
        return program
    program = program.copy()
    for node in list(program.calls):
        if node.target is not reshard:
            continue
        value = operand(node)
        lies = program.sharding(value)
        rest = tuple((part, op) for part, op in lies.partial if part.name != MICROBATCH)
        added = replace(lies, partial=rest)
        if rest == lies.partial or added == program.sharding(node):
            continue
        with program.graph.inserting_before(node):
            total = program.insert(reshard, (value,), program.type(node), node)
        program.set_sharding(total, added)
        program.set_origins(total, program.origins(node))
        program.set_cause(total, program.cause(node))
        node.args = (total,)
    return program
