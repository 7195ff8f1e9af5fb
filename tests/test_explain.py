"""explain: the way from annotations to a parameter, a value, a module or a collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardc import Mesh, ShardingError
from shardc.api import Compiled, compile
from shardc.explain import Explainer
from shardc.explanation import REPLICATED
from shardc.target import Wish, load_target

GPT = Path(__file__).parents[1] / "examples" / "gpt.py"


def compiled(target: str, mesh: Mesh) -> Compiled:
    found = load_target(target, Wish({}, None, None, "meta"), mesh)
    return compile(found.model, mesh, found.annotations, args=found.args, kwargs=found.kwargs)


@pytest.fixture(scope="module")
def gpt() -> Compiled:
    return compiled(f"{GPT}:gpt", Mesh(dp=2, tp=2))


def test_a_parameter_is_explained_by_the_ops_from_the_annotated_one(gpt: Compiled) -> None:
    found = gpt.explain("blocks.0.mlp.up.bias")
    assert found.ends == ("*.mlp.down.weight: P(None, 'tp')",)
    (chain,) = found.chains
    assert [step.value for step in chain.steps] == [
        "blocks.0.mlp.down.weight", "gelu", "add_11", "blocks.0.mlp.up.bias"
    ]  # fmt: skip
    assert gpt.explain("norm.weight").ends == (REPLICATED,)


def test_a_name_that_nothing_has_is_an_error_with_near_ones(gpt: Compiled) -> None:
    with pytest.raises(ShardingError, match=r"did you mean .*blocks\.0\.mlp\.up\.bias"):
        gpt.explain("blocks.0.mlp.up.bia")


def test_every_name_of_a_program_is_explained(gpt: Compiled) -> None:
    explainer = Explainer(gpt.whole)
    for name in explainer.names.values():
        if name != "output":
            assert explainer.explain(name).ends
