"""The calling convention: from a call's arguments to a list of tensors, and from tensors to the model's output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardc.capture.containers import LEAF, Named, Tree, flatten, rebuild, unnamed
from shardc.capture.model import state_names
from shardc.capture.model_state import model_state
from shardc.capture.objects import CallObjects, ObjectAfter, Returned, objects_among
from shardc.capture.signature import (
    Constant,
    Leaf,
    Signature,
    State,
    TensorLeaf,
    leaf_of,
    signature_of,
)
from shardc.language.errors import CaptureError, ShardingError, did_you_mean, raise_all
from shardc.language.sharding import TensorType
from shardc.options import check_tangents
from shardc.program.program import Program


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """How to call a captured program: ``signature.leaves`` are the leaves of the call, ``outputs`` of the result.

    ``constants``: the values of inputs of kind ``buffer`` that are not buffers of the model. ``objects``: the objects
    among the arguments that the call changes or returns.
    """

    forward: Callable[..., Any]
    outputs: OutputLeaves
    output_tree: Tree
    signature: Signature
    constants: Mapping[str, torch.Tensor]
    objects: tuple[ObjectAfter, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors among the arguments, parallel to the program's inputs of kind ``input``."""
        return tuple(name for name, leaf in self.signature.leaves if isinstance(leaf, TensorLeaf))

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, parallel to ``names``; raises a ShardingError for leaves unlike the captured ones."""
        values = dict(call_leaves(self.forward, args, kwargs)[0])
        leaves = {name: leaf_of(value) for name, value in values.items()}
        raise_all(list(_differences(dict(self.signature.leaves), leaves)))
        return [values[name] for name in self.names]

    @property
    def tensors(self) -> list[tuple[str, TensorLeaf]]:
        """The program's outputs of kind ``output``, in order: those of the result, then those left in objects."""
        result = [(name, leaf) for name, leaf in self.outputs if isinstance(leaf, TensorLeaf)]
        return result + [each for after in self.objects for each in after.outputs]

    @property
    def num_left(self) -> int:
        """The number of ``tensors`` that the call leaves in objects among the arguments; they come last."""
        return sum(len(each.outputs) for each in self.objects)

    def unflatten(
        self, tensors: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        in_place: bool = False,
    ) -> Any:  # fmt: skip
        """The model's output, from the values of the program's outputs of kind ``output``.

        ``args``, ``kwargs``: those of the call. With ``in_place`` their objects are changed; else the result has new
        ones.
        """
        count = len(tensors) - self.num_left
        rest, left = iter(tensors[:count]), iter(tensors[count:])
        objects = objects_among(named_arguments(self.forward, args, kwargs or {})) if self.objects else {}
        after = {
            each.path: (each.updated if in_place else each.remade)(objects[each.path], left) for each in self.objects
        }
        leaves = (
            after[leaf.path] if isinstance(leaf, Returned) else leaf.value if isinstance(leaf, Constant) else next(rest)
            for _, leaf in self.outputs
        )
        return rebuild(self.output_tree, leaves)


def call_signature(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool, state: State | None = None
) -> Signature:
    """The signature of a call of ``model``. ``state``: the model's, if it is known already."""
    state = model_state(model, has_classes=True) if state is None else state
    return signature_of(*call_leaves(model.forward, args, kwargs), train, state)


OutputLeaves = tuple[tuple[str, Leaf | Returned], ...]


def output_leaves(output: Any, objects: CallObjects | None = None) -> tuple[OutputLeaves, list[Named], Tree]:
    """The leaves of a model's output, the tensors among them, and its tree; a single tensor is named ``output``.

    ``objects``: the objects among the arguments. Each is a single leaf if it is returned.
    """
    path_of: Callable[[Any], str | None] = (lambda value: None) if objects is None else objects.path_of
    leaves, tree = flatten(output, is_leaf=lambda value: path_of(value) is not None)
    if tree == LEAF:
        leaves = [("output", output)]
    for name, value in leaves:
        if isinstance(value, Iterator):
            problem = f"it is a {type(value).__name__}, which would run on after the program"
            raise CaptureError(f"output {name!r}", problem, "return a list or a tuple")
    for name, problem, remedy in unnamed(leaves):
        raise CaptureError(f"output {name!r}", problem, remedy)
    tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]
    described: list[tuple[str, Leaf | Returned]] = []
    for name, value in leaves:
        path = path_of(value)
        described.append((name, leaf_of(value) if path is None else Returned(path)))
    return tuple(described), tensors, tree


def differentiable_names(outputs: OutputLeaves, further: Sequence[str]) -> tuple[str, ...]:
    """The outputs from which backward starts: ``loss``, else all of 0 dims, else all; and those in ``further``."""
    candidates = {name: leaf for name, leaf in outputs if isinstance(leaf, TensorLeaf) and leaf.requires_grad}
    for name in further:
        if name not in candidates:
            what, problem = f"the outputs are {', '.join(dict(outputs))}", "no output of this name has a gradient"
            remedy = did_you_mean(name, candidates) or f"use one of {', '.join(candidates) or 'none'}"
            raise ShardingError(f"differentiable={name!r}", what, problem, remedy)
    scalars = [name for name, leaf in candidates.items() if not leaf.type.shape]
    first = ["loss"] if "loss" in candidates else scalars or list(candidates)
    return tuple(name for name in candidates if name in first or name in further)


def _differences(captured: Mapping[str, Leaf], leaves: Mapping[str, Leaf]) -> Iterator[ShardingError]:
    """An error for each leaf that a call lacks, has in addition, or has with another type or value than at capture."""
    for name in (name for name in captured if name not in leaves):
        problem = f"the program was captured with {captured[name]}"
        yield ShardingError(f"input {name!r}", "not given", problem, f"pass it, or compile again without {name!r}")
    for name in (name for name in leaves if name not in captured):
        remedy = did_you_mean(name, captured) or f"leave it out, or compile again with {name!r}"
        problem = "the program was captured without it"
        yield ShardingError(f"input {name!r}", f"given as {leaves[name]}", problem, remedy)
    for name, leaf in captured.items():
        passed = leaves.get(name, leaf)
        is_same = isinstance(leaf, TensorLeaf) and isinstance(passed, TensorLeaf) and leaf.type == passed.type
        if not is_same and leaf != passed:
            problem = f"the program was captured for {leaf}"
            remedy = "pass an input like the captured one, or compile again for this one"
            yield ShardingError(f"input {name!r}", str(leaves[name]), problem, remedy)


def call_leaves(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves of a call by the names of forward's arguments, ``xs.0`` for ``*xs`` and ``foo`` for one of ``**kw``.

    An argument that is given as its default counts as not given.
    """
    leaves, tree = flatten(dict(named_arguments(forward, args, kwargs)))
    what = "a tensor in a container"
    raise_all([ShardingError(f"input {name!r}", what, problem, remedy) for name, problem, remedy in unnamed(leaves)])
    return leaves, tree


def named_arguments(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Named]:
    """The arguments of a call by name, without those that are given as their defaults; ``foo`` for one of ``**kw``."""
    named: dict[str, Any] = {}
    for name, place, default in _places(forward, len(args), tuple(kwargs)):
        if isinstance(place, dict):  # **kw
            named.update((key, kwargs[key]) for key in place)  # in order, which forward may see
        elif isinstance(place, tuple):  # *xs
            named[name] = tuple(args[i] for i in place)
        else:
            value = args[place] if isinstance(place, int) else kwargs[place]
            is_alike = isinstance(value, (int, float, str)) and type(value) is type(default) and value == default
            if value is not default and not (is_alike and repr(value) == repr(default)):  # -0.0 is not 0.0
                named[name] = value
    return list(named.items())


def rebuild_call(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with other tensors, by the names of the leaves."""
    bound = _bound(forward, args, kwargs)
    for name, value in bound.arguments.items():
        path = "" if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else name
        leaves, tree = flatten(value, path)
        bound.arguments[name] = rebuild(tree, (tensors.get(path, leaf) for path, leaf in leaves))
    return bound.args, bound.kwargs


def part_of_call(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with parts of its tensors, by the names of the leaves."""
    leaves, _ = call_leaves(forward, args, kwargs)
    tensors = {name: parts[name](leaf) for name, leaf in leaves if name in parts and isinstance(leaf, torch.Tensor)}
    return rebuild_call(forward, args, kwargs, tensors)


def part_of_group(tensor: torch.Tensor, count: int, index: int, dim: int, name: str) -> torch.Tensor:
    """The part of an input for one of ``count`` groups of ranks. Raises a ShardingError if the parts are not equal."""
    size = tensor.shape[dim]
    if size % count:
        problem, remedy = (
            f"{count} groups have equal parts of it",
            f"give {size - size % count or count} in place of {size}",
        )
        raise ShardingError(f"input {name!r}", f"dim {dim} has size {size}", problem, remedy)
    return tensor.narrow(dim, size // count * index, size // count)


def names_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By kind (``param``, ``input``, ``module``) every name that a pattern may match, with the first name of its value.

    A tied parameter has several names; an entry ``foo`` of ``**kw`` is ``kw.foo`` too.
    """
    parameters, buffers, aliases = state_names(model)
    state = {name: name for name in (*parameters, *buffers)}
    leaves, _ = call_leaves(model.forward, args, kwargs)
    inputs = {name: name for name, value in leaves if isinstance(value, torch.Tensor)}
    parameters_of_forward = inspect.signature(model.forward).parameters
    by_keyword = [name for name in inputs if name.partition(".")[0] not in parameters_of_forward]
    for parameter in parameters_of_forward.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            inputs |= {f"{parameter.name}.{name}": name for name in by_keyword}
    modules = {path: path for path, _ in model.named_modules() if path}
    return {"param": state | aliases, "input": inputs, "module": modules}


def optional_arguments(forward: Callable[..., Any]) -> dict[str, str]:
    """The names of forward's arguments whose default is None, each mapped to itself."""
    parameters = inspect.signature(forward).parameters.values()
    return {parameter.name: parameter.name for parameter in parameters if parameter.default is None}


def _bound(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    signature = inspect.signature(forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        remedy = "give what forward takes: args=(x,) for a single tensor, kwargs={'name': y} for those by name"
        raise ShardingError("the inputs", f"forward takes {signature}", str(error), remedy) from None


def _places(forward: Callable[..., Any], count: int, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """For each argument of a call its name in forward, its position or keyword in the call, and its default.

    The result is computed once for a method, whatever object it is bound to.
    """
    if isinstance(forward, MethodType):
        return _places_of_method(forward.__func__, count, names)
    bound = _bound(forward, range(count), dict(zip(names, names, strict=True)))
    parameters = bound.signature.parameters
    return [(name, place, parameters[name].default) for name, place in bound.arguments.items()]


@lru_cache(maxsize=256)
def _places_of_method(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    return _places(partial(function, None), count, names)


def state_of(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's parameters, buffers and constants by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {**dict(named), **constants}


def input_values(
    program: Program,
    state: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad_outputs: Mapping[str, torch.Tensor],
    draw: tuple[int, int],
) -> Iterator[torch.Tensor]:
    """The global values of a program's inputs, in order.

    ``tensors``: the call's, in order. ``grad_outputs``: by output, ones by default. ``draw``: seed and step. Raises a
    ShardingError for state on meta, and for gradients whose names or types are not those of outputs.
    """
    _check_gradients(program, grad_outputs)
    on_meta = [put.name for put in program.inputs if put.name in state and state[put.name].is_meta]
    if on_meta:
        what = "it is on meta" + (f", as are {len(on_meta) - 1} others" if len(on_meta) > 1 else "")
        problem = "a program can be compiled and dumped without values, but not run"
        remedy = "give the model values: model.to_empty(device='cpu') and its initialisers"
        raise ShardingError(f"parameter {on_meta[0]!r}", what, problem, remedy)
    arguments = iter(tensors)
    for put in program.inputs:
        if put.kind in ("parameter", "buffer"):
            yield state[put.name].detach()
        elif put.kind == "input":
            yield next(arguments)
        elif put.kind in ("residual", "momentum"):
            yield torch.zeros(put.type.shape, dtype=put.type.dtype)
        elif put.kind == "tangent":
            yield grad_outputs.get(put.name, torch.ones(put.type.shape, dtype=put.type.dtype))
        else:
            yield torch.tensor(draw)


def _check_gradients(program: Program, grad_outputs: Mapping[str, torch.Tensor]) -> None:
    """Raise a ShardingError for gradients of outputs that have none, or of another type than the output."""
    types = {put.name: put.type for put in program.inputs if put.kind == "tangent"}
    check_tangents(grad_outputs, list(types))
    errors: list[ShardingError] = []
    for name, gradient in grad_outputs.items():
        type_ = TensorType.of(gradient)
        who, what = f"grad_outputs[{name!r}]", f"given {type_}"
        if name not in types:
            remedy = did_you_mean(name, types) or f"use one of {', '.join(types) or 'none'}"
            errors.append(ShardingError(who, what, "no output of this name has a gradient", remedy))
        elif type_ != types[name]:
            errors.append(ShardingError(who, what, f"the output is {types[name]}", f"pass {types[name]}"))
    raise_all(errors)
