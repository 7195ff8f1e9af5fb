"""Passes run once: the next process, and the other ranks of a job, read what they have made."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc import Mesh, P, ShardingError, Zero, compiler
from shardc.capture.objects import Returned
from shardc.ops import POINTWISE, RULES

MESH = Mesh(dp=2, tp=2)
IDS = torch.arange(32).reshape(4, 8) % 64
PLAN = {"input_ids": P("dp"), "labels": P("dp"), "*.q_proj.weight": P("tp"), "*.o_proj.weight": P(None, "tp")}


def llama() -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models for which passes ran."""
    found, run = list[str](), compiler.Making.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(self.model).__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(compiler.Making, "run", counted)
    return found


def trained(folder: Any, mesh: Any = MESH, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of two steps and of an evaluation, and the weights after."""
    parallel = shardc.parallelize(llama(), mesh, PLAN, cache=folder, **options)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), 0.1), list[float]()
    for _ in range(2):
        loss = parallel(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    with torch.no_grad():
        losses.append(float(parallel(input_ids=IDS, labels=IDS).loss))
    return losses, {name: whole(tensor).clone() for name, tensor in parallel.state_dict().items()}


def test_what_was_compiled_is_read_and_trains_alike(tmp_path: Path, passes: list[str]) -> None:
    expected = trained(None, zero=Zero("dp", 3))
    passes.clear()
    first = trained(tmp_path, zero=Zero("dp", 3))
    assert len(passes) == len(os.listdir(tmp_path)) == 2  # with gradients, and without
    passes.clear()
    second = trained(tmp_path, zero=Zero("dp", 3))
    assert not passes
    for losses, weights in (first, second):
        assert losses == expected[0]
        assert all(torch.equal(weights[name], expected[1][name]) for name in weights)


def test_what_is_asked_of_a_program_that_was_read(tmp_path: Path, passes: list[str]) -> None:
    one, other = (
        shardc.compile(llama(), MESH, PLAN, kwargs={"input_ids": IDS, "labels": IDS}, cache=tmp_path) for _ in "ab"
    )
    assert len(passes) == 1
    assert one.dump() == other.dump() and one.collectives == other.collectives
    assert one.memory == other.memory and one.shardings == other.shardings
    assert {name: str(each) for name, each in one.choices().items()} == {
        name: str(each) for name, each in other.choices().items()
    }
    for each in one.collectives:
        assert str(one.explain(each.name)) == str(other.explain(each.name))
    assert len(passes) == 1
    loss = other.simulate(input_ids=IDS, labels=IDS)[0].loss
    assert torch.allclose(loss, llama()(input_ids=IDS, labels=IDS).loss, atol=1e-5)
    for name in ("capture", "propagate", "localize"):
        assert str(one.at(name).graph) == str(other.at(name).graph)
    again = other.recompile(annotations={"input_ids": P("dp"), "labels": P("dp")})
    assert {each.axes for each in again.collectives} == {("dp",)}


class Remembering(nn.Module):
    """Changes an object among its arguments, and returns it; a plain tensor is a constant of its program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(4, 4)), torch.arange(4.0)

    def forward(self, x: Tensor, memory: dict[str, Any]) -> dict[str, Any]:
        memory["sum"] = memory["sum"] + x @ self.weight + self.shift
        memory["count"] = 1
        return {"memory": memory, "kind": "sums", "mean": memory["sum"].mean()}


def test_outputs_objects_and_constants(tmp_path: Path, passes: list[str]) -> None:
    for _ in range(2):
        model, memory = Remembering(), {"sum": torch.zeros(4, 4)}
        parallel = shardc.parallelize(model, MESH, {"x": P("dp")}, cache=tmp_path)
        result = parallel(torch.ones(4, 4), memory)
        assert result["memory"] is memory and (memory["count"], result["kind"]) == (1, "sums")
        assert torch.equal(memory["sum"].detach(), torch.full((4, 4), 4.0) + model.shift)
        outputs = dict(parallel.program.convention.outputs)
        assert outputs["memory"] == Returned("memory")
    assert len(passes) == 1


def test_a_damaged_file_is_written_again(tmp_path: Path, passes: list[str]) -> None:
    expected = trained(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    passes.clear()
    assert trained(tmp_path)[0] == expected[0]
    assert len(passes) == 2
    passes.clear()
    assert trained(tmp_path)[0] == expected[0]
    assert not passes


def test_a_file_under_the_name_of_another_key_is_not_read(tmp_path: Path, passes: list[str]) -> None:
    expected = trained(tmp_path)
    one, other = tmp_path.iterdir()
    one.write_bytes(other.read_bytes())
    passes.clear()
    assert trained(tmp_path)[0] == expected[0]
    assert len(passes) == 1


class Filling(nn.Module):
    """Makes a tensor of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0]) + torch.tensor([], dtype=torch.float64).sum()


def test_tensors_of_numbers(tmp_path: Path, passes: list[str]) -> None:
    for _ in range(2):
        parallel = shardc.parallelize(Filling(), Mesh(dp=2), {"x": P("dp")}, cache=tmp_path)
        assert torch.equal(parallel(torch.ones(2, 2)), Filling()(torch.ones(2, 2)))
    assert len(passes) == 1


class Looking(nn.Module):
    """Its program depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0] * 2


def test_programs_that_depend_on_values_are_not_kept(tmp_path: Path) -> None:
    parallel = shardc.parallelize(Looking(), Mesh(dp=2), {"x": P("dp")}, cache=tmp_path)
    x = torch.tensor([[1.0], [-1.0], [2.0], [3.0]])
    assert torch.equal(parallel(x), x[x.sum(1) > 0] * 2)
    assert not os.listdir(tmp_path)


class Scaled(nn.Module):
    """Reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALES[0]


SCALES = [1.0]


def test_what_the_models_code_reads_is_seen(tmp_path: Path, passes: list[str]) -> None:
    for SCALES[0] in (1.0, 3.0):
        parallel = shardc.parallelize(Scaled(), Mesh(dp=2), {"x": P("dp")}, cache=tmp_path)
        assert torch.equal(parallel(torch.ones(4, 2)), torch.full((4, 2), SCALES[0]))
    assert len(passes) == len(os.listdir(tmp_path)) == 2


def test_with_rules_of_the_users_nothing_is_kept(tmp_path: Path, passes: list[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(RULES, torch.ops.aten.sin.default, POINTWISE)  # taken back after the test
    shardc.register_rule(torch.ops.aten.sin.default, "... -> ...", override=True)
    trained(tmp_path)
    assert passes and not os.listdir(tmp_path)


def test_a_file_of_something_else_is_said_and_written_again(tmp_path: Path, passes: list[str]) -> None:
    expected = trained(tmp_path)
    for path in tmp_path.iterdir():
        text = (10).to_bytes(8, "big") + b"0123456789 and more"
        path.write_bytes(hashlib.sha256(path.stem.encode() + text).digest() + text)
    passes.clear()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert trained(tmp_path)[0] == expected[0]
    assert len(passes) == 2


def test_the_folder_may_be_shared(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        trained(tmp_path / "new" / "folder")
    finally:
        os.umask(before)
    for path in (tmp_path / "new" / "folder").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardingError, match="cache="):
        shardc.parallelize(llama(), MESH, PLAN, cache=tmp_path / "file")


def trained_on_ranks(folder: str) -> Any:
    """The losses, and for how many programs passes ran on this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found, run = list[bool](), compiler.Making.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(True)
        return run(self, *args, **kwargs)

    compiler.Making.run = counted  # type: ignore[method-assign]
    try:
        losses, _ = trained(folder, mesh)
    finally:
        compiler.Making.run = run  # type: ignore[method-assign]
    return losses, len(found)


def differing_models(folder: str) -> str:
    """The error of ranks whose models differ."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh() if torch.distributed.get_rank() == 2 else nn.ReLU())
    parallel = shardc.parallelize(model, mesh, {"input": P("dp")}, cache=folder)
    try:
        parallel(torch.ones(4, 4))
    except shardc.ShardingError as error:
        return str(error)
    return ""


def test_ranks_whose_models_differ_do_not_read_what_another_has_compiled(tmp_path: Path, gloo: GlooPool) -> None:
    for error in gloo.run(differing_models, str(tmp_path)):
        assert "ranks 0 and 2" in error and "tanh" in error
