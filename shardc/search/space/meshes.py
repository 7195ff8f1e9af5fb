"""Meshes: the layouts of a number of devices in axes, and the names of the axes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardc.search.space.decision import Decision, Place
from shardc.search.space.plan import Axis, Cuts


def shapes(devices: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """The shapes of meshes with ``num_axes`` axes, each of two ranks or more."""
    if num_axes == 1:
        yield from [(devices,)] if devices > 1 else []
        return
    for size in range(2, devices // 2 + 1):
        if devices % size == 0:
            yield from ((size, *rest) for rest in shapes(devices // size, num_axes - 1))


def named_axes(
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    given: Sequence[str] = (),
    of_samples: Collection[str] = (),
    names: Sequence[str] = (),
) -> tuple[Axis, ...]:
    """Axes with the field's names for their cuts; a second axis of the same name gets a number.

    ``dp`` cuts samples, ``ep`` experts, ``cp`` positions, ``tp`` parameters. ``given``: the names in the user's
    annotations. Axes that had one of these in ``names`` keep it; axes without cuts of their own take the others.
    ``of_samples``: the names by which the annotations cut samples.
    """
    chosen = [name if name in given else "" for name in names] or [""] * len(cuts)
    free = [name for name in given if name not in {*chosen, *map(name_of, cuts)}]
    for i, each in enumerate(cuts):
        if not chosen[i]:
            name = free.pop(0) if free and not each else name_of(each)
            chosen[i] = name if name not in chosen else f"{name}{sum(n.startswith(name) for n in chosen) + 1}"
    axes = zip(chosen, shape, cuts, strict=True)
    return tuple(Axis(name, size, each, has_samples=name in of_samples) for name, size, each in axes)


def name_of(cuts: Cuts) -> str:
    """The name of an axis with these cuts."""
    kinds = {each.kind for each in cuts}
    if "samples" in kinds or not kinds:
        return "dp"
    if any(_is_of_experts(each) for each in cuts):
        return "ep"
    return "tp" if "parameters" in kinds else "cp"


def _is_of_experts(decision: Decision) -> bool:
    """Whether it cuts stacks of matrices along the stack."""
    is_first = all(place.dim == 0 and place.num_dims > 1 for place in decision.places)
    return is_first and any(place.num_dims > 2 for place in decision.places) and decision.kind == "parameters"


def is_possible(axes: Sequence[Axis]) -> bool:
    """Whether every dim that is cut has elements for each rank, and no rank has far fewer than another."""
    shards: dict[tuple[frozenset[Place], int], int] = {}
    for axis in axes:
        for decision in axis.cuts:
            which = decision.places, decision.size
            shards[which] = shards.get(which, 1) * axis.size
    return all(cuts_well(size, count) for (_, size), count in shards.items())


def cuts_well(size: int, count: int) -> bool:
    """Whether a dim of this size can be cut into ``count`` shards, none of which is much smaller than another."""
    return size % count == 0 or size >= 4 * count


def least_factor(number: int) -> int:
    """The least divisor of a number above 1; 1 if there is none."""
    return next((each for each in range(2, number + 1) if number % each == 0), 1)
