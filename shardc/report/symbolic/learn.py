"""Learning a plan from a few compiles: its program at one point, and the form of every number in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

from shardc.compiler import Compiled
from shardc.language.errors import ShardingError
from shardc.program.program import Program
from shardc.report.symbolic.form import (
    Fitter,
    Form,
    NumberKey,
    Point,
    Widening,
    first_difference,
    numbers,
    outline,
    point_text,
)
from shardc.report.symbolic.symbolic_program import SymbolicProgram

Compile = Callable[[Point], Compiled]
Levels = Mapping[str, Program]
LEVELS = ("capture", "cut_saved")  # as captured; as lowered, before collectives go in buckets
FEW = 2  # number of repeated modules in programs that are compiled at many points
# Primes, so that a product reveals its factors. No dim grows as another does. Later rows are spares.
MULTIPLES = ((2, 3, 5, 7, 11, 13), (7, 5, 3, 2, 13, 11), (3, 2, 7, 5, 17, 19), (5, 11, 2, 3, 7, 17))

Place = tuple[int, NumberKey | None, int]  # the index of a point, a key or any, and the number's value there


@dataclass(frozen=True)
class Learned:
    """A plan that was learned from a few compiles.

    ``symbolic``: by level, the captured and the lowered program, both at the first of ``points``. ``outlines``: by
    level, their outlines. ``keyed``: the key of each number of the lowered program, and its values at the points.
    ``repeated``: the path of a list of modules that are alike.
    """

    points: Sequence[Point]
    symbolic: Mapping[str, SymbolicProgram]
    outlines: Mapping[str, list[str]]
    keyed: Sequence[tuple[NumberKey, tuple[int, ...]]] = field(repr=False)
    repeated: str = ""

    @property
    def captured(self) -> SymbolicProgram:
        """The captured program."""
        return self.symbolic[LEVELS[0]]

    @property
    def lowered(self) -> SymbolicProgram:
        """The lowered program."""
        return self.symbolic[LEVELS[1]]

    def form(self, i: int, key: NumberKey, size: int) -> Form:
        """The form of a number of a program with more modules, whose value is ``size`` at the point ``i``.

        It is the form of the same number in one of the few modules, or else of any number with this value. A number
        that is at no place, such as a seed, is constant. Raises a ShardingError if there are several forms.
        """
        forms: set[Form] = set()
        for place in self._places_of(key):
            forms = self._forms.get((i, place, size), set())
            if len(forms) == 1:
                return next(iter(forms))
        if not forms:
            return Form(offset=size)
        what = f"it is {size}, which is {len(forms)} different sizes at {point_text(self.points[0])}"
        problem, remedy = (
            "where there are more modules it cannot be told which it is",
            "start from sizes that differ from each other",
        )
        raise ShardingError(f"a number of {' '.join(key[:-2])}", what, problem, remedy)

    @cached_property
    def _forms(self) -> Mapping[Place, set[Form]]:
        forms: dict[Place, set[Form]] = {}
        for (key, values), form in zip(self.keyed, self.lowered.forms, strict=True):
            for place, (i, value) in product(self._places_of(key), enumerate(values)):
                forms.setdefault((i, place, value), set()).add(form)
        return forms

    def _places_of(self, key: NumberKey) -> tuple[NumberKey | None, ...]:
        """The keys at which to look for a number: its own in any repeated module, or in any list; None for any key."""
        repeated = re.compile(rf"^{re.escape(self.repeated)}\.\d+(?=\.|$)")
        same = tuple(repeated.sub(f"{self.repeated}.*", part) for part in key) if self.repeated else key
        return same, tuple(re.sub(r"\.\d+(?=\.|$)", ".*", part, count=1) for part in key), None

    def on_meshes(self, compile_: Compile, points: Iterable[Point]) -> Learned:
        """Extend the forms to meshes of other sizes, by compiles at those of the points that have this plan.

        Nothing changes if the forms already hold at the first of these points, if too few points have the plan, or if a
        number has no wider form.
        """
        moving, known = self.lowered.moving_axes, list[tuple[Point, Levels]]()
        for point in points:
            levels = compiled_at(compile_, point)
            if isinstance(levels, Exception) or self.differs(levels):
                continue
            known.append((point, levels))
            if len(known) == 1 and all(each.agrees(point, levels[level]) for level, each in self.symbolic.items()):
                return self
            if all(len({self.points[0][name], *(each[name] for each, _ in known)}) > 2 for name in moving):
                break
        else:
            return self
        symbolic: dict[str, SymbolicProgram] = {}
        for level, program in self.symbolic.items():
            widening = Widening({name: program.point[name] for name in moving}, [point for point, _ in known])
            widen = functools.cache(widening.widen)
            columns = zip(*([value for _, value in numbers(levels[level])] for _, levels in known), strict=True)
            forms = [widen(form, values) for form, values in zip(program.forms, columns, strict=True)]
            if None in forms:
                return self
            symbolic[level] = replace(program, forms=[form for form in forms if form is not None])
        return replace(self, symbolic=symbolic)

    def differs(self, levels: Levels) -> bool:
        """Whether programs have another plan."""
        return any(outline(levels[level]) != ours for level, ours in self.outlines.items())


def learn(compile_: Compile, reference: Point, axes: Sequence[str], layers: str = "", repeated: str = "") -> Learned:
    """Learn from three compiles: at the reference, and at two points where dims are different multiples of their sizes.

    ``layers``: the symbol that counts the modules of the list ``repeated``; it stays as it is. Raises a ShardingError
    for a number without a form.
    """
    dims = [name for name in reference if name not in axes and name != layers]
    points, programs = _points_of_one_plan(compile_, reference, dims)
    fitter = Fitter([{name: point[name] for name in dims} for point in points])
    symbolic: dict[str, SymbolicProgram] = {}
    keyed: list[tuple[NumberKey, tuple[int, ...]]] = []
    cache: dict[tuple[int, ...], Form] = {}
    for level in LEVELS:
        several = zip(*(numbers(program[level]) for program in programs), strict=True)
        keyed = [(same[0][0], tuple(value for _, value in same)) for same in several]
        for key, values in keyed:
            if values not in cache:
                cache[values] = _fitted(fitter, key, values)
        symbolic[level] = SymbolicProgram(programs[0][level], [cache[values] for _, values in keyed], reference, axes)
    outlines = {level: outline(programs[0][level]) for level in LEVELS}
    return Learned(points, symbolic, outlines, keyed, repeated)


def _fitted(fitter: Fitter, key: NumberKey, values: tuple[int, ...]) -> Form:
    form = fitter.fit(values)
    if form is None:
        what = f"it is {', '.join(map(str, values))} at {'; '.join(map(point_text, fitter.points))}"
        problem, remedy = (
            "it is no product of symbols that shardc finds",
            "name fewer symbols, or count without --symbolic",
        )
        raise ShardingError(f"a number of {' '.join(key[:-2])}", what, problem, remedy)
    return form


def compiled_at(compile_: Compile, point: Point) -> Levels | Exception:
    """The programs at a point, or the error, of any type, if the model does not take these sizes."""
    try:
        return levels_of(compile_(point))
    except Exception as error:
        return error


def levels_of(compiled: Compiled) -> Levels:
    """The programs that a plan is learned from."""
    return {level: compiled.at(level) for level in LEVELS}


def _points_of_one_plan(compile_: Compile, reference: Point, dims: Sequence[str]) -> tuple[list[Point], list[Levels]]:
    """Three points where the plan is the same, and the programs there."""
    points, programs = [reference], [levels_of(compile_(reference))]
    problem: Exception | str = ""
    for factors in MULTIPLES if dims else ():
        if len(points) == 3:
            break
        point = {**reference, **{name: reference[name] * factor for name, factor in zip(dims, factors, strict=False)}}
        levels = compiled_at(compile_, point)
        if isinstance(levels, Exception):
            problem = levels
            continue
        differences = (first_difference(outline(programs[0][level]), outline(levels[level])) for level in LEVELS)
        difference = next(filter(None, differences), "")
        problem = difference or problem
        sizes = [[at[name] for name in dims] for at in (*points, point)]
        moves = zip(*([b - a for a, b in zip(sizes[0], other, strict=True)] for other in sizes[1:]), strict=True)
        # If one dim were linear in another at the three points, a number could be a form of either.
        are_apart = len(points) < 2 or all(a[0] * b[1] != a[1] * b[0] for a, b in combinations(moves, 2))
        if not difference and are_apart:
            points.append(point)
            programs.append(levels)
    if len(points) == 3 or not dims:
        return (points * 3)[:3], (programs * 3)[:3]
    text, remedy = f"no other sizes have this plan: {problem}", "name fewer symbols, or other sizes to start from"
    raise ShardingError("--symbolic", f"the plan at {point_text(reference)}", text, remedy)
