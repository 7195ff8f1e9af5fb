"""Changes that might remove a collective, the likeliest first: one annotation dropped, changed or added, or an option.

Last comes what removes it for sure: its axes in no annotation. Patterns are globs over repeated modules, as one writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import cast

from shardc.costs.stage_record import StageRecord
from shardc.costs.stage_units import prefixes
from shardc.language.mesh import Mesh, axis_of
from shardc.language.partition import Blocks, Entry, P
from shardc.options import BALANCES, Pipeline, Zero
from shardc.program.program import Input, Program
from shardc.program.provenance import StageCrossing
from shardc.report.explain.collectives import Named, Site, axis_names, entry_axes
from shardc.report.explain.retry import Change, Edit


def candidates(
    site: Site, annotations: Mapping[str, P], inputs: Iterable[Input], zero: Zero | None, count: int
) -> list[Change]:
    """At most ``count`` changes, each different, the surest last."""
    found = [
        *_of_near_annotations(site, annotations),
        *(Change(taken_out=(call,)) for call in site.calls),
        *_of_inputs(site, annotations, inputs),
        *_of_zero(site, zero),
        *_dropped_at(site, annotations, 2),
        *_additions(site, annotations),
        *_dropped_at(site, annotations, 3),
    ]
    sure, first = nowhere(site, annotations, zero), list(dict.fromkeys(found))[:count]
    return first if sure in first else [*first[: count - 1], sure]


def nowhere(site: Site, annotations: Mapping[str, P], zero: Zero | None) -> Change:
    """The axes cut nothing: they are taken out of every annotation, and out of ``zero``."""
    gone = set(site.axes)
    edits = [Edit(pattern, spec, _dropped(spec, gone)) for pattern, spec in annotations.items()]
    changed = tuple(edit for edit in edits if edit.after != edit.before)
    return Change(changed, is_zero=zero is not None and zero.axis in gone, taken_out=site.calls)


def _dropped(spec: P, axes: set[str]) -> P | None:
    """The annotation without the axes; None where it says nothing then."""
    if not axes & axis_names(spec):
        return spec
    left = _with_entries(spec, [_entry_without(entry, axes) for entry in spec.entries])
    return left if axis_names(left) else None


# Annotations that are there.


def _of_near_annotations(site: Site, annotations: Mapping[str, P]) -> Iterator[Change]:
    """Of those about what is moved, and then of those that its cuts come from."""
    for distance in (0, 1):
        for pattern, spec in annotations.items():
            if site.distances[pattern] == distance:
                yield from (_change(pattern, spec, after) for after in _edits(site, pattern, spec))


def _dropped_at(site: Site, annotations: Mapping[str, P], distance: int) -> Iterator[Change]:
    for pattern, spec in annotations.items():
        if site.distances[pattern] == distance:
            yield _change(pattern, spec, None)


def _edits(site: Site, pattern: str, spec: P) -> Iterator[P | None]:
    """One annotation with one thing said otherwise; None drops it, first of all where it says nothing else."""
    axes, rank = set(site.axes), site.ranks.get(pattern, len(spec.entries))
    names = axis_names(spec)
    if names <= axes:
        yield None
    yield from _moved(spec, axes, rank) if names & axes else _cut_more(spec, site.axes, rank)
    yield from _opened(spec, axes, rank)
    if not names <= axes:
        yield None
    if names & axes:
        yield _with_entries(spec, [_entry_without(entry, axes) for entry in spec.entries])


def _moved(spec: P, axes: set[str], rank: int) -> Iterator[P]:
    """An entry of the axes changes places with a dim that is whole."""
    entries = _entries(spec, rank)
    for src, entry in enumerate(entries):
        if entry_axes(entry) & axes:
            for dst in (dim for dim, other in enumerate(entries) if other is None):
                swapped = list(entries)
                swapped[src], swapped[dst] = None, entry
                yield _with_entries(spec, swapped)


def _cut_more(spec: P, axes: tuple[str, ...], rank: int) -> Iterator[P]:
    """A dim that is whole is cut by the axes; a last dim first, which is the one of features."""
    entries = _entries(spec, rank)
    order = [0, *range(rank - 1, 0, -1)] if not axis_names(spec) else range(rank - 1, -1, -1)
    for dim in order:
        if dim < len(entries) and entries[dim] is None:
            cut: Entry = axes[0] if len(axes) == 1 else tuple(axes)
            yield _with_entries(spec, [*entries[:dim], cut, *entries[dim + 1 :]])


def _opened(spec: P, axes: set[str], rank: int) -> Iterator[P]:
    """What is said of the axes is left open; where they are not named, what is said to be whole."""
    entries = _entries(spec, rank)
    is_named = bool(axes & axis_names(spec))
    open_ = [dim for dim, entry in enumerate(entries) if (entry_axes(entry) & axes if is_named else entry is None)]
    if open_ and len(open_) < len(entries):
        yield _with_entries(spec, [P.OPEN if dim in open_ else entry for dim, entry in enumerate(entries)])


# Annotations that are not there, and options.


def _of_inputs(site: Site, annotations: Mapping[str, P], inputs: Iterable[Input]) -> Iterator[Change]:
    """The batch cut by an axis that cuts no input yet: said of one input, from which the others follow."""
    known = {pattern.removeprefix("input:"): pattern for pattern in annotations}
    passed = [given for given in inputs if given.kind == "input" and given.type.shape]
    used = {axis for given in passed if given.name in known for axis in axis_names(annotations[known[given.name]])}
    for axis in (axis for axis in site.axes if axis not in used):
        for given in passed[:1]:
            pattern = known.get(given.name, given.name)
            before = annotations.get(pattern)
            entries = _entries(before, len(given.type.shape)) if before is not None else [None]
            if entries[0] is None:
                yield _change(pattern, before, P(*_trimmed([axis, *entries[1:]])))


def _additions(site: Site, annotations: Mapping[str, P]) -> Iterator[Change]:
    """A parameter or input beside it that nothing is said of, cut by an axis along one dim, or whole."""
    groups: dict[str, Named] = {}
    for value in site.near:
        groups.setdefault(_glob(value), value)
    for dim_from_end in (False, True):
        for pattern, value in groups.items():
            dims = list(range(len(value.shape)))
            for axis in site.axes:
                for dim in dims[-1:] if dim_from_end else dims[:1]:
                    if value.shape[dim] > 1:
                        yield _change(pattern, annotations.get(pattern), P(*[None] * dim, axis))
    for pattern in groups:
        yield _change(pattern, annotations.get(pattern), P())


def _glob(value: Named) -> str:
    """The name with each index as ``*``: that of one of repeated modules stands for all."""
    return ".".join("*" if part.isdigit() else part for part in value.name.split("."))


def _of_zero(site: Site, zero: Zero | None) -> Iterator[Change]:
    """A stage of ZeRO that gathers less often, or none."""
    if zero is not None and zero.axis in site.axes:
        yield from (Change(zero=Zero(zero.axis, stage), is_zero=True) for stage in (2, 1) if stage < zero.stage)
        yield Change(is_zero=True)


# Entries.


def _change(pattern: str, before: P | None, after: P | None) -> Change:
    return Change((Edit(pattern, before, after),))


def _entries(spec: P, rank: int) -> list[Entry]:
    """One entry for each dim."""
    rest: Entry = P.OPEN if spec.rest_open else None
    return [*spec.entries, *[rest] * max(0, rank - len(spec.entries))]


def _with_entries(spec: P, entries: list[Entry]) -> P:
    return P(*_trimmed(entries), priority=spec.priority)


def _trimmed(entries: list[Entry]) -> list[Entry]:
    """Without whole dims at the end; open ones there as ``...``."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    count = len(kept)
    while kept and kept[-1] is P.OPEN:
        kept.pop()
    is_rest_open = len(kept) < count == len(entries)
    return [*kept, cast("Entry", ...)] if is_rest_open else [*kept, *[P.OPEN] * (count - len(kept))]


def _entry_without(entry: Entry, axes: set[str]) -> Entry:
    if not entry_axes(entry) & axes:
        return entry
    named = entry.axes if isinstance(entry, Blocks) else entry if isinstance(entry, tuple) else (str(entry),)
    left = tuple(name for name in named if axis_of(name) not in axes)
    if isinstance(entry, Blocks):
        return replace(entry, axes=left) if left else None
    return (left if len(left) > 1 else left[0]) if left else None


def stage_candidates(program: Program, cause: StageCrossing, is_late: bool, mesh: Mesh, count: int) -> list[Change]:
    """At most ``count`` changes for a message between stages; ``is_late``: it goes when all microbatches are done."""
    pipeline = program.options.pipeline
    assert pipeline is not None
    found = [
        *(_on_one_rank(pipeline, cause, mesh) if is_late else ()),
        *_other_beginnings(program, pipeline, cause),
        *(Change(stages=(("balance", each), *_freely(pipeline))) for each in BALANCES if each != pipeline.balance),
    ]
    return [*found[: count - 1], _one_stage(program, pipeline, mesh)]


def _freely(pipeline: Pipeline) -> tuple[tuple[str, None], ...]:
    """Stages begin where they are even."""
    return (("cuts", None),) if pipeline.cuts else ()


def _on_one_rank(pipeline: Pipeline, cause: StageCrossing, mesh: Mesh) -> Iterator[Change]:
    """Stages placed in a V, so that the first and the last are on one rank."""
    last = mesh.axis_size(pipeline.axis) - 1
    if pipeline.chunks_a_rank == 1 and {cause.source, cause.target} == {0, last}:
        yield Change(stages=(("schedule", "zb-v"), *_freely(pipeline)))


def _other_beginnings(program: Program, pipeline: Pipeline, cause: StageCrossing) -> Iterator[Change]:
    """A stage between the two begins with another module, the nearest first; all other stages as they do."""
    begin, now = _beginnings(program), [path for path, _ in StageRecord(program).modules]
    if not all(path in begin for path in now[1:]):
        return  # a stage begins outside of all modules, which no glob names
    places = [0, *(begin[path] for path in now[1:]), inf]
    low, high = sorted((cause.source, cause.target))
    for stage in range(low + 1, high + 1):
        before, here, after = places[stage - 1 : stage + 2]
        others = [path for path, place in begin.items() if before < place < after and place != here]
        for path in sorted(others, key=lambda path: (path.count("."), abs(begin[path] - here))):
            yield Change(stages=(("cuts", (*now[1:stage], path, *now[stage + 1 :])),))


def _beginnings(program: Program) -> dict[str, int]:
    """The modules by the place of their first call of forward; of those that begin at one place the outermost."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    forward = [node for node in program.calls if program.source(node).phase == "forward" and not program.causes(node)]
    for place, node in enumerate(sorted(forward, key=lambda node: program.source(node).ordinal)):
        path = program.source(node).module
        fresh = [each for each in prefixes(path) if each not in seen]
        found.update(dict.fromkeys(fresh[:1], place))
        seen.update(fresh)
    return found


def _one_stage(program: Program, pipeline: Pipeline, mesh: Mesh) -> Change:
    """The pipeline's ranks given to the axis that cuts the batch, else to any other, else left out."""
    sizes = mesh.sizes
    freed, sizes[pipeline.axis] = sizes[pipeline.axis], 1
    data = [part.name for pin in program.pins if pin.kind == "input" for part in pin.sharding.cut_axes]
    other = next((name for name in [*data, *sizes] if name in sizes and name != pipeline.axis), None)
    if other is not None:
        sizes[other] *= freed
    return Change(stages=_freely(pipeline), mesh=tuple(sizes.items()))
