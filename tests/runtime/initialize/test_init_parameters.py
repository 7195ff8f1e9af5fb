"""Initial parameters: the model's own initialisers give the same bits on every mesh; a rank makes its shards alone."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from conformance.draws import all_meshes
from gpt import GPT, Config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel

import shardc
from shardc import Mesh, P, Sharding, ShardingError
from shardc.capture.initial_values import Initialized, record_initializers
from shardc.language.errors import CaptureError
from shardc.language.sharding import DimSharding
from shardc.passes.canonicalize.canonicalize import canonicalize
from shardc.passes.canonicalize.draw_random import name_draws
from shardc.runtime.initialize.initialize import initialize

Make = Callable[[], nn.Module]


def hf(model_type: str, **sizes: int) -> Make:
    return lambda: AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))


SMALL_LLAMA = {"hidden_size": 20, "intermediate_size": 30, "num_attention_heads": 2, "num_hidden_layers": 1}
MODELS: dict[str, Make] = {
    "gpt": lambda: GPT(Config(vocab=23, context=6, layers=1, heads=2, width=10)),
    "tied gpt": lambda: GPT(Config(vocab=23, context=6, layers=1, heads=2, width=10, tied=True)),
    "hf gpt2": hf("gpt2", n_layer=1, n_embd=20, n_head=2, vocab_size=31, n_positions=7),
    "hf llama": hf("llama", vocab_size=31, **SMALL_LLAMA),
    "hf bert": hf("bert", vocab_size=31, **SMALL_LLAMA),
    "hf vit": hf("vit", image_size=8, patch_size=4, **SMALL_LLAMA),
    "hf mamba": hf("mamba", vocab_size=31, hidden_size=12, num_hidden_layers=1),
    "hf t5": hf("t5", vocab_size=31, d_model=12, d_kv=6, d_ff=10, num_layers=1, num_heads=2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 2, 12, batch_first=True),
    "lstm": lambda: nn.LSTM(6, 5, 2),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Embedding(9, 5, padding_idx=3)),
}


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@cache
def recorded(name: str) -> Initialized:
    found = record_initializers(MODELS[name])
    return replace(found, program=canonicalize(name_draws(found.program)))


def cut_everywhere(mesh: Mesh) -> Callable[[str, tuple[int, ...]], Sharding]:
    """Each dim over an axis of its own, the last over those that are left; sizes seldom divide, some are smaller."""

    def sharding(name: str, shape: tuple[int, ...]) -> Sharding:
        axes = [mesh.axis(axis) for axis in mesh.axis_names]
        dims = [DimSharding((axes.pop(0),) if axes else ()) for _ in shape]
        if dims and axes:
            dims[-1] = DimSharding((*dims[-1].axes, *axes))
        return Sharding(mesh, tuple(dims))

    return sharding


@pytest.mark.filterwarnings("ignore:made whole")
@pytest.mark.parametrize(
    "name", ["hf gpt2", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("gpt", "hf llama"))]
)
def test_every_mesh_of_at_most_16_ranks_gets_the_same_bits(name: str) -> None:
    found = recorded(name)
    digests = {mesh: digest(initialize(found, mesh, cut_everywhere(mesh), seed=3)) for mesh in all_meshes(16)}
    assert len(digests) == 42 and len(set(digests.values())) == 1


@pytest.mark.filterwarnings("ignore:made whole")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_and_the_function_that_makes_it_get_the_same_bits(name: str) -> None:
    one, seen = Mesh(a=1), set()
    for seed, mesh in ((3, one), (3, Mesh(a=3, b=2)), (4, one)):
        seen.add(digest(initialize(recorded(name), mesh, cut_everywhere(mesh), seed)))
    assert len(seen) == 2, "one for each seed"
    if name not in ("gpt", "tied gpt", "transformer"):  # constructors that write more, or copy layers
        assert digest(shardc.init_parameters(on_meta(MODELS[name]), Mesh(a=2), seed=3)) in seen


@pytest.mark.parametrize("name", MODELS)
def test_values_are_distributed_as_torch_draws_them_and_what_is_computed_is_equal(name: str) -> None:
    torch.manual_seed(0)
    eager, ours = MODELS[name](), initialize(recorded(name), Mesh(a=1), cut_everywhere(Mesh(a=1)), seed=0)
    assert ours.state_dict().keys() == eager.state_dict().keys()
    for key, expected in {**eager.state_dict(), **dict(eager.named_buffers())}.items():
        found = {**ours.state_dict(), **dict(ours.named_buffers())}[key]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
        found, expected = found.double(), expected.double()
        values = expected.flatten().unique()
        if expected.numel() < 8 or len(values) <= expected.numel() // 4 or key.endswith(("inv_freq", "A_log", "D")):
            if len(values) <= 2 or not key.endswith(("weight", "bias")):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=key)
        else:
            error = 6 * expected.std() / math.sqrt(expected.numel())
            assert abs(found.mean() - expected.mean()) < 2 * error, key
            assert abs(found.std() - expected.std()) < 2 * error, key


INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda w: nn.init.uniform_(w, -2, 3),
    "normal_": lambda w: nn.init.normal_(w, 1, 3),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, 0.5, 1.0, -1.0, 2.0),
    "constant_": lambda w: nn.init.constant_(w, 0.3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.25),
    "data": lambda w: w.data.normal_().mul_(0.1).clamp_(-0.2, 0.2),
    "exponential_": lambda w: w.data.exponential_(2.0),
    "a block": lambda w: (w.data.normal_(), w.data[3:11, ::2].fill_(0.5))[0],
    "a row": lambda w: (w.data.normal_(), w.data[4].zero_())[0],
    "a transpose": lambda w: w.data.t().copy_(torch.arange(40.0 * 24).view(24, 40)),
    "a view": lambda w: w.data.view(5, 8, 24)[1:3].uniform_(),
    "of float64": lambda w: w.data.copy_(torch.randn(40, 24, dtype=torch.float64)),
    "of pieces": lambda w: w.data.copy_(torch.cat([torch.randn(16, 24), torch.zeros(24, 24)])),
    "of powers": lambda w: w.data.copy_(2.0 ** torch.linspace(0, 3, 40)[:, None].expand(40, 24)),
    "sigmoid of a draw": lambda w: w.data.normal_().sigmoid_(),
    "an outer product": lambda w: w.data.copy_(torch.arange(40.0)[:, None].cos() * torch.randn(24)),
    "bernoulli_": lambda w: w.data.bernoulli_(0.3),
    "randperm": lambda w: w.data.copy_(torch.randperm(960).view(40, 24)),
}


class Weight(nn.Module):
    def __init__(self, init: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 24))
        init(self.weight)


@pytest.mark.filterwarnings("ignore:made whole")
@pytest.mark.parametrize("name", INITS)
def test_every_initialiser_gives_the_same_bits_on_every_mesh_and_torchs_distribution(name: str) -> None:
    found = record_initializers(lambda: Weight(INITS[name]))
    found = replace(found, program=canonicalize(name_draws(found.program)))
    whole = initialize(found, Mesh(a=1), cut_everywhere(Mesh(a=1)), seed=3).weight
    for mesh in (Mesh(a=2), Mesh(a=3), Mesh(a=7, b=2), Mesh(a=2, b=3, c=2), Mesh(a=13)):
        assert torch.equal(initialize(found, mesh, cut_everywhere(mesh), seed=3).weight, whole), mesh
    torch.manual_seed(1)
    eager = Weight(INITS[name]).weight.detach()
    num_draws = 24 if name == "an outer product" else eager.numel()
    spread = eager.std().item() / math.sqrt(num_draws)
    assert abs(whole.mean() - eager.mean()) <= 6 * spread + 1e-6
    assert abs(whole.std() - eager.std()) <= 6 * spread + 1e-6
    assert (
        whole.min() >= eager.min() - 1.5 * eager.std() - 1e-6 and whole.max() <= eager.max() + 1.5 * eager.std() + 1e-6
    )


def test_an_orthogonal_matrix_is_orthogonal_and_said_to_be_made_whole() -> None:
    with pytest.warns(UserWarning, match=r"initial value of weight: .*linalg_qr.*\n  it is made whole on every rank"):
        found = shardc.init_parameters(lambda: Weight(nn.init.orthogonal_), Mesh(a=2), {"weight": P("a")}).weight
    torch.testing.assert_close(found.T @ found, torch.eye(24), rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements that a float tensor had which an op made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() > 0:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("name", ["gpt", "hf gpt2", "hf llama", "hf bert", "hf vit"])
def test_no_tensor_larger_than_the_shard_is_made(name: str) -> None:
    from shardc.runtime.initialize.initialize import Evaluator, piece_region

    found, mesh = recorded(name), Mesh(a=4)
    cpu = torch.device("cpu")
    evaluator = Evaluator(found.program, torch.tensor([3, 0]), found.constants, cpu)
    for output, node in zip(found.program.outputs, found.program.results, strict=True):
        shape = found.program.value_type(found.program.value(node)).shape
        if "freq" in output.name or len(shape) < 2 or shape[0] == 1:
            continue  # powers run whole, and a vector's global indices are a vector
        sharding = cut_everywhere(mesh)(output.name, shape)
        region = piece_region(sharding, shape, 0, cpu)
        with Largest() as largest:
            piece = evaluator.value(node, region)
        assert largest.numel <= max(piece.numel(), *shape), (output.name, shape, piece.shape)
        assert not evaluator.whole


def test_tied_weights_stay_tied_and_a_padding_row_is_zero() -> None:
    model = shardc.init_parameters(MODELS["tied gpt"], Mesh(a=2))
    assert model.head.weight is model.tokens.weight and isinstance(model.head.weight, nn.Parameter)
    table = shardc.init_parameters(MODELS["conv"], Mesh(a=2))[2].weight
    assert not table[3].any() and table[2].any()


def test_values_that_a_constructor_wrote_on_meta_are_not_lost_silently() -> None:
    with pytest.raises(ShardingError, match=r"'tokens.weight' and 10 more: written 2 times when the model was made"):
        shardc.init_parameters(on_meta(MODELS["gpt"]), Mesh(a=2))
    again = shardc.init_parameters(on_meta(MODELS["gpt"]), Mesh(a=2), initialize=_as_gpt)
    assert digest(again) == digest(shardc.init_parameters(MODELS["gpt"], Mesh(a=1)))


def _as_gpt(model: nn.Module) -> None:
    from gpt import _initialize

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    model.apply(_initialize)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)


def test_a_parameter_that_no_initialiser_writes_is_named() -> None:
    with pytest.raises(ShardingError, match="initial value of scale, mask: 2 on meta\n  no initialiser writes it"):
        shardc.init_parameters(on_meta(Bare), Mesh(a=2))
    with pytest.raises(ShardingError, match="initial value of scale: 1 on meta"):
        shardc.init_parameters(Bare, Mesh(a=2))


def test_an_initialiser_that_branches_on_what_it_drew_is_named_by_its_line() -> None:
    def reject(weight: Tensor) -> Tensor:
        while weight.data.normal_().max() > 3:
            pass
        return weight

    with pytest.raises(CaptureError, match=r"test_init_parameters.py:\d+: while weight.data.normal_"):
        shardc.init_parameters(lambda: Weight(reject), Mesh(a=2))


class Attributes(nn.Module):
    """Numbers read from tensors that do not depend on chance, tensors as attributes, real ones from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.table = torch.arange(6.0).square()
        self.register_buffer("outside", TABLE * 2)
        self.copies = nn.ModuleList(copy.deepcopy(layer) for layer in [nn.Linear(3, 3)] * 2)


TABLE = torch.tensor([1.0, 4.0])


def test_attributes_and_copies_come_out_as_the_constructor_makes_them() -> None:
    model, eager = shardc.init_parameters(Attributes, Mesh(a=2)), Attributes()
    assert model.rates == eager.rates
    assert torch.equal(model.table, eager.table) and torch.equal(model.outside, eager.outside)
    assert torch.equal(model.copies[0].weight, model.copies[1].weight), "copies of one draw"
    assert model.copies[0].weight.requires_grad and not model.copies[0].weight.is_meta


def test_a_constructor_may_convert_and_a_module_may_list_its_parameters() -> None:
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.gpt = nn.LSTM(6, 5), MODELS["tied gpt"]().to(torch.float64)
            self.cell.double()

    model = shardc.init_parameters(Converted, Mesh(a=2))
    assert model.gpt.head.weight is model.gpt.tokens.weight and model.gpt.head.weight.dtype == torch.float64
    assert model.cell(torch.ones(3, 6, dtype=torch.float64))[0].abs().sum() > 0
    assert all(weight is held for weight, held in zip(model.cell._flat_weights, model.cell.parameters(), strict=True))


def test_parameters_that_are_not_on_meta_keep_their_values_unless_written() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given, self.drawn = nn.Parameter(TABLE.clone()), nn.Linear(2, 2, device="meta")

    model = shardc.init_parameters(Half(), Mesh(a=2), {"given": P("a")})
    assert torch.equal(model.given, TABLE) and not model.drawn.weight.is_meta


def test_an_initialiser_may_write_to_a_tensor_that_is_not_on_meta() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = nn.Linear(2, 2, device="meta")
            self.register_buffer("table", torch.ones(3))

        def _init_weights(self, module: nn.Module) -> None:
            if module is self:
                self.table.copy_(torch.arange(3.0))

    model = shardc.init_parameters(Table(), Mesh(a=2), seed=1)
    assert torch.equal(model.table, torch.arange(3.0))
    first = model.drawn.weight.clone()
    assert torch.equal(shardc.init_parameters(model, Mesh(a=3), seed=1).drawn.weight, first)  # drawn once more
    assert not torch.equal(shardc.init_parameters(model, Mesh(a=3), seed=2).drawn.weight, first)


def test_a_model_trains_from_its_initial_parameters() -> None:
    model = shardc.init_parameters(MODELS["gpt"], Mesh(dp=2), {"tokens.weight": P(None, "dp")}, seed=1)
    parallel = shardc.parallelize(model, Mesh(dp=2), {"ids": P("dp"), "targets": P("dp")})
    ids = torch.randint(23, (4, 6))
    loss = parallel(ids, ids)
    loss.backward()
    assert abs(loss.item() - math.log(23)) < 0.2


def test_annotations_of_any_kind_leave_the_bits_alone() -> None:
    expected = digest(initialize(recorded("gpt"), Mesh(a=1), cut_everywhere(Mesh(a=1)), seed=0))
    fused, ids = "*.attn.qkv.weight", torch.zeros(2, 6, dtype=torch.int64)
    blocks = {fused: P(shardc.blocks(3, "a")), "tokens.weight": P(P.OPEN, "a"), "ids": P("a")}
    for mesh in (Mesh(a=2), Mesh(a=4)):
        assert digest(shardc.init_parameters(MODELS["gpt"], mesh, blocks)) == expected
        assert digest(shardc.init_parameters(MODELS["gpt"], mesh, blocks, args=(ids, ids))) == expected
    both = {fused: P(("b", "a")), "*.up.weight": P("b", "a")}
    assert digest(shardc.init_parameters(MODELS["gpt"], Mesh(a=2, b=3), both)) == expected


def test_there_is_no_note_where_every_rank_makes_its_shard_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardc.init_parameters(MODELS["gpt"], Mesh(a=2), {"*.mlp.down.weight": P(None, "a")})
