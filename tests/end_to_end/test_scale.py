"""The size of the mesh changes only numbers in the text of the program."""

from __future__ import annotations

import cProfile
import re

import pytest
import torch
from gpt import DATA, GPT, MEGATRON, Config

import shardc
from shardc import Mesh, P

BATCH_A_RANK = 16


def compile_for(ranks: int, annotations: dict[str, P], tensor_parallel: int) -> shardc.Compiled:
    axes = {"dp": ranks // tensor_parallel} | ({"tp": tensor_parallel} if tensor_parallel > 1 else {})
    with torch.device("meta"):
        model = GPT(Config(layers=2, vocab=4096, context=2048, width=4096, heads=8))
        ids = torch.empty(BATCH_A_RANK * ranks, model.config.context, dtype=torch.int64)
    return shardc.compile(model, Mesh(**axes), annotations, args=(ids, ids))


def text_without_sizes(compiled: shardc.Compiled) -> str:
    """The dump with every number that stands alone as ``#``, and no widths of columns; the numbers of names stay."""
    text = re.sub(r"(?<![\w.])\d[\d.]*(?![\w])", "#", compiled.dump())
    return re.sub(r" +", " ", re.sub(r"# [kMGTP]?(B|FLOP)", r"# \1", text))


PLANS = [
    pytest.param(DATA, 1, id="data parallel"),
    pytest.param(DATA | {"param:*": P("dp")}, 1, id="parameters cut over the data axis"),
    pytest.param(DATA | MEGATRON, 2, id="Megatron"),
]


@pytest.mark.parametrize(("annotations", "tensor_parallel"), PLANS)
def test_the_program_for_2_ranks_and_for_2048_has_one_text(annotations: dict[str, P], tensor_parallel: int) -> None:
    small, large = (compile_for(ranks, annotations, tensor_parallel) for ranks in (2, 2048))
    assert len(small.graph.nodes) == len(large.graph.nodes)
    assert text_without_sizes(small) == text_without_sizes(large)


def test_compiling_for_2048_ranks_calls_no_more_functions_than_for_2() -> None:
    def calls(ranks: int) -> int:
        compile_for(ranks, DATA | MEGATRON, 2)  # fills the caches of torch
        profile = cProfile.Profile()
        profile.runcall(compile_for, ranks, DATA | MEGATRON, 2)
        return sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]

    assert calls(2048) <= 1.02 * calls(2)
