"""explain on messages between stages of a pipeline: their cause, and which stages would send less."""

from __future__ import annotations

from typing import Any

import torch
from explain_cases import GPT, compiled
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Pipeline
from shardc.api import Compiled
from shardc.report.explain.explanation import REPLICATED


class Chain(nn.Module):
    """Four layers, the second of which gives less."""

    def __init__(self, mark: int = -1) -> None:
        super().__init__()
        self.mark = mark
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(4, 64), nn.Linear(64, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == self.mark:
                shardc.stage_boundary()
            x = layer(x).relu()
        return x.square().mean()


def chain(mark: int = -1, **options: Any) -> Compiled:
    pipeline = Pipeline(microbatches=2, **options)
    return shardc.compile(Chain(mark), Mesh(dp=2, pp=2), {"x": P("dp")}, args=(torch.randn(8, 32),), pipeline=pipeline)


def test_a_message_is_explained_by_the_cut_and_by_the_chain_of_its_value() -> None:
    program = chain(cuts=("layers.3",))
    found = program.explain("send_forward_0_to_1")
    assert found.has and found.wants and (found.has.module, found.wants.name) == ("", "stage 1")
    assert found.wants.module == "layers.3" and found.wants.op == "dot"
    assert {chain.axis: chain.end for chain in found.chains}["dp"] == "x: P('dp')"
    assert "stage 1 begins with layers.3: cuts='layers.3' says so" in found.text()
    assert "goes back the same way" in program.explain("send_input_gradient_1_to_0").text()
    assert "every rank has the output output at the end of a step" in program.explain("send_after_1_to_0").text()


def test_a_stage_is_explained_by_who_says_where_it_begins() -> None:
    even = chain(balance="flops").explain("stage 1").text()
    assert "balance='flops' makes stages as even as can be in operations" in even
    assert "layers.1: shardc.stage_boundary() in the model says so" in chain(mark=1).explain("stage:1").text()
    tied = compiled(f"{GPT}_tied", Mesh(dp=2, pp=2), pipeline=Pipeline(microbatches=2))
    found = tied.explain("stage 0")
    assert found.parts and "stage 0 begins with the model" in found.text()
    sums = [each.name for each in tied.collectives if each.name.startswith("send_after")]
    assert any("both stages hold tokens.weight, and add up" in tied.explain(name).text() for name in sums)
    assert all(REPLICATED not in tied.explain(each.name).ends for each in tied.collectives)


def test_stages_that_begin_as_advised_send_less() -> None:
    program = chain(cuts=("layers.3",))
    advice = program.advise("send_forward_0_to_1")
    found = advice.suggestion
    assert found is not None and found.after.crossing < found.before.crossing
    text = advice.text()
    assert text.startswith("to send less between stages: say cuts=('layers.2',) in pipeline=\n"), text
    assert "  on command line  --pipeline pp,microbatches=2,cuts=layers.2\n" in text
    assert found.python == "pipeline = Pipeline(axis='pp', microbatches=2, cuts=('layers.2',))"
    said: dict[str, Any] = {"Pipeline": Pipeline}
    exec(found.python, said)
    after = chain(cuts=said["pipeline"].cuts)
    assert (
        sum(each.wire_bytes * each.times for each in after.collectives if each.kind == "send") == found.after.crossing
    )


def test_where_every_cut_sends_as_much_advice_is_one_stage_with_its_cost() -> None:
    program = chain(cuts=("layers.2",))
    advice = program.advise("send_forward_0_to_1")
    assert advice.suggestion is not None and not advice.suggestion.is_free
    assert "compile for dp=4, pp=1" in advice.text() and "between stages go 0 B" in advice.text()
