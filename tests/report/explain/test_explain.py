"""explain: the chain from annotations to a parameter, a value, a module or a collective."""

from __future__ import annotations

import pytest
import torch
from explain_cases import CASES, GPT, MESH, case, compiled

from shardc import P, ShardingError
from shardc.api import Compiled, compile
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import REPLICATED, Explanation

pytestmark = pytest.mark.xdist_group("explain")  # who shares what is made once


@pytest.fixture(scope="module")
def gpt() -> Compiled:
    return compiled(GPT, MESH)


def said(program: Compiled) -> set[str]:
    """What the user said: annotations and options, as they print."""
    options = program.whole.options
    texts = {f"{pattern}: {spec!r}" for pattern, spec in program.request.annotations.items()}
    return texts | {option.text for option in (options.zero, options.pipeline) if option is not None}


def explained(program: Compiled) -> dict[str, Explanation]:
    """Everything that can be named, by what names it."""
    tables = Explainer(program.whole, program.model).tables
    return {f"{kind}:{name}": explain() for kind, table in tables.items() for name, explain in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_explanation_ends_in_an_annotation_or_option(name: str) -> None:
    """Every collective in an annotation or an option, every cut value too, all else in the default."""
    program = case(name)
    found, known = explained(program), said(program)
    for name, explanation in found.items():
        assert set(explanation.ends) <= known | {REPLICATED}, name
        assert explanation.text().splitlines()[0]
    assert len(program.collectives) > 0
    for sent in program.collectives:
        explanation = found[f"value:{sent.name}"]
        assert explanation.sent and REPLICATED not in explanation.ends, sent.name
        assert (explanation.sent.kind, explanation.sent.wire_bytes) == (sent.kind, sent.wire_bytes)
        assert all(part.reasons for part in explanation.parts or (explanation,)), sent.name
    for given, node in zip(program.whole.inputs, program.whole.placeholders, strict=True):
        if given.kind == "parameter":
            is_cut = bool(program.whole.sharding(node).cut_axes)
            assert is_cut == (found[f"param:{given.name}"].chains != ()), given.name


def test_a_parameter_is_explained_by_the_ops_from_the_annotated_one(gpt: Compiled) -> None:
    found = gpt.explain("blocks.0.mlp.up.bias")
    assert found.ends == ("*.mlp.down.weight: P(None, 'tp')",)
    (chain,) = found.chains
    assert [step.value for step in chain.steps] == [
        "blocks.0.mlp.down.weight", "gelu", "add_11", "blocks.0.mlp.up.bias"
    ]  # fmt: skip
    assert [step.role for step in chain.steps] == ["annotated", "read", "read", "read"]
    assert gpt.explain("norm.weight").ends == (REPLICATED,)


def test_a_name_that_nothing_has_is_an_error_with_near_ones(gpt: Compiled) -> None:
    with pytest.raises(ShardingError, match=r"did you mean .*blocks\.0\.mlp\.up\.bias"):
        gpt.explain("blocks.0.mlp.up.bia")


def test_a_name_that_two_things_have_asks_which() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = torch.nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(x)

    program = compile(Model(), MESH, {"x": P("dp")}, args=(torch.randn(4, 4),))
    with pytest.raises(ShardingError, match="say module:relu or value:relu"):
        program.explain("relu")
    assert program.explain("module:relu").parts[0] == program.explain("value:relu")
