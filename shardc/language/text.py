"""Text for people: rows in columns, numbers in units."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from shardc.language.errors import OptionError

_IS_ORIGIN = re.compile(r"\S+ from ").match


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, keep: str = "") -> str:
    """Escape the control characters and direction marks of a text, except those in ``keep``.

    Names come from other people's models, files and dumps. None may move the cursor of a terminal or forge a line.
    """
    return _UNPRINTABLE.sub(lambda at: at[0] if at[0] in keep else at[0].encode("unicode_escape").decode(), text)


def read_file(path: str | Path) -> str:
    """The text of a regular file. Raises an OSError for a pipe, a device or a socket, whose reads may never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "It is a pipe or a device, not a file")
    return Path(path).read_text(encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows in columns under a header, or "" without rows.

    Columns of numbers are aligned to the right. Columns whose cells are all empty are left out.
    """
    cells = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    if len(cells) == 1:
        return ""
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    right = {i for i, column in enumerate(columns) if all(cell[:1].isdigit() for cell in column[1:])}
    return "\n".join(aligned(list(zip(*columns, strict=True)), right)) + "\n"


def aligned(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row, in columns as wide as their widest cells; those of ``right`` are aligned to the right."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if i in right else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def over_layers(name: str) -> str:
    """Replace the layer numbers in a name by ``*``: ``blocks.3.up.weight`` becomes ``blocks.*.up.weight``."""
    return re.sub(r"(?<!\w)\d+(?=(?:\.\d+)*\.[A-Za-z_])", "*", name)


def over_calls(text: str) -> str:
    """``over_layers`` of a text with names of values, without their numbers: ``add_3`` becomes ``add``."""
    return over_layers(re.sub(r"_\d+(?=$|[ ,;])", "", text))


def folded(
    rows: Iterable[Sequence[object]], column: int = 0, alike: Callable[[str], str] = over_layers
) -> list[Sequence[object]]:
    """Merge the rows of equal layers in a table into one, with ``blocks.*.up.weight x 12`` in its ``column``.

    Rows are of equal layers if ``alike`` maps them to the same text. The merged row takes the place of the first.
    """
    groups: dict[tuple[str, ...], list[Sequence[object]]] = {}
    for row in rows:
        groups.setdefault(tuple(alike(str(cell)) for cell in row), []).append(row)
    found: list[Sequence[object]] = []
    for same in groups.values():
        cells = list(map(over_layers, map(str, same[0])))
        cells[column] += f" x {len(same)}"
        found.append(same[0] if len(same) == 1 else cells)
    return found


def shortened(text: str, separator: str = ", ") -> str:
    """Shorten a list with an entry for each member of a bucket to the first entry, a count, and the annotations.

    Entries such as ``dp from x: P('dp')`` name annotations and are all kept.
    """
    parts = text.split(separator)
    origins = [part for part in parts if _IS_ORIGIN(part)]
    others = len(parts) - len(origins) - 1
    return text if others < 2 else separator.join([parts[0], f"and {others} more", *origins])


# Units for people. Every text form writes bytes, seconds and operations with these; JSON has whole numbers.


def bytes_text(count: float) -> str:
    """``512 B``, ``2.0 MB``: powers of a thousand."""
    return _in_units(count, ("B", "kB", "MB", "GB", "TB"))


def operations_text(count: float) -> str:
    """``512 FLOP``, ``2.0 GFLOP``: floating-point operations, in powers of a thousand."""
    return _in_units(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def count_text(count: float) -> str:
    """``512``, ``2.0 M``: a count, in powers of a thousand."""
    return _in_units(count, ("", "k", "M", "G", "T")).rstrip()


_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([A-Za-z]*)\s*")


def bytes_of(text: str | float) -> int:
    """Read a number of bytes such as ``80GB``. Raises an OptionError for any other text, and for less than 1 byte."""
    parts = _BYTES.fullmatch(str(text))
    count = int(float(parts[1]) * _UNITS.get(parts[2].lower(), 0)) if parts else 0
    if count < 1:
        raise OptionError("memory", repr(text), "it is no number of bytes", "say 80GB, or digits alone")
    return count


def _in_units(count: float, units: Sequence[str]) -> str:
    """A number in the first unit that brings it below a thousand; the first unit has no fractions."""
    if abs(count) < 1000:
        return f"{count} {units[0]}"
    size, power = count / 1000, 1
    while abs(size) >= 999.95 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.1f} {units[power]}"


def seconds_text(seconds: float) -> str:
    """``20.0 us``, ``1.311 ms``, ``2.5 s``."""
    for factor, unit, digits in ((1e6, "us", 1), (1e3, "ms", 3)):
        if abs(seconds * factor) < 1000:
            return f"{seconds * factor:.{digits}f} {unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"


def change_text(before: float, after: float, text: Callable[[float], str] = bytes_text) -> str:
    """``+1.1 kB``, ``-20 B``: the difference of two numbers."""
    return f"{'-' if after < before else '+'}{text(abs(after - before))}"
