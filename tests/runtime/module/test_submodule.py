"""A module of a parallel module that is called by itself runs a program, with the shardings of the whole."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import MEGATRON, MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc import Mesh, P, ShardingError


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


# Classes and hooks.


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_hooks_and_a_call_of_a_modules_own_run_once() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    class Shifted(nn.Sequential):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + 1

    torch.manual_seed(0)
    model = Shifted(Doubled(8, 8), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    model[2].register_forward_hook(lambda module, args, output: output + 5)
    parallel = shardc.parallelize(model.eval(), Mesh(dp=2, tp=2), {"0.weight": P("tp")})
    x = torch.randn(4, 8)
    torch.testing.assert_close(parallel(x), model(x))
    for one, other in zip(parallel, model, strict=True):
        torch.testing.assert_close(one(x), other(x))


def test_a_method_of_the_users_may_be_named_like_ours_and_classes_make_models() -> None:
    class Own(nn.Sequential):
        def _forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

        def forward(self, x: Tensor) -> Tensor:
            return self._forward(x)

    parallel = shardc.parallelize(Own(nn.Linear(8, 8)), Mesh(tp=2), {"0.weight": P("tp")})
    x = torch.randn(4, 8)
    torch.testing.assert_close(parallel._forward(x), parallel(x))
    assert type(type(parallel)(nn.Linear(8, 8))) is Own
    assert not hasattr(parallel[:1], "shardc")


def test_a_registry_of_subclasses_does_not_hear_of_ours() -> None:
    registry: dict[str, type] = {}

    class Listed(nn.Module):
        def __init_subclass__(cls, name: str) -> None:
            registry[name] = cls

    class Model(Listed, name="model"):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    shardc.parallelize(Model(), Mesh(tp=2), {"layer.weight": P("tp")})
    assert registry == {"model": Model}


def test_hooks_and_a_forward_of_the_parallel_module_are_copied_and_taken_away() -> None:
    parallel: Any = shardc.parallelize(two_layers(), Mesh(tp=2), {"0.weight": P("tp")})
    x = torch.randn(4, 8)
    plain = parallel(x)
    parallel.register_forward_hook(lambda module, args, output: output * 2)
    old = parallel.forward
    parallel.forward = lambda x: old(x) + 1
    torch.testing.assert_close(copy.deepcopy(parallel)(x), (plain + 1) * 2)
    del parallel.forward
    torch.testing.assert_close(parallel(x), plain * 2)


def test_dropout_of_a_part_in_training_draws_anew_in_each_call() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
    parallel: Any = shardc.parallelize(model, Mesh(tp=2), {"0.0.weight": P("tp")})
    parallel.eval()
    parallel[0].train()
    x = torch.randn(4, 8)
    assert not torch.equal(parallel(x), parallel(x)) and not torch.equal(parallel[0](x), parallel[0](x))


def test_a_parallel_module_is_no_part_of_another_one_and_has_no_shallow_copy() -> None:
    parallel = shardc.parallelize(two_layers(), Mesh(tp=2), {"0.weight": P("tp")})
    with pytest.raises(ShardingError, match="its module '0' is parallel already"):
        shardc.parallelize(nn.Sequential(parallel), Mesh(tp=2))
    with pytest.raises(ShardingError, match="it is parallel already"):
        shardc.parallelize(parallel, Mesh(tp=2))
    with pytest.raises(ShardingError, match=r"copy.copy: a parallel Sequential"):
        copy.copy(parallel)
