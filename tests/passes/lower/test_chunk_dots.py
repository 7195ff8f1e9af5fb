"""chunk_dots: products in rings have the numbers, the bytes and the operations of the plain ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from cases import few
from gloo_pool import GlooPool
from gpt import GPT, MEGATRON, Config
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import measured, without_optimizer
from one_device import equals_one_device
from parallel_models import whole
from printed import printed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardc
from shardc import Compiled, Mesh, P, Pipeline, Precision, Remat, Zero
from shardc.costs.count import call_seconds, collective_seconds, seconds
from shardc.costs.step_time import step_timeline
from shardc.language.machine import Device, Link, Machine
from shardc.language.mesh import warnings_among
from shardc.language.sharding import TensorType
from shardc.ops.contraction import DOT_RINGS, dots_scatter, dots_workspace, gather_dots
from shardc.passes.verify import verify
from shardc.program.communication import collective_at
from shardc.runtime.comm import distributed, ring
from shardc.runtime.comm.distributed import TorchComm
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.simulator import simulate

WIDTH = 12
RING = "collective_permute"


@dataclass(frozen=True)
class Shape:
    """``dim``: of positions; ``products``: of one gathered value; ``reads_all``: something else reads it too."""

    dim: int = 1
    batch: int = 2
    positions: int = 12
    products: int = 2
    reads_all: bool = False

    @property
    def cut(self) -> P:
        """Positions cut, as between layers."""
        return P(None, "tp") if self.dim else P("tp")


class Layer(nn.Module):
    """A layer with its positions cut by ``tp`` but for its inside, whose last dim is."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.norm = shape, nn.LayerNorm(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=i == 0) for i in range(shape.products))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = shardc.annotate(self.norm(x), self.shape.cut)
        inside = self.up[0](h)
        for up in self.up[1:]:
            inside = inside * up(h).tanh()
        inside = shardc.annotate(inside, P(None, None, "tp"))
        out = shardc.annotate(self.down(inside), self.shape.cut)
        return x + out + h.cumprod(self.shape.dim) if self.shape.reads_all else x + out


class Plain(nn.Module):
    """A layer without annotations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Layers(nn.Module):
    def __init__(self, shape: Shape, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def target(shape: Shape, layers: int = 1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = (shape.batch, shape.positions) if shape.dim else (shape.positions, shape.batch)
    return Layers(shape, layers).double(), torch.randn(*sizes, WIDTH, dtype=torch.float64)


def both(shape: Shape, mesh: Mesh, **options: Any) -> tuple[Compiled, Compiled, Tensor]:
    """A step without rings and with them, and its input."""
    model, x = target(shape)
    plain = shardc.compile(model, mesh, {"x": shape.cut}, args=(x,), **options)
    return plain, plain.recompile(overlap="ring"), x


def rings(compiled: Compiled) -> list[str]:
    names = [each.name for each in compiled.collectives if "dots" in each.name]
    return [name.rstrip("_0123456789").replace("_tp", "") for name in names]


def sent(compiled: Compiled, x: Tensor) -> list[int]:
    """The bytes that each virtual rank sends in a step."""
    comm = SimulatedComm(compiled.mesh)
    simulate(compiled.program, compiled.inputs(compiled.program, (x,), {}), comm)
    return [sum(each.bytes.values()) for each in comm.traffic]


def wire_bytes(compiled: Compiled) -> int:
    return sum(each.wire_bytes * each.times for each in compiled.collectives)


@settings(max_examples=6, deadline=None)
@given(
    st.builds(
        Shape, st.integers(0, 1), st.integers(1, 2), st.sampled_from((4, 9, 12)), st.integers(1, 3), st.booleans()
    ),
    st.sampled_from((2, 3, 4)),
)
def test_numbers_bytes_and_operations_are_those_of_plain_products(shape: Shape, ranks: int) -> None:
    """Where a dim is cut unevenly, the products are plain."""
    plain, chunked, x = both(shape, Mesh(tp=ranks))
    assert bool(rings(chunked)) == (shape.positions % ranks == 0)
    equals_one_device(chunked, x)
    assert wire_bytes(plain) == wire_bytes(chunked) and plain.cost.flops == chunked.cost.flops
    assert sent(plain, x) == sent(chunked, x)


def test_a_gather_is_sent_once_for_all_that_read_it() -> None:
    """Products that come first, and what else reads it: in backward the gradients of weights."""
    _, chunked, _ = both(Shape(products=2), Mesh(tp=2))
    specs = '("a b c, d c -> a b d", "a b c, d c -> a b d")'
    lines = printed(chunked.at("chunk_dots"), "forward").splitlines()
    assert lines[1:4] == [
        'annotate: f64[2, 12@tp, 12] = shardc.annotate(getitem, "-,tp")',
        "all_gather_tp_dots: (f64[2, 12, 12], f64[2, 12, 24@tp], f64[2, 12, 24@tp]) = gather_dots(annotate, "
        f'("tp",), 1, {specs}, True, layers.0.up.0.weight, layers.0.up.1.weight)',
        "add_2: f64[2, 12, 24@tp] = add(dot_9, layers.0.up.0.bias)",
    ]
    (gathered,) = (node for node in chunked.whole.graph.nodes if node.name == "all_gather_tp_2")
    assert len(gathered.users) == 2 and {chunked.whole.source(each).phase for each in gathered.users} == {"backward"}


def test_a_sum_of_products_goes_round_once() -> None:
    _, chunked, _ = both(Shape(products=3), Mesh(tp=2))
    sums = [node for node in chunked.whole.calls if node.target is dots_scatter]
    assert [len(node.args[3]) for node in sums] == [1, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, tp=2), {"zero": Zero("dp", 3), "remat": Remat("layers.*"), "bucket": 1}),
        (Mesh(pp=2, tp=2), {"pipeline": Pipeline("pp", 2, schedule="1f1b")}),
    ],
    ids=["zero 3, recomputed", "in a pipeline"],
)
def test_it_goes_with_other_options(mesh: Mesh, options: dict[str, Any]) -> None:
    """Gathers of parameters and sums of their gradients are no rings."""
    model, x = target(Shape(batch=4), layers=2)
    annotations = {"x": P("dp" if "dp" in mesh.axis_names else None, "tp")}
    plain = shardc.compile(model, mesh, annotations, args=(x,), **options)
    chunked = plain.recompile(overlap="ring")
    equals_one_device(chunked, x)
    assert wire_bytes(plain) == wire_bytes(chunked)
    assert {each.axes for each in chunked.collectives if "dots" in each.name} == {("tp",)}
    assert len(rings(chunked)) == 8


@pytest.mark.parametrize(
    ("positions", "options", "why"),
    [(9, {}, "4 cut unevenly"), (12, {"wire": {"tp": "bf16"}, "bucket": 1}, "4 sent in codes")],
)
def test_what_is_not_served_stays_plain_and_a_note_says_so(positions: int, options: dict[str, Any], why: str) -> None:
    plain, chunked, _ = both(Shape(1, 8, positions, products=1), Mesh(tp=2), **options)
    assert plain.collectives == chunked.collectives
    none, left = chunked.program.notes[-2:]
    assert none in warnings_among([none]) and none.startswith("overlap='ring' makes no ring of any product")
    assert left == f"overlap='ring' leaves gathers before products, or sums after them, as they are: {why}"


WEIGHTS = {"*.weight": P("dp")}
MEGATRON_LAYER = {"*.up.weight": P("tp"), "*.down.weight": P(None, "tp")}


@pytest.mark.parametrize(
    ("axes", "annotations", "options", "remedy"),
    [
        ({"dp": 2}, {}, {}, "leave overlap out"),
        ({"dp": 2}, WEIGHTS, {}, "leave overlap out"),
        ({"dp": 2}, {}, {"zero": Zero("dp", 3)}, "leave overlap out"),
        ({"dp": 2, "tp": 2}, MEGATRON_LAYER, {}, "cut the positions between layers by the axis that cuts weights"),
        ({"dp": 2, "tp": 2}, MEGATRON_LAYER, {"zero": Zero("dp", 3)}, "cut the positions between layers"),
    ],
    ids=["whole weights", "weights that annotations cut", "stored weights", "whole positions", "both"],
)
def test_a_note_says_what_would_make_rings_if_anything_would(
    axes: dict[str, int], annotations: dict[str, P], options: dict[str, Any], remedy: str
) -> None:
    model, x = nn.Sequential(Plain(), Plain()), torch.zeros(8, 4, WIDTH)
    annotations = {"input": P("dp"), **annotations}
    compiled = shardc.compile(model, Mesh(**axes), annotations, args=(x,), overlap="ring", **options)
    (note,) = warnings_among(compiled.program.notes)
    assert not rings(compiled) and remedy in note


@pytest.mark.parametrize("target_", [gather_dots, dots_scatter])
def test_a_ring_of_products_that_do_not_fit_is_caught(target_: Any) -> None:
    _, chunked, _ = both(Shape(), Mesh(tp=2))
    program = chunked.at("chunk_dots").copy()
    verify(program.unbound())
    node = next(each for each in program.calls if each.target is target_)
    *others, last = program.shardings(node)
    assert last is not None
    other = replace(last, dims=(last.dims[0], last.dims[2], last.dims[1]))
    program.set_sharding(node, (*others, other) if others else other)
    with pytest.raises(AssertionError):
        verify(program.unbound())


# The clock.


def step_seconds(compiled: Compiled) -> float:
    return step_timeline(compiled.whole).makespan


@pytest.mark.parametrize(
    ("bandwidth", "call", "has_rings"), [(1e8, 1e-7, True), (1e15, 1e-3, False), (1e8, 1e-3, False)]
)
def test_auto_makes_rings_where_the_clock_says_that_they_pay(bandwidth: float, call: float, has_rings: bool) -> None:
    """Not where each call takes its time, however small it is."""
    machine = Machine({"*": Link(1e-7, bandwidth)}, Device({"float32": 1e9, "float64": 1e9}, 1e10, call))
    plain, chunked, _ = both(Shape(), Mesh(tp=2), links=machine)
    auto = chunked.recompile(overlap="auto")
    assert bool(rings(auto)) == has_rings
    assert step_seconds(auto) < step_seconds(plain) if has_rings else step_seconds(auto) == step_seconds(plain)


@pytest.mark.parametrize("bandwidth", [1e5, 1e12])
def test_a_ring_takes_the_longer_of_products_and_messages_but_for_one_chunk(bandwidth: float) -> None:
    machine = Machine({"*": Link(0.0, bandwidth)}, Device({"float32": 1e9, "float64": 1e9}, 1e15))
    _, chunked, _ = both(Shape(), Mesh(tp=4), links=machine)
    program, tasks = chunked.whole, step_timeline(chunked.whole)
    for target_ in DOT_RINGS:
        node = next(each for each in program.calls if each.target is target_)
        chunk, sending = call_seconds(program, node) / 4, collective_seconds(program, collective_at(program, node))
        assert seconds(program, node) == pytest.approx(max(3 * chunk, sending) + chunk)
        own = [task for task in tasks.tasks if getattr(task.name, "name", "") == node.name]
        took = max(map(tasks.end, own)) - min(tasks.starts[task.name] for task in own)
        assert took == pytest.approx(seconds(program, node))


def test_what_is_saved_for_backward_is_as_announced() -> None:
    """What a ring holds while it runs is not among the values that are seen between calls."""
    _, chunked, x = both(Shape(dim=0, products=3), Mesh(tp=4))
    found, announced = measured(chunked, x), without_optimizer(chunked.memory)
    assert found["saved"] == announced["saved"] and found["peak"] <= announced["peak"] < 1.2 * found["peak"]


def test_gradients_of_weights_are_computed_between_rings_and_not_at_the_end_of_backward() -> None:
    """Where a last sum is waited for, as for a cast of it, all that is computed for gradients could wait for that."""
    with torch.device("meta"):
        model, ids = GPT(Config(layers=4, vocab=64, context=64, width=64, heads=4)), torch.randint(64, (4, 64))
    annotations = MEGATRON | {"tokens.weight": P("tp"), "head.weight": P("tp"), "module:tokens": P(None, "tp")}
    plain = shardc.compile(model, Mesh(tp=4), annotations, args=(ids, ids), precision=Precision())
    assert 0.9 < plain.recompile(overlap="ring").memory["peak"] / plain.memory["peak"] < 1.02


def trained(shape: Shape, sizes: tuple[int, ...], names: tuple[str, ...], compile_: str) -> Any:
    """Loss and gradients of a step, and by kind the bytes that this rank has sent and that are announced."""
    model, x = target(shape)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    parallel = shardc.parallelize(model, mesh, {"x": shape.cut}, overlap="ring", compile=compile_)
    parallel(x).backward()
    parallel.zero_grad()
    traffic = parallel.shardc.conversion.comm.traffic[0]
    traffic.clear()
    loss = parallel(x)
    loss.backward()
    announced = Counter[str]()
    for each in parallel.program.collectives:
        announced[each.kind] += each.wire_bytes
    gradients = {name: whole(parameter.grad) for name, parameter in parallel.named_parameters()}
    return loss.detach(), gradients, traffic.bytes, announced


@pytest.mark.parametrize("compile_", few(["eager", "inductor"], "eager"))
def test_on_real_ranks_a_step_is_that_of_one_device_and_sends_what_is_announced(gloo: GlooPool, compile_: str) -> None:
    shape = Shape()
    model, x = target(shape)
    model(x).backward()
    for loss, gradients, sent_, announced in gloo.run(trained, shape, (2, 2), ("dp", "tp"), compile_):
        torch.testing.assert_close(loss, model(x).detach(), rtol=0, atol=1e-10)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10)
        assert sent_ == announced and announced[RING]


class Alive(TorchDispatchMode):
    """``most``: bytes of what ops have made, besides the ``given`` tensors, that are alive at a time."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.made, self.most = list[ref[Tensor]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [ref(result)] if isinstance(result, Tensor) else []
        storages = [x.untyped_storage() for each in self.made if (x := each()) is not None]
        alive = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in self.given}
        self.most = max(self.most, sum(alive.values()))
        return result


GATHERS = [
    (1, ("b t k, k n -> b t n",), False, (2, 4, 6), (6, 5)),
    (0, ("t b k, k n -> t b n",), False, (3, 2, 6), (6, 5)),
    (0, ("b k, n k -> n b", "b k, n k -> b n"), True, (3, 6), (5, 6), (4, 6)),
    (1, ("e t k, e k n -> e t n",), False, (2, 3, 6), (2, 6, 5)),
    (0, ("t b k, n k -> b t n", "t b k, k m -> t b m"), True, (4, 2, 6), (5, 6), (6, 7)),
]
SCATTERS = [
    (1, ("b t k, k n -> b t n",), (1, 8, 6), (6, 5)),
    (1, ("b t k, k n -> b t n",), (2, 8, 6), (6, 5)),
    (0, ("t b k, n k -> t b n", "n m, b t m -> t b n"), (8, 2, 6), (5, 6), (5, 7), (2, 8, 7)),
]


def held(target: Any, dim: int, specs: tuple[str, ...], *rest: Any) -> tuple[int, int]:
    """The bytes that a ring of this rank holds at most, results included, and those that are announced."""
    keeps, shapes = (rest[:1], rest[1:]) if target is gather_dots else ((), rest)
    comm = TorchComm(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    columns = [[torch.ones(shape)] for shape in shapes]
    mocks = [mock.patch.object(module, "is_traced", lambda: False) for module in (distributed, ring)]
    with mocks[0], mocks[1], Alive([x for (x,) in columns]) as alive:  # a mode sees the ops, but traces nothing
        results = getattr(ring, target.__name__)(comm, ("tp",), dim, specs, *keeps, *columns)
    made = [TensorType.of(each) for each in (results[0] if target is gather_dots else results)]
    operands = [TensorType.of(each) for (each,) in columns]
    args = None, ("tp",), dim, specs, *keeps
    return alive.most, sum(each.nbytes for each in made) + dots_workspace(target, args, 4, operands, made)


def test_a_ring_holds_what_is_announced(gloo: GlooPool) -> None:
    for case in [(gather_dots, *each) for each in GATHERS] + [(dots_scatter, *each) for each in SCATTERS]:
        for found, announced in gloo.run(held, *case):
            assert found == announced, case
