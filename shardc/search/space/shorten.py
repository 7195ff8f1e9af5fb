"""The annotations of a plan as a person would write them: none that is inferred, no dim left open without need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardc.language.partition import P
from shardc.search.space.plan import Plan

Annotations = dict[str, P]


def shortened(plan: Plan, is_same: Callable[[Annotations], bool]) -> Annotations:
    """Annotations that make the same program as those of a plan, as ``is_same`` tells; the user's own stay."""
    annotations, given = plan.annotations, dict(plan.given)
    for pattern in [each for each in annotations if each not in given]:
        for shorter in _shorter(annotations, pattern):
            if is_same(shorter):
                annotations = shorter
                break
    return annotations


def _shorter(annotations: Annotations, pattern: str) -> Iterator[Annotations]:
    """The annotations without one, with all its dims closed, and with a name that needs no prefix."""
    spec = annotations[pattern]
    yield {name: each for name, each in annotations.items() if name != pattern}
    closed = P(*(None if spec.is_open(dim) else entry for dim, entry in enumerate(spec.entries)))
    for name in dict.fromkeys((pattern.partition(":")[2] or pattern, pattern)):
        yield _replaced(annotations, pattern, name, closed)
    yield _replaced(annotations, pattern, pattern.partition(":")[2] or pattern, spec)


def _replaced(annotations: Mapping[str, P], pattern: str, name: str, spec: P) -> Annotations:
    return {name if each == pattern else each: spec if each == pattern else old for each, old in annotations.items()}
