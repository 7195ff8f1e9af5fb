"""The ops of a program that have no rule."""

from __future__ import annotations

from torch import fx

from shardc.bucket import bucket
from shardc.collective import COLLECTIVES, reshard
from shardc.ops.padding import fit
from shardc.program import Program


def fallbacks_of(program: Program) -> list[fx.Node]:
    """The ops that have no rule and so run whole on every rank."""
    ours = {*COLLECTIVES, bucket, reshard, fit}
    return [node for node in program.calls if node.target not in ours and program.is_fallback(node)]
