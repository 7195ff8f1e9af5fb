"""A plan at several sizes: one program whose numbers are forms of the symbols, learned from a few compiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from shardc.error import ShardingError
from shardc.program import Program
from shardc.symbol_expression import Symbolic
from shardc.symbol_form import Fitter, Form, Point
from shardc.symbol_numbers import Key, numbers, outline

if TYPE_CHECKING:
    from shardc.api import Compiled

Compile = Callable[[Point], "Compiled"]
LEVELS = ("capture", "rematerialize")  # as captured; as lowered, before collectives go in buckets
FEW = 2  # repeated modules of the programs that are compiled at many points
MULTIPLES = (  # primes, so that a product tells its factors; no dim grows as another does, and one more
    (2, 3, 5, 7, 11, 13),
    (7, 5, 3, 2, 13, 11),
    (3, 2, 7, 5, 17, 19),
    (5, 11, 2, 3, 7, 17),
)


@dataclass(frozen=True)
class Learned:
    """``symbolic`` by level: the captured, the canonical and the lowered program, all of the first of ``points``.

    ``forms``: those that numbers have that are of one value at one of the points and stand at the same place.
    """

    points: Sequence[Point]
    symbolic: Mapping[str, Symbolic]
    outlines: Mapping[str, list[str]]
    forms: Mapping[tuple[int, Key | None, int], set[Form]] = field(repr=False)


def learn(compile_: Compile, reference: Point, axes: Sequence[str], layers: str = "", repeated: str = "") -> Learned:
    """From three compiles: at the reference, and where each dim is another multiple of what it is there.

    ``layers``: the symbol that counts the modules of the list ``repeated``; it stays as it is.
    """
    dims = [name for name in reference if name not in axes and name != layers]
    points, programs = _alike(compile_, reference, dims)
    fitter = Fitter([{name: point[name] for name in dims} for point in points])
    symbolic: dict[str, Symbolic] = {}
    known: dict[tuple[int, Key | None, int], set[Form]] = {}
    cache: dict[tuple[int, ...], Form] = {}
    for level in LEVELS:
        found = []
        for several in zip(*(numbers(program[level]) for program in programs), strict=True):
            key, values = several[0][0], tuple(value for _, value in several)
            if values not in cache:
                cache[values] = _fitted(fitter, key, values)
            found.append(cache[values])
            for place in places_of(key, repeated) if level == LEVELS[-1] else ():
                for i, value in enumerate(values):
                    known.setdefault((i, place, value), set()).add(cache[values])
        symbolic[level] = Symbolic(programs[0][level], found, reference, axes)
    outlines = {level: outline(programs[0][level]) for level in LEVELS}
    return Learned(points, symbolic, outlines, known)


def _fitted(fitter: Fitter, key: Key, values: tuple[int, ...]) -> Form:
    form = fitter.fit(values)
    if form is None:
        raise ShardingError(
            f"a number of {' '.join(key[:-2])}",
            f"it is {', '.join(map(str, values))} at {'; '.join(map(point_text, fitter.points))}",
            "it is no product of symbols that shardc finds",
            "name fewer symbols, or count without --symbolic",
        )
    return form


def point_text(point: Point) -> str:
    """``dp=2, B=8``."""
    return ", ".join(f"{name}={size}" for name, size in point.items())


def places_of(key: Key, repeated: str) -> tuple[Key | None, ...]:
    """Where to look for a number: in the same place of any repeated module, or of any list, or anywhere."""
    return place_of(key, repeated), tuple(re.sub(r"\.\d+(?=\.|$)", ".*", part, count=1) for part in key), None


def place_of(key: Key, repeated: str) -> Key:
    """The same in each of the repeated modules."""
    if not repeated:
        return key
    return tuple(_unnumbered(part, repeated) for part in key)


def _unnumbered(text: str, repeated: str) -> str:
    if not text.startswith(f"{repeated}."):
        return text
    number, dot, rest = text.removeprefix(f"{repeated}.").partition(".")
    return f"{repeated}.*{dot}{rest}" if number.isdigit() else text


Levels = Mapping[str, Program]


def levels_of(compiled: Compiled) -> Levels:
    """The programs that a plan is learned from."""
    return {level: compiled.at(level) for level in LEVELS}


def _alike(compile_: Compile, reference: Point, dims: Sequence[str]) -> tuple[list[Point], list[Levels]]:
    """Three points where the plan is the same."""
    points, programs = [reference], [levels_of(compile_(reference))]
    problem: Exception | str = ""
    for point in _multiples(reference, dims):
        if len(points) == 3:
            break
        try:
            found = levels_of(compile_(point))
        except Exception as error:  # whatever a model says of sizes that it does not take
            problem = error
            continue
        problem = difference(programs[0], found) or problem
        if not difference(programs[0], found) and _tell_apart([*points, point], dims):
            points.append(point)
            programs.append(found)
    if len(points) == 3 or not dims:
        return (points * 3)[:3], (programs * 3)[:3]
    raise ShardingError(
        "--symbolic",
        f"the plan at {point_text(reference)}",
        f"no other sizes have this plan: {problem}",
        "name fewer symbols, or other sizes to start from",
    )


def _multiples(reference: Point, dims: Sequence[str]) -> Iterator[Point]:
    for factors in MULTIPLES if dims else ():
        yield {**reference, **{name: reference[name] * factor for name, factor in zip(dims, factors, strict=False)}}


def _tell_apart(points: Sequence[Point], dims: Sequence[str]) -> bool:
    """Whether no dim is a line of another at three points: what one makes of both could not be told."""
    if len(points) < 3:
        return True
    steps = {name: [point[name] - points[0][name] for point in points[1:]] for name in dims}
    return all(a[0] * b[1] != a[1] * b[0] for a, b in combinations(steps.values(), 2))


def difference(ours: Levels, theirs: Levels) -> str:
    """Where another program first is no program of the same plan; nothing where it is one."""
    for level in LEVELS:
        mine, other = outline(ours[level]), outline(theirs[level])
        if mine != other:
            return first_difference(mine, other)
    return ""


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first lines that are not alike."""
    pairs = zip([*ours, ""], [*theirs, ""], strict=False)
    mine, other = next((mine, other) for mine, other in pairs if mine != other)
    return f"{mine.partition(' [')[0] or 'the end'} is {other.partition(' [')[0] or 'the end'} there"
