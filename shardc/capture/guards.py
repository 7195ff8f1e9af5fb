"""Guards: what an op finds in the values of tensors at capture, and the ops that check it in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.refusals import NoValueError
from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.ops.linalg import STEADY
from shardc.ops.pointwise import is_pointwise
from shardc.program.inference import types_of
from shardc.program.node import ancestors, is_random, op_name
from shardc.program.opaque import Opaque, flat_call

aten = torch.ops.aten
_PASSED = TensorType((), torch.bool)  # a further result of each guard, which keeps it in the program


class GuardError(CaptureError):
    """A program ran on values for which it was not captured; raised before the step has any effect.

    ``who`` is the user's line, ``finding`` the result of an op on the values, in words, ``expected`` its result at
    capture.
    """

    def __init__(self, where: str, finding: str, expected: str) -> None:
        self.finding = finding
        problem = f"{finding}, the program was captured where it gave {expected}"
        super().__init__(where, problem, "compile it anew for these inputs, as a parallelized module does")


class Guards:
    """The guards of one trace.

    State: ``results``, a traced result of each guard; ``names``, the text of each; ``opaque``, the opaque calls, which
    graphs name by their keys alone; ``_graph``, the traced graph; ``_values`` of its placeholders; ``_unknown``, nodes
    of it that have no value before the program runs.
    """

    def __init__(self, opaque: list[Opaque]) -> None:
        self.results: list[Tensor] = []
        self.names: list[str] = []
        self.opaque = opaque
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Tensor] = {}
        self._unknown: set[fx.Node] = set()

    def begin(self, values: Sequence[Tensor | None]) -> None:
        """Set the values of the traced function's inputs, in order; None where there is none."""
        self._graph = _tracer().graph
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._values = {
            node: value
            for node, value in zip(placeholders, values, strict=True)
            if value is not None and not value.is_meta and not isinstance(value, FakeTensor)
        }

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """The tensors that are made in the block have no value before the program runs."""
        last = next(reversed(self._graph.nodes))
        yield
        while (last := last.next).op != "root":
            self._unknown.add(last)

    def add(self, func: Any, args: Any, kwargs: Mapping[str, Any], where: str) -> Any:
        """The result of an op on the values at capture, and a guard from now on that it is the same in every step.

        The op is the latest node of the graph. Raises a NoValueError where its operands are unknown.
        """
        value = self._value(next(reversed(_tracer().graph.nodes)), func)
        leaves, nest = pytree.tree_flatten((args, dict(kwargs)))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        call = flat_call(STEADY.get(func, func), leaves, nest, positions)
        guard = _Guard(op_name(func), call, result_text(value), where)
        results = types_of(value)
        types = (results,) if isinstance(results, TensorType) else results or ()
        opaque = Opaque(guard.name, guard, (*types, _PASSED), tags=tuple(func.tags))  # type: ignore[arg-type]
        self.opaque.append(opaque)
        *tensors, passed = opaque(*(leaves[i] for i in positions))
        self.results.append(passed)
        self.names.append(f"{len(self.names)}: {guard.name} gives {guard.expected} at {where}")
        return value if not types else tensors[0] if isinstance(results, TensorType) else tuple(tensors)

    def _value(self, node: fx.Node, func: Any) -> Any:
        """The value of a node, computed from the values of the placeholders that it depends on."""
        needed = ancestors(node)
        if node.target is not func or node.graph is not self._graph:
            raise NoValueError("it is part of another op")
        if needed & self._unknown:
            raise NoValueError("it depends on a gradient that comes in later")
        if any(map(is_random, needed)):
            raise NoValueError("it depends on numbers that are drawn at random")
        if any(each.op == "placeholder" and each not in self._values for each in needed):
            raise NoValueError("it depends on tensors without values: capture with real ones")
        in_order = [each for each in node.graph.nodes if each in needed]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for each in in_order:
            copies[each] = graph.node_copy(each, copies.__getitem__)
        graph.output(copies[node])
        values: list[Any] = [self._values[each] for each in in_order if each.op == "placeholder"]
        module = fx.GraphModule(_tracer().root, graph)
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            # All ranks capture, and so gather the same DTensors in the same order.
            whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
            return fx.Interpreter(module).run(*(value.detach() for value in whole))


class _Guard:
    """An op on flat tensors whose result must be the expected one; it returns the tensors of the result and a flag."""

    def __init__(self, name: str, call: Callable[..., Any], expected: str, where: str) -> None:
        self.name, self.call, self.expected, self.where = name, call, expected, where

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        result = self.call(*operands)
        if result_text(result) != self.expected:
            raise GuardError(self.where, f"{self.name} gives {result_text(result)}", self.expected)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return [*tensors, torch.ones((), dtype=torch.bool, device=operands[0].device)]


def result_text(result: Any) -> str:
    """The part of an op's result on which a program may depend: the types of tensors, or the number itself."""
    types = types_of(result)
    if types is None:
        return repr(result)
    return str(types) if isinstance(types, TensorType) else ", ".join(map(str, types))


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def known_number(node: fx.Node, root: nn.Module) -> Any:
    """The number that a node returns, or None where it depends on an input or on random numbers.

    ``root`` holds the constants of the graph. A ``torch._check_tensor_all`` is taken to hold.
    """
    if any(each.target is aten._is_all_true.default for each in node.all_input_nodes):
        return True
    needed = ancestors(node)
    if any(each.op == "placeholder" or is_random(each) for each in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for each in (each for each in node.graph.nodes if each in needed):
        if each.op == "get_attr":
            values[each] = getattr(root, str(each.target))
        else:
            args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = _on_one_row(each.target, args, kwargs)
    return values[node]


def _on_one_row(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on one row where all rows of dim 0 are the same (stride 0), so that a large batch costs nothing."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    tall = {id(tensor) for tensor in tensors if tensor.ndim == ndim and ndim and tensor.shape[0] > 1}
    spread = [tensor for tensor in tensors if id(tensor) in tall and tensor.stride(0) == 0]
    if not spread or len({id(tensor) for tensor in spread}) < len(tall) or not _is_rowwise(target, args, ndim):
        return target(*args, **kwargs)
    first: Any = lambda value: value[:1] if id(value) in tall else value  # noqa: E731
    result = target(*map_aggregate(args, first), **kwargs)
    return result.expand(spread[0].shape[0], *result.shape[1:]) if result.ndim else result


def _is_rowwise(target: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether equal rows give equal rows, or one number that does not depend on their count."""
    if target in (aten.cat.default, aten.cumsum.default):
        return len(args) > 1 and args[1] % ndim != 0
    return is_pointwise(target) or target in (aten.all.default, aten.any.default)
