"""Budgets of a plan, as a user types them after ``--fail-on``, measured against the JSON form of a dump.

A budget reads WHAT[@AXIS][/WHICH]... [> AMOUNT]. It is broken where there is more than the amount:

- ``all_gather>10MB``: one all_gather in which a rank sends more; so for every kind, and ``collectives`` for any kind
- ``all_gather>4``: more of them in a step; ``all_gather``: any at all
- ``wire>1GB``: all bytes that one rank sends in a step
- ``@tp`` counts collectives over this axis, ``/backward`` those of a phase, ``/all_gather`` those of a kind
- ``fallback``: an op without a rule; ``note``: a note of the compiler; ``fallback>2``: more of them
- ``peak>8GB``, or another class of memory; ``memory>8GB``: the peak and the optimizer's state
- ``flops>1e12``: floating-point operations of one rank; ``step>50ms``: its predicted time, where the machine is known
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from shardc.language.collective_kind import LOCAL_KINDS, CollectiveKind
from shardc.language.errors import UsageError, did_you_mean
from shardc.language.mesh import axis_of
from shardc.language.text import shortened, table

KINDS = tuple(kind for kind in get_args(CollectiveKind) if kind not in (*LOCAL_KINDS, "rechunk"))
PHASES = ("forward", "backward", "update")
MEMORY = ("memory", "parameters", "gradients", "optimizer", "saved", "gathered", "peak")
LISTED = {"fallback": "fallbacks", "note": "notes"}
SUBJECTS = ("collectives", *KINDS, "wire", *LISTED, *MEMORY, "flops", "step")
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
BYTES = {unit.lower(): count for unit, count in UNITS.items()}  # no user means bits
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BUDGET = re.compile(r"\s*([^@/<>=\s]*)((?:\s*[@/][^@/<>=\s]*)*)\s*(?:([<>=]+)\s*(.*?)\s*)?")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a ``subject``. ``text`` is what the user typed; ``or_equal``: the limit itself breaks it, too.

    ``in_bytes``: the limit is one of bytes. ``axis``, ``phases``, ``kinds``: the collectives it counts; empty for all.
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
        """Read a budget. Raises a UsageError where the text is none."""
        found = _BUDGET.fullmatch(text)
        if found is None or not found[1]:
            raise _error(text, repr(text), "it does not read as WHAT[@AXIS][/WHICH] > AMOUNT", "write all_gather>10MB")
        subject, filters, operator, amount = found.groups()
        if subject not in SUBJECTS:
            remedy = did_you_mean(subject, SUBJECTS) or f"say one of {', '.join(SUBJECTS)}"
            raise _error(text, repr(subject), "there is no budget of this", remedy)
        limit, in_bytes = _amount(text, subject, operator, amount)
        kinds, more = ((subject,) if subject in KINDS else ()), re.findall(r"([@/])([^@/\s]*)", filters)
        axes, which = ([name for sign, name in more if sign == each] for each in "@/")
        _check_filters(text, subject, axes, which)
        phases = tuple(name for name in which if name in PHASES)
        kinds = (*kinds, *(name for name in which if name in KINDS))
        return Budget(text, subject, "".join(axes), phases, kinds, limit, operator == ">=", in_bytes)

    def is_broken(self, amount: float) -> bool:
        """Whether a measure breaks it."""
        return amount >= self.limit if self.or_equal else amount > self.limit

    @property
    def is_of_each(self) -> bool:
        """Whether it bounds the bytes of single collectives."""
        return self.in_bytes and self.subject in ("collectives", *KINDS)


def _amount(text: str, subject: str, operator: str | None, amount: str | None) -> tuple[float, bool]:
    """The limit, and whether it is in bytes."""
    if operator is None:
        if subject not in ("collectives", *KINDS, *LISTED):
            amount = {"flops": "1e12", "step": "50ms"}.get(subject, "8GB")
            raise _error(text, f"{subject} with no amount", "there is always some", f"write {subject}>{amount}")
        return 0, False
    if operator not in (">", ">="):
        raise _error(text, repr(operator), "a budget is broken by more than an amount", "write > or >=")
    found = _AMOUNT.fullmatch(amount or "")
    if found is None:
        raise _error(text, repr(amount), "it is no amount", "write a number and a unit, as 10MB, or a number alone")
    number, unit = found.groups()
    known: Mapping[str, float] = SECONDS if subject == "step" else UNITS
    if unit and unit.lower() not in map(str.lower, known):
        problem = f"it is no unit of {'time' if subject == 'step' else 'bytes'}"
        raise _error(text, repr(unit), problem, did_you_mean(unit, known) or f"say one of {', '.join(known)}")
    if subject == "step":
        return float(number) * SECONDS.get(unit.lower(), 1), False
    if unit and subject in (*LISTED, "flops"):
        raise _error(text, f"{subject} in {unit}", "it is counted, and has no bytes", f"write {subject}>{number}")
    return float(number) * BYTES.get(unit.lower(), 1), bool(unit) or subject == "wire" or subject in MEMORY


def _check_filters(text: str, subject: str, axes: Sequence[str], which: Sequence[str]) -> None:
    if (axes or which) and subject not in ("collectives", *KINDS, "wire"):
        problem, remedy = "only collectives have an axis, a phase or a kind", f"write {subject} alone"
        raise _error(text, f"{subject} with {(*axes, *which)[0]!r}", problem, remedy)
    if len(axes) > 1:
        raise _error(text, "@" + "@".join(axes), "a budget is of one axis", "write a budget for each")
    for name in which:
        if name not in (*PHASES, *KINDS):
            known = (*PHASES, *KINDS)
            remedy = did_you_mean(name, known) or f"say one of {', '.join(known)}"
            raise _error(text, repr(name), "it is no phase and no kind of collective", remedy)


def _error(text: str, what: str, problem: str, remedy: str) -> UsageError:
    return UsageError(f"budget {text!r}", what, problem, remedy)


# Measures.


@dataclass(frozen=True, slots=True)
class Finding:
    """The measure of a dump that a budget limits, as a text, and the collectives, ops or notes that break it."""

    budget: Budget
    is_broken: bool
    text: str
    collectives: tuple[Mapping[str, Any], ...] = ()
    fallbacks: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def measure(budget: Budget, record: Mapping[str, Any]) -> Finding:
    """Measure the JSON form of a program. Raises a UsageError where it lacks the table that the budget is about."""
    _check_axis(budget, record)
    if budget.subject in LISTED:
        return _of_entries(budget, _table(budget, record, LISTED[budget.subject]))
    if budget.subject in MEMORY:
        return _of_memory(budget, _table(budget, record, "memory"))
    if budget.subject == "step":
        seconds = _table(budget, record, "time")["step"]
        return Finding(budget, budget.is_broken(seconds), f"{1e3 * seconds:.3f} ms predicted")
    if budget.subject == "flops":
        count = _table(budget, record, "flops")["per_rank"]
        return Finding(budget, budget.is_broken(count), f"{count:,} floating-point operations of one rank")
    if record["level"] not in ("lowered", "localized"):
        what = f"a program that is {record['level']}"
        raise _error(budget.text, what, "it has no collectives yet", "dump it without --after")
    return _of_collectives(budget, _table(budget, record, "collectives"))


def _table(budget: Budget, record: Mapping[str, Any], name: str) -> Any:
    if name in record:
        return record[name]
    if name == "time" and "only" not in record:
        what, remedy = "a plan for no machine", "compile it with --links, as --links nvlink, and --device"
        raise _error(budget.text, what, "its time is not predicted", remedy)
    what = f"a dump of --only {record.get('only', '')}"
    raise _error(budget.text, what, f"it has no {name}", f"dump the whole program, or --only {name}")


def _check_axis(budget: Budget, record: Mapping[str, Any]) -> None:
    mesh = record["mesh"]
    if budget.axis and budget.axis not in mesh:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.items())
        remedy = did_you_mean(budget.axis, mesh) or f"say one of {', '.join(mesh)}"
        raise _error(budget.text, f"mesh {axes}", f"it has no axis {budget.axis!r}", remedy)


def _of_entries(budget: Budget, entries: Sequence[Any]) -> Finding:
    is_broken = budget.is_broken(len(entries))
    ops = tuple(entries) if is_broken and budget.subject == "fallback" else ()
    notes = tuple(entries) if is_broken and budget.subject == "note" else ()
    return Finding(budget, is_broken, f"{len(entries) or 'none'} of them", fallbacks=ops, notes=notes)


def _of_memory(budget: Budget, memory: Mapping[str, int]) -> Finding:
    if budget.subject != "memory":
        return Finding(
            budget, budget.is_broken(memory[budget.subject]), f"{memory[budget.subject]:,} bytes of one rank"
        )
    count = memory["peak"] + memory["optimizer"]
    text = f"{count:,} bytes of one rank: {memory['peak']:,} at the peak, {memory['optimizer']:,} of the optimizer"
    return Finding(budget, budget.is_broken(count), text)


def _of_collectives(budget: Budget, collectives: Sequence[Mapping[str, Any]]) -> Finding:
    ours = [found for found in collectives if _is_of(budget, found)]
    if budget.is_of_each:
        most = max((found["wire_bytes"] for found in ours), default=0)
        broken = tuple(found for found in ours if budget.is_broken(found["wire_bytes"]))
        text = f"{len(broken)} of {len(ours)}, the largest sends {most:,} bytes" if ours else "none of them"
        return Finding(budget, bool(broken), text, broken)
    count = sum(found.get("times", 1) for found in ours)
    sent = sum(found["wire_bytes"] * found.get("times", 1) for found in ours)
    is_broken = budget.is_broken(sent if budget.in_bytes else count)
    text = f"one rank sends {sent:,} bytes in {count}" if budget.in_bytes else f"{count or 'none'} of them in a step"
    return Finding(budget, is_broken, text, tuple(ours) if is_broken else ())


def _is_of(budget: Budget, found: Mapping[str, Any]) -> bool:
    axes = map(axis_of, found["axes"])
    is_there = not budget.axis or budget.axis in axes
    return is_there and found["phase"] in (budget.phases or PHASES) and found["kind"] in (budget.kinds or KINDS)


def check_text(findings: Sequence[Finding]) -> str:
    """The text form: broken budgets with their collectives or ops, then those that hold, then a count."""
    broken = [finding for finding in findings if finding.is_broken]
    holding = [f"holds   {finding.budget.text}: {finding.text}\n" for finding in findings if not finding.is_broken]
    count = f"{len(broken) or 'none'} of {len(findings)} budget{'s' * (len(findings) != 1)} broken\n"
    return "\n".join(["\n".join(_broken(finding)) for finding in broken] + ["".join([*holding, count])])


def check_record(findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON form, version 1: for each budget its measure, and the entries of the dump that break it."""
    budgets = [
        {
            "budget": finding.budget.text,
            "is_broken": finding.is_broken,
            "found": finding.text,
            "collectives": list(finding.collectives),
            "fallbacks": list(finding.fallbacks),
            "notes": list(finding.notes),
        }
        for finding in findings
    ]
    return {"version": 1, "is_broken": any(finding.is_broken for finding in findings), "budgets": budgets}


def _broken(finding: Finding) -> Iterator[str]:
    yield f"broken  {finding.budget.text}: {finding.text}"
    if finding.collectives:
        yield _indented(_collective_table(finding.collectives))
    if finding.fallbacks:
        rows = [(each["op"], each["type"], each["module"], each["source"]) for each in finding.fallbacks]
        yield _indented(table(("run whole, having no rule", "type", "module", "source"), rows))
    yield from (f"  {line}\n" for line in finding.notes)


def _collective_table(collectives: Sequence[Any]) -> str:
    """The collectives, those first that send most."""
    header = ("collective", "axes", "phase", "stage", "times", "wire bytes", "source", "cause")
    rows = [
        (
            each["id"],
            "+".join(each["axes"]),
            each["phase"],
            each.get("stage", ""),
            each.get("times", ""),
            each["wire_bytes"],
            shortened(each["source"], ", "),
            shortened(each["cause"], "; "),
        )
        for each in sorted(collectives, key=lambda each: -each["wire_bytes"] * each.get("times", 1))
    ]
    return table(header, rows)


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
