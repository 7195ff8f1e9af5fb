"""accumulate: a sum over microbatches is added up before anything else is done with it."""

from __future__ import annotations

from printed import block, printed, value
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Pipeline
from shardc.passes.reshard.accumulate import accumulate


class Two(nn.Module):
    """A stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


def test_ranks_exchange_a_gradient_once_a_step() -> None:
    pipeline = Pipeline("pp", microbatches=2)
    program = shardc.compile(Two(), Mesh(pp=2, dp=2), {"x": P("dp")}, kwargs={"x": value(8, 4)}, pipeline=pipeline)
    assert printed(program.at("accumulate")) == block(
        """
        a.weight: f32[4, 4]
        b.weight: f32[4, 4]
        x: f32[8@dp+microbatch, 4]
        tangent(output): f32[]
        dot: f32[8@dp+microbatch, 4] = dot(x, a.weight, "a b, c b -> a c")
        dot_1: f32[8@dp+microbatch, 4] = dot(dot, b.weight, "a b, c b -> a c")
        sum_1: f32[]{sum dp microbatch} = sum(dot_1)
        reshard_3: f32[]{sum dp} = reshard(sum_1)
        reshard: f32[] = reshard(reshard_3)
        expand_1: f32[8@dp+microbatch, 4] = expand(tangent(output), [8, 4])
        dot_2: f32[4, 4]{sum dp microbatch} = dot(expand_1, dot, "a b, a c -> b c")
        reshard_4: f32[4, 4]{sum dp} = reshard(dot_2)
        reshard_2: f32[4, 4] = reshard(reshard_4)
        dot_3: f32[8@dp+microbatch, 4] = dot(expand_1, b.weight, "a b, b c -> a c")
        dot_4: f32[4, 4]{sum dp microbatch} = dot(dot_3, x, "a b, a c -> b c")
        reshard_5: f32[4, 4]{sum dp} = reshard(dot_4)
        reshard_1: f32[4, 4] = reshard(reshard_5)
        output: reshard
        gradient a.weight: reshard_1
        gradient b.weight: reshard_2
        """
    )


def test_without_a_pipeline_the_program_stays() -> None:
    program = shardc.compile(Two(), Mesh(dp=2), {"x": P("dp")}, kwargs={"x": value(8, 4)})
    before = program.at("store")
    assert accumulate(before) is before
