"""Suggested plans as text: a table of them, then the first one as Python, and why it is as it is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from shardc.language.text import bytes_text, printable, seconds_text, table
from shardc.report.suggest.records import Suggested, SuggestionEntry, machine_text, mesh_text, options_text

WIDTH = 100
HEADER = ("rank", "mesh", "options", "step", "computing", "exposed", "bubble", "peak", "of memory", "sent")


def suggested_text(suggested: Suggested) -> str:
    """The text form of what was found."""
    rows = [_row(number, each, suggested.memory) for number, each in enumerate(suggested.suggestions, 1)]
    first = suggested.suggestions[0]
    python = textwrap.indent(printable(first.python, keep="\n"), "    ")
    reasons = "".join(f"{_wrapped(printable(reason))}\n" for reason in first.reasons)
    facts = "".join(f"{_wrapped(each)}\n" for each in facts_of(suggested))
    return f"{table(HEADER, rows)}\n{facts}\nthe first in Python\n\n{python}\nwhy\n\n{reasons}"


def _row(number: int, plan: SuggestionEntry, limit: int | None) -> tuple[object, ...]:
    of_limit = "" if limit is None else f"{plan.memory.peak / limit:.0%}"
    times = (plan.seconds.step, plan.seconds.computing, plan.seconds.exposed, plan.seconds.bubble)
    excess = f"{of_limit}, {bytes_text(plan.excess)} too much"
    return (
        number, mesh_text(plan), options_text(plan), *map(seconds_text, times), bytes_text(plan.memory.peak),
        excess if plan.excess else of_limit, bytes_text(plan.wire_bytes),
    )  # fmt: skip


def facts_of(suggested: Suggested) -> Iterator[str]:
    """Sentences about the answer: the machine, what does not fit, and how far the best plan may be from the optimum."""
    first = suggested.suggestions[0]
    limit = "no limit of memory" if suggested.memory is None else f"{bytes_text(suggested.memory)} of memory a rank"
    yield f"On {machine_text(suggested)}, {limit}; {suggested.compiled} programs were compiled."
    if first.excess and suggested.memory is not None:
        yield f"No plan fits: the nearest needs {bytes_text(first.excess)} ({first.excess} bytes) more than a rank has."
    if suggested.bound and not first.excess:
        gap = first.seconds.step / suggested.bound - 1
        yield f"No plan of the search takes less than {seconds_text(suggested.bound)}: the first is within {gap:.1%}."


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False))
