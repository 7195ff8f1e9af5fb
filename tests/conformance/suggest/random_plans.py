"""Random plans that compile, drawn so that many of them are plans that somebody might write."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from math import prod
from re import sub
from typing import Any

from torch import Tensor, nn

from shardc import CaptureError, Mesh, P, Pipeline, Remat, ShardingError, Zero
from shardc.language.machine import Machine

from .models import Target
from .plan import Plan, Price, Pricer

TRIES = 6  # draws for each plan that compiles
AXES = ("a", "b", "c")
STAGES = "pp"


REFUSED = (ShardingError, CaptureError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan and its price on each machine, or no prices and the reason why it does not compile.

    ``is_defect``: the compiler failed instead of compiling or refusing the plan.
    """

    plan: Plan
    prices: tuple[Price, ...] = ()
    reason: str = ""
    is_defect: bool = False


def priced(pricer: Pricer, plan: Plan, machines: Sequence[Machine]) -> Priced:
    """The prices of a plan."""
    try:
        return Priced(plan, tuple(pricer.prices(plan, machines)))
    except Exception as error:  # no error of one plan stops the others
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Priced(plan, reason=reason, is_defect=not isinstance(error, REFUSED))


def random_plans(
    pricer: Pricer, target: Target, ranks: int, count: int, seed: int, machines: Sequence[Machine]
) -> list[Priced]:
    """Random plans until ``count`` of them compile, including those that do not; the same plans for the same seed."""
    found: list[Priced] = []
    for plan in _drawn(target, ranks, count * TRIES, seed):
        if sum(bool(each.prices) for each in found) == count:
            break
        found.append(priced(pricer, plan, machines))
    return found


def _drawn(target: Target, ranks: int, count: int, seed: int) -> Iterator[Plan]:
    generator, seen = random.Random(f"{seed} {ranks}"), set[str]()
    for number in range(count):
        plan = draw_plan(target, ranks, generator, f"random {number}")
        if plan.text not in seen:
            seen.add(plan.text)
            yield plan


def draw_plan(target: Target, ranks: int, generator: random.Random, name: str = "random") -> Plan:
    """Draw one plan, which need not compile.

    The mesh has one to three axes; the prime factors of the number of ranks are dealt to them at random. If a pipeline
    can run the model, one mesh in six has its axis first, with at most 8 stages and 2 to 16 microbatches. Nine times in
    ten the samples are cut by one or several of the other axes; the product of their sizes divides the batch. One time
    in eight an axis that is left cuts the second dim of the inputs. Up to three groups of parameters are cut, each in
    one dim by an axis that divides it, four times in five by an axis that cuts no samples if there is one. A group is
    all parameters that a glob over the blocks matches, drawn with the square root of its size as weight. Half of the
    plans have a ZeRO stage, mostly over an axis of samples or in two steps over all of these axes. A quarter recompute
    every block or every second block.
    """
    mesh, pipeline = _draw_mesh(target, ranks, generator)
    axes = {axis: size for axis, size in mesh.sizes.items() if axis != STAGES}
    samples = _draw_samples(target, axes, generator)
    annotations = target.data(samples) if samples else {}
    rest = [axis for axis in axes if axis not in samples]
    if rest and generator.random() < 1 / 8:
        annotations |= _positions(target, samples, generator.choice(rest), axes)
    for _ in range(generator.choice((0, 1, 1, 2, 3)) if axes else 0):
        usual = rest if rest and generator.random() < 4 / 5 else list(axes)
        annotations |= _draw_cut(target.model, generator.choice(usual), axes, generator)
    zero = remat = None
    if axes and generator.random() < 1 / 2:
        zero = Zero(generator.choice(samples or tuple(axes)), generator.choice((1, 2, 3)))
        if len(samples) > 1 and generator.random() < 1 / 3:
            zero = Zero(samples, zero.stage, gather_over=samples[-1])
    if target.blocks and generator.random() < 1 / 4:
        remat = Remat(target.blocks, every=generator.choice((1, 2)))
    return Plan(name, mesh, annotations, zero, remat, pipeline)


def _draw_mesh(target: Target, ranks: int, generator: random.Random) -> tuple[Mesh, Pipeline | None]:
    stages = 1
    if target.blocks and target.has_microbatches and generator.random() < 1 / 6:
        stages = generator.choice([size for size in (2, 4, 8) if ranks % size == 0] or [1])
    fewest = 1 if target.batch % (ranks // stages) == 0 else 2  # one axis could not cut the batch
    names = AXES[: generator.randint(fewest, 2 if stages > 1 else 3)]
    sizes = dict.fromkeys(names, 1)
    for factor in prime_factors(ranks // stages):
        sizes[generator.choice(names)] *= factor
    inner = {name: size for name, size in sizes.items() if size > 1}
    if stages == 1:
        return Mesh(**inner), None
    pipeline = Pipeline(
        STAGES,
        microbatches=generator.choice((2, 4, 8, 16)),
        schedule=generator.choice(("1f1b", "1f1b", "gpipe", "interleaved", "zb-h1")),
        balance=generator.choice(("time", "params", "flops")),
    )
    return Mesh(**{STAGES: stages, **inner}), pipeline


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *prime_factors(number // factor)]
    return []


def _draw_samples(target: Target, axes: dict[str, int], generator: random.Random) -> tuple[str, ...]:
    """Some of the axes, with sizes whose product divides the batch; one, two and three axes are equally likely."""
    by_count = [
        [chosen for chosen in combinations(axes, count) if target.batch % prod(axes[axis] for axis in chosen) == 0]
        for count in range(1, len(axes) + 1)
    ]
    fitting = [chosen for chosen in by_count if chosen]
    if not fitting or generator.random() < 1 / 10:
        return ()
    return generator.choice(generator.choice(fitting))


def _positions(target: Target, samples: tuple[str, ...], axis: str, axes: dict[str, int]) -> dict[str, P]:
    """Annotations that cut the second dim of every input by the axis, if it divides that dim."""
    batch: Any = samples or None
    return {
        f"input:{name}": P(batch, axis)
        for name, value in target.inputs.items()
        if value.dim() > 1 and value.shape[1] % axes[axis] == 0
    }


def _draw_cut(model: nn.Module, axis: str, axes: dict[str, int], generator: random.Random) -> dict[str, P]:
    """An annotation that cuts a dim of a group of parameters by an axis; empty if the axis divides no dim."""
    cuts = {
        (glob, dim): group[0].numel() * len(group)
        for glob, group in groups(model).items()
        for dim in range(group[0].dim())
        if all(dim < each.dim() and each.shape[dim] % axes[axis] == 0 for each in group)
    }
    if not cuts:
        return {}
    glob, dim = generator.choices(list(cuts), [size**0.5 for size in cuts.values()])[0]
    return {f"param:{glob}": P(*[None] * dim, axis)}


def groups(model: nn.Module) -> dict[str, list[Tensor]]:
    """All parameters by glob: each glob has ``*`` for the numbers of repeated modules."""
    named = dict(model.named_parameters())
    globs = dict.fromkeys(sub(r"\.\d+(?=\.)", ".*", name) for name in named)
    return {glob: [value for name, value in named.items() if fnmatchcase(name, glob)] for glob in globs}
