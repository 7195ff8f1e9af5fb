"""offload: parameters are in the tier below, numbers are the same to the bit, and the device holds what it says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import DATA, Config
from measuring import measured, measured_by_rank, without_optimizer
from rehearsal import rehearse
from small_gpt import annotations_on, drawn_gpt
from torch import Tensor, nn

import shardc
from shardc import Compiled, Mesh, Pipeline, Precision, Remat, Zero
from shardc.costs.memory import memory_by_rank
from shardc.costs.step import StepRecord
from shardc.language.machine import Machine
from shardc.ops.tier import fetch
from shardc.options.zero import OFFLOADED
from shardc.program.program import Program, parameters_of

SIZE = Config(layers=3, vocab=96, context=32, width=32, heads=4)
ODD = Config(layers=2, vocab=51, context=15, width=20, heads=4, dropout=0.1)
H100 = Machine({"dp": "nvlink"}, "h100")  # type: ignore[dict-item, arg-type]
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (Mesh(dp=1), {}),
    "two ranks": (Mesh(dp=2), {}),
    "with tensor parallelism": (Mesh(dp=2, tp=2), {}),
    "gathered over fast axes": (Mesh(dp=2, node=2), {"zero": {"gather_over": "node"}}),
    "in bfloat16": (Mesh(dp=2), {"precision": Precision()}),
    "one rank in bfloat16": (Mesh(dp=1), {"precision": Precision()}),
    "recomputed on one rank": (Mesh(dp=1), {"remat": Remat("blocks.*"), "precision": Precision()}),
    "within a budget": (Mesh(dp=2), {"remat": Remat(budget=150_000)}),
    "each alone": (Mesh(dp=2), {"bucket": 1}),
    "in codes": (Mesh(dp=2), {"wire": {"parameters": "int8"}}),
    "1f1b": (Mesh(pp=2, dp=2), {"pipeline": Pipeline("pp", 4)}),
    "zb-v": (Mesh(pp=2, dp=1), {"pipeline": Pipeline("pp", 4, schedule="zb-v", balance="flops")}),
}


def target(size: Config = SIZE, batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return drawn_gpt(size, batch)


def compile_gpt(
    mesh: Mesh, size: Config = SIZE, zero: dict[str, Any] | None = None, **options: Any
) -> tuple[Compiled, tuple[Tensor, ...]]:
    model, args = target(size)
    options["zero"] = Zero("dp", **(zero or {}))
    return shardc.compile(model, mesh, annotations_on(mesh), args=args, **options), args


def below(folder: Path, what: str, stage: int = 3) -> dict[str, Any]:
    return {"stage": stage, "offload": what, "to": folder}


@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_are_the_same_and_what_is_alive_is_predicted(name: str, tmp_path: Path) -> None:
    """At even sizes, or at odd ones with dropout."""
    mesh, options = PLANS[name]
    options, size = dict(options), (SIZE, ODD)[len(name) % 2]
    zero = options.pop("zero", {})
    without, args = compile_gpt(mesh, size, zero, **options)
    loss, gradients = without.simulate(*args)
    for what in OFFLOADED:
        compiled, _ = compile_gpt(mesh, size, {**zero, **below(tmp_path, what)}, **options)
        found, of_found = compiled.simulate(*args)
        assert torch.equal(found, loss) and of_found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert torch.equal(of_found[key], gradient), (what, key)
        assert sent(compiled) == sent(without)
        program = compiled.program
        is_cast_there = "precision" in options and what == "parameters"
        assert {user.target is fetch for user in readers_of(program)} == {not is_cast_there}
        if program.options.pipeline:
            alive = measured_by_rank(compiled, *args)
            assert alive == [without_optimizer(each, is_offloaded=True) for each in memory_by_rank(program)]
        else:
            assert measured(compiled, *args) == without_optimizer(compiled.memory, is_offloaded=True)


def sent(compiled: Compiled) -> Counter[tuple[str, str]]:
    """The collectives of each phase."""
    return Counter((each.phase, each.kind) for each in compiled.collectives)


def readers_of(program: Program) -> list[Any]:
    return [user for node in parameters_of(program).values() for user in node.users]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "optimiser"}, "offload='optimiser'\n  no such thing is offloaded\n  did you mean optimizer?"),
        (
            {"offload": "parameters", "stage": 2},
            "stage=2, offload='parameters'\n  it keeps parameters whole on the device\n"
            "  say stage=3, or offload='optimizer'",
        ),
        (
            {"offload": "parameters", "to": "scratch"},
            "to='scratch'\n  it is no absolute path of a folder\n  say to='host', or to='/scratch'",
        ),
        ({"to": "/scratch"}, "to='/scratch'\n  nothing is offloaded\n  say offload='parameters' or"),
    ],
    ids=["typo", "stage", "path", "nothing"],
)  # fmt: skip
def test_a_wrong_option_says_what_to_type(options: dict[str, Any], text: str) -> None:
    with pytest.raises(shardc.ShardingError, match=re.escape(f"Zero('dp'): {text}")):
        Zero("dp", **options)


def test_a_pipeline_that_offloads_stages_and_compiled_code_say_what_to_leave_out() -> None:
    pipeline = Pipeline("pp", 4, schedule="interleaved", offload=True)
    with pytest.raises(shardc.ShardingError, match="both say where parameters are"):
        compile_gpt(Mesh(pp=2, dp=1), zero={"offload": "optimizer"}, pipeline=pipeline)
    model, _ = target()
    zero = Zero("dp", 3, offload="parameters")
    with pytest.raises(shardc.ShardingError, match="leave compile out, or say offload='optimizer'"):
        shardc.parallelize(model, Mesh(dp=1), DATA, zero=zero, compile="inductor")


def test_fetches_come_one_layer_ahead_and_copies_take_time_on_lanes_of_their_own() -> None:
    compiled, _ = compile_gpt(Mesh(dp=1), zero={"offload": "parameters"}, links=H100)
    calls = [node.name for node in compiled.program.calls]
    assert calls.index("fetch_blocks_2_mlp_up_weight") < calls.index("gelu_1") < calls.index("gelu_2")
    entry = StepRecord(compiled.program).entry()
    assert entry.copies is not None
    assert {each.way: each.count for each in entry.copies}["offloaded"] == len(parameters_of(compiled.program))
    slow = compile_gpt(Mesh(dp=1), zero={"offload": "parameters", "to": "/scratch"}, links=H100)[0]
    assert (StepRecord(slow.program).entry().optimizer or 0) > 4 * (entry.optimizer or 0) > 0


@pytest.mark.parametrize("what", ["parameters", "optimizer"])
def test_no_step_waits_for_the_host(what: str) -> None:
    compiled, _ = compile_gpt(Mesh(dp=4), zero={"offload": what})
    rehearse(compiled)
