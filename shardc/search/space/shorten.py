"""The annotations of a plan as a person would write them: none that is inferred, no dim left open without need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardc.language.partition import P
from shardc.search.space.plan import Plan

Annotations = dict[str, P]


def shortened(plan: Plan, is_same: Callable[[Annotations], bool]) -> Annotations:
    """Shorter annotations that make the same program as those of a plan, by ``is_same``; the user's own stay."""
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
        return closed
    for pattern in patterns:
        annotations = next(filter(is_same, _shorter(annotations, pattern)), annotations)
    return annotations


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
