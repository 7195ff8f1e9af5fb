"""Annotations: ``P``, one entry a dim, its printed form, and the sharding that it gives a value."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from shardc.language.errors import ShardingError
from shardc.language.mesh import MICROBATCH, Axes, AxisPart, Mesh, axis_of
from shardc.language.sharding import WHOLE, DimSharding, Sharding


@dataclass(frozen=True, slots=True, repr=False)
class Blocks:
    """An entry of ``P``: each of ``count`` equal blocks of the dim is cut by ``axes``."""

    count: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"blocks({self.count},{'+'.join(map(str, self.axes))})"

    def __repr__(self) -> str:
        return f"blocks({', '.join(map(repr, (self.count, *self.axes)))})"


def blocks(count: int, *axes: str) -> Blocks:
    """Cut each of ``count`` equal blocks of a dim, as a fused q, k, v weight needs.

    Args:
        count: the number of blocks.
        axes: mesh axes, major first.

    Returns:
        An entry of a P.

    Examples:
        >>> import shardc
        >>> shardc.P(None, shardc.blocks(3, "tp"))
        P(None, blocks(3, 'tp'))
    """
    entry = Blocks(count, axes)
    if not isinstance(count, int) or count < 1 or not axes or not all(isinstance(axis, str) for axis in axes):
        problem = "blocks takes a count, 1 or more, and axes"
        raise ShardingError(repr(entry), f"{count!r} blocks", problem, "write blocks(3, 'tp')")
    return entry


class _Open:
    def __repr__(self) -> str:
        return "P.OPEN"


ZIGZAG = "zigzag"  # after the name of an axis: each rank has an early and a late stretch of positions
_ZIGZAG = f":{ZIGZAG}"

Entry = str | tuple[str | _Open, ...] | Blocks | _Open | None
Priority = int | tuple[int, ...]


class P:
    """An annotation of a value: one entry a dim.

    ``"dp"`` cuts by an axis, ``("dp", "tp")`` by several, major first; ``None`` is whole; ``P.OPEN`` leaves the dim
    to propagation; ``("dp", P.OPEN)`` is cut by ``dp``, and propagation may cut it further; a trailing ``...`` leaves
    all further dims open; missing trailing dims are whole. ``P()`` is replicated. An axis may be a part, ``"tp:(2)2"``.
    Lower ``priority`` propagates first: one number for all cuts, or a tuple with one for each dim; an open dim stays as
    it is until its turn. ``"cp:zigzag"`` cuts the positions of an input or of an annotated value so that each rank has
    an early and a late stretch of them, which balances causal attention.

    Examples:
        >>> from shardc import Mesh, P
        >>> P(("dp", "tp"), None, ...)
        P(('dp', 'tp'), None, ...)
        >>> P("dp", "tp").sharding(Mesh(dp=2, tp=4), (6, 64), "x").local_shape((6, 64))
        (3, 16)
    """

    OPEN = _Open()
    entries: tuple[Entry, ...]
    rest_open: bool
    priority: Priority

    def __init__(self, *entries: Entry | type(Ellipsis), priority: Priority = 0) -> None:  # type: ignore[valid-type]
        self.rest_open = bool(entries) and entries[-1] is Ellipsis
        self.entries = cast("tuple[Entry, ...]", entries[:-1] if self.rest_open else entries)
        self.priority = priority
        priorities = priority if isinstance(priority, tuple) else (priority,)
        if not all(type(each) is int and each >= 0 for each in priorities):
            what, remedy = f"priority={priority!r}", "say priority=0, 1, ...: lower propagates first"
            raise ShardingError(repr(self), what, "it is no whole number from 0 on", remedy)
        for dim, entry in enumerate(self.entries):
            if not _is_entry(entry):
                raise _no_entry(self, dim)
            if any(name.endswith(_ZIGZAG) for name in _axes_of(entry)) and not _is_zigzag(entry):
                what, problem = f"entry {dim} is {entry!r}", "positions are in zigzag over one axis, a whole one"
                raise ShardingError(repr(self), what, problem, f"write 'cp{_ZIGZAG}' alone")
        if isinstance(priority, tuple):
            self.priority = self._one_priority(priority)

    @staticmethod
    def parse(text: str, priority: Priority = 0) -> P:
        """Read ``dp,-,tp``: ``-`` whole, ``?`` open, ``dp+tp`` two axes, ``dp+?`` cut and open, ``blocks(3,tp)``."""
        return P(*_parse_entries(text), priority=priority)

    @staticmethod
    def of(sharding: Sharding, shape: tuple[int, ...], open: frozenset[int] = frozenset(), priority: Priority = 0) -> P:
        """The annotation for a sharding of a value of ``shape``; the dims in ``open`` are open."""

        def entry(dim: int, cut: DimSharding) -> Entry:
            axes = tuple(map(sharding.mesh.print_part, cut.all_axes))
            if dim in open:
                return (*axes, P.OPEN) if axes else P.OPEN
            return Blocks(shape[dim] // cut.minor[0][0], axes) if cut.minor else axes or None

        return P(*(entry(dim, cut) for dim, cut in enumerate(sharding.dims)), priority=priority)

    def __repr__(self) -> str:
        entries = ["..." if entry is Ellipsis else repr(entry) for entry in (*self.entries, *[...] * self.rest_open)]
        entries += [f"priority={self.priority}"] * bool(self.priority)
        return f"P({', '.join(entries)})"

    def __str__(self) -> str:
        return ",".join([*map(_entry_text, self.entries), *["..."] * self.rest_open])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (str(self), self.priority) == (str(other), other.priority)

    def __hash__(self) -> int:
        return hash((str(self), self.priority))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the value, each once."""
        return tuple(dict.fromkeys(axis_of(part) for entry in self.entries for part in _axes_of(entry)))

    @property
    def zigzags(self) -> dict[int, str]:
        """The axes that cut dims in zigzag, by dim."""
        return {
            dim: axis_of(name)
            for dim, entry in enumerate(self.entries)
            for name in _axes_of(entry)
            if name.endswith(_ZIGZAG)
        }

    def in_order(self) -> P:
        """This annotation with all positions in order."""
        return P.parse(str(self).replace(_ZIGZAG, ""), self.priority)

    def without(self, axis: str) -> P:
        """This annotation without the cuts by an axis."""
        if axis not in self.axes:
            return self

        def kept(entry: Entry) -> Entry:
            names = entry if isinstance(entry, tuple) else (entry,)
            rest = tuple(name for name in names if not isinstance(name, str) or axis_of(name) != axis)
            return rest if len(rest) > 1 else rest[0] if rest else None  # type: ignore[return-value]

        further = (...,) if self.rest_open else ()
        return P(*map(kept, self.entries), *further, priority=self.priority)

    def is_open(self, dim: int) -> bool:
        """Whether propagation may choose this dim, or cut it further."""
        if dim >= len(self.entries):
            return self.rest_open
        entry = self.entries[dim]
        return isinstance(entry[-1] if isinstance(entry, tuple) and entry else entry, _Open)

    def priority_of(self, dim: int) -> int:
        """The round in which the cut of a dim propagates, or from which an open dim is open."""
        if isinstance(self.priority, tuple):
            return self.priority[dim] if dim < len(self.priority) else 0
        return self.priority if dim < len(self.entries) and _axes_of(self.entries[dim]) else 0

    def priorities(self, num_dims: int) -> tuple[int, ...]:
        """``priority_of`` each dim; empty if all are 0."""
        found = tuple(map(self.priority_of, range(num_dims)))
        return found if any(found) else ()

    def _one_priority(self, priority: tuple[int, ...]) -> Priority:
        """Replace one number for each dim by a single number if that means the same."""
        pairs = [(entry, each) for entry, each in zip(self.entries, priority, strict=False) if entry is not None]
        numbers = {each for entry, each in pairs if _axes_of(entry)}
        is_one = len(priority) >= len(self.entries) and len(numbers) <= 1 and not any(priority[len(self.entries) :])
        is_one = is_one and not any(each for entry, each in pairs if not _axes_of(entry))
        return max(numbers, default=0) if is_one else priority

    def sharding(self, mesh: Mesh, shape: tuple[int, ...], who: str) -> Sharding:
        """The sharding of a value of ``shape`` with this annotation, open dims whole.

        Raises a ShardingError about ``who`` for an unknown axis, an axis used twice, more entries or priorities than
        dims, or blocks that do not divide a size. Other cuts need not divide it.
        """
        where, dims = f"{self!r} on shape {list(shape)}", [WHOLE] * len(shape)
        if isinstance(self.priority, tuple) and len(self.priority) > len(shape):
            problem = f"{len(self.priority)} priorities for {_count(len(shape), 'dim')}"
            raise ShardingError(who, where, problem, "write one for each dim, or one number")
        if len(self.entries) > len(shape):
            problem = f"{_count(len(self.entries), 'entry')} for {_count(len(shape), 'dim')}"
            remedy = f"write at most {_count(len(shape), 'entry')}" if shape else "write P(): it has no dim to cut"
            raise ShardingError(who, where, problem, remedy)
        place = ""
        try:
            for dim, entry in enumerate(self.entries):
                place = f", dim {dim}"
                dims[dim] = _dim_sharding(entry, mesh, shape[dim])
            place = ""
            return Sharding(mesh, tuple(dims))
        except ShardingError as error:
            raise ShardingError(who, f"{where}{place}: {error.what}", error.problem, error.remedy) from None


def _axes_of(entry: Entry) -> tuple[str, ...]:
    """The axes that an entry cuts by."""
    if isinstance(entry, Blocks):
        return entry.axes
    return tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if isinstance(name, str))


def _entry_text(entry: Entry) -> str:
    """An entry as ``P.parse`` reads it: ``dp+tp``, ``-`` for a whole dim, ``?`` for an open one."""
    if isinstance(entry, tuple):
        return "+".join(map(_entry_text, entry)) or "-"
    return "-" if entry is None else "?" if isinstance(entry, _Open) else str(entry)


def _is_entry(entry: object) -> bool:
    names = entry if isinstance(entry, tuple) else (entry,)
    if len(names) > 1 and isinstance(names[-1], _Open):
        names = names[:-1]
    return entry is None or isinstance(entry, (Blocks, _Open)) or all(isinstance(name, str) and name for name in names)


def _is_zigzag(entry: Entry) -> bool:
    return isinstance(entry, str) and entry.removesuffix(_ZIGZAG).isidentifier()


def _no_entry(spec: P, dim: int) -> ShardingError:
    entry: object = spec.entries[dim]
    if entry is Ellipsis:
        what, problem = f"entry {dim} is '...', and others follow", "'...' stands for all further dims"
        return ShardingError(repr(spec), what, problem, "write P.OPEN for one open dim")
    is_list = isinstance(entry, list) and _is_entry(tuple(entry))
    problem = "an entry is the name of a mesh axis, a tuple of names, blocks(...), None or P.OPEN"
    remedy = f"write {tuple(entry)!r}" if is_list else "write P('dp', None)"  # type: ignore[arg-type]
    return ShardingError(repr(spec), f"entry {dim} is {entry!r}", problem, remedy)


def _count(number: int, noun: str) -> str:
    """``1 entry``, ``2 entries``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _dim_sharding(entry: Entry, mesh: Mesh, size: int) -> DimSharding:
    if isinstance(entry, Blocks):
        if size % entry.count:
            problem = f"{size} does not split in {entry.count} equal blocks"
            raise ShardingError("", f"size {size}", problem, f"use a block count that divides {size}")
        return DimSharding((), ((size // entry.count, tuple(_users_part(axis, mesh) for axis in entry.axes)),))
    names = _axes_of(entry)
    return DimSharding(tuple(_users_part(name.removesuffix(_ZIGZAG), mesh) for name in names))


def _users_part(text: str, mesh: Mesh) -> AxisPart:
    """Read an axis part that the user names. Raises a ShardingError for the axes of a pipeline, which cut no value."""
    if axis_of(text) == mesh.stage_axis:
        problem = "it is the axis of the pipeline's stages, and a value is held by the ranks of one stage"
        raise ShardingError("", f"axis {text!r}", problem, f"leave {text!r} out, or name another axis in Pipeline")
    if axis_of(text) == MICROBATCH and mesh.stage_axis:
        problem, remedy = "it is the time of a pipeline", "say which dim is cut in microbatches: Pipeline(batch={...})"
        raise ShardingError("", f"axis {text!r}", problem, remedy)
    return parse_part(text, mesh)


def parse_part(text: str, mesh: Mesh) -> AxisPart:
    """Read an axis or a part of one: ``tp``, ``tp:(2)2``."""
    name, _, rest = text.partition(":")
    if not rest:
        return mesh.axis(name)
    mesh.axis_size(name)
    pre, _, size = rest.removeprefix("(").partition(")")
    if not (pre.isdecimal() and size.isdecimal() and int(pre) and int(size)):
        remedy = f"write for example 'tp:(2)2', or 'cp{_ZIGZAG}' for positions"
        raise ShardingError("", f"axis part {text!r}", "a part reads axis:(pre)size", remedy)
    return AxisPart(name, int(pre), int(size))


@functools.lru_cache(maxsize=1024)
def parse_parts(axes: tuple[str, ...], mesh: Mesh) -> Axes:
    """Read several axis parts."""
    return tuple(parse_part(axis, mesh) for axis in axes)


_AXIS = re.compile(r"\w+(:\(\d+\)\d+|:zigzag)?")


def _parse_entries(text: str) -> Iterator[Entry]:
    for item in _split_commas(text):
        if item == "...":
            yield cast("Entry", ...)
        elif item.startswith("blocks("):
            count, _, axes = item.removeprefix("blocks(").removesuffix(")").partition(",")
            if not (count.strip().isdecimal() and int(count) and axes.strip() and item.endswith(")")):
                raise ShardingError(f"SPEC {text!r}", item, "blocks takes a count and axes", "write blocks(3,tp)")
            yield blocks(int(count), *(_axis(text, axis.strip()) for axis in axes.split("+")))
        elif item in ("-", "?"):
            yield None if item == "-" else P.OPEN
        else:
            names = tuple(_axis(text, name) for name in item.removesuffix("+?").split("+"))
            yield (*names, P.OPEN) if item.endswith("+?") else names if len(names) > 1 else names[0]


def _axis(text: str, name: str) -> str:
    """The name of an axis or of a part of one in a SPEC. Raises a ShardingError for any other text."""
    if name == "None" or not _AXIS.fullmatch(name):
        raise ShardingError(f"SPEC {text!r}", f"entry {name!r}", "it is no name of an axis, nor - or ?", _typed(name))
    return name


def _typed(name: str) -> str:
    """The remedy for an entry written as in Python, or for a malformed part of an axis."""
    words = re.findall(r"[^\W\d]\w*", re.sub(r"^P\b", "", name))
    axes = [word for word in words if word not in ("None", "OPEN", "P", "blocks")]
    if not axes:
        return "write ? for an open dim" if "OPEN" in words else "write - for a whole dim"
    if re.search(r"\d", re.sub(r"[^\W\d]\w*", "", name)):
        axis = axes[0]
        return f"write {axis}, {axis}:(2)2 for the minor 2 of its 4 ranks, or blocks(3,{axis}) for each of 3 blocks"
    if re.fullmatch(r"\w+:[^\W\d]\w*", name):
        return f"write {axes[0]}:{ZIGZAG} where each rank is to have an early and a late stretch, or {axes[0]}"
    if len(words) > 1:
        dims = ",".join({"None": "-", "OPEN": "?"}.get(word, word) for word in words if word not in ("P", "blocks"))
        return f"write {dims} for {len(words)} dims" + f", {'+'.join(axes)} for one cut by all" * (len(axes) > 1)
    return f"write {axes[0]}, without quotes or brackets"


def _split_commas(text: str) -> list[str]:
    if not isinstance(text, str):
        what, remedy = f"of type {type(text).__name__}", "write P.parse('dp,-,tp'), or P('dp', None, 'tp')"
        raise ShardingError(f"SPEC {text!r}", what, "a SPEC is text", remedy)
    items, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    if len(items) > 1 and not all(item.strip() for item in items):
        raise ShardingError(f"SPEC {text!r}", "an empty entry", "every dim needs an entry", "write - for a whole dim")
    return [item.strip() for item in items if item.strip()]
