"""What ``shardc diff`` prints of a difference: its tables, those that have a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardc.language.text import table
from shardc.program.traffic import shortened
from shardc.report.dump.diff import NUMBERS, STORED, is_same

Record = Mapping[str, Any]
TITLES = {
    "memory": "memory of one rank, bytes",
    "flops": "floating-point operations",
    "schedule": "schedule",
    "time": "predicted step, seconds",
}


def diff_text(difference: Record) -> str:
    """A difference as ``diff`` makes it, as text."""
    found = [part for part in _parts(difference) if part]
    if is_same(difference):
        found.insert(0, "no difference\n")
    return "\n".join(found)


def _parts(found: Record) -> Iterator[str]:
    for key in ("level", "mesh"):
        if key in found:
            old, new = (_mesh(each) if key == "mesh" else each for each in found[key])
            yield f"{key}: {old} -> {new}\n"
    yield from _collectives(found.get("collectives", {}))
    for key in STORED:
        rows = [(each["name"], _stored(each["before"]), _stored(each["after"])) for each in found.get(key, ())]
        yield table((key.removesuffix("s"), "before", "after"), rows) if rows else ""
    yield _entries("run whole, having no rule", found.get("fallbacks", {}))
    for key in NUMBERS:
        yield _numbers(TITLES[key], found.get(key, {}))
    for stage in found.get("stages", ()):
        yield _numbers(f"stage {stage['stage']}", {key: pair for key, pair in stage.items() if key != "stage"})
    yield _numbers("op, how many", found.get("ops", {}))
    yield _entries("note", found.get("notes", {}))
    left_out = ", ".join(found.get("left_out", ()))
    yield f"one dump leaves out {left_out}, which are not compared\n" if left_out else ""


def _mesh(mesh: Record) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items()) or "none"


def _collectives(found: Record) -> Iterator[str]:
    if not found:
        return
    signs = [(sign, each, each) for sign, key in (("-", "went"), ("+", "came")) for each in found[key]]
    signs += [(_change(each), each["before"], each["after"]) for each in found["changed"]]
    rows = [
        (
            sign,
            new["kind"],
            "+".join(new["axes"]),
            new["phase"],
            new["id"],
            _either(old, new, _payload),
            _either(old, new, lambda each: each.get("times", "")),
            _either(old, new, lambda each: each["wire_bytes"]),
            shortened(new["source"], ", "),
            shortened(new["cause"], "; "),
        )
        for sign, old, new in signs
    ]
    header = ("collective", "kind", "axes", "phase", "name", "result", "times", "wire bytes", "source", "cause")
    yield table(header, rows)
    totals = [
        (each["phase"] or "total", each["kind"], each["axes"], *(_change_text(each[key]) for key in KEYS))
        for each in found["totals"]
    ]
    yield table(("phase", "kind", "axes", "count", "bytes", "wire bytes"), totals) if totals else ""


KEYS = ("count", "bytes", "wire_bytes")


def _payload(found: Record) -> str:
    return f"{found['dtype']}{found['local_shape_out']}"


def _change(pair: Record) -> str:
    old, new = (each["wire_bytes"] * each.get("times", 1) for each in (pair["before"], pair["after"]))
    return "grew" if new > old else "shrank" if new < old else "changed"


def _either(old: Record, new: Record, text: Any) -> str:
    """One text, or two where they are not the same."""
    return _change_text([text(old), text(new)])


def _change_text(pair: Sequence[Any]) -> str:
    return " -> ".join(dict.fromkeys(map(str, pair)))


def _stored(entry: Record | None) -> str:
    if entry is None:
        return "none"
    type_ = entry["sharding"] or f"{entry['dtype']}{entry['shape']}"
    stages = f", stage {'+'.join(map(str, entry['stages']))}" if entry.get("stages") else ""
    return f"{type_}, {entry['local_shape']} on one rank{stages}"


def _entries(title: str, found: Record) -> str:
    signs = [(sign, each) for sign, key in (("-", "went"), ("+", "came")) for each in found.get(key, ())]
    rows = [(sign, each) if isinstance(each, str) else (sign, each["op"], each["module"], each["source"])
            for sign, each in signs]  # fmt: skip
    header = ("", title) if rows and len(rows[0]) == 2 else ("", title, "module", "source")
    return table(header, rows) if rows else ""


def _numbers(title: str, found: Record) -> str:
    """Of each number how it was, how it is and by how much it grew; of all else that it changed."""
    rows = []
    for name, (old, new) in found.items():
        if all(isinstance(each, int | float) for each in (old, new)):
            rows.append((name, old, new, f"{new - old:+,}" if isinstance(new - old, int) else f"{new - old:+.3g}"))
        elif all(each is None or isinstance(each, int | float | str) for each in (old, new)):
            rows.append((name, _or_none(old), _or_none(new), ""))
        else:
            rows.append((name, "", "", "changed"))
    return table((title, "before", "after", "change"), rows) if rows else ""


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)
