"""Keys that a model repeats for several heads of queries go round once, as where attention itself takes fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import WIDTH, Attending, check_step, draw
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardc import Mesh, P, compile
from shardc.ops.attention import kernels
from shardc.ops.attention.products import Scores

TOLERANCE = 1e-10
REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]),
}


class Repeated(Attending):
    """Attention to heads of keys that are repeated for two heads of queries each, with a mask."""

    def __init__(self, way: str = "expand", reads_keys: bool = False, heads: int = 4) -> None:
        super().__init__(heads, heads // 2)
        self.way, self.reads_keys = way, reads_keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        row, column = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])
        mask = (column <= row) & (column != 3) | (row == column)
        if self.way == "grouped":
            return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        keys, values = REPEATS[self.way](k), REPEATS[self.way](v)
        out = scaled_dot_product_attention(q, keys, values, mask)
        return out + keys.sin() if self.reads_keys else out


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
@pytest.mark.parametrize("way", REPEATS)
@pytest.mark.parametrize("length", [24, 21])
def test_repeated_keys_go_round_once(way: str, axis: str, length: int) -> None:
    torch.manual_seed(0)
    sent = []
    for model in (Repeated(way).double(), Repeated("grouped").double()):
        compiled = check_step(model, Mesh(cp=4), draw(length), TOLERANCE, axis, attention="ring")
        sent.append({each.name: each.wire_bytes for each in compiled.collectives})
    assert sent[0] == sent[1] and any(name.startswith("ring") for name in sent[0])


def test_ranks_that_share_heads_share_those_that_are_repeated() -> None:
    sent = [
        [each.wire_bytes for each in compiled.collectives if each.kind == "all_to_all"]
        for compiled in (
            compile(Repeated(way), Mesh(cp=2), {"x": P(None, "cp")}, kwargs=given, attention="ulysses")
            for way, given in (("expand", draw(16, dtype=torch.float32)), ("grouped", draw(16, dtype=torch.float32)))
        )
    ]
    assert sorted(sent[0]) == sorted(sent[1]) and len(sent[0]) == 8


def test_less_is_saved_for_backward() -> None:
    saved = [
        compile(
            Repeated(way), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(64, dtype=torch.float32), attention="ring"
        ).memory["saved"]
        for way in ("expand", "grouped")
    ]
    assert saved[0] == saved[1]


OF_HEADS = {"annotations": {f"{name}.weight": P("tp") for name in "qkv"}}
MESHES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "dp": (Mesh(dp=2, cp=2), {}),
    "ulysses": (Mesh(cp=2), {"attention": "ulysses"}),
    "ulysses of more ranks than heads of keys": (Mesh(cp=4), {"attention": "ulysses"}),
    "gather": (Mesh(cp=2), {"attention": "gather"}),
    "tp": (Mesh(cp=2, tp=2), OF_HEADS),
    "more ranks than heads": (Mesh(cp=8), {}),
    "tp of more ranks than heads of keys": (Mesh(cp=2, tp=4), {**OF_HEADS, "attention": "ring"}),
}


@pytest.mark.parametrize(("mesh", "options"), MESHES.values(), ids=MESHES)
def test_other_meshes_and_ways_have_the_numbers_of_one_device(mesh: Mesh, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check_step(Repeated().double(), mesh, draw(16), TOLERANCE, **options)


def test_repeated_keys_that_others_read_have_the_gradients_of_one_device() -> None:
    torch.manual_seed(0)
    check_step(Repeated(reads_keys=True).double(), Mesh(cp=4), draw(16), TOLERANCE, attention="ring")


class Learned(Attending):
    """Attention to one learned key, which is the same for all samples and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.key = torch.nn.Parameter(torch.randn(WIDTH // 4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys = self.key.unsqueeze(0).expand(k.shape[0] * k.shape[1] * k.shape[2], -1).reshape(k.shape)
        return scaled_dot_product_attention(q, keys, v, is_causal=True)


def test_a_vector_that_is_repeated_is_no_key_of_fewer_heads() -> None:
    torch.manual_seed(0)
    model, inputs = Learned().double(), draw(16)
    compiled = compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    loss, gradients = compiled.simulate(**inputs)
    expected = model(**inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert model.key.grad is not None
    torch.testing.assert_close(gradients["key"], model.key.grad, rtol=0, atol=TOLERANCE * 1e2)


def test_evaluation_groups_heads_too() -> None:
    torch.manual_seed(0)
    model, inputs = Repeated().double(), draw(16)
    compiled = compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention="ring", train=False)
    (ring,) = (each for each in compiled.collectives if each.name.startswith("ring"))
    assert ring.wire_bytes == 3 * 8 * 2 * 4 * WIDTH // 2 * 2  # three steps with keys and values of four positions
    torch.testing.assert_close(compiled.simulate(**inputs)[0], model(**inputs))


class Efficient(Repeated):
    """By torch's kernel of CUDA, which takes as many heads of keys as of queries, and can be traced anywhere."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = REPEATS[self.way](k), REPEATS[self.way](v)
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, None, True, 0.0, True)[0]
        return out


@pytest.mark.parametrize("way", ["auto", "ulysses", "ring"])
def test_the_kernel_that_takes_no_fewer_heads_of_keys_is_given_all(way: str) -> None:
    model, inputs = Efficient(heads=8), draw(16, dtype=torch.float32)
    compiled = compile(model, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention=way)
    program, found = compiled.program, [node for node in compiled.program.calls if "efficient" in str(node.target)]
    assert len(found) == (0 if way == "ring" else 2)
    for node in found:
        read = [program.local_type(each) for each in node.all_input_nodes[:3]]
        assert {type_.shape[1] for type_ in read if type_} == {2}


def _in_full(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1] == v.shape[1]
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + (0 if bias is None else bias)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_the_kernel_of_a_ring_repeats_keys_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the kernel of CUDA stands one in full, which takes as many heads of keys as of queries too."""

    def backward(*args: Any, scale: float | None) -> tuple[Tensor, ...]:
        grad, q, k, v, bias, *_ = args
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (q, k, v)]
            return *torch.autograd.grad(_in_full(*given, bias, scale)[0], given, grad), torch.empty(0)  # type: ignore[call-arg]

    monkeypatch.setattr(kernels, "EFFICIENT", lambda q, k, v, bias, *_, scale: _in_full(q, k, v, bias, scale))
    monkeypatch.setattr(kernels, "EFFICIENT_BACKWARD", backward)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    scores, grad = Scores(torch.randn(2, 1, 6, 6, dtype=torch.float64), False, None), torch.randn(2, 4, 6, 8).double()
    run = kernels.kernels("efficient_attention", scores)
    expected = scaled_dot_product_attention(q, k, v, scores.mask, enable_gqa=True)
    with torch.no_grad():
        out, lse = run.forward(q, k, v, scores)
        found = run.backward(grad, q, k, v, out, lse, scores)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), grad))
