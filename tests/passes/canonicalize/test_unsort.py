"""unsort: rows sorted by expert stay where they are if no op depends on their order."""

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.program.node import op_name
from shardc.verify import difference

aten = torch.ops.aten


class Experts(nn.Module):
    """Each token goes through the matrix of its two best experts; ``mixes``: sorted neighbours see each other."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.mixes = nn.Linear(16, 4), mixes
        self.matrices = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, experts = self.router(tokens).topk(2)
        keys, order = experts.flatten().sort()
        ends = torch.histc(keys.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        rows = nn.functional.grouped_mm(tokens[order // 2], self.matrices, offs=ends).tanh()
        if self.mixes:
            rows = rows.cumsum(0)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        return rows[back].view(-1, 2, 16).sum(1).square().mean()


def ops(program):
    return {op_name(node.target) for node in program.calls}


@pytest.mark.parametrize(
    "annotations",
    [{"matrices": P("tp")}, {"matrices": P(None, None, "tp")}, {"matrices": P(None, "tp")}],
    ids=["experts", "columns", "rows"],
)
def test_no_token_moves_where_tokens_and_experts_are_cut(annotations):
    model, tokens = Experts(), torch.randn(12, 16)
    program = shardc.compile(model, Mesh(dp=2, tp=2), {"tokens": P("dp"), **annotations}, args=(tokens,))
    assert not {"sort", "index", "searchsorted"} & ops(program.at("canonicalize"))
    assert {found.kind for found in program.collectives if "dp" in found.axes} == {"all_reduce"}
    loss, gradients = program.simulate(tokens)
    expected = model(tokens)
    expected.backward()
    assert difference(loss, expected.detach()) < 1e-6
    for name, parameter in model.named_parameters():
        assert difference(gradients[name], parameter.grad) < 1e-6, name


def test_rows_are_sorted_where_an_op_sees_their_order():
    model, tokens = Experts(mixes=True), torch.randn(12, 16)
    program = shardc.compile(model, Mesh(dp=2), {"tokens": P("dp")}, args=(tokens,))
    assert "sort" in ops(program.at("canonicalize"))
    loss, _ = program.simulate(tokens)
    assert difference(loss, model(tokens).detach()) < 1e-6


def test_a_histogram_does_not_count_padding():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.histc(x.float(), 4, 0, 3)

    x = torch.tensor([0, 3, 1, 2, 0, 0, 1])
    program = shardc.compile(Model(), Mesh(dp=4), {"x": P("dp")}, args=(x,), train=False)
    assert program.simulate(x)[0].tolist() == [3, 2, 1, 1]
