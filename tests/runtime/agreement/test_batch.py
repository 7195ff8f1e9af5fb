"""Plain inputs are the whole batch: ranks that bring different ones are told at that step, before a number is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from parallel_models import DATA, MEGATRON, MLP, batch
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero
from shardc.runtime.agreement.batch import BatchCheck
from shardc.runtime.comm.distributed import make_device_mesh

PLANS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "data": ({"dp": 4}, DATA, {}),
    "tensor": ({"tp": 4}, {"down.weight": P(None, "tp")}, {}),
    "zero 3": ({"dp": 4}, DATA, {"zero": Zero("dp", 3)}),
    "pipeline": ({"dp": 2, "pp": 2}, DATA, {"pipeline": Pipeline(microbatches=2, cuts=("down",))}),
    "data and tensor": ({"dp": 2, "tp": 2}, MEGATRON, {}),
}


def on(plan: str, **further: Any) -> Any:
    sizes, annotations, options = PLANS[plan]
    torch.manual_seed(0)
    example = {"args": batch(0)} if plan == "pipeline" else {}
    return shardc.parallelize(MLP(), make_device_mesh(Mesh(**sizes)), annotations, **options, **example, **further)


def changed(step: int, name: str, at: int) -> dict[str, Tensor]:
    """The batch of a step, of which at one step rank 2 has two rows in another order."""
    inputs = dict(zip("xy", batch(step), strict=True))
    if dist.get_rank() == 2 and step == at:
        inputs[name] = inputs[name][[1, 0, 2, 3]]
    return inputs


def refused(plan: str, at: int, check: str = "always") -> tuple[str, bool]:
    """The error of the step ``at``, and whether parameters are what they were before it and the next steps run."""
    parallel = on(plan, check=check)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(at):
        parallel(**changed(step, "y", at)).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: local(each).clone() for name, each in parallel.named_parameters()} if at else {}
    with pytest.raises(ShardingError) as error:
        parallel(**changed(at, "y", at)).backward()
    is_same = all(torch.equal(local(each), before[name]) for name, each in parallel.named_parameters()) if at else True
    assert all(each.grad is None for each in parallel.parameters())
    parallel(**changed(at + 1, "y", at)).backward()
    return str(error.value), is_same


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


TOLD = (
    "input '{}': it differs on rank 0 and rank {}\n  a plain input is the whole batch, on every rank\n"
    "  for each rank's own rows write shardc.shard_batch(batch, mesh, P('dp')), or for a DataLoader "
    "shardc.shard_loader(loader, mesh, P('dp'))"
)


def check_refused(gloo: GlooPool, plan: str, at: int) -> None:
    assert gloo.run(refused, plan, at) == [(TOLD.format("y", 2), True)] * 4


@pytest.mark.parametrize(("plan", "at"), [("data and tensor", 3), ("pipeline", 0)])
def test_a_batch_that_differs_is_refused_on_every_rank_at_its_step(gloo: GlooPool, plan: str, at: int) -> None:
    check_refused(gloo, plan, at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_that_differs_is_refused_under_every_plan(gloo: GlooPool, plan: str, at: int) -> None:
    check_refused(gloo, plan, at)


def modes() -> list[str]:
    """What is found in evaluation, in the loop of a DDP script, and by the other modes of check."""
    found, rank = [], dist.get_rank()
    model = on("data").eval()
    with torch.no_grad(), pytest.raises(ShardingError) as error:
        model(**changed(0, "x", 0))
    found.append(str(error.value))
    own = on("data")
    rows = [each + rank for each in batch(0)]  # each rank's own, as DDP takes them
    with pytest.raises(ShardingError) as error:
        own(*rows)
    found.append(str(error.value))
    sharded = [shardc.shard_batch(each, own.shardc.conversion.device_mesh, P("dp")) for each in rows]
    assert own(*sharded).item() > 0
    first, never = on("data", check="first"), on("data", check="never")
    for step in range(2):
        first(**changed(step, "x", 1))  # equal at first, then not
        never(**changed(step, "x", 0))
    with pytest.raises(ShardingError) as error:
        on("data", check="first")(**changed(0, "x", 0))
    found.append(str(error.value))
    with pytest.raises(ShardingError) as error:
        on("data", check="often")
    found.append(str(error.value))
    shardc.parallelize(MLP(), Mesh(dp=2), DATA, check="first", initial="check")(*batch(0))
    return found


def test_evaluation_is_compared_and_a_user_says_how_often(gloo: GlooPool) -> None:
    unknown = "parallelize: check='often'\n  there is no such check\n  say one of first, always, never"
    x = TOLD.format("x", 2)
    assert gloo.run(modes) == [[x, TOLD.format("x", 1), x, unknown]] * 4


def test_inputs_on_an_accelerator_are_compared_one_entry_later() -> None:
    check, sums = BatchCheck("always"), [("x", torch.arange(3))]
    check.note(sums, b"1")
    batch = check.take(is_forward=True)
    assert list(batch.numbers) == ["x"] and batch.digest and not check.take(is_forward=False).digest
    check._late = ["x"], torch.tensor([5]), torch.cuda.Event() if torch.cuda.is_available() else Done()
    assert check.take(is_forward=False).numbers == {"x": 5}
    check._late = ["x"], torch.tensor([6]), Done()
    check.note([], b"1")
    assert check.take(is_forward=True).numbers == {"x": 6} and not check.take(is_forward=False).numbers


class Done:
    def synchronize(self) -> None: ...
