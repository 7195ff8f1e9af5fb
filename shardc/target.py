"""TARGET: the model and inputs that a command works on, from a file, a module or transformers' default config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardc.error import did_you_mean
from shardc.mesh import Mesh
from shardc.outcome import UsageError
from shardc.partition import P


@dataclass(frozen=True, slots=True)
class Target:
    """A model, the inputs to call it with, and the annotations that came with it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, P] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a target: config or function settings, the size of made up inputs, and where those are made.

    ``device="meta"``: only shapes are needed, so nothing is allocated; a function makes its own all the same.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    seq: int | None = None
    device: str = "cpu"


def load_target(text: str, wish: Wish, mesh: Mesh) -> Target:
    """``path.py:function``, ``package.module:function`` or ``hf:MODEL_TYPE``; a UsageError where there is none.

    A function is called with the settings, and with the mesh where it takes a ``mesh``; it returns
    ``(model, args[, kwargs[, annotations]])``.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        raise UsageError(f"TARGET {text!r}: write path.py:function, package.module:function or hf:MODEL_TYPE")
    if place == "hf":
        return _transformers_target(name, wish, mesh)
    if wish.batch or wish.seq:
        raise UsageError(f"TARGET {text!r}: --batch and --seq are for hf: targets; a function takes --set name=value")
    function = _function(place, name)
    try:
        takes_mesh = "mesh" in inspect.signature(function).parameters
        made = function(**wish.settings, **({"mesh": mesh} if takes_mesh else {}))
    except Exception as error:
        raise UsageError(f"TARGET {text!r}: {name}() raised {_raised(error)}") from error
    return _checked(text, made)


def _function(place: str, name: str) -> Callable[..., Any]:
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, vars(module))
        raise UsageError(f"TARGET {place}:{name}: {place} has no function {name!r}{f'; {near}' if near else ''}")
    return function


def _module(place: str) -> ModuleType:
    """A file or module, run as python runs it: what stands beside it can be imported."""
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not path.is_file():
        raise UsageError(f"TARGET {place}: there is no such file")
    sys.path.insert(0, str(path.parent.resolve()) if is_file else os.getcwd())
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except Exception as error:
        raise UsageError(f"TARGET {place}: importing it raised {_raised(error)}") from error


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"target_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _raised(error: Exception) -> str:
    """What was raised, and on which line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _checked(text: str, made: Any) -> Target:
    if not (isinstance(made, tuple) and 2 <= len(made) <= 4 and isinstance(made[0], nn.Module)):
        names = [type(part).__name__ for part in (made if isinstance(made, tuple) else (made,))]
        raise UsageError(
            f"TARGET {text!r} returned {', '.join(names)}: it must return (model, args[, kwargs[, annotations]])"
        )
    args = made[1] if isinstance(made[1], (tuple, list)) else (made[1],)
    return Target(made[0], tuple(args), *made[2:])


# transformers.


def _transformers_target(model_type: str, wish: Wish, mesh: Mesh) -> Target:
    """The default config of a type with random weights; nothing is downloaded."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise UsageError(f"TARGET hf:{model_type} needs transformers: pip install 'shardc[hf]'") from error
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING.keys())
        raise UsageError(f"TARGET hf:{model_type}: transformers has no such model type{f'; {near}' if near else ''}")
    config = AutoConfig.for_model(model_type, **wish.settings)
    torch.manual_seed(0)
    with torch.device(wish.device):
        model, kwargs = _model_and_inputs(config, wish)
    return Target(model, (), kwargs, _default_annotations(model_type, kwargs, mesh))


def _model_and_inputs(config: Any, wish: Wish) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The first of the kinds of model that the type has: what it is trained for comes before what it can do as well."""
    import transformers as hf
    from transformers.models.auto import modeling_auto as auto

    kinds = (
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, hf.AutoModelForSeq2SeqLM, _tokens),
        (auto.MODEL_FOR_MASKED_LM_MAPPING, hf.AutoModelForMaskedLM, _tokens),
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING, hf.AutoModelForCausalLM, _tokens),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, hf.AutoModelForImageClassification, _images),
    )
    for mapping, auto_class, inputs in kinds:
        if type(config) in mapping:
            return auto_class.from_config(config), inputs(config, wish)
    raise UsageError(
        f"TARGET hf:{config.model_type}: inputs are made up for language and image models only; "
        "write a function that returns (model, args, kwargs)"
    )


def _tokens(config: Any, wish: Wish) -> dict[str, torch.Tensor]:
    names = ("input_ids", "decoder_input_ids", "labels") if config.is_encoder_decoder else ("input_ids", "labels")
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or 64
    shape = (wish.batch or 8, wish.seq or min(64, longest))
    return {name: torch.randint(config.vocab_size, shape) for name in names}


def _images(config: Any, wish: Wish) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    batch = wish.batch or 8
    pixels = torch.randn(batch, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch,))}


TWO_WEIGHTS_A_BLOCK = {
    "gpt2": {"transformer.h.*.attn.c_proj.weight": P("tp"), "transformer.h.*.mlp.c_proj.weight": P("tp")}
}


def _default_annotations(model_type: str, kwargs: Mapping[str, Any], mesh: Mesh) -> dict[str, P]:
    """The batch on ``dp``, and on ``tp`` the weights that are known to be enough."""
    data = {name: P("dp") for name in kwargs} if "dp" in mesh.axis_names else {}
    weights = TWO_WEIGHTS_A_BLOCK.get(model_type, {}) if "tp" in mesh.axis_names else {}
    return {**data, **weights}
