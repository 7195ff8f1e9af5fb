"""TARGET: the model and inputs that a command works on, from a file, a module or transformers' default config.

This file imports torch at once, so commands import it only when they load a model.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardc.capture.call import call_leaves
from shardc.capture.containers import flatten, rebuild
from shardc.capture.values.refusals import failing_line
from shardc.cli.targets.model import model_and_inputs
from shardc.language.errors import ShardingError, UsageError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import ceil_div
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
class TargetOptions:
    """Options for loading a target: settings of its config or function, sizes and device of made-up inputs.

    ``device="meta"`` allocates nothing for an ``hf:`` target. A function makes its own inputs in any case.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    seq: int | None = None
    device: str = "cpu"


def load_target(text: str, options: TargetOptions, mesh: Mesh) -> Target:
    """Load ``path.py:function``, ``package.module:function`` or ``hf:MODEL_TYPE``.

    A function is called with the settings, and with ``mesh`` if it has a parameter of that name. It returns
    ``(model, args[, kwargs[, annotations]])``. Raises a UsageError if there is no such target.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        what, problem = "it has no function or model type", "a target is a place and a name"
        raise UsageError(f"TARGET {text!r}", what, problem, FORMS)
    if place == "hf":
        return _transformers_target(name, options, mesh)
    if options.batch or options.seq:
        size = "batch" if options.batch else "seq"
        problem = f"--{size} is for hf: targets, whose inputs are made up"
        raise UsageError(f"TARGET {text!r}", "a function", problem, f"give it an argument: --set {size}=8")
    function = find_function(place, name)
    arguments = _arguments(text, function, options, mesh)
    try:
        result = function(**arguments)
    except (Exception, SystemExit) as error:
        raise _failed(text, f"{name}()", error) from error
    return _checked(text, result)


# Functions.


def find_function(place: str, name: str) -> Callable[..., Any]:
    """The function of a file or module. Raises a UsageError if there is none."""
    module = _import(place)
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    what = f"{place} has no {name!r}" if function is None else f"{name!r} is of type {type(function).__name__}"
    remedy = did_you_mean(name, known) or f"name a function of {place}"
    raise UsageError(f"TARGET {place}:{name}", what, "a target names a function", remedy)


def _import(place: str) -> ModuleType:
    """Import a file or module. It can import the modules beside it, as when python runs it."""
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not os.path.isfile(path):
        others = (other.name for other in path.parent.glob("*.py") if other.is_file())
        remedy = did_you_mean(path.name, sorted(others)) or FORMS
        problem = "it is a pipe or a device, not a file" if path.exists() else "there is no such file"
        raise UsageError(f"TARGET {place}", "a file", problem, remedy)
    sys.path.insert(0, str(path.parent.resolve()) if is_file else os.getcwd())
    try:
        if not is_file:
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"target_{path.stem}", path)
        assert spec is not None and spec.loader is not None, path
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and not is_file and f"{place}.".startswith(f"{error.name}."):
            is_script = os.path.isfile(f"{place}.py")
            near = f"did you mean {place}.py?" if is_script else did_you_mean(place.lower(), ["hf"])
            raise UsageError(f"TARGET {place}", "a module", "there is no such module", near or FORMS) from None
        raise _failed(place, "importing it", error) from error


def _failed(text: str, action: str, error: BaseException) -> UsageError:
    """The error for an exception of the user's own code, with the line that raised it."""
    what = f"{action} raised {type(error).__name__}"
    line = _line(error) or (Path(text).name if text.endswith(".py") else "")
    remedy = f"mend {line}, and run the file with python to see more" if line else FORMS
    return UsageError(f"TARGET {text!r}", what, " ".join(str(error).split()) or "it says no more", remedy)


def _line(error: BaseException) -> str:
    """``file.py:line`` of the user's code: of the syntax error, or the last line that the exception passed."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{Path(error.filename).name}:{error.lineno or 1}"
    return failing_line(error).partition(": ")[0].removeprefix("the model")


def _arguments(text: str, function: Callable[..., Any], options: TargetOptions, mesh: Mesh) -> dict[str, Any]:
    """The arguments to call a function with: the settings, and the mesh if it takes one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        problem, remedy = "it does not say what it takes", "name a function that is written in Python"
        raise UsageError(f"TARGET {text!r}", f"of type {type(function).__name__}", problem, remedy) from None
    arguments = {**options.settings, **({"mesh": mesh} if "mesh" in signature.parameters else {})}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [name for name in options.settings if name not in signature.parameters]
        missing = next((name for name in signature.parameters if name not in arguments), "NAME")
        near = did_you_mean(unknown[0], signature.parameters) or f"leave --set {unknown[0]}= out" if unknown else ""
        remedy = near or f"write --set {missing}=VALUE"
        raise UsageError(f"TARGET {text!r}", f"the function takes {signature}", str(error), remedy) from None
    return arguments


def _checked(text: str, result: Any) -> Target:
    """The result of a function as a target. Raises a UsageError unless it is a tuple of the right types."""
    parts = result if isinstance(result, tuple) else (result,)
    is_optional = all(part is None or isinstance(part, Mapping) for part in parts[2:])
    if not (isinstance(result, tuple) and 2 <= len(parts) <= 4 and isinstance(parts[0], nn.Module) and is_optional):
        types = ", ".join(type(part).__name__ for part in parts)
        what = f"it returned {'a tuple of ' * isinstance(result, tuple)}{types}"
        remedy = "return (model, args[, kwargs[, annotations]]): an nn.Module, a tuple and two dicts"
        raise UsageError(f"TARGET {text!r}", what, "that is no model with its inputs", remedy)
    args = parts[1] if isinstance(parts[1], (tuple, list)) else (parts[1],)
    target = Target(parts[0], tuple(args), *(part or {} for part in parts[2:]))
    try:
        check_model(target.model)
        call_leaves(target.model.forward, target.args, target.kwargs)
    except ShardingError as error:
        raise UsageError(f"TARGET {text!r}: {error.who}", error.what, error.problem, error.remedy) from None
    return target


# Models of transformers.


def _transformers_target(model_type: str, options: TargetOptions, mesh: Mesh) -> Target:
    """The default config of a model type with random weights. Nothing is downloaded."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        remedy = "install it: pip install 'shardc[hf]'"
        raise UsageError(f"TARGET hf:{model_type}", str(error), "hf: targets need transformers", remedy) from None
    if model_type not in CONFIG_MAPPING:
        remedy = did_you_mean(model_type, CONFIG_MAPPING.keys()) or "name one as in the config.json of a model"
        raise UsageError(f"TARGET hf:{model_type}", "a model type", "transformers has no such model type", remedy)
    default = CONFIG_MAPPING[model_type]()
    known = [*default.to_dict(), *default.attribute_map]
    raise_all([  # transformers would keep such a setting and never read it
        UsageError(
            f"--set {name}=", f"a field of {type(default).__name__}", "it has no such field",
            did_you_mean(name, known) or f"name one of {', '.join(known[:8])}, ...",
        ) for name in options.settings if name not in known and not hasattr(default, name)
    ])  # fmt: skip
    dp = mesh.sizes.get("dp", 1)
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(model_type, **options.settings)
        batch = options.batch or ceil_div(8, dp) * dp
        model, kwargs = model_and_inputs(config, batch, options.seq, options.device)
    except UsageError:
        raise
    except Exception as error:
        sizes = [f"--{name} {size}" for name, size in (("batch", options.batch), ("seq", options.seq)) if size]
        settings = " ".join([*(f"--set {name}={value}" for name, value in options.settings.items()), *sizes])
        what, problem = f"transformers raised {type(error).__name__}", " ".join(str(error).split())
        remedy = f"give values that fit each other, other than {settings}" if settings else "write a function for it"
        raise UsageError(f"TARGET hf:{model_type}", what, problem, remedy) from error
    data = {name: P("dp") for name in kwargs} if "dp" in mesh.axis_names else {}
    weights = TWO_WEIGHTS_A_BLOCK.get(model_type, {}) if "tp" in mesh.axis_names else {}  # the others follow from them
    return Target(model, (), kwargs, {**data, **weights})


TWO_WEIGHTS_A_BLOCK = {
    "gpt2": {"transformer.h.*.attn.c_proj.weight": P("tp"), "transformer.h.*.mlp.c_proj.weight": P("tp")}
}


# The sizes of a target, and the same target at other sizes.


def sizes_text(text: str, target: Target) -> str:
    """A line about an ``hf:`` target: its class, layers, parameters, and the sizes of its made-up inputs."""
    numel = sum(parameter.numel() for parameter in target.model.parameters())
    count = f"{numel / 1e9:.1f} B" if numel >= 10**9 else f"{numel / 1e6:.1f} M"
    layers = getattr(getattr(target.model, "config", None), "num_hidden_layers", None)
    facts = [type(target.model).__name__, *([f"{layers} layers"] if layers else []), f"{count} parameters"]
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in target.kwargs.items())
    return f"{text}: {', '.join(facts)}; inputs {shapes}, of other sizes with --batch and --seq"


def input_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """The shape of each input tensor, by the name that annotations use."""
    arguments = inspect.signature(target.model.forward).bind(*target.args, **target.kwargs).arguments
    leaves = ((name.removeprefix("kwargs."), leaf) for name, leaf in flatten(dict(arguments))[0])
    return {name: tuple(leaf.shape) for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


def module_lists(model: nn.Module) -> dict[str, int]:
    """The lengths of the outermost lists of two or more modules of one structure, by path."""
    lengths: dict[str, int] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in lengths)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not is_inside:
            structures = set()
            for each in module:
                shapes = tuple((name, tuple(parameter.shape)) for name, parameter in each.named_parameters())
                structures.add((type(each), shapes, tuple(map(type, each.modules()))))
            if len(structures) == 1:
                lengths[path] = len(module)
    return lengths


def default_sizes(text: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """The settings of a target that are whole numbers, with the values set or their defaults."""
    place, _, name = text.rpartition(":")
    known: dict[str, Any]
    if place == "hf":
        from transformers import AutoConfig

        config = AutoConfig.for_model(name, **settings)
        known = config.to_dict() | {name: getattr(config, name, None) for name in config.attribute_map}
    else:
        known = {name: each.default for name, each in inspect.signature(find_function(place, name)).parameters.items()}
    return {name: value for name, value in {**known, **settings}.items() if type(value) is int}


def with_input_sizes(target: Target, sizes: Mapping[tuple[int, int], int]) -> Target:
    """The target with inputs on meta, where ``sizes`` maps each ``(dim, size)`` of an input to another size."""
    leaves, tree = flatten((tuple(target.args), dict(target.kwargs)))
    values = [leaf for _, leaf in leaves]
    for i, leaf in enumerate(values):
        if isinstance(leaf, torch.Tensor):
            shape = [sizes.get((dim, size), size) for dim, size in enumerate(leaf.shape)]
            values[i] = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
    args, kwargs = rebuild(tree, values)
    return replace(target, args=args, kwargs=kwargs)


def set_list_length(model: nn.Module, path: str, length: int) -> None:
    """Shorten a list of modules to its first ones, or lengthen it by copies of the last.

    Sibling lists of equal length change together, since a model may iterate over them together.
    """
    before: Any = model.get_submodule(path)
    owner = model.get_submodule(path.rpartition(".")[0])
    for name, several in owner.named_children():
        if isinstance(several, (nn.ModuleList, nn.Sequential)) and len(several) == len(before) != length:
            modules = [*several][:length]
            modules += [copy.deepcopy(modules[-1]) for _ in range(length - len(modules))]
            is_list = isinstance(several, nn.ModuleList)
            setattr(owner, name, nn.ModuleList(modules) if is_list else type(several)(*modules))
