"""A possible result of ``shardc suggest``: a record with every field that a record can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardc.costs.records import MemoryEntry
from shardc.language.cluster import cluster
from shardc.language.machine import MachineEntry
from shardc.report.suggest.records import (
    Candidate,
    PipelineEntry,
    Suggested,
    SuggestionEntry,
    TimeParts,
    ZeroEntry,
)

GB = 10**9


def plan(step: float, peak: int, **changes: Any) -> SuggestionEntry:
    """A plan for 16 devices, with ZeRO."""
    found = SuggestionEntry(
        mesh={"dp": 2, "tp": 8}, zero=ZeroEntry("dp", 1), remat=None, precision=None, pipeline=None,
        links={"dp": "infiniband", "tp": "nvlink"}, annotations={"ids": "P('dp')", "*.up.weight": "P('tp')"},
        seconds=TimeParts(step, step * 0.8, step * 0.2, 0.0),
        memory=MemoryEntry(peak // 4, peak // 4, peak // 2, 0, 0, peak), excess=max(0, peak - 80 * GB),
        wire_bytes=GB, collectives=12, flops=10**15, reasons=("Mesh(dp=2, tp=8): on another mesh it takes longer",),
        python="mesh = shardc.Mesh(dp=2, tp=8)\nannotations = {\n    'ids': shardc.P('dp'),\n}\n",
    )  # fmt: skip
    return replace(found, **changes)


def found(**changes: Any) -> Suggested:
    """Two plans that fit in 80 GB, one of them with a pipeline, a plan that does not fit, and more candidates."""
    machine = cluster("nvlink,infiniband", "h100", 16, 2)
    piped = plan(
        2.0, 20 * GB, mesh={"pp": 2, "dp": 8}, zero=None, remat="Remat(blocks='h.*')",
        precision="Precision(compute=torch.bfloat16)", pipeline=PipelineEntry("pp", 8, "1f1b", "flops"),
        seconds=TimeParts(2.0, 1.5, 0.2, 0.3), wire={"gradients": "int8"},
        saved={"h.*": "dp", "h.0": "dp+host", "h.1": None, "head": "/scratch"}, overlap="auto",
    )  # fmt: skip
    in_steps = plan(0.5, 90 * GB, zero=ZeroEntry("dp+fsdp", 3, "fsdp", "optimizer"), mesh={"dp": 2, "fsdp": 8})
    hints = ("wire={'dp gradients': 'int8'}: in codes a step takes <b>500 ms</b>",)
    plans = (plan(1.0, 60 * GB, hints=hints), piped, in_steps)
    others = (Candidate("Mesh(tp=16)", 3.0, 70 * GB), Candidate("<script>alert(1)</script>", 4.0, 10 * GB))
    candidates = (*(Candidate(str(each.mesh), each.seconds.step, each.memory.peak) for each in plans), *others)
    entry = MachineEntry(machine.links, replace(machine.device, files=3e9), machine.node, machine.between)
    return replace(Suggested("GPT", 16, 80 * GB, entry, 0.4, 200, plans, candidates), **changes)
