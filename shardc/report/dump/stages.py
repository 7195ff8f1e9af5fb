"""``shardc stages``: what each stage holds, computes and receives, and how uneven stages are, as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from shardc.costs.choose_stages import ChosenStages
from shardc.language.text import json_text, table
from shardc.options import BALANCES

HEADER = ("stage", "first module", "last module", "parameters", "FLOPs", "time", "activations", "memory", "received")


def stages_text(stages: ChosenStages, format: str = "text") -> str:
    """The stages as ``text`` or ``json``."""
    record = stages_record(stages)
    if format == "json":
        return json_text(record)
    rows = ((each["name"], each["parameters"], ", ".join(map(str, each["stages"]))) for each in record["shared"])
    shared = table(("shared parameter", "parameters", "stages"), rows)
    return "\n".join(filter(None, [_stage_table(record), _crossing_table(record), shared]))


def stages_record(stages: ChosenStages) -> dict[str, Any]:
    """The JSON form, version 1.

    Parameters are counted once, at the first stage that reads them. FLOPs and time are of forward and backward on the
    given inputs, time as a fraction of all. ``activation_bytes`` are saved for backward; ``memory_bytes`` are
    parameters, gradients, Adam's states, and the activations of the microbatches in flight under 1F1B. ``balance``: the
    largest part over the mean. ``bound``: 1 if no split is better, else the fraction of the heaviest stage below which
    no split is known to be.
    """
    entries = [_entry(stages, stage) for stage in range(len(stages.masks))]
    keys = {"params": "parameters", "flops": "flops", "time": "time", "memory": "memory_bytes"}
    balance = {}
    for name in BALANCES:
        parts = [entry[keys[name]] for entry in entries]
        balance[name] = round(max(parts) * len(parts) / sum(parts), 4) if sum(parts) else 1.0
    names_of_stages = [stages.loads.parameters_of(mask) for mask in stages.masks]
    shared = [
        {"name": name, "parameters": stages.loads.elements(name), "stages": readers}
        for name in stages.loads.parameters
        if len(readers := [stage for stage, names in enumerate(names_of_stages) if name in names]) > 1
    ]
    return {
        "version": 1,
        "by": stages.options.balance,
        "balance": balance,
        "bound": round(stages.bound / stages.heaviest, 4) if stages.heaviest else 1.0,
        "stages": entries,
        "shared": shared,
    }


def _entry(stages: ChosenStages, stage: int) -> dict[str, Any]:
    loads, mask = stages.loads, stages.masks[stage]
    all_time = sum(loads.unit_weights("time")) or 1
    # units that follow each other, grouped
    runs = [
        [unit for _, unit in run] for _, run in groupby(enumerate(stages.units(stage)), lambda pair: pair[1] - pair[0])
    ]
    return {
        "stage": stage,
        "modules": [[loads.units[run[0]].first, loads.units[run[-1]].last] for run in runs],
        "parameters": loads.weight("params", mask),
        "flops": loads.weight("flops", mask),
        "time": round(loads.weight("time", mask) / all_time, 4),
        "activation_bytes": loads.saved_bytes(mask),
        "memory_bytes": loads.memory(mask, len(stages.masks) - stage),
        "received_bytes": loads.received_bytes(mask),
        "received": [
            {"value": c.name, "type": c.type, "from": stages.stage_of(c.maker), "bytes": c.nbytes}
            for c in loads.received(mask)
        ],
    }


# Text.


def _stage_table(record: Mapping[str, Any]) -> str:
    rows = [
        (
            entry["stage"],
            ", ".join(first or "(model)" for first, _ in entry["modules"]),
            ", ".join(last or "(model)" for _, last in entry["modules"]),
            entry["parameters"], entry["flops"], f"{entry['time']:.1%}", entry["activation_bytes"],
            entry["memory_bytes"], entry["received_bytes"],
        )
        for entry in record["stages"]
    ]  # fmt: skip
    uneven = ", ".join(f"{value:.2f} in {name}" for name, value in record["balance"].items())
    better = f"a heaviest stage below {record['bound']:.1%} of this one is ruled out\n" if record["bound"] < 1 else ""
    return f"{len(rows)} stages, even in {record['by']}\n{table(HEADER, rows)}max/mean: {uneven}\n{better}"


def _crossing_table(record: Mapping[str, Any]) -> str:
    rows = (
        (entry["stage"], each["from"], each["value"], each["type"], each["bytes"])
        for entry in record["stages"]
        for each in entry["received"]
    )
    return table(("to stage", "from", "value", "type", "bytes"), rows) or "no value crosses a cut\n"
