"""Compare two JSON dumps: collectives that came, went or changed, and all other differences, as JSON and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from shardc.language.record import json_of
from shardc.language.text import (
    bytes_text,
    change_text,
    folded,
    operations_text,
    over_calls,
    printable,
    seconds_text,
    shortened,
    table,
)
from shardc.program.provenance import Phase
from shardc.report.dump.records import (
    ChangedCollective,
    ChangedCollectives,
    ChangedFallbacks,
    ChangedNotes,
    ChangedParameter,
    ChangedStage,
    ChangedTotal,
    ChangedValue,
    CollectiveEntry,
    Difference,
    Dump,
    NodeEntry,
    ValueEntry,
)

Pairs = list[tuple[CollectiveEntry, CollectiveEntry]]
Collectives = Sequence[CollectiveEntry]
T = TypeVar("T")

STORED = ("parameters", "buffers", "inputs", "outputs")
NUMBERS = {
    "memory": "memory of one rank",
    "flops": "floating-point operations",
    "schedule": "schedule",
    "time": "predicted step",
}
PHASES = ("forward", "backward", "update", "")  # "" stands for all of them
PAYLOAD = ("dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "times", "stage")
UNITS: Mapping[str, Callable[[float], str]] = {  # formats for the numbers of a table, or of one name
    "memory": bytes_text, "flops": operations_text, "time": seconds_text,
    "makespan": seconds_text, "bubble": seconds_text, "parameter_bytes": bytes_text,
}  # fmt: skip


def diff(before: Dump, after: Dump) -> Difference:
    """The difference of two dumps; ``Difference()`` if they are equal."""
    tables = [_tables(dump, before.only or after.only) for dump in (before, after)]
    found = {key: compare(before, after) for key, compare in COMPARED.items() if all(key in each for each in tables)}
    found["ops"] = found.pop("nodes", {})
    found["left_out"] = tuple(key for key in COMPARED if (key in tables[0]) != (key in tables[1]))
    return Difference(**{key: value for key, value in found.items() if value})


def _tables(dump: Dump, is_partial: object) -> set[str]:
    """The tables of a dump. In the dump of a whole plan, a missing schedule or time counts as an empty table."""
    has_all = () if is_partial else ("schedule", "time")
    return {key for key in COMPARED if key in has_all or getattr(dump, key) is not None}


def is_same(difference: Difference) -> bool:
    """Whether two dumps agree in every table that both have."""
    return replace(difference, left_out=None) == Difference()


# Collectives.


def matched(before: Dump, after: Dump) -> tuple[Pairs, list[CollectiveEntry], list[CollectiveEntry]]:
    """Pairs of collectives that correspond, those of the first dump alone, and those of the second alone.

    Collectives of another kind, phase or axes never correspond. Since names shift where ops come and go, the name alone
    counts least: name, modules and payload together come first, then modules and source lines. A bucket corresponds to
    the one that shares most modules with it.
    """
    rest = [list(before.collectives or ()), list(after.collectives or ())]
    modules = [{node.name: node.module for node in dump.nodes or ()} for dump in (before, after)]
    pairs: Pairs = []
    ways: list[Callable[..., dict[int, int]]] = [*(partial(_with_equal_keys, key) for key in KEYS), _buckets]
    for way in ways:
        places = way(*rest, *modules)
        pairs += [(rest[0][i], rest[1][j]) for i, j in places.items()]
        paired = ({*places}, {*places.values()})
        rest = [[each for i, each in enumerate(side) if i not in its] for side, its in zip(rest, paired, strict=True)]
    return pairs, rest[0], rest[1]


Modules = Mapping[str, str]  # the module of each value, by name
Key = Callable[[CollectiveEntry, Modules], Hashable]


def _with_equal_keys(key: Key, old: Collectives, new: Collectives, of_old: Modules, of_new: Modules) -> dict[int, int]:
    """Pairs of places of collectives with equal keys, in order. A key of None equals no other."""
    places: dict[Hashable, list[int]] = {}
    for j, each in reversed(list(enumerate(new))):
        places.setdefault(key(each, of_new), []).append(j)
    keys = enumerate(key(each, of_old) for each in old)
    return {i: places[its].pop() for i, its in keys if its is not None and places.get(its)}


def _buckets(old: Collectives, new: Collectives, of_old: Modules, of_new: Modules) -> dict[int, int]:
    """Pairs of places of buckets of one kind that share most modules."""
    places: dict[int, int] = {}
    for i, each in enumerate(old):
        free = [j for j, other in enumerate(new) if j not in places.values() and _kind(other) == _kind(each)]
        common = {j: len({*_modules(each, of_old)} & {*_modules(new[j], of_new)}) for j in free}
        best = max(common, key=lambda j: common[j], default=None)
        if best is not None and common[best] and ", " in each.node + new[best].node:
            places[i] = best
    return places


def _kind(collective: CollectiveEntry) -> tuple[Hashable, ...]:
    return collective.kind, collective.axes, collective.phase


def _payload(collective: CollectiveEntry) -> tuple[Hashable, ...]:
    return tuple(getattr(collective, name) for name in PAYLOAD)


def _modules(collective: CollectiveEntry, modules: Modules) -> tuple[str, ...]:
    return tuple(sorted({modules[name] for name in collective.node.split(", ") if name in modules}))


KEYS: tuple[Key, ...] = (  # the most telling first; c is a collective, m the modules of values
    lambda c, m: (_kind(c), c.node, _modules(c, m), _payload(c)),
    lambda c, m: (_kind(c), _modules(c, m), c.source, _payload(c)),
    lambda c, m: (_kind(c), c.id) if c.kind == "send" else None,
    lambda c, m: (_kind(c), _modules(c, m), c.source, c.stage),
    lambda c, m: (_kind(c), _modules(c, m), c.source),
    lambda c, m: (_kind(c), _modules(c, m)) if _modules(c, m) else None,
    lambda c, m: (_kind(c), c.source) if c.source else None,
    lambda c, m: (_kind(c), c.node),
)


def _collectives(before: Dump, after: Dump) -> ChangedCollectives | None:
    pairs, went, came = matched(before, after)
    changed = tuple(ChangedCollective(old, new) for old, new in pairs if _payload(old) != _payload(new))
    if not (came or went or changed):
        return None
    totals = []  # pairs of counts and bytes that differ, by phase, kind and axes, and of all collectives together
    sums = [_sums(dump.collectives or ()) for dump in (before, after)]
    for key in sorted({**sums[0], **sums[1]}, key=lambda key: (PHASES.index(key[0]), key[1:])):
        old, new = (each.get(key, (0, 0, 0)) for each in sums)
        if old != new:
            totals.append(ChangedTotal(*key, *zip(old, new, strict=True)))
    return ChangedCollectives(tuple(came), tuple(went), changed, tuple(totals))


TotalKey = tuple[Literal[Phase, ""], str, str]


def _sums(collectives: Collectives) -> dict[TotalKey, tuple[int, int, int]]:
    """Counts, bytes and wire bytes of a step by phase, kind and axes; of all collectives under empty names."""
    sums: dict[TotalKey, tuple[int, int, int]] = {("", "", ""): (0, 0, 0)}
    keys: tuple[TotalKey, ...]
    for each in collectives:
        times = each.times or 1
        keys = ((each.phase, each.kind, "+".join(each.axes)), ("", "", ""))
        for key in keys:
            count, payload, wire = sums.get(key, (0, 0, 0))
            sums[key] = count + times, payload + each.bytes * times, wire + each.wire_bytes * times
    return sums


# Other tables.


def _changed(key: str) -> Callable[[Dump, Dump], tuple[Any, Any] | None]:
    def compare(before: Dump, after: Dump) -> tuple[Any, Any] | None:
        old, new = getattr(before, key), getattr(after, key)
        return None if old == new else (old, new)

    return compare


def _by_name(key: str) -> Callable[[Dump, Dump], tuple[ChangedParameter | ChangedValue, ...]]:
    type_ = ChangedParameter if key == "parameters" else ChangedValue

    def compare(before: Dump, after: Dump) -> tuple[ChangedParameter | ChangedValue, ...]:
        old, new = ({entry.name: entry for entry in getattr(dump, key)} for dump in (before, after))
        return tuple(type_(name, *pair) for name, pair in _differing(old, new).items())

    return compare


def _numbers(key: str, before: Dump, after: Dump) -> dict[str, Any]:
    return _differing(*(json_of(getattr(dump, key) or {}) for dump in (before, after)))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The entries of two objects that differ, as pairs."""
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _stages(before: Dump, after: Dump) -> tuple[ChangedStage, ...]:
    old, new = ({stage.stage: json_of(stage) for stage in dump.stages or ()} for dump in (before, after))
    pairs = {stage: _differing(old.get(stage, {}), new.get(stage, {})) for stage in {**old, **new}}
    return tuple(ChangedStage(its, stage) for stage, its in pairs.items() if its)


def _ops(before: Dump, after: Dump) -> dict[str, tuple[int, int]]:
    old, new = (Counter(node.op for node in dump.nodes or ()) for dump in (before, after))
    return {op: (old[op], new[op]) for op in {**old, **new} if old[op] != new[op]}


def _fallbacks(before: Dump, after: Dump) -> ChangedFallbacks | None:
    def place(entry: NodeEntry) -> Hashable:
        return entry.op, entry.module, entry.source

    old, new = (dump.fallbacks or () for dump in (before, after))
    found = ChangedFallbacks(_absent(new, old, place), _absent(old, new, place))
    return found if found.came or found.went else None


def _notes(before: Dump, after: Dump) -> ChangedNotes | None:
    old, new = (dump.notes or () for dump in (before, after))
    found = ChangedNotes(_absent(new, old, str), _absent(old, new, str))
    return found if found.came or found.went else None


def _absent(entries: Sequence[T], others: Sequence[T], name: Callable[[T], Hashable]) -> tuple[T, ...]:
    """The entries minus the others, as multisets of names."""
    left = Counter(map(name, others))
    absent = []
    for entry in entries:
        left[name(entry)] -= 1
        if left[name(entry)] < 0:
            absent.append(entry)
    return tuple(absent)


COMPARED: dict[str, Callable[[Dump, Dump], Any]] = {
    "level": _changed("level"),
    "mesh": _changed("mesh"),
    "collectives": _collectives,
    **{key: _by_name(key) for key in STORED},
    **{key: partial(_numbers, key) for key in NUMBERS},
    "stages": _stages,
    "fallbacks": _fallbacks,
    "notes": _notes,
    "nodes": _ops,
}


# Text.


def diff_text(difference: Difference) -> str:
    """The text form of a difference: a table for each key that differs."""
    parts = [part for part in _parts(difference) if part]
    return "\n".join(["no difference\n", *parts] if is_same(difference) else parts)


def _parts(difference: Difference) -> Iterator[str]:
    if difference.level:
        yield _change_line("level", difference.level)
    if difference.mesh:
        yield _change_line("mesh", map(_mesh_text, difference.mesh))
    if difference.collectives:
        yield from _collective_tables(difference.collectives)
    for key in STORED:
        changed: Sequence[ChangedParameter | ChangedValue] = getattr(difference, key) or ()
        rows = [(each.name, _stored_text(each.before), _stored_text(each.after)) for each in changed]
        yield table((key.removesuffix("s"), "before", "after"), folded(rows))
    if difference.fallbacks:
        ops = ((sign, each.op, each.module, each.source) for sign, each in _signed(difference.fallbacks))
        yield table(("", "run whole, having no rule", "module", "source"), folded(ops, 1))
    for key, title in NUMBERS.items():
        yield _number_table(title, getattr(difference, key) or {}, UNITS.get(key))
    for stage in difference.stages or ():
        numbers = {key: pair for key, pair in stage.changed.items() if key != "stage"}  # of a stage in one plan alone
        yield _number_table(f"stage {stage.stage}", numbers)
    yield _number_table("op, how many", difference.ops or {})
    if difference.notes:
        yield table(("", "note"), _signed(difference.notes))
    left_out = ", ".join(difference.left_out or ())
    yield f"one dump leaves out {left_out}, which are not compared\n" if left_out else ""


def _change_line(title: str, texts: Iterable[str]) -> str:
    return printable(f"{title}: {' -> '.join(texts)}") + "\n"


def _signed(changed: ChangedFallbacks | ChangedNotes) -> list[tuple[str, Any]]:
    """The entries that went, each with -, then those that came, each with +."""
    return [*(("-", each) for each in changed.went), *(("+", each) for each in changed.came)]


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items()) or "none"


def _collective_tables(difference: ChangedCollectives) -> Iterator[str]:
    rows = [("-", each, each) for each in difference.went] + [("+", each, each) for each in difference.came]
    for old, new in ((each.before, each.after) for each in difference.changed):
        growth = new.wire_bytes * (new.times or 1) - old.wire_bytes * (old.times or 1)
        rows.append(("grew" if growth > 0 else "shrank" if growth < 0 else "changed", old, new))
    header = ("collective", "kind", "axes", "phase", "name", "result", "times", "wire bytes", "source", "cause")
    yield table(header, folded((_collective_row(*row) for row in rows), header.index("name"), over_calls))
    totals = (
        (each.phase or "total", each.kind, each.axes, _pair_text(each.count), _bytes_pair_text(each.bytes),
         _bytes_pair_text(each.wire_bytes))
        for each in difference.totals
    )  # fmt: skip
    yield table(("phase", "kind", "axes", "count", "bytes", "wire bytes"), totals)


def _collective_row(sign: str, old: CollectiveEntry, new: CollectiveEntry) -> tuple[object, ...]:
    results = [f"{each.dtype}{list(each.local_shape_out)}" for each in (old, new)]
    times = [each.times or "" for each in (old, new)]
    sent = _bytes_pair_text((old.wire_bytes, new.wire_bytes))
    return (
        sign, new.kind, "+".join(new.axes), new.phase, new.id, _pair_text(results), _pair_text(times), sent,
        shortened(new.source, ", "), shortened(new.cause, "; "),
    )  # fmt: skip


def _pair_text(pair: Sequence[Any]) -> str:
    """``old -> new``, or one text if both are equal."""
    return " -> ".join(dict.fromkeys(map(str, pair)))


def _bytes_pair_text(pair: Sequence[int]) -> str:
    """``old -> new`` in bytes; if unequal numbers read alike, their text and the change instead."""
    texts = dict.fromkeys(map(bytes_text, pair))
    is_lost = len(texts) == 1 and len({*pair}) > 1
    return f"{', '.join(texts)}, {change_text(pair[0], pair[1])}" if is_lost else " -> ".join(texts)


def _stored_text(entry: ValueEntry | None) -> str:
    if entry is None:
        return "none"
    type_ = entry.sharding or f"{entry.dtype}{list(entry.shape)}"
    stages = "+".join(map(str, getattr(entry, "stages", None) or ()))
    return f"{type_}, {list(entry.local_shape)} on one rank{stages and f', stage {stages}'}"


def _number_table(title: str, difference: Mapping[str, Any], unit: Callable[[float], str] | None = None) -> str:
    """Each number before and after, with the difference; other values are only marked as changed."""
    rows: list[tuple[Any, ...]] = []
    for name, (old, new) in difference.items():
        text = UNITS.get(name) or unit or "{:,}".format
        if all(isinstance(each, int | float) for each in (old, new)):
            rows.append((name, text(old), text(new), change_text(old, new, text)))
        elif all(each is None or isinstance(each, int | float | str) for each in (old, new)):
            cells = (_cell_text(each, text) for each in (old, new))
            rows.append((name, *cells, ""))
        else:
            rows.append((name, "", "", "changed"))
    return table((title, "before", "after", "change"), rows)


def _cell_text(value: float | str | None, text: Callable[[float], str]) -> str:
    return "none" if value is None else value if isinstance(value, str) else text(value)
