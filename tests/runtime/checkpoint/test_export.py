"""An exported folder is one that transformers loads, with the same outputs, whatever mesh the model was on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from gpt import GPT, Config, plan
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardc
from shardc import CheckpointError, Mesh, Zero
from shardc.options import Pipeline
from shardc.runtime.comm.distributed import make_device_mesh


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("file_bytes", [5 * 10**9, 2000])
def test_transformers_loads_the_folder_and_computes_the_same(file_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = gpt2(), torch.arange(8)[None]
    shardc.export(tmp_path, shardc.parallelize(model, Mesh(dp=2)), file_bytes=file_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert ("model.safetensors.index.json" in names) == (file_bytes == 2000) != ("model.safetensors" in names)
    shardc.export(tmp_path, model, file_bytes=5 * 10**9 + 2000 - file_bytes)  # the other form takes its place
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_the_dtype_of_the_parameters_is_that_of_the_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shardc.export(tmp_path, gpt2(dtype="float32").to(torch.bfloat16))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


CONFIG = Config(vocab=12, context=4, layers=1, heads=3, width=6, tied=True)
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp x tp with ZeRO 3": ({"dp": 2, "tp": 2}, {"zero": Zero("dp", 3)}),
    "pipeline": ({"dp": 2, "pp": 2}, {"pipeline": Pipeline("pp", microbatches=2)}),
    "DTensors that shardc did not make": ({"dp": 2, "tp": 2}, {}),
}
COMPILED = pytest.mark.sweep


def new_gpt() -> nn.Module:
    torch.manual_seed(1)
    return GPT(CONFIG)


def cut(model: Any, mesh: Any) -> Any:
    """The model with plain DTensors, cut in the first and the last dim."""
    for module in model.modules():
        for name, each in module.named_parameters(recurse=False):
            value = distribute_tensor(each.detach(), mesh, [Shard(0), Shard(each.ndim - 1)])
            module.register_parameter(name, nn.Parameter(value))
    model.head.weight = model.tokens.weight
    return model


def exported(path: str, name: str) -> None:
    sizes, options = PLANS[name]
    mesh = make_device_mesh(Mesh(**sizes))
    args = torch.zeros(2, 4, 4, dtype=torch.int64)
    model = cut(new_gpt(), mesh)
    if options:
        model = shardc.parallelize(new_gpt(), mesh, plan(Mesh.of(mesh)), args=tuple(args), **options)
    shardc.export(path, model)
    path_of_nothing = Path(path) / "model.safetensors" / "below"
    try:
        shardc.export(path_of_nothing, model)
    except CheckpointError as error:
        assert "cannot be written" in str(error) and "not a directory" in str(error)
    else:
        raise AssertionError("an export into a file")
    dist.barrier()


@pytest.mark.parametrize("name", [pytest.param(n, marks=COMPILED if PLANS[n][1] else []) for n in PLANS])
def test_the_whole_model_is_written_from_any_plan(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    gloo.run(exported, str(tmp_path), name)
    found, expected = safetensors.torch.load_file(tmp_path / "model.safetensors"), new_gpt().state_dict()
    assert set(found) == set(expected) - {"head.weight"}
    for key, each in found.items():
        assert torch.equal(each, expected[key]), key
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_extra_state_has_no_place_in_the_format(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"count": 1}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = nn.Sequential(Counting(2, 2))
    with pytest.raises(CheckpointError, match="extra state of 0._extra_state"):
        shardc.export(tmp_path, model)
    shardc.save(tmp_path, model)
    other = nn.Sequential(Counting(2, 2))
    shardc.load(tmp_path, other)
    assert other[0].count == 1


def test_the_headers_are_those_that_transformers_writes(tmp_path: Path) -> None:
    shardc.export(tmp_path, nn.Linear(2, 2))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    shardc.export(tmp_path, nn.Linear(2, 2), file_bytes=8)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 24} and set(index["weight_map"]) == {"weight", "bias"}
