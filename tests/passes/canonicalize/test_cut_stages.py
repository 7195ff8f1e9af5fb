"""cut_stages: each call has a stage of the pipeline, a call of backward that of the forward it differentiates."""

from __future__ import annotations

from printed import value
from torch import Tensor, nn

import shardc
from shardc import Mesh, Pipeline
from shardc.passes.canonicalize.cut_stages import cut_stages


class Two(nn.Module):
    """A stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


def test_products_of_backward_are_in_the_stage_of_their_forward() -> None:
    program = shardc.compile(Two(), Mesh(pp=2), kwargs={"x": value(8, 4)}, pipeline=Pipeline("pp", microbatches=2)).at(
        "cut_stages"
    )
    sources = [program.source(node) for node in program.calls if str(node.target) == "aten.mm.default"]
    assert [(source.phase, source.module, source.stage) for source in sources] == [
        ("forward", "a", 0),
        ("forward", "b", 1),
        ("backward", "b", 1),
        ("backward", "b", 1),
        ("backward", "a", 0),
    ]


def test_without_a_pipeline_the_program_stays() -> None:
    program = shardc.compile(Two(), Mesh(dp=2), kwargs={"x": value(8, 4)})
    before = program.at("capture")
    assert cut_stages(before) is before
