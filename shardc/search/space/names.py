"""Globs for the names of tensors that repeat with a block's number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from shardc.capture.annotations import glob
from shardc.report.explain.blocks import like_blocks


def parameter_globs(model: nn.Module) -> dict[str, str]:
    """For each parameter of a model a glob, which matches the same parameter of all blocks of a list and no other.

    ``*.mlp.up.weight``; ``param:*.mlp.up`` where modules have such names too; the name itself where it is in no list of
    like blocks. Tied parameters have their first name.
    """
    lists = {path for path, module in model.named_modules() if len(like_blocks(module)) > 1}
    names = [name for name, _ in model.named_parameters()]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_without_numbers(name, lists), []).append(name)
    stored = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored |= {name: name for name, _ in model.named_buffers()}
    known = stored | {path: path for path, _ in model.named_modules()}
    found: dict[str, str] = {}
    for pattern, group in groups.items():
        exact = _exact(pattern, group, known)
        if not exact and (of_stored := _exact(pattern, group, stored)):
            exact = f"param:{of_stored}"
        found |= {name: exact or name for name in group}
    return found


def _exact(pattern: str, group: list[str], names: Mapping[str, str]) -> str:
    """The shortest glob that matches this group of the names alone; an empty text where there is none."""
    return next((each for each in _globs(pattern) if glob(each, names) == group), "")


def _without_numbers(name: str, lists: Iterable[str]) -> str:
    """The name with a star for the index of each list."""
    parts = name.split(".")
    return ".".join("*" if ".".join(parts[:i]) in lists else part for i, part in enumerate(parts))


def _globs(pattern: str) -> Iterator[str]:
    """Globs that may do for a group of names, short ones first: the ends of its pattern, then all of it."""
    parts = pattern.split(".")
    last_star = max((i for i, part in enumerate(parts) if part == "*"), default=len(parts))
    for start in range(len(parts) - 1, last_star, -1):
        yield ".".join(["*", *parts[start:]])
    yield pattern
