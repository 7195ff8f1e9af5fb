"""Where one axis cuts an input and an output along different dims: which of the two the ops between them follow.

Propagate lets both come at once: each op is cut by what reaches it first, and the value moves where they meet::

    y: f32[128@a, 112, 112, 64] = convolution(x, w)     # x: f32[128@a, 224, 224, 3]
    output: f32[128, 112@a, 112, 64] = reshard(y)
        ->
    r: f32[128, 224@a, 224, 3] = reshard(x)             # x is 10 times smaller than y
    output: f32[128, 112@a, 112, 64] = convolution(r, w)

Both are compiled. The outputs come first where that sends fewer bytes and leaves each rank no more to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardc.costs.flops import flops_of
from shardc.language.sharding import Sharding
from shardc.program.communication import bytes_sent, is_collective
from shardc.program.program import Program

from ..propagate.cut_blocks import cut_blocks
from ..propagate.propagate import propagate
from ..reshard.choose_cuts import Arrivals, assign, current_shardings
from ..reshard.insert_reshards import insert_reshards
from ..reshard.lower_reshards import lower_reshards


def cheapest_ends(program: Program, decomposed: Callable[[Program], Program]) -> Program:
    """The program after ``decomposed``, as it is propagated, or with its outputs before its inputs if that is cheaper.

    Not where the user has set priorities.
    """
    inputs_first = decomposed(program)
    if not _ends_conflict(program):
        return inputs_first
    pins = tuple(replace(pin, priority=-1) if pin.kind == "output" else pin for pin in program.pins)
    outputs_first = decomposed(propagate(cut_blocks(replace(program.copy(level="canonical"), pins=pins))))
    nbytes, flops = [], []
    for result in (inputs_first, outputs_first):
        lowered = lower_reshards(insert_reshards(result))
        nbytes.append(sum(bytes_sent(lowered, node) for node in lowered.calls if is_collective(node)))
        flops.append(flops_of(lowered, True))
    return outputs_first if nbytes[1] < nbytes[0] and flops[1] <= flops[0] else inputs_first


def _ends_conflict(program: Program) -> bool:
    """Whether an axis of inputs and outputs both moves to another dim somewhere, and no priorities decide."""
    axes: dict[str, set[str]] = {"input": set(), "output": set()}
    for pin in program.pins:
        axes.setdefault(pin.kind, set()).update(_dims_by_axis(pin.sharding))
    shared = axes["input"] & axes["output"]
    if not shared or any(pin.priority for pin in program.pins):
        return False
    arrivals = Arrivals(program, current_shardings(program))
    for node in program.calls:
        op = arrivals.op_shardings(node, assign(program.rule(node), arrivals.claims(node)))
        operands = [None if value is None else arrivals.shardings[value] for value in program.operand_values(node)]
        pairs = [*zip(operands, op.operands, strict=True), *zip(program.shardings(node), op.results, strict=True)]
        for src, dst in ((src, dst) for src, dst in pairs if src is not None and dst is not None):
            src_dims, dst_dims = _dims_by_axis(src), _dims_by_axis(dst)
            if any(src_dims[axis] != dst_dims[axis] for axis in shared & src_dims.keys() & dst_dims.keys()):
                return True
    return False


def _dims_by_axis(sharding: Sharding) -> dict[str, int]:
    """The dim that each axis cuts."""
    return {part.name: dim for dim, cut in enumerate(sharding.dims) for part in cut.all_axes}
