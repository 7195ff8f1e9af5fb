"""What the compiler chose among, where a collective stands: as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of several ways to do the same, and what a rank sends by it.

    ``question``: what is to be done; ``way``: how; ``note``: what else it costs.
    """

    question: str
    way: str
    wire_bytes: int
    is_chosen: bool
    note: str = ""


def alternatives_text(found: Sequence[Alternative]) -> str:
    """Under each question its ways, the chosen one first."""
    lines: list[str] = []
    for question in dict.fromkeys(each.question for each in found):
        asked = [each for each in found if each.question == question]
        width, digits = max(len(each.way) for each in asked), max(len(str(each.wire_bytes)) for each in asked)
        lines.append(f"ways {question}, and what a rank sends")
        for each in asked:
            remark = ", ".join(filter(None, ("chosen" * each.is_chosen, each.note)))
            line = f"  {each.way.ljust(width)}  {str(each.wire_bytes).rjust(digits)} B"
            lines.append(line + (f"  ({remark})" if remark else ""))
    return "".join(f"{line}\n" for line in lines)
