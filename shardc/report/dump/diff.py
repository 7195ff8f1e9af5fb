"""Compare two dumps in JSON: collectives that came, went or changed, and every other difference; JSON and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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

Record = Mapping[str, Any]
Pairs = list[tuple[Record, Record]]

STORED = ("parameters", "buffers", "inputs", "outputs")
NUMBERS = {
    "memory": "memory of one rank",
    "flops": "floating-point operations",
    "schedule": "schedule",
    "time": "predicted step",
}
PHASES = ("forward", "backward", "update", "")  # "" stands for all of them
PAYLOAD = ("dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "times", "stage")
TOTALS = ("count", "bytes", "wire_bytes")
UNITS: Mapping[str, Callable[[float], str]] = {  # how the numbers of a table are written, or those of one name
    "memory": bytes_text, "flops": operations_text, "time": seconds_text,
    "makespan": seconds_text, "bubble": seconds_text, "parameter_bytes": bytes_text,
}  # fmt: skip


def diff(before: Record, after: Record) -> dict[str, Any]:
    """The difference of two dumps in JSON form, version 1; ``{"version": 1}`` where they are equal.

    ``collectives``: those that ``came`` and ``went``, pairs of those ``changed``, and ``totals`` by phase, kind and
    axes. Parameters, buffers, inputs and outputs that differ are listed as they were and are, None where absent.
    ``memory``, ``flops``, ``stages``, ``schedule``, ``time`` and ``ops`` (how many of each op) list pairs of numbers
    that differ. ``fallbacks`` and ``notes``: those that came and went. ``left_out``: tables that one dump lacks.
    """
    is_partial = "only" in before or "only" in after
    if not is_partial:
        before, after = ({"schedule": {}, "time": {}, **dump} for dump in (before, after))
    difference = {key: compare(before, after) for key, compare in COMPARED.items() if key in before and key in after}
    difference["ops"] = difference.pop("nodes", {})
    difference["left_out"] = [key for key in COMPARED if (key in before) != (key in after)]
    return {"version": 1, **{key: value for key, value in difference.items() if value}}


def is_same(difference: Record) -> bool:
    """Whether two dumps agree in every table that both have."""
    return not {*difference} - {"version", "left_out"}


# Collectives.


def matched(before: Record, after: Record) -> tuple[Pairs, list[Record], list[Record]]:
    """Pairs of collectives that correspond, those of the first dump alone, and those of the second alone.

    Collectives of another kind, phase or axes never correspond. Names shift where ops come and go, so equal names count
    most, and then equal modules and source lines. A bucket corresponds to the one that shares most modules with it.
    """
    rest: list[list[Record]] = [list(before["collectives"]), list(after["collectives"])]
    modules = [{node["name"]: node["module"] for node in dump.get("nodes", ())} for dump in (before, after)]
    pairs: Pairs = []
    ways: list[Callable[..., dict[int, int]]] = [*(partial(_with_equal_keys, key) for key in KEYS), _buckets]
    for way in ways:
        places = way(*rest, *modules)
        pairs += [(rest[0][i], rest[1][j]) for i, j in places.items()]
        paired = ({*places}, {*places.values()})
        rest = [[each for i, each in enumerate(side) if i not in its] for side, its in zip(rest, paired, strict=True)]
    return pairs, rest[0], rest[1]


Modules = Mapping[str, str]  # the module of each value, by name
Key = Callable[[Record, Modules], Hashable]


def _with_equal_keys(
    key: Key, old: Sequence[Record], new: Sequence[Record], of_old: Modules, of_new: Modules
) -> dict[int, int]:
    """Places of collectives with equal keys, in order. None equals no key."""
    places: dict[Hashable, list[int]] = {}
    for j, each in reversed(list(enumerate(new))):
        places.setdefault(key(each, of_new), []).append(j)
    keys = enumerate(key(each, of_old) for each in old)
    return {i: places[its].pop() for i, its in keys if its is not None and places.get(its)}


def _buckets(old: Sequence[Record], new: Sequence[Record], of_old: Modules, of_new: Modules) -> dict[int, int]:
    """Places of buckets of one kind that share most modules."""
    places: dict[int, int] = {}
    for i, each in enumerate(old):
        free = [j for j, other in enumerate(new) if j not in places.values() and _kind(other) == _kind(each)]
        common = {j: len({*_modules(each, of_old)} & {*_modules(new[j], of_new)}) for j in free}
        best = max(common, key=lambda j: common[j], default=None)
        if best is not None and common[best] and ", " in each["node"] + new[best]["node"]:
            places[i] = best
    return places


def _kind(collective: Record) -> tuple[Hashable, ...]:
    return collective["kind"], tuple(collective["axes"]), collective["phase"]


def _payload(collective: Record) -> tuple[Hashable, ...]:
    return tuple(str(collective.get(name)) for name in PAYLOAD)


def _modules(collective: Record, modules: Modules) -> tuple[str, ...]:
    return tuple(sorted({modules[name] for name in collective["node"].split(", ") if name in modules}))


KEYS: tuple[Key, ...] = (  # the most telling first; c is a collective, m the modules of values
    lambda c, m: (_kind(c), c["node"], _modules(c, m), _payload(c)),
    lambda c, m: (_kind(c), _modules(c, m), c["source"], _payload(c)),
    lambda c, m: (_kind(c), c["id"]) if c["kind"] == "send" else None,
    lambda c, m: (_kind(c), _modules(c, m), c["source"], c.get("stage")),
    lambda c, m: (_kind(c), _modules(c, m), c["source"]),
    lambda c, m: (_kind(c), _modules(c, m)) if _modules(c, m) else None,
    lambda c, m: (_kind(c), c["source"]) if c["source"] else None,
    lambda c, m: (_kind(c), c["node"]),
)


def _collectives(before: Record, after: Record) -> dict[str, Any]:
    pairs, went, came = matched(before, after)
    changed = [{"before": old, "after": new} for old, new in pairs if _payload(old) != _payload(new)]
    if not (came or went or changed):
        return {}
    totals = []  # pairs of counts and bytes that differ, by phase, kind and axes, and of all collectives together
    sums = [_sums(dump["collectives"]) for dump in (before, after)]
    for key in sorted({**sums[0], **sums[1]}, key=lambda key: (PHASES.index(key[0]), key[1:])):
        old, new = (each.get(key, (0, 0, 0)) for each in sums)
        if old != new:
            numbers = map(list, zip(old, new, strict=True))
            totals.append(dict(zip(("phase", "kind", "axes", *TOTALS), (*key, *numbers), strict=True)))
    return {"came": came, "went": went, "changed": changed, "totals": totals}


def _sums(collectives: Sequence[Record]) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """Counts, bytes and wire bytes of a step by phase, kind and axes; of all collectives under empty names."""
    sums: dict[tuple[str, str, str], tuple[int, ...]] = {("", "", ""): (0, 0, 0)}
    for each in collectives:
        times = each.get("times", 1)
        numbers = times, each["bytes"] * times, each["wire_bytes"] * times
        for key in ((each["phase"], each["kind"], "+".join(each["axes"])), ("", "", "")):
            sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0, 0, 0)), numbers, strict=True))
    return sums


# Other tables.


def _changed(key: str) -> Callable[[Record, Record], list[Any] | None]:
    return lambda before, after: None if before[key] == after[key] else [before[key], after[key]]


def _by_name(key: str) -> Callable[[Record, Record], list[dict[str, Any]]]:
    def compare(before: Record, after: Record) -> list[dict[str, Any]]:
        old, new = ({entry["name"]: entry for entry in dump[key]} for dump in (before, after))
        return [{"name": name, "before": pair[0], "after": pair[1]} for name, pair in _differing(old, new).items()]

    return compare


def _numbers(key: str, before: Record, after: Record) -> dict[str, Any]:
    return _differing(before[key], after[key])


def _differing(old: Record, new: Record) -> dict[str, Any]:
    """The entries of two objects that differ, as pairs."""
    return {key: [old.get(key), new.get(key)] for key in {**old, **new} if old.get(key) != new.get(key)}


def _stages(before: Record, after: Record) -> list[dict[str, Any]]:
    old, new = ({stage["stage"]: stage for stage in dump["stages"]} for dump in (before, after))
    pairs = {stage: _differing(old.get(stage, {}), new.get(stage, {})) for stage in {**old, **new}}
    return [{**differing, "stage": stage} for stage, differing in pairs.items() if differing]


def _ops(before: Record, after: Record) -> dict[str, list[int]]:
    old, new = (Counter(node["op"] for node in dump["nodes"]) for dump in (before, after))
    return {op: [old[op], new[op]] for op in {**old, **new} if old[op] != new[op]}


def _came_and_went(key: str, name: Callable[[Any], Hashable]) -> Callable[[Record, Record], dict[str, Any]]:
    def absent(entries: Iterable[Any], others: Iterable[Any]) -> Iterator[Any]:
        left = Counter(map(name, others))
        for entry in entries:
            left[name(entry)] -= 1
            if left[name(entry)] < 0:
                yield entry

    def compare(before: Record, after: Record) -> dict[str, Any]:
        came, went = list(absent(after[key], before[key])), list(absent(before[key], after[key]))
        return {"came": came, "went": went} if came or went else {}

    return compare


COMPARED: dict[str, Callable[[Record, Record], Any]] = {
    "level": _changed("level"),
    "mesh": _changed("mesh"),
    "collectives": _collectives,
    **{key: _by_name(key) for key in STORED},
    **{key: partial(_numbers, key) for key in NUMBERS},
    "stages": _stages,
    "fallbacks": _came_and_went("fallbacks", lambda entry: (entry["op"], entry["module"], entry["source"])),
    "notes": _came_and_went("notes", str),
    "nodes": _ops,
}


# Text.


def diff_text(difference: Record) -> str:
    """The text form of a difference: a table for each key that differs."""
    parts = [part for part in _parts(difference) if part]
    return "\n".join(["no difference\n", *parts] if is_same(difference) else parts)


def _parts(difference: Record) -> Iterator[str]:
    for key in ("level", "mesh"):
        if key in difference:
            old, new = (_mesh_text(each) if key == "mesh" else each for each in difference[key])
            yield printable(f"{key}: {old} -> {new}") + "\n"
    if "collectives" in difference:
        yield from _collective_tables(difference["collectives"])
    for key in STORED:
        rows = (
            (each["name"], _stored_text(each["before"]), _stored_text(each["after"]))
            for each in difference.get(key, ())
        )
        yield table((key.removesuffix("s"), "before", "after"), folded(rows))
    yield _signed_table("run whole, having no rule", difference.get("fallbacks", {}))
    for key, title in NUMBERS.items():
        yield _number_table(title, difference.get(key, {}), UNITS.get(key))
    for stage in difference.get("stages", ()):
        yield _number_table(f"stage {stage['stage']}", {key: pair for key, pair in stage.items() if key != "stage"})
    yield _number_table("op, how many", difference.get("ops", {}))
    yield _signed_table("note", difference.get("notes", {}))
    left_out = ", ".join(difference.get("left_out", ()))
    yield f"one dump leaves out {left_out}, which are not compared\n" if left_out else ""


def _mesh_text(mesh: Record) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items()) or "none"


def _collective_tables(difference: Record) -> Iterator[str]:
    rows = [(sign, each, each) for sign, key in (("-", "went"), ("+", "came")) for each in difference[key]]
    for old, new in ((each["before"], each["after"]) for each in difference["changed"]):
        growth = new["wire_bytes"] * new.get("times", 1) - old["wire_bytes"] * old.get("times", 1)
        rows.append(("grew" if growth > 0 else "shrank" if growth < 0 else "changed", old, new))
    header = ("collective", "kind", "axes", "phase", "name", "result", "times", "wire bytes", "source", "cause")
    yield table(header, folded((_collective_row(*row) for row in rows), header.index("name"), over_calls))
    totals = (
        (each["phase"] or "total", each["kind"], each["axes"], _pair_text(each["count"]),
         *(_bytes_pair_text(each[key]) for key in ("bytes", "wire_bytes")))
        for each in difference["totals"]
    )  # fmt: skip
    yield table(("phase", "kind", "axes", "count", "bytes", "wire bytes"), totals)


def _collective_row(sign: str, old: Record, new: Record) -> tuple[object, ...]:
    results = [f"{each['dtype']}{each['local_shape_out']}" for each in (old, new)]
    times = [each.get("times", "") for each in (old, new)]
    sent = _bytes_pair_text([each["wire_bytes"] for each in (old, new)])
    return (
        sign, new["kind"], "+".join(new["axes"]), new["phase"], new["id"], *map(_pair_text, (results, times)), sent,
        shortened(new["source"], ", "), shortened(new["cause"], "; "),
    )  # fmt: skip


def _pair_text(pair: Sequence[Any]) -> str:
    """``old -> new``, or one text where both are equal."""
    return " -> ".join(dict.fromkeys(map(str, pair)))


def _bytes_pair_text(pair: Sequence[int]) -> str:
    """The same of bytes; the change is said where both read alike and are not."""
    texts = dict.fromkeys(map(bytes_text, pair))
    is_lost = len(texts) == 1 and len({*pair}) > 1
    return f"{', '.join(texts)}, {change_text(pair[0], pair[1])}" if is_lost else " -> ".join(texts)


def _stored_text(entry: Record | None) -> str:
    if entry is None:
        return "none"
    type_ = entry["sharding"] or f"{entry['dtype']}{entry['shape']}"
    stages = f", stage {'+'.join(map(str, entry['stages']))}" if entry.get("stages") else ""
    return f"{type_}, {entry['local_shape']} on one rank{stages}"


def _signed_table(title: str, difference: Record) -> str:
    """What came, after +, and what went, after -: notes, or ops with their places."""
    signed = [(sign, each) for sign, key in (("-", "went"), ("+", "came")) for each in difference.get(key, ())]
    if all(isinstance(each, str) for _, each in signed):
        return table(("", title), signed)
    rows = ((sign, each["op"], each["module"], each["source"]) for sign, each in signed)
    return table(("", title, "module", "source"), folded(rows, 1))


def _number_table(title: str, difference: Record, unit: Callable[[float], str] | None = None) -> str:
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
