"""Changes of a plan that might remove a collective, the likeliest first: one annotation or one option at a time.

The last one removes it for sure: its axes are taken out of every annotation. Patterns are globs over repeated modules,
as a user writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import cast

from torch import fx

from shardc.costs.stages.record import StageRecord
from shardc.costs.stages.units import prefixes
from shardc.language.mesh import Mesh, axis_of
from shardc.language.partition import Blocks, Entry, P
from shardc.options import BALANCES, Zero
from shardc.program.communication import axes_of
from shardc.program.node import is_cast, is_getitem, is_view, operands
from shardc.program.program import Input, Program, ends_of
from shardc.program.provenance import ShardingChange, StageCrossing
from shardc.report.explain.collectives import Movement, movements
from shardc.report.explain.retry import Change, Edit


def candidates(
    related: RelatedAnnotations, annotations: Mapping[str, P], inputs: Iterable[Input], zero: Zero | None, count: int
) -> list[list[Change]]:
    """At most ``count`` changes: edits of related annotations in one group, then others one by one, the surest last."""
    axes = set(related.axes)
    zeros: list[Zero | None] = []
    if zero is not None and axes & set(zero.axes):  # a stage of ZeRO that gathers less often, or no ZeRO
        zeros = [*(replace(zero, stage=stage) for stage in (2, 1) if stage < zero.stage), None]

    def at(*distances: int) -> list[tuple[str, P]]:
        items = annotations.items()
        return [(pattern, spec) for near in distances for pattern, spec in items if related.distances[pattern] == near]

    near = [
        *(_change(pattern, spec, after) for pattern, spec in at(0, 1) for after in _edits(related, pattern, spec)),
        *(Change(removed_calls=(call,)) for call in related.calls),
    ]
    changes = [
        *near,
        *_batch_cuts(related, annotations, inputs),
        *(Change(zero=option, is_zero=True) for option in zeros),
        *(_change(pattern, spec, None) for pattern, spec in at(2)),
        *_additions(related, annotations),
        *(_change(pattern, spec, None) for pattern, spec in at(3)),
    ]
    rest = {pattern: _without_axes(spec, axes) for pattern, spec in annotations.items() if axis_names(spec) & axes}
    edits = (Edit(pattern, annotations[pattern], spec if axis_names(spec) else None) for pattern, spec in rest.items())
    sure = Change(tuple(edits), is_zero=bool(zeros), removed_calls=related.calls)  # the axes cut nothing
    likely = list(dict.fromkeys(changes))[:count]
    chosen = likely if sure in likely else [*likely[: count - 1], sure]
    return [[each for each in chosen if each in near], *([each] for each in chosen if each not in near)]


# The annotations that a collective is related to.


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A value that an annotation may be about: ``kind`` and ``name`` as in a Pin, and its global shape."""

    kind: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelatedAnnotations:
    """The mesh axes that a collective goes over, and how closely each annotation is related to it.

    ``distances``, by pattern: 0 for an annotation of a value that is moved or is beside one; 1 if the cuts of a value
    come from it; 2 if it names one of the axes or annotates an input; 3 otherwise. ``unannotated``: values beside the
    moved ones that have no annotation. ``num_dims``: the number of dims of the values of each pattern. ``calls``: calls
    of ``shardc.annotate`` in the model that name one of the axes, or cause the collective.
    """

    axes: tuple[str, ...]
    distances: Mapping[str, int]
    unannotated: tuple[NamedValue, ...]
    num_dims: Mapping[str, int]
    calls: tuple[str, ...] = ()


def related_annotations(program: Program, node: fx.Node, annotations: Mapping[str, P]) -> RelatedAnnotations:
    """The annotations that a collective of a lowered program in global shapes is related to."""
    axes, moved = axes_of(node), list(movements(program, node))
    patterns = {f"{pattern}: {spec!r}": pattern for pattern, spec in annotations.items()}
    beside = dict.fromkeys(value for movement in moved for value in _values_beside(program, movement))
    pinned = {(pin.kind, pin.name): pin.text for pin in program.pins}
    needs = [need for cause in program.causes(node) if isinstance(cause, ShardingChange) for need in cause.needs]
    direct = {patterns.get(pinned.get((value.kind, value.name), "")) for value in beside}
    direct |= {patterns.get(need.annotation) for need in needs if need.kind in ("placed", "end")}
    texts = {need.annotation for need in needs}
    near = [node, *(each for movement in moved for each in (movement.producer, movement.result, *movement.users))]
    for value in (program.value(each)[0] for each in near if each.op != "output"):
        for by_axis in program.origins(value):
            texts |= {origin.annotation for axis, origin in by_axis.items() if axis in axes}
    origins = {patterns.get(text) for text in texts}
    inputs = {patterns.get(pin.text) for pin in program.pins if pin.kind == "input"}

    def distance(pattern: str, spec: P) -> int:
        is_near = pattern in inputs or axis_names(spec) & set(axes)
        return 0 if pattern in direct else 1 if pattern in origins else 2 if is_near else 3

    distances = {pattern: distance(pattern, spec) for pattern, spec in annotations.items()}
    unannotated = tuple(each for each in beside if (each.kind, each.name) not in pinned and each.kind != "output")
    num_dims: dict[str, int] = {}
    calls: dict[str, None] = {}
    for pin in program.pins:
        if pin.text in patterns:
            pattern, count = patterns[pin.text], len(pin.sharding.dims)
            num_dims[pattern] = min(count, num_dims.get(pattern, count))
        elif pin.kind == "value" and (pin.text in texts or set(axes) & {part.name for part in pin.sharding.cut_axes}):
            calls[pin.text] = None
    return RelatedAnnotations(axes, distances, unannotated, num_dims, tuple(calls))


def _values_beside(program: Program, movement: Movement) -> Iterator[NamedValue]:
    """The moved value, the value whose gradient it is, and the parameters and inputs of its producer and readers."""
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    ends = list(ends_of(program))
    for output, owner, _ in (ends[i] for i in movement.outputs):
        if owner is not None:
            yield NamedValue(inputs[owner].kind, inputs[owner].name, inputs[owner].type.shape)
        elif output.kind == "output":
            shape = program.value_type(program.value(movement.result)).shape
            yield NamedValue("output", output.name, shape)
    for call in [movement.producer, *(user for user in movement.users if user.op != "output")]:
        for operand in [call, *filter(None, operands(program.value(call)[0]))]:
            # go back through all views, casts and reshards
            while operand.op == "call_function" and len(operand.all_input_nodes) == 1:
                if not (is_view(operand) or is_cast(operand) or is_getitem(operand) or program.causes(operand)):
                    break
                operand = operand.all_input_nodes[0]
            input_ = inputs.get(operand)
            if input_ is not None and input_.kind in ("parameter", "buffer", "input"):
                yield NamedValue(input_.kind, input_.name, input_.type.shape)


def paths_near(program: Program, node: fx.Node) -> Iterator[str]:
    """The paths of the modules and the parameters that a collective concerns."""
    for movement in movements(program, node):
        for each in (movement.producer, movement.result, *movement.users):
            yield program.source(each).module if each.op == "call_function" else ""
        yield from (value.name for value in _values_beside(program, movement))


# Changes of annotations.


def _edits(related: RelatedAnnotations, pattern: str, spec: P) -> Iterator[P | None]:
    """An annotation with one thing changed. None drops it; this comes first if it names no other axes."""
    axes, num_dims = set(related.axes), related.num_dims.get(pattern, len(spec.entries))
    names, entries = axis_names(spec), _entries(spec, num_dims)
    if names <= axes:
        yield None
    if names & axes:
        yield from _moved(spec, entries, axes)
    else:  # the axes cut a whole dim: the last one (features) first, but of a whole value the first one (batch)
        cut: Entry = related.axes[0] if len(related.axes) == 1 else related.axes
        order = range(num_dims - 1, -1, -1) if names else [0, *range(num_dims - 1, 0, -1)]
        for dim in (dim for dim in order if dim < len(entries) and entries[dim] is None):
            yield _with_entries(spec, [*entries[:dim], cut, *entries[dim + 1 :]])
    # leave open the dims that the axes cut or, if the annotation names none of the axes, the whole dims
    opened = {dim for dim, entry in enumerate(entries) if (entry_axes(entry) & axes if names & axes else entry is None)}
    if opened and len(opened) < len(entries):
        yield _with_entries(spec, [P.OPEN if dim in opened else entry for dim, entry in enumerate(entries)])
    if not names <= axes:
        yield None
    if names & axes:
        yield _without_axes(spec, axes)


def _moved(spec: P, entries: list[Entry], axes: set[str]) -> Iterator[P]:
    """The annotation with an entry of the axes swapped with a whole dim."""
    for src, entry in enumerate(entries):
        if entry_axes(entry) & axes:
            for dst in (dim for dim, other in enumerate(entries) if other is None):
                swapped = list(entries)
                swapped[src], swapped[dst] = None, entry
                yield _with_entries(spec, swapped)


# Further annotations, and options.


def _batch_cuts(related: RelatedAnnotations, annotations: Mapping[str, P], inputs: Iterable[Input]) -> Iterator[Change]:
    """Cut the batch by an axis that cuts no input yet: annotate one input, from which the others follow."""
    patterns = {pattern.removeprefix("input:"): pattern for pattern in annotations}
    tensors = [tensor for tensor in inputs if tensor.kind == "input" and tensor.type.shape]
    annotated = (annotations[patterns[tensor.name]] for tensor in tensors if tensor.name in patterns)
    used = set[str]().union(*map(axis_names, annotated))
    for tensor in tensors[:1]:
        pattern = patterns.get(tensor.name, tensor.name)
        before = annotations.get(pattern)
        entries = _entries(before, len(tensor.type.shape)) if before is not None else [None]
        for axis in related.axes:
            if axis not in used and entries[0] is None:
                yield _change(pattern, before, P(*_trimmed([axis, *entries[1:]])))


def _additions(related: RelatedAnnotations, annotations: Mapping[str, P]) -> Iterator[Change]:
    """Annotate an unannotated parameter or input beside the collective: cut along one dim by an axis, or whole."""
    groups: dict[str, NamedValue] = {}
    for value in related.unannotated:
        glob = ".".join("*" if part.isdigit() else part for part in value.name.split("."))  # all repeated modules
        groups.setdefault(glob, value)
    for is_last in (False, True):
        for pattern, value in groups.items():
            dims = list(range(len(value.shape)))
            for axis in related.axes:
                for dim in dims[-1:] if is_last else dims[:1]:
                    if value.shape[dim] > 1:
                        yield _change(pattern, annotations.get(pattern), P(*[None] * dim, axis))
    for pattern in groups:
        yield _change(pattern, annotations.get(pattern), P())


# Entries of annotations.


def axis_names(spec: P) -> set[str]:
    """The mesh axes that an annotation names."""
    return set[str]().union(*map(entry_axes, spec.entries))


def entry_axes(entry: object) -> set[str]:
    """The mesh axes that one entry names; a part of an axis counts as the axis."""
    named = getattr(entry, "axes", entry)
    names = named if isinstance(named, tuple) else (named,)
    return {axis_of(name) for name in names if isinstance(name, str)}


def _change(pattern: str, before: P | None, after: P | None) -> Change:
    return Change((Edit(pattern, before, after),))


def _entries(spec: P, num_dims: int) -> list[Entry]:
    """One entry for each dim."""
    rest: Entry = P.OPEN if spec.rest_open else None
    return [*spec.entries, *[rest] * max(0, num_dims - len(spec.entries))]


def _with_entries(spec: P, entries: list[Entry]) -> P:
    return P(*_trimmed(entries), priority=spec.priority)


def _trimmed(entries: list[Entry]) -> list[Entry]:
    """The entries without whole dims at the end, and with open dims at the end as ``...``."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    count = len(kept)
    while kept and kept[-1] is P.OPEN:
        kept.pop()
    is_rest_open = len(kept) < count == len(entries)
    return [*kept, cast("Entry", ...)] if is_rest_open else [*kept, *[P.OPEN] * (count - len(kept))]


def _without_axes(spec: P, axes: set[str]) -> P:
    return _with_entries(spec, [_entry_without(entry, axes) for entry in spec.entries])


def _entry_without(entry: Entry, axes: set[str]) -> Entry:
    if not entry_axes(entry) & axes:
        return entry
    names = entry.axes if isinstance(entry, Blocks) else entry if isinstance(entry, tuple) else (str(entry),)
    rest = tuple(name for name in names if not isinstance(name, str) or axis_of(name) not in axes)
    if isinstance(entry, Blocks):
        return replace(entry, axes=tuple(map(str, rest))) if rest else None
    return (rest if len(rest) > 1 else rest[0]) if rest else None


# Messages between the stages of a pipeline.


def stage_candidates(program: Program, cause: StageCrossing, is_late: bool, mesh: Mesh, count: int) -> list[Change]:
    """At most ``count`` changes that may let less cross. ``is_late``: the message follows the last microbatch."""
    pipeline = program.options.pipeline
    assert pipeline is not None
    even = (("cuts", None),) if pipeline.cuts else ()  # the balance chooses where stages begin
    changes = []
    ends = {0, mesh.axis_size(pipeline.axis) - 1}
    if is_late and pipeline.chunks_a_rank == 1 and {cause.source, cause.target} == ends:
        changes.append(Change(pipeline_fields=(("schedule", "zb-v"), *even)))  # a V: both ends are on one rank
    changes += _other_beginnings(program, cause)
    changes += [Change(pipeline_fields=(("balance", name), *even)) for name in BALANCES if name != pipeline.balance]
    # One stage: its ranks go to the axis that cuts the batch, else to any other axis, else they are left out.
    sizes = mesh.sizes
    freed, sizes[pipeline.axis] = sizes[pipeline.axis], 1
    other = next((name for name in [*program.input_axes, *sizes] if name in sizes and name != pipeline.axis), None)
    if other is not None:
        sizes[other] *= freed
    return [*changes[: count - 1], Change(pipeline_fields=even, mesh=tuple(sizes.items()))]


def _other_beginnings(program: Program, cause: StageCrossing) -> Iterator[Change]:
    """Let a stage between the two begin with another module, the nearest first; the other stages stay."""
    begin: dict[str, int] = {}  # the place of each module's first call; if several begin there, only the outermost
    known: set[str] = set()
    forward = [node for node in program.calls if program.source(node).phase == "forward" and not program.causes(node)]
    for place, node in enumerate(sorted(forward, key=lambda node: program.source(node).ordinal)):
        new = [each for each in prefixes(program.source(node).module) if each not in known]
        begin.update(dict.fromkeys(new[:1], place))
        known.update(new)
    now = [path for path, _ in StageRecord(program).modules]
    if not all(path in begin for path in now[1:]):
        return  # a stage begins outside of all modules, which no glob names
    places = [0, *(begin[path] for path in now[1:]), inf]
    low, high = sorted((cause.source, cause.target))
    for stage in range(low + 1, high + 1):
        before, here, after = places[stage - 1 : stage + 2]
        others = [path for path, place in begin.items() if before < place < after and place != here]
        for path in sorted(others, key=lambda path: (path.count("."), abs(begin[path] - here))):
            yield Change(pipeline_fields=(("cuts", (*now[1:stage], path, *now[stage + 1 :])),))
