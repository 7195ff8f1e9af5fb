"""Pipelines with ZeRO, tensor parallel, precision and rematerialization, and models of transformers in stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpt
import pytest
import torch
import transformers
from cases import few
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Precision, Remat, Zero
from shardc.options import Pipeline

THREE, ALL = Mesh(dp=2, tp=2, pp=2), gpt.DATA | gpt.MEGATRON
PLANS: dict[str, tuple[Mesh, dict[str, P], str, dict[str, Any]]] = {
    "stage 1, tensor": (THREE, ALL, "1f1b", {"zero": Zero("dp", 1)}),
    "stage 2, tensor": (THREE, ALL, "zb-v", {"zero": Zero("dp", 2)}),
    "stage 3, tensor": (THREE, ALL, "1f1b", {"zero": Zero("dp", 3)}),
    "stage 3, recomputed": (
        THREE, ALL, "zb-h1", {"zero": Zero("dp", 3), "remat": Remat("blocks.*", collectives=True)},
    ),
    "tensor, recomputed": (Mesh(pp=2, tp=2), gpt.MEGATRON, "interleaved", {"remat": Remat("blocks.*")}),
    "stage 2, bfloat16": (
        Mesh(pp=2, dp=2), gpt.DATA, "1f1b", {"zero": Zero("dp", 2), "precision": Precision(torch.bfloat16)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", few(PLANS, "stage 3, tensor", "tensor, recomputed"))
def test_a_plan_in_a_pipeline_equals_the_plan_without_one(name: str) -> None:
    """Ten rows in four microbatches, two backwards; with a precision against the same plan without a pipeline."""
    mesh, annotations, schedule, options = PLANS[name]
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Config(vocab=52, context=12, layers=4, heads=4, width=16, fused=False))
    model = model if "precision" in options else model.double()
    batch = torch.randint(52, (2, 10, 12), generator=torch.Generator().manual_seed(3))
    piped = shardc.parallelize(
        model, mesh, annotations, pipeline=Pipeline(microbatches=4, schedule=schedule), **options
    )
    same = {key: value for key, value in options.items() if key == "precision"}
    alone = shardc.parallelize(model, Mesh(one=1), **same) if same else copy.deepcopy(model)
    near = 2e-2 if same else 1e-10
    for _ in range(2):
        losses = [each(*batch) for each in (piped, alone)]
        torch.testing.assert_close(*losses, rtol=0, atol=near)
        for loss in losses:
            loss.backward()
    for (parameter, mine), theirs in zip(piped.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=near, msg=parameter)


PRECISION = Precision(torch.bfloat16, torch.float32)


class Shared(nn.Module):
    """An embedding that is the head too, or a weight of its own with the same values."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head.weight = self.embed.weight if is_tied else nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def test_narrow_gradients_are_added_wide_over_microbatches_and_over_stages() -> None:
    """Each is that of its microbatch alone, rounded once; a tied weight's are added over stages once a step."""
    ids = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
    alone = shardc.parallelize(Shared(False), Mesh(one=1), precision=PRECISION)
    for rows in ids.chunk(4):
        (alone(rows) / 4).backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    wanted["embed.weight"] = wanted["embed.weight"] + wanted["head.weight"]
    pipeline = Pipeline(microbatches=4, cuts=("layers.2",))
    piped = shardc.parallelize(Shared(True), Mesh(pp=2), pipeline=pipeline, precision=PRECISION, args=(ids,))
    piped(ids).backward()
    for name, parameter in piped.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-6, atol=1e-7, msg=name)
    sent = [(each.times, each.dtype) for each in piped.program.collectives if each.kind == "send" and each.bytes > 1000]
    assert sent == [(1, "float32")] * len(sent) and sent


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=6, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """In float64: in float32 a ReLU near 0 turns rounding into 1e-4 after seven steps, on a mesh of one rank too."""
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def text() -> dict[str, Tensor]:
    ids, lengths = torch.randint(64, (8, 12)), torch.randint(4, 12, (8, 1))
    return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(12) < lengths).long()}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(5, (8,))}


MODELS: dict[Callable[[], nn.Module], tuple[Callable[[], dict[str, Tensor]], str]] = {
    gpt2: (text, "1f1b"),  # a tied head
    t5: (text, "zb-v"),  # every stage of the decoder reads the encoder
    vit: (images, "zb-h1"),
}


@pytest.mark.parametrize("make", few(MODELS, gpt2))
def test_twenty_steps_of_a_model_in_four_stages_are_those_of_one_device(make: Callable[[], nn.Module]) -> None:
    batch, schedule = MODELS[make]
    torch.manual_seed(0)
    alone = make()
    piped = shardc.parallelize(copy.deepcopy(alone), Mesh(pp=4), pipeline=Pipeline(microbatches=4, schedule=schedule))
    runs = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (piped, alone)]
    for _ in range(20):
        kwargs, losses = batch(), []
        for model, optimizer in runs:
            losses.append(model(**kwargs).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
