"""flex_attention: with a mask alone it is fused attention, of which a rank makes its part of the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from alive import Alive
from attending import Attending, draw, kinds_sent
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shardc import Mesh, P, compile
from shardc.language.sharding import TensorType
from shardc.ops.attention.mask import Step
from shardc.ops.attention.products import tiled_workspace
from shardc.ops.attention.score import ScoreMod, score_mod_of
from shardc.ops.attention.tiled import TILED, tiled_attention, tiled_attention_backward

LENGTH = 16
DOCUMENT = torch.arange(LENGTH) // 5
MASKS: dict[str, Callable[..., Tensor] | None] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 4),
    "documents": lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (i >= j),
    "of heads": lambda b, h, i, j: (i >= j) & ((h < 2) | (i - j < 3)),
    "none": None,
}


class Flexible(Attending):
    """Attention with a function of positions as its mask, and perhaps one that changes scores, a method of this name.

    ``is_written_out``: as ops, since torch has no backward of flex_attention on CPUs.
    """

    def __init__(self, name: str, num_keys: int = 4, change: str = "", scale: float | None = None) -> None:
        super().__init__(num_keys=num_keys, scale=scale)
        self.seen, self.is_written_out = MASKS[name], False
        self.score_mod = getattr(self, change) if change else None
        if change.startswith("learned"):
            self.bias = nn.Parameter(torch.randn(4, 2 * LENGTH) if change == "learned_bias" else torch.rand(4))
        self.block_mask = self.seen and create_block_mask(self.seen, None, None, LENGTH, LENGTH, device="cpu")

    def distance(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (i - j) * 0.1

    def cap(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2.0 * torch.tanh(score / 2.0)  # as Gemma 2

    def gate(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, score * torch.sigmoid(score), -torch.inf)

    def learned_slopes(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - self.bias[h] * (i - j)

    def learned_bias(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.bias[h, i - j + LENGTH] + self.cap(score, b, h, i, j)

    def bias_before(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score + (i - j) * 0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not self.is_written_out:
            return flex_attention(q, k, v, self.score_mod, self.block_mask, self.scale, enable_gqa=True)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        sizes = (*q.shape[:3], k.shape[2])
        index = [torch.arange(n).view([n if dim == i else 1 for dim in range(4)]) for i, n in enumerate(sizes)]
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        scores = scores if self.score_mod is None else self.score_mod(scores, *index)
        scores = scores if self.seen is None else scores.masked_fill(~self.seen(*index), -torch.inf)
        return scores.softmax(-1) @ v


def check(model: Flexible, annotations: dict[str, Any], mesh: Mesh) -> Any:
    torch.manual_seed(0)
    model, inputs = model.double(), draw(LENGTH)
    compiled = compile(model, mesh, annotations, kwargs=inputs)
    loss, gradients = compiled.simulate(**inputs)
    model.is_written_out = True
    expected = model(**inputs)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=name)
    return compiled


@pytest.mark.parametrize("num_keys", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_positions_goes_with_a_ring_or_with_heads(name: str, num_keys: int) -> None:
    compiled = check(Flexible(name, num_keys), {"x": P(None, "cp")}, Mesh(cp=4))
    has_heads_for_all = num_keys == 4 and kinds_sent(compiled) == ["all_to_all"] * 4
    assert has_heads_for_all or "ring_attention" in kinds_sent(compiled)
    steps = {each.steps for each in compiled.collectives if "ring" in each.name}
    assert name != "window" or steps == {1}
    types = [type_ for node in compiled.program.graph.nodes for type_ in compiled.program.types(node) if type_]
    assert not [type_ for type_ in types if type_.shape[-2:] == (LENGTH // 4, LENGTH)]


def test_heads_are_cut_as_before() -> None:
    annotations = {name: P("tp") for name in ("q.*", "k.*", "v.*")}
    compiled = check(Flexible("causal"), annotations, Mesh(tp=2))
    assert {each.kind for each in compiled.collectives} == {"all_reduce"}


@pytest.mark.parametrize(("axis", "num_keys"), [("cp", 4), ("cp:zigzag", 2)])
@pytest.mark.parametrize("change", ["distance", "cap", "gate", "learned_slopes", "learned_bias"])
def test_changed_scores_go_with_a_ring_or_with_heads(
    change: str, num_keys: int, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes of each by itself, and what is added, be it learned; keys are not gathered."""
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 3)
    torch.manual_seed(0)
    model = Flexible("causal" if change != "gate" else "none", num_keys, change, scale=1.0)
    compiled = check(model, {"x": P(None, axis)}, Mesh(cp=4))
    gathered = (each.wire_bytes for each in compiled.collectives if each.kind == "all_gather")
    has_heads_for_all = num_keys == 4 and kinds_sent(compiled) == ["all_to_all"] * 4
    assert (has_heads_for_all or "ring_attention" in kinds_sent(compiled)) and not any(gathered)


def test_heads_are_cut_beside_positions() -> None:
    annotations = {name: P("tp") for name in ("q.*", "k.*", "v.*")} | {"x": P(None, "cp")}
    compiled = check(Flexible("causal", 2, "learned_slopes"), annotations, Mesh(tp=2, cp=2))
    assert kinds_sent(compiled) == ["ring_attention"]


def test_what_is_changed_after_something_is_added_is_ops() -> None:
    compiled = check(Flexible("causal", change="bias_before"), {"x": P(None, "cp")}, Mesh(cp=2))
    assert "all_gather" in kinds_sent(compiled)


CAP = ScoreMod(
    (Step("div.Tensor", (("value", 0), 2.0)), Step("tanh.default", (("value", 1),))),
    (
        Step("div.Tensor", (("value", 0), 2.0)), Step("tanh.default", (("value", 2),)),
        Step("tanh_backward.default", (("value", 1), ("value", 3))), Step("div.Tensor", (("value", 4), 2.0)),
    ),
)  # fmt: skip


def test_the_bytes_of_changed_scores_are_as_announced() -> None:
    assert score_mod_of(CAP.text) == CAP
    q, text = torch.randn(1, 2, 512, 4), CAP.text
    out, lse = TILED(q, q, q, None, None, 0.0, 0, False, None, None, text)
    for is_backward in (False, True):
        with torch.no_grad(), Alive() as alive:
            if is_backward:
                tiled_attention_backward._init_fn(out, q, q, q, out, lse, None, None, 0.0, 0, False, None, None, text)
            else:
                tiled_attention._init_fn(q, q, q, None, None, 0.0, 0, False, None, None, text)
        announced = tiled_workspace(TensorType.of(q), TensorType.of(q), 1024, 0.0, text, is_backward=is_backward)
        assert 0.9 * announced < alive.most < 1.1 * announced, (announced, alive.most)


def test_a_dump_says_how_scores_are_changed() -> None:
    compiled = compile(Flexible("causal", change="cap").double(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(LENGTH))
    assert "scores mul(tanh(div(score, 2.0)), 2.0)" in compiled.dump()
