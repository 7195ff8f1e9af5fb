"""Small handwritten localized programs, for the tests of virtual ranks and of gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.call import input_values
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import Sharding, TensorType
from shardc.program.collective import all_reduce
from shardc.program.program import Input, Output, Program

aten = torch.ops.aten


class Writer:
    """Writes a localized program line by line; the caller gives each value its global shape and its sharding."""

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


def row_parallel(mesh: Mesh) -> Program:
    """Loss = sum((x @ w) ** 2) with x and w cut along the contraction over tp, and its gradients."""
    w = Writer(mesh)
    x = w.input("x", (4, 8), P("dp", "tp"))
    weight = w.input("weight", (8, 6), P("tp"), "parameter")
    tangent = w.input("loss", (), P(), "tangent")
    part = w.call(aten.mm.default, (x, weight), (4, 6), P("dp"), partial="tp")
    y = w.call(all_reduce, (part, ("tp",), "sum"), (4, 6), P("dp"))
    square = w.call(aten.mul.Tensor, (y, y), (4, 6), P("dp"))
    local_loss = w.call(aten.sum.default, (square,), (), P(), partial="dp")
    loss = w.call(all_reduce, (local_loss, ("dp",), "sum"), (), P())
    scaled = w.call(aten.mul.Tensor, (y, 2), (4, 6), P("dp"))
    grad = w.call(aten.mul.Tensor, (scaled, tangent), (4, 6), P("dp"))
    columns = w.call(aten.t.default, (x,), (8, 4), P("tp", "dp"))
    weight_part = w.call(aten.mm.default, (columns, grad), (8, 6), P("tp"), partial="dp")
    weight_grad = w.call(all_reduce, (weight_part, ("dp",), "sum"), (8, 6), P("tp"))
    return w.result(loss=("output", loss), y=("output", y), weight=("gradient", weight_grad), x=("gradient", None))


def row_parallel_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8), "weight": torch.randn(8, 6)}


def row_parallel_values(program: Program, inputs: dict[str, Tensor], loss: float = 1.0) -> list[Any]:
    return list(input_values(program, inputs, [inputs["x"]], {"loss": torch.tensor(loss)}, (0, 0)))
