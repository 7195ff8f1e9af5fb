"""The calling convention: a call's arguments as a list of tensors, and a list of tensors as the model's output."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardc.call_leaves import call_leaves, unnamed
from shardc.error import CaptureError, ShardingError, did_you_mean, raise_all
from shardc.frozen import frozen
from shardc.model_state import State, model_state
from shardc.sharding import TensorType
from shardc.tree import LEAF, Tree, flatten, rebuild


@dataclass(frozen=True, slots=True)
class Signature:
    """What a captured program depends on, as the key of a cache: two calls with one signature share a program.

    ``leaves``: every leaf of the arguments by name, a tensor as its type and ``requires_grad``, anything else as its
    value. ``state``: that of the model, which is often one object and so is compared sooner than hashed. ``autocast``:
    the dtype that autocast casts to, by device type.
    """

    leaves: tuple[tuple[str, Hashable], ...]
    tree: Tree
    train: bool
    state: State = field(hash=False)
    default_dtype: torch.dtype = torch.float32
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    def differences(self, other: Signature) -> list[str]:
        """What two signatures of a model differ in, in words."""
        mine, theirs = dict(self.leaves), dict(other.leaves)
        found = [
            f"input {name!r} ({mine.get(name, 'not given')}, {theirs.get(name, 'not given')})"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        ]
        mine, theirs = dict(self.state), dict(other.state)
        found += [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return found or ["gradients on or off, the default dtype, or autocast"]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor among the leaves of a call or of an output."""

    type: TensorType
    requires_grad: bool = False

    def __str__(self) -> str:
        return str(self.type)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A leaf that is no tensor. Equal when type and value are, as they were when it was made."""

    value: Any
    state: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", frozen(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    def __str__(self) -> str:
        return repr(self.value)


Leaf = TensorLeaf | Constant
Leaves = tuple[tuple[str, Leaf], ...]


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """How a captured program is called: ``inputs`` and ``outputs`` are the leaves of the call and of the result.

    ``constants``: the values of the program's inputs of kind ``buffer`` that are none of the model's buffers.
    """

    forward: Callable[..., Any]
    inputs: Leaves
    outputs: Leaves
    output_tree: Tree
    signature: Signature
    constants: Mapping[str, torch.Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors among the arguments, parallel to the program's inputs of kind ``input``."""
        return tuple(name for name, leaf in self.inputs if isinstance(leaf, TensorLeaf))

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, parallel to ``names``; a ShardingError for any leaf other than the captured one."""
        values = dict(call_leaves(self.forward, args, kwargs)[0])
        found = {name: leaf_of(value) for name, value in values.items()}
        errors = _missing(dict(self.inputs), found) + _unexpected(dict(self.inputs), found)
        errors += [error for name, leaf in self.inputs if name in found for error in _mismatch(name, leaf, found[name])]
        raise_all(errors)
        return [values[name] for name in self.names]

    def unflatten(self, tensors: Iterable[Any]) -> Any:
        """The model's own output, from the tensors that the program returns for its outputs of kind ``output``."""
        rest = iter(tensors)
        leaves = (leaf.value if isinstance(leaf, Constant) else next(rest) for _, leaf in self.outputs)
        return rebuild(self.output_tree, leaves)


def call_signature(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool, state: State | None = None
) -> Signature:
    """The signature of a call of ``model``, whose ``state`` may be known."""
    return signature_of(
        *call_leaves(model.forward, args, kwargs), train, model_state(model) if state is None else state
    )


def signature_of(leaves: Sequence[tuple[str, Any]], tree: Tree, train: bool, state: State) -> Signature:
    """That of a call with these leaves, of a model of this state."""
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    described = tuple((name, leaf_of(value)) for name, value in leaves)
    return Signature(described, tree, train, state, torch.get_default_dtype(), tuple(autocast))


def leaf_of(value: Any) -> Leaf:
    """The description of a leaf."""
    if isinstance(value, torch.Tensor):
        return TensorLeaf(TensorType.of(value), value.requires_grad)
    return Constant(value)


def output_leaves(output: Any) -> tuple[Leaves, list[tuple[str, torch.Tensor]], Tree]:
    """The leaves of a model's output, the tensors among them, and its tree; a lone tensor is named ``output``."""
    leaves, tree = flatten(output)
    if tree == LEAF:
        leaves = [("output", output)]
    for name, value in leaves:
        if isinstance(value, Iterator):
            problem = f"it is a {type(value).__name__}, which would run on after the program"
            raise CaptureError(f"output {name!r}", problem, "return a list or a tuple")
    for name, problem, remedy in unnamed(leaves):
        raise CaptureError(f"output {name!r}", problem, remedy)
    tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]
    return tuple((name, leaf_of(value)) for name, value in leaves), tensors, tree


def differentiable_names(outputs: Leaves, further: Sequence[str]) -> tuple[str, ...]:
    """The outputs that backward starts from: ``loss``, else all of 0 dims, else all; and those named in ``further``."""
    found = {name: leaf for name, leaf in outputs if isinstance(leaf, TensorLeaf) and leaf.requires_grad}
    for name in further:
        if name not in found:
            raise ShardingError(
                f"differentiable={name!r}",
                f"the outputs are {', '.join(name for name, _ in outputs)}",
                "no output of this name has a gradient",
                did_you_mean(name, found) or f"use one of {', '.join(found) or 'none'}",
            )
    scalars = [name for name, leaf in found.items() if not leaf.type.shape]
    first = ["loss"] if "loss" in found else scalars or list(found)
    return tuple(name for name in found if name in first or name in further)


def _missing(captured: Mapping[str, Leaf], found: Mapping[str, Leaf]) -> list[ShardingError]:
    return [
        ShardingError(
            f"input {name!r}",
            "not given",
            f"the program was captured with {captured[name]}",
            f"pass it, or compile again without {name!r}",
        )
        for name in captured
        if name not in found
    ]


def _unexpected(captured: Mapping[str, Leaf], found: Mapping[str, Leaf]) -> list[ShardingError]:
    return [
        ShardingError(
            f"input {name!r}",
            f"given as {found[name]}",
            "the program was captured without it",
            did_you_mean(name, captured) or f"leave it out, or compile again with {name!r}",
        )
        for name in found
        if name not in captured
    ]


def _mismatch(name: str, captured: Leaf, found: Leaf) -> list[ShardingError]:
    if isinstance(captured, TensorLeaf) and isinstance(found, TensorLeaf):
        if captured.type == found.type:
            return []
    elif captured == found:
        return []
    return [
        ShardingError(
            f"input {name!r}",
            str(found),
            f"the program was captured for {captured}",
            "pass an input like the captured one, or compile again for this one",
        )
    ]
