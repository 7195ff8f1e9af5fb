"""cut_saved, the tier below: what is saved is in host memory or files until backward reads it, to the bit the same."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_pool import GlooPool
from gpt import DATA, MEGATRON, Config
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import measured, measured_by_rank, without_optimizer
from parallel_models import whole
from random_model import draw_model
from rehearsal import rehearse
from small_gpt import annotations_on, drawn_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Compiled, Mesh, P, Pipeline, Precision, Remat, Zero, api
from shardc.cli.main import main
from shardc.costs.memory import memory_by_rank
from shardc.costs.step import StepRecord
from shardc.language.errors import OptionError
from shardc.language.machine import Machine
from shardc.ops.tier import fetch, offload
from shardc.runtime.tier.files import folder_of
from shardc.runtime.tier.tier import TRANSFERRING

SIZE = Config(layers=3, vocab=96, context=32, width=32, heads=4)
ODD = Config(layers=2, vocab=51, context=15, width=20, heads=4, dropout=0.1)
BLOCKS = Remat("blocks.*")
H100 = Machine({"tp": "nvlink"}, "h100")  # type: ignore[dict-item, arg-type]
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "recomputed": (Mesh(dp=2, tp=2), {"remat": BLOCKS}),
    "over three": (Mesh(tp=3), {}),
    "in bfloat16 of zero": (Mesh(dp=2), {"precision": Precision(), "zero": Zero("dp", 3)}),
    "within a budget": (Mesh(dp=2), {"remat": Remat(budget=150_000)}),
    "1f1b": (Mesh(pp=2, dp=2), {"pipeline": Pipeline("pp", 4), "remat": BLOCKS}),
}


def target(size: Config = SIZE, batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return drawn_gpt(size, batch)


def compile_gpt(mesh: Mesh, size: Config = SIZE, **options: Any) -> tuple[Compiled, tuple[Tensor, ...]]:
    model, args = target(size)
    return shardc.compile(model, mesh, annotations_on(mesh), args=args, **options), args


def copies(compiled: Compiled, target: Any) -> list[Any]:
    return [node for node in compiled.program.calls if node.target is target]


@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_are_the_same_and_what_is_alive_is_predicted(name: str, tmp_path: Path) -> None:
    """At even sizes, or at odd ones with dropout."""
    mesh, options = PLANS[name]
    size = (SIZE, ODD)[len(name) % 2]
    without, args = compile_gpt(mesh, size, **options)
    below, _ = compile_gpt(mesh, size, saved={"*": tmp_path}, **options)
    loss, gradients = without.simulate(*args)
    found, of_found = below.simulate(*args)
    assert torch.equal(found, loss) and of_found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert torch.equal(of_found[key], gradient), key
    assert len(copies(below, fetch)) >= len(copies(below, offload)) > 0
    if "pipeline" in options:
        assert measured_by_rank(below, *args) == [without_optimizer(each) for each in memory_by_rank(below.program)]
    else:
        assert measured(below, *args) == without_optimizer(below.memory)
    if "budget" not in name and "bfloat16" not in name:  # else other values are saved, and casts of parameters
        assert below.memory["saved"] + below.memory["saved_below"] == without.memory["saved"]
    assert below.memory["saved"] < 0.2 * without.memory["saved"]
    assert not list(tmp_path.iterdir())


def trained(mesh: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Two backwards a step, of the first and the second loss, after both forwards."""
    model, args = target(ODD)
    parallel = shardc.parallelize(model, mesh, {**DATA, **MEGATRON}, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        pair = [parallel(*args), parallel(args[1], args[0])]
        for loss in pair:
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(each).detach().clone() for name, each in parallel.named_parameters()}


def trained_on_ranks(saved: Any) -> tuple[list[float], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return trained(mesh, zero=Zero("dp", 2), remat=BLOCKS, saved=saved)


def test_ranks_train_to_the_bit_as_without_it(gloo: GlooPool, tmp_path: Path) -> None:
    plain, saved = gloo.run(trained_on_ranks, None), {"*": tmp_path, "blocks.*": ("tp", "host")}
    for found, wanted in zip(gloo.run(trained_on_ranks, saved), plain, strict=True):
        assert found[0] == wanted[0]
        assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())
    assert not list(tmp_path.iterdir())


def files_alive(folder: Path) -> set[int]:
    """The files of tensors that are alive in a folder, once the thread that reads them has let go of the last one."""
    TRANSFERRING.submit(int).result()
    tensors = (each for each in gc.get_objects() if isinstance(each, Tensor) and folder_of(each) == str(folder))
    return {each.untyped_storage().data_ptr() for each in tensors}


def test_files_live_from_forward_to_backward_and_there_are_none_without_a_backward(tmp_path: Path) -> None:
    model, args = target(ODD)
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=1), DATA, saved={"*": tmp_path})
    with torch.no_grad():
        parallel(*args)
        assert not copies_of(parallel)
    for each in (parallel.eval(), parallel.train()):
        loss = each(*args)
        saved = parallel.program.memory["saved_below"]
        assert len(files_alive(tmp_path)) == 2 * copies_of(parallel) > 0 and saved > 0
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in parallel.parameters()]
        loss.backward()
        assert not files_alive(tmp_path)
        for parameter, gradient in zip(parallel.parameters(), first, strict=True):
            assert torch.equal(parameter.grad, 2 * gradient)
        parallel.zero_grad()


def copies_of(parallel: Any) -> int:
    return len(copies(parallel.program, offload))


@settings(max_examples=5)
@given(st.data())
def test_random_models_compute_the_same_to_the_bit(data: st.DataObject) -> None:
    model, x = draw_model(data)
    mesh = data.draw(st.sampled_from([Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(tp=3), Mesh(pp=2, tp=2)]))
    pipeline = Pipeline("pp", 3) if "pp" in mesh.axis_names else None
    annotations = {"x": P("dp")} if "dp" in mesh.axis_names else {}
    saved = {"*": data.draw(st.sampled_from(["host", ("tp", "host"), (P(None, "tp"), "host")]))}
    try:
        below, plain = (
            shardc.compile(model, mesh, annotations, args=(x,), saved=each, pipeline=pipeline) for each in (saved, None)
        )
    except shardc.ShardingError as error:
        assert "the whole batch in the middle of a step" in str(error)
        return
    (loss, gradients), (expected, of_expected) = (each.simulate(x) for each in (below, plain))
    assert torch.equal(loss, expected) and copies(below, offload)
    for name, gradient in of_expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_fetches_come_one_layer_ahead_and_no_step_waits_for_the_host() -> None:
    compiled, _ = compile_gpt(Mesh(tp=4), remat=BLOCKS, saved={"blocks.*": "host"}, links=H100)
    calls = [node.name for node in compiled.program.calls]
    inputs = [node.name for node in copies(compiled, fetch) if node.name.startswith("add")]  # of blocks, from the last
    first_of_block = [name for name in calls if "gelu_backward" in name]
    assert len(inputs) == len(first_of_block) == SIZE.layers
    for name, before in zip(inputs[1:], first_of_block, strict=False):
        assert calls.index(name) < calls.index(before)
    rehearse(compiled)


def test_every_view_of_a_program_has_the_bytes_that_go_down_and_up(tmp_path: Path) -> None:
    options: dict[str, Any] = {"remat": BLOCKS, "saved": {"blocks.*": ("tp", "host")}, "links": H100}
    compiled, _ = compile_gpt(Mesh(dp=2, tp=2), **options)
    piece = 8 * SIZE.context * SIZE.width * 4 // 4  # of a block's input; attention's sum is as large, and saved too
    count = 2 * SIZE.layers
    assert compiled.memory["saved_below"] == count * piece
    down, up = compiled.cost.copies
    assert (down.phase, down.way, down.count, down.bytes) == ("forward", "offloaded", count, count * piece)
    assert (up.phase, up.way, up.count, up.bytes) == ("backward", "fetched", count, count * piece)
    text = compiled.dump(only="memory")
    assert "forward   offloaded             6  49.2 kB" in text and "saved_below          49.2 kB" in text
    record = json.loads(compiled.dump("json", only="memory"))
    assert record["memory"]["saved_below"] == count * piece and [each["count"] for each in record["copies"]] == [6, 6]
    assert {each.way for each in StepRecord(compiled.program).entry().copies or ()} == {"fetched", "offloaded"}
    assert 'add_offloaded: f32[8@dp, 32, 32@tp] = offload(add_saved, "host")' in compiled.dump()
    for node in (copies(compiled, offload)[0], copies(compiled, fetch)[0]):
        assert "8.2 kB go" in str(compiled.explain(node.name)) and "in host memory" in str(compiled.explain(node.name))
    assert "keeps it cut over tp between uses" in str(compiled.explain(gathers(compiled)[0].name))


def gathers(compiled: Compiled) -> list[shardc.Collective]:
    return [each for each in compiled.collectives if "saved" in each.cause]


def test_a_last_layer_may_stay_and_lengths_share_a_program() -> None:
    model, _ = target(ODD)
    saved = {"blocks.*": "host", f"blocks.{ODD.layers - 1}*": None}
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=2), {**DATA, **MEGATRON}, remat=BLOCKS, saved=saved)
    with mock.patch("shardc.api._compiled", wraps=api._compiled) as compiled:
        for length in (8, 12, 9, 15):
            ids = torch.randint(ODD.vocab, (4, length))
            parallel(ids, ids).backward()
            below = (ODD.layers - 1) * 2 * 2 * length * ODD.width * 4
            assert parallel.program.memory["saved_below"] == below
    assert compiled.call_count == 2


def test_the_command_line_takes_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    target_ = [f"{Path(__file__).parents[3]}/examples/gpt.py:gpt", "--mesh", "dp=2,tp=2"]
    for text in ("blocks.*=host", "blocks.*=tp+host", "blocks.*=tp+/scratch,head=none"):
        assert main(["check", *target_, "--saved", text, "--fail-on", "saved_below>1B"]) == 1
    assert "saved_below>1B" in capsys.readouterr().out
    assert main(["cost", *target_, "--saved", "blocks.*=host"]) == 0
    assert "copies of a step" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["dump", *target_, "--saved", "blocks.*=tp/scratch"])
    assert "say 'h.*=tp', 'h.*=dp+tp' for two axes, 'h.*=host', or 'h.*=tp+/scratch'" in capsys.readouterr().err


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(OptionError, match=r"'host'\n  it is host memory, and an axis of the mesh\n  say P\('host'\)"):
        compile_gpt(Mesh(host=2), saved={"*": "host"})
    assert not copies(compile_gpt(Mesh(host=2), saved={"*": P(None, None, "host")})[0], offload)
    for entry in (("tp", "scratch"), (Path("scratch"), "tp"), ("host", "tp")):
        with pytest.raises(
            OptionError, match=r"(scratch|host)'\n  it is no axis of the mesh\n.*the absolute path of a f"
        ):
            compile_gpt(Mesh(tp=2), saved={"*": entry})
    for entry in (("host", P("tp")), (P("tp"), "tp", "host"), ("tp", 3)):
        with pytest.raises(OptionError, match="neither axes, nor a P with one dim cut, nor 'host' or the path"):
            compile_gpt(Mesh(tp=2), saved={"*": entry})
    pipeline = Pipeline("pp", 4, schedule="interleaved", chunks=3, offload=True)
    with pytest.raises(OptionError, match="both say where what is saved is\n  leave the tier out of saved"):
        compile_gpt(Mesh(pp=2), pipeline=pipeline, saved={"*": "host"})
    model, args = target(ODD)
    with pytest.raises(
        shardc.ShardingError, match="compiled code saves on the device\n  leave compile out, or the tier"
    ):
        shardc.parallelize(model, Mesh(dp=1), saved={"*": "host"}, compile="inductor")
    with pytest.raises(shardc.ShardingError, match=r"folder '/nowhere'.*\n.*No such file.*\n  make the folder"):
        shardc.parallelize(model, Mesh(dp=1), saved={"*": "/nowhere"})(*args)
    below, _ = compile_gpt(Mesh(dp=1), saved={"*": None, "tokens": "host"})
    assert any(
        "saved names 'tokens', but nothing that these modules read is saved so" in note for note in below.program.notes
    )
