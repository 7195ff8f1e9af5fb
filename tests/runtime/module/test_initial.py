"""All ranks start from the values of the first: whatever their own are, and each receives what it stores."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from parallel_models import DATA, FSDP, MEGATRON, MLP, doubles, whole
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero
from shardc.runtime.comm import scatter
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.comm.dtensor import same_bits

PLANS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "data": ({"dp": 4}, DATA, {}),
    "tensor": ({"tp": 4}, {"down.weight": P(None, "tp")}, {}),
    "data and tensor": ({"dp": 2, "tp": 2}, MEGATRON, {}),
    "fsdp by annotation": ({"dp": 4}, FSDP, {}),
    **{f"zero {stage}": ({"dp": 4}, DATA, {"zero": Zero("dp", stage)}) for stage in (1, 2, 3)},
    "pipeline": ({"dp": 2, "pp": 2}, DATA, {"pipeline": Pipeline(microbatches=2, cuts=("down",))}),
}


def seeded(seed: int, make: Any = MLP) -> Any:
    torch.manual_seed(seed)
    return make().double()


def train_from(plan: str, others: str, has_args: bool) -> tuple[float, list[float]]:
    """How far two steps, weights included, are from those of rank 0's model alone; ``others`` come as it says."""
    sizes, annotations, options = PLANS[plan]
    rank = dist.get_rank()
    model, alone = seeded(rank), seeded(0)
    if others == "meta" and rank:
        model.to("meta")
    mesh = make_device_mesh(Mesh(**sizes))
    first = {name: each.clone() for name, each in alone.state_dict().items()}
    example = {"args": tuple(doubles(0))} if has_args or "pipeline" in options else {}
    parallel = shardc.parallelize(model, mesh, annotations, **options, **example)
    runs = [(each, torch.optim.AdamW(each.parameters(), lr=0.1)) for each in (parallel, alone)]
    if example or others == "seeds":
        assert all(torch.equal(whole(each), first[name]) for name, each in parallel.state_dict().items())
    off = []
    for step in range(2):
        losses = [each(*doubles(step)) for each, _ in runs]
        off.append((losses[0] - losses[1]).abs().item())
        for loss, (_, optimizer) in zip(losses, runs, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    last = alone.state_dict()
    return max((whole(each) - last[name]).abs().max().item() for name, each in parallel.state_dict().items()), off


def check(gloo: GlooPool, plan: str, others: str, has_args: bool) -> None:
    for weights, losses in gloo.run(train_from, plan, others, has_args):
        assert weights < 1e-12 and max(losses) < 1e-12


@pytest.mark.parametrize(("plan", "others", "has_args"), [
    ("data", "seeds", False), ("data and tensor", "meta", True), ("zero 3", "meta", False), ("pipeline", "meta", True),
])  # fmt: skip
def test_all_ranks_train_the_model_of_the_first(gloo: GlooPool, plan: str, others: str, has_args: bool) -> None:
    check(gloo, plan, others, has_args)


@pytest.mark.sweep
@pytest.mark.parametrize("others", ["seeds", "meta"])
@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_train_the_model_of_the_first_under_every_plan(gloo: GlooPool, plan: str, others: str) -> None:
    for has_args in (False, True):
        check(gloo, plan, others, has_args)


class Odd(nn.Module):
    """Tensors of many dtypes and sizes that do not divide, tied, frozen, unread, not persistent, or attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.fused = nn.Linear(6, 15, bias=False)
        self.head = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.randn(()), requires_grad=False)
        self.gate = nn.Parameter(torch.randn(3))
        self.unread = nn.Parameter(torch.randn(5, 3, dtype=torch.float16))
        self.late = nn.Linear(7, 3)
        self.tied = nn.Parameter(torch.zeros(0))
        self.tied = self.gate
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("turn", torch.complex64)):
            self.register_buffer(name, torch.randn(3, 5, dtype=dtype))
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.table = torch.randn(4, 5).t()

    def forward(self, ids: Tensor, is_late: bool = False) -> Tensor:
        a, b, c = self.fused(self.embedding(ids)).chunk(3, -1)
        x = a * b.sigmoid() + torch.where(self.mask, c, self.table[:, 1].to(c.dtype)) * self.scale * self.gate.sum()
        x = x + (self.fp16.float() + self.bf16.float() + self.turn.abs()).sum(0).to(x.dtype)
        logits = self.head(x + self.count)
        return (self.late(logits) if is_late else logits).square().mean()


ODD = {"ids": P("dp"), "fused.weight": P(shardc.blocks(3, "tp")), "embedding.weight": P("tp"), "late.weight": P("tp")}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, buffers and plain attributes of a model, whole."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "table": model.table}
    return {name: whole(each.detach()) for name, each in tensors.items()}


def odd_state(on_meta: bool, has_args: bool) -> tuple[list[str], list[float], list[str]]:
    """The tensors that differ in a bit from rank 0's, how far two losses are off, and types of stored pieces."""
    rank, mesh = dist.get_rank(), make_device_mesh(Mesh(dp=2, tp=2))
    torch.manual_seed(rank)
    model = Odd()
    if on_meta and rank:
        with torch.device("meta"):
            model = Odd()
    torch.manual_seed(0)
    alone, numbers = Odd(), torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(1))
    before = {name: each.clone() for name, each in state_of(model).items()}
    parallel = shardc.parallelize(model, mesh, ODD, args=(numbers,) if has_args else None)
    losses = [(parallel(numbers, late) - alone(numbers, late)).abs().item() for late in (False, True)]
    expected, found = state_of(alone), state_of(parallel)
    assert all(same_bits(each, before[name]) for name, each in state_of(model).items() if not each.is_meta)
    assert parallel.tied is parallel.gate and not parallel.scale.requires_grad
    pieces = {name: tuple(each.to_local().shape) for name, each in parallel.named_parameters()}
    assert all(not each.is_meta for each in found.values())
    return [name for name, each in expected.items() if not same_bits(found[name], each)], losses, pieces


@pytest.mark.parametrize(("on_meta", "has_args"), [(True, True), (True, False), (False, True), (False, False)])
def test_tensors_of_every_kind_arrive_bit_for_bit(gloo: GlooPool, on_meta: bool, has_args: bool) -> None:
    results = gloo.run(odd_state, on_meta, has_args)
    assert [differing for differing, _, _ in results] == [[]] * 4
    assert max(max(losses) for _, losses, _ in results) < 1e-5
    assert [pieces["embedding.weight"] for _, _, pieces in results] == [(4, 6), (3, 6), (4, 6), (3, 6)]
    assert [pieces["late.weight"] for _, _, pieces in results] == [(2, 7), (1, 7), (2, 7), (1, 7)]
    assert [pieces["unread"] for _, _, pieces in results] == [(5, 3)] * 4


def refusal(make: Any, initial: str = "broadcast") -> str:
    """The error that this rank gets for its model."""
    with pytest.raises(ShardingError) as error:
        shardc.parallelize(make(), make_device_mesh(Mesh(dp=2, tp=2)), initial=initial)
    return str(error.value)


def with_difference(kind: str) -> nn.Module:
    """A model that differs on rank 2."""
    model = seeded(0)
    if dist.get_rank() == 2 and kind == "width":
        model.down = nn.Linear(16, 9).double()
    if dist.get_rank() == 2 and kind == "dtype":
        model.up.bias.data = model.up.bias.data.float()
    if dist.get_rank() == 2 and kind == "name":
        model.register_buffer("more", torch.zeros(2))
    if dist.get_rank() == 2 and kind == "value":
        model.down.weight.data[3, 2] += 1e-12
    return model


def mismatches() -> dict[str, str]:
    found = {kind: refusal(lambda: with_difference(kind)) for kind in ("width", "dtype", "name")}  # noqa: B023
    return found | {"value": refusal(lambda: with_difference("value"), "check")}


def test_models_that_differ_are_refused_on_every_rank(gloo: GlooPool) -> None:
    every, alike = "all ranks must come with one model", "make the model alike on every rank"
    expected = {
        "width": f"parameter 'down.bias': f64[8] on rank 0, f64[9] on rank 2\n  {every}\n  {alike}",
        "dtype": f"parameter 'up.bias': f64[16] on rank 0, f32[16] on rank 2\n  {every}\n  {alike}",
        "name": f"buffer 'more': nothing on rank 0, f32[2] on rank 2\n  {every}\n  {alike}",
        "value": "parameter 'down.weight': its values on rank 0 and rank 2 differ\n"
        f"  initial='check': {every}\n"
        "  seed all ranks alike before they make it, or leave initial out to start from rank 0's",
    }
    assert gloo.run(mismatches) == [expected] * 4


def on_meta() -> list[str]:
    rank = dist.get_rank()
    none = refusal(lambda: MLP().to("meta"))
    one = refusal(lambda: MLP().to("meta") if rank == 3 else MLP(), "check")
    return [none, one, refusal(lambda: MLP().to("meta"), "trust")]


def test_values_that_no_rank_can_start_from_are_refused(gloo: GlooPool) -> None:
    remedy = "write shardc.init_parameters(model, mesh), or model.to_empty(device='cpu') and its initialisers"
    who, others = "parameter 'down.bias': ", "it is on meta, as are 3 others"
    expected = [
        f"{who}on rank 0 {others}\n  all ranks start from the values of the first rank of the mesh\n  {remedy}",
        f"{who}on rank 3 {others}\n  initial='check' compares the values of all ranks\n  {remedy}",
        f"{who}{others}\n  initial='trust' sends no values from other ranks\n  {remedy}",
    ]
    assert gloo.run(on_meta) == [expected] * 4


def own_values() -> list[bool]:
    """Whether a rank has rank 0's values and its own, as trust, check, DTensors and the optimizer of a user have it."""
    mesh, rank = make_device_mesh(Mesh(dp=2, tp=2)), dist.get_rank()
    own, first = seeded(rank), seeded(0)
    trusted = shardc.parallelize(own, mesh, initial="trust")
    assert torch.equal(trusted.up.weight.to_local(), own.up.weight)
    checked = shardc.parallelize(first, mesh, initial="check")
    assert torch.equal(checked.up.weight.to_local(), first.up.weight)
    drawn = shardc.init_parameters(MLP().to("meta"), mesh, MEGATRON, seed=3)
    before = drawn.down.weight.to_local().clone()
    parallel = shardc.parallelize(drawn, mesh, MEGATRON)
    assert torch.equal(parallel.down.weight.to_local(), before)
    if rank:
        own.to("meta")
    waiting = shardc.parallelize(own, mesh, MEGATRON)
    assert waiting.up.weight.to_local().is_meta == (rank > 0)
    twin = copy.deepcopy(waiting)
    held = torch.optim.SGD(waiting.parameters(), lr=1.0).param_groups[0]["params"]
    results = [each(*doubles(0)).item() for each in (waiting, twin, first)]
    assert all(one is other for one, other in zip(held, waiting.parameters(), strict=True))
    return [abs(each - results[-1]) < 1e-12 for each in results]


def test_values_are_kept_where_a_user_says_so(gloo: GlooPool) -> None:
    assert gloo.run(own_values) == [[True] * 3] * 4


class Many(nn.Module):
    """Four large layers and 20 small vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
        self.vectors = nn.ParameterList(torch.randn(8) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum() + sum(each.sum() for each in self.vectors)


def placing(annotations: dict[str, P], bucket: int, is_real: bool) -> tuple[int, int, int, int]:
    """Bytes and messages that this rank sends, bytes that it stores, and its peak of new memory while placing."""
    mesh, sent, send = make_device_mesh(Mesh(tp=4)), list[int](), scatter._send
    model = Many() if is_real or dist.get_rank() == 0 else Many().to("meta")
    shardc.parallelize(Many(), mesh, annotations, args=(torch.zeros(4, 512),))  # compile once, for what torch caches
    with mock.patch.object(scatter, "BUCKET", bucket), mock.patch.object(scatter, "_send") as counted:
        counted.side_effect = lambda data, *rest: (sent.append(data.nbytes), send(data, *rest))[1]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            parallel = shardc.parallelize(model, mesh, annotations, args=(torch.zeros(4, 512, device="meta"),))
    stored = sum(each.to_local().nbytes for each in parallel.parameters())
    return sum(sent), len(sent), stored, peak(profiled)


def peak(profiled: Any) -> int:
    """The most bytes that were allocated at a time."""
    events = profiled.profiler.kineto_results.experimental_event_tree()
    allocated: list[tuple[int, int]] = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            allocated.append((event.start_time_ns, event.extra_fields.alloc_size))
    total = most = 0
    for _, size in sorted(allocated):
        total += size
        most = max(most, total)
    return most


LARGE, SMALL = 4 * 2**20, 4 * 2048 + 20 * 32  # bytes of the matrices, and of the vectors


def test_each_rank_receives_what_it_stores_and_no_rank_sends_it_more_than_twice(gloo: GlooPool) -> None:
    cut = gloo.run(placing, {"layers.*.weight": P("tp")}, 25 * 2**20, False)
    stored = [each for _, _, each, _ in cut]
    assert stored[0] < LARGE / 4 + SMALL and sum(sent for sent, *_ in cut) == sum(stored[1:])
    assert [count for _, count, _, _ in cut] == [5, 1, 0, 0]  # a message for each cut piece, and a tree for the rest
    whole = gloo.run(placing, {}, 25 * 2**20, False)
    size = LARGE + SMALL
    assert [sent for sent, *_ in whole] == [2 * size, size, 0, 0]


@pytest.mark.sweep
@pytest.mark.parametrize("is_real", [True, False])
def test_placing_needs_memory_for_what_is_stored_and_one_message(gloo: GlooPool, is_real: bool) -> None:
    for plan in ({"layers.*.weight": P("tp")}, {}):
        for sent, _, stored, most in gloo.run(placing, plan, 2**18, is_real):
            assert most < stored + LARGE / 4 + 2**18, (sent, stored, most)
