"""What a rank sends where an op is taken apart, and where it gathers instead: both answers to decompose's question.

Asked of an op that can be taken apart along a dim that it needs whole and that arrives cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.program import Program
from shardc.rule import Rule
from shardc.sharding import ceil_div

from .along import Along
from .assign_cuts import Cuts, num_pieces
from .decompose import (
    DECOMPOSITIONS,
    apart_bytes,
    arriving,
    cut_whole,
    gathered_bytes,
    is_scattered,
    is_stored,
    num_others,
    windows_of,
)
from .emitter import NEVER
from .windowed import WINDOWED


@dataclass(frozen=True, slots=True)
class FormCosts:
    """Bytes that a rank sends by each way, over ``axes``; ``refused``: why the compiler does not ask for the first."""

    axes: frozenset[str]
    apart: int
    gathered: int
    refused: str = ""


def compare_forms(program: Program, node: fx.Node) -> FormCosts | None:
    """What both ways cost; None of an op that is never taken apart so."""
    rule = program.rule(node)
    if node.target not in DECOMPOSITIONS and node.target not in WINDOWED:
        return None
    cuts = arriving(program, node, rule)
    whole = cut_whole(rule, cuts) if node.target in DECOMPOSITIONS else set()
    if whole and DECOMPOSITIONS[node.target].moved(program, node, whole) < NEVER:
        return _summed(program, node, rule, cuts, whole)
    found = windows_of(program, node, rule) if node.target in WINDOWED else iter(())
    return next((_windowed(program, node, rule, cuts, *each) for each in found), None)


def _summed(program: Program, node: fx.Node, rule: Rule, cuts: Cuts, whole: set[str]) -> FormCosts:
    """Of an op that becomes local work and a sum."""
    count = num_pieces({factor: cuts[factor] for factor in whole})
    apart, gathered = apart_bytes(program, node, cuts, whole), gathered_bytes(program, node, rule, whole, cuts)
    refused = "not asked: positions do not follow one another" if is_scattered(node, cuts, whole) else ""
    if any(is_stored(program, node, cuts[factor]) for factor in whole):
        refused = "not asked: a table that is cut as inputs are is stored so, and gathered"
    axes = frozenset(part.name for factor in whole for part in cuts[factor].all_axes)
    return FormCosts(axes, apart * (count - 1) // count, gathered * (count - 1) // count, refused)


def _windowed(
    program: Program, node: fx.Node, rule: Rule, cuts: Cuts, factor: str, along: Along, moved: int
) -> FormCosts:
    """Of an op that looks at neighbours; ``moved``: what all ranks together send of the edges."""
    gathered = gathered_bytes(program, node, rule, {factor}, cuts) * (along.count - 1) // along.count
    apart = ceil_div(moved, along.count * num_others(cuts, {factor}))
    return FormCosts(frozenset(part.name for part in cuts[factor].all_axes), apart, gathered)
