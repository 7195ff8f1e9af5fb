"""From the graph that tracing left to a Program: placeholders in order, dead code gone, constants explicit."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.program.inference import Types, types_of
from shardc.program.node import is_getitem, op_name, reached
from shardc.program.opaque import Opaque
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Source

aten = torch.ops.aten
_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_Parts = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs of a node
_VIEWS = {aten.view.default, aten._unsafe_view.default}  # in strides that another kernel may not make
_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_ORDER = ("parameter", "buffer", "input", "tangent", "random")
_PLACEMENT = {"device", "layout", "pin_memory"}  # a program runs on any device


@dataclass(frozen=True, slots=True)
class TraceSignature:
    """The arguments and results of a traced function, in order.

    It takes ``inputs``. It returns ``outputs``, then its ``inputs`` as they are at the end, then the ``tangents`` that
    it made for itself, then the results of its ``guards``.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tangents: tuple[Input, ...] = ()
    guards: tuple[Output, ...] = ()


def assemble(
    traced: fx.GraphModule,
    signature: TraceSignature,
    sources: Mapping[fx.Node, Source],
    plain_tensors: Mapping[str, torch.Tensor],
) -> tuple[Program, dict[str, torch.Tensor]]:
    """The program of a traced function, and the constants that became inputs of kind ``buffer``, by name.

    A constant that the model holds as a plain attribute has its name in ``plain_tensors``.
    """
    assembly = _Assembly(traced, signature, sources, {id(tensor): name for name, tensor in plain_tensors.items()})
    return assembly.run(), assembly.constants


class _Assembly:
    """A traced graph on its way into ``program``.

    State: ``mapping`` from traced nodes to those of the program; ``constants`` by name. Every live traced node is
    mapped once, in traced order; an identity is mapped as its operand.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        signature: TraceSignature,
        sources: Mapping[fx.Node, Source],
        constant_names: Mapping[int, str],
    ) -> None:
        self.traced, self.signature = traced, signature
        self.sources, self.constant_names = sources, constant_names
        self.types = {node: types_of(node.meta.get("val")) for node in traced.graph.nodes}
        self.program = Program(fx.Graph(), (), ())
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        results: Any = next(reversed(traced.graph.nodes)).args[0]
        self.results: list[fx.Node | None] = [node and _without_identities(node) for node in results]

    def run(self) -> Program:
        """Build the program, once."""
        outputs, results = self._outputs()
        live = _live(results)
        self._place_inputs(live)
        for node in self.traced.graph.nodes:
            if node in live and node not in self.mapping:
                self._copy(node)
        self.program.graph.output(tuple(node and self.mapping[node] for node in results))
        self.program.outputs = outputs
        return self.program

    def _outputs(self) -> tuple[tuple[Output, ...], list[fx.Node | None]]:
        """The outputs with the traced node of each: the model's, new values of buffers that changed, guards."""
        outputs = list(self.signature.outputs)
        nodes = list(self.results[: len(outputs)])
        after = self.results[len(outputs) : len(outputs) + len(self.signature.inputs)]
        for entry, before, node in zip(self.signature.inputs, self.placeholders, after, strict=True):
            if node is not None and node is not before:
                _check_may_change(entry, self.types[node])
                outputs.append(Output(entry.name, "buffer"))
                nodes.append(node)
        last = len(self.results) - len(self.signature.guards)
        return (*outputs, *self.signature.guards), [*nodes, *self.results[last:]]

    def _place_inputs(self, live: set[fx.Node]) -> None:
        placed = [*zip(self.signature.inputs, self.placeholders, strict=True), *self._constants(live)]
        first = len(self.signature.outputs) + len(self.signature.inputs)
        made = self.results[first : first + len(self.signature.tangents)]
        placed += [(entry, node) for entry, node in zip(self.signature.tangents, made, strict=True) if node is not None]
        for entry, node in sorted(placed, key=lambda pair: _ORDER.index(pair[0].kind)):
            self._place(entry, node)

    def _constants(self, live: set[fx.Node]) -> list[tuple[Input, fx.Node]]:
        """The constants that are more than a number, as buffers that the program holds."""
        buffers: list[tuple[Input, fx.Node]] = []
        for node in self.traced.graph.nodes:
            if node.op == "get_attr" and node in live and self._tensor(node).ndim:
                value = self._tensor(node)
                name = self.constant_names.get(id(value), f"constant.{len(buffers)}")
                self.constants[name] = value
                buffers.append((Input(name, "buffer", TensorType.of(value)), node))
        return buffers

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        value = getattr(self.traced, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise CaptureError(self._where(node), f"{node.target} is no tensor", "write it without a higher-order op")
        if value.requires_grad or value.is_meta:
            problem = "it requires grad" if value.requires_grad else "it is on the meta device, its value is unknown"
            raise CaptureError(
                self._where(node),
                f"a tensor of shape {list(value.shape)} is no parameter or buffer, yet {problem}",
                "register it: nn.Parameter on a module, nn.ParameterList for a list, register_buffer",
            )
        return value

    def _where(self, node: fx.Node) -> str:
        source = self._near(node)
        return source.location or source.module or "the model"

    def _place(self, entry: Input, node: fx.Node) -> None:
        prefix = "tangent_" if entry.kind == "tangent" else ""
        placed = self.program.graph.placeholder(prefix + re.sub(r"\W", "_", entry.name))
        module = entry.name.rpartition(".")[0] if entry.kind in ("parameter", "buffer") else ""
        self.program.set_type(placed, entry.type)
        self.program.set_source(placed, Source(module))
        self.program.inputs += (entry,)
        self.mapping[node] = placed

    def _copy(self, node: fx.Node) -> None:
        if getattr(node.meta.get("val"), "layout", torch.strided) is not torch.strided:
            layout = str(node.meta["val"].layout).removeprefix("torch.")
            raise CaptureError(
                self._where(node), f"a tensor here is {layout}", "compute with dense tensors: to_dense()"
            )
        target, args, kwargs = self._number(node) if node.op == "get_attr" else self._call(node)
        name = "getitem" if is_getitem(node) else op_name(target if node.op == "get_attr" else node.target)
        copied = self.program.graph.create_node("call_function", target, args, kwargs, name)
        self.program.set_type(copied, self.types[node])
        self.program.set_source(copied, self._source(node))
        self.mapping[node] = copied

    def _number(self, node: fx.Node) -> _Parts:
        value = self._tensor(node)
        return aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype}

    def _call(self, node: fx.Node) -> _Parts:
        target, type_ = node.target, self.types[node]
        args = tuple(self._argument(value) for value in node.args)
        kwargs = {name: self._argument(value) for name, value in node.kwargs.items() if name not in _PLACEMENT}
        if target is operator.getitem:
            return target, args, kwargs
        if isinstance(target, Opaque):
            return target, args, {}
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(self._where(node), f"{target} has a graph as an argument", "call it outside the model")
        if not node.all_input_nodes:
            kwargs.update(_default_dtype(target, type_, kwargs))
        if target in _SIZED and isinstance(type_, TensorType):
            args = (args[0], type_.shape, *args[2:])  # no -1
        return aten.reshape.default if target in _VIEWS else target, args, kwargs

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.mapping[_without_identities(value)]
        return tuple(map(self._argument, value)) if isinstance(value, (list, tuple)) else value

    def _source(self, node: fx.Node) -> Source:
        return self._source(node.all_input_nodes[0]) if is_getitem(node) else self._near(node)

    def _near(self, node: fx.Node) -> Source:
        """The source of a node, or of one that reads it."""
        return next((self.sources[each] for each in (node, *node.users) if each in self.sources), Source())


def _without_identities(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in _IDENTITIES:
        node = node.all_input_nodes[0]
    return node


def _live(results: Iterable[fx.Node | None]) -> set[fx.Node]:
    """The nodes that a result needs, identities apart."""
    ends = (node for node in results if node is not None)
    return reached(ends, lambda node: map(_without_identities, node.all_input_nodes))


def _check_may_change(entry: Input, after: Types) -> None:
    if entry.kind != "buffer":
        raise CaptureError(
            f"{entry.kind} {entry.name!r}",
            f"the forward changes it in place ({entry.type})",
            "write to a clone of it, or make it a buffer",
        )
    if after != entry.type:
        raise CaptureError(
            f"buffer {entry.name!r}",
            f"the forward turns {entry.type} into {after}",
            "keep the shape and dtype of a buffer",
        )


def _default_dtype(target: torch._ops.OpOverload, type_: Types, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``dtype`` argument of an op without operands, so that no global default decides it later."""
    takes = any(argument.name == "dtype" for argument in target._schema.arguments)
    return {"dtype": type_.dtype} if takes and isinstance(type_, TensorType) and kwargs.get("dtype") is None else {}
