"""A rank reads its shards of a folder, and has no more than one tensor in memory beside them."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from hf_models import SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import shardc
from shardc import CheckpointError, Mesh, P, Zero
from shardc.runtime.checkpoint.weights import weights_of
from shardc.runtime.comm.dtensor import shard

MB = 10**6
WIDTH, LAYERS = 2000, 6  # 16 MB a layer


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def resident(name: str) -> int:
    """Bytes of this process in memory, pages of mapped files among them, as the kernel counts them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def most_memory(folder: str) -> tuple[int, int]:
    """The memory that loading a folder takes at most, and what is stored then. Columns are cut: bytes of every page."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x, plan = torch.zeros(4, WIDTH), {"*.weight": P(None, "tp")}
    shardc.compile(layers(), mesh, plan, args=(x,))  # code is loaded, caches are full
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the most
    parallel = shardc.parallelize(layers(), mesh, plan, args=(x,), weights=folder)
    most = resident("VmHWM")
    own = [each.to_local() for each in parallel.parameters()]  # type: ignore[attr-defined]
    assert all(bool((each == i).all()) for i, each in enumerate(own))
    return most - before, sum(each.nbytes for each in own)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")
def test_a_rank_has_one_tensor_in_memory_beside_its_shards(gloo: GlooPool, tmp_path: Path) -> None:
    tensors = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    whole = sum(each.nbytes for each in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    for most, stored in gloo.run(most_memory, str(tmp_path)):
        assert stored == whole // 4
        assert most <= stored + 1.2 * WIDTH * WIDTH * 4 + 8 * MB < 0.75 * whole, f"{most / MB:.1f} MB"


# Tensors that transformers stores in other parts than a model has them.

EXPERTS = {"num_experts_per_tok": 2, "max_position_embeddings": 64}
MIXTRAL, QWEN = "mixtral", "qwen"
PLANS: dict[str, dict[str, Any]] = {
    "experts": {"annotations": {"input_ids": P("dp"), "*.experts.*_proj": P("tp")}},
    "rows of each expert": {"annotations": {"input_ids": P("dp"), "*.experts.down_proj": P(None, "tp")}},
    "zero": {"annotations": {"input_ids": P(("dp", "tp"))}, "zero": Zero("dp", 3)},
}


def made(kind: str, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        if kind == MIXTRAL:
            return MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=16))


def tokens() -> Tensor:
    return torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(0))


def stored_keys(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def loaded_and_saved(kind: str, plan: str, folder: str, into: str) -> float:
    """On the ranks of a job: the loss of a model on meta with the weights of a folder, which another folder gets."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel: Any = shardc.parallelize(made(kind, "meta"), mesh, **PLANS[plan], weights=folder)
    loss: float = parallel(input_ids=tokens(), labels=tokens()).loss.item()
    parallel.save_pretrained(into)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [MIXTRAL, QWEN])
def test_experts_are_read_from_tensors_of_their_own_and_saved_as_such(
    gloo: GlooPool, tmp_path: Path, kind: str, plan: str
) -> None:
    model = made(kind)
    model.save_pretrained(tmp_path / "in")
    assert any(".experts.3." in key for key in stored_keys(tmp_path / "in"))
    expected = model(input_ids=tokens(), labels=tokens()).loss.item()
    losses = gloo.run(loaded_and_saved, kind, plan, str(tmp_path / "in"), str(tmp_path / "out"))
    assert losses == pytest.approx([expected] * 4, abs=1e-6)
    assert stored_keys(tmp_path / "out") == stored_keys(tmp_path / "in")
    again = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(each, again[name]) for name, each in model.state_dict().items())


class Largest(TorchDispatchMode):
    """The most elements that a result of an op has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_experts_a_rank_makes_its_shard_alone(tmp_path: Path, dim: int) -> None:
    model, name = made(MIXTRAL), "model.layers.1.mlp.experts.gate_up_proj"
    model.save_pretrained(tmp_path)
    whole = model.state_dict()[name]
    sharding = P(*[None] * dim, "tp").sharding(Mesh(tp=4), tuple(whole.shape), name)
    value = weights_of(made(MIXTRAL, "meta"), tmp_path, lambda names: dict.fromkeys(names, torch.zeros(())))[name]
    for position in range(4):
        expected = shard(whole, sharding, position)
        piece = torch.zeros(expected.shape)
        with Largest() as largest:
            value.write(piece, sharding, position)
        assert torch.equal(piece, expected)
        assert largest.numel <= piece.numel() < whole.numel()


def test_layers_that_are_alike_are_traced_once(tmp_path: Path) -> None:
    values = weights_of(made(QWEN, "meta"), stored(made(QWEN)), lambda names: dict.fromkeys(names, torch.zeros(())))
    first, second = (values[f"model.layers.{i}.mlp.experts.gate_up_proj"] for i in range(2))
    assert first.program is second.program  # type: ignore[attr-defined]
    assert first.sources[0] is not second.sources[0]  # type: ignore[attr-defined]


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's state dict as its folder has it."""
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return state


def test_a_state_dict_may_have_the_names_of_a_folder_or_of_the_model() -> None:
    model = made(MIXTRAL)
    expected = model(input_ids=tokens()).logits
    for state in (stored(model), model.state_dict()):
        parallel = shardc.parallelize(made(MIXTRAL, "meta"), Mesh(dp=2), {"input_ids": P("dp")}, weights=state)
        torch.testing.assert_close(parallel(input_ids=tokens()).logits, expected)


def test_experts_that_do_not_fit_are_named() -> None:
    state = stored(made(MIXTRAL))
    lacks = {key: each for key, each in state.items() if ".1.block_sparse_moe.experts.3.w3" not in key}
    with pytest.raises(CheckpointError) as caught:
        shardc.parallelize(made(MIXTRAL, "meta"), Mesh(dp=2), weights=lacks)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "parameter 'model.layers.1.mlp.experts.gate_up_proj': it is stored as "
        "model.layers.1.block_sparse_moe.experts.0.w1.weight [64, 32], "
    )
    assert lines[0].endswith("(7 tensors)") and lines[1].startswith("  transformers cannot convert them: Sizes of ten")
    assert lines[2] == "  see that the folder is whole, or load it with from_pretrained and give that model"
    lacks = {key: each for key, each in state.items() if ".experts.3." not in key}
    with pytest.raises(CheckpointError, match=r"of shape \[4, 128, 32\]\n  the weights have \[3, 128, 32\]"):
        shardc.parallelize(made(MIXTRAL, "meta"), Mesh(dp=2), weights=lacks)
