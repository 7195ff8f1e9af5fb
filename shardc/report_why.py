"""Why everything in a program is as it is, in the form in which the HTML report holds it: one table of origins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardc.announcement import collectives_of
from shardc.cause import Cause, Moved
from shardc.fact import Origin
from shardc.node import is_getitem
from shardc.program import Program


def why_record(program: Program) -> dict[str, Any]:
    """``why``: for each node by axis the place of its origin in ``origins``, in each of its results.

    An origin is ``[annotation, value, via, before]``: a place in ``annotations``, the value that it is of, the call
    that it came through, and the place of the origin before it, -1 on the annotated value itself. ``needs``: by
    collective, for each axis over which a value may not stay as it is: who takes it, the axis, the kind of need (see
    ``NeedKind``), the dim or None, what else than an annotation says so, and the place of its origin or -1.
    """
    table = _Origins(program)
    why = {
        node.name: [{axis: table.place(origin) for axis, origin in found.items()} for found in program.origins(node)]
        for node in program.graph.nodes
        if node.op != "output" and any(program.origins(node))
    }
    needs = {
        found.name: [need for cause in found.causes for need in _needs(cause, table)]
        for found in collectives_of(program)
    }
    return {"annotations": list(table.annotations), "origins": list(table.rows), "why": why, "needs": needs}


class _Origins:
    """Origins, each once: values share those that they come from, so that it is as long as the program is."""

    def __init__(self, program: Program) -> None:
        picked = ((*program.value(node), node) for node in program.graph.nodes if is_getitem(node))
        self._names = {(producer.name, index): node.name for producer, index, node in picked}
        self._places: dict[int, int] = {}  # by the identity of an origin, all of which the program holds
        self.annotations: dict[str, int] = {}
        self.rows: dict[tuple[int, str, str, int], int] = {}

    def place(self, origin: Origin) -> int:
        """Where it stands among the rows, and after those that it comes from."""
        for each in origin.chain:
            if id(each) not in self._places:
                self._places[id(each)] = self.rows.setdefault(self._row(each), len(self.rows))
        return self._places[id(origin)]

    def _row(self, origin: Origin) -> tuple[int, str, str, int]:
        """What the dump calls a result of a call that has several is the getitem that picks it."""
        annotation = self.annotations.setdefault(origin.annotation, len(self.annotations))
        before = -1 if origin.before is None else self._places[id(origin.before)]
        return annotation, self._names.get(origin.value, origin.value[0]), origin.via, before


def _needs(cause: Cause, table: _Origins) -> Iterator[list[Any]]:
    if isinstance(cause, Moved):
        for need in cause.needs:
            place = -1 if need.by is None else table.place(need.by)
            yield [cause.user.name, need.axis, need.kind, need.dim, need.said, place]
