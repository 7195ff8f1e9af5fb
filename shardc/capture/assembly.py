"""From a traced graph to a Program: placeholders in order, no dead code, explicit constants."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import torch
from torch import fx

from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType, dtype_name
from shardc.language.size import number_of
from shardc.program.inference import Types, types_of
from shardc.program.node import add_node, ancestors, is_getitem, is_size, last_node, op_name, reached
from shardc.program.opaque import Opaque
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Source

aten = torch.ops.aten
_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_SLICES = {aten.slice.Tensor, aten.slice_backward.default}
_Parts = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs of a node
_VIEWS = {aten.view.default, aten._unsafe_view.default}  # they rely on strides, which another kernel may not make
_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_PRODUCTS = {
    aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.addmm.default, aten.addmv.default,
    aten.baddbmm.default, aten.convolution.default,
}  # fmt: skip
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
    program = assembly.run()
    _check_products(program)
    return program, assembly.constants


@dataclass(eq=False)
class _Assembly:
    """A traced graph on its way into ``program``.

    State: ``mapping`` from traced nodes to those of the program; ``constants`` by name. Every live traced node is
    mapped once, in traced order; an identity is mapped as its operand.
    """

    traced: fx.GraphModule
    signature: TraceSignature
    sources: Mapping[fx.Node, Source]
    constant_names: Mapping[int, str]  # by id of the tensor

    def __post_init__(self) -> None:
        traced = self.traced
        self.types: dict[fx.Node, Types] = {}
        found: dict[int, Types] = {}  # by the id of a value, which the copies of a block share
        for node in traced.graph.nodes:
            value = node.meta.get("val")
            if id(value) not in found:
                found[id(value)] = types_of(value)
            self.types[node] = found[id(value)]
        self.program = Program(fx.Graph(), (), ())
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        results: Any = last_node(traced.graph).args[0]
        self.results: list[fx.Node | None] = [node and _without_identities(node) for node in results]

    def run(self) -> Program:
        """Build the program, once."""
        outputs, results = self._outputs()
        ends = (node for node in results if node is not None)
        live = reached(ends, lambda node: map(_without_identities, filterfalse(is_size, node.all_input_nodes)))
        self._place_inputs(live)
        for node in self.traced.graph.nodes:
            if node in live and node not in self.mapping:
                self._copy(node)
        self.program.graph.output(tuple(node and self.mapping[node] for node in results))
        self.program.outputs = outputs
        return self.program

    def _outputs(self) -> tuple[tuple[Output, ...], list[fx.Node | None]]:
        """The outputs with the traced node of each: the model's, buffers and inputs that changed, guards."""
        outputs = list(self.signature.outputs)
        nodes = list(self.results[: len(outputs)])
        after = self.results[len(outputs) : len(outputs) + len(self.signature.inputs)]
        for entry, before, node in zip(self.signature.inputs, self.placeholders, after, strict=True):
            if node is not None and node is not before:
                _check_may_change(entry, self.types[node])
                outputs.append(Output(entry.name, "buffer" if entry.kind == "buffer" else "changed"))
                nodes.append(node)
        last = len(self.results) - len(self.signature.guards)
        return (*outputs, *self.signature.guards), [*nodes, *self.results[last:]]

    def _place_inputs(self, live: set[fx.Node]) -> None:
        """Make a placeholder for each input, each constant that has dims, which becomes a buffer, and each tangent."""
        inputs = [*zip(self.signature.inputs, self.placeholders, strict=True)]
        for node in self.traced.graph.nodes:
            if node.op == "get_attr" and node in live and (value := self._tensor(node)).ndim:
                name = self.constant_names.get(id(value), f"constant.{len(inputs) - len(self.signature.inputs)}")
                self.constants[name] = value
                inputs.append((Input(name, "buffer", TensorType.of(value)), node))
        first = len(self.signature.outputs) + len(self.signature.inputs)
        tangents = zip(self.signature.tangents, self.results[first:], strict=False)
        inputs += [(entry, node) for entry, node in tangents if node is not None]
        for entry, node in sorted(inputs, key=lambda pair: _ORDER.index(pair[0].kind)):
            prefix = "tangent_" if entry.kind == "tangent" else ""
            placeholder = self.program.graph.placeholder(prefix + re.sub(r"\W", "_", entry.name))
            module = entry.name.rpartition(".")[0] if entry.kind in ("parameter", "buffer") else ""
            self.program.set_type(placeholder, entry.type)
            self.program.set_source(placeholder, Source(module))
            self.program.inputs += (entry,)
            self.mapping[node] = placeholder

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        value = getattr(self.traced, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise CaptureError(self._where(node), f"{node.target} is no tensor", "write it without a higher-order op")
        if value.requires_grad or value.is_meta:
            problem = "it requires grad" if value.requires_grad else "it is on the meta device, its value is unknown"
            problem = f"a tensor of shape {list(value.shape)} is no parameter or buffer, yet {problem}"
            remedy = "register it: nn.Parameter on a module, nn.ParameterList for a list, register_buffer"
            raise CaptureError(self._where(node), problem, remedy)
        return value

    def _where(self, node: fx.Node) -> str:
        source = self._near(node)
        return source.location or source.module or "the model"

    def _copy(self, node: fx.Node) -> None:
        if getattr(node.meta.get("val"), "layout", torch.strided) is not torch.strided:
            problem = f"a tensor here is {str(node.meta['val'].layout).removeprefix('torch.')}"
            raise CaptureError(self._where(node), problem, "compute with dense tensors: to_dense()")
        if node.op == "get_attr":  # a number
            value = self._tensor(node)
            parts: _Parts = (aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype})
        else:
            parts = self._call(node)
        target, args, kwargs = parts
        name = "getitem" if is_getitem(node) else op_name(target if node.op == "get_attr" else node.target)
        copied = add_node(self.program.graph, "call_function", target, args, kwargs, name)
        self.program.set_type(copied, self.types[node])
        self.program.set_source(copied, self._source(node))
        self.mapping[node] = copied

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
        takes_dtype = any(argument.name == "dtype" for argument in target._schema.arguments)
        if (
            all(map(is_size, node.all_input_nodes))
            and takes_dtype
            and isinstance(type_, TensorType)
            and not kwargs.get("dtype")
        ):
            kwargs["dtype"] = type_.dtype  # so that no global default decides it later
        if target in _SIZED and isinstance(type_, TensorType):
            args = (args[0], type_.shape, *args[2:])  # no -1
        return aten.reshape.default if target in _VIEWS else target, args, kwargs

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return number_of(value.meta["val"]) if is_size(value) else self.mapping[_without_identities(value)]
        return tuple(map(self._argument, value)) if isinstance(value, (list, tuple)) else value

    def _source(self, node: fx.Node) -> Source:
        return self._source(node.all_input_nodes[0]) if is_getitem(node) else self._near(node)

    def _near(self, node: fx.Node) -> Source:
        """The source of a node, or of one that reads it."""
        return next((self.sources[each] for each in (node, *node.users) if each in self.sources), Source())


def _without_identities(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (node.target in _IDENTITIES or _takes_all(node)):
        node = node.all_input_nodes[0]
    return node


def _takes_all(node: fx.Node) -> bool:
    """Whether a node is a slice that takes a whole dim. Torch omits such a slice if the size is a plain number."""
    return node.target in _SLICES and types_of(node.meta["val"]) == types_of(node.all_input_nodes[0].meta["val"])


def _check_may_change(entry: Input, after: Types) -> None:
    who = f"{entry.kind} {entry.name!r}"
    if entry.kind not in ("buffer", "input") or entry.requires_grad:
        problem = f"the forward changes it in place ({entry.type}), and it has a gradient"
        raise CaptureError(who, problem, "write to a clone of it, or make it a buffer")
    if after != entry.type:
        raise CaptureError(who, f"the forward turns {entry.type} into {after}", "keep the shape and dtype of a buffer")


def _check_products(program: Program) -> None:
    """Raise a CaptureError for a product of two dtypes, which kernels refuse and meta tensors do not."""
    for node in program.calls:
        if node.target in _PRODUCTS and program.source(node).phase == "forward":
            by_dtype = {program.type(operand).dtype: operand for operand in reversed(node.all_input_nodes)}
            if len(by_dtype) > 1:
                raise _mixed_product(program, node, list(by_dtype.items()))


def _mixed_product(program: Program, node: fx.Node, operands: Sequence[tuple[torch.dtype, fx.Node]]) -> CaptureError:
    """The error for a product of several dtypes. It names the input that an operand is computed from, if any."""
    first, second = operands[:2]
    where, problem = program.source(node).place, f"a product of {dtype_name(first[0])} and {dtype_name(second[0])}"
    for (dtype, operand), (wanted, _) in ((first, second), (second, first)):
        given = _input_behind(program, operand, dtype)
        if given is not None:
            problem = f"{problem}, for {given.name!r} is {given.type}"
            return CaptureError(where, problem, f"give {given.name!r} as {wanted}")
    return CaptureError(where, problem, "cast one of them, as by x.to(weight.dtype)")


def _input_behind(program: Program, node: fx.Node, dtype: torch.dtype) -> Input | None:
    """An input of the call, of the given dtype, that a value is computed from."""
    behind = ancestors(node)
    pairs = zip(program.inputs, program.placeholders, strict=True)
    return next((put for put, each in pairs if each in behind and (put.kind, put.type.dtype) == ("input", dtype)), None)
