"""Small localized programs, written by hand: what the tests of both runtimes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import Sharding, TensorType
from shardc.program.program import Input, Output, Program

aten = torch.ops.aten


class Writer:
    """Writes a localized program line by line; every value is given its global shape and its sharding."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        self.mesh, self.dtype = mesh, dtype
        self.program = Program(fx.Graph(), (), (), mesh, "localized")

    def sharding(self, shape: Sequence[int], spec: P, partial: str = "") -> Sharding:
        cut = spec.sharding(self.mesh, tuple(shape), "test")
        return Sharding(self.mesh, cut.dims, tuple((self.mesh.axis(name), "sum") for name in partial.split()))

    def input(self, name: str, shape: Sequence[int], spec: P, kind: Any = "input") -> fx.Node:
        node = self.program.graph.placeholder(name)
        type_ = TensorType(tuple(shape), self.dtype)
        self.program.inputs += (Input(name, kind, type_, requires_grad=kind == "parameter"),)
        return self._typed(node, shape, self.sharding(shape, spec))

    def call(
        self, target: Callable[..., Any], args: tuple[Any, ...], shape: Sequence[int], spec: P, partial: str = ""
    ) -> fx.Node:
        node = self.program.graph.call_function(target, args)
        return self._typed(node, shape, self.sharding(shape, spec, partial))

    def result(self, **outputs: tuple[str, fx.Node | None]) -> Program:
        """End the program: ``name=(kind, node)``."""
        self.program.outputs = tuple(Output(name, kind) for name, (kind, _) in outputs.items())  # type: ignore[arg-type]
        self.program.graph.output(tuple(node for _, node in outputs.values()))
        return self.program

    def _typed(self, node: fx.Node, shape: Sequence[int], sharding: Sharding) -> fx.Node:
        self.program.set_type(node, TensorType(tuple(shape), self.dtype))
        self.program.set_local_types(node, (TensorType(sharding.local_shape(tuple(shape)), self.dtype),))
        self.program.set_sharding(node, sharding)
        return node
