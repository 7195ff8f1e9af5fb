"""Compile a Python function and print the program after a pass, for tests that compare printed programs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.ops.random import uniform
from shardc.program.program import Program
from shardc.program.text import call_text, op_names, type_text, value_names
from shardc.runtime.simulator import interpret


class Function(nn.Module):
    """A function of tensors as a model: parameters among the tensors belong to the model, the others are its inputs."""

    def __init__(self, function: Callable[..., Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)

    def forward(self, **inputs: Tensor) -> Any:
        return self.function(**dict(self.named_parameters()), **inputs)


def value(*shape: int) -> Tensor:
    """A random input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def parameter(*shape: int) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(value(*shape))


def compiled(
    function: Callable[..., Any],
    mesh: Mesh,
    annotations: Mapping[str, P] | None = None,
    train: bool = False,
    **tensors: Tensor,
) -> shardc.Compiled:
    """Compile a function; assert that its values and gradients on virtual ranks are those of the captured program."""
    model = Function(function, tensors)
    inputs = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    found = shardc.compile(model, mesh, annotations, kwargs=inputs, train=train)
    draws = any(node.target is uniform for node in found.graph.nodes)
    whole = found.run(interpret, found.at("canonicalize" if draws else "capture"), (), inputs)
    torch.testing.assert_close(found.simulate(**inputs), whole)
    return found


def after(name: str, *args: Any, **kwargs: Any) -> str:
    """The printed program after a pass, of a function compiled by ``compiled``."""
    return printed(compiled(*args, **kwargs).at(name))


def printed(program: Program, phase: str = "") -> str:
    """The values of a program or of one phase, one on each line, and its outputs."""
    return "\n".join(_lines(program, phase)) + "\n"


def block(text: str) -> str:
    """The expected lines of a test without their indentation."""
    return textwrap.dedent(text).lstrip("\n")


def _lines(program: Program, phase: str) -> Iterator[str]:
    names, called = value_names(program), op_names(program)
    for node in program.placeholders:
        if node.users and not phase:
            yield f"{names[node]}: {type_text(program, node)}"
    for node in program.calls:
        if phase in ("", program.source(node).phase):
            yield f"{names[node]}: {type_text(program, node)} = {call_text(node, names, called)}"
    for output, result in zip(program.outputs, program.results, strict=True):
        if phase in ("", "backward" if output.kind == "gradient" else "forward"):
            name = "output" if output.kind == "output" else f"{output.kind} {output.name}"
            yield f"{name}: {None if result is None else names[result]}"
