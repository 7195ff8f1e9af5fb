"""What would leave the process with a part of a parallel module is refused in words."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from parallel_models import MLP, batch

import shardc
from shardc import Mesh, P, ShardingError


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


def test_a_deep_copy_of_a_parallel_module_computes_the_same() -> None:
    parallel = shardc.parallelize(MLP(), Mesh(dp=2), {"x": P("dp")})
    twin = copy.deepcopy(parallel)
    assert torch.equal(twin(*batch(0)), parallel(*batch(0))) and twin.up.weight is not parallel.up.weight
