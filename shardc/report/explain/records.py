"""What ``explain`` says of a collective beside its explanation, and what the command writes. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardc.language.record import Count
from shardc.language.text import bytes_text, printable
from shardc.report.explain.explanation import Explanation

Aim = Literal["to remove it", "to send less between stages"]
REMOVE: Aim = "to remove it"
SHRINK: Aim = "to send less between stages"
WHICH = {REMOVE: "that removes it", SHRINK: "that lets less cross"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of several ways to do the same.

    ``question``: what is to be done. ``wire_bytes``: of one rank. ``note``: what else it costs.
    """

    question: str
    way: str
    wire_bytes: Count
    is_chosen: bool
    note: str = ""


def alternatives_text(alternatives: Sequence[Alternative]) -> str:
    """The text form: under each question its ways, the chosen one first."""
    lines: list[str] = []
    for question in dict.fromkeys(each.question for each in alternatives):
        ways = [each for each in alternatives if each.question == question]
        sent = [bytes_text(each.wire_bytes) for each in ways]
        width, digits = max(len(each.way) for each in ways), max(map(len, sent))
        lines.append(f"ways {question}, and what a rank sends")
        for each, nbytes in zip(ways, sent, strict=True):
            note = ", ".join(filter(None, ("chosen" * each.is_chosen, each.note)))
            line = f"  {each.way.ljust(width)}  {nbytes.rjust(digits)}"
            lines.append(line + (f"  ({note})" if note else ""))
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step costs one rank. ``crossing``: bytes that cross between stages."""

    wire_bytes: Count
    peak: Count
    optimizer: Count
    flops: Count
    num_collectives: Count
    crossing: Count = 0

    def is_free_after(self, before: Figures) -> bool:
        """Whether less is sent, and neither peak memory, with and without the optimizer, nor operations grow."""
        is_no_larger = self.peak <= before.peak and self.peak - self.optimizer <= before.peak - before.optimizer
        return self.wire_bytes < before.wire_bytes and is_no_larger and self.flops <= before.flops

    def excess(self, before: Figures) -> float:
        """The sum of the relative growth of bytes sent, memory and operations."""
        pairs = [(self.wire_bytes, before.wire_bytes), (self.peak, before.peak), (self.flops, before.flops)]
        return sum(max(0, now - then) / max(1, then) for now, then in pairs)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that removes a collective, and what a step costs a rank before and after.

    ``change``: in words. ``is_free``: whether less is sent, and nothing else grows. ``python``: as one types it.
    ``flags``: as one adds it to the command line. ``all_flags``: as one types it where --annotate stands in place of
    the target's own annotations. ``instead``: the kinds of collectives that then move the same values.
    """

    change: str
    before: Figures
    after: Figures
    is_free: bool
    python: str
    flags: str
    all_flags: str
    instead: tuple[str, ...] = ()

    @property
    def excess(self) -> tuple[float, int]:
        """What it costs: how much grows, then the bytes that are sent. A free change comes before all others."""
        return 0.0 if self.is_free else self.after.excess(self.before), self.after.wire_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """What would remove a collective, or let less cross between stages.

    ``tried``: how many changes were compiled. ``why``: what it is there for, in any plan like this one.
    ``suggestion``: null where no change was found. ``blocks``: the repeated blocks of the model that stood for all of
    them where changes were tried; empty for the whole model.
    """

    name: str
    tried: Count
    why: str
    suggestion: Suggestion | None
    aim: Aim = REMOVE
    blocks: str = ""

    def text(self, replaces: bool = False) -> str:
        """The text form; ``replaces``: ``--annotate`` replaces the target's annotations."""
        return "\n".join(map(printable, self._lines(replaces))) + "\n"

    def _lines(self, replaces: bool) -> Iterator[str]:
        s, changes = self.suggestion, f"{self.tried} change{'s' * (self.tried != 1)}"
        tried_on = f" tried on {self.blocks}" if self.blocks else ""
        if s is None:
            yield f"nothing was found {WHICH[self.aim]}: none of {changes} does"
            yield f"  {self.why}"
            return
        if s.is_free:
            yield f"{self.aim}: {s.change}"
        else:
            yield f"every change {WHICH[self.aim]} costs something; of {changes}{tried_on} this costs least:"
            yield f"  {s.change}"
        if s.before.crossing:
            yield f"  between stages go {_change_text(s.before.crossing, s.after.crossing)} a step"
        if s.instead:
            yield f"  what it moves then goes by {' and '.join(s.instead)}"
        yield f"  a rank then sends {_change_text(s.before.wire_bytes, s.after.wire_bytes)} a step"
        yield f"  its peak memory with the optimizer is {_change_text(s.before.peak, s.after.peak)}"
        if s.after.optimizer != s.before.optimizer:
            yield f"  of that the optimizer's states are {_change_text(s.before.optimizer, s.after.optimizer)}"
        if s.after.flops != s.before.flops:
            yield f"  it computes {s.after.flops / max(1, s.before.flops):.2f} times as much"
        yield f"  in Python        {s.python}"
        yield f"  on command line  {s.all_flags if replaces else s.flags}"
        yield f"  {changes}{tried_on or ' compiled'} to find it" if s.is_free else f"  why: {self.why}"


def _change_text(before: int, after: int) -> str:
    if before == after:
        return f"{bytes_text(before)} as before"
    return f"{bytes_text(after)}, {bytes_text(abs(after - before))} {'more' if after > before else 'less'}"


# What the command writes.


@dataclass(frozen=True)
class Versioned:
    """The version of a form."""

    version: Literal[1] = field(default=1, init=False)


@dataclass(frozen=True)
class Explained(Explanation, Versioned):
    """Why something of a program is as it is."""


@dataclass(frozen=True, kw_only=True)
class ExplainedCollective(Explained):
    """Why a collective is there.

    ``alternatives``: what the compiler chose among. ``advice``: null where none was asked for.
    """

    alternatives: tuple[Alternative, ...]
    advice: Advice | None
