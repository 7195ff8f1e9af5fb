"""An op over a cut dim as local work and small reductions: what moves is a few numbers a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from gpt import DATA, GPT, MEGATRON, Config
from printed import Function, compiled, parameter, value
from torch import Tensor, nn

import shardc
from shardc import Mesh, P

VOCAB, TOKENS = 128, 16 * 32


def compile_gpt(
    mesh: Mesh, annotations: Mapping[str, P], tied: bool = False
) -> tuple[shardc.Compiled, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(Config(layers=1, vocab=VOCAB, tied=tied)).double()
    inputs = list(torch.randint(VOCAB, (2, 16, 32)))
    return shardc.compile(model, mesh, annotations, args=tuple(inputs)), inputs


def assert_equal_to_eager(compiled: shardc.Compiled, inputs: list[torch.Tensor]) -> None:
    model = compiled.model
    loss = model(*inputs)
    found, gradients = compiled.simulate(*inputs)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-12)
    for (name, _), expected in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(dp=2, tp=2)], ids=str)
def test_cross_entropy_over_a_cut_vocabulary_moves_a_few_numbers_a_token(mesh: Mesh) -> None:
    data = DATA if "dp" in mesh.axis_names else {}
    compiled, inputs = compile_gpt(mesh, data | MEGATRON | {"head.weight": P("tp")})
    moved = [each for each in compiled.collectives if "tp" in each.axes]
    assert {each.kind for each in moved} == {"all_reduce"}
    small = [each for each in moved if each.bytes <= 2 * TOKENS * 8]
    assert len(small) == 2, "the maximum; the sum and the target's logit together; nothing in the backward"
    assert not any(VOCAB in each.local_shape_out for each in moved), "no logits move"
    assert_equal_to_eager(compiled, inputs)


PICKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    "classes in the middle": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "each": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, reduction="none").square().sum(),
    "gathered": lambda logits, y: -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", PICKED.values(), ids=PICKED)
def test_picking_targets_along_a_cut_vocabulary_takes_two_small_reductions(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """The maximum; the sum and the target's logit together, of one dtype; nothing in the backward."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, 23, bias=False, dtype=dtype)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self.head(x), y)

    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(6, 5, 8, dtype=dtype), torch.randint(23, (6, 5))
    compiled = shardc.compile(model, Mesh(tp=4), {"head.weight": P("tp")}, args=(x, y))
    moved = [(each.phase, each.kind, math.prod(each.local_shape_in)) for each in compiled.collectives]
    assert moved == [("forward", "all_reduce", 6 * 5), ("forward", "all_reduce", 2 * 6 * 5)]
    exponentials = [node for node in compiled.program.calls if node.target is torch.ops.aten.exp.default]
    assert len(exponentials) == 1, "backward takes those of forward"
    if dtype == torch.float64:
        assert_equal_to_eager(compiled, [x, y])
    else:
        torch.testing.assert_close(compiled.simulate(x, y)[0], model(x, y).detach(), rtol=2**-6, atol=0)


def test_log_probabilities_that_meet_wider_numbers_are_as_wide() -> None:
    """Of two bytes alone, a row's number of four: the product has four, as on one device."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (x.log_softmax(-1).exp() * scale).sum(0)

    torch.manual_seed(0)
    x, scale = torch.randn(4, 8, dtype=torch.bfloat16), torch.rand(4, 1)
    compiled = shardc.compile(Model(), Mesh(tp=2), {"x": P(None, "tp")}, args=(x, scale), train=False)
    found, _ = compiled.simulate(x, scale)
    torch.testing.assert_close(found, Model()(x, scale), rtol=2**-6, atol=2**-8)


def test_a_lookup_in_a_table_cut_by_rows_gathers_the_table_only_where_that_is_less() -> None:
    """The table of 128 rows is less than two all_reduced activations of 512 tokens; one of 50,000 rows is more."""
    compiled, inputs = compile_gpt(Mesh(tp=4), {"tokens.weight": P("tp")}, tied=True)
    assert [each.kind for each in compiled.collectives if each.node == "tokens_weight"] == ["all_gather"]
    assert_equal_to_eager(compiled, inputs)

    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50_000, 8, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).square().mean()

    torch.manual_seed(0)
    model, ids = Lookup(), torch.randint(50_000, (4, 6))
    compiled = shardc.compile(model, Mesh(dp=2, tp=4), {"ids": P("dp"), "table.weight": P("tp")}, args=(ids,))
    assert all(each.bytes <= 4 * 6 * 8 * 8 or each.axes == ("dp",) for each in compiled.collectives)
    assert_equal_to_eager(compiled, [ids])


def test_a_weight_cut_over_the_data_axis_is_gathered_not_taken_apart() -> None:
    compiled, _ = compile_gpt(Mesh(dp=4), DATA | {"param:*": P("dp")})
    assert {each.kind for each in compiled.collectives if each.bytes > 16} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_softmax_along_a_cut_dim_equals_the_whole(op: object, dim: int) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (op(x, dim=dim) ** 2).sum()  # type: ignore[operator]

    torch.manual_seed(0)
    x = (torch.randn(8, 12, 16, dtype=torch.float64) * 30).requires_grad_()
    compiled = shardc.compile(Model(), Mesh(a=2, b=2), {"x": P("a", "b")}, args=(x,))
    found, gradients = compiled.simulate(x)
    loss = Model()(x)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients["x"], torch.autograd.grad(loss, x)[0], rtol=0, atol=1e-12)
    assert not any(each.kind == "all_gather" for each in compiled.collectives)


REDUCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax_of_all": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "max": lambda x: tuple(x.max(-1)),
    "min": lambda x: tuple(x.min(1, keepdim=True)),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std((0, 1), correction=0, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, dim=1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, keepdim=True),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "any": lambda x: (x > 2).any(1),
    "all": lambda x: (x > -3).all(),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("special", [None, float("nan"), float("-inf"), float("inf")], ids=str)
def test_a_reduction_over_cut_dims_moves_its_results_alone(name: str, special: float | None) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).double().round(decimals=1)  # with ties
    if special is not None:
        x[1, 40], x[1, 50], x[2] = special, special, special
    if name == "var_mean" and special in (float("inf"), float("-inf")):
        x = x.nan_to_num(posinf=9, neginf=-9)  # torch's mean of infinities is nan there, ours is infinite
    reduce = REDUCTIONS[name]
    annotations = {"x": P("a", "b"), "output:*": P(...)}  # results stay as they are cut
    found = shardc.compile(Function(reduce, {}), Mesh(a=2, b=2), annotations, kwargs={"x": x}, train=False)
    assert all(each.kind == "all_reduce" and each.bytes <= 64 for each in found.collectives)
    torch.testing.assert_close(found.simulate(x=x)[0], reduce(x), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_batch_norm_over_a_cut_batch_moves_two_numbers_a_channel_each_way(dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(3, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(x) * x).square().mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 3, 4, 4, dtype=dtype)
    compiled = shardc.compile(model, Mesh(dp=4), {"x": P("dp")}, args=(x,))
    assert sorted(each.bytes for each in compiled.collectives)[-4:] <= [3 * 8] * 4
    if dtype == torch.float64:
        assert_equal_to_eager(compiled, [x])
    else:
        loss, gradients = compiled.simulate(x)
        torch.testing.assert_close(loss, model(x).detach(), rtol=2**-6, atol=2**-6)
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("far", [0.0, 1000.0])
def test_a_batch_norm_far_from_zero_is_as_exact_as_on_one_device(far: float) -> None:
    class Model(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3, dtype=dtype)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (self.norm(x) * w).square().mean()

    torch.manual_seed(0)
    x, w = torch.randn(8, 3, 6, 6) + far, torch.randn(8, 3, 6, 6)

    def trained(model: nn.Module, *args: Tensor) -> Tensor:
        loss = model(*args)
        loss.backward()
        numbers = [loss, *(each.grad for each in model.parameters()), *(each for each in model.buffers() if each.ndim)]
        return torch.cat([each.detach().double().flatten() for each in numbers])

    exact, alone = trained(Model(torch.float64), x.double(), w.double()), trained(Model(torch.float32), x, w)
    parallel = shardc.parallelize(Model(torch.float32), Mesh(dp=4), {"[xw]": P("dp")})
    assert (trained(parallel, x, w) - exact).norm() <= 3 * (alone - exact).norm() + 1e-6


class Normed(nn.Module):
    """A norm over the last dims of what a cut layer makes; ``mul`` after it keeps its gradient from being zero."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 22, dtype=dtype), norm.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x))
        return (y * y.sin()).sum()


NORMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "layer": (lambda: nn.LayerNorm(22), 2),
    "layer without weights": (lambda: nn.LayerNorm(22, elementwise_affine=False), 2),
    "layer without bias": (lambda: nn.LayerNorm(22, bias=False), 2),
    "layer over two dims": (lambda: nn.LayerNorm((3, 22)), 2),
    "root mean square": (lambda: nn.RMSNorm(22, eps=1e-5), 1),
    "root mean square without weights": (lambda: nn.RMSNorm(22, elementwise_affine=False), 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_a_cut_hidden_dim_moves_one_or_two_numbers_a_row_each_way(name: str, dtype: torch.dtype) -> None:
    """The dim of 22 does not divide. In bfloat16 rows are summed in float32."""
    make, count = NORMS[name]
    torch.manual_seed(0)
    model, x = Normed(make(), dtype), torch.randn(5, 3, 8, dtype=dtype)
    compiled = shardc.compile(model, Mesh(tp=4), {"up.weight": P("tp")}, args=(x,))
    rows = 5 if "two dims" in name else 15
    moved = [each for each in compiled.collectives if math.prod(each.local_shape_in) > 1]
    assert {each.kind for each in moved} == {"all_reduce"}
    for phase in ("forward", "backward"):
        assert sum(math.prod(each.local_shape_in) for each in moved if each.phase == phase) == count * rows, phase
    loss = model(x)
    found, gradients = compiled.simulate(x)
    tolerance = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 0.3}
    torch.testing.assert_close(found, loss.detach(), **tolerance)
    named = dict(model.named_parameters())
    for name, expected in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(gradients[name], expected, **tolerance)


@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2)], ids=str)
@pytest.mark.parametrize("width", [3, 4])
def test_a_lookup_in_a_dim_that_is_cut_in_blocks_equals_the_whole(mesh: Mesh, width: int) -> None:
    """A rank has then positions that do not follow one another."""
    inputs = {"x": torch.randn(4, width, dtype=torch.float64), "places": torch.tensor([3, 0, 5, 8])}
    model = Function(lambda x, places: x.reshape(-1)[places], inputs)
    program = shardc.compile(model, mesh, {"x": P(None, mesh.axis_names)}, kwargs=inputs)
    assert torch.equal(program.simulate(**inputs)[0], model(**inputs))


def test_a_table_is_looked_up_in_shards_if_the_rows_of_a_rank_are_fewer_bytes() -> None:
    """What all ranks look up together is more than the table, what one rank does less."""

    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(400, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).square().mean()

    ids = torch.zeros(64, 16, dtype=torch.int64)
    compiled = shardc.compile(Lookup(), Mesh(dp=16, tp=2), {"ids": P("dp"), "table.weight": P("tp")}, args=(ids,))
    moved = [each for each in compiled.collectives if each.axes == ("tp",)]
    assert {each.kind for each in moved} == {"all_reduce"} and sum(each.wire_bytes for each in moved) == 4 * 16 * 8 * 4


class Indexed(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.table = function, nn.Parameter(torch.randn(8, 6, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        picked = self.function(self.table, ids)
        return (picked * torch.arange(picked.numel(), dtype=picked.dtype).view_as(picked)).sum()


INDEXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, ids: F.embedding(ids, table),
    "index": lambda table, ids: table[ids],
    "gather": lambda table, ids: table.gather(0, ids[:, None].expand(-1, 6)),
    "scatter_add": lambda table, ids: table.scatter_add(0, ids[:, None].expand(-1, 6), table[:5].sin()),
    "scatter": lambda table, ids: table.scatter(0, ids[:, None].expand(-1, 6), 2.0),
    "index_add": lambda table, ids: table.index_add(0, ids, table[:5].cos()),
    "index_put": lambda table, ids: table.index_put((ids,), table[:5].cos(), accumulate=True),
    "index_select": lambda table, ids: table.index_select(0, ids),
    "one row": lambda table, ids: table[-1],
    "cross entropy": lambda table, ids: F.cross_entropy(table.t()[:5], ids, reduction="none"),
}


@pytest.mark.parametrize("name", INDEXING)
@pytest.mark.parametrize("spec", [P("a"), P(shardc.blocks(2, "a")), P(shardc.blocks(4, "a"))], ids=str)
def test_indices_into_a_dim_cut_in_blocks_name_the_right_positions(name: str, spec: P) -> None:
    """Where a dim is cut in blocks, the positions of a rank are not consecutive."""
    torch.manual_seed(0)
    model, ids = Indexed(INDEXING[name]), torch.tensor([1, 5, 2, 6, 7])
    compiled = shardc.compile(model, Mesh(a=2), {"table": spec}, args=(ids,))
    found, gradients = compiled.simulate(ids)
    loss = model(ids)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients["table"], torch.autograd.grad(loss, model.table)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("positions", [(0,), (0, -1), range(8)], ids=str)
def test_a_few_positions_of_a_cut_dim_are_reduced_and_many_moved_at_once(positions: Sequence[int], length: int) -> None:
    """Classifiers read the first token of a sequence that is cut; a recurrent loop reads each step."""

    def picked(x: Tensor, weight: Tensor) -> Tensor:
        h = x * weight
        return torch.stack([h[:, i].sin() for i in positions]).sum(0)

    x, weight = value(4, length, 6), parameter(6)
    found = compiled(picked, Mesh(sp=4), {"x": P(None, "sp"), "output:output": P()}, train=True, x=x, weight=weight)
    moved = [each for each in found.collectives if each.phase == "forward"]
    position, gathered = 4 * 6 * 4, 4 * 16 * 6 * 4
    if len(positions) <= 2:
        assert {each.kind for each in moved} == {"all_reduce"}
        assert sum(each.bytes for each in moved) == len(positions) * position
    else:
        assert sum(each.wire_bytes for each in moved) <= gathered * 3 // 4


@pytest.mark.parametrize(
    "spec", [P(None, "tp"), P(None, None, "tp"), P(None, "dp", "tp"), P(None, "tp", "dp")], ids=str
)
@pytest.mark.parametrize("diagonal", [-9, -1, 0, 3, 20])
def test_a_triangle_of_a_matrix_cut_along_rows_or_columns_moves_nothing(spec: P, diagonal: int) -> None:
    model = Function(lambda x: torch.cat([x.tril(diagonal), x.triu(diagonal)]), {})
    x = torch.randn(2, 7, 10)
    compiled = shardc.compile(model, Mesh(dp=2, tp=4), {"x": spec}, kwargs={"x": x}, train=False)
    assert not compiled.collectives
    assert torch.equal(compiled.simulate(x=x)[0], torch.cat([x.tril(diagonal), x.triu(diagonal)]))
