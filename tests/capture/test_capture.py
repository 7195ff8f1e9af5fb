"""A captured program, interpreted on real tensors, equals the eager model: outputs, gradients and buffers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from shardc.capture.annotations import Match, annotate
from shardc.capture.call import call_signature, output_leaves
from shardc.capture.capture import Captured, capture
from shardc.capture.containers import flatten
from shardc.capture.signature import TensorLeaf
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.partition import P
from shardc.language.sharding import TensorType
from shardc.ops.attention.tiled import TILED
from shardc.passes.verify import verify
from shardc.program.node import arguments
from shardc.program.provenance import Source

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _seed_and_double():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# What stands behind every comparison: interpret the program, run the model, hold one against the other.


@dataclass
class Results:
    output: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def interpret(
    captured: Captured,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    tangents: Mapping[str, Tensor] | None = None,
) -> Results:
    program, convention = captured.program, captured.convention
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **convention.constants}
    passed = dict(zip(convention.names, convention.flatten(args, kwargs or {}), strict=True))
    values = []
    for entry in program.inputs:
        if entry.kind in ("parameter", "buffer"):
            values.append(state[entry.name].detach())
        elif entry.kind == "input":
            values.append(passed[entry.name].detach())
        elif entry.kind == "tangent":
            values.append((tangents or {}).get(entry.name, torch.ones(entry.type.shape, dtype=entry.type.dtype)))
        else:
            values.append(torch.zeros(2, dtype=torch.int64))
    results = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph)).run(*values)
    by_kind = {
        kind: {o.name: result for o, result in zip(program.outputs, results, strict=True) if o.kind == kind}
        for kind in ("gradient", "buffer")
    }
    outputs = [result for o, result in zip(program.outputs, results, strict=True) if o.kind == "output"]
    return Results(convention.unflatten(outputs, args, kwargs), by_kind["gradient"], by_kind["buffer"])


def eager(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], starts: Mapping[str, Tensor], train: bool
) -> Results:
    """The model run on a copy of itself; backward from the outputs named in ``starts`` with these gradients."""
    model = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    given = [
        value for _, value in flatten((args, dict(kwargs)))[0] if isinstance(value, Tensor) and value.requires_grad
    ]
    for config in [module.config for module in model.modules() if train and hasattr(module, "config")]:
        config.use_cache = False
    output = model(*args, **kwargs)
    _, tensors, _ = output_leaves(output)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sources = [*named.values(), *given]
    found = torch.autograd.grad(
        [dict(tensors)[name] for name in starts], sources, list(starts.values()), allow_unused=True
    ) if starts else [None] * len(sources)  # fmt: skip
    gradients = dict(zip([*named, *(f"<input {i}>" for i in range(len(given)))], found, strict=True))
    changed = {name: b for name, b in model.named_buffers() if not torch.equal(b, before[name])}
    return Results(output, gradients, changed)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on meta; tied ones stay tied, as ``Module.to`` would not leave them."""
    state: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo = {id(t): t.detach().to("meta") for t in state}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def assert_same(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    tangents: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Captured:
    """Capture with the parameters on meta, interpret with the real ones, compare with eager; returns the capture."""
    kwargs = kwargs or {}
    captured = capture(on_meta(model), args, kwargs, **options)
    verify(captured.program)
    starts = {entry.name: torch.ones(entry.type.shape, dtype=entry.type.dtype)
              for entry in captured.program.inputs if entry.kind == "tangent"}  # fmt: skip
    starts.update(tangents or {})
    found = interpret(captured, model, args, kwargs, starts)
    expected = eager(model, args, kwargs, starts, options.get("train", True))
    assert_close(found.output, expected.output)
    assert type(found.output) is type(expected.output)
    if options.get("train", True):
        inputs = [e.name for e in captured.program.inputs if e.kind == "input" and e.requires_grad]
        renamed = {f"<input {i}>": name for i, name in enumerate(inputs)}
        assert_close(found.gradients, {renamed.get(name, name): g for name, g in expected.gradients.items()})
    else:
        assert not found.gradients
    assert_close(found.buffers, expected.buffers)
    return captured


def assert_close(found: Any, expected: Any) -> None:
    ours, our_tree = flatten(found)
    theirs, their_tree = flatten(expected)
    assert our_tree == their_tree
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert a == b, name


def ops(captured: Captured) -> set[str]:
    return {str(node.target) for node in captured.program.calls}


def inputs(captured: Captured, kind: str) -> list[str]:
    return [entry.name for entry in captured.program.inputs if entry.kind == kind]


# Small models, each with one trait.


class Mlp(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor | None = None) -> Tensor:
        hidden = F.gelu(self.up(x)) * scale
        return self.down(hidden) + (0 if bias is None else bias)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu_(self.bn(self.conv(x))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor
    note: str = "kept"
    extra: tuple[Tensor, ...] = ()


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, batch: dict[str, Any], *xs: Tensor, **kw: Any) -> Answer:
        logits = self.mlp(batch["x"]) + sum(xs)
        loss = (logits - batch["y"]["target"]).square().mean() if "y" in batch else None
        return Answer(loss, logits * kw.get("temperature", 1.0), extra=(logits.sum(-1),))


def tiny_gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 3, "vocab_size": 17, "n_positions": 16}
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes | off | changes))


# The model's values.


def test_outputs_and_gradients_equal_the_eager_model():
    captured = assert_same(Mlp(), (torch.randn(4, 6),), tangents={"output": torch.randn(4, 6)})
    assert inputs(captured, "parameter") == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert inputs(captured, "tangent") == ["output"]
    assert [(o.name, o.kind) for o in captured.program.outputs] == [
        ("output", "output"), ("up.weight", "gradient"), ("up.bias", "gradient"), ("down.weight", "gradient"),
        ("down.bias", "gradient"),
    ]  # fmt: skip


def test_inputs_stand_in_order_and_random_is_always_last():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    captured = assert_same(ConvNet(), (x, torch.tensor([1, 4])))
    kinds = list(dict.fromkeys(entry.kind for entry in captured.program.inputs))
    assert kinds == ["parameter", "buffer", "input", "tangent", "random"]
    assert captured.program.inputs[-1].type == TensorType((2,), torch.int64)


def test_placeholders_are_named_after_what_they_hold():
    captured = capture(Mlp(), (torch.randn(4, 6),), {})
    names = [node.name for node in captured.program.placeholders]
    assert names == ["up_weight", "up_bias", "down_weight", "down_bias", "x", "tangent_output", "random"]


def test_mutated_buffers_are_outputs_and_the_graph_is_functional():
    model = ConvNet()
    captured = assert_same(model, (torch.randn(2, 3, 8, 8), torch.tensor([1, 4])))
    changed = [output.name for output in captured.program.outputs if output.kind == "buffer"]
    assert changed == ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
    assert all(not node.target._schema.is_mutable for node in captured.program.calls)


def test_the_models_own_training_flag_is_respected():
    model = ConvNet().eval()
    captured = assert_same(model, (torch.randn(2, 3, 8, 8), torch.tensor([1, 4])))
    assert not [output for output in captured.program.outputs if output.kind == "buffer"]
    assert not model.training


def test_a_buffer_that_is_assigned_anew_is_an_output():
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    captured = assert_same(Average(), (torch.randn(4, 3, requires_grad=True),))
    assert [output.name for output in captured.program.outputs if output.kind == "buffer"] == ["mean"]


def test_frozen_parameters_have_no_gradient_and_unused_ones_have_none():
    model = Mlp()
    model.up.weight.requires_grad_(False)
    model.spare = nn.Linear(2, 2)
    captured = assert_same(model, (torch.randn(4, 6),))
    gradients = [output.name for output in captured.program.outputs if output.kind == "gradient"]
    assert gradients == ["up.bias", "down.weight", "down.bias", "spare.weight", "spare.bias"]
    assert captured.program.results[-2:] == (None, None)
    assert "spare.weight" in inputs(captured, "parameter")


def test_a_wholly_frozen_model_has_no_backward():
    model = Mlp().requires_grad_(False)
    captured = capture(model, (torch.randn(4, 6),), {})
    assert [output.kind for output in captured.program.outputs] == ["output"]
    assert not inputs(captured, "tangent")


def test_tied_weights_are_one_placeholder_and_both_names_are_known():
    captured = assert_same(Tied(), (torch.randint(0, 11, (2, 5)),))
    assert inputs(captured, "parameter") == ["embed.weight"]
    assert captured.aliases == {"head.weight": "embed.weight"}


def test_inputs_that_require_grad_have_gradients():
    x = torch.randn(4, 6, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    captured = assert_same(Mlp(), (x,), {"bias": bias})
    gradients = [output.name for output in captured.program.outputs if output.kind == "gradient"]
    assert gradients[-2:] == ["x", "bias"]


def test_inference_has_no_tangent_and_no_gradient():
    captured = assert_same(ConvNet().eval(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 4])), train=False)
    assert [output.kind for output in captured.program.outputs] == ["output"]
    assert not inputs(captured, "tangent")
    assert "aten.convolution_backward.default" not in ops(captured)


def test_nothing_is_allocated():
    with torch.device("meta"):
        model = Mlp(1 << 14)
        x = torch.empty(1 << 20, 1 << 14)
    captured = capture(model, (x,), {})
    assert captured.program.inputs[0].type.shape == (1 << 15, 1 << 14)


def test_the_graph_runs_on_any_device_and_says_its_dtypes():
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(3, device=x.device) + torch.zeros(3, device=x.device)

    captured = assert_same(Positions(), (torch.randn(2, 3),))
    for node in captured.program.calls:
        assert not {"device", "layout", "pin_memory"} & set(node.kwargs)
        assert "arange" not in node.name or node.kwargs["dtype"] == torch.int64
        assert "zeros" not in node.name or node.kwargs["dtype"] == torch.float64


def test_views_say_their_sizes():
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 2).expand(3, -1, -1).reshape(3, -1)

    captured = assert_same(Flat(), (torch.randn(4, 6),))
    assert all(-1 not in node.args[1] for node in captured.program.calls)


def test_every_node_has_a_type_and_arguments_of_plain_kinds():
    captured = assert_same(ConvNet(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 4])))
    program = captured.program
    for node in program.graph.nodes:
        if node.op != "output":
            assert set(node.meta) - {"checked"} == {"type", "source"}
            assert program.types(node)
            leaves, _ = flatten((list(node.args), dict(node.kwargs)))
            assert all(isinstance(v, (fx.Node, int, float, str, bool, torch.dtype, torch.memory_format, type(None)))
                       for _, v in leaves), node  # fmt: skip
    backward = next(node for node in program.calls if "convolution_backward" in str(node.target))
    assert program.types(backward)[0] is None  # the input requires no gradient
    assert program.types(backward)[1] == TensorType((4, 3, 3, 3), torch.float64)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0]


class Of(nn.Module):
    """A function of a weight and the input, as a model."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


def force(weight: Tensor, x: Tensor) -> Tensor:
    """A gradient inside the forward, as in models of forces."""
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad((x @ weight).pow(3).sum(), x, create_graph=True)
    return found.square().sum()


def half(weight: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ weight.float()).float().sum()


def written(weight: Tensor, x: Tensor) -> Tensor:
    """Writes into a view of its own tensor."""
    y = (x @ weight).clone()
    y[:, :, 1:3].mul_(2).add_(1)
    y[0].zero_()
    return y.sigmoid()


@pytest.mark.parametrize(
    "function",
    [lambda w, x: Square.apply(x @ w).sum(), force, half, written, lambda w, x: torch.vmap(lambda r: r @ w)(x).tanh(),
     lambda w, x: torch.einsum("btd,de->bte", x, w), lambda w, x: x + w.new_tensor([1.0, 2.0]).sum()],
    ids=["autograd.Function", "grad in forward", "autocast", "in-place", "vmap", "einsum", "new_tensor"],
)  # fmt: skip
def test_functions_of_every_kind_equal_eager(function):
    assert_same(Of(function), (torch.randn(2, 4, 6),))


@pytest.mark.parametrize("train", [True, False])
def test_an_encoder_of_torch_equals_eager(train):
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    assert_same(nn.TransformerEncoder(layer, 2).train(train), (torch.randn(2, 4, 6),), train=train)


def test_an_lstm_equals_eager():
    assert_same(nn.LSTM(6, 5, 2, batch_first=True), (torch.randn(2, 4, 6),))


class Packed(nn.Module):
    """Of two sequences one is shorter."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        y, state = self.layers(PackedSequence(x, torch.tensor([2, 1])))
        return y.data, state


def test_all_that_passes_between_recurrent_layers_may_be_dropped():
    """With a chance of one nothing is left to chance: the second layer sees zeros."""
    assert_same(nn.LSTM(6, 5, 2, proj_size=3, bidirectional=True, dropout=1.0), (torch.randn(2, 2, 6),))
    assert_same(nn.GRU(6, 5, 3, bias=False, batch_first=True, dropout=1.0), (torch.randn(2, 2, 6),))
    assert_same(Packed(nn.RNN(6, 5, 2, dropout=1.0)), (torch.randn(3, 6),))


# Outputs and inputs in containers.


def test_containers_are_named_by_path_and_come_back_as_they_were():
    batch = {"x": torch.randn(4, 6), "y": {"target": torch.randn(4, 6)}}
    captured = assert_same(Answers(), (batch, torch.randn(6), torch.randn(6)), {"temperature": 0.5})
    assert captured.convention.names == ("batch.x", "batch.y.target", "xs.0", "xs.1")
    assert [o.name for o in captured.program.outputs if o.kind == "output"] == ["loss", "logits", "extra.0"]


def test_backward_starts_from_the_loss_and_other_outputs_are_constants():
    batch = {"x": torch.randn(4, 6), "y": {"target": torch.randn(4, 6)}}
    assert inputs(assert_same(Answers(), (batch,)), "tangent") == ["loss"]


def test_further_outputs_are_differentiable_by_name():
    batch = {"x": torch.randn(4, 6), "y": {"target": torch.randn(4, 6)}}
    tangents = {"loss": torch.tensor(2.0), "logits": torch.randn(4, 6)}
    captured = assert_same(Answers(), (batch,), tangents=tangents, differentiable=("logits",))
    assert inputs(captured, "tangent") == ["loss", "logits"]
    with pytest.raises(ShardingError, match=r"did you mean logits\?"):
        capture(Answers(), (batch,), {}, differentiable=("logit",))


def test_without_a_scalar_all_float_outputs_are_differentiable():
    captured = assert_same(Answers(), ({"x": torch.randn(4, 6)},))
    assert inputs(captured, "tangent") == ["logits", "extra.0"]


def test_a_lone_scalar_in_a_tuple_is_where_backward_starts():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
            logits = self.mlp(x)
            return logits, logits.square().mean(), None

    captured = assert_same(Pair(), (torch.randn(4, 6),))
    assert inputs(captured, "tangent") == ["1"]


def test_a_slotted_frozen_dataclass_and_an_input_that_is_returned():
    @dataclass(frozen=True, slots=True)
    class Two:
        x: Tensor
        y: Tensor

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Two:
            return Two(x, x * 2)

    captured = assert_same(Both(), (torch.randn(3, requires_grad=True),))
    assert dataclasses.is_dataclass(interpret(captured, Both(), (torch.randn(3),)).output)


def test_a_call_by_keyword_or_with_a_default_is_the_same_call():
    model, x = Mlp(), torch.randn(4, 6)
    convention = capture(model, (x,), {}).convention
    assert convention.flatten((), {"x": x, "scale": 1.0, "bias": None}) == [x]
    assert call_signature(model, (), {"x": x, "scale": 1.0}, True) == convention.signature


def test_a_call_that_is_not_the_captured_one_is_refused_by_leaf():
    convention = capture(Mlp(), (torch.randn(4, 6), 0.5), {}).convention
    with pytest.raises(ShardingError) as raised:
        convention.flatten((torch.randn(3, 6), 0.25), {"bias": torch.randn(6)})
    assert str(raised.value) == (
        "3 problems:\n"
        "input 'bias': given as f64[6]\n"
        "  the program was captured without it\n"
        "  leave it out, or compile again with 'bias'\n"
        "input 'x': f64[3, 6]\n"
        "  the program was captured for f64[4, 6]\n"
        "  pass an input like the captured one, or compile again for this one\n"
        "input 'scale': 0.25\n"
        "  the program was captured for 0.5\n"
        "  pass an input like the captured one, or compile again for this one"
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda m, x: call_signature(m, (x[:2],), {}, True),
        lambda m, x: call_signature(m, (x.float(),), {}, True),
        lambda m, x: call_signature(m, (x.clone().requires_grad_(),), {}, True),
        lambda m, x: call_signature(m, (x, 2.0), {}, True),
        lambda m, x: call_signature(m, (x, 1), {}, True),
        lambda m, x: call_signature(m, (x,), {}, False),
        lambda m, x: call_signature(copy.deepcopy(m).eval(), (x,), {}, True),
        lambda m, x: call_signature(copy.deepcopy(m).requires_grad_(False), (x,), {}, True),
    ],
)
def test_a_signature_tells_calls_apart_that_need_another_program(other):
    model, x = Mlp(), torch.randn(4, 6)
    mine = call_signature(model, (x,), {}, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert mine != call_signature(model, (x,), {}, True)
    assert mine == call_signature(model, (torch.zeros(4, 6),), {}, True)
    assert hash(mine) == hash(call_signature(model, (torch.zeros(4, 6),), {}, True))
    assert mine != other(model, x)


# transformers.


def test_gpt2_of_transformers():
    model = tiny_gpt2()
    ids = torch.randint(0, 17, (2, 8))
    captured = assert_same(model, (), {"input_ids": ids, "labels": ids})
    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert model.config.use_cache is True
    assert inputs(captured, "tangent") == ["loss"]


def test_gpt2_takes_the_path_for_compilers_where_the_eager_one_reads_the_mask():
    model = tiny_gpt2()
    ids, mask = torch.randint(0, 17, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    assert_same(model, (), {"input_ids": ids, "labels": ids, "attention_mask": mask})


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 13}


def test_llama_bert_and_t5_of_transformers():
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, T5Config
    from transformers import T5ForConditionalGeneration as T5

    ids = torch.randint(0, 13, (2, 8))
    call = {"input_ids": ids, "labels": ids}
    assert_same(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, pad_token_id=0)), (), call)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert_same(BertForMaskedLM(BertConfig(**SMALL, **off)), (), call | {"attention_mask": torch.ones_like(ids)})
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 13}
    assert_same(T5(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)), (), call)


def test_a_key_value_cache_is_an_output_and_an_input():
    model = tiny_gpt2().eval()
    first, second = torch.randint(0, 17, (2, 6)), torch.randint(0, 17, (2, 1))
    captured = assert_same(model, (first,), train=False)
    outputs = [output.name for output in captured.program.outputs]
    assert outputs == ["logits", *(f"past_key_values.layers.{i}.{x}" for i in range(2) for x in ("keys", "values"))]
    cache = interpret(captured, model, (first,)).output.past_key_values
    captured = capture(model, (second,), {"past_key_values": cache}, train=False)
    with torch.no_grad():
        whole = model(torch.cat([first, second], 1)).logits[:, -1:]
    torch.testing.assert_close(interpret(captured, model, (second,), {"past_key_values": cache}).output.logits, whole)


# Where nodes come from.


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x.square().sum()


def test_every_node_knows_its_module_its_line_and_its_phase():
    captured = capture(Blocks(), (torch.randn(4, 6),), {})
    program = captured.program
    first = Mlp.forward.__code__.co_firstlineno
    gelus = [program.source(node) for node in program.calls if "gelu" in str(node.target)]
    line = f"test_capture.py:{first + 1}"
    assert gelus == [
        Source("h.0", line, "forward"), Source("h.1", line, "forward"),
        Source("h.1", line, "backward"), Source("h.0", line, "backward"),
    ]  # fmt: skip
    for node in program.calls:
        source = program.source(node)
        assert source.location.startswith("test_capture.py:"), node
        assert source.phase == ("forward" if node.name in _before_tangent(program) else "backward"), node
    products = [program.source(node).module for node in program.calls if node.target is aten.mm.default]
    assert products == [f"h.{i}.{name}" for i in (1, 0) for name in ("down", "down", "up", "up")][: len(products)]


def _before_tangent(program: Any) -> set[str]:
    """The nodes that do not depend on a tangent and that come before the first that does."""
    names: set[str] = set()
    tangents = {node for node, entry in zip(program.placeholders, program.inputs, strict=True)
                if entry.kind == "tangent"}  # fmt: skip
    for node in program.graph.nodes:
        if tangents & set(node.all_input_nodes):
            break
        names.add(node.name)
    return names


@pytest.mark.filterwarnings("ignore:forward of Keeper changes calls")
def test_capture_leaves_no_trace_on_the_model():
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.calls, self.cache, self.seen = 0, {}, []
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cache["x"] = self.last = self.linear(x)
            self.seen.append(self.last)
            self.count += 1
            return self.last

    model = Keeper()
    handle = model.linear.register_forward_hook(lambda module, args, output: output * 2)
    before = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert_same(model, (torch.randn(2, 3),))
    capture(model, (torch.randn(2, 3),), {})
    assert (model.calls, model.cache, model.seen, model.count.item()) == (0, {}, [], 0)
    assert not hasattr(model, "last")
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == before
    handle.remove()
    assert not model.linear._forward_hooks and not model._forward_pre_hooks


class Memoizes(nn.Module):
    """Makes its bias once, as models do with masks and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    @functools.lru_cache
    def bias(size: int) -> Tensor:
        return torch.arange(float(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias(4) + positions(4) + slopes(4)


@functools.cache
def positions(size: int) -> Tensor:
    return torch.ones(size).cumsum(0)


def in_a_closure(function):
    """A decorator that keeps its cache where no attribute leads to it, as transformers does."""
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def call(*args):
        return cached(*args)

    return call


@in_a_closure
def slopes(size: int) -> Tensor:
    return torch.ones(size).cumsum(0)


def test_caches_of_a_model_hold_no_tensor_of_the_trace():
    model, x = Memoizes(), torch.randn(2, 4)
    assert not assert_same(model, (x,)).convention.constants
    kept = Memoizes.bias(4)
    assert_same(model, (x,))
    assert Memoizes.bias(4) is kept  # what was memoized before stays
    capture(model, (x,), {})
    assert all(type(each) is Tensor for each in (Memoizes.bias(4), positions(4), slopes(4)))


# Constants.


def test_a_number_made_in_forward_is_inline_and_a_tensor_is_a_buffer():
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(3)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(0.5) + torch.tensor([1.0, 2.0, 3.0]) + self.table

    model = Constants()
    captured = assert_same(model, (torch.randn(2, 3, requires_grad=True),))
    assert inputs(captured, "buffer") == ["constant.0", "table"]
    assert capture(model, (torch.randn(2, 3),), {}).convention.constants["table"] is model.table
    assert "aten.scalar_tensor.default" in ops(captured)
    assert all(node.op != "get_attr" for node in captured.program.graph.nodes)


@pytest.mark.parametrize(
    "given",
    [
        lambda x: torch.tensor([row.mean() for row in x]),
        lambda x: torch.tensor([[x[0, 0].half(), 1.5], [1, True]]),
        lambda x: torch.as_tensor([x[:1, :1], x[1:, 1:2]], dtype=torch.double),
        lambda x: torch.tensor((x.argmax(), 2), device=x.device),
        lambda x: x[0, [x[0].argmax(), 1]],
        lambda x: x[tuple(zip(*torch.stack([x[0].argsort() % 2, x[1].argsort()], 1), strict=True))],
    ],
)
def test_a_list_of_numbers_that_are_tensors_is_a_stack_of_them(given: Any) -> None:
    class Listed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, given(x.detach())

    assert_same(Listed(), (torch.randn(2, 3, requires_grad=True),))


def test_a_branch_on_what_is_known_without_inputs_is_taken():
    class Known(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (torch.arange(x.shape[0]).diff() == 1).all():
                return x * 2
            return x

    captured = assert_same(Known(), (torch.randn(3),))
    assert ops(captured) == {"aten.mul.Tensor"}


def test_a_check_over_values_is_taken_to_hold():
    class Checks(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            torch._check_tensor_all(x > -100)
            torch._assert_async(x.max() < 100)
            return super().forward(x)

    assert_same(Checks(), (torch.randn(2, 6),))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_module_converted_in_forward_to_the_dtype_that_it_has_is_itself():
    class Converts(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.up.to(x.dtype)
            return super().forward(x)

    assert_same(Converts(), (torch.randn(2, 6),))


def test_values_computed_at_capture_cost_no_more_for_a_larger_batch():
    class Packed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
            steps = torch.diff(positions, prepend=positions[:, :1] - 1)
            if ((steps != 1).cumsum(-1)[:, -1] == 0).all() and not (positions < 0).any():
                return x * 2
            return x

    captured = capture(Packed(), (torch.empty(1 << 40, 8, device="meta"),), {})
    assert ops(captured) == {"aten.mul.Tensor"}


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda rows: rows.sum() == 12, True),
        (lambda rows: rows.cumsum(0)[-1, 1] == 4, True),
        (lambda rows: (rows + torch.arange(4).unsqueeze(1)).max() == 5, True),
        (lambda rows: torch.cat([rows, rows]).shape[0] == 8 and torch.cat([rows, rows])[:, 2].sum() == 16, True),
        (lambda rows: (rows == rows.t().contiguous().t()).all(), True),
        (lambda rows: (rows > torch.tensor(1)).any(), True),
        (lambda rows: (rows.float().mean(0) > 1).all(), False),
    ],
)
def test_values_computed_at_capture_are_right_on_equal_rows(ask, expected):
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if ask(torch.arange(3).unsqueeze(0).expand(4, -1)) else x * 3

    rows = torch.arange(3).unsqueeze(0).expand(4, -1)
    assert bool(ask(rows)) is expected
    captured = assert_same(Asks(), (torch.randn(3),))
    assert [node.args[1] for node in captured.program.calls] == [2 if expected else 3]


def test_a_tensor_that_requires_grad_must_be_a_parameter():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [nn.Parameter(torch.randn(3))]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weights[0]

    with pytest.raises(CaptureError, match=r"no parameter or buffer, yet it requires grad\n  register it"):
        capture(Hidden(), (torch.randn(3),), {})


# What has no graph.


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) > 0:
            return x
        return -x


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(x.detach().numpy().max())


class InPlaceOfComputed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x.sum()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).sum()


@pytest.mark.parametrize(
    ("model", "line", "problem"),
    [
        (Branch(), "if torch.rand(()) > 0:", "what runs next depends on the value of a tensor"),
        (Numpy(), "return x + float(x.detach().numpy().max())", "NumPy reads the values of a tensor"),
    ],
)
def test_code_that_cannot_be_captured_is_an_error_that_names_the_line(model, line, problem):
    with pytest.raises(CaptureError) as raised:
        capture(model, (torch.randn(3),), {})
    number = type(model).forward.__code__.co_firstlineno + 1
    assert str(raised.value).startswith(f"test_capture.py:{number}: {line}\n")
    assert problem in str(raised.value)


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 2
        return self.linear(x).sum()


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.square().sum().backward()
        return x


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x.diag().to_sparse(), x[:, None])


class Chance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Assigns(), "the assignment to .data is seen by no graph\n  write to a buffer with copy_"),
        (Backward(), "the model itself calls backward\n  return the loss"),
        (Sparse(), "a tensor here is sparse_coo\n  compute with dense tensors: to_dense()"),
        (Chance(), "forward of Chance\n  it draws from random: what was drawn during capture would be drawn in every"),
    ],
)
def test_an_effect_that_a_graph_would_silently_omit_is_refused(model, problem):
    with pytest.raises(CaptureError) as raised:
        capture(model, (torch.randn(3, requires_grad=True),), {})
    assert problem in str(raised.value)


def test_a_number_that_forward_counts_is_warned_of():
    with pytest.warns(UserWarning, match="forward of Counter: it changes calls\n  that happens while it is captured"):
        capture(Counter(), (torch.randn(3),), {})


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss, self.seen, self.cache = 0.0, [], {}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.loss = x.square().mean()
        self.seen.append(x.shape)
        self.cache["x"] = x
        return x * 2


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_what_torchs_own_layers_leave_in_attributes_is_not_warned_of(layer, recwarn):
    capture(layer(3, 4), (torch.randn(2, 3),), {})
    assert not [each for each in recwarn if "it changes" in str(each.message)]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:] = x
        return x + self.cache


def test_a_write_to_a_plain_tensor_is_refused():
    with pytest.raises(CaptureError, match="a plain attribute(.|\n)*register_buffer") as raised:
        capture(Writes(), (torch.randn(3),), {})
    assert "self.cache[:] = x" in str(raised.value)


def test_what_forward_leaves_in_attributes_is_warned_of():
    with pytest.warns(UserWarning, match="forward of Keeps: it changes loss, seen, cache\n.*\n.*return what is read"):
        capture(Keeps(), (torch.randn(3),), {})


def test_an_input_that_forward_lets_require_grad_is_no_parameter():
    class Requires(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.requires_grad_()).sum()

    captured = capture(Requires(), (torch.randn(3),), {})
    assert [output.name for output in captured.program.outputs] == ["output", "linear.weight", "linear.bias"]


def test_an_input_changed_in_place_has_a_new_value():
    captured = capture(InPlace(), (torch.randn(3),), {})
    assert [(output.name, output.kind) for output in captured.program.outputs] == [
        ("output", "output"),
        ("x", "changed"),
    ]
    problem = r"input 'x'\n  the forward changes it in place \(f64\[3\]\), and it has a gradient\n  write to a c"
    with pytest.raises(CaptureError, match=problem):
        capture(InPlaceOfComputed(), (torch.randn(3, requires_grad=True),), {})


def test_an_error_of_the_model_itself_keeps_its_type():
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("three columns, please")

    with pytest.raises(ValueError, match="three columns, please"):
        capture(Strict(), (torch.randn(3),), {})


# Random ops.


class Dropouts(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x))
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=self.drop.p)
        return F.dropout(x, self.drop.p).sum()


def test_every_dropout_is_native_dropout_or_that_of_attention_forward_and_backward():
    captured = capture(Dropouts(), (torch.randn(2, 4, 8),), {})
    drops = [node for node in captured.program.calls if node.target is aten.native_dropout.default]
    backs = [node for node in captured.program.calls if node.target is aten.native_dropout_backward.default]
    random = [node for node in captured.program.calls if torch.Tag.nondeterministic_seeded in node.target.tags]
    attention = [node for node in captured.program.calls if node.target is TILED]
    assert (len(drops), len(backs), len(attention)) == (2, 2, 1) and {*random} == {*drops, *attention}
    assert [node.args[1:] for node in drops] == [(0.5, True)] * 2 and arguments(attention[0])["dropout_p"] == 0.5


def test_a_checkpointed_block_is_drawn_once():
    class Checkpointed(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.inner, self.options = Dropouts(), options

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, **self.options)

    for reentrant in (False, True):
        captured = capture(Checkpointed(use_reentrant=reentrant), (torch.randn(2, 4, 8, requires_grad=True),), {})
        targets = [node.target for node in captured.program.calls]
        assert targets.count(aten.native_dropout.default) == 2 and targets.count(TILED) == 1


# Annotations in the graph.


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return annotate(self.mlp(x), P("dp", None)).sum()


def test_annotate_leaves_an_op_in_forward_and_backward_and_nothing_outside():
    model, x = Annotated(), torch.randn(4, 6)
    captured = assert_same(model, (x,))
    marks = [node for node in captured.program.calls if node.target is torch.ops.shardc.annotate.default]
    assert [node.args[1:] for node in marks] == [("dp,-",), ("dp,-",)]
    assert [captured.program.source(node).phase for node in marks] == ["forward", "backward"]
    assert annotate(x, P("dp")) is x


def test_a_modules_output_is_annotated_by_its_path():
    said = Match("module", "mlp.up", P(None, "tp", priority=1), "*.up")
    captured = assert_same(Answers(), ({"x": torch.randn(4, 6)},), modules={"mlp.up": said})
    marks = [node for node in captured.program.calls if node.target is torch.ops.shardc.annotate.default]
    assert [node.args[1:] for node in marks] == [("-,tp", (0, 1))] * 2
    assert [node.kwargs for node in marks] == [{"text": said.text}] * 2
    assert [captured.program.source(node).module for node in marks] == ["mlp.up", "mlp.up"]


def test_a_tensor_leaf_prints_its_type():
    assert str(TensorLeaf(TensorType((2, 3), torch.float32))) == "f32[2, 3]"


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_model_is_captured_while_autograd_looks_for_anomalies() -> None:
    with torch.autograd.detect_anomaly():
        captured = capture(nn.Linear(3, 2), (torch.ones(4, 3),), {})
        assert torch.is_anomaly_enabled()
    assert captured.program.calls
