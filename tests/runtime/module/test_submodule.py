"""A module of a parallel module that is called by itself runs a program, with the shardings of the whole."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import torch
from gloo_pool import GlooPool
from parallel_models import MEGATRON, MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc import Mesh, P


class Encoded(nn.Module):
    """An encoder that callers run apart from the head, as encoder-decoders are run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()

    def encoded_twice(self, x: Tensor) -> Tensor:
        """A method of the user's, which calls modules and the model."""
        return whole(self.encoder(self.encoder(x)).mean()) + self(x)


def whole(x: Any) -> Tensor:
    result: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return result


CUT = {"encoder.0.weight": P("tp", None), "encoder.2.weight": P(None, "tp"), "x": P("dp"), "head.weight": P(None, "tp")}


def compared(mesh: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    alone = Encoded()
    return alone, shardc.parallelize(alone, mesh, CUT)


def trained(model: Any) -> tuple[float, Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    hidden = model.encoder(x)
    loss = whole(hidden.square().mean()) + model(x) + model.encoded_twice(x)
    loss.backward()
    return loss.item(), whole(model.encoder[0].weight.grad)


def check(mesh: Any) -> list[str]:
    """Compare with one device; the collectives of the last program."""
    alone, parallel = compared(mesh)
    (loss, gradient), (found, found_gradient) = map(trained, (alone, parallel))
    assert abs(loss - found) < 1e-6
    torch.testing.assert_close(found_gradient, gradient)
    return [each.kind for each in parallel.program.collectives if each.phase == "forward"]


def test_it_trains_with_calls_of_a_part_on_virtual_ranks() -> None:
    assert "all_reduce" in check(Mesh(dp=2, tp=2))


def on_gloo() -> bool:
    return bool(check(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))))


def test_it_trains_with_calls_of_a_part_on_the_ranks_of_a_job(gloo: GlooPool) -> None:
    assert gloo.run(on_gloo) == [True] * 4


def test_a_part_has_a_program_with_the_annotations_of_the_whole() -> None:
    _, parallel = compared(Mesh(dp=1, tp=2))
    parallel.encoder(torch.randn(4, 8))
    program = parallel.program.program
    cut = {
        put.name: str(program.sharding(node)) for put, node in zip(program.inputs, program.placeholders, strict=True)
    }
    assert (cut["encoder.0.weight"], cut["encoder.2.weight"]) == ("[_@tp, _]", "[_, _@tp]")


def test_the_signature_of_a_part_is_its_own() -> None:
    alone, parallel = compared(Mesh(dp=1, tp=2))
    assert inspect.signature(parallel.encoder.forward) == inspect.signature(alone.encoder.forward)


def test_copies_of_a_part_and_of_the_whole_run_apart() -> None:
    _, parallel = compared(Mesh(dp=1, tp=2))
    x = torch.randn(4, 8)
    expected = parallel.encoder(x)
    part, twin = copy.deepcopy(parallel.encoder), copy.deepcopy(parallel)
    loaded = pickle.loads(pickle.dumps(parallel.encoder))
    with torch.no_grad():
        for each in parallel.parameters():
            each.zero_()
    for other in (part, twin.encoder, loaded):
        torch.testing.assert_close(other(x), expected)
    assert not torch.equal(parallel.encoder(x), expected)
    assert len(twin.shardc.variants) == 1


def test_a_forward_that_a_user_set_on_a_part_is_what_runs() -> None:
    def triple(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * 3

    model = MLP()
    model.up.forward = MethodType(triple, model.up)  # type: ignore[method-assign]
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=2), MEGATRON)
    x = torch.randn(4, model.up.in_features)
    torch.testing.assert_close(parallel.up(x), nn.functional.linear(x, model.up.weight) * 3)


def test_a_class_of_its_own_is_kept() -> None:
    alone, parallel = compared(Mesh(dp=1, tp=2))
    assert isinstance(parallel, Encoded)
    assert isinstance(parallel, type(shardc.parallelize(alone, Mesh(dp=2))).__mro__[1])
    assert type(parallel).__name__ == "Encoded"
