"""Split the cut of a dim into the cuts of its factors, and join these again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardc.language.mesh import Axes, AxisPart, merge_parts
from shardc.language.rule import Dims
from shardc.language.sharding import WHOLE, DimSharding, Sharding, ceil_div, num_shards

Digit = tuple[int, Axes]  # a size, and its cut: one part into single elements, several parts unevenly, or none


def factor_cuts(
    dims: Dims, shardings: Sequence[DimSharding], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> dict[str, DimSharding]:
    """The cuts of factors that follow from the cuts of a tensor's dims; factors that are not cut are left out."""
    cuts: dict[str, DimSharding] = {}
    for factors, dim, size in zip(dims, shardings, shape, strict=True):
        if not factors or not (dim.axes or dim.minor):
            continue
        if len(factors) == 1:
            cuts[factors[0]] = dim
        else:
            split = split_dim(dim, size, [sizes[factor] for factor in factors])
            cuts.update({factor: cut for factor, cut in zip(factors, split, strict=True) if cut != WHOLE})
    return cuts


def dims_sharding(dims: Dims, cuts: Mapping[str, DimSharding], sizes: Mapping[str, int]) -> tuple[DimSharding, ...]:
    """The cuts of the dims of a tensor whose factors have these cuts."""
    return tuple(
        cuts.get(factors[0], WHOLE)
        if len(factors) == 1
        else join_dim([(sizes[factor], cuts.get(factor, WHOLE)) for factor in factors])
        for factors in dims
    )


def split_dim(dim: DimSharding, size: int, factor_sizes: Sequence[int]) -> tuple[DimSharding, ...]:
    """The cuts of a dim's factors, major first.

    The dim is a row of digits, each an axis part, a whole remainder, or a run that is cut unevenly. Each factor takes
    digits from the front until they make up its size. A cut that falls across two factors is split into parts of its
    axis: 8 elements cut by ``tp`` of size 4, seen as (2, 4), give ``tp:(1)2`` and ``tp:(2)2``. A cut that does not line
    up with the factors is left out, and so are all cuts after it.
    """
    subdims = dim.subdims(size)
    if [sub for sub, _ in subdims] == list(factor_sizes):
        return tuple(DimSharding(axes) for _, axes in subdims)
    digits = [digit for sub, axes in subdims for digit in _digits(sub, axes)]
    last = len(factor_sizes) - 1
    return tuple(_take_digits(digits, factor, i == last) for i, factor in enumerate(factor_sizes))


def _digits(size: int, axes: Axes) -> Iterator[Digit]:
    while axes and size % axes[0].size == 0 and (axes[0].size > 1 or size % num_shards(axes) == 0):
        yield axes[0].size, axes[:1]
        size, axes = size // axes[0].size, axes[1:]
    if size > 1 or axes:
        yield size, axes


def _take_digits(digits: list[Digit], room: int, is_last: bool) -> DimSharding:
    """Remove the digits of one factor of size ``room`` from the front of a dim's digits, and join them.

    An axis of one rank belongs to the factor of the axis before it.
    """

    def is_even(size: int, axes: Axes) -> bool:
        return size % num_shards(axes) == 0

    def belongs(size: int, axes: Axes) -> bool:
        """Whether a digit of size 1 is this factor's: an even one after another axis, an uneven one as the first."""
        return bool(factor and factor[-1][1]) if is_even(size, axes) else not factor

    factor: list[Digit] = []
    while digits and (room > 1 or (digits[0][0] == 1 and (is_last or belongs(*digits[0])))):
        size, axes = digits.pop(0)
        if size > room and size % room == 0 and is_even(size, axes):
            digits.insert(0, (size // room, tuple(part.minor(size // room) for part in axes)))
            size, axes = room, tuple(part.major(room) for part in axes)
        if room % size:
            digits.clear()
            break
        factor.append((size, axes))
        room //= size
    return _join_subdims([*factor, (room, ())])


def join_dim(factors: Sequence[tuple[int, DimSharding]]) -> DimSharding:
    """The cut of one dim of several factors, each ``(size, cut)``, major first."""
    return _join_subdims([sub for size, cut in factors for sub in cut.subdims(size)])


def _join_subdims(subdims: Sequence[tuple[int, Axes]]) -> DimSharding:
    """The cut of one dim: neighbouring sub-dims are joined if that leaves every element on its rank."""
    joined: list[tuple[int, Axes]] = []
    for size, axes in subdims:
        pair = _join_pair(*joined[-1], size, axes) if joined else None
        joined = [*joined[:-1], pair] if pair else [*joined, (size, axes)]
    while len(joined) > 1 and joined[-1] == (1, ()):
        joined.pop()
    return DimSharding(joined[0][1], tuple(joined[1:])) if joined else WHOLE


def _join_pair(major: int, major_axes: Axes, minor: int, minor_axes: Axes) -> tuple[int, Axes] | None:
    """Join two sub-dims into one; None if that is not possible.

    It is possible if the major one is cut into single elements, or evenly with the minor one whole. A merged axis part
    must divide the size that it cuts, or the chunks would change.
    """
    if not minor_axes and major % num_shards(major_axes) == 0:
        return major * minor, major_axes
    if major != num_shards(major_axes):
        return None
    if major > 1 and minor > 1 and minor_axes[0].size == 1:
        return None  # split_dim would give the axis of one rank to the major one
    parts, rest = major_axes + minor_axes, major * minor
    merged = merge_parts(parts)
    for part in merged:
        if part not in parts and rest % part.size:
            return None
        rest = ceil_div(rest, part.size)
    return major * minor, merged


def extends(longer: DimSharding, shorter: DimSharding) -> bool:
    """Whether ``longer`` equals ``shorter`` or cuts it further: with more minor axes, or any cut of a whole dim."""
    if longer is shorter:
        return True
    if shorter.minor or len(longer.all_axes) <= len(shorter.all_axes):
        return shorter in (longer, WHOLE)
    return longer.axes[: len(shorter.axes)] == shorter.axes


def without_idle(cut: DimSharding, size: int) -> tuple[DimSharding, Axes]:
    """A cut without its idle parts, along which only the first rank holds data, and these parts.

    4 elements over 16 ranks of ``w`` are on the first 4: the minor 4 of ``w`` cut them, and its major 4 are idle.
    """
    busy: list[AxisPart] = []
    for i, part in enumerate(cut.axes):
        if 0 < size <= part.size and part.size % size == 0 and not cut.minor:
            idle = [part.major(part.size // size)] if part.size > size or size == 1 else []
            busy += [part.minor(size)] if size > 1 else []
            return DimSharding(merge_parts(busy)), (*idle, *cut.axes[i + 1 :])
        busy.append(part)
        size = ceil_div(size, part.size)
    return cut, ()


def has_same_shards(one: Sharding, other: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether every rank that holds any data of a value of ``shape`` holds the same under both shardings."""

    def busy(sharding: Sharding) -> list[tuple[DimSharding, frozenset[AxisPart]]]:
        pairs = (without_idle(cut, size) for cut, size in zip(sharding.dims, shape, strict=True))
        return [(cut, frozenset(idle)) for cut, idle in pairs]

    return one.partial == other.partial and busy(one) == busy(other)
