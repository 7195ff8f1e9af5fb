"""Initial values: each rank makes its shards of a model's parameters and buffers, and puts them in the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.initial_values import Initialized, set_tensors
from shardc.capture.model import state_names
from shardc.language.errors import ShardingError, error_text
from shardc.language.sharding import Sharding

from ..comm.shards import pad, region
from ..module.conversion import Conversion, conversion_on
from .evaluator import Evaluator, Unwritten, piece_region


def initialize(
    found: Initialized, mesh: Any, shardings: Callable[[str, tuple[int, ...]], Sharding], seed: int
) -> nn.Module:
    """Give a model on meta its values: plain whole tensors on a Mesh, DTensors of this rank's shards on a DeviceMesh.

    ``found.program`` is canonical. ``shardings`` says how the parameter or buffer of a name and shape is cut. Warns of
    those cut ones that every rank had to make whole; a ShardingError names those that no initialiser writes.
    """
    conversion = conversion_on(mesh, "cpu")
    device = conversion.comm.device
    evaluator = Evaluator(found.program, torch.tensor([seed, 0], device=device), found.constants, device)
    tensors: dict[str, Tensor] = {}
    unwritten: list[str] = []
    whole: dict[str, set[str]] = {}
    for output, node in zip(found.program.outputs, found.program.results, strict=True):
        assert node is not None, output
        shape = found.program.value_type(found.program.value(node)).shape
        sharding = shardings(output.name, shape).storable(shape)
        try:
            tensors[output.name] = _placed(evaluator, conversion, node, sharding, shape, output.name)
        except Unwritten:
            unwritten.append(output.name)
        if sharding.cut_axes and evaluator.whole:
            whole[output.name] = evaluator.whole
    _check_written(unwritten)
    _report_whole(whole)
    _install(found.model, tensors)
    return found.model


def _placed(
    evaluator: Evaluator, conversion: Conversion, node: Any, sharding: Sharding, shape: tuple[int, ...], name: str
) -> Tensor:
    """The value as the model holds it; ranks in this process that hold the same piece make it once."""
    made: dict[Any, Tensor] = {}
    pieces: list[Tensor] = []
    for position in conversion.comm.positions:
        where = region(sharding, shape, position)
        if where not in made:
            piece = evaluator.value(node, piece_region(sharding, shape, position, evaluator.device))
            made[where] = pad(piece, sharding, shape, position)
        pieces.append(made[where])
    return conversion.converter(sharding, shape, name).to_tensor(pieces, is_plain=False)


def _install(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    values = dict(tensors)
    for name, parameter in state_names(model)[0].items():
        values[name] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
        values[name].__dict__.update(parameter.__dict__)
    set_tensors(model, values)


def _check_written(unwritten: list[str]) -> None:
    if unwritten:
        raise ShardingError(
            f"initial value of {', '.join(unwritten[:8])}" + (", ..." if len(unwritten) > 8 else ""),
            f"{len(unwritten)} on meta",
            "no initialiser writes it, so it has no value",
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize=",
        )


def _report_whole(whole: Mapping[str, set[str]]) -> None:
    if whole:
        who, what = (
            f"initial value of {', '.join(whole)}",
            f"{', '.join(sorted(set().union(*whole.values())))} makes it",
        )
        problem = "it is made whole on every rank before it is cut, in memory for all of it"
        remedy = "draw each element by itself, as normal_ and uniform_ do, or say initialize="
        warnings.warn(error_text(who, what, problem, remedy), stacklevel=4)
