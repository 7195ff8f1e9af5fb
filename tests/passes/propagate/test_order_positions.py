"""Positions in zigzag: whatever a model does along them, its numbers are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attending import check_compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool1d,
    conv1d,
    cross_entropy,
    dropout,
    layer_norm,
    pad,
    scaled_dot_product_attention,
)

from shardc import Mesh, P, ShardingError, annotate, compile, parallelize
from shardc.ops.zigzag import in_zigzag

WIDTH, TOLERANCE = 6, 1e-10


def _attend(x: Tensor, mask: Tensor | None = None) -> Tensor:
    q = x.unsqueeze(1)
    return scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None).squeeze(1)


def _number(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def _visible(x: Tensor) -> Tensor:
    return _number(x).unsqueeze(1) >= _number(x)


def _attend_to_halves(x: Tensor) -> Tensor:
    """Each position gives two keys, those of all first halves of channels before those of all second ones."""
    keys = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(1, 2).unsqueeze(1)
    result = scaled_dot_product_attention(x[..., : keys.shape[-1]].unsqueeze(1), keys, keys, is_causal=True)
    return result.squeeze(1).repeat(1, 1, 2)


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x * torch.sin(_number(x).unsqueeze(1) / torch.arange(1, WIDTH + 1)),
    "flattened with the batch": lambda x: (x.reshape(-1, WIDTH) * 2).view_as(x),
    "flattened with channels": lambda x: (x.flatten(1) * torch.arange(x[0].numel()) / x[0].numel()).view_as(x),
    "flattened and cumulated": lambda x: x.flatten(1).cumsum(1).view_as(x) / 10,
    "a mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "a largest": lambda x: x.amax(1, keepdim=True) * x,
    "where the largest is": lambda x: x * (x.argmax(1, keepdim=True) == _number(x).view(1, -1, 1)),
    "a norm of all": lambda x: layer_norm(x, x.shape[1:]),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1) / 10,
    "sort": lambda x: x.sort(1).values,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "shift": lambda x: pad(x[:, :-1], (0, 0, 1, 0)),
    "without the last": lambda x: pad(x[:, :-1] * 2, (0, 0, 0, 1)),
    "without the first": lambda x: pad(x[:, 1:] * 2, (0, 0, 1, 0)),
    "longer": lambda x: pad(pad(x, (0, 0, 0, 1)) * 2, (0, 0, -1, 0)),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "every second": lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    "an index": lambda x: x[:, _number(x).flip(0)],
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, (_number(x) // 2).view(1, -1, 1).expand_as(x), x),
    "convolution": lambda x: conv1d(x.mT, torch.ones(WIDTH, WIDTH, 3, dtype=x.dtype) / 9, padding=1).mT,
    "pool": lambda x: avg_pool1d(x.mT, 3, 1, 1).mT,
    "windows": lambda x: pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "differences": lambda x: (x.unsqueeze(1) - x.unsqueeze(2)).abs().mean(2),
    "a matrix of positions": lambda x: _visible(x).to(x.dtype) @ x / 10,
    "linear attention": lambda x: x @ (x.mT @ x) / x.shape[1],
    "softmax written out": lambda x: (x @ x.mT).masked_fill(~_visible(x), -torch.inf).softmax(-1) @ x,
    "causal attention": _attend,
    "attention in a window": lambda x: _attend(x, (_number(x).unsqueeze(1) - _number(x)).abs() < 3),
    "attention with a mask of zeros": lambda x: _attend(x, torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)),
    "attention to halves": _attend_to_halves,
    "annotated in order": lambda x: annotate(x * 2, P(None, "cp")),
    "annotated in zigzag": lambda x: annotate(x * 2, P(None, "cp:zigzag")),
    "annotated as whole": lambda x: annotate(x * 2, P()),
}


class Chain(nn.Module):
    """Layers that each do something along positions, on embedded ids or on numbers."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.embed = names, nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.embed(ids) + self.embed(torch.arange(ids.shape[1]))
        for name, layer in zip(self.names, self.layers, strict=True):
            x = ALONG[name](x) + torch.tanh(layer(x))
        weight = torch.arange(1, x.shape[1] + 1).unsqueeze(1)
        return (x * weight).square().sum() / weight.sum() + x.mean()


def check_chain(names: list[str], mesh: Mesh, length: int, inputs: tuple[str, ...] = ("x", "ids")) -> None:
    """Loss and gradients with positions of some inputs in zigzag must be those of one device."""
    torch.manual_seed(0)
    model = Chain(*names).double()
    given = {"x": torch.randn(2, length, WIDTH).double(), "ids": torch.randint(40, (2, length))}
    compiled = compile(model, mesh, {name: P(None, "cp:zigzag") for name in inputs}, kwargs=given)
    check_compiled(compiled, model, given, TOLERANCE)


@pytest.mark.parametrize("name", ALONG)
def test_what_a_model_does_along_positions_is_that_of_one_device(name: str) -> None:
    check_chain([name], Mesh(cp=2), 8)


@pytest.mark.parametrize("count", [3, 4])
def test_keys_may_have_positions_in_another_order_than_queries(count: int) -> None:
    check_chain(["attention to halves"], Mesh(cp=count), 8)


class Crossed(nn.Module):
    """Causal attention of one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (self.layer(each).unsqueeze(1) for each in (x, y))
        return scaled_dot_product_attention(q, k, k, is_causal=True).squeeze(1).cumsum(1).square().mean()


def test_queries_and_keys_in_zigzag_over_axes_of_other_sizes_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    model, given = Crossed().double(), {name: torch.randn(2, 12, WIDTH).double() for name in "xy"}
    axes = {"x": P(None, "a:zigzag"), "y": P(None, "b:zigzag")}
    loss, gradients = compile(model, Mesh(a=2, b=3), axes, kwargs=given).simulate(**given)
    expected = model(**given)
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    (wanted,) = torch.autograd.grad(expected, [model.layer.weight])
    torch.testing.assert_close(gradients["layer.weight"], wanted, rtol=0, atol=TOLERANCE)


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(list(ALONG)), min_size=2, max_size=3), st.sampled_from([2, 3, 4]),
    st.sampled_from([7, 8, 13, 16]), st.sampled_from([("x", "ids"), ("x",), ("ids",)]),
)  # fmt: skip
def test_layers_follow_one_another(names: list[str], count: int, length: int, inputs: tuple[str, ...]) -> None:
    check_chain(names, Mesh(cp=count), length, inputs)


def test_ranks_send_nothing_to_come_into_zigzag() -> None:
    given = {"x": torch.randn(2, 16, WIDTH), "ids": torch.randint(40, (2, 16))}
    cut = dict.fromkeys(given, P(None, "cp:zigzag"))
    compiled = compile(Chain("positions", "causal attention"), Mesh(cp=4), cut, kwargs=given)
    assert {each.kind for each in compiled.collectives} == {"all_reduce", "collective_permute"}
    assert {each.name for each in compiled.collectives if each.kind == "collective_permute"} == {
        "ring_attention", "ring_attention_backward",
    }  # fmt: skip


def test_what_comes_back_in_order_is_sent_once() -> None:
    """Of 16 positions on 4 ranks, in zigzag all but two stretches of two are elsewhere in order."""
    given = {"x": torch.randn(2, 16, WIDTH), "ids": torch.randint(40, (2, 16))}
    cut = dict.fromkeys(given, P(None, "cp:zigzag"))
    compiled = compile(Chain("cumsum"), Mesh(cp=4), cut, kwargs=given, train=False)
    sent = sum(each.wire_bytes_total for each in compiled.collectives if each.name.startswith("overlap_add"))
    places = {(i // 4, position) for i, position in enumerate(j for run in in_zigzag(16, 4) for j in run)}
    moved = sum(position // 4 != rank for rank, position in places)
    assert sent == moved * 2 * WIDTH * 4


class Dropped(nn.Module):
    """Dropout before and in causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = dropout(self.layer(x), 0.3, self.training).unsqueeze(1)
        return scaled_dot_product_attention(q, q, q, dropout_p=0.2 * self.training, is_causal=True).squeeze(1)


class NextToken(nn.Module):
    """A causal model of one layer, and its loss for the next of each of the ids."""

    def __init__(self, shift: str) -> None:
        super().__init__()
        self.embed, self.head, self.shift = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40), shift

    def forward(self, ids: Tensor) -> Tensor:
        given = ids[:, :-1] if self.shift == "ids" else ids
        logits = self.head(_attend(self.embed(given)))
        if self.shift == "padded labels":
            return cross_entropy(logits.flatten(0, 1), pad(ids, (0, 1), value=-100)[:, 1:].flatten())
        if self.shift == "logits":
            return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if self.shift == "logits of classes first":
            return cross_entropy(logits[..., :-1, :].mT.contiguous(), ids[..., 1:].contiguous())
        if self.shift == "two tokens":
            further = cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
            return further + cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return cross_entropy(logits.mT, ids[:, 1:])


@pytest.mark.parametrize("shift", ["padded labels", "logits", "logits of classes first", "two tokens", "ids"])
@pytest.mark.parametrize("count", [3, 4])
def test_the_loss_of_next_tokens_has_nothing_brought_back_in_order(count: int, shift: str) -> None:
    torch.manual_seed(0)
    model, given = NextToken(shift).double(), {"ids": torch.randint(40, (2, 24 + (shift == "ids")))}
    compiled = compile(model, Mesh(cp=count), {"ids": P(None, "cp:zigzag")}, kwargs=given)
    check_compiled(compiled, model, given, TOLERANCE)
    sent = {each.name for each in compiled.collectives if each.kind != "all_reduce"}
    assert sent == {"ring_attention", "ring_attention_backward"}


@pytest.mark.parametrize("count", [2, 3])
def test_random_numbers_are_those_of_one_device_and_results_come_back_in_order(count: int) -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(2, 12, WIDTH)
    alone = parallelize(model, Mesh(one=1), {}, seed=5)
    parallel = parallelize(model, Mesh(cp=count), {"x": P(None, "cp:zigzag")}, seed=5)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), alone(x))
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(x), model.eval()(x))


def test_weights_on_the_same_axis_are_gathered_as_beside_positions_in_order() -> None:
    """An axis on positions outranks the same axis on a weight, in zigzag too."""
    model, x = Dropped().eval(), torch.randn(2, 16, WIDTH)
    sent = list[dict[str, int]]()
    for axis in ("cp", "cp:zigzag"):
        annotations = {"x": P(None, axis), "layer.weight": P(None, "cp")}
        compiled = compile(model, Mesh(cp=4), annotations, args=(x,), attention="ring")
        sent.append({each.name: each.wire_bytes for each in compiled.collectives})
    moved = {name: sent[1].pop(name) for name in [*sent[1]] if name not in sent[0]}
    assert sent[0] == sent[1] and {"all_gather_cp", "ring_attention"} <= sent[0].keys()
    assert moved.keys() == {"overlap_add", "overlap_add_1", "windows", "windows_1"}  # of the result and its gradient


@pytest.mark.parametrize(
    ("annotations", "options", "said"),
    [
        ({"layer.weight": P("cp:zigzag")}, {}, "only positions of inputs"),
        ({"output:*": P(None, "cp:zigzag")}, {}, "only positions of inputs"),
        ({"x": P(None, "cp:zigzag")}, {"attention": "ulysses"}, "write P(None, 'cp')"),
    ],
    ids=["a parameter", "an output", "ulysses"],
)
def test_what_cannot_be_in_zigzag_is_an_error(annotations: dict[str, P], options: dict[str, str], said: str) -> None:
    with pytest.raises(ShardingError) as error:
        compile(Dropped().eval(), Mesh(cp=2), annotations, args=(torch.randn(2, 8, WIDTH),), **options)
    assert said in str(error.value)


class Padded(nn.Module):
    """Attention whose mask is made of a float input that is cut: a value for each key, in whole rows."""

    def __init__(self, is_learned: bool) -> None:
        super().__init__()
        self.qkv, self.gate, self.is_learned = nn.Linear(16, 48), nn.Linear(16, 1), is_learned

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        of_keys = self.gate(x)[..., 0] if self.is_learned else x.abs().sum(-1) > 0
        mask = of_keys[:, None, None, :].expand(rows, 1, length, length)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_learned", [False, True], ids=["padding", "learned"])
def test_a_mask_of_whole_rows_with_columns_in_zigzag_is_put_in_order_once(is_learned: bool, count: int) -> None:
    torch.manual_seed(0)
    model, x = Padded(is_learned).double(), torch.randn(2, 12, 16, dtype=torch.float64)
    x[0, -4:] = 0
    compiled = compile(model, Mesh(cp=count), {"x": P(None, "cp:zigzag")}, args=(x,))
    loss, gradients = compiled.simulate(x)
    wanted = model(x)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
