"""What ``shardc check`` prints: each budget that is broken, with what breaks it, and each that holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardc.budget import Finding
from shardc.text import table
from shardc.traffic import shortened


def check_text(findings: Sequence[Finding]) -> str:
    """Broken budgets first, each with its collectives or ops; then those that hold; then how many there are."""
    broken = [finding for finding in findings if finding.is_broken]
    holding = [f"holds   {finding.budget.text}: {finding.text}\n" for finding in findings if not finding.is_broken]
    count = f"{len(broken) or 'none'} of {len(findings)} budget{'s' * (len(findings) != 1)} broken\n"
    return "\n".join(["\n".join(_broken(finding)) for finding in broken] + ["".join([*holding, count])])


def check_record(findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON form, version 1: of each budget, in order, what was found, and what breaks it as in a dump."""
    budgets = [
        {
            "budget": finding.budget.text,
            "is_broken": finding.is_broken,
            "found": finding.text,
            "collectives": list(finding.collectives),
            "fallbacks": list(finding.fallbacks),
            "notes": list(finding.lines),
        }
        for finding in findings
    ]
    return {"version": 1, "is_broken": any(finding.is_broken for finding in findings), "budgets": budgets}


def _broken(finding: Finding) -> Iterator[str]:
    yield f"broken  {finding.budget.text}: {finding.text}"
    if finding.collectives:
        yield _indented(_collectives(finding.collectives))
    if finding.fallbacks:
        rows = [(each["op"], each["type"], each["module"], each["source"]) for each in finding.fallbacks]
        yield _indented(table(("run whole, having no rule", "type", "module", "source"), rows))
    yield from (f"  {line}\n" for line in finding.lines)


def _collectives(found: Sequence[Any]) -> str:
    """The largest first."""
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
        for each in sorted(found, key=lambda each: -each["wire_bytes"] * each.get("times", 1))
    ]
    return table(header, rows)


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
