"""canonicalize: captured -> canonical. Fewer kinds of op, each with an honest rule.

Losses and means become sums and divisions, dropout becomes a counter-based draw, shape-only uses of a value become
constants, and copies and views that change nothing go::

    mean: f32[] = mean(x)                      sum: f32[] = sum(x);  div: f32[] = div(sum, 512)
    m: f32[8, 64] = bernoulli(x, 0.9)     ->   u = uniform(random, 8153, index);  lt = lt(u, 0.9);  m = _to_copy(lt)
    n: f32[8, 64] = clone(x)                   (x)

Invariant: every op is pure and every random op is ``uniform``.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardc.ops.random import uniform
from shardc.program import Program, is_getitem, operands, takes_device

aten = torch.ops.aten


def canonicalize(program: Program) -> Program:
    """The program in fewer kinds of op, with equal values."""
    program = program.copy(level="canonical")
    draws = _Draws(program)
    for node in list(program.graph.nodes):
        if node.op != "call_function" or is_getitem(node):
            continue
        _drop_device(node)
        with program.graph.inserting_before(node):
            if node.target in draws.rewrites:
                draws.rewrites[node.target](node)
            elif node.target in REWRITES:
                _substitute(program, node, REWRITES[node.target](program, node))
    program.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    _refuse_random(program)
    return program


Results = fx.Node | tuple[fx.Node | None, ...] | None


def _substitute(program: Program, node: fx.Node, new: Results) -> None:
    """Let what a rewrite returned stand for the node; None leaves it."""
    if isinstance(new, tuple):
        for user in list(node.users):
            result = new[program.value(user)[1]]
            assert result is not None, user
            program.replace(user, result)
        program.graph.erase_node(node)
    elif new is not None and new is not node:
        program.replace(node, new)


def _drop_device(node: fx.Node) -> None:
    """A constant is made where the runtime computes: the device it was captured on says nothing."""
    if takes_device(node.target):
        node.kwargs = {
            key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory", "layout")
        }


def _refuse_random(program: Program) -> None:
    for node in program.calls:
        if _is_random(node):
            source = program.source(node)
            raise NotImplementedError(
                f"{node.target} in {source.module or 'the model'} ({source.location}): this random op has no "
                "counter-based form yet, so its values would depend on the mesh"
            )


def _is_random(node: fx.Node) -> bool:
    """Whether an op draws; attention with a dropout of zero does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


# Ops that change nothing.


def _identity(program: Program, node: fx.Node) -> Results:
    return node.args[0]  # type: ignore[return-value]


def _copy(program: Program, node: fx.Node) -> Results:
    """A conversion to the dtype that the value has already."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if program.type(node) == program.type(source) else None


def _reshape(program: Program, node: fx.Node) -> Results:
    """Every view is a reshape from the first of a chain of views, or nothing."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if program.type(source).shape == program.type(node).shape:
        return source
    return program.insert(aten.reshape.default, (source, list(program.type(node).shape)), program.type(node), node)


def _permute(program: Program, node: fx.Node) -> Results:
    ndim = len(program.type(node).shape)
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        dims = [dim % ndim for dim in node.args[1]]  # type: ignore[union-attr, operator]
    elif ndim > 1:
        i, j = (0, 1) if node.target is aten.t.default else (node.args[1] % ndim, node.args[2] % ndim)  # type: ignore[operator]
        dims[i], dims[j] = dims[j], dims[i]
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target is aten.permute.default:
        inner, outer = source.args
        source, dims = inner, [outer[dim] for dim in dims]  # type: ignore[assignment, index]
    if dims == list(range(ndim)):
        return source
    return program.insert(aten.permute.default, (source, dims), program.type(node), node)


def _expand(program: Program, node: fx.Node) -> Results:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = program.type(node).shape
    if program.type(source).shape == shape:
        return source
    return program.insert(aten.expand.default, (source, list(shape)), program.type(node), node)


# Shape-only uses, so that a partial sum is not reduced for the sake of its shape.


def _full_of(value: float) -> Callable[[Program, fx.Node], Results]:
    def rewrite(program: Program, node: fx.Node) -> Results:
        type_ = program.type(node)
        return program.insert(aten.full.default, (list(type_.shape), value), type_, node, {"dtype": type_.dtype})

    return rewrite


def _full(program: Program, node: fx.Node) -> Results:
    index = 1 if node.target is aten.full_like.default else 2
    return _full_of(node.args[index])(program, node)  # type: ignore[arg-type]


def _index(program: Program, node: fx.Node) -> Results:
    """An index by ``arange`` of each dim, each spread along its own dims, is a view."""
    source, indices = node.args
    assert isinstance(source, fx.Node) and isinstance(indices, (list, tuple))
    shape, last = program.type(source).shape, -1
    if len(indices) != len(shape):
        return None
    for index, size in zip(indices, shape, strict=True):
        dim = _arange_dim(program, index, size, program.type(node).shape)
        if dim is None or dim <= last:
            return None
        last = dim
    return program.insert(aten.reshape.default, (source, list(program.type(node).shape)), program.type(node), node)


def _arange_dim(program: Program, node: Any, size: int, shape: tuple[int, ...]) -> int | None:
    """The dim of ``shape`` along which an index runs from 0 to ``size``, if that is all it does."""
    if not isinstance(node, fx.Node):
        return None
    index_shape = program.type(node).shape
    if math.prod(index_shape) != size:
        return None
    while node.target in (aten.reshape.default, aten.unsqueeze.default) or _adds_zero(node):
        node = node.args[0]
    if node.target is not aten.arange.default or program.type(node).numel != size:
        return None
    lead = len(shape) - len(index_shape)
    dims = [lead + i for i, extent in enumerate(index_shape) if extent > 1]
    return dims[0] if dims else lead + next((i for i, n in enumerate(index_shape) if shape[lead + i] == n), 0)


def _adds_zero(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.args[1] == 0


# Means and losses.


def _mean(program: Program, node: fx.Node) -> Results:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dims = node.args[1] if len(node.args) > 1 and node.args[1] else list(range(len(program.type(source).shape)))
    keep = len(node.args) > 2 and bool(node.args[2])
    total = program.emit(aten.sum.dim_IntList, source, dims, keep, like=node, dtype=program.type(node).dtype)
    count = program.type(source).numel // max(1, program.type(total).numel)
    return program.emit(aten.div.Tensor, total, count, like=node)


def _mean_loss(program: Program, node: fx.Node) -> Results:
    """A mean (1) is the sum (2) divided by the number of elements; its gradient is divided before."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {
        a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for i, a in enumerate(schema)
    }
    if given["reduction"] != 1:
        return None
    shapes = [program.type(operand).shape for operand in operands(node) if operand is not None]
    count, given["reduction"] = math.prod(torch.broadcast_shapes(*shapes)), 2
    if "grad_output" in given:
        given["grad_output"] = program.emit(aten.div.Tensor, given["grad_output"], count, like=node)
        return program.emit(node.target, *given.values(), like=node)
    return program.emit(aten.div.Tensor, program.emit(node.target, *given.values(), like=node), count, like=node)


def _nll_loss(program: Program, node: fx.Node) -> Results:
    """The mean (1), the sum (2) or each (0) of -x[row, target[row]] over the rows whose target counts."""
    x, target, weight, reduction, ignore = node.args
    assert isinstance(x, fx.Node)
    if len(program.type(x).shape) != 2 or weight is not None:
        return None

    def emit(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return program.emit(op, *args, like=node, **kwargs)

    counted, safe = _counted_targets(program, node, target, ignore)
    picked = emit(aten.squeeze.dim, emit(aten.gather.default, x, 1, emit(aten.unsqueeze.default, safe, 1)), 1)
    dtype = program.type(x).dtype
    losses = emit(
        aten.where.self, counted, emit(aten.neg.default, picked), emit(aten.scalar_tensor.default, 0.0, dtype=dtype)
    )
    count = emit(aten.sum.dim_IntList, counted, [0], False, dtype=dtype)
    if reduction == 0:
        return losses, count
    total = emit(aten.sum.dim_IntList, losses, [0])
    return (emit(aten.div.Tensor, total, count) if reduction == 1 else total), count


def _nll_loss_backward(program: Program, node: fx.Node) -> Results:
    grad, x, target, weight, reduction, ignore, count = node.args
    assert isinstance(x, fx.Node)
    if len(program.type(x).shape) != 2 or weight is not None:
        return None

    def emit(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return program.emit(op, *args, like=node, **kwargs)

    counted, safe = _counted_targets(program, node, target, ignore)
    dtype = program.type(x).dtype
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=dtype)
    each = emit(aten.neg.default, emit(aten.div.Tensor, grad, count) if reduction == 1 else grad)
    each = emit(aten.where.self, counted, each, zero)
    classes = emit(aten.arange.default, program.type(x).shape[1])
    is_target = emit(aten.eq.Tensor, classes, emit(aten.unsqueeze.default, safe, 1))
    return emit(aten.where.self, is_target, emit(aten.unsqueeze.default, each, 1), zero)


def _counted_targets(program: Program, node: fx.Node, target: Any, ignore: Any) -> tuple[fx.Node, fx.Node]:
    """Which rows count, and their targets, with 0 where a row does not."""
    counted = program.emit(aten.ne.Scalar, target, ignore, like=node)
    zero = program.emit(aten.scalar_tensor.default, 0, like=node, dtype=torch.int64)
    return counted, program.emit(aten.where.self, counted, target, zero, like=node)


class _Draws:
    """Random ops as draws by (seed, step, module and ordinal, global index)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.random = program.placeholders[[given.kind for given in program.inputs].index("random")]
        self.ordinals: Counter[str] = Counter()
        self.rewrites: dict[Any, Callable[[fx.Node], None]] = {
            aten.native_dropout.default: self.dropout,
            aten.bernoulli.p: self.bernoulli,
            aten.rand.default: self.rand,
            aten.rand_like.default: self.rand,
        }

    def dropout(self, node: fx.Node) -> None:
        x, p, train = node.args
        assert isinstance(x, fx.Node) and isinstance(p, float)
        keep = 1.0 - p if train else 1.0
        mask = self._emit(node, aten.lt.Scalar, self._uniform(node), keep)
        scaled = self._emit(
            node, aten.mul.Tensor, x, self._emit(node, aten._to_copy.default, mask, dtype=self._dtype(x))
        )
        result = self._emit(node, aten.mul.Scalar, scaled, 1.0 / keep if keep else 0.0)
        _substitute(self.program, node, (result, mask))

    def bernoulli(self, node: fx.Node) -> None:
        mask = self._emit(node, aten.lt.Scalar, self._uniform(node), node.args[1])
        dtype = self._dtype(node)
        _substitute(self.program, node, self._emit(node, aten._to_copy.default, mask, dtype=dtype))

    def rand(self, node: fx.Node) -> None:
        drawn, dtype = self._uniform(node), self._dtype(node)
        same = self._dtype(drawn) == dtype
        new = drawn if same else self._emit(node, aten._to_copy.default, drawn, dtype=dtype)
        _substitute(self.program, node, new)

    def _emit(self, node: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.program.emit(op, *args, like=node, **kwargs)

    def _dtype(self, node: fx.Node) -> torch.dtype:
        type_ = self.program.types(node)[0]
        assert type_ is not None
        return type_.dtype

    def _uniform(self, node: fx.Node) -> fx.Node:
        type_ = self.program.types(node)[0]
        assert type_ is not None
        return self._emit(node, uniform, self.random, self._key(node), self._global_index(node, type_.shape))

    def _key(self, node: fx.Node) -> int:
        module = self.program.source(node).module
        self.ordinals[module] += 1
        name = f"{module}#{self.ordinals[module]}"
        return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "big")

    def _global_index(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """Each element's row-major index in the whole value, from one arange a dim, so that any dim may be cut."""
        total = self._emit(node, aten.scalar_tensor.default, 0, dtype=torch.int64)
        for dim, size in enumerate(shape):
            along = self._emit(
                node, aten.mul.Scalar, self._emit(node, aten.arange.default, size), math.prod(shape[dim + 1 :])
            )
            spread = [1] * dim + [size] + [1] * (len(shape) - dim - 1)
            total = self._emit(node, aten.add.Tensor, total, self._emit(node, aten.reshape.default, along, spread))
        return total


REWRITES: dict[Any, Callable[[Program, fx.Node], Results]] = {
    **dict.fromkeys(
        (
            aten.clone.default,
            aten.detach.default,
            aten.alias.default,
            aten.lift_fresh_copy.default,
            aten.contiguous.default,
        ),
        _identity,
    ),
    aten._to_copy.default: _copy,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _reshape),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permute),
    aten.expand.default: _expand,
    **dict.fromkeys(
        (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default, aten.empty_like.default), _full_of(0)
    ),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), _full_of(1)),
    **dict.fromkeys((aten.full_like.default, aten.new_full.default), _full),
    aten.index.Tensor: _index,
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss.default,
            aten.huber_loss_backward.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_backward.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        _mean_loss,
    ),
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
