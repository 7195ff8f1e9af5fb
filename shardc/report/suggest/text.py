"""Suggested plans as text: a table of them, then the first one as Python, its reasons, and hints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from shardc.language.text import bytes_text, printable, seconds_text, table
from shardc.report.suggest.records import Suggested, SuggestionEntry, machine_text, mesh_text, options_text

WIDTH = 100
HEADER = ("rank", "mesh", "options", "step", "computing", "exposed", "bubble", "peak", "of memory", "sent")


def suggested_text(suggested: Suggested) -> str:
    """The text form of the suggestions."""
    plans = suggested.suggestions
    has_bubbles = any(each.seconds.bubble for each in plans)
    rows = [_row(number, each, suggested.memory, has_bubbles) for number, each in enumerate(plans, 1)]
    first = plans[0]
    python = textwrap.indent(printable(first.python, keep="\n"), "    ")
    facts, reasons, hints = map(_lines, (facts_of(suggested), first.reasons, first.hints or ()))
    further = f"\nfaster, with other numbers\n\n{hints}" if hints else ""
    return f"{table(HEADER, rows)}\n{facts}\nthe first in Python\n\n{python}\nwhy\n\n{reasons}{further}"


def _row(number: int, plan: SuggestionEntry, limit: int | None, has_bubbles: bool) -> tuple[object, ...]:
    of_limit = "" if limit is None else f"{plan.memory.peak / limit:.0%}"
    times = (plan.seconds.step, plan.seconds.computing, plan.seconds.exposed)
    bubble = seconds_text(plan.seconds.bubble) if has_bubbles else ""
    excess = f"{of_limit}, {bytes_text(plan.excess)} too much"
    return (
        number, mesh_text(plan), options_text(plan), *map(seconds_text, times), bubble, bytes_text(plan.memory.peak),
        excess if plan.excess else of_limit, bytes_text(plan.wire_bytes),
    )  # fmt: skip


def facts_of(suggested: Suggested) -> Iterator[str]:
    """Sentences about the answer: the machine, the lack of memory, and the best plan's distance from the bound."""
    first = suggested.suggestions[0]
    limit = "no limit of memory" if suggested.memory is None else f"{bytes_text(suggested.memory)} of memory a rank"
    yield f"On {machine_text(suggested)}, {limit}; {suggested.compiled} programs were compiled."
    if first.excess and suggested.memory is not None:
        yield f"No plan fits: the nearest needs {bytes_text(first.excess)} ({first.excess} bytes) more than a rank has."
    if suggested.bound:
        gap = first.seconds.step / suggested.bound - 1
        yield (
            f"No plan of the search can take less than {seconds_text(suggested.bound)}, all computing evenly on all "
            f"ranks; the first takes {gap:.1%} longer."
        )


def _lines(sentences: Iterable[str]) -> str:
    """Sentences on lines of their own, wrapped."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False)
    return "".join(f"{wrap.fill(printable(each))}\n" for each in sentences)
