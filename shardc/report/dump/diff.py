"""What lies between two dumps in JSON: collectives that came, went, grew, and all else that is not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

Record = Mapping[str, Any]
Pairs = list[tuple[Record, Record]]

STORED = ("parameters", "buffers", "inputs", "outputs")
NUMBERS = ("memory", "flops", "schedule", "time")
PHASES = ("forward", "backward", "update", "")  # the last being all of them
PAYLOAD = ("dtype", "local_shape_in", "local_shape_out", "bytes", "wire_bytes", "times", "stage")


def diff(before: Record, after: Record) -> dict[str, Any]:
    """The JSON form of a difference, version 1, of two dumps: ``{"version": 1}`` where they are the same.

    ``collectives``: those that ``came`` and ``went``, and pairs of those ``changed``; ``totals`` of them by phase, kind
    and axes. Of parameters, buffers, inputs and outputs each that is not the same, as it was and as it is, None where
    it is not there. ``memory``, ``flops``, ``stages``, ``schedule``, ``time``, ``ops`` (how many of each): of all that
    differs, both. ``fallbacks`` and ``notes``: came and went. What one of the dumps leaves out is in ``left_out``.
    """
    is_partial = "only" in before or "only" in after
    if not is_partial:
        before, after = ({"schedule": {}, "time": {}, **dump} for dump in (before, after))
    found = {key: compare(before, after) for key, compare in COMPARED.items() if key in before and key in after}
    found["ops"] = found.pop("nodes", {})
    found["left_out"] = [key for key in COMPARED if (key in before) != (key in after)]
    return {"version": 1, **{key: value for key, value in found.items() if value}}


def is_same(difference: Record) -> bool:
    """Whether two dumps say the same of all that both have."""
    return not {*difference} - {"version", "left_out"}


def _pair(old: Any, new: Any) -> list[Any] | None:
    return None if old == new else [old, new]


# Collectives.


def matched(before: Record, after: Record) -> tuple[Pairs, list[Record], list[Record]]:
    """The collectives of two dumps that are one, and those that only the first has, and only the second.

    Names shift where ops come and go, so they speak first, and after them the modules and lines that values come from;
    what goes over other axes, in another phase or as another kind is another collective. A bucket is the one that has
    most of its modules.
    """
    rest: list[list[Record]] = [list(before["collectives"]), list(after["collectives"])]
    modules = [{node["name"]: node["module"] for node in dump.get("nodes", ())} for dump in (before, after)]
    pairs: Pairs = []
    ways: list[Callable[..., dict[int, int]]] = [*(partial(_taken, key) for key in KEYS), _buckets]
    for take in ways:
        taken = take(*rest, *modules)
        pairs += [(rest[0][i], rest[1][j]) for i, j in taken.items()]
        gone = ({*taken}, {*taken.values()})
        rest = [[found for i, found in enumerate(each) if i not in its] for each, its in zip(rest, gone, strict=True)]
    return pairs, rest[0], rest[1]


Modules = Mapping[str, str]  # of each value


def _taken(key: Key, old: Sequence[Record], new: Sequence[Record], of_old: Modules, of_new: Modules) -> dict[int, int]:
    """Places of equal keys, in order; a key of None is like no other."""
    places: dict[Hashable, list[int]] = {}
    for j, found in reversed(list(enumerate(new))):
        places.setdefault(key(found, of_new), []).append(j)
    keys = enumerate(key(found, of_old) for found in old)
    return {i: places[its].pop() for i, its in keys if its is not None and places.get(its)}


def _buckets(old: Sequence[Record], new: Sequence[Record], of_old: Modules, of_new: Modules) -> dict[int, int]:
    """Places of buckets of one kind, those that have most modules in common."""
    taken: dict[int, int] = {}
    for i, found in enumerate(old):
        free = [j for j, other in enumerate(new) if j not in taken.values() and _kind(other) == _kind(found)]
        common = {j: len({*_modules(found, of_old)} & {*_modules(new[j], of_new)}) for j in free}
        best = max(common, key=lambda j: common[j], default=None)
        if best is not None and common[best] and ", " in found["node"] + new[best]["node"]:
            taken[i] = best
    return taken


def _kind(found: Record) -> tuple[Hashable, ...]:
    return found["kind"], tuple(found["axes"]), found["phase"]


def _payload(found: Record) -> tuple[Hashable, ...]:
    return tuple(str(found.get(name)) for name in PAYLOAD)


def _modules(found: Record, modules: Modules) -> tuple[str, ...]:
    return tuple(sorted({modules[name] for name in found["node"].split(", ") if name in modules}))


Key = Callable[[Record, Modules], Hashable]
KEYS: tuple[Key, ...] = (
    lambda found, modules: (_kind(found), found["node"], _modules(found, modules), _payload(found)),
    lambda found, modules: (_kind(found), _modules(found, modules), found["source"], _payload(found)),
    lambda found, modules: (_kind(found), found["id"]) if found["kind"] == "send" else None,
    lambda found, modules: (_kind(found), _modules(found, modules), found["source"], found.get("stage")),
    lambda found, modules: (_kind(found), _modules(found, modules), found["source"]),
    lambda found, modules: (_kind(found), _modules(found, modules)) if _modules(found, modules) else None,
    lambda found, modules: (_kind(found), found["source"]) if found["source"] else None,
    lambda found, modules: (_kind(found), found["node"]),
)


def _collectives(before: Record, after: Record) -> dict[str, Any]:
    pairs, went, came = matched(before, after)
    changed = [{"before": old, "after": new} for old, new in pairs if _payload(old) != _payload(new)]
    found = {"came": came, "went": went, "changed": changed, "totals": _totals(before, after)}
    return found if came or went or changed else {}


def _totals(before: Record, after: Record) -> list[dict[str, Any]]:
    """Of each phase, kind and axes, and of all together, what is not as it was: pairs of how many and of bytes."""
    sums = [_sums(dump["collectives"]) for dump in (before, after)]
    rows = []
    for key in sorted({**sums[0], **sums[1]}, key=lambda key: (PHASES.index(key[0]), key[1:])):
        old, new = (each.get(key, (0, 0, 0)) for each in sums)
        if old != new:
            names = zip(("phase", "kind", "axes"), key, strict=True)
            numbers = zip(("count", "bytes", "wire_bytes"), zip(old, new, strict=True), strict=True)
            rows.append({**dict(names), **{name: list(pair) for name, pair in numbers}})
    return rows


def _sums(collectives: Sequence[Record]) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """By phase, kind and axes how many in a step, their bytes and wire bytes; then of all, by empty names."""
    sums: dict[tuple[str, str, str], tuple[int, ...]] = {("", "", ""): (0, 0, 0)}
    for found in collectives:
        times = found.get("times", 1)
        numbers = times, found["bytes"] * times, found["wire_bytes"] * times
        for key in ((found["phase"], found["kind"], "+".join(found["axes"])), ("", "", "")):
            sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0, 0, 0)), numbers, strict=True))
    return sums


# All else.


def _by_name(key: str) -> Callable[[Record, Record], list[dict[str, Any]]]:
    def found(before: Record, after: Record) -> list[dict[str, Any]]:
        old, new = ({entry["name"]: entry for entry in dump[key]} for dump in (before, after))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return [{"name": name, "before": old.get(name), "after": new.get(name)} for name in names]

    return found


def _by_number(key: str) -> Callable[[Record, Record], dict[str, Any]]:
    return lambda before, after: _numbers(before[key], after[key])


def _numbers(old: Record, new: Record) -> dict[str, Any]:
    """What is not the same of each entry of two objects."""
    return {name: [old.get(name), new.get(name)] for name in {**old, **new} if old.get(name) != new.get(name)}


def _stages(before: Record, after: Record) -> list[dict[str, Any]]:
    old, new = ({stage["stage"]: stage for stage in dump["stages"]} for dump in (before, after))
    numbers = {stage: _numbers(old.get(stage, {}), new.get(stage, {})) for stage in {**old, **new}}
    return [{**differing, "stage": stage} for stage, differing in numbers.items() if differing]


def _ops(before: Record, after: Record) -> dict[str, list[int]]:
    old, new = (Counter(node["op"] for node in dump["nodes"]) for dump in (before, after))
    return {op: [old[op], new[op]] for op in {**old, **new} if old[op] != new[op]}


def _came_and_went(key: str, name: Callable[[Any], Hashable]) -> Callable[[Record, Record], dict[str, Any]]:
    def missing(entries: Iterable[Any], others: Iterable[Any]) -> list[Any]:
        left = Counter(map(name, others))
        found = []
        for entry in entries:
            left[name(entry)] -= 1
            found += [entry] * (left[name(entry)] < 0)
        return found

    def found(before: Record, after: Record) -> dict[str, Any]:
        came, went = missing(after[key], before[key]), missing(before[key], after[key])
        return {"came": came, "went": went} if came or went else {}

    return found


COMPARED: dict[str, Callable[[Record, Record], Any]] = {
    "level": lambda before, after: _pair(before["level"], after["level"]),
    "mesh": lambda before, after: _pair(before["mesh"], after["mesh"]),
    "collectives": _collectives,
    **{key: _by_name(key) for key in STORED},
    **{key: _by_number(key) for key in NUMBERS},
    "stages": _stages,
    "fallbacks": _came_and_went("fallbacks", lambda entry: (entry["op"], entry["module"], entry["source"])),
    "notes": _came_and_went("notes", str),
    "nodes": _ops,
}
