"""Budgets of a plan, as a user types them after ``--fail-on``, measured against a dump."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardc.costs.records import MemoryEntry
from shardc.language.errors import UsageError, did_you_mean
from shardc.language.machine import SentKind
from shardc.language.mesh import axis_of
from shardc.language.text import bytes_text, folded, operations_text, over_calls, seconds_text, shortened, table
from shardc.program.provenance import Phase
from shardc.report.dump.records import CollectiveEntry, Dump, NodeEntry

SYNTAX = """\
A budget reads WHAT[@AXIS][/WHICH] > AMOUNT and is broken by more than that:
  all_gather>10MB      one all_gather in which a rank sends more; collectives>10MB: one collective of any kind
  all_gather@tp>4      more than 4 all_gathers over axis tp in a step; all_gather@tp: any
  wire/backward>1GB    all that a rank sends in backward; wire/all_gather>1GB: in all_gathers
  fallback, note       an op without a rule; a note of the compiler; fallback>2: more of them
  memory>8GB           the peak of one rank, with the optimizer's states; also parameters, gradients, saved, ...
  flops>1e12           floating-point operations of one rank in a step
  step>50ms            the predicted time of a step, on the machine of --links and --device
Units: B, kB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024. With >= the amount itself breaks it, too.
"""
KINDS: tuple[str, ...] = get_args(SentKind)
PHASES: tuple[str, ...] = get_args(Phase)
MEMORY = ("memory", "parameters", "gradients", "optimizer", "saved", "saved_below", "gathered", "peak")
LISTED = {"fallback": "fallbacks", "note": "notes"}
SUBJECTS = ("collectives", *KINDS, "wire", *LISTED, *MEMORY, "flops", "step")
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BUDGET = re.compile(r"\s*([^@/<>=\s]*)((?:\s*[@/][^@/<>=\s]*)*)\s*(?:([<>=]+)\s*(.*?)\s*)?")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a ``subject``. ``text`` is what the user typed; ``or_equal``: the limit itself breaks it, too.

    ``in_bytes``: the limit is in bytes. ``axis``, ``phases``, ``kinds``: the collectives it counts; empty for all.
    """

    text: str
    subject: str
    axis: str = ""
    phases: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    limit: float = 0
    or_equal: bool = False
    in_bytes: bool = False

    @staticmethod
    def parse(text: str) -> Budget:
        """Read a budget. Raises a UsageError for a text that is no budget."""
        parts = _BUDGET.fullmatch(text)
        if parts is None or not parts[1]:
            raise _error(text, repr(text), "it does not read as WHAT[@AXIS][/WHICH] > AMOUNT", "write all_gather>10MB")
        subject, filters, operator, amount = parts.groups()
        if subject not in SUBJECTS:
            remedy = did_you_mean(subject, SUBJECTS) or f"say one of {', '.join(SUBJECTS)}"
            raise _error(text, repr(subject), "there is no budget of this", remedy)
        limit, in_bytes = _limit(text, subject, operator, amount)
        signed = re.findall(r"([@/])([^@/\s]*)", filters)
        axes, which = ([name for sign, name in signed if sign == each] for each in "@/")
        _check_filters(text, subject, axes, which)
        phases = tuple(name for name in which if name in PHASES)
        kinds = tuple(name for name in (subject, *which) if name in KINDS)
        return Budget(text, subject, "".join(axes), phases, kinds, limit, operator == ">=", in_bytes)

    def is_broken(self, amount: float) -> bool:
        """Whether a measured amount breaks the budget."""
        return amount >= self.limit if self.or_equal else amount > self.limit

    def counts(self, collective: CollectiveEntry) -> bool:
        """Whether the budget limits a collective."""
        is_over_axis = not self.axis or self.axis in map(axis_of, collective.axes)
        return is_over_axis and collective.phase in (self.phases or PHASES) and collective.kind in (self.kinds or KINDS)


def _limit(text: str, subject: str, operator: str | None, amount: str | None) -> tuple[float, bool]:
    """The limit, and whether it is in bytes."""
    if operator is None:
        if subject not in ("collectives", *KINDS, *LISTED):
            example = {"flops": "1e12", "step": "50ms"}.get(subject, "8GB")
            raise _error(text, f"{subject} with no amount", "there is always some", f"write {subject}>{example}")
        return 0, False
    if operator not in (">", ">="):
        raise _error(text, repr(operator), "a budget is broken by more than an amount", "write > or >=")
    parts = _AMOUNT.fullmatch(amount or "")
    if parts is None:
        raise _error(text, repr(amount), "it is no amount", "write a number and a unit, as 10MB, or a number alone")
    number, unit = parts.groups()
    units: Mapping[str, float] = SECONDS if subject == "step" else UNITS
    if unit and unit.lower() not in map(str.lower, units):
        problem = f"it is no unit of {'time' if subject == 'step' else 'bytes'}"
        raise _error(text, repr(unit), problem, did_you_mean(unit, units) or f"say one of {', '.join(units)}")
    if unit and subject in (*LISTED, "flops"):
        raise _error(text, f"{subject} in {unit}", "it is counted, and has no bytes", f"write {subject}>{number}")
    in_bytes = subject != "step" and (bool(unit) or subject == "wire" or subject in MEMORY)
    factors = {name.lower(): factor for name, factor in units.items()}  # no user means bits
    return float(number) * factors.get(unit.lower(), 1), in_bytes


def _check_filters(text: str, subject: str, axes: Sequence[str], which: Sequence[str]) -> None:
    if (axes or which) and subject not in ("collectives", *KINDS, "wire"):
        problem, remedy = "only collectives have an axis, a phase or a kind", f"write {subject} alone"
        raise _error(text, f"{subject} with {(*axes, *which)[0]!r}", problem, remedy)
    if len(axes) > 1:
        raise _error(text, "@" + "@".join(axes), "a budget is of one axis", "write a budget for each")
    known = (*PHASES, *KINDS)
    for name in which:
        if name not in known:
            remedy = did_you_mean(name, known) or f"say one of {', '.join(known)}"
            raise _error(text, repr(name), "it is no phase and no kind of collective", remedy)


def _error(text: str, what: str, problem: str, remedy: str) -> UsageError:
    return UsageError(f"budget {text!r}", what, problem, remedy)


# Measures.


@dataclass(frozen=True, slots=True)
class Finding:
    """A budget, and what was found.

    ``budget``: as it was typed. ``found``: what the plan has of it, in words. ``collectives``: those that break it.
    ``fallbacks``: the ops without a rule that break it. ``notes``: the remarks of the compiler that break it.
    """

    budget: str
    is_broken: bool
    found: str
    collectives: tuple[CollectiveEntry, ...] = ()
    fallbacks: tuple[NodeEntry, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Budgets held against a plan.

    ``is_broken``: whether any of them is: the exit code is then 1. ``budgets``: in the order in which they were given.
    """

    version: Literal[1] = field(default=1, init=False)
    is_broken: bool
    budgets: tuple[Finding, ...]


def check(budgets: Iterable[Budget], dump: Dump) -> Check:
    """Check a dump against budgets. Raises a UsageError if the dump lacks the table that a budget measures."""
    findings = tuple(measure(budget, dump) for budget in budgets)
    return Check(any(finding.is_broken for finding in findings), findings)


def measure(budget: Budget, dump: Dump) -> Finding:
    """Measure a budget in a dump. Raises a UsageError if the dump lacks the table that the budget measures."""
    if budget.axis and budget.axis not in dump.mesh:
        axes = ", ".join(f"{name}={size}" for name, size in dump.mesh.items())
        remedy = did_you_mean(budget.axis, dump.mesh) or f"say one of {', '.join(dump.mesh)}"
        raise _error(budget.text, f"mesh {axes}", f"it has no axis {budget.axis!r}", remedy)
    if budget.subject in LISTED:
        name = LISTED[budget.subject]
        entries = _table(budget, dump, name)
        is_broken, text = budget.is_broken(len(entries)), f"{len(entries) or 'none'} of them"
        return Finding(budget.text, is_broken, text, **({name: entries} if is_broken else {}))
    if budget.subject in (*MEMORY, "step", "flops"):
        amount, text = _amount(budget, dump)
        return Finding(budget.text, budget.is_broken(amount), text)
    if dump.level not in ("lowered", "localized"):
        what = f"a program that is {dump.level}"
        raise _error(budget.text, what, "it has no collectives yet", "dump it without --after")
    return _of_collectives(budget, _table(budget, dump, "collectives"))


def _table(budget: Budget, dump: Dump, name: str) -> Any:
    found = getattr(dump, name)
    if found is not None:
        return found
    if name == "time" and dump.only is None:
        what, remedy = "a plan for no machine", "compile it with --links, as --links nvlink, and --device"
        raise _error(budget.text, what, "its time is not predicted", remedy)
    what = f"a dump of --only {dump.only or ''}"
    raise _error(budget.text, what, f"it has no {name}", f"dump the whole program, or --only {name}")


def _amount(budget: Budget, dump: Dump) -> tuple[float, str]:
    """The measure of memory, time or operations of one rank, and its text."""
    if budget.subject == "step":
        seconds = _table(budget, dump, "time").step
        return seconds, f"{seconds_text(seconds)} predicted"
    if budget.subject == "flops":
        count = _table(budget, dump, "flops").per_rank
        return count, f"{operations_text(count)} of one rank"
    memory: MemoryEntry = _table(budget, dump, "memory")
    if budget.subject not in ("memory", "peak"):
        nbytes = getattr(memory, budget.subject) or 0
        return nbytes, f"{bytes_text(nbytes)} of one rank"
    return (
        memory.peak,
        f"{bytes_text(memory.peak)} of one rank at the peak, with {bytes_text(memory.optimizer)} of the optimizer",
    )


def _of_collectives(budget: Budget, collectives: Sequence[CollectiveEntry]) -> Finding:
    counted = tuple(each for each in collectives if budget.counts(each))
    if budget.in_bytes and budget.subject != "wire":  # a limit for each collective
        most = max((each.wire_bytes for each in counted), default=0)
        broken = tuple(each for each in counted if budget.is_broken(each.wire_bytes))
        text = f"{len(broken)} of {len(counted)}, the largest sends {bytes_text(most)}" if counted else "none of them"
        return Finding(budget.text, bool(broken), text, broken)
    count = sum(each.times or 1 for each in counted)
    sent = sum(map(_sent, counted))
    is_broken = budget.is_broken(sent if budget.in_bytes else count)
    text = (
        f"one rank sends {bytes_text(sent)} in {count}" if budget.in_bytes else f"{count or 'none'} of them in a step"
    )
    return Finding(budget.text, is_broken, text, counted if is_broken else ())


def _sent(collective: CollectiveEntry) -> int:
    """Bytes that a rank sends in a step."""
    return collective.wire_bytes * (collective.times or 1)


# Text.


def check_text(findings: Sequence[Finding]) -> str:
    """The text form: broken budgets with their collectives or ops, then those that hold, then a count."""
    broken = []
    for finding in (finding for finding in findings if finding.is_broken):
        collectives = (
            (
                each.id, "+".join(each.axes), each.phase, "" if each.stage is None else each.stage, each.times or "",
                bytes_text(each.wire_bytes), shortened(each.source, ", "), shortened(each.cause, "; "),
            )
            for each in sorted(finding.collectives, key=_sent, reverse=True)
        )  # fmt: skip
        header = ("collective", "axes", "phase", "stage", "times", "wire bytes", "source", "cause")
        ops = ((each.op, each.type, each.module, each.source) for each in finding.fallbacks)
        tables = [
            table(header, folded(collectives, alike=over_calls)),
            table(("run whole, having no rule", "type", "module", "source"), folded(ops, alike=over_calls)),
            *(f"{note}\n" for note in finding.notes),
        ]
        lines = [f"broken  {finding.budget}: {finding.found}", *map(_indented, filter(None, tables))]
        broken.append("\n".join(lines))
    holding = [f"holds   {finding.budget}: {finding.found}\n" for finding in findings if not finding.is_broken]
    count = f"{len(broken) or 'none'} of {len(findings)} budget{'s' * (len(findings) != 1)} broken\n"
    return "\n".join([*broken, "".join([*holding, count])])


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
