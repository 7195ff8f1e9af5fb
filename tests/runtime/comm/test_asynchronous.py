"""On gloo a collective runs while the executor computes, and buckets arrive as on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.runtime.comm import messages
from shardc.runtime.comm.comm import BucketLayout, Places, Results, Rows, Tensors
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh
from shardc.runtime.comm.dtensor import shard
from shardc.runtime.execute.executor import Executor
from shardc.runtime.simulator import cut_inputs, simulate

PLANS = {
    "tensor parallel": (Mesh(tp=4), {"*.down.weight": P(None, "tp")}),
    "stored in pieces": (Mesh(dp=4), {"x": P("dp"), "param:*": P("dp")}),
    "both": (Mesh(dp=2, tp=2), {"x": P("dp"), "*.down.weight": P(None, "tp")}),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


class NotingComm(TorchComm):
    """Notes when a collective starts and when it is waited for."""

    notes: list[str]

    def start(self, kind: str, xs: Tensors, *args: Any, is_own: bool = False, into: Places = ()) -> Results:
        self.notes.append("start")
        return self._noting(super().start(kind, xs, *args, is_own=is_own, into=into))

    def start_bucket(self, layout: BucketLayout, rows: Rows, into: Sequence[Places] = ()) -> Callable[[], Rows]:
        self.notes.append("start")
        return self._noting(super().start_bucket(layout, rows, into))

    def _noting(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            self.notes.append("wait")
            return finish()

        return noting


def run_noting(mesh: Mesh, annotations: dict[str, P]) -> tuple[list[str], bool]:
    """What went on in backward, in order; and whether all results are those of virtual ranks."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    compiled = shardc.compile(Layers(), mesh, annotations, args=(x,))
    program, values = compiled.program, compiled.inputs(compiled.program, (x,))
    comm = NotingComm(make_device_mesh(mesh))
    comm.notes = []
    multiply = torch.mm

    def noted(*operands: Tensor, **kwargs: Any) -> Tensor:
        comm.notes.append("dot")
        return multiply(*operands, **kwargs)

    pieces, executor = [cut_inputs(program, values)[comm.position]], Executor(program, comm)
    outputs, saved = executor.forward(pieces)
    comm.notes.clear()
    with mock.patch.object(torch, "mm", noted):  # generated code calls it by this name
        gradients = executor.backward(saved, pieces)
    notes = list(comm.notes)  # of backward alone: what the forward part returned may be waited for after it
    found = [a if a is not None else b for a, b in zip(outputs[0], gradients[0], strict=True)]
    ends = zip(found, simulate(program, values), program.results, strict=True)
    pairs = [(a, shard(b, program.sharding(node), comm.position)) for a, b, node in ends if b is not None and node]
    return notes, all(a is not None and torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.mark.sweep
def test_contractions_run_while_a_collective_is_under_way(gloo: Any) -> None:
    for name, (mesh, chosen) in PLANS.items():
        for notes, is_right in gloo.run(run_noting, mesh, chosen):
            assert is_right, name
            assert notes.count("start") == notes.count("wait"), "every collective is waited for"
            meanwhile = "".join({"start": "<", "wait": ">", "dot": "."}[note] for note in notes)
            assert "tp" not in mesh.axis_names or "<.." in meanwhile, meanwhile


def run_counting(bucket: int) -> list[int]:
    """Of a step of stage 3, how many reductions were under way when one more was started."""
    device_mesh = make_device_mesh(Mesh(dp=4))
    parallel = shardc.parallelize(Layers(), device_mesh, {"x": P("dp")}, zero=shardc.Zero(), bucket=bucket)
    under_way, found, reduce = [0], [], messages.reduce_scatter

    def counting(*args: Any) -> Callable[[], list[Tensor]]:
        found.append(under_way[0])
        under_way[0] += 1
        finish = reduce(*args)

        def finished() -> list[Tensor]:
            under_way[0] -= 1
            return finish()

        return finished

    with mock.patch.object(messages, "reduce_scatter", counting):
        parallel(torch.ones(4, 8)).backward()
    return found


def test_at_most_two_reductions_keep_their_operands_alive(gloo: Any) -> None:
    assert gloo.run(run_counting, 1) == [[0] + [1] * 11] * 4


class Saved(nn.Module):
    """A sum that forward makes of its shards and backward alone reduces."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.exp(w * x.sum()).sum()


def run_backward_twice(mesh: Mesh) -> bool:
    """Whether a second backward through one forward gives what the first gave."""
    x, w = torch.randn(8, generator=torch.Generator().manual_seed(0)), torch.ones(4, requires_grad=True)
    model = shardc.parallelize(Saved(), make_device_mesh(mesh), {"x": P("tp")})
    loss = model(x, w)
    first, second = (torch.autograd.grad(loss, w, retain_graph=True)[0] for _ in range(2))
    return torch.equal(first, second)


def test_a_second_backward_finds_saved_values_unchanged(gloo: Any) -> None:
    assert all(gloo.run(run_backward_twice, Mesh(tp=4)))
