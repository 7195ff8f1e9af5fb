"""Patterns: which names one means, and what is said when it means none, or too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from shardc.error import ShardingError, did_you_mean

KINDS = ("param", "input", "module", "output")

Names = Mapping[str, Mapping[str, str]]
"""By kind (``param``, ``input``, ``module``): every name a value has, and for each the one name it is known by."""


def named_by(pattern: str, names: Names) -> list[tuple[str, str]]:
    """The (kind, name) of every value that a pattern names, each once; of outputs the pattern itself."""
    if not isinstance(pattern, str):
        problem, remedy = "a pattern is a string, a glob over names", "write for example '*.weight'"
        raise ShardingError(f"annotation {pattern!r}", f"of type {type(pattern).__name__}", problem, remedy)
    prefix, colon, rest = pattern.partition(":")
    if not colon:
        return [(kind, name) for kind in KINDS for name in glob(pattern, names.get(kind, {}))]
    if prefix not in KINDS:
        raise ShardingError(
            f"annotation {pattern!r}",
            f"prefix {prefix!r}",
            f"a prefix is one of {', '.join(f'{kind}:' for kind in KINDS)}",
            did_you_mean(prefix, KINDS) or "leave the prefix away",
        )
    return [("output", rest)] if prefix == "output" else [(prefix, name) for name in glob(rest, names.get(prefix, {}))]


def glob(pattern: str, names: Mapping[str, str]) -> list[str]:
    """The values that a glob names, each once."""
    return list(dict.fromkeys(known for name, known in names.items() if fnmatchcase(name, pattern)))


def unmatched(pattern: str, names: Names) -> ShardingError:
    """The error for a pattern that means nothing."""
    prefix, colon, rest = pattern.partition(":")
    searched = [prefix] if colon else list(names)
    candidates = [name for kind in searched for name in names.get(kind, {})]
    return ShardingError(
        f"annotation {pattern!r}",
        f"a pattern over {len(candidates)} name{'s' * (len(candidates) != 1)} ({', '.join(searched)})",
        "it matches nothing",
        did_you_mean(rest if colon else pattern, candidates) or f"use one of {', '.join(candidates[:8])}",
    )


def ambiguous(pattern: str, values: Sequence[tuple[str, str]]) -> ShardingError:
    """The error for a pattern that means values of several kinds."""
    one = dict(reversed(values))  # the first of each kind
    return ShardingError(
        f"annotation {pattern!r}",
        "it matches " + " and ".join(f"the {kind} {one[kind]!r}" for kind in KINDS if kind in one),
        "these are values of several kinds",
        "write " + " or ".join(repr(f"{kind}:{pattern}") for kind in KINDS if kind in one),
    )
