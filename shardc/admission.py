"""Whether what ``compile`` and ``parallelize`` are given is of the kinds that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardc.error import ShardingError, raise_all

if TYPE_CHECKING:
    from torch import nn


def check_model(model: Any) -> None:
    """A ShardingError for what is no module, or one whose ops cannot be seen."""
    who, what = "model", f"of type {type(model).__name__}"
    if isinstance(model, type):
        remedy = f"make one: {model.__name__}(...)"
        raise ShardingError(who, f"the class {model.__name__}", "shardc compiles an nn.Module", remedy)
    if not hasattr(model, "named_parameters"):
        remedy = "put the function in a module's forward" if callable(model) else "give an nn.Module"
        raise ShardingError(who, what, "shardc compiles an nn.Module", remedy)
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        remedy = f"give the {type(inner).__name__} itself, and to parallelize compile='inductor'"
        raise ShardingError(who, f"a {type(inner).__name__} in torch.compile", "it is compiled already", remedy)
    _check_parts(model)


def _check_parts(model: nn.Module) -> None:
    import torch
    from torch.nn.parameter import is_lazy

    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"{_place('module', scripted[0])} is a ScriptModule"
        raise ShardingError("model", what, "its ops cannot be seen", "give the nn.Module that it was scripted from")
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise ShardingError(
            f"parameter {lazy[0]!r}", f"it has no shape yet, as {len(lazy) - 1} others", "its module is lazy",
            "call the model once, so that it is made",
        )  # fmt: skip


def check_maker(model: Any, initialize: Any = None) -> None:
    """A ShardingError for what ``init_parameters`` can make no model of, or not give values."""
    if initialize is not None and not callable(initialize):
        raise _no_kind("initialize", initialize, "it is a function of the model", "say initialize=lambda model: ...")
    if not callable(model):
        problem = "it takes a model on meta, or a function that makes one"
        raise _no_kind("init_parameters", model, problem, "give init_parameters(lambda: Model(config), ...)")


def check_call(args: Any, kwargs: Any, train: Any, differentiable: Any, strict: Any) -> None:
    """A ShardingError for every argument of ``compile`` beside model, mesh and options that is of another kind."""
    errors = [
        _no_kind(name, value, "it is yes or no", f"say {name}=True or {name}=False")
        for name, value in (("train", train), ("strict", strict))
        if not isinstance(value, bool)
    ]
    if isinstance(args, (str, bytes, Mapping)) or not hasattr(args, "__iter__"):
        remedy = (
            "say kwargs= for arguments by name" if isinstance(args, Mapping) else "say args=(x,) for a single input"
        )
        errors.append(_no_kind("args", args, "it holds the positional arguments of forward, in order", remedy))
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        problem = "it holds the arguments of forward that are given by name"
        errors.append(_no_kind("kwargs", kwargs, problem, "say kwargs={'name': value}"))
    if isinstance(differentiable, str) or not isinstance(differentiable, (tuple, list)):
        remedy = f"say differentiable=({differentiable!r},)" if isinstance(differentiable, str) else "say ('logits',)"
        errors.append(_no_kind("differentiable", differentiable, "it lists names of outputs", remedy))
    raise_all(errors)


def check_draw(seed: Any, step: Any) -> None:
    """A ShardingError for a seed or a step of random numbers that is no whole number."""
    given = {"seed": seed, "step": step}
    raise_all([
        _no_kind(name, value, "it is a whole number of less than 64 bits", f"say {name}=0")
        for name, value in given.items() if not isinstance(value, int) or not -(2**63) <= value < 2**63
    ])  # fmt: skip


def check_values(inputs: Mapping[str, Any]) -> None:
    """A ShardingError for every input that has a shape alone: a program runs on values."""
    on_meta = {name: f"shape {list(x.shape)}, on meta" for name, x in inputs.items() if x.is_meta}
    problem, remedy = "a program runs on values", "give a tensor that has some"
    raise_all([ShardingError(f"input {name!r}", what, problem, remedy) for name, what in on_meta.items()])


def check_tangents(grad_outputs: Any, names: list[str]) -> None:
    """A ShardingError where the gradients of outputs are not said by name, as tensors."""
    if not isinstance(grad_outputs, Mapping):
        remedy = f"say grad_outputs={{{names[0]!r}: ...}}" if names else "leave it out: no output has a gradient"
        raise _no_kind("grad_outputs", grad_outputs, "it maps the names of outputs to their gradients", remedy)
    raise_all([
        _no_kind(f"grad_outputs[{name!r}]", value, "a gradient is a tensor", "give a tensor like the output")
        for name, value in grad_outputs.items() if not (hasattr(value, "shape") and hasattr(value, "dtype"))
    ])  # fmt: skip


def _no_kind(name: str, value: Any, problem: str, remedy: str) -> ShardingError:
    text = repr(value)
    what = f"of type {type(value).__name__}" if len(text) > 60 or "\n" in text else text
    return ShardingError(name, what, problem, remedy)


def _place(kind: str, path: str) -> str:
    return f"{kind} {path!r}" if path else "it"
