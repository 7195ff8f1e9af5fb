"""Models of transformers with positions cut, unchanged; and attention in rings on real ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from attending import Attending, draw, kinds_sent
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardc import Mesh, P, Pipeline, compile, parallelize

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=8)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    ),
}  # fmt: skip


def check_model(
    model: nn.Module, mesh: Mesh, length: int, has_mask: bool = False, axis: str = "cp", **options: Any
) -> Any:
    """The compiled step of a model; its loss and gradients must be those of one device."""
    batch = "dp" if "dp" in mesh.axis_names else None
    ids = torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    if has_mask:
        inputs["attention_mask"] = (torch.arange(length) >= torch.tensor([0, 3, 0, 7]).unsqueeze(1)).long()
    compiled = compile(model, mesh, dict.fromkeys(inputs, P(batch, axis)), kwargs=inputs, **options)
    check_compiled_model(compiled, model, inputs)
    return compiled


def check_compiled_model(compiled: Any, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """The loss and gradients of a compiled step must be those of a model on one device."""
    outputs, gradients = compiled.simulate(**inputs)
    loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(outputs.loss, loss, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("has_mask", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_with_positions_cut(name: str, has_mask: bool) -> None:
    torch.manual_seed(0)
    check_model(MODELS[name](), Mesh(cp=4), 20, has_mask)


@pytest.mark.parametrize(("name", "has_mask"), [("llama", False), ("mistral", True), ("gpt2", True)])
def test_models_of_transformers_train_with_positions_in_zigzag(name: str, has_mask: bool) -> None:
    """Ranks send keys, values and sums; logits come back in order."""
    torch.manual_seed(0)
    compiled = check_model(MODELS[name](), Mesh(cp=4), 24, has_mask, "cp:zigzag", attention="ring")
    kinds = Counter(kinds_sent(compiled) + kinds_sent(compiled, "backward"))
    assert kinds == {"ring_attention": 2, "ring_attention_backward": 2, "overlap_add": 2}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, cp=3), {}),
        (Mesh(dp=2, cp=2), {"axis": "cp:zigzag"}),
        (Mesh(pp=2, cp=2), {"pipeline": Pipeline("pp", microbatches=2), "axis": "cp:zigzag"}),
        (Mesh(pp=2, cp=2), {"pipeline": Pipeline("pp", microbatches=2)}),
        (Mesh(pp=2, dp=2, cp=2), {"pipeline": Pipeline("pp", microbatches=2, schedule="zb-h1")}),
    ],
    ids=["dp", "zigzag", "pipeline in zigzag", "pipeline", "zero bubble"],
)
def test_a_ring_goes_with_data_parallelism_and_pipelines(mesh: Mesh, options: Any) -> None:
    torch.manual_seed(0)
    compiled = check_model(MODELS["llama"](), mesh, 19, attention="ring", **options)
    assert kinds_sent(compiled).count("ring_attention") == 2
    assert "all_gather" not in {each.kind for each in compiled.collectives}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(cp=8), {}),
        (Mesh(dp=2, cp=2), {"axis": "cp:zigzag", "attention": "ring"}),
        (Mesh(pp=2, cp=2), {"pipeline": Pipeline("pp", microbatches=2), "attention": "ring"}),
    ],
    ids=["ring", "zigzag", "pipeline"],
)
def test_gpt2_drops_by_default_and_alike_on_every_mesh(mesh: Mesh, options: Any) -> None:
    """With the dropout that its configuration has by default, of attention too, which goes round in tiles."""
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model, axis = hf.GPT2LMHeadModel(config).train(), options.pop("axis", "cp")
    ids = torch.randint(0, 64, (4, 24))
    inputs = {"input_ids": ids, "labels": ids}
    cut = dict.fromkeys(inputs, P("dp" if "dp" in mesh.axis_names else None, axis))
    compiled = compile(model, mesh, cut, kwargs=inputs, **options)
    outputs, gradients = compiled.simulate(**inputs)
    alone, wanted = compile(model, Mesh(one=1), {}, kwargs=inputs).simulate(**inputs)
    torch.testing.assert_close(outputs.loss, alone.loss, rtol=0, atol=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5, msg=name)
    assert kinds_sent(compiled).count("ring_attention") == 2
    assert "all_gather" not in {each.kind for each in compiled.collectives}


@pytest.mark.parametrize("has_mask", [False, True], ids=["", "padded"])
def test_t5_learns_its_bias_of_positions_in_rings(has_mask: bool) -> None:
    """Two of them in each layer of the decoder; token ids alone are gathered, and no rank has a bias of all rows.

    Where there is padding, keys of the attention to the encoder are gathered, as numbers hide them.
    """
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 2}
    config = hf.T5Config(**sizes, vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    model = hf.T5ForConditionalGeneration(config)
    compiled = check_model(model, Mesh(dp=2, cp=2), 24, has_mask, attention="ring")
    if has_mask:
        return
    kinds = [kinds_sent(compiled, phase) for phase in ("forward", "backward")]
    assert {each.dtype for each in compiled.collectives if each.kind == "all_gather"} <= {"int64"}
    assert kinds[0].count("ring_attention") == kinds[1].count("ring_attention_backward") == 5
    program = compiled.program
    types = [program.local_type(node, i) for node in program.calls for i, _ in enumerate(program.types(node))]
    assert not [type_ for type_ in types if type_ and type_.shape[-2:] == (24, 24)]


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_gemma2_caps_scores_in_rings(axis: str) -> None:
    """By ``flex_attention``, of which its model on one device has no backward on CPUs."""
    torch.manual_seed(0)
    config = {**SIZES, "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0}
    plain = hf.Gemma2ForCausalLM(hf.Gemma2Config(**config, attn_implementation="eager"))
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**config, attn_implementation="flex_attention"))
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 64, (2, 24))
    inputs = {"input_ids": ids, "labels": ids}
    compiled = compile(model, Mesh(cp=2), dict.fromkeys(inputs, P(None, axis)), kwargs=inputs, attention="ring")
    check_compiled_model(compiled, plain, inputs)
    assert kinds_sent(compiled).count("ring_attention") == 2
    assert "all_gather" not in {each.kind for each in compiled.collectives}


def test_the_next_token_is_one_position_of_a_neighbour() -> None:
    torch.manual_seed(0)
    compiled = check_model(MODELS["llama"](), Mesh(cp=4), 20)
    (shift,) = (each for each in compiled.collectives if each.name.startswith("windows"))
    assert shift.wire_bytes == 4 * 8  # of each of four samples


def test_nothing_moves_but_keys_values_one_label_and_sums() -> None:
    torch.manual_seed(0)
    compiled = check_model(MODELS["gpt2"](), Mesh(cp=8), 24, attention="ring")
    kinds = Counter(kinds_sent(compiled) + kinds_sent(compiled, "backward"))
    assert kinds == {"windows": 1, "ring_attention": 2, "ring_attention_backward": 2}


class Windowed(Attending):
    """Two attentions, the second of which makes a mask of positions: keys behind are seen where ``is_band``."""

    def __init__(self, is_band: bool) -> None:
        super().__init__(num_keys=2)
        self.is_band = is_band

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        position = torch.arange(x.shape[1])
        row, column = position.unsqueeze(1), position.unsqueeze(0)
        seen = (row - column).abs() < 4 if self.is_band else (column <= row) & ((column > row - 4) | (column < 2))
        return super().forward(x) + super().forward(x, mask=seen)


def trained(way: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The loss and the gradients of a step, and by kind the bytes that this rank sent and that are announced."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    inputs = draw(18, dtype=torch.float32)
    cut = P("dp" if "dp" in names else None, "cp:zigzag" if way == "zigzag" else "cp")
    attention = "ring" if way in ("zigzag", "band") else way
    parallel = parallelize(Windowed(is_band=way == "band"), mesh, {"x": cut}, attention=attention)
    parallel(**inputs)
    comm = parallel.shardc.conversion.comm
    comm.traffic[0].clear()
    loss = parallel(**inputs)
    loss.backward()
    announced = Counter[str]()
    for each in parallel.program.collectives:
        announced[each.kind] += each.wire_bytes
    gradients = {name: whole(parameter.grad) for name, parameter in parallel.named_parameters()}
    return loss.detach(), gradients, comm.traffic[0].bytes, announced


@pytest.mark.parametrize("way", ["ring", "zigzag", "band", "ulysses", "gather"])
def test_on_real_ranks_a_step_is_that_of_one_device_and_sends_what_is_announced(gloo: GlooPool, way: str) -> None:
    torch.manual_seed(0)
    model, inputs = Windowed(is_band=way == "band"), draw(18, dtype=torch.float32)
    expected = model(**inputs)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    shape, names = ((2, 2), ("dp", "cp")) if way == "ulysses" else ((4,), ("cp",))
    for loss, gradients, sent, announced in gloo.run(trained, way, shape, names):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        for gradient, own in zip(wanted, gradients.values(), strict=True):
            torch.testing.assert_close(own, gradient, rtol=0, atol=1e-5 * max(1.0, gradient.abs().max().item()))
        assert sent == announced
