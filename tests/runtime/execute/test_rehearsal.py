"""A step of every plan runs where no tensor has values: nothing in it reads a number, or makes a tensor on the host."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsal import StallError, fake_job, watched
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import P
from shardc.runtime.comm.distributed import TorchComm
from shardc.runtime.execute import part
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.rewrite import collective_of

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from ours import PLANS
from trainer import SIZES, Job, Trainer, batches, new_model

RANKS = 4
EAGER = [name for name in PLANS if "inductor" not in name]  # Inductor compiles nothing for meta


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with fake_job(RANKS):
        yield


def trainer(plan: str) -> Trainer:
    with torch.device("meta"):
        model = new_model(SIZES["tiny"], has_experts=plan == "shardc ep")
    return PLANS[plan].trainer(model, Job(RANKS, "loop", device="meta"), SIZES["tiny"])


def step(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Forward and backward; all gradients are on meta."""
    model(*args, **kwargs).backward()
    assert {each.grad.device.type for each in model.parameters() if each.grad is not None} == {"meta"}


@pytest.mark.parametrize("plan", EAGER)
def test_a_step_of_a_plan_waits_for_no_number_and_makes_nothing_on_the_host(plan: str) -> None:
    rehearsed = trainer(plan)
    tokens, targets = batches(SIZES["tiny"], "meta")[0][0]
    step(rehearsed.model, tokens, targets)  # compiles
    rehearsed.optimizer.step()
    with watched():
        step(rehearsed.model, tokens, targets)
    rehearsed.optimizer.step()


class Dropping(nn.Module):
    """Draws in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.dropout(self.first(x), 0.5)
        return self.second(hidden).square().mean()


def dropping() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        model, x = Dropping(), torch.empty(8, 8)
    mesh = init_device_mesh("meta", (2, 2), mesh_dim_names=("dp", "tp"))
    return shardc.parallelize(model, mesh, {"x": P("dp"), "first.weight": P("tp")}), x


def test_a_step_that_draws_copies_no_seed_to_the_device() -> None:
    model, x = dropping()
    step(model, x)
    with watched():
        step(model, x)


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], object]) -> None:
    """Let every forward do this to the first of its inputs, too."""
    forward = Executor.forward

    def faulty(self: Executor, inputs: Any, *args: Any) -> Any:
        fault(next(each for each in inputs[0] if each is not None))
        return forward(self, inputs, *args)

    monkeypatch.setattr(Executor, "forward", faulty)


def test_a_number_that_the_runtime_reads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = dropping()
    step(model, x)
    plant(monkeypatch, lambda value: value.sum().item())
    with pytest.raises(RuntimeError, match="item"):
        step(model, x)


def test_a_tensor_that_the_runtime_makes_on_the_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = dropping()
    step(model, x)
    plant(monkeypatch, lambda value: torch.zeros(2))
    with pytest.raises(StallError, match="on cpu"), watched():
        step(model, x)


def test_a_collective_that_is_waited_for_where_it_is_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = dropping()
    step(model, x)
    start = TorchComm.start

    def wait_at_once(self: TorchComm, kind: str, xs: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        results = start(self, kind, xs, *args, **kwargs)()
        return lambda: results

    monkeypatch.setattr(TorchComm, "start", wait_at_once)
    with pytest.raises(StallError, match="waited for where it is started"), watched():
        step(model, x)


def test_a_collective_that_is_waited_for_before_its_first_reader_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the model is that of the op that a device would not begin."""

    def wait_before_the_next_call(graph: fx.Graph) -> dict[str, str]:
        waits = dict[str, str]()
        for start in filter(collective_of, list(graph.nodes)):
            with graph.inserting_before(start.next):
                wait = graph.call_function(operator.call, (start,))
                result = graph.call_function(operator.getitem, (wait, 0))
            start.replace_all_uses_with(result)
            wait.args = (start,)
            waits[wait.name] = start.name
        return waits

    monkeypatch.setattr(part, "with_waits", wait_before_the_next_call)
    model = trainer("shardc zero3").model
    tokens, targets = batches(SIZES["tiny"], "meta")[0][0]
    step(model, tokens, targets)
    with pytest.raises(StallError, match=r"waited for by .*\(gpt.py:\d+\), which does not read its result"), watched():
        step(model, tokens, targets)


def test_edges_from_neighbours_are_waited_for_at_their_first_reader() -> None:
    with torch.device("meta"):
        model, x = nn.Conv1d(3, 4, kernel_size=3, padding=1), torch.empty(2, 3, 16)
    mesh = init_device_mesh("meta", (RANKS,), mesh_dim_names=("x",))
    parallel = shardc.parallelize(model, mesh, {"input": P(None, None, "x")})
    parallel(x)  # compiles
    with watched() as seen:
        parallel(x).sum().backward()
    assert "windows" in seen.started
