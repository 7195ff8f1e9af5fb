"""Calls of many sizes share few programs, each of which is right wherever it is used."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from hf_models import COLUMNS, GATED, ROWS, SIZES
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P, Zero, compiler
from shardc.capture import assembly

MESH = Mesh(dp=2, tp=2)
BATCH = {"input_ids": P("dp"), "labels": P("dp")}
HEADS = {f"*.{name}_proj.weight": COLUMNS for name in "qkv"} | {"*.o_proj.weight": ROWS}
WIDTH = 6


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each capture, whether it had symbols."""
    found, capture = list[bool](), compiler.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(bool(kwargs.get("symbols")))
        return capture(*args, **kwargs)

    monkeypatch.setattr(compiler, "capture", counted)
    yield found


class Sequences(nn.Module):
    """A product and a function of its result, in which anything may be read of the sizes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Any:
        return self.function(x @ self.weight)


def batch(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, WIDTH, dtype=torch.float64, generator=generator)


def trains_alike(function: Callable[..., Any], calls: list[tuple[int, ...]], plan: Any = None) -> None:
    """Results and gradients of each call are those of one device."""
    alone = Sequences(function)
    parallel = shardc.parallelize(alone, MESH, plan or {"x": P("dp"), "weight": P(None, "tp")})
    for sizes in calls:
        found, expected = ((module(batch(*sizes)), module) for module in (parallel, alone))
        for result, module in (found, expected):
            module.zero_grad()
            (result["y"] if isinstance(result, dict) else result).sum().backward()
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parallel.weight.grad, alone.weight.grad, rtol=1e-12, atol=1e-12)


LENGTHS = [(4, 9), (4, 30), (4, 13), (4, 7), (4, 64), (4, 128), (4, 31), (4, 6)]
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {  # with the most captures for all lengths
    "reads nothing": (lambda y: torch.softmax(y, 1).square().sum(2), 3),
    "divides by the length": (lambda y: y.sum(1) / y.shape[1], 3),
    "divides by a root of it": (lambda y: y.sum(1) / y.shape[1] ** 0.5, 3),
    "takes a mean and a variance": (lambda y: y.mean(1) + y.var(1), 3),
    "has a norm over the batch and it": (lambda y: F.batch_norm(y.mT, None, None, training=True).sin().sum(2), 3),
    "branches on the length": (lambda y: y * 2 if y.shape[1] > 16 else y.cumsum(1), 5),
    "branches on a number of a tensor": (lambda y: y * 2 if torch.arange(y.shape[1]).sum() > 100 else y, 5),
    "looks back": (lambda y: y[:, -4:].sum(1) + y[:, :3].sum(1) + y[:, 2 : y.shape[1] // 2].sum(1), 8),
    "shifts by one": (lambda y: (y[:, 1:] - y[:, :-1]).abs().mean((1, 2)), 3),
    "masks the future": (lambda y: (y @ y.mT).masked_fill(torch.ones(2 * [y.shape[1]]).triu(1) > 0, 0.0).sum(2), 3),
    "folds the batch in": (lambda y: y.flatten(0, 1).cumsum(0).unflatten(0, (-1, y.shape[1])).sum(2), 3),
    "returns the length": (lambda y: {"y": y.sum(2), "length": y.shape[1], "half": y.shape[1] / 2}, 3),
    "pads to a multiple of eight": (lambda y: nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 8)).square().sum(2), 5),
    "repeats": (lambda y: y.repeat(1, 2, 1).sum(2) * math.prod(y.shape[:2]), 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_all_lengths_at_which_it_is_right(name: str, captures: list[bool]) -> None:
    function, limit = FUNCTIONS[name]
    trains_alike(function, LENGTHS)
    assert captures[:3] == [False, False, True] and len(captures) <= limit, captures


def test_a_cut_dim_of_odd_and_even_sizes(captures: list[bool]) -> None:
    calls = [(n,) for n in (8, 12, 6, 7, 20, 9, 31, 14, 11)]
    trains_alike(lambda y: y * torch.arange(y.shape[0])[:, None] + y.mean(0), calls)
    assert len(captures) <= 5
    trains_alike(lambda y: (y * torch.arange(y.shape[0])[:, None]).cumsum(0), calls)


def test_a_length_that_is_cut(captures: list[bool]) -> None:
    calls = [(2, n) for n in (8, 12, 6, 20, 40, 14)]
    trains_alike(lambda y: torch.softmax(y, 1).flip(1).sum(2), calls, {"x": P(None, "dp"), "weight": P(None, "tp")})
    assert len(captures) <= 5


def test_batches_and_lengths_that_change_together(captures: list[bool]) -> None:
    trains_alike(lambda y: y.mean(1), [(4, 9), (8, 30), (6, 13), (2, 7), (12, 64), (4, 1), (1, 9), (16, 31)])
    assert len(captures) <= 6  # sizes of 1 have programs of their own


def test_a_loop_over_the_length_is_compiled_for_each(captures: list[bool]) -> None:
    trains_alike(lambda y: sum(y[:, i] * (i + 1) for i in range(y.shape[1])), [(4, n) for n in (3, 5, 4, 6, 7, 9)])
    assert captures == [False, False, True, True, False, False]


def test_what_reads_values_is_compiled_for_each(captures: list[bool]) -> None:
    def kept(y: Tensor) -> Tensor:
        return y[y[:, 0, 0] > 0].sum((1, 2))

    trains_alike(kept, [(4, 9), (4, 30), (4, 13), (4, 7)], {"weight": P(None, "tp")})


def test_a_program_with_a_number_that_lost_its_expression_is_not_used(
    captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "number_of", lambda value: value.node.hint)
    trains_alike(lambda y: y.sum(1) / y.shape[1], LENGTHS)
    assert captures.count(False) == len(LENGTHS) - captures.count(True) + 3, "each call but regions' own is alone"


@pytest.mark.slow
def test_two_hundred_lengths_of_an_evaluation(captures: list[bool]) -> None:
    alone = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=256)).eval()
    plan = {"*.c_attn.weight": P(None, "tp"), "*.attn.c_proj.weight": P("tp"), **BATCH}
    parallel = shardc.parallelize(alone, MESH, plan)
    with torch.no_grad():
        for length in random.Random(0).sample(range(2, 257), 200):
            ids = torch.arange(2 * length).view(2, length) * 7 % 64
            found, expected = (module(input_ids=ids, labels=ids).loss for module in (parallel, alone))
            torch.testing.assert_close(found, expected)
    assert len(captures) <= 8, captures


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES)).eval()  # the dropout of a mesh is not that of one device


MODELS = {"llama": (llama, HEADS | GATED), "bert": (bert, {"*.query.weight": COLUMNS, "*.key.weight": COLUMNS})}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_train_with_zero_on_sentences_of_all_lengths(name: str, captures: list[bool]) -> None:
    make, plan = MODELS[name]
    torch.manual_seed(0)
    alone = make().double()
    parallel = shardc.parallelize(alone, MESH, plan | BATCH, zero=Zero("dp", stage=3))
    trained_together(parallel, alone, [11, 30, 17, 5, 48, 23])
    assert len(captures) == 3


def trained_together(parallel: nn.Module, alone: nn.Module, lengths: list[int]) -> None:
    """Losses of a few steps of SGD are equal."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (parallel, alone)]
    for length in lengths:
        ids = torch.arange(4 * length).view(4, length) * 5 % 128
        losses = []
        for module, optimizer in zip((parallel, alone), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)  # transformers computes them in float32


def trained_in_a_job() -> list[bool]:
    alone = Sequences(lambda y: torch.softmax(y, 1).square().mean((1, 2)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = shardc.parallelize(alone, mesh, {"x": P("dp"), "weight": P(None, "tp")}, zero=Zero("dp", stage=2))
    for sizes in [(4, 11), (4, 30), (4, 17), (4, 5), (5, 48), (7, 30), (9, 3)]:
        losses = [module(batch(*sizes)) for module in (parallel, alone)]
        torch.testing.assert_close(*map(whole, losses), rtol=1e-12, atol=1e-12)
        for module, loss in zip((parallel, alone), losses, strict=True):
            module.zero_grad()
            loss.sum().backward()
        torch.testing.assert_close(whole(parallel.weight.grad), alone.weight.grad, rtol=1e-12, atol=1e-12)
    return [each.latest.is_of_region for each in parallel.shardc.variants.values()]


def test_all_ranks_of_a_job_take_the_same_programs(gloo: GlooPool) -> None:
    (found,) = set(map(tuple, gloo.run(trained_in_a_job)))
    assert found[:4] == (False, False, True, True)


def test_the_report_of_a_program_for_a_region_is_that_of_one_for_its_sizes() -> None:
    found, expected = (called(lengths) for lengths in ((9, 30, 13, 7), (9, 7)))
    assert (found.latest.is_of_region, expected.latest.is_of_region) == (True, False)
    one, other = found.latest.compilation, expected.latest.compilation
    assert one.dump() == other.dump()
    assert one.collectives and one.collectives == other.collectives
    for each in one.collectives:
        assert str(one.explain(each.name)) == str(other.explain(each.name))
    for name in ("capture", "keep_dims", "insert_reshards", "overlap_collectives", "localize"):
        assert str(one.after[name].graph) == str(other.after[name].graph)


def called(lengths: tuple[int, ...]) -> Any:
    """What runs the last of some calls of a model."""
    plan = {"x": P("dp"), "weight": P(None, "tp")}
    parallel = shardc.parallelize(Sequences(lambda y: torch.softmax(y, 1).sum(2)), MESH, plan)
    for length in lengths:
        parallel(batch(4, length))
    return next(reversed(parallel.shardc.variants.values()))


def test_programs_for_regions_are_forgotten_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    parallel = shardc.parallelize(Sequences(lambda y: y.sum(1)), MESH, {"x": P("dp"), "weight": P(None, "tp")})
    for length in range(2, 90):
        parallel(batch(4, length))
    assert not [each for each in recwarn if "signatures" in str(each.message)]
    assert len(parallel.shardc.variants) <= 64 + 2
    assert parallel.shardc.num_compiled == 3, "two lengths alone, and all of them together"
