"""Globs for the names of tensors that repeat with a block's number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape

from torch import nn

from shardc.capture.annotations import glob
from shardc.report.explain.blocks import are_alike, like_blocks

Names = Mapping[str, str]  # the first name by each name
NUMBER = re.compile(r"\d+|\[!?\d+\]")  # a part of a glob: a number, or one digit of these, or of all others


def parameter_globs(model: nn.Module) -> dict[str, str]:
    """A glob for each parameter of a model, which matches it in all repeated blocks where it has the same shape.

    ``*.mlp.up.weight``; ``block*.up.weight`` if the blocks are attributes such as ``block1`` and ``block2``;
    ``layers.[02].up.weight`` if other blocks have another shape; ``param:*.mlp.up`` if modules have such names too; the
    name itself outside of repeated blocks. Shapes that no glob tells apart, as among more than ten blocks, share one.
    Tied parameters have their first name.
    """
    stars = {name: star for path, module in model.named_modules() for name, star in _stars(path, module)}
    shapes = {name: str(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored |= {name: name for name, _ in model.named_buffers()}
    known = stored | {path: path for path, _ in model.named_modules()}
    found: dict[str, str] = {}
    for pattern, names in _grouped(shapes, {name: _without_numbers(name, stars) for name in shapes}).items():
        groups = list(_grouped(names, shapes).values())
        globs = [_exact(_narrowed(pattern, group, names), group, known, stored) for group in groups]
        if not all(globs):
            groups, globs = [names], [_exact(pattern, names, known, stored)]
        found |= {name: each or escape(name) for group, each in zip(groups, globs, strict=True) for name in group}
    return found


def globs_over(patterns: Sequence[str], i: int) -> Iterator[str]:
    """Globs, short ones first, that match all names of several patterns, and perhaps further names.

    The patterns differ only in the number in their ``i``-th part.
    """
    parts = patterns[0].split(".")
    numbers = [pattern.split(".")[i] for pattern in patterns]
    digits = "".join(sorted("".join(number.strip("[]") for number in numbers)))
    are_digits = all(re.fullmatch(r"\d|\[\d+\]", number) for number in numbers)
    for each in ("*", *([f"[{digits}]"] if are_digits else [])):
        pattern = ".".join([*parts[:i], each, *parts[i + 1 :]])
        yield from [pattern] if ":" in pattern else _globs(pattern)


def _grouped(names: Iterable[str], key_of: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key_of[name], []).append(name)
    return groups


def _stars(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """For each repeated child its path, and the text that stands for its name in a glob.

    Repeated children are all items of a list with repeated blocks and, outside of lists, modules that are alike and
    whose names end in a number.
    """
    children, prefix = dict(module.named_children()), f"{path}." if path else ""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        if len(like_blocks(module)) > 1:
            yield from ((prefix + name, "*") for name in children)
        return
    stems = {name: re.sub(r"\d+$", "", name) for name, child in children.items() if child._modules}
    for stem, names in _grouped(stems, stems).items():
        if len(names) > 1 and are_alike([children[name] for name in names]):
            yield from ((prefix + name, f"{escape(stem)}*") for name in names)


def _without_numbers(name: str, stars: Mapping[str, str]) -> str:
    """The name as a glob with a star in place of each block's number."""
    parts = name.split(".")
    return ".".join(stars.get(".".join(parts[: i + 1]), escape(part)) for i, part in enumerate(parts))


def _narrowed(pattern: str, group: Sequence[str], names: Sequence[str]) -> str:
    """The pattern of ``names``, narrowed to the indices in ``group``; several indices need one character each."""
    parts = pattern.split(".")
    for i in [i for i, part in enumerate(parts) if part == "*"]:
        indices, all_indices = ({name.split(".")[i] for name in each} for each in (group, names))
        if len(indices) == 1:
            parts[i] = min(indices)
        elif indices < all_indices and all(len(index) == 1 for index in all_indices):
            these, others = ("".join(sorted(each)) for each in (indices, all_indices - indices))
            parts[i] = f"[{these}]" if len(these) <= len(others) else f"[!{others}]"
    return ".".join(parts)


def _exact(pattern: str, group: Sequence[str], known: Names, stored: Names) -> str:
    """The shortest glob that matches exactly the group, among all names or the stored ones; "" if there is none."""
    for prefix, names in (("", known), ("param:", stored)):
        for each in _globs(pattern):
            if glob(each, names) == group:
                return f"{prefix}{each}"
    return ""


def _globs(pattern: str) -> Iterator[str]:
    """Candidate globs for a group of names, short ones first: the ends of its pattern, then all of it."""
    parts = pattern.split(".")
    last_star = max((i for i, part in enumerate(parts) if part[0] == "[" or part[-1] == "*"), default=len(parts))
    for start in range(len(parts) - 1, last_star, -1):
        yield ".".join(["*", *parts[start:]])
    yield pattern
