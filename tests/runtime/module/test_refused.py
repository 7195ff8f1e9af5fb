"""What would leave the process with a part of a parallel module is refused in words."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import DATA, MLP, batch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jacobian, jvp, vhp
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc import Mesh, P, ShardingError
from shardc.runtime.comm.distributed import make_device_mesh


def test_pickling_a_parallel_module_is_refused_and_its_state_dict_is_not() -> None:
    parallel = shardc.parallelize(MLP(), Mesh(dp=2), {"x": P("dp")})
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(ShardingError) as refused:
            save(parallel)
        assert str(refused.value).splitlines() == [
            "pickle: a parallel MLP",
            "  its programs and process groups belong to this process",
            "  save it with shardc.save(path, module), or pickle its state_dict() and call parallelize again",
        ]
    state = pickle.loads(pickle.dumps(parallel.state_dict()))
    assert all(torch.equal(state[name], value) for name, value in parallel.state_dict().items())


def test_sharing_memory_of_a_parallel_module_is_refused() -> None:
    with pytest.raises(ShardingError, match="share_memory: a parallel MLP\\n  each rank of a mesh computes on tensors"):
        shardc.parallelize(MLP(), Mesh(dp=2), {"x": P("dp")}).share_memory()


def wrapped_by_ddp() -> str:
    with pytest.raises(ShardingError) as refused:
        DistributedDataParallel(shardc.parallelize(MLP(), make_device_mesh(Mesh(dp=4)), DATA))
    return str(refused.value)


def test_a_parallel_module_of_a_job_is_not_wrapped_by_ddp(gloo: GlooPool) -> None:
    expected = (
        "DistributedDataParallel: a parallel MLP\n"
        "  its gradients are reduced already, and its parameters are cut when the first call is compiled\n"
        "  leave it out: train the module itself"
    )
    assert gloo.run(wrapped_by_ddp) == [expected] * 4


def test_a_deep_copy_of_a_parallel_module_computes_the_same() -> None:
    parallel = shardc.parallelize(MLP(), Mesh(dp=2), {"x": P("dp")})
    twin = copy.deepcopy(parallel)
    assert torch.equal(twin(*batch(0)), parallel(*batch(0))) and twin.up.weight is not parallel.up.weight


def test_transforms_are_refused_and_calls_with_other_parameters_are_not() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), batch(0)[0]
    parallel = shardc.parallelize(model, Mesh(dp=2), {"input:input": P("dp")})
    parameters = {name: torch.zeros_like(each) for name, each in parallel.named_parameters()}
    for _ in range(2):  # before the first call and after it
        for transformed in (
            lambda: torch.func.vmap(parallel)(x[None]),
            lambda: torch.func.grad(lambda x: parallel(x).sum())(x),
            lambda: torch.func.jvp(parallel, (x,), (x,)),
        ):
            with pytest.raises(
                ShardingError, match=r"torch.func: a parallel Sequential\n.*vmap, grad and jvp.*\n.*autograd"
            ):
                transformed()
        assert not functional_call(parallel, parameters, (x,)).any()
        assert parallel(x).any()
    y = parallel(x.requires_grad_())
    with pytest.raises(ShardingError, match="torch.func: backward of a parallel model"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    with pytest.raises(ShardingError, match="torch.func: a parallel Sequential"), torch.no_grad():
        with forward_ad.dual_level():
            parallel(forward_ad.make_dual(x, x))


def test_second_derivatives_are_refused_and_never_zero() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), batch(0)[0]
    parallel = shardc.parallelize(model, Mesh(dp=2), {"input:input": P("dp")})
    for derivative in (hessian, partial(hvp, v=x), partial(vhp, v=x), partial(jvp, v=x)):
        with pytest.raises(RuntimeError, match="has no gradient itself"):
            derivative(lambda x: parallel(x).square().sum(), x)
    torch.testing.assert_close(jacobian(parallel, x), jacobian(model, x))
