"""The annotations of a plan as a person would write them: few globs, none inferred, no dim left open without need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from shardc.capture.annotations import Names, named_by
from shardc.language.partition import P
from shardc.search.space.names import NUMBER, globs_over
from shardc.search.space.plan import Plan

Annotations = dict[str, P]


def shortened(plan: Plan, names: Names, is_same: Callable[[Annotations], bool]) -> Annotations:
    """Shorter annotations that make the same program as those of a plan, by ``is_same``; the user's own stay.

    ``names``: those of the whole model, of which ``is_same`` may know only a few blocks.
    """
    annotations, given = plan.annotations, dict(plan.given)
    patterns = [each for each in annotations if each not in given]
    for pattern in patterns:
        without = {name: each for name, each in annotations.items() if name != pattern}
        annotations = without if is_same(without) else annotations
    patterns = [each for each in patterns if each in annotations]
    closed = annotations
    for pattern in patterns:  # usually all of them may be closed
        closed = _replaced(closed, pattern, _name(pattern), _closed(annotations[pattern]))
    if is_same(closed):
        annotations = closed
    else:
        for pattern in patterns:
            annotations = next(filter(is_same, _shorter(annotations, pattern)), annotations)
    return _merged(annotations, given, names, is_same)


def _merged(
    annotations: Annotations, given: Collection[str], names: Names, is_same: Callable[[Annotations], bool]
) -> Annotations:
    """The annotations with one glob in place of those that have the same spec and differ in one number alone."""
    for i in range(max((pattern.count(".") for pattern in annotations), default=0)):
        for group in _alike(annotations, given, i):
            exact = (each for each in globs_over(group, i) if _values([each], names) == _values(group, names))
            if (merged := next(exact, None)) is not None:
                fewer = {name: each for name, each in annotations.items() if name not in group[1:]}
                changed = _replaced(fewer, group[0], merged, fewer[group[0]])
                annotations = changed if is_same(changed) else annotations
    return annotations


def _alike(annotations: Annotations, given: Collection[str], i: int) -> list[list[str]]:
    """Groups of patterns that have the same spec and differ only in the number in their ``i``-th part."""
    groups: dict[object, list[str]] = {}
    for pattern, spec in annotations.items():
        parts = pattern.split(".")
        if NUMBER.fullmatch("".join(parts[i : i + 1])) and pattern not in given:
            groups.setdefault((spec, *parts[:i], "", *parts[i + 1 :]), []).append(pattern)
    return [group for group in groups.values() if len(group) > 1]


def _values(patterns: Iterable[str], names: Names) -> set[tuple[str, str]]:
    """What patterns match, by kind and name."""
    return {value for pattern in patterns for value in named_by(pattern, names)}


def _shorter(annotations: Annotations, pattern: str) -> Iterator[Annotations]:
    """The annotations with one shortened: without prefix and with all dims closed, or only one of the two."""
    spec = annotations[pattern]
    for name in dict.fromkeys((_name(pattern), pattern)):
        yield _replaced(annotations, pattern, name, _closed(spec))
    yield _replaced(annotations, pattern, _name(pattern), spec)


def _name(pattern: str) -> str:
    return pattern.partition(":")[2] or pattern


def _closed(spec: P) -> P:
    return P(*(None if spec.is_open(dim) else entry for dim, entry in enumerate(spec.entries)))


def _replaced(annotations: Mapping[str, P], pattern: str, name: str, spec: P) -> Annotations:
    return {name if each == pattern else each: spec if each == pattern else old for each, old in annotations.items()}
