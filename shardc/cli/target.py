"""TARGET: the model and inputs that a command works on, from a file, a module or transformers' default config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardc.capture.call import call_leaves
from shardc.capture.refusals import failing_line
from shardc.language.errors import ShardingError, UsageError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import check_model

FORMS = "write path.py:function, package.module:function or hf:MODEL_TYPE"


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
        raise UsageError(
            f"TARGET {text!r}", "it has no function or model type", "a target is a place and a name", FORMS
        )
    if place == "hf":
        return _transformers_target(name, wish, mesh)
    if wish.batch or wish.seq:
        problem = "--batch and --seq are for hf: targets, whose inputs are made up"
        raise UsageError(f"TARGET {text!r}", "a function", problem, "give the function an argument: --set batch=8")
    function = function_of(place, name)
    given = _arguments(text, function, wish, mesh)
    try:
        made = function(**given)
    except (Exception, SystemExit) as error:
        raise _failed(text, f"{name}()", error) from error
    return _checked(text, made)


def function_of(place: str, name: str) -> Callable[..., Any]:
    """The function that a target names; a UsageError where there is none."""
    module = _module(place)
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    what = f"{place} has no {name!r}" if function is None else f"{name!r} is of type {type(function).__name__}"
    remedy = did_you_mean(name, known) or f"name a function of {place}"
    raise UsageError(f"TARGET {place}:{name}", what, "a target names a function", remedy)


def _arguments(text: str, function: Callable[..., Any], wish: Wish, mesh: Mesh) -> dict[str, Any]:
    """What the function is called with: the settings, and the mesh where it takes one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        problem, remedy = "it does not say what it takes", "name a function that is written in Python"
        raise UsageError(f"TARGET {text!r}", f"of type {type(function).__name__}", problem, remedy) from None
    given = {**wish.settings, **({"mesh": mesh} if "mesh" in signature.parameters else {})}
    try:
        signature.bind(**given)
    except TypeError as error:
        absent = [name for name in wish.settings if name not in signature.parameters]
        lost = next((name for name in signature.parameters if name not in given), "NAME")
        near = did_you_mean(absent[0], signature.parameters) or f"leave --set {absent[0]}= out" if absent else ""
        remedy = near or f"write --set {lost}=VALUE"
        raise UsageError(f"TARGET {text!r}", f"the function takes {signature}", str(error), remedy) from None
    return given


def _module(place: str) -> ModuleType:
    """A file or module, run as python runs it: what stands beside it can be imported."""
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not os.path.isfile(path):
        near = did_you_mean(path.name, sorted(other.name for other in path.parent.glob("*.py")))
        remedy = near or "write the path of a Python file from this folder on, path.py:function"
        raise UsageError(f"TARGET {place}", "a file", "there is no such file", remedy)
    sys.path.insert(0, str(path.parent.resolve()) if is_file else os.getcwd())
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and not is_file and f"{place}.".startswith(f"{error.name}."):
            raise _no_module(place) from None
        raise _failed(place, "importing it", error) from error


def _no_module(place: str) -> UsageError:
    near = f"did you mean {place}.py?" if os.path.isfile(f"{place}.py") else did_you_mean(place.lower(), ["hf"])
    return UsageError(f"TARGET {place}", "a module", "there is no such module", near or FORMS)


def _failed(text: str, action: str, error: BaseException) -> UsageError:
    """The error for what the user's own code raised, and on which line."""
    what = f"{action} raised {type(error).__name__}"
    line = _line(error) or (Path(text).name if text.endswith(".py") else "")
    remedy = f"mend {line}, and run the file with python to see more" if line else FORMS
    return UsageError(f"TARGET {text!r}", what, " ".join(str(error).split()) or "it says no more", remedy)


def _line(error: BaseException) -> str:
    """``file.py:line`` of the user's code that an error is about, or through which it passed last."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{Path(error.filename).name}:{error.lineno or 1}"
    return failing_line(error).partition(": ")[0].removeprefix("the model")


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"target_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _checked(text: str, made: Any) -> Target:
    """What a function returned as a target; a UsageError unless it is a tuple of the right types."""
    parts = made if isinstance(made, tuple) else (made,)
    optional = all(part is None or isinstance(part, Mapping) for part in parts[2:])
    if not (isinstance(made, tuple) and 2 <= len(parts) <= 4 and isinstance(parts[0], nn.Module) and optional):
        what = (
            f"it returned {'a tuple of ' * isinstance(made, tuple)}{', '.join(type(part).__name__ for part in parts)}"
        )
        remedy = "return (model, args[, kwargs[, annotations]]): an nn.Module, a tuple and two dicts"
        raise UsageError(f"TARGET {text!r}", what, "that is no model with its inputs", remedy)
    args = parts[1] if isinstance(parts[1], (tuple, list)) else (parts[1],)
    found = Target(parts[0], tuple(args), *(part or {} for part in parts[2:]))
    try:
        check_model(found.model)
        call_leaves(found.model.forward, found.args, found.kwargs)
    except ShardingError as error:
        raise UsageError(f"TARGET {text!r}: {error.who}", error.what, error.problem, error.remedy) from None
    return found


# transformers.


def _transformers_target(model_type: str, wish: Wish, mesh: Mesh) -> Target:
    """The default config of a type with random weights; nothing is downloaded."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        remedy = "install it: pip install 'shardc[hf]'"
        raise UsageError(f"TARGET hf:{model_type}", str(error), "hf: targets need transformers", remedy) from None
    if model_type not in CONFIG_MAPPING:
        remedy = did_you_mean(model_type, CONFIG_MAPPING.keys()) or "name one as in the config.json of a model"
        raise UsageError(f"TARGET hf:{model_type}", "a model type", "transformers has no such model type", remedy)
    _check_settings(CONFIG_MAPPING[model_type](), wish)
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(model_type, **wish.settings)
        with torch.device(wish.device):
            model, kwargs = _model_and_inputs(config, wish)
    except UsageError:
        raise
    except Exception as error:
        sizes = [f"--{name} {size}" for name, size in (("batch", wish.batch), ("seq", wish.seq)) if size]
        settings = " ".join([*(f"--set {name}={value}" for name, value in wish.settings.items()), *sizes])
        what, problem = f"transformers raised {type(error).__name__}", " ".join(str(error).split())
        remedy = f"give values that fit each other, other than {settings}" if settings else "write a function for it"
        raise UsageError(f"TARGET hf:{model_type}", what, problem, remedy) from error
    return Target(model, (), kwargs, _default_annotations(model_type, kwargs, mesh))


def _check_settings(config: Any, wish: Wish) -> None:
    """A UsageError for every setting that the config does not have: transformers would keep it, unread."""
    known = [*config.to_dict(), *config.attribute_map]
    raise_all([
        UsageError(
            f"--set {name}=", f"a field of {type(config).__name__}", "it has no such field",
            did_you_mean(name, known) or f"name one of {', '.join(known[:8])}, ...",
        ) for name in wish.settings if name not in known and not hasattr(config, name)
    ])  # fmt: skip


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
    problem, remedy = "inputs are made up for language and image models only", "write a function: path.py:function"
    raise UsageError(f"TARGET hf:{config.model_type}", type(config).__name__, problem, remedy)


def _tokens(config: Any, wish: Wish) -> dict[str, torch.Tensor]:
    names = ("input_ids", "decoder_input_ids", "labels") if config.is_encoder_decoder else ("input_ids", "labels")
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or 64
    if (wish.seq or 0) > longest > 1 and hasattr(config, "max_position_embeddings"):
        what, problem = f"max_position_embeddings={longest}", "the model has no position for what is longer"
        raise UsageError(f"--seq {wish.seq}", what, problem, f"say --seq {longest} or less")
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
