"""Explanations of random models under random annotations are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import annotations, meshes, models, options
from torch import fx

import shardc
from shardc import Mesh, P
from shardc.ops.piece import fit
from shardc.program.collective import COLLECTIVES
from shardc.program.node import is_cast, is_getitem
from shardc.program.program import Program
from shardc.program.text import value_names
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import REPLICATED, Chain, Explanation

pytestmark = pytest.mark.slow


class Drawn:
    """A model and what it is compiled for."""

    def __init__(self, data: st.DataObject) -> None:
        self.model, self.x = data.draw(models())
        self.mesh: Mesh = data.draw(meshes())
        self.annotations = data.draw(annotations(self.model, self.mesh, self.x))
        self.options = data.draw(options(self.mesh))

    def compiled(self, annotations: dict[str, P], **options: Any) -> shardc.Compiled:
        return shardc.compile(self.model, self.mesh, annotations, args=(self.x,), **options)


@settings(max_examples=25)
@given(st.data())
def test_every_step_of_a_chain_is_an_op_that_has_the_values_of_the_step(data: st.DataObject) -> None:
    """And every cut of every value has a chain, which begins in what the user said and goes along cut values."""
    drawn = Drawn(data)
    compiled = drawn.compiled(drawn.annotations, **drawn.options)
    program, explainer = compiled.whole, Explainer(compiled.whole)
    known = {f"{pattern}: {spec!r}" for pattern, spec in drawn.annotations.items()}
    known |= {drawn.options["zero"].text} if drawn.options["zero"] else set()
    links = Links(program)
    for node in program.graph.nodes:
        if node.op != "output":
            found = explainer.node(node)
            assert set(found.ends) <= known | {REPLICATED}, found
            assert found.kind != "collective" or REPLICATED not in found.ends, found
            assert found.kind == "collective" or {chain.axis for chain in found.chains} == axes_of(program, node), found
            for chain in chains_of(found):
                links.check(chain)


@settings(max_examples=15)
@given(st.data())
def test_without_the_annotation_that_a_chain_ends_in_the_sharding_or_the_chain_changes(data: st.DataObject) -> None:
    """Where two annotations say the same, one of them is named, and once that is gone the other."""
    drawn = Drawn(data)
    before = Explainer(drawn.compiled(drawn.annotations, **drawn.options).whole)
    names = [(kind, name) for kind, table in before.tables.items() for name in table if kind != "module"]
    kind, name = data.draw(st.sampled_from(names))
    found = before.tables[kind][name]()
    rest = {pattern: spec for pattern, spec in drawn.annotations.items() if f"{pattern}: {spec!r}" not in found.ends}
    zero = drawn.options["zero"]
    after = Explainer(drawn.compiled(rest, zero=None if zero and zero.text in found.ends else zero).whole)
    if found.ends == (REPLICATED,) or name not in after.tables[kind]:
        return
    again = after.tables[kind][name]()
    assert not set(again.ends) & set(found.ends) - {REPLICATED}
    is_same = again.type == found.type and [chain.axis for chain in again.chains] == [c.axis for c in found.chains]
    assert not is_same or not found.chains or again.ends != (REPLICATED,)


class Links:
    """What each op of a program reads and makes, behind what only moves it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.named = {name: node for node, name in value_names(program).items()}

    def check(self, chain: Chain) -> None:
        """Each step's op has the value and the one before; the axis cuts the value, or its sum is open over it."""
        for step in chain.steps:
            if step.role in ("annotated", "made", "summed", "read"):
                assert chain.axis in axes_of(self.program, self.named[step.value]), (step, chain)
        for before, step in zip(chain.steps, chain.steps[1:], strict=False):
            if step.role not in ("tied", "repeated"):
                around = set(self._around(self.nodes[step.call]))
                assert {self.named[before.value], self.named[step.value]} <= around, chain

    def _around(self, op: fx.Node) -> Iterator[fx.Node]:
        yield from filter(is_getitem, op.users)
        yield op
        seen, todo = set[fx.Node](), list(op.all_input_nodes)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                yield node
                todo += node.all_input_nodes if self._only_moves(node) else []

    def _only_moves(self, node: fx.Node) -> bool:
        is_ours = node.target in COLLECTIVES or node.target is fit or bool(self.program.causes(node))
        return node.op == "call_function" and (is_ours or is_getitem(node) or is_cast(node))


def axes_of(program: Program, node: fx.Node) -> set[str]:
    """The axes that cut a node's value, or over which a sum is open; of a node with several, those of each."""
    producer, index = program.value(node)
    lie = [each for i, each in enumerate(program.shardings(producer)) if producer is node or i == index]
    return {part.name for each in lie if each is not None for part in (*each.cut_axes, *each.partial_axes)}


def chains_of(found: Explanation) -> Iterator[Chain]:
    """Of it and its parts."""
    yield from found.chains
    for part in found.parts:
        yield from chains_of(part)
