"""The ledger of memory of a pipeline's ranks against the bytes that are alive while it runs."""

from __future__ import annotations

from typing import Any

import gpt
import pytest
from measuring_stages import measured_by_rank

from shardc import Mesh, P, compile
from shardc.options import Pipeline
from shardc.stage_memory import memory_by_rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "config", "mesh"),
    [
        ("gpipe", gpt.Config(), Mesh(pp=2)),
        ("1f1b", gpt.Config(tied=True, dropout=0.1), Mesh(pp=4)),
        ("zb-h1", gpt.Config(), Mesh(dp=2, pp=2)),
        ("zb-v", gpt.Config(), Mesh(pp=2)),
    ],
    ids=["gpipe", "1f1b-tied", "zb-h1-dp", "zb-v"],
)
def test_the_bytes_announced_for_each_rank_are_those_alive(schedule: str, config: Any, mesh: Mesh) -> None:
    annotations: dict[str, P] = gpt.DATA if "dp" in mesh.axis_names else {}
    model, args, _, _ = gpt._target(config, annotations)
    compiled = compile(model, mesh, annotations, args=args, pipeline=Pipeline(microbatches=4, schedule=schedule))
    ranks = memory_by_rank(compiled.program)
    assert [{key: memory[key] for key in ("saved", "peak")} for memory in ranks] == measured_by_rank(compiled, *args)
    assert compiled.memory == max(ranks, key=lambda memory: memory["peak"])
    held = sum(memory["parameters"] for memory in ranks)
    shared = model.tokens.weight.nbytes if config.tied else 0  # on the first rank and on the last
    assert held == sum(parameter.nbytes for parameter in model.parameters()) + shared
