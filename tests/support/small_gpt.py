"""A small GPT with all parameters drawn from one distribution, and its annotations for a mesh."""

from __future__ import annotations

import torch
from gpt import DATA, GPT, MEGATRON, Config
from torch import Tensor, nn

from shardc import Mesh, P


def drawn_gpt(size: Config, batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model, and the arguments of a call."""
    torch.manual_seed(0)
    model = GPT(size)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, (*torch.randint(size.vocab, (2, batch, size.context)),)


def annotations_on(mesh: Mesh) -> dict[str, P]:
    """Annotations for data and tensor parallelism whose axes the mesh has."""
    return {key: spec for key, spec in {**DATA, **MEGATRON}.items() if set(spec.axes) <= set(mesh.axis_names)}
