"""A plan at several sizes: one program whose numbers are forms of the symbols, learned from a few compiles."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from shardc.language.errors import ShardingError
from shardc.program.program import Program
from shardc.report.symbolic.expression import Key, Symbolic, numbers, outline
from shardc.report.symbolic.form import Fitter, Form, Point, Widening

if TYPE_CHECKING:
    from shardc.compiler import Compiled

Compile = Callable[[Point], "Compiled"]
Levels = Mapping[str, Program]
LEVELS = ("capture", "rematerialize")  # as captured; as lowered, before collectives go in buckets
FEW = 2  # repeated modules of the programs that are compiled at many points
MULTIPLES = (  # primes, so that a product tells its factors; no dim grows as another does, and one more
    (2, 3, 5, 7, 11, 13),
    (7, 5, 3, 2, 13, 11),
    (3, 2, 7, 5, 17, 19),
    (5, 11, 2, 3, 7, 17),
)


Place = tuple[int, Key | None, int]


@dataclass(frozen=True)
class Learned:
    """``symbolic`` by level: the captured and the lowered program, all of the first of ``points``.

    ``forms``: those that numbers have that are of one value at one of the points and stand at the same place.
    ``keyed``: of each number of the lowered program what it is of, and its values at the points.
    """

    points: Sequence[Point]
    symbolic: Mapping[str, Symbolic]
    outlines: Mapping[str, list[str]]
    keyed: Sequence[tuple[Key, tuple[int, ...]]] = field(repr=False)
    repeated: str = ""

    @cached_property
    def forms(self) -> Mapping[Place, set[Form]]:
        """Where to look for the form of a number of a program with more modules."""
        found: dict[Place, set[Form]] = {}
        for (key, values), form in zip(self.keyed, self.symbolic[LEVELS[-1]].forms, strict=True):
            for place in places_of(key, self.repeated):
                for i, value in enumerate(values):
                    found.setdefault((i, place, value), set()).add(form)
        return found

    def on_meshes(self, compile_: Compile, points: Iterable[Point]) -> Learned:
        """With forms that hold on meshes of other sizes too, where the plan is the same at enough of these points.

        Where it has what the forms say at the first of them there is nothing to learn.
        """
        seen: list[tuple[Point, Levels]] = []
        for point in points:
            found = compiled_at(compile_, point)
            if isinstance(found, Exception) or self.differs(found):
                continue
            seen.append((point, found))
            if len(seen) == 1 and self._says(*seen[0]):
                return self
            if all(len({self.points[0][name], *(each[name] for each, _ in seen)}) > 2 for name in self._moving):
                break
        else:
            return self
        symbolic = dict(self.symbolic)
        for level, known in self.symbolic.items():
            forms = self._widened(known, [(point, numbers(found[level])) for point, found in seen])
            if forms is None:
                return self
            symbolic[level] = replace(known, forms=forms)
        return replace(self, symbolic=symbolic)

    def differs(self, levels: Levels) -> bool:
        """Whether programs are of another plan."""
        return any(outline(levels[level]) != ours for level, ours in self.outlines.items())

    @property
    def _moving(self) -> list[str]:
        """The axes that have other sizes too."""
        known = self.symbolic[LEVELS[-1]]
        return [name for name in known.axes if name not in known.held and known.point[name] > 1]

    def _says(self, point: Point, levels: Levels) -> bool:
        return all(known.says(point, levels[level]) for level, known in self.symbolic.items())

    def _widened(self, known: Symbolic, seen: Sequence[tuple[Point, list[tuple[Key, int]]]]) -> list[Form] | None:
        widening = Widening({name: known.point[name] for name in self._moving}, [point for point, _ in seen])
        widen = functools.cache(widening.widen)
        columns = zip(*([value for _, value in values] for _, values in seen), strict=True)
        found = [widen(form, values) for form, values in zip(known.forms, columns, strict=True)]
        return None if None in found else [form for form in found if form is not None]


def learn(compile_: Compile, reference: Point, axes: Sequence[str], layers: str = "", repeated: str = "") -> Learned:
    """From three compiles: at the reference, and where each dim is another multiple of what it is there.

    ``layers``: the symbol that counts the modules of the list ``repeated``; it stays as it is.
    """
    dims = [name for name in reference if name not in axes and name != layers]
    points, programs = _alike(compile_, reference, dims)
    fitter = Fitter([{name: point[name] for name in dims} for point in points])
    symbolic: dict[str, Symbolic] = {}
    keyed: list[tuple[Key, tuple[int, ...]]] = []
    cache: dict[tuple[int, ...], Form] = {}
    for level in LEVELS:
        several = zip(*(numbers(program[level]) for program in programs), strict=True)
        keyed = [(same[0][0], tuple(value for _, value in same)) for same in several]
        for key, values in keyed:
            if values not in cache:
                cache[values] = _fitted(fitter, key, values)
        symbolic[level] = Symbolic(programs[0][level], [cache[values] for _, values in keyed], reference, axes)
    outlines = {level: outline(programs[0][level]) for level in LEVELS}
    return Learned(points, symbolic, outlines, keyed, repeated)


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


def compiled_at(compile_: Compile, point: Point) -> Levels | Exception:
    """The programs at a point, or what is wrong there: whatever a model says of sizes that it does not take."""
    try:
        return levels_of(compile_(point))
    except Exception as error:
        return error


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
        found = compiled_at(compile_, point)
        if isinstance(found, Exception):
            problem = found
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
