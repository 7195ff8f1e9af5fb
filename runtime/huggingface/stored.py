"""Converts tensors that transformers stores under other names than the model's, or in other parts.

A Mixtral has one parameter for all experts of a layer, for example, and its folder has a tensor for each expert. The
mapping and the conversion are transformers' own. A conversion is traced, without memory, as a program from stored
tensors to parameters. A rank evaluates its shards of the parameters, and reads only the parts that these need.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.capture.assembly import TraceSignature, assemble
from shardc.language.errors import CheckpointError
from shardc.language.sharding import Sharding, TensorType
from shardc.program.node import last_node
from shardc.program.program import Input, Output, Program

from ..initialize.initialize import Evaluator, piece_region
from ..module.value import Value, WholeValue

aten = torch.ops.aten
Conversion = tuple[Program, Mapping[str, Tensor]]


def under_names_of(model: nn.Module, given: Mapping[str, WholeValue]) -> dict[str, Value]:
    """The values by the model's own names; unchanged for a model that is not of transformers.

    A value for which the model has no name keeps its own. Raises a CheckpointError that names stored tensors that
    cannot be converted.
    """
    if all(each.__module__.partition(".")[0] != "transformers" for each in type(model).__mro__):
        return dict(given)
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # before version 5 modules have their tensors as they are stored
        return dict(given)
    if not isinstance(model, PreTrainedModel):
        return dict(given)
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found, merges = dict[str, Value](), dict[str, Merge]()
    for key in sorted(given, key=dot_natural_key):  # transformers' order, which numbers the experts
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name in state and pattern is not None:
            merge = merges.setdefault(name, Merge(model, name, by_pattern[pattern]))
            merge.sources.append((key, pattern, given[key]))
        else:
            found.setdefault(name if name in state else key, given[key])
    programs = dict[Any, Conversion]()
    for merge in merges.values():
        found |= merge.values(programs)
    return found


@dataclass(frozen=True, slots=True)
class Merge:
    """Stored tensors that transformers converts to parameters: to ``name``, and to others if it splits them.

    ``converter``: transformers' own. ``sources``: the key, the converter's pattern and the value of each tensor.
    """

    model: Any
    name: str
    converter: Any
    sources: list[tuple[str, str, WholeValue]] = field(default_factory=list)

    def values(self, programs: dict[Any, Conversion]) -> dict[str, Value]:
        """The values of the parameters, by name. ``programs``: known conversions, by kind; a new kind is added."""
        _, patterns, values = zip(*self.sources, strict=True)
        types = tuple(value.type for value in values)
        made = self._convert([torch.empty(each.shape, dtype=each.dtype, device="meta") for each in types])
        shapes = tuple(tuple(each.shape) for each in made.values())
        key = id(self.converter), patterns, types, shapes  # equal for all layers
        if key not in programs:
            programs[key] = self._program(types)
        return {name: ConvertedValue(*programs[key], i, values) for i, name in enumerate(made)}

    def _convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for (key, pattern, _), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.name, key, pattern, tensor)
        try:
            made = converter.convert(self.name, model=self.model, config=self.model.config)
        except Exception as error:
            raise self._error(error) from error
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _program(self, types: Sequence[TensorType]) -> Conversion:
        """The conversion as a program, with the sources as its inputs in order, and its constants by name."""

        def convert(*tensors: Tensor) -> list[Tensor]:
            return [*self._convert(tensors).values(), *tensors]

        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fakes = [torch.empty(each.shape, dtype=each.dtype) for each in types]
            traced = make_fx(dispatch_functionalize(convert, FunctionalTensorMode()), _as_views())(*fakes)
        inputs = tuple(Input(f"source_{i}", "input", each) for i, each in enumerate(types))
        results: Any = last_node(traced.graph).args[0]
        outputs = tuple(Output(f"parameter_{i}", "output") for i in range(len(results) - len(inputs)))
        return assemble(traced, TraceSignature(inputs, outputs), {}, {})

    def _error(self, error: Exception) -> CheckpointError:
        keys = [f"{key} {list(value.type.shape)}" for key, _, value in self.sources]
        shown = ", ".join(keys[:4]) + (f", ... ({len(keys)} tensors)" if len(keys) > 4 else "")
        what, problem = f"it is stored as {shown}", f"transformers cannot convert them: {error}"
        remedy = "see that the folder is whole, or load it with from_pretrained and give that model"
        return CheckpointError(f"parameter {self.name!r}", what, problem, remedy)


@functools.cache
def _as_views() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions into ops for which an Evaluator can derive operands' regions from a region of the result."""
    ops = (aten.stack.default, aten.split.Tensor, aten.split_with_sizes.default, aten.transpose.int, aten.t.default)
    table: dict[Any, Callable[..., Any]] = get_decompositions(ops)
    return table


@dataclass(frozen=True)
class ConvertedValue(Value):
    """An output of a conversion; its stored tensors are read when a shard is evaluated."""

    program: Program
    constants: Mapping[str, Tensor]
    index: int
    sources: Sequence[WholeValue]

    @property
    def type(self) -> TensorType:
        return self.program.type(self._node)

    @property
    def _node(self) -> fx.Node:
        node = self.program.results[self.index]
        assert node is not None, self.index
        return node

    def write(self, piece: Tensor, sharding: Sharding, position: int) -> None:
        cpu = torch.device("cpu")
        with ExitStack() as stack:
            tensors = {f"source_{i}": stack.enter_context(each.reading()) for i, each in enumerate(self.sources)}
            evaluator = Evaluator(self.program, torch.tensor([0, 0]), {**tensors, **self.constants}, cpu)
            piece.copy_(evaluator.value(self._node, piece_region(sharding, self.type.shape, position, cpu)))
