"""Initial values: each rank computes its shards of a model's parameters and buffers and puts them into the model."""

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
    initialized: Initialized, mesh: Any, shardings: Callable[[str, tuple[int, ...]], Sharding], seed: int
) -> nn.Module:
    """Give a model on meta its values: plain whole tensors on a Mesh, DTensors of this rank's shards on a DeviceMesh.

    ``initialized.program`` is canonical. ``shardings`` returns the sharding of the parameter or buffer of a name and
    shape. Warns of cut values that every rank had to compute whole; a ShardingError names those that no initializer
    writes.
    """
    conversion = conversion_on(mesh, "cpu")
    device = conversion.comm.device
    evaluator = Evaluator(initialized.program, torch.tensor([seed, 0], device=device), initialized.constants, device)
    tensors, unwritten, whole = dict[str, Tensor](), list[str](), dict[str, set[str]]()
    for output, node in zip(initialized.program.outputs, initialized.program.results, strict=True):
        assert node is not None, output
        shape = initialized.program.value_type(initialized.program.value(node)).shape
        sharding = shardings(output.name, shape).storable(shape)
        try:
            tensors[output.name] = _placed(evaluator, conversion, node, sharding, shape, output.name)
        except Unwritten:
            unwritten.append(output.name)
        if sharding.cut_axes and evaluator.whole:
            whole[output.name] = evaluator.whole
    _check(unwritten, whole)
    for name, parameter in state_names(initialized.model)[0].items():
        tensors[name] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
        tensors[name].__dict__.update(parameter.__dict__)
    set_tensors(initialized.model, tensors)
    return initialized.model


def _placed(
    evaluator: Evaluator, conversion: Conversion, node: Any, sharding: Sharding, shape: tuple[int, ...], name: str
) -> Tensor:
    """The value as the model holds it; ranks in this process that hold the same piece compute it once."""
    shared, pieces = dict[Any, Tensor](), list[Tensor]()
    for position in conversion.comm.positions:
        where = region(sharding, shape, position)
        if where not in shared:
            piece = evaluator.value(node, piece_region(sharding, shape, position, evaluator.device))
            shared[where] = pad(piece, sharding, shape, position)
        pieces.append(shared[where])
    return conversion.converter(sharding, shape, name).to_tensor(pieces, is_plain=False)


def _check(unwritten: list[str], whole: Mapping[str, set[str]]) -> None:
    """ShardingError for values that no initializer writes, a warning for those that every rank made whole."""
    if unwritten:
        raise ShardingError(
            f"initial value of {', '.join(unwritten[:8])}" + (", ..." if len(unwritten) > 8 else ""),
            f"{len(unwritten)} on meta",
            "no initialiser writes it, so it has no value",
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize=",
        )
    if whole:
        who = f"initial value of {', '.join(whole)}"
        what = f"{', '.join(sorted(set().union(*whole.values())))} makes it"
        problem = "it is made whole on every rank before it is cut, in memory for all of it"
        remedy = "draw each element by itself, as normal_ and uniform_ do, or say initialize="
        warnings.warn(error_text(who, what, problem, remedy), stacklevel=4)
