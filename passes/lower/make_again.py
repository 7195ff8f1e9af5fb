"""Let backward compute values of forward again instead of reading saved ones; two passes share this."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import fx

from shardc.program.lifetime import split
from shardc.program.node import is_getitem, reached
from shardc.program.program import Program, Value


def make_again(
    program: Program, readers: Iterable[fx.Node], values: Collection[Value], twins: Mapping[fx.Node, fx.Node]
) -> None:
    """Let readers, calls of backward in order, read values of forward that are made again before their first reader.

    ``twins``: by node of forward, the node of backward that already makes the same value.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}  # by call of forward, its replacement in backward
    forward = set(split(program).forward)
    for reader in readers:

        def missing(node: fx.Node) -> Iterator[fx.Node]:
            """The operands that must be made again before a call and have not been yet."""
            for value in node.all_input_nodes:
                is_made = value not in forward or value in copies or (node in twins and value not in twins)
                if not is_made and (is_getitem(node) or program.value(value) in values):
                    yield value

        for node in sorted(reached([reader], missing) - {reader}, key=order.__getitem__):
            twin = twins.get(node)
            if twin is None:
                with program.graph.inserting_before(reader):
                    twin = program.repeat(node, copies)
            elif order[twin] > order[reader]:
                reader.prepend(twin)
            copies[node] = twin
        for value in reader.all_input_nodes:
            if value in copies and program.value(value) in values:
                reader.replace_input_with(value, copies[value])


def enclosing(module: str) -> Iterator[str]:
    """A module's path, and those of the modules that contain it, except the model."""
    while module:
        yield module
        module = module.rpartition(".")[0]
