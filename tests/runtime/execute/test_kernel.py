"""Kernels that the executor chooses give the same values with fewer passes over memory."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from gpt import GPT, Config
from measuring import MeasuringExecutor
from rule_case import Draw
from torch import Tensor, nn
from torch.nn import functional

import shardc
from shardc import Mesh
from shardc.ops.contraction import BoundDot, dot, takes_bias
from shardc.runtime.comm.comm import BucketLayout
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.comm.dtensor import local
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.execute import rewrite
from shardc.runtime.execute.deferred import Totals
from shardc.runtime.execute.executor import Executor
from shardc.runtime.simulator import cut_inputs

SPECS = [
    "b t k, k n -> b t n", "b t k, n k -> b t n", "b t n, b t k -> n k", "b t k, b t n -> n k", "a k, k n -> n a",
    "b h t d, b h s d -> b h t s", "b t h d, h d n -> t b n", "k, k -> ", "a, c -> c a", "k, k n -> n",
    "e b k, e k n -> b e n",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_bound_contraction_equals_its_einsum(spec: str) -> None:
    for seed, size in enumerate((2, 3)):
        sizes = {name: size + i for i, name in enumerate(sorted(set(spec) - set(" ,->")))}
        one, other = (side.split() for side in spec.partition("->")[0].split(","))
        a, b = (Draw(seed + i).floats(*map(sizes.__getitem__, names)) for i, names in enumerate((one, other)))
        expected = torch.einsum(spec.replace(" ", ""), a, b)
        bound = BoundDot(spec, a.shape, b.shape)
        torch.testing.assert_close(bound(a, b), expected)
        torch.testing.assert_close(dot(a, b, spec), expected)
        if takes_bias(spec) and a.ndim > 1:
            bias = Draw(seed).floats(expected.shape[-1])
            torch.testing.assert_close(bound(a, b, bias), expected + bias)


class Chain(nn.Module):
    """Values that are read once, twice, through a view, and saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = (y * 2 - x.sum()).exp().neg() + 1
        w = z.view(-1, 4) * 3
        return (self.down(z + w.view_as(z)) * y.sum(-1, keepdim=True)).square().sum()


def run(program: shardc.Compiled, args: tuple[Tensor, ...], is_eager: bool, repeats: int) -> list[list[Tensor | None]]:
    """What a program gives forward, and backward again and again."""
    executor = Executor(program.program, SimulatedComm(program.mesh), is_eager=is_eager)
    pieces = cut_inputs(program.program, program.inputs(program.program, args))
    outputs, saved = executor.forward(pieces)
    return [*outputs, *(row for _ in range(repeats) for row in executor.backward(saved, pieces, keep=True))]


@pytest.mark.parametrize("model", [Chain(), GPT(Config(layers=1))], ids=["chain", "gpt"])
def test_an_op_in_place_gives_the_bits_of_the_op_out_of_place(model: nn.Module) -> None:
    args = (torch.randn(4, 6),) if isinstance(model, Chain) else tuple(torch.randint(128, (2, 4, 32)))
    program = shardc.compile(model, Mesh(dp=2), {"x" if isinstance(model, Chain) else "ids": shardc.P("dp")}, args=args)
    given = [tensor.clone() for tensor in (*args, *model.parameters())]
    found, expected = run(program, args, True, repeats=2), run(program, args, False, repeats=2)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([*args, *(each.detach() for each in model.parameters())], [g.detach() for g in given])
    names = {getattr(node.target, "__name__", node.target) for node in executor_of(program)._bwd.graph.nodes}
    assert any(name.endswith(("_", "_.Tensor", "_.default")) for name in names), "some are written over"


class Losses(nn.Module):
    """A softmax over the last dim of scores that no one else reads, one of scores that are the result, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.gate = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.q(x) @ self.k(x).mT).softmax(-1)
        columns = (self.k(x) @ self.q(x).mT).mT.softmax(-1)
        y = functional.silu(self.gate((weights - columns) @ x)).tanh()
        logits = self.k(functional.gelu(y))
        return logits, functional.cross_entropy((logits * 2).flatten(0, -2), torch.arange(logits[..., 0].numel()) % 6)


class Expanded(nn.Module):
    """Parts of values, expanded to the shape of the whole: several elements lie in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        read, saved, other = self.a(x), self.b(x), self.c(x)
        return (saved[..., :1].expand_as(saved) * other + read[..., :1].expand_as(read).tanh()).exp().sum()


@pytest.mark.parametrize("model", [Losses(), Expanded(), GPT(Config(layers=1))], ids=["losses", "expanded", "gpt"])
def test_saved_activations_are_overwritten_in_backward_unless_the_graph_is_retained(model: nn.Module) -> None:
    args = tuple(torch.randint(128, (2, 4, 32))) if isinstance(model, GPT) else (torch.randn(4, 3, 6),)
    parallel = shardc.parallelize(copy.deepcopy(model), Mesh(dp=1))
    for _ in range(2):
        outputs, expected = (
            [each] if isinstance(each, Tensor) else [*each] for each in (parallel(*args), model(*args))
        )
        for some in (parallel, model):
            some.zero_grad()
        for keep in (True, True, False):
            expected[-1].backward(retain_graph=keep)
            outputs[-1].backward(retain_graph=keep)
            for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close([each.detach() for each in outputs], [each.detach() for each in expected])
        with pytest.raises(RuntimeError, match="retain_graph"):
            outputs[-1].backward()


@pytest.mark.parametrize("op", [torch.ops.aten._softmax, torch.ops.aten._log_softmax], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_softmax_in_place_gives_the_bits_of_one_out_of_place(op: Any, dtype: torch.dtype) -> None:
    for shape in ((3,), (5, 1), (7, 0), (64, 4096), (1024, 33), (17, 128, 130), (9, 50257)):
        x = torch.randn(shape).to(dtype)
        expected = op.default(x, -1, False)
        assert torch.equal(op.out(x, -1, False, out=x), expected), shape


def test_logits_have_one_copy_in_memory() -> None:
    """Their logarithms of softmax, those' exponentials and the gradient are written over them, each in its turn."""
    model, ids = GPT(Config(layers=1, vocab=4096, context=128)), torch.randint(4096, (2, 8, 128))
    compiled = shardc.compile(model, Mesh(dp=1), args=tuple(ids))
    pieces = cut_inputs(compiled.program, compiled.inputs(compiled.program, tuple(ids)))
    logits = 8 * 128 * 4096 * 4
    eager, apart = (
        MeasuringExecutor(compiled.program, SimulatedComm(compiled.mesh), is_eager=is_eager).measure(pieces)["peak"]
        for is_eager in (True, False)
    )
    state = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert eager - state < 1.5 * logits and apart - eager > 0.9 * logits


def executor_of(program: shardc.Compiled) -> Executor:
    return Executor(program.program, SimulatedComm(program.mesh))


@pytest.mark.parametrize("model", [Chain(), GPT(Config(layers=1))], ids=["chain", "gpt"])
def test_a_part_of_several_ranks_gives_the_results_of_one(model: nn.Module) -> None:
    args = (torch.randn(4, 6),) if isinstance(model, Chain) else tuple(torch.randint(128, (2, 4, 32)))
    program = shardc.compile(model, Mesh(dp=1), args=args)
    executor = executor_of(program)
    (pieces,) = cut_inputs(program.program, program.inputs(program.program, args))
    found = []
    for count in (1, 2, 3):
        outputs, saved = executor.forward([pieces] * count)
        found += [*outputs, *executor.backward(saved, [pieces] * count)]
        assert not any(map(any, saved.envs)), "what was saved is freed"
    torch.testing.assert_close(found, [*found[:2], *(found[0],) * 2, *(found[1],) * 2, *(found[0],) * 3,
                                       *(found[1],) * 3], atol=0, rtol=0)  # fmt: skip


def test_an_error_in_code_says_where_in_the_model_it_arose() -> None:
    model = shardc.parallelize(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), Mesh(dp=1))
    ids = torch.arange(6)
    for _ in range(3):
        model(ids)
    with pytest.raises(Exception, match="out of") as found:
        model(ids + 4)
    assert "/embedding" in "".join((str(found.value), *getattr(found.value, "__notes__", ())))


class Wide(nn.Module):
    """Weights that are large, small, used twice, of a batch of products, and [in, out]; biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.small = nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 8)
        self.square, self.turned = nn.Linear(256, 256, bias=False), nn.Parameter(torch.randn(256, 300) / 16)
        self.experts = nn.Parameter(torch.randn(4, 256, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.square(self.square(self.down(torch.relu(self.up(x)))))
        z = (y @ self.experts).mean(0) @ self.turned
        return self.small(y).square().sum() + z.square().sum()


def run_packing(mesh: Mesh) -> list[tuple[int, list[Tensor]]]:
    """Of steps with the same operands, the elements that buckets copied, and the gradients."""
    torch.manual_seed(0)
    parallel = shardc.parallelize(Wide(), make_device_mesh(mesh), {"x": shardc.P(None, "dp")})
    x, found, copied = torch.randn(4, 8, 256), [], [0]

    def noting(copy: Callable[..., Any], values: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            copied[0] += sum(x.numel() for x in args[values])
            return copy(*args)

        return call

    with (
        mock.patch.object(BucketLayout, "pack", noting(BucketLayout.pack, 1)),
        mock.patch.object(rewrite, "put", noting(rewrite.put, 1)),
    ):
        for _ in range(3):  # the reductions of the first one wait
            copied[0] = 0
            parallel.zero_grad()
            parallel(x).backward()
            gradients = [local(each.grad).clone() for each in parallel.parameters()]
            found.append((copied[0], gradients))
    return found


def test_large_gradients_are_made_in_their_buckets_buffer(gloo: Any) -> None:
    small = 512 + 256 + 8 * 256 + 8 + 256 * 256  # the weight that is used twice has a sum of two products
    for (_, expected), *steps in gloo.run(run_packing, Mesh(dp=4)):
        assert [copied for copied, _ in steps] == [small, small]
        for _, gradients in steps:
            torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_a_product_that_nobody_else_reads_adds_to_the_sum_of_earlier_backwards_by_itself() -> None:
    program = shardc.compile(Wide(), Mesh(dp=2), {"x": shardc.P(None, "dp")}, args=(torch.randn(4, 8, 256),))
    deferred = executor_of(program)._deferred
    for is_own, names in ((True, {"addmm_", "baddbmm_"}), (False, {"addmm", "baddbmm"})):
        nodes = deferred.part(Totals([], is_own), is_last=False).graph.nodes
        found = {node.target if node.op == "call_method" else getattr(node.target, "__name__", "") for node in nodes}
        assert names <= found, found


def test_a_collective_is_waited_for_by_its_first_reader() -> None:
    program = shardc.compile(Wide(), Mesh(dp=2), {"x": shardc.P(None, "dp")}, args=(torch.randn(4, 8, 256),))
    nodes = list(executor_of(program)._bwd.graph.nodes)
    waits = [(i, node) for i, node in enumerate(nodes) if node.target is operator.call]
    assert waits
    for i, wait in waits:
        assert rewrite.collective_of(wait.args[0]) is not None
        (result,) = wait.users
        following = (node for node in nodes[i + 2 :] if node.target not in (operator.call, operator.getitem))
        assert nodes[i + 1] is result and next(following) in result.users | {nodes[-1]: None, **users_of(result)}


def users_of(node: Any) -> dict[Any, None]:
    """The readers of a node's entries."""
    return {reader: None for entry in node.users for reader in entry.users}
