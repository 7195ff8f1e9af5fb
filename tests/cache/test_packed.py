"""Programs as bytes: what is read is what was written, and nothing in it runs."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import COLUMNS, ROWS
from pipeline_models import Model, data
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import shardc
from shardc import Compiled, Mesh, P, Pipeline, Precision, Remat, Zero
from shardc.cache.packed import NotPackedError, pack_program, unpack_program
from shardc.compile_region import is_same_program
from shardc.program.program import Program
from shardc.program.provenance import Origin

IDS = torch.zeros(4, 8, dtype=torch.long)
TEXT = {"input_ids": IDS, "labels": IDS}
BATCH = {"input_ids": P("dp"), "labels": P("dp")}
SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


class Convolutions(nn.Module):
    """Windows over a cut image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image).square().mean()


def gpt2(**options: Any) -> Compiled:
    """A small GPT-2 with tensor parallelism."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=64))
    plan = {"*.c_attn.weight": P(None, "tp"), "*.attn.c_proj.weight": P("tp"), "lm_head.weight": P("tp")}
    return shardc.compile(model, Mesh(dp=2, tp=2), {**BATCH, **plan}, kwargs=TEXT, **options)


def mixtral() -> Compiled:
    """Experts."""
    config = MixtralConfig(**SMALL, num_key_value_heads=2, intermediate_size=32, num_local_experts=4)
    plan = {"param:*.experts.*": P("tp"), "*.q_proj.weight": COLUMNS, "*.o_proj.weight": ROWS}
    return shardc.compile(MixtralForCausalLM(config), Mesh(dp=2, tp=2), {**BATCH, **plan}, kwargs=TEXT)


COMPILED = {
    "gpt2": gpt2,
    "zero, precision and remat": lambda: gpt2(zero=Zero("dp", 3), precision=Precision(), remat=Remat("*.h.*")),
    "experts": mixtral,
    "windows": lambda: shardc.compile(
        Convolutions(), Mesh(x=4), {"image": P(None, None, "x")}, args=(torch.ones(2, 3, 18, 8),)
    ),
    "stages": lambda: shardc.compile(
        Model(),
        Mesh(pp=2, dp=2),
        {"ids": P("dp"), "targets": P("dp")},
        args=data(),
        pipeline=Pipeline("pp", microbatches=4),
    ),
}


def same(one: Program, other: Program) -> bool:
    """Whether two programs are equal in everything that is part of them."""
    names = (
        "inputs",
        "outputs",
        "mesh",
        "level",
        "pins",
        "notes",
        "options",
        "computed",
        "num_stages",
        "forms",
        "sides",
    )
    return (
        is_same_program(one, other)
        and all(getattr(one, name) == getattr(other, name) for name in names)
        and all(
            (a.name, one.facts(a)) == (b.name, other.facts(b))
            for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True)
        )
    )


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_read_is_what_was_written(name: str) -> None:
    compiled = COMPILED[name]()
    for program in (compiled.program, compiled.whole):
        assert same(unpack_program(pack_program(program)), program)


def test_a_long_way_of_a_cut_is_written() -> None:
    program = gpt2().whole
    origin = Origin("w: P('tp')", 0, ("w", 0))
    for i in range(5000):
        origin = origin.through(f"op_{i}", (f"value_{i}", 0))
    node = next(iter(program.graph.nodes))
    program.set_facts(node, {"origins": (origin,)})
    found = program.facts(next(iter(unpack_program(pack_program(program)).graph.nodes)))["origins"][0]
    assert [each.via for each in found.chain] == [each.via for each in origin.chain]


def test_opaque_calls_are_not_written() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    compiled = shardc.compile(Branches(), Mesh(dp=2), {"x": P("dp")}, args=(torch.ones(4, 2),), train=False)
    with pytest.raises(NotPackedError, match="cond, which is no op"):
        pack_program(compiled.program)


class Harm:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def container(*values: bytes) -> bytes:
    """Pickles as ``pack_program`` joins them."""
    sizes = b"".join(len(value).to_bytes(8, "big") for value in values)
    return zlib.compress(len(values).to_bytes(8, "big") + sizes + b"".join(values))


def test_nothing_that_is_read_runs(tmp_path: Path) -> None:
    path = tmp_path / "harm"
    data = container(pickle.dumps([]), pickle.dumps(Harm(path)))
    with pytest.raises(NotPackedError, match=r"names posix\.mkdir"):
        unpack_program(data)
    assert not path.exists()


class Naming(pickle.Pickler):
    """Writes a persistent id in place of ``Harm``, called with a path."""

    def __init__(self, file: Any, name: Any) -> None:
        super().__init__(file, protocol=5)
        self.name = name

    def persistent_id(self, value: Any) -> Any:
        return self.name if value is os.mkdir else None


@pytest.mark.parametrize(
    "name",
    [
        ("class", "subprocess", "Popen"), ("class", "posix", "mkdir"), ("class", "shardc.cli.main", "main"),
        ("class", "shardc.__main__", "main"), ("class", "shardc.program.program", "ends_of"), ("torch", "load"),
    ],
    ids=str,
)  # fmt: skip
def test_no_function_can_be_named(name: Any, tmp_path: Path) -> None:
    path, file = tmp_path / "harm", io.BytesIO()
    Naming(file, name).dump(Harm(path))
    with pytest.raises(NotPackedError):
        unpack_program(container(pickle.dumps([]), file.getvalue()))
    assert not path.exists()


@pytest.mark.parametrize(
    "name",
    [
        ("function", "os", "mkdir"), ("function", "shardc.cli.main", "main"), ("eval",), ("op", "load_library"),
        ("function", "shardc.program.program", "Program"), ("op", "aten", "add"), ("op", "nothing", "here", "default"),
    ],
)  # fmt: skip
def test_calls_are_of_ops(name: tuple[str, ...]) -> None:
    heads = [name], [("call_function", 0, "x")]
    with pytest.raises(NotPackedError):
        unpack_program(container(pickle.dumps([]), pickle.dumps(heads)))


def test_nodes_are_of_the_kinds_that_programs_have() -> None:
    heads = list[str](), [("call_method", "numpy", "x")]
    with pytest.raises(NotPackedError, match="nodes that no program has"):
        unpack_program(container(pickle.dumps([]), pickle.dumps(heads)))


@pytest.mark.parametrize(
    "data", [b"", b"text", container(), container(pickle.dumps([]), b"\x80"), zlib.compress(b"\xff" * 8)]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((NotPackedError, pickle.UnpicklingError, LookupError, EOFError, ValueError)):
        unpack_program(data)
