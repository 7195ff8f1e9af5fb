"""rematerialize: less is saved, the peak falls, and the numbers are the same to the bit, dropout masks too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Any

import gpt
import pytest
import torch
from cases import few
from measuring import measured, without_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Compiled, Mesh, P, Remat, ShardingError, Zero
from shardc.costs.count import flops_of, flops_of_call
from shardc.passes.lower.choose_saved import SLANT, Chooser, Share
from shardc.passes.lower.minimum_cut import UNIT
from shardc.program.lifetime import owners_of, split
from shardc.runtime.simulator import interpret

pytestmark = pytest.mark.xdist_group("rematerialize")  # who shares what is made once
DATA, MEGATRON, FSDP = gpt.DATA, gpt.DATA | gpt.MEGATRON, gpt.DATA | {"param:*": P("dp")}
PLANS: dict[str, tuple[Mesh, Mapping[str, P], dict[str, Any]]] = {
    "data and tensor": (Mesh(dp=2, tp=2), MEGATRON, {}),
    "weights gathered": (Mesh(dp=4), FSDP, {}),
    "zero": (Mesh(dp=4), DATA, {"zero": Zero()}),
}
BLOCKS = Remat("blocks.*")


@cache
def compiled(plan: str, remat: Remat | None = None, layers: int = 2, dropout: float = 0.1) -> Compiled:
    mesh, annotations, options = PLANS[plan]
    model, args = target(layers, dropout)
    return shardc.compile(model, mesh, annotations, args=args, remat=remat, **options)


def target(layers: int = 2, dropout: float = 0.1) -> tuple[nn.Module, tuple[Any, ...]]:
    """A small GPT in float64."""
    model, args, _, _ = gpt._target(gpt.Config(layers=layers, dropout=dropout), {})
    return model.double(), args


def wire(program: Compiled) -> int:
    return sum(found.wire_bytes for found in program.collectives)


def assert_same_bits(found: Any, wanted: Any) -> None:
    (loss, gradients), (expected, of_expected) = found, wanted
    assert torch.equal(loss, expected) and gradients.keys() == of_expected.keys()
    assert all(torch.equal(gradients[name], of_expected[name]) for name in gradients)


@pytest.mark.parametrize("share", few([None, 2], None), ids=["blocks", "budget"])
@pytest.mark.parametrize("plan", few(PLANS, "data and tensor"))
def test_gradients_are_the_same_to_the_bit_and_less_is_alive(plan: str, share: int | None) -> None:
    """With dropout; and they are those of one device. What is announced is what is measured.

    ``share``: of what is saved this part is the budget.
    """
    args = target()[1]
    whole = compiled(plan)
    wanted, alone = whole.simulate(*args), whole.run(interpret, whole.at("canonicalize"), args, {})
    for name, value in wanted[1].items():
        assert (value - alone[1][name]).abs().max() <= 1e-10 * max(1, alone[1][name].abs().max())
    less = compiled(plan, Remat(budget=whole.memory["saved"] // share) if share else BLOCKS)
    assert_same_bits(less.simulate(*args), wanted)
    found, announced, before = measured(less, *args), without_optimizer(less.memory), without_optimizer(whole.memory)
    assert all(abs(found[key] - announced[key]) <= 0.01 * announced[key] for key in found)
    assert found["saved"] <= 0.5 * before["saved"] and found["peak"] < 0.85 * before["peak"]
    assert wire(less) == wire(whole)


def test_every_second_block_saves_half_and_recomputing_collectives_saves_memory_for_bytes_sent() -> None:
    whole, half, all_ = (compiled("data and tensor", remat) for remat in (None, Remat("blocks.*", 2), BLOCKS))
    saved = [program.memory["saved"] for program in (whole, half, all_)]
    assert saved[0] - saved[1] == pytest.approx(saved[1] - saved[2], rel=0.1)
    more = compiled("data and tensor", Remat("blocks.*", collectives=True))
    assert more.memory["saved"] < saved[2] and wire(more) > wire(whole) == wire(all_)
    assert_same_bits(more.simulate(*target()[1]), whole.simulate(*target()[1]))


def test_values_that_no_backward_reads_are_not_recomputed() -> None:
    """Of a block's forward all but the last product: less than the third more that is said of checkpoints."""
    whole, less = (compiled("zero", remat, dropout=0.0) for remat in (None, BLOCKS))
    forward = {node for node in split(whole.program).forward if whole.program.source(node).module.startswith("blocks.")}
    in_blocks = flops_in(whole, forward)
    last = flops_in(whole, {node for node in forward if whole.program.source(node).module.endswith("mlp.down")})
    more = flops_of(less.program) - flops_of(whole.program)
    assert more == in_blocks - last
    assert more / flops_of(whole.program) < 1 / 3


def flops_in(program: Compiled, nodes: set[Any]) -> int:
    return sum(flops_of_call(program.program, node) for node in nodes if node in set(program.program.calls))


def test_recomputed_values_stand_right_before_their_first_reader() -> None:
    """Nothing of one block is alive while another is run backward."""
    program = compiled("data and tensor", BLOCKS).at("rematerialize")
    backward = split(program).backward
    blocks = [
        program.source(node).module.split(".")[1] for node in backward if "blocks." in program.source(node).module
    ]
    assert list(dict.fromkeys(blocks)) == ["1", "0"]
    assert blocks == sorted(blocks, reverse=True)


@pytest.mark.sweep
def test_a_smaller_budget_is_met_by_more_work_and_an_error_names_the_least() -> None:
    whole = compiled("data and tensor")
    saved, work = whole.memory["saved"], [flops_of(whole.program)]
    for part in (0.9, 0.6, 0.3):
        less = compiled("data and tensor", Remat(budget=int(part * saved)))
        assert 0.8 * part * saved <= less.memory["saved"] <= part * saved
        work.append(flops_of(less.program))
    assert work == sorted(work) and work[0] == work[1]  # at first what is cheap
    assert compiled("data and tensor", Remat(budget=saved)).memory == whole.memory
    with pytest.raises(ShardingError) as caught:
        compiled("data and tensor", Remat(budget=100))
    assert f"{saved} are saved without it" in str(caught.value) and "results of collectives are" in str(caught.value)
    least = int(caught.value.remedy.split("=")[1].split()[0])
    assert compiled("data and tensor", Remat(budget=least)).memory["saved"] <= least


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).sin()
        return (self.down(y * y.exp()).tanh() * 2).square().sum()


@pytest.mark.parametrize("price", [-4.0, 0.0, 1.0, 1.5, 2.0, 4.0, 8.0])
def test_the_cut_costs_least_of_all_choices(price: float) -> None:
    """Against every subset of the values of a small forward."""
    program = shardc.compile(Small(), Mesh(dp=1), args=(torch.randn(32, 8),)).at("mask_padding")
    parts = split(program)
    owners = owners_of(program, (*parts.update, *parts.forward))
    chooser = Chooser(program, Share(parts.forward, parts.backward), Remat(budget=0), (), owners)
    values = [value for made in chooser.results.values() for value in made]
    assert 6 <= len(values) <= 14

    def cost(saved: set[Any]) -> float:
        total = 0
        for value in saved:
            slant = 1 + SLANT * (1 - chooser.order[value[0]] / len(chooser.order))
            total += round(UNIT * 2**price * slant * chooser._nbytes(value))
        todo, again = list(chooser.read - saved), set()
        while todo:
            node = todo.pop()[0]
            if node not in again:
                again.add(node)
                todo += chooser._operands(node) - saved
        return total + sum(UNIT * chooser.costs[node] for node in again)

    choices = [set(chosen) for count in range(len(values) + 1) for chosen in combinations(values, count)]
    assert cost(chooser.saved(price)) == min(map(cost, choices))


class Counting(nn.Module):
    """A block that reads a buffer before it changes it, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.linear(x) * self.scale), 0.5)
        self.scale = self.scale * 0.5
        return torch.sin(y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_model_trains_alike_its_buffers_read_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 8)
    losses = {}
    for remat in (None, Remat("layers.*"), Remat(budget=0)):
        parallel = shardc.parallelize(model, Mesh(dp=2), {"x": P("dp")}, remat=remat)
        optimizer = torch.optim.SGD(parallel.parameters(), 0.5)
        losses[remat] = []
        for _ in range(3):
            loss = parallel(x)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[remat].append(loss.item())
    assert losses[None] == losses[Remat("layers.*")] == losses[Remat(budget=0)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Remat: neither blocks nor budget\n  one of them says what is saved\n  say blocks='h.*', or"),
        ({"blocks": "h.*", "budget": 1}, "Remat: both blocks and budget\n  one of them says"),
        ({"blocks": "h.*", "every": 0}, "Remat: every=0\n  it counts blocks from 1\n  say 1 for all, 2 for half"),
        (
            {"budget": -1},
            "Remat: budget=-1\n  it is a whole number of bytes, 0 or more\n  say budget=10**9 for a gigabyte",
        ),
    ],
)
def test_invalid_options_of_remat_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardingError) as caught:
        Remat(**options)
    assert str(caught.value).startswith(text)


def test_a_glob_that_matches_no_module_names_near_ones() -> None:
    with pytest.raises(ShardingError) as caught:
        shardc.compile(Stack(), Mesh(dp=1), args=(torch.randn(4, 8),), remat=Remat("layer.*"))
    assert str(caught.value).splitlines() == [
        "Remat(blocks='layer.*'): a glob over 5 modules",
        "  it matches none that makes a value",
        "  did you mean layers.1 or layers.0 or layers?",
    ]
