"""rematerialize: lowered -> lowered. Backward makes again what it reads of forward, from less that is saved.

What is made again are copies of forward's calls, just before the first call of backward that reads them::

    y = relu(x);  z = dot(y, w)                 y = relu(x);  z = dot(y, w)
    ...                                  ->     ...
    dw = dot(y, dz)                             y_1 = relu(x);  dw = dot(y_1, dz)

The option ``Remat`` says what: what is made inside of modules, or what is cheap to make again and large
(choose_saved.py). Random numbers are drawn by counters, so they are drawn again as they were. Where backward gathers a
parameter once more anyway, copies read that; what a pipeline makes once a step is not made again. Invariant: forward is
as it was.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx

from shardc.announcement import is_collective
from shardc.error import OptionError, did_you_mean
from shardc.lifetime import Parts, split
from shardc.node import is_getitem, reached
from shardc.options import Remat
from shardc.program import Program, Value
from shardc.stage_cut import Kinds

from .choose_saved import within_budget
from .choose_saved_stages import Choose, within_budget_a_rank


def rematerialize(program: Program) -> Program:
    """The program that saves what ``Remat`` says; the same without it."""
    remat = program.options.remat
    if remat is None or not split(program).backward:
        return program
    if remat.blocks:
        return _remade(program, lambda copied, parts, _: in_blocks(copied, parts, remat))
    if program.options.pipeline is not None:
        return within_budget_a_rank(program, remat, _remade)
    return _remade(program, lambda copied, parts, twins: within_budget(copied, parts, twins, remat))


def _remade(program: Program, choose: Choose) -> Program:
    """A copy in which backward makes again what is chosen."""
    program = program.copy()
    parts = split(program)
    twins, made_anew = _twins(parts), _made_anew(program)
    forgotten = {value for value in choose(program, parts, twins) if value[0] in made_anew}
    _Maker(program, parts, forgotten | {program.value(node) for node in twins}, twins).run(parts.backward)
    return program


def _made_anew(program: Program) -> Container[fx.Node]:
    """Calls whose values need not be saved: what a pipeline makes once a step is there to its end, and not twice."""
    return Kinds(program).timed if program.options.pipeline is not None else set(program.graph.nodes)


def in_blocks(program: Program, parts: Parts, remat: Remat) -> set[Value]:
    """The values that are made in the blocks and read in no other place of forward, be it a block or a stage."""
    chosen = blocks_of(program, parts, remat)
    block = {node: _block(program.source(node).module, chosen) for node in parts.forward}
    room = {node: (block[node], program.source(node).stage) for node in parts.forward}
    inside = {(node, i) for node in parts.forward if block[node] for i in range(len(program.types(node)))}
    kept = {(node, 0) for node in parts.forward if is_collective(node) and not remat.collectives}
    for reader in (*parts.forward, program.output_node):
        read = () if is_getitem(reader) else reader.all_input_nodes
        kept |= {
            value for value in map(program.value, read) if block.get(value[0]) and room[value[0]] != room.get(reader)
        }
    return inside - kept


def blocks_of(program: Program, parts: Parts, remat: Remat) -> set[str]:
    """The paths of the modules whose inside is made again. OptionError where the glob matches none."""
    paths = [path for node in parts.forward for path in reversed(list(_and_above(program.source(node).module)))]
    known = dict.fromkeys(paths)
    matched = dict.fromkeys(path for path in known if fnmatchcase(path, remat.blocks))
    outermost = [path for path in matched if not any(above in matched for above in list(_and_above(path))[1:])]
    if not outermost:
        raise OptionError(
            f"Remat(blocks={remat.blocks!r})",
            f"a glob over {len(known)} modules",
            "it matches none that makes a value",
            did_you_mean(remat.blocks, known) or f"use one of {', '.join(list(known)[:8])}",
        )
    return set(outermost[:: remat.every])


def _and_above(module: str) -> Iterator[str]:
    """A module's path and those of the modules that hold it, but for the model."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _block(module: str, chosen: set[str]) -> str:
    return next((path for path in _and_above(module) if path in chosen), "")


def _twins(parts: Parts) -> dict[fx.Node, fx.Node]:
    """Collectives of forward that backward has too, and what leads to them: ZeRO's stage 3 has such."""
    same: dict[fx.Node, fx.Node] = {}
    known = {_key(node, {}): node for node in parts.backward}
    for node in parts.forward:
        if (twin := known.get(_key(node, same))) is not None:
            same[node] = twin
    needed = reached(filter(is_collective, same), lambda node: same.keys() & node.all_input_nodes)
    return {node: twin for node, twin in same.items() if node in needed}


def _key(node: fx.Node, given: dict[fx.Node, fx.Node]) -> object:
    return node.target, fx.map_arg((node.args, node.kwargs), lambda operand: given.get(operand, operand))


class _Maker:
    """Makes forgotten values again. State: ``made``, for a call of forward the one that stands for it in backward."""

    def __init__(self, program: Program, parts: Parts, forgotten: set[Value], twins: Mapping[fx.Node, fx.Node]) -> None:
        self.program, self.forgotten, self.twins = program, forgotten, twins
        self.forward = set(parts.forward)
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self, backward: Sequence[fx.Node]) -> None:
        for reader in backward:
            missing = self._missing(reader)
            for node in sorted(missing, key=self.place.__getitem__):
                self.made[node] = self._make(node, reader)
            for operand in reader.all_input_nodes:
                if operand in self.made and self.program.value(operand) in self.forgotten:
                    reader.replace_input_with(operand, self.made[operand])

    def _missing(self, reader: fx.Node) -> set[fx.Node]:
        """The calls of forward that must be made again before a call, and are not yet."""

        def missing(node: fx.Node) -> Iterator[fx.Node]:
            for operand in node.all_input_nodes:
                is_wanted = is_getitem(node) or self.program.value(operand) in self.forgotten
                if is_wanted and operand in self.forward and operand not in self.made:
                    yield operand

        return reached([reader], missing) - {reader}

    def _make(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        twin = self.twins.get(node)
        if twin is not None:
            if self.place[twin] > self.place[reader]:
                reader.prepend(twin)
            return twin
        with self.program.graph.inserting_before(reader):
            return self.program.repeat(node, self.made)
