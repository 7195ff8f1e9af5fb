"""What a program is fed: a value for each of its inputs, of the model's state, the call, and the seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shardc.admission import check_tangents
from shardc.error import ShardingError, did_you_mean, raise_all
from shardc.program import Program
from shardc.sharding import TensorType


def state_of(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's parameters, buffers and constants by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {**dict(named), **constants}


def fed(
    program: Program,
    state: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad_outputs: Mapping[str, torch.Tensor],
    draw: tuple[int, int],
) -> Iterator[torch.Tensor]:
    """The values of the program's inputs, whole, in order.

    ``tensors``: the call's, in order. ``grad_outputs``: by output; ones where there is none. ``draw``: seed and step.
    Raises a ShardingError for state on meta, and for gradients of other names or types than the outputs'.
    """
    _check_gradients(program, grad_outputs)
    _check_state(program, state)
    given = iter(tensors)
    for put in program.inputs:
        if put.kind in ("parameter", "buffer"):
            yield state[put.name].detach()
        elif put.kind == "input":
            yield next(given)
        elif put.kind == "tangent":
            yield grad_outputs.get(put.name, torch.ones(put.type.shape, dtype=put.type.dtype))
        else:
            yield torch.tensor(draw)


def _check_state(program: Program, state: Mapping[str, torch.Tensor]) -> None:
    on_meta = [put.name for put in program.inputs if put.name in state and state[put.name].is_meta]
    if on_meta:
        raise ShardingError(
            f"parameter {on_meta[0]!r}",
            "it is on meta" + (f", as are {len(on_meta) - 1} others" if len(on_meta) > 1 else ""),
            "a program can be compiled and dumped without values, but not run",
            "give the model values: model.to_empty(device='cpu') and its initialisers",
        )


def _check_gradients(program: Program, grad_outputs: Mapping[str, torch.Tensor]) -> None:
    """A ShardingError for every gradient of an output that has none, or of another type than the output."""
    types = {put.name: put.type for put in program.inputs if put.kind == "tangent"}
    check_tangents(grad_outputs, list(types))
    errors: list[ShardingError] = []
    for name, gradient in grad_outputs.items():
        given = TensorType.of(gradient)
        who, what = f"grad_outputs[{name!r}]", f"given {given}"
        if name not in types:
            remedy = did_you_mean(name, types) or f"use one of {', '.join(types) or 'none'}"
            errors.append(ShardingError(who, what, "no output of this name has a gradient", remedy))
        elif given != types[name]:
            errors.append(ShardingError(who, what, f"the output is {types[name]}", f"pass {types[name]}"))
    raise_all(errors)
