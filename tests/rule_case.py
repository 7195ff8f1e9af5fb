"""Calls of ops with real arguments, each with its rule as a program binds it; read from ``rule_examples.txt``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import shardc.ops  # noqa: F401
from shardc.node import operands
from shardc.ops.contraction import dot
from shardc.ops.embedding import lookup_rows, scatter_rows
from shardc.ops.position import add_at, gather_at, lookup_at, put_at, scatter_add_at, scatter_at
from shardc.ops.random import poisson_quantile, uniform
from shardc.program import Program
from shardc.rule import Call, Rule
from shardc.sharding import TensorType
from shardc.spec import Dims
from shardc.window import overlap_add, windows

LINES = [line for line in Path(__file__).with_name("rule_examples.txt").read_text().splitlines() if line]
EXAMPLES = [tuple(line.split("  ", 1)) for line in LINES if not line.startswith("#")]


POSITION_OPS = (lookup_at, add_at, put_at, gather_at, scatter_add_at, scatter_at)
OTHER_OPS = (dot, uniform, poisson_quantile, lookup_rows, scatter_rows, windows, overlap_add)
PYTHON_OPS = {op.__name__: op for op in (*OTHER_OPS, *POSITION_OPS)}


class Draw(dict[str, Any]):
    """The names that an example may use; a letter is a size that 2 and 3 divide."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            F=self.floats,
            P=self.positive,
            U=self.unit,
            I=self.ints,
            M=self.mask,
            S=self.positive_definite,
            R=torch.arange,
            CUDA=self.cuda,
            float32=torch.float32,
            float64=torch.float64,
            int32=torch.int32,
            int64=torch.int64,
            uint64=torch.uint64,
        )
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def __missing__(self, name: str) -> int:
        self[name] = self.random.choice((6, 12))
        return self[name]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        return self.floats(*shape).abs() + 0.5

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return self.floats(*shape) > 0

    def positive_definite(self, *shape: int) -> Tensor:
        x = self.floats(*shape, shape[-1])
        return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)

    def cuda(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "meta"
        return self.floats(*shape).abs().to(dtype).to(device)


@dataclass(frozen=True)
class Case:
    """A call of an op with real arguments, and its rule, bound as a program binds it."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: Call
    rule: Rule
    tensors: tuple[Tensor | None, ...]  # the operands
    results: tuple[Tensor | None, ...]

    def run(self, tensors: Sequence[Tensor | None], changed: Mapping[int, Any] | None = None) -> list[Tensor | None]:
        """The results for other operands, and other arguments at some positions."""
        new = {id(old): new for old, new in zip(self.tensors, tensors, strict=True) if old is not None}
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: new[id(tensor)].clone(), (self.args, self.kwargs))
        args = list(args)
        for position, argument in sorted((changed or {}).items()):
            args[position : position + 1] = [argument]
        return as_results(self.op(*args, **kwargs))


def as_results(found: Any) -> list[Tensor | None]:
    entries = list(found) if isinstance(found, (tuple, list)) else [found]
    return [entry if isinstance(entry, Tensor) else None for entry in entries]


def type_of(tensor: Tensor | None) -> TensorType | None:
    return None if tensor is None else TensorType(tuple(tensor.shape), tensor.dtype)


def make_case(name: str, text: str, seed: int) -> Case:
    args, kwargs = eval(f"call({text})", {}, _with_call(Draw(seed)))  # the table is ours
    return case_of(op_named(name), args, kwargs)


def _with_call(draw: Draw) -> Draw:
    draw["call"] = lambda *args, **kwargs: (args, kwargs)
    return draw


def op_named(name: str) -> Any:
    if name in PYTHON_OPS:
        return PYTHON_OPS[name]
    *namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, (namespace or ["aten"])[0]), op), overload)


def without_chunks(rule: Rule) -> Rule:
    """The rule as if dims cut in chunks of another size on each tensor were whole: test_window is theirs."""

    def whole(dims: Dims | None) -> Dims | None:
        return dims and tuple(() if len(dim) == 1 and dim[0] in rule.chunks else dim for dim in dims)

    return replace(rule, operands=tuple(map(whole, rule.operands)), results=tuple(map(whole, rule.results)))


def case_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: Any = None) -> Case:
    graph = fx.Graph()
    program = Program(graph, (), ())
    tensors: dict[fx.Node, Tensor] = {}

    def placeholder(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(tensors)}")
        program.set_type(node, type_of(tensor))
        tensors[node] = tensor
        return node

    whole = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    found = op(*whole[0], **whole[1])
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.clone(), (args, dict(kwargs)))  # no tensor twice
    node = graph.call_function(op, *pytree.tree_map_only(Tensor, placeholder, (args, kwargs)))
    types = tuple(map(type_of, as_results(found)))
    program.set_type(node, types if isinstance(found, (tuple, list)) else types[0])
    bound = without_chunks(rule(program.call(node)) if rule else program.rule(node))
    values = tuple(operand and tensors[operand] for operand in operands(node))
    return Case(op, args, kwargs, program.call(node), bound, values, tuple(as_results(found)))
