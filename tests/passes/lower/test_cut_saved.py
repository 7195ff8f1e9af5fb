"""cut_saved: ranks save pieces of what all of them would save, and the numbers are the same to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_pool import GlooPool
from gpt import DATA, MEGATRON, Config
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import measured, measured_by_rank, without_optimizer
from one_device import assert_close
from parallel_models import whole
from random_model import draw_model
from small_gpt import annotations_on, drawn_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Compiled, Mesh, P, Pipeline, Precision, Remat, Zero, api
from shardc.costs.memory import memory_by_rank
from shardc.language.errors import OptionError
from shardc.program.collective import saved_slice
from shardc.report.explain.advice import advise

SIZE = Config(layers=3, vocab=96, context=32, width=32, heads=4)
ODD = Config(layers=2, vocab=51, context=15, width=20, heads=4, dropout=0.1)
BLOCKS = Remat("blocks.*")
OVER_TP = {"blocks.*": "tp"}
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "recomputed": (Mesh(dp=2, tp=2), {"remat": BLOCKS}),
    "all saved": (Mesh(dp=2, tp=2), {}),
    "over three": (Mesh(tp=3), {}),
    "in place of a dim": (Mesh(dp=2, tp=2), {"saved": {"*": P(None, "tp")}}),
    "over two axes": (Mesh(tp=2, sp=2), {"saved": {"*": ("sp", "tp")}}),
    "stored in pieces too": (Mesh(dp=2, tp=2), {"zero": Zero("dp", 3), "remat": BLOCKS}),
    "pieces of parameters too": (Mesh(dp=2, tp=2), {"zero": Zero(("tp", "dp"), 3, gather_over="dp")}),
    "each alone": (Mesh(dp=2, tp=2), {"bucket": 1}),
    "in bfloat16": (Mesh(dp=2, tp=2), {"precision": Precision()}),
    "within a budget": (Mesh(dp=2, tp=2), {"remat": Remat(budget=250_000)}),
    "1f1b": (Mesh(pp=2, tp=2), {"pipeline": Pipeline("pp", 4), "remat": BLOCKS}),
    "zb-v": (Mesh(pp=2, tp=2), {"pipeline": Pipeline("pp", 4, schedule="zb-v", balance="flops")}),
    "interleaved, offloaded": (
        Mesh(pp=2, dp=2, tp=2), {"pipeline": Pipeline("pp", 4, schedule="interleaved", offload=True), "remat": BLOCKS},
    ),
}  # fmt: skip


def target(size: Config = SIZE, batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, args = drawn_gpt(size, batch)
    return model.double(), args


def compile_gpt(mesh: Mesh, size: Config = SIZE, **options: Any) -> tuple[Compiled, tuple[Tensor, ...]]:
    model, args = target(size)
    return shardc.compile(model, mesh, annotations_on(mesh), args=args, **options), args


def gathers(compiled: Compiled) -> list[shardc.Collective]:
    return [each for each in compiled.collectives if "saved" in each.cause]


@pytest.mark.parametrize("size", [SIZE, ODD], ids=["even", "odd, with dropout"])
@pytest.mark.parametrize("name", PLANS)
def test_less_is_saved_and_the_numbers_are_the_same_to_the_bit(name: str, size: Config) -> None:
    mesh, options = PLANS[name]
    with_pieces, args = compile_gpt(mesh, size, **{"saved": {"*": "tp"}, **options})
    without, _ = compile_gpt(mesh, size, **{**options, "saved": None})
    (loss, gradients), (expected, of_expected) = (each.simulate(*args) for each in (with_pieces, without))
    assert torch.equal(loss, expected) and gradients.keys() == of_expected.keys()
    for key, gradient in gradients.items():
        assert torch.equal(gradient, of_expected[key]), key
    assert gathers(with_pieces) and not gathers(without)
    if "budget" not in name:
        assert with_pieces.memory["saved"] < without.memory["saved"]


@pytest.mark.parametrize("name", [name for name in PLANS if "pipeline" not in PLANS[name][1]])
def test_what_is_counted_is_alive(name: str) -> None:
    mesh, options = PLANS[name]
    compiled, args = compile_gpt(mesh, **{"saved": {"*": "tp"}, **options})
    found, wanted = measured(compiled, *args), without_optimizer(compiled.memory)
    assert found["saved"] == wanted["saved"]
    assert found["peak"] == wanted["peak"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved, offloaded"])
def test_what_is_counted_of_a_pipeline_is_alive(name: str) -> None:
    mesh, options = PLANS[name]
    compiled, args = compile_gpt(mesh, saved={"*": "tp"}, **options)
    offload = options["pipeline"].offload
    found = [without_optimizer(each, offload) for each in memory_by_rank(compiled.program)]
    assert found == measured_by_rank(compiled, *args)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_that_every_rank_would_save_is_saved_once(ranks: int) -> None:
    model, args = target()
    whole_, pieces = (shardc.compile(model, Mesh(tp=ranks), args=args, saved=saved) for saved in (None, {"*": "tp"}))
    others = SIZE.context * 8 + 8  # positions depend on no input, and are not sent; a count is one number
    assert (whole_.memory["saved"] - others) == ranks * (pieces.memory["saved"] - others)


def test_blocks_that_are_recomputed_send_one_gather_more_each() -> None:
    (plain, _), (cut, _) = (compile_gpt(Mesh(tp=4), remat=BLOCKS, saved=saved) for saved in (None, OVER_TP))
    inputs = 8 * SIZE.context * SIZE.width * 8  # bytes of a block's input; attention's sum is as large, and saved too
    pieces = 2 * SIZE.layers
    assert plain.memory["saved"] - cut.memory["saved"] == pieces * inputs * 3 // 4
    added = Counter((each.phase, each.kind) for each in cut.collectives)
    added -= Counter((each.phase, each.kind) for each in plain.collectives)
    assert added == {("backward", "all_gather"): SIZE.layers}
    assert sum(each.wire_bytes for each in gathers(cut)) == pieces * inputs * 3 // 4


def test_layers_are_gathered_one_ahead() -> None:
    deep = Config(layers=8, vocab=96, context=32, width=32, heads=4)
    (plain, _), (cut, _) = (compile_gpt(Mesh(tp=4), deep, remat=BLOCKS, saved=saved) for saved in (None, OVER_TP))
    inputs = 8 * SIZE.context * SIZE.width * 8
    assert plain.memory["peak"] - cut.memory["peak"] >= (2 * deep.layers - 6) * inputs * 3 // 4


def test_a_piece_is_taken_where_a_stage_reads_and_as_much_crosses() -> None:
    options: dict[str, Any] = {"pipeline": Pipeline("pp", 4), "remat": BLOCKS}
    sent = []
    for saved in (None, OVER_TP):
        compiled, _ = compile_gpt(Mesh(pp=2, tp=2), saved=saved, **options)
        sent.append([(each.name, each.wire_bytes) for each in compiled.collectives if each.kind == "send"])
    assert sent[0] == sent[1]
    stages = {each.stage for each in gathers(compiled)}
    assert stages == {0, 1}


def test_a_budget_counts_pieces() -> None:
    mesh, budget = Mesh(tp=4), 150_000
    with pytest.raises(OptionError, match=r"Remat\(budget=150000\)"):
        compile_gpt(mesh, remat=Remat(budget=budget))
    compiled, _ = compile_gpt(mesh, remat=Remat(budget=budget), saved={"*": "tp"})
    assert compiled.memory["saved"] <= budget


def test_pieces_are_sent_as_they_are_where_other_values_go_in_codes() -> None:
    wire = {"tp": "bf16"}
    (plain, args), (cut, _) = (
        compile_gpt(Mesh(tp=2), saved=saved, wire=wire, remat=BLOCKS) for saved in (None, {"*": "tp"})
    )
    assert not any(each.codec for each in gathers(cut)) and any(each.codec for each in cut.collectives)
    (loss, gradients), (expected, of_expected) = (each.simulate(*args) for each in (cut, plain))
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradient, of_expected[key]) for key, gradient in gradients.items())


def test_a_key_is_about_what_modules_read() -> None:
    only, _ = compile_gpt(Mesh(tp=2), saved={"blocks.1": "tp"})
    modules = {only.whole.source(node).module for node in only.whole.calls if node.target is saved_slice}
    assert not gathers(compile_gpt(Mesh(tp=2), saved={"blocks.*": ["tp"], "*": None})[0])
    assert modules and all(each.startswith(("blocks.1", "blocks.0")) for each in modules)


@settings(max_examples=10)
@given(st.data())
def test_random_models_compute_the_same(data: st.DataObject) -> None:
    model, x = draw_model(data)
    mesh = data.draw(st.sampled_from([Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(tp=3), Mesh(pp=2, tp=2), Mesh(pp=2, tp=3)]))
    saved = {"*": data.draw(st.sampled_from(["tp", P("tp"), P(None, "tp"), P(None, None, "tp")]))}
    pipeline = Pipeline("pp", 3) if "pp" in mesh.axis_names else None
    annotations = {"x": P("dp")} if "dp" in mesh.axis_names else {}
    loss = model(x)
    loss.backward()
    try:
        compiled = shardc.compile(model, mesh, annotations, args=(x,), saved=saved, pipeline=pipeline)
    except shardc.ShardingError as error:
        assert "the whole batch in the middle of a step" in str(error)
        return
    found, gradients = compiled.simulate(x)
    assert_close(found, loss, "the loss")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(gradients[name], parameter.grad, name)


def trained(mesh: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    model, args = target(ODD)
    parallel = shardc.parallelize(model, mesh, {**DATA, **MEGATRON}, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = parallel(*args)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(parallel(*args)))
    return losses, {name: whole(each).detach().clone() for name, each in parallel.named_parameters()}


def trained_on_ranks() -> tuple[list[float], dict[str, Tensor]]:
    return trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), remat=BLOCKS, saved=OVER_TP)


def test_ranks_of_processes_train_as_one_device(gloo: GlooPool) -> None:
    losses, parameters = trained(Mesh(dp=1, tp=1))
    virtual = trained(Mesh(dp=2, tp=2), saved={"*": "tp"})
    for found, values in (virtual, *gloo.run(trained_on_ranks)):
        assert found == pytest.approx(losses, abs=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_lengths_share_a_program() -> None:
    model, _ = target()
    options: dict[str, Any] = {"remat": BLOCKS, "saved": OVER_TP}
    parallel = shardc.parallelize(model, Mesh(dp=2, tp=2), {**DATA, **MEGATRON}, **options)
    with mock.patch("shardc.api._compiled", wraps=api._compiled) as compiled:
        for length in (8, 12, 9, 15, 14, 16, 18, 20):
            ids = torch.randint(SIZE.vocab, (4, length))
            parallel(ids, ids).backward()
    assert compiled.call_count == 2


def test_a_gather_is_explained_and_advised_on() -> None:
    compiled, _ = compile_gpt(Mesh(dp=2, tp=2), remat=BLOCKS, saved=OVER_TP)
    name = gathers(compiled)[0].name
    assert "saved={'blocks.*': 'tp'} keeps it cut over tp between uses" in str(compiled.explain(name))
    advice = advise(compiled, name)
    assert advice.suggestion is not None and advice.suggestion.change == "leave saved= out"
    assert advice.suggestion.python == "saved=None" and advice.suggestion.flags == "without --saved"


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(
        OptionError, match=r"saved=\{'blocks\.\*': 'tq'\}: 'tq'\n.*no axis of the mesh\n.*did you mean tp"
    ):
        compile_gpt(Mesh(tp=2), saved={"blocks.*": "tq"})
    with pytest.raises(OptionError, match=r"saved=\{'blcks\.\*': 'tp'\}.*\n.*matches none.*\n.*did you mean blocks"):
        compile_gpt(Mesh(tp=2), saved={"blcks.*": "tp"})
    with pytest.raises(
        OptionError, match=r"saved='tp'\n.*globs over modules to axes, or to where values are\n.*say saved=\{'blocks"
    ):
        compile_gpt(Mesh(tp=2), saved="tp")
    for entry in (3, (), P("tp", "dp"), P(), ("tp", 1)):
        with pytest.raises(OptionError, match="neither axes, nor a P with one dim cut, nor .*, nor None"):
            compile_gpt(Mesh(dp=2, tp=2), saved={"*": entry})
    for entry in (("tp", "tp"), P(None, ("tp", "tp"))):
        with pytest.raises(OptionError, match="'tp'\n.*an axis cuts a value once\n.*name it once"):
            compile_gpt(Mesh(dp=2, tp=2), saved={"*": entry})
    with pytest.raises(OptionError, match="''\n.*no glob over the paths of modules"):
        compile_gpt(Mesh(tp=2), saved={"": "tp"})
    for part in ("tp:(1)1", "tp:zigzag"):
        with pytest.raises(OptionError, match="no axis of the mesh"):
            compile_gpt(Mesh(tp=2), saved={"*": P(None, part)})
    with pytest.raises(OptionError, match="'pp'\n.*no axis of the mesh"):
        compile_gpt(Mesh(pp=2, tp=2), pipeline=Pipeline("pp", 4), saved={"*": "pp"})
    compiled, _ = compile_gpt(Mesh(dp=2, tp=2), saved={"*": "dp", "blocks.0.mlp": P(None, None, None, "tp")})
    assert any(
        "saved names 'blocks.0.mlp', but nothing that these modules read is cut so" in note
        for note in compiled.program.notes
    )
