"""Where a collective stands: which annotations it comes from, and which parameters and inputs are near it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from shardc.bucket import axes_of
from shardc.cause import Moved
from shardc.ends import ends_of
from shardc.mesh import axis_of
from shardc.node import is_cast, is_getitem, is_view, operands
from shardc.partition import P
from shardc.pin import Pin
from shardc.program import Program
from shardc.transfer import Movement, movements


@dataclass(frozen=True, slots=True)
class Named:
    """A value that an annotation may be about: ``kind`` and name as in a Pin, and its global shape."""

    kind: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """Of a collective: the mesh axes that it goes over, and the annotated patterns that it may hang on.

    ``distances``: 0 for one about a value that it moves, or that stands beside one; 1 for one that its cuts come from;
    2 for others that name one of its axes, and for inputs; 3 for all else. ``near``: values beside it that no pattern
    is about. ``ranks``: of each pattern how many dims its values have. ``calls``: of ``shardc.annotate`` in the model
    that name one of its axes, or that it is moved for.
    """

    axes: tuple[str, ...]
    distances: Mapping[str, int]
    near: tuple[Named, ...]
    ranks: Mapping[str, int]
    calls: tuple[str, ...] = ()


def site_of(program: Program, node: fx.Node, annotations: Mapping[str, P]) -> Site:
    """The site of a collective of a lowered program in global shapes."""
    axes, moved = axes_of(node), list(movements(program, node))
    said = {f"{pattern}: {spec!r}": pattern for pattern, spec in annotations.items()}
    beside = dict.fromkeys(value for movement in moved for value in _beside(program, movement))
    pinned = {(pin.kind, pin.name): pin.text for pin in program.pins}
    needs = [need for cause in program.causes(node) if isinstance(cause, Moved) for need in cause.needs]
    direct = {said.get(pinned.get((value.kind, value.name), "")) for value in beside}
    direct |= {said.get(need.end) for need in needs if need.kind in ("placed", "end")}
    origins = {*(need.end for need in needs), *_origins(program, node, moved, axes)}
    came = {said.get(text) for text in origins}
    inputs = {said.get(pin.text) for pin in program.pins if pin.kind == "input"}

    def distance(pattern: str, spec: P) -> int:
        if pattern in direct:
            return 0
        if pattern in came:
            return 1
        return 2 if pattern in inputs or axis_names(spec) & set(axes) else 3

    distances = {pattern: distance(pattern, spec) for pattern, spec in annotations.items()}
    near = tuple(value for value in beside if (value.kind, value.name) not in pinned and value.kind != "output")
    in_model = [pin for pin in program.pins if pin.kind == "value" and pin.text not in said]
    calls = [pin.text for pin in in_model if pin.text in origins or set(axes) & set(_cut_by(pin))]
    return Site(axes, distances, near, _ranks(program, said), tuple(dict.fromkeys(calls)))


def _cut_by(pin: Pin) -> Iterator[str]:
    yield from (part.name for part in pin.sharding.cut_axes)


def axis_names(spec: P) -> set[str]:
    """The mesh axes that a P names."""
    return set[str]().union(*map(entry_axes, spec.entries))


def entry_axes(entry: object) -> set[str]:
    """Those of one entry, an axis for each part of one."""
    named = getattr(entry, "axes", entry)
    names = (named,) if isinstance(named, str) else named if isinstance(named, tuple) else ()
    return set(map(axis_of, names))


def _ranks(program: Program, said: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pin in program.pins:
        if pin.text in said:
            rank = len(pin.sharding.dims)
            found[said[pin.text]] = min(rank, found.get(said[pin.text], rank))
    return found


def _origins(program: Program, node: fx.Node, moved: list[Movement], axes: tuple[str, ...]) -> Iterator[str]:
    """The annotations that the axes came from: to what is moved, and to what reads it."""
    seen = [node, *(each for movement in moved for each in (movement.made, movement.come, *movement.users))]
    for each in seen:
        if each.op != "output":
            for origins in program.origins(program.value(each)[0]):
                yield from (origin.annotation for axis, origin in origins.items() if axis in axes)


def _beside(program: Program, movement: Movement) -> Iterator[Named]:
    """What is moved, what it is the gradient of, and the parameters and inputs that its maker and readers take."""
    given = dict(zip(program.placeholders, program.inputs, strict=True))
    ends = list(ends_of(program))
    for output, owner, _ in (ends[i] for i in movement.ends):
        if owner is not None:
            yield Named(given[owner].kind, given[owner].name, given[owner].type.shape)
        elif output.kind == "output":
            yield Named("output", output.name, program.value_type(program.value(movement.come)).shape)
    calls = [movement.made, *(user for user in movement.users if user.op != "output")]
    for call in calls:
        for taken in [call, *filter(None, operands(program.value(call)[0]))]:
            put = given.get(_stored(program, taken))
            if put is not None and put.kind in ("parameter", "buffer", "input"):
                yield Named(put.kind, put.name, put.type.shape)


def _stored(program: Program, node: fx.Node) -> fx.Node:
    """The input that a value is a view or a cast of, however it was resharded; else where that ends."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        is_same = is_view(node) or is_cast(node) or is_getitem(node) or bool(program.causes(node))
        if not is_same:
            break
        node = node.all_input_nodes[0]
    return node
