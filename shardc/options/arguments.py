"""Checks of the arguments of compile, parallelize and simulate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardc.language.errors import ShardingError, raise_all

if TYPE_CHECKING:
    from torch import nn


def check_model(model: Any) -> None:
    """Raise a ShardingError if ``model`` is no module, or a module whose ops cannot be captured."""
    who, problem = "model", "shardc compiles an nn.Module"
    if isinstance(model, type):
        raise ShardingError(who, f"the class {model.__name__}", problem, f"make one: {model.__name__}(...)")
    if not hasattr(model, "named_parameters"):
        remedy = "put the function in a module's forward" if callable(model) else "give an nn.Module"
        raise ShardingError(who, f"of type {type(model).__name__}", problem, remedy)
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        remedy = f"give the {type(inner).__name__} itself, and to parallelize compile='inductor'"
        raise ShardingError(who, f"a {type(inner).__name__} in torch.compile", "it is compiled already", remedy)
    if getattr(model, "_compiled_call_impl", None) is not None:
        problem, remedy = "it is compiled already", "leave compile() out, and say compile='inductor' to parallelize"
        raise ShardingError(who, f"a {type(model).__name__} after compile()", problem, remedy)
    _check_modules(model)


def _check_modules(model: nn.Module) -> None:
    import torch
    from torch.nn.parameter import is_lazy

    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"{f'module {scripted[0]!r}' if scripted[0] else 'it'} is a ScriptModule"
        raise ShardingError("model", what, "its ops cannot be seen", "give the nn.Module that it was scripted from")
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        what, remedy = f"it has no shape yet, as {len(lazy) - 1} others", "call the model once, so that it is made"
        raise ShardingError(f"parameter {lazy[0]!r}", what, "its module is lazy", remedy)


def check_maker(model: Any, initialize: Any = None) -> None:
    """Raise a ShardingError for arguments of ``init_parameters`` that make no model, or give it no values."""
    if initialize is not None and not callable(initialize):
        raise _wrong_type("initialize", initialize, "it is a function of the model", "say initialize=lambda model: ...")
    if not callable(model):
        problem = "it takes a model on meta, or a function that makes one"
        raise _wrong_type("init_parameters", model, problem, "give init_parameters(lambda: Model(config), ...)")


def check_call(args: Any, kwargs: Any, train: Any, differentiable: Any, strict: Any) -> None:
    """Raise a ShardingError for all arguments of ``compile`` of a wrong type, other than model, mesh and options."""
    errors = [
        _wrong_type(name, value, "it is yes or no", f"say {name}=True or {name}=False")
        for name, value in (("train", train), ("strict", strict))
        if not isinstance(value, bool)
    ]
    if isinstance(args, (str, bytes, Mapping)) or not hasattr(args, "__iter__"):
        by_name = isinstance(args, Mapping)
        remedy = "say kwargs= for arguments by name" if by_name else "say args=(x,) for a single input"
        errors.append(_wrong_type("args", args, "it holds the positional arguments of forward, in order", remedy))
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        problem = "it holds the arguments of forward that are given by name"
        errors.append(_wrong_type("kwargs", kwargs, problem, "say kwargs={'name': value}"))
    if isinstance(differentiable, str) or not isinstance(differentiable, (tuple, list)):
        remedy = f"say differentiable=({differentiable!r},)" if isinstance(differentiable, str) else "say ('logits',)"
        errors.append(_wrong_type("differentiable", differentiable, "it lists names of outputs", remedy))
    raise_all(errors)


def check_draw(seed: Any, step: Any) -> None:
    """Raise a ShardingError for a seed or a step of random numbers that is no whole number."""
    raise_all([
        _wrong_type(name, value, "it is a whole number of less than 64 bits", f"say {name}=0")
        for name, value in (("seed", seed), ("step", step))
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63
    ])  # fmt: skip


def check_values(inputs: Mapping[str, Any]) -> None:
    """Raise a ShardingError for every input on meta, which has a shape but no values."""
    problem, remedy = "a program runs on values", "give a tensor that has some"
    raise_all([
        ShardingError(f"input {name!r}", f"shape {list(x.shape)}, on meta", problem, remedy)
        for name, x in inputs.items() if x.is_meta
    ])  # fmt: skip


def check_tangents(grad_outputs: Any, names: list[str]) -> None:
    """Raise a ShardingError if ``grad_outputs`` does not map names of outputs to tensors."""
    if not isinstance(grad_outputs, Mapping):
        remedy = f"say grad_outputs={{{names[0]!r}: ...}}" if names else "leave it out: no output has a gradient"
        raise _wrong_type("grad_outputs", grad_outputs, "it maps the names of outputs to their gradients", remedy)
    raise_all([
        _wrong_type(f"grad_outputs[{name!r}]", value, "a gradient is a tensor", "give a tensor like the output")
        for name, value in grad_outputs.items() if not (hasattr(value, "shape") and hasattr(value, "dtype"))
    ])  # fmt: skip


def _wrong_type(name: str, value: Any, problem: str, remedy: str) -> ShardingError:
    text = repr(value)
    what = f"of type {type(value).__name__}" if len(text) > 60 or "\n" in text else text
    return ShardingError(name, what, problem, remedy)
