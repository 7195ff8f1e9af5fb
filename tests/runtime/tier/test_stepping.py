"""Parameters that are stepped in backward are those of a step after it, to the bit, and gradients are gone at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from gpt import GPT, Config
from small_gpt import annotations_on
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardc
from shardc import Mesh, P, Pipeline, Precision, Remat, Zero
from shardc.language.errors import OrderError, ShardingError

SIZE = Config(layers=1, vocab=17, context=8, width=12, heads=2, tied=True)
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


class Scaled(torch.optim.SGD):
    """An optimizer whose step reads all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.1)
        assert norm > 0 or all(each.grad is None for group in self.param_groups for each in group["params"])
        super().step()


def trained(parallel: nn.Module, optimizer: Optimizer, inputs: Sequence[Tensor], is_early: bool, calls: int = 1,
            none: bool = True) -> list[Any]:  # fmt: skip
    """Losses and parameters of two steps, each of so many calls. ``none``: gradients are gone between steps."""
    losses = []
    for _ in range(2):
        for _ in range(calls - 1):
            parallel(*inputs).backward()
        loss = parallel(*inputs)
        if is_early:
            with shardc.step_in_backward(parallel, optimizer):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(each.grad is None for each in parallel.parameters())
        for each in () if none else parallel.parameters():
            each.grad = torch.zeros_like(each)
        losses.append(loss.item())
    return [*losses, *(each.detach().clone() for each in parallel.parameters())]


def same(found: list[Any], wanted: list[Any]) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def both_ways(mesh: Any, make: Any = ADAM, calls: int = 1, none: bool = True, **options: Any) -> tuple[int, bool]:
    """How many steps of one parameter there were, and whether the numbers are those of steps after backward."""
    torch.manual_seed(0)
    axes = mesh if isinstance(mesh, Mesh) else Mesh(**dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)))
    model, ids = GPT(SIZE), torch.randint(SIZE.vocab, (8, SIZE.context))
    found, counts = list[list[Any]](), list[int]()
    counting = register_optimizer_step_post_hook(lambda part, *_: counts.append(len(part.param_groups[0]["params"])))
    for is_early in (False, True):
        parallel = shardc.parallelize(copy.deepcopy(model), mesh, annotations_on(axes), **options)
        optimizer = make(parallel.parameters())
        counts.clear()
        found.append(trained(parallel, optimizer, (ids, ids), is_early, calls, none))
    counting.remove()
    return counts.count(1), same(*found)


NUMBER = len(list(GPT(SIZE).parameters()))
MESHES = [{"dp": 1}, {"dp": 2, "tp": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize(
    ("zero", "make", "calls", "none", "options"),
    [
        (Zero("dp", 3, offload="parameters"), ADAM, 1, True, {"remat": Remat("blocks.*")}),
        (Zero("dp", 3, offload="parameters"), SGD, 2, True, {}),
        (Zero("dp", 1, offload="optimizer"), SGD, 3, False, {"precision": Precision()}),
        (Zero("dp", 2, offload="optimizer"), partial(torch.optim.NAdam, foreach=True), 2, False, {}),
    ],
    ids=["streamed", "streamed, of two calls", "optimizer alone", "optimizer alone, of two calls"],
)
def test_numbers_are_those_of_steps_after_backward(
    axes: dict[str, int], zero: Zero, make: Any, calls: int, none: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    zero = Zero(zero.axis, zero.stage, offload=zero.offload, to=tmp_path)
    stepped, is_same = both_ways(Mesh(**axes), make, calls, none, zero=zero, **options)
    assert is_same and stepped == 2 * NUMBER


OFFLOADED = Zero("dp", 3, offload="parameters")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(Scaled, lr=0.1), {"zero": OFFLOADED}),
        (ADAM, {}),
        (ADAM, {"zero": OFFLOADED, "pipeline": Pipeline("pp", microbatches=2)}),
    ],
    ids=["an optimizer that reads all gradients", "without offload", "a pipeline"],
)
def test_all_is_stepped_at_the_end_of_the_block_where_it_must_be(make: Any, options: dict[str, Any]) -> None:
    mesh = Mesh(pp=2, dp=2) if "pipeline" in options else Mesh(dp=2)
    assert both_ways(mesh, make, **options) == (0, True)


@pytest.fixture
def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return shardc.parallelize(model, Mesh(dp=2), {"input": P("dp")}, zero=OFFLOADED), torch.randn(4, 4)


def test_groups_of_other_rates_schedulers_frozen_parameters_and_those_of_other_modules_are_stepped(
    linear: tuple[nn.Module, Tensor],
) -> None:
    parallel, x = linear
    torch.manual_seed(0)
    plain, heads = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [nn.Linear(4, 1), nn.Linear(4, 1)]
    heads[1].load_state_dict(heads[0].state_dict())
    for model, head in zip((parallel, plain), heads, strict=True):
        bias, *rest = sorted(model.parameters(), key=lambda each: each.ndim)
        bias.requires_grad_(False)
        groups = [{"params": rest[:1], "lr": 0.3}, {"params": [*rest[1:], *head.parameters()]}]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            with shardc.step_in_backward(model, optimizer):
                head(model(x)).square().sum().backward()
            scheduler.step()
    for a, b in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg="parallel")
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_a_parameter_with_a_hook_keeps_it(linear: tuple[nn.Module, Tensor]) -> None:
    parallel, x = linear
    seen = list[Tensor]()
    parallel[0].weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    before = [each.detach().clone() for each in parallel.parameters()]
    with shardc.step_in_backward(parallel, SGD(parallel.parameters())):
        parallel(x).sum().backward()
    assert len(seen) == 1 and not any(map(torch.equal, before, parallel.parameters()))


def twice(parallel: nn.Module, x: Tensor) -> None:
    parallel(x).sum().backward()
    parallel(x).sum().backward()


def of_two_calls(parallel: nn.Module, x: Tensor) -> None:
    (parallel(x).sum() + parallel(2 * x).sum()).backward()


def with_a_penalty(parallel: nn.Module, x: Tensor) -> None:
    (parallel(x).sum() + sum(each.square().sum() for each in parallel.parameters())).backward()


@pytest.mark.parametrize(
    ("call", "what"),
    [(twice, "a second backward"), (of_two_calls, "two calls"), (with_a_penalty, "another part of the loss")],
)
def test_gradients_that_come_after_a_step_are_refused(linear: tuple[nn.Module, Tensor], call: Any, what: str) -> None:
    parallel, x = linear
    with pytest.raises(OrderError, match=rf"(?s){what}.*\n  call optimizer.step\(\) after backward"):
        with shardc.step_in_backward(parallel, SGD(parallel.parameters())):
            call(parallel, x)
    optimizer = SGD(parallel.parameters())
    call(parallel, x)
    optimizer.step()  # as ever


def test_an_error_of_a_step_is_raised_and_nothing_more_is_stepped(linear: tuple[nn.Module, Tensor]) -> None:
    parallel, x = linear
    optimizer, steps = SGD(parallel.parameters()), list[int]()

    def fail(*_: Any) -> None:
        steps.append(1)
        raise ValueError("planted")

    planted = register_optimizer_step_pre_hook(fail)
    with pytest.raises(ValueError, match="planted"), shardc.step_in_backward(parallel, optimizer):
        parallel(x).sum().backward()
    planted.remove()
    assert 1 <= len(steps) <= 3
    with pytest.raises(ZeroDivisionError), shardc.step_in_backward(parallel, SGD(parallel.parameters())):
        raise ZeroDivisionError


def test_a_gradient_that_comes_while_a_parameter_is_stepped_is_seen() -> None:
    """Of the last parameter in backward, whose step takes a while."""
    model = nn.Sequential(nn.Embedding(300_000, 8), nn.Flatten(), nn.Linear(16, 1))
    parallel = shardc.parallelize(model, Mesh(dp=1), {}, zero=OFFLOADED)
    optimizer = ADAM(parallel.parameters())
    loss = parallel(torch.tensor([[1, 2], [3, 4]])).sum() + parallel[0].weight.square().sum()
    with pytest.raises(OrderError, match="another part of the loss"), shardc.step_in_backward(parallel, optimizer):
        loss.backward()


def clipping(optimizer: Optimizer, is_hook: bool) -> list[float]:
    """Let an optimizer clip the norm of its gradients in each of its steps; returns what the norms are."""
    norms, parameters = list[float](), optimizer.param_groups[0]["params"]

    def clip(*_: Any) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))

    if is_hook:
        optimizer.register_step_pre_hook(clip)
    else:
        step = optimizer.step
        optimizer.step = lambda *args: (clip(), step(*args))[1]  # type: ignore[method-assign,assignment]
    return norms


@pytest.mark.parametrize("is_hook", [True, False])
def test_what_is_done_around_a_step_of_the_optimizer_is_done_once(
    linear: tuple[nn.Module, Tensor], is_hook: bool
) -> None:
    parallel, x = linear
    twin, found = copy.deepcopy(parallel), list[list[Any]]()
    for model in (parallel, twin):
        optimizer = SGD(model.parameters())
        norms = clipping(optimizer, is_hook)
        if model is twin:
            model(x).sum().backward()
            optimizer.step()
        else:
            with shardc.step_in_backward(model, optimizer):
                model(x).sum().backward()
        found.append([*norms, *(each.detach() for each in model.parameters())])
    assert len(found[0]) == 5 and same(*found)


def test_a_block_is_used_again_and_two_modules_of_one_optimizer_have_blocks_in_each_other(
    linear: tuple[nn.Module, Tensor],
) -> None:
    parallel, x = linear
    other = shardc.parallelize(nn.Linear(4, 4), Mesh(dp=2), {"input": P("dp")}, zero=OFFLOADED)
    twins, found = [copy.deepcopy(parallel), copy.deepcopy(other)], list[list[Any]]()
    for first, second in ((parallel, other), twins):
        optimizer = SGD([*first.parameters(), *second.parameters()])
        blocks = [shardc.step_in_backward(each, optimizer) for each in (first, second)]
        for _ in range(2):
            loss = first(x).square().sum() + second(x).square().sum()
            if first is parallel:
                with blocks[0], blocks[1]:
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([each.detach() for each in (*first.parameters(), *second.parameters())])
    assert same(*found)


def test_a_norm_of_gradients_that_are_gone_is_refused(linear: tuple[nn.Module, Tensor]) -> None:
    parallel, x = linear
    with pytest.raises(OrderError, match="gradients are gone"):
        with shardc.step_in_backward(parallel, SGD(parallel.parameters())):
            parallel(x).sum().backward()
            parallel.clip_grad_norm_(1.0)  # type: ignore[operator]


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_scaler_of_gradients_that_are_gone_is_refused(linear: tuple[nn.Module, Tensor], is_inside: bool) -> None:
    parallel, x = linear
    optimizer, scaler = SGD(parallel.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)

    def step() -> None:
        with pytest.raises(OrderError, match="GradScaler: after step_in_backward"):
            scaler.step(optimizer)

    with shardc.step_in_backward(parallel, optimizer):
        scaler.scale(parallel(x).sum()).backward()
        if is_inside:
            step()
    if not is_inside:
        step()


def test_steps_in_backward_and_those_of_a_scaler_take_turns(linear: tuple[nn.Module, Tensor]) -> None:
    parallel, x = linear
    optimizer, scaler = SGD(parallel.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    with shardc.step_in_backward(parallel, optimizer):
        parallel(x).sum().backward()
    before = [each.detach().clone() for each in parallel.parameters()]
    scaler.scale(parallel(x).sum()).backward()
    scaler.step(optimizer)
    assert not any(map(torch.equal, before, parallel.parameters()))


def test_arguments_in_another_order_are_told(linear: tuple[nn.Module, Tensor]) -> None:
    parallel, _ = linear
    with pytest.raises(ShardingError, match=r"module=\.\.\.\): a SGD\n.*\n  say step_in_backward\(parallel, optimizer"):
        shardc.step_in_backward(SGD(parallel.parameters()), parallel)  # type: ignore[arg-type]


def on_ranks(calls: int) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return both_ways(mesh, calls=calls, zero=OFFLOADED, remat=Remat("blocks.*"))


@pytest.mark.parametrize("calls", [1, 3])
def test_ranks_step_in_backward(gloo: GlooPool, calls: int) -> None:
    assert gloo.run(on_ranks, calls) == [(2 * NUMBER, True)] * 4


def apart() -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parallel = shardc.parallelize(nn.Linear(4, 4), mesh, {"input": P("dp")}, zero=OFFLOADED)
    optimizer = SGD(parallel.parameters())
    loss = parallel(torch.ones(4, 4)).sum()
    try:
        if mesh.get_rank() == 1:
            loss.backward()
        else:
            with shardc.step_in_backward(parallel, optimizer):
                loss.backward()
    except ShardingError as error:
        return str(error)
    return ""


def test_ranks_of_which_one_steps_after_backward_are_told(gloo: GlooPool) -> None:
    assert all("in step_in_backward" in message for message in gloo.run(apart))
