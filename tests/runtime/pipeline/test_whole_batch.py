"""An op that needs the whole batch in the middle of a step is refused in a pipeline, with its name and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh
from shardc.options import Pipeline


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.router = nn.Parameter(torch.ones(4, 2))


class Normed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x))).square().mean()  # normed


class Routed(Layers):
    """Experts take the first rows that want them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        chosen = nn.functional.one_hot((x @ self.router).argmax(-1), 2)
        place = chosen.cumsum(0)  # routed
        return self.b(x * ((place * chosen).sum(-1) <= 3)[:, None]).square().mean()


class Balanced(Layers):
    """A loss that is square in a mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        shares = (x @ self.router).softmax(-1).mean(0)  # balanced
        return self.b(x).square().mean() + shares.square().sum()


class Centred(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x - x.mean(0)  # centred
        return self.b(x).square().mean()


MODELS = {
    Normed: "sub in norm, {}: aten.sub.Tensor reads ",
    Routed: "reduce_scatter_microbatch in {}: sum_6 is i64[2, 2]{{sum microbatch}}",
    Balanced: "in {}: aten.expand.default reads unsqueeze, made of a sum over the batch",
    Centred: "sub in {}: aten.sub.Tensor reads all_reduce_microbatch, made of a sum over the batch",
}


@pytest.mark.parametrize("kind", MODELS)
def test_an_op_that_needs_the_whole_batch_is_named_with_its_line(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(shardc.ShardingError) as error:
        shardc.parallelize(kind(), Mesh(pp=2), pipeline=Pipeline(microbatches=2), args=(torch.randn(8, 4),))
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith(f"  # {kind.__name__.lower()}"))
    place = f"{Path(__file__).name}:{line}"
    assert MODELS[kind].format(place) in str(error.value)
    assert str(error.value).splitlines()[1:] == [
        "  it needs the whole batch in the middle of a step, and a microbatch is a part of one",
        "  compute it of each sample by itself, or leave pipeline out",
    ]
