"""rematerialize: lowered -> lowered. Backward computes some values of forward again, so that fewer are saved.

Calls of forward are copied to just before the first call of backward that reads them::

    y = relu(x);  z = dot(y, w)                 y = relu(x);  z = dot(y, w)
    ...                                  ->     ...
    dw = dot(y, dz)                             y_1 = relu(x);  dw = dot(y_1, dz)

The option ``Remat`` chooses them: the calls inside of modules, or those that are cheap to repeat and large to save
(choose_saved.py). Random numbers are drawn by counters, so copies draw the same. If backward gathers a parameter once
more anyway, copies read that. Calls that a pipeline runs once a step are not repeated. Invariant: forward is unchanged.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import fx

from shardc.language.errors import OptionError, did_you_mean
from shardc.ops.tier import TRANSFERS
from shardc.options import Remat
from shardc.program.communication import gathered_again, is_collective
from shardc.program.lifetime import Parts, split
from shardc.program.node import is_getitem, reached
from shardc.program.program import Program, Value
from shardc.program.stages import ValueKinds

from .choose_saved import Choose, within_budget
from .make_again import enclosing, make_again


def rematerialize(program: Program) -> Program:
    """The program that saves the values that ``Remat`` leaves saved; unchanged without it."""
    remat = program.options.remat
    if remat is None or not split(program).backward:
        return program
    if remat.blocks:
        return _recomputing(program, lambda copied, parts, _: _in_blocks(copied, parts, remat))
    return within_budget(program, remat, _recomputing)


def _recomputing(program: Program, choose: Choose) -> Program:
    """A copy in which backward computes the chosen values again."""
    program = program.copy()
    parts = split(program)
    twins = _twins(parts)
    unsaved = choose(program, parts, twins)
    if program.options.pipeline is not None:  # values made once a step live to its end anyway
        timed = ValueKinds(program).timed
        unsaved = {value for value in unsaved if value[0] in timed}
    unsaved |= {program.value(node) for node in twins}
    make_again(program, parts.backward, unsaved, twins)
    return program


def _twins(parts: Parts) -> dict[fx.Node, fx.Node]:
    """By node of forward, an equal one of backward: collectives and transfers, as of ZeRO 3, and what leads to them."""
    twins: dict[fx.Node, fx.Node] = {}

    def key(node: fx.Node) -> object:
        return node.target, fx.map_arg((node.args, node.kwargs), lambda operand: twins.get(operand, operand))

    known = {key(node): node for node in parts.backward}
    for node in parts.forward:
        if (twin := known.get(key(node))) is not None:
            twins[node] = twin
    brought = [node for node in twins if is_collective(node) or node.target in TRANSFERS]
    needed = reached(brought, lambda node: twins.keys() & node.all_input_nodes)
    return {node: twin for node, twin in twins.items() if node in needed}


def _in_blocks(program: Program, parts: Parts, remat: Remat) -> set[Value]:
    """The values that are computed in the blocks and read in no other block or stage of forward."""
    chosen = blocks_of(program, parts, remat)
    block: dict[fx.Node, str] = {}
    for node in parts.forward:
        block[node] = next((path for path in enclosing(program.source(node).module) if path in chosen), "")
    home = {node: (block[node], program.source(node).stage) for node in parts.forward}
    inside = {(node, i) for node in parts.forward if block[node] for i in range(len(program.types(node)))}
    sent = [node for node in parts.forward if is_collective(node) and (not remat.collectives or gathered_again(node))]
    saved = {(node, i) for node in sent for i in range(len(program.types(node)))}
    for reader in (*parts.forward, program.output_node):
        values = () if is_getitem(reader) else map(program.value, reader.all_input_nodes)
        saved |= {value for value in values if block.get(value[0]) and home[value[0]] != home.get(reader)}
    return inside - saved


def blocks_of(program: Program, parts: Parts, remat: Remat) -> set[str]:
    """The paths of the modules whose inside is computed again. Raises an OptionError if the glob matches none."""
    modules = (program.source(node).module for node in parts.forward)
    paths = dict.fromkeys(path for module in modules for path in reversed(list(enclosing(module))))
    matched = [path for path in paths if fnmatchcase(path, remat.blocks)]
    outermost = [path for path in matched if not any(above in matched for above in list(enclosing(path))[1:])]
    if not outermost:
        raise OptionError(
            f"Remat(blocks={remat.blocks!r})",
            f"a glob over {len(paths)} modules",
            "it matches none that makes a value",
            did_you_mean(remat.blocks, paths) or f"use one of {', '.join(list(paths)[:8])}",
        )
    return set(outermost[:: remat.every])
