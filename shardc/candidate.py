"""Changes that might remove a collective, the likeliest first: one annotation dropped, changed or added, or an option.

Last comes what removes it for sure: its axes in no annotation. Patterns are globs over repeated modules, as one writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import cast

from shardc.change import Change, Edit
from shardc.fact import Input
from shardc.mesh import axis_of
from shardc.options import Zero
from shardc.partition import Blocks, Entry, P
from shardc.site import Named, Site, axis_names, entry_axes


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
