"""A model's own initialisers as a program: the seed in, the value of every parameter and buffer out.

Nothing is allocated, and what a constructor or an initialiser does with numbers, lists and branches just runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.capture.model import borrowed, held, plain_tensors, state_names, swap, with_aliases
from shardc.capture.tracing import Record
from shardc.language.errors import ShardingError
from shardc.options import check_model
from shardc.program.program import Program

Initializer = Callable[[nn.Module], Any]
RESETS = ("reset_parameters", "_reset_parameters")
INITS = ("init_weights", "initialize_weights", "_init_weights", "_initialize_weights")


@dataclass(frozen=True, slots=True)
class Initialized:
    """A model on meta, and the program that makes its values.

    ``program``: one output for every parameter, buffer, and tensor that a module holds as a plain attribute, each by
    its first name. ``constants``: the values of the program's inputs of kind ``buffer``.
    """

    model: nn.Module
    program: Program
    constants: Mapping[str, Tensor]


def record_initializers(
    model: nn.Module | Callable[[], nn.Module], initialize: Initializer | None = None
) -> Initialized:
    """The initialisers of a model that was made on meta, or all that a function does that makes a model.

    Of a model on meta run, children first, every module's ``reset_parameters``, then the model's ``init_weights`` or
    ``_init_weights``, as torch and transformers do; or ``initialize(model)`` alone. What is not on meta keeps its value
    unless an initialiser writes it. ShardingError where the constructor wrote a parameter more often than these do.
    """
    record = Record()
    if isinstance(model, nn.Module):
        outputs = _of_model(record, model, initialize)
    else:
        model, outputs = _of_function(record, model, initialize)
    program, constants = record.program(outputs)
    return Initialized(model, program, constants)


def _of_model(record: Record, model: nn.Module, initialize: Initializer | None) -> dict[str, fx.Node]:
    """Run the initialisers of a model with fake tensors in place of its own; the recorded node of every tensor."""
    parameters, buffers, aliases = state_names(model)
    plain = {name: tensor for name, tensor in _plain(model).items() if tensor.is_meta}
    with borrowed(model, train=False), record.recording():
        fakes = {name: _fake(tensor) for name, tensor in (*parameters.items(), *buffers.items())}
        swap(model, fakes, aliases)
        before = {name: fakes[name]._version for name in parameters}
        for module in model.modules():
            vars(module).pop("_is_hf_initialized", None)  # transformers' note that this is done
        with torch.no_grad():
            (initialize or _own_initializers)(model)
        writes = {name: held(model, name)._version - before[name] for name in parameters}
        outputs = {name: record.node(held(model, name)) for name in fakes}
        outputs |= {name: record.node(_fake(tensor)) for name, tensor in plain.items()}
    if initialize is None:
        _check_writes(parameters, writes)
    return outputs


def _of_function(
    record: Record, make: Callable[[], nn.Module], initialize: Initializer | None
) -> tuple[nn.Module, dict[str, fx.Node]]:
    """Run a constructor on fake tensors; the model, now on meta, and the recorded node of every tensor."""
    with record.recording():
        model = make()
        check_model(model)
        if initialize is not None:
            initialize(model)
    parameters, buffers, _ = state_names(model)
    plain = _plain(model)
    outputs = {name: record.node(tensor) for name, tensor in {**parameters, **buffers, **plain}.items()}
    set_tensors(model, {name: _on_meta(tensor) for name, tensor in {**parameters, **buffers, **plain}.items()})
    return model, outputs


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give modules parameters, buffers and plain attributes, by path; those tied to them are the same tensor.

    As attributes, so that a module which keeps a list of its parameters (nn.LSTM) hears of it.
    """
    _, _, aliases = state_names(model)
    for name, tensor in with_aliases(tensors, aliases):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, tensor)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that modules hold as plain attributes, by path."""
    tensors = {id(value): value for module in model.modules() for value in vars(module).values()}
    return {name: tensors[found] for found, name in plain_tensors(model).items()}


def _fake(tensor: Tensor) -> Tensor:
    """A tensor like one of a model's: of no value yet where that is on meta, else of its value."""
    like = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().clone()
    return nn.Parameter(like, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(like, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _own_initializers(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
        if reset is not None:
            reset()
    _init_weights(model)


def _init_weights(module: nn.Module) -> None:
    """Call a module's method of that name, or apply it where it takes a module; else those of its children."""
    found = next((getattr(module, name) for name in INITS if callable(getattr(module, name, None))), None)
    if found is None:
        for child in module.children():
            _init_weights(child)
    elif _needs_argument(found):
        module.apply(found)
    else:
        found()


def _needs_argument(method: Callable[..., Any]) -> bool:
    given = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)


def _check_writes(parameters: Mapping[str, nn.Parameter], writes: Mapping[str, int]) -> None:
    lost = [name for name, parameter in parameters.items() if parameter.is_meta and parameter._version > writes[name]]
    if lost:
        raise ShardingError(
            f"parameter {lost[0]!r}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else ""),
            f"written {parameters[lost[0]]._version} times when the model was made",
            f"the initialisers of its modules write it {writes[lost[0]]} times: what else was written on meta is lost",
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize=",
        )
