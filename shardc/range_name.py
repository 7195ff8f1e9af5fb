"""What a call is named in a trace, predicted or measured: ``phase/module/op``."""

from __future__ import annotations

from torch import fx

from shardc.program import Program


def range_name(program: Program, node: fx.Node) -> str:
    """``backward/blocks.0.mlp/gelu_backward``: the node's phase, its module (``(model)`` at the top), and its name."""
    source = program.source(node)
    return f"{source.phase}/{source.module or '(model)'}/{node.name}"
