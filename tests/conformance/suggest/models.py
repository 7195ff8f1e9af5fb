"""The models of the suite at real sizes, on meta, each with the annotations that people would write.

A maker returns a ``Target``. The annotations are those of ``examples/``, the benchmarks and the zoo, with the names of
each model's parameters: ``tp`` cuts weights, ``sp`` space. No model has more than 12 repeated blocks, so that a whole
compile takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import moe
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from shardc import P

from ..zoo.convolutions import double_convolution
from ..zoo.models import BART, BERT, COLUMNS, LLAMA, ROWS

Annotations = Mapping[str, P]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A model to be trained, its inputs by name, and its annotations by hand.

    ``tensor``: plans of weights over ``tp``, by name. ``sequence``: modules whose outputs are ``[sample, position,
    ...]``, cut by position in Megatron's sequence parallelism. ``experts``: parameters whose first dim counts experts.
    ``space``: the dim of the height, by input. ``table``: a parameter that can be cut by rows. ``blocks``: a glob of
    the repeated modules; empty if there are none. ``has_microbatches``: a pipeline can run the model, because no value
    within a step depends on the whole batch, as the statistics of a batch norm do.
    """

    model: nn.Module
    inputs: Mapping[str, Tensor]
    tensor: Mapping[str, Annotations] = field(default_factory=dict)
    sequence: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    space: Mapping[str, int] = field(default_factory=dict)
    table: str = ""
    blocks: str = ""
    has_microbatches: bool = True

    @property
    def batch(self) -> int:
        """The number of samples of a step: the size of dim 0 of the inputs."""
        return min(len(value) for value in self.inputs.values())

    def data(self, axes: str | tuple[str, ...]) -> dict[str, P]:
        """Annotations that cut the samples of every input over ``axes``."""
        return {f"input:{name}": P(axes) for name in self.inputs}


Maker = Callable[[], Target]
MODELS: dict[str, Maker] = {}


def model(make: Maker) -> Maker:
    """Register a maker under its own name."""
    MODELS[make.__name__] = make
    return make


@cache
def target(name: str) -> Target:
    """A model by its name, on meta, made once in each process."""
    hf.logging.set_verbosity_error()
    with torch.device("meta"):
        found = MODELS[name]()
    found.model.train()
    return found


def tokens(batch: int, length: int) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int64)


def text(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch, length), "labels": tokens(batch, length)}


# Transformers.


@model
def gpt2() -> Target:
    """GPT-2 small."""
    pairs = {"*.attn.c_proj.weight": ROWS, "*.mlp.c_proj.weight": ROWS}  # see examples/hf_gpt2.py: Conv1D is [in, out]
    columns = {"*.attn.c_attn.weight": COLUMNS, "*.mlp.c_fc.weight": COLUMNS, "lm_head.weight": ROWS}
    return Target(
        hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)),
        text(64, 1024),
        {"tp": pairs, "tp + vocabulary": pairs | {"*.wte.weight": ROWS}, "tp by columns": columns},
        sequence=("transformer.drop",),
        blocks="transformer.h.*",
    )


@model
def llama() -> Target:
    """A Llama of 0.9 B parameters, in which four queries share a key."""
    config = hf.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, use_cache=False,
    )  # fmt: skip
    pairs = {"*.self_attn.o_proj.weight": COLUMNS, "*.mlp.down_proj.weight": COLUMNS}
    vocabulary = {"lm_head.weight": ROWS, "model.embed_tokens.weight": ROWS}
    return Target(
        hf.LlamaForCausalLM(config),
        text(64, 2048),
        {"tp": pairs, "tp + vocabulary": pairs | vocabulary, "tp by columns": LLAMA},
        sequence=("model.embed_tokens",),
        blocks="model.layers.*",
    )


@model
def gptj() -> Target:
    """GPT-J with four of its layers, at its own widths."""
    config = hf.GPTJConfig(n_layer=4, use_cache=False)
    pairs = {"*.attn.out_proj.weight": COLUMNS, "*.mlp.fc_out.weight": COLUMNS}
    columns = {"*.attn.[qkv]_proj.weight": ROWS, "*.mlp.fc_in.weight": ROWS, "lm_head.weight": ROWS}
    return Target(
        hf.GPTJForCausalLM(config),
        text(32, 2048),
        {"tp": pairs, "tp + vocabulary": pairs | {"lm_head.weight": ROWS, "*.wte.weight": ROWS},
         "tp by columns": columns},
        sequence=("transformer.drop",),
        blocks="transformer.h.*",
    )  # fmt: skip


@model
def t5() -> Target:
    """T5 base with six of its twelve layers on each side."""
    config = hf.T5Config(d_model=768, d_ff=3072, num_heads=12, num_layers=6, decoder_start_token_id=0, use_cache=False)
    weights = {"*Attention.[qkv].weight": ROWS, "*.wi.weight": ROWS, "lm_head.weight": ROWS}
    pairs = {"*Attention.o.weight": COLUMNS, "*.wo.weight": COLUMNS}
    return Target(
        hf.T5ForConditionalGeneration(config),
        {"input_ids": tokens(128, 512), "labels": tokens(128, 128)},
        {"tp": pairs, "tp by columns": weights},
        sequence=("encoder.dropout",),
        blocks="*.block.*",
    )


@model
def bert() -> Target:
    """BERT base."""
    pairs = {"*.attention.output.dense.weight": COLUMNS, "*.layer.*.output.dense.weight": COLUMNS}
    head = {"cls.predictions.transform.dense.weight": COLUMNS, "cls.predictions.decoder.weight": ROWS}
    return Target(
        hf.BertForMaskedLM(hf.BertConfig()),
        text(128, 512),
        {
            "tp": pairs,
            "tp + vocabulary": pairs | {"cls.predictions.decoder.weight": ROWS},
            "tp by columns": BERT | head,
        },
        sequence=("bert.embeddings",),
        blocks="bert.encoder.layer.*",
    )


@model
def vit() -> Target:
    """ViT base for images of 224 x 224."""
    config = hf.ViTConfig(num_labels=1000)
    inputs = {"pixel_values": torch.empty(256, 3, 224, 224), "labels": torch.empty(256, dtype=torch.int64)}
    model = hf.ViTForImageClassification(config)
    return Target(model, inputs, {"tp": BART}, blocks="vit.layers.*")


@model
def mixtral() -> Target:
    """Four layers of Mixtral's shape; each token goes to two of eight experts."""
    config = hf.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        num_local_experts=8, vocab_size=32000, output_router_logits=True, use_cache=False, sliding_window=None,
    )  # fmt: skip
    attention = {"*.[qkv]_proj.weight": ROWS, "lm_head.weight": ROWS}
    return Target(
        hf.MixtralForCausalLM(config),
        text(64, 1024),
        {"tp by columns": attention | {"*.experts.gate_up_proj": COLUMNS}},
        sequence=("model.embed_tokens",),
        experts=("*.experts.*_proj",),
        blocks="model.layers.*",
        has_microbatches=False,  # the loss of the router depends on the whole batch
    )


@model
def gshard() -> Target:
    """The mixture of experts of ``examples/moe.py``, with 64 experts of 8 M parameters in each of four layers."""
    x = torch.empty(64, 1024, 1024)
    return Target(
        moe.Model(layers=4, width=1024, experts=64),
        {"x": x, "target": torch.empty_like(x)},
        {"tp": {"layers.*.up": P(None, None, "tp")}},
        sequence=("norms.0",),
        experts=("layers.*.up",),
        blocks="layers.*",
    )


# Images.


@model
def resnet() -> Target:
    """ResNet-50."""
    config = hf.ResNetConfig(num_labels=1000)
    inputs = {"pixel_values": torch.empty(256, 3, 224, 224), "labels": torch.empty(256, dtype=torch.int64)}
    channels = {"resnet.encoder.*.layer.0.convolution.weight": ROWS}
    return Target(
        hf.ResNetForImageClassification(config), inputs, {"channels": channels}, space={"pixel_values": 2},
        blocks="resnet.encoder.stages.*.layers.*", has_microbatches=False,
    )  # fmt: skip


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox, 2015: four levels down, four levels up, with skip connections."""

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 19) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.downs = nn.ModuleList(double_convolution(*each) for each in zip((3, *widths), widths, strict=False))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in widths[-2::-1])
        self.joins = nn.ModuleList(double_convolution(2 * each, each) for each in widths[-2::-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        levels = [self.downs[0](x)]
        for down in self.downs[1:]:
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([up(x), levels.pop()], 1))
        return F.cross_entropy(self.head(x), labels)


@model
def unet() -> Target:
    """The paper's U-Net for images of 512 x 512."""
    inputs = {"x": torch.empty(32, 3, 512, 512), "labels": torch.empty(32, 512, 512, dtype=torch.int64)}
    return Target(
        UNet(), inputs, {"channels": {"*.0.weight": ROWS}}, space={"x": 2, "labels": 1}, blocks="*s.[0-9]",
        has_microbatches=False,
    )  # fmt: skip


# A recommender.


def layers(*widths: int) -> nn.Sequential:
    """Linear layers, each with an activation."""
    return nn.Sequential(*(each for pair in pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())))


class Recommender(nn.Module):
    """DLRM, Naumov et al., 2019: maps numbers and categories of a sample to vectors, and their products to a score."""

    def __init__(self, rows: tuple[int, ...], width: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, width) for each in rows)
        self.bottom = layers(numbers, 512, 256, width)
        count = len(rows) + 1
        self.top = nn.Sequential(layers(width + count * count, 1024, 1024, 512, 256), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *vectors], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        score = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked)


@model
def recommender() -> Target:
    """A recommender with a table of 10 M x 128, which takes most of the memory, and seven smaller tables."""
    rows = (10_000_000, 500_000, 200_000, 50_000, 10_000, 1_000, 100, 10)
    inputs = {
        "numbers": torch.empty(65536, 13),
        "categories": torch.empty(65536, len(rows), dtype=torch.int64),
        "clicked": torch.empty(65536),
    }
    dense = {"bottom.*.weight": ROWS, "top.0.*.weight": ROWS}
    return Target(Recommender(rows, 128, 13), inputs, {"tp": dense}, table="tables.0.weight")
