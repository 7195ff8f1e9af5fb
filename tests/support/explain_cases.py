"""Targets of the command line, compiled for the tests of explain."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from shardc import Mesh, Pipeline, Precision, Remat, Zero
from shardc.api import Compiled, compile
from shardc.cli.targets.target import TargetOptions, load_target

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = f"{EXAMPLES / 'gpt.py'}:gpt"
MESH = Mesh(dp=2, tp=2)


CASES: dict[str, tuple[str, Mesh, dict[str, Any], dict[str, Any]]] = {
    "gpt": (GPT, MESH, {}, {}),
    "sequence": (f"{GPT}_sequence", MESH, {}, {}),
    "fsdp": (f"{GPT}_fsdp", Mesh(dp=4), {}, {}),
    "tied, zero 3": (f"{GPT}_tied", MESH, {}, {"zero": Zero("dp", 3)}),
    "zero 1, bf16": (GPT, MESH, {}, {"zero": Zero("dp", 1), "precision": Precision()}),
    "zero 2, remat": (f"{GPT}_dropout", MESH, {}, {"zero": Zero("dp", 2), "remat": Remat("blocks.*")}),
    "moe": (f"{EXAMPLES / 'moe.py'}:moe", Mesh(dp=2, ep=2), {}, {}),
    "gpt2": ("hf:gpt2", MESH, {"n_layer": 2}, {}),
    "vit": ("hf:vit", MESH, {"num_hidden_layers": 2}, {}),
    "pipeline": (f"{GPT}_tied", Mesh(dp=2, pp=2), {}, {"pipeline": Pipeline("pp", microbatches=4)}),
    "pipeline, zero 3, bf16": (
        GPT, Mesh(dp=2, pp=2), {},
        {"pipeline": Pipeline("pp", microbatches=2), "zero": Zero("dp", 3), "precision": Precision()},
    ),
}  # fmt: skip


def compiled(target: str, mesh: Mesh, settings: dict[str, Any] | None = None, **options: Any) -> Compiled:
    """Compile a target of the command line."""
    found = load_target(
        target, TargetOptions(settings or {}, None, 64 if target.startswith("hf:") else None, "meta"), mesh
    )
    return compile(found.model, mesh, found.annotations, args=found.args, kwargs=found.kwargs, **options)


@cache
def case(name: str) -> Compiled:
    """A compiled case of ``CASES``, cached: tests that share it run in one worker, ``xdist_group("explain")``."""
    target, mesh, settings, options = CASES[name]
    return compiled(target, mesh, settings, **options)
