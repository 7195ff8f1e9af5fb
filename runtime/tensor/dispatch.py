"""Ops on global tensors: each gives its result on one device, computed on pieces if that is enough.

An op is computed in the first of these ways that fits it:

* on pieces: an elementwise op of a cut tensor with others that are cut alike or whole; an optimizer's op on lists;
* along dims that are not cut: an op that treats the other dims as a batch;
* as a reduction over all cut dims: each rank reduces its piece, then the results of all ranks (``reduction.py``);
* on wholes: any other op. Cut operands are gathered, and tensors that the op writes are cut again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree

from shardc.language.errors import ShardingError

from ..tier.files import made_beside
from .piece import cut_dims, from_all, is_cut_alike, is_whole, piece_of, spec_like, whole, with_dims
from .reduction import REDUCTIONS, DeferredNorm, complete_norms, deferred_norm, reduction_of

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Make = Callable[[Tensor, Any], DTensor]  # makes a global tensor from this rank's piece and a spec
Way = Callable[[Make, Any, Args, Kwargs], Any]  # returns NotImplemented if it does not fit

ELEMENTWISE = {  # in addition to the ops that torch tags as pointwise
    aten._to_copy, aten.alias, aten.copy_, aten.detach, aten.empty_like, aten.fill_, aten.full_like, aten.lift_fresh,
    aten.ones_like, aten.zero_, aten.zeros_like,
}  # fmt: skip
FUSED = {aten._fused_adagrad_, aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_}
NOT_BY_ELEMENT = {f"aten::_foreach_{each}" for each in ("max", "mm", "norm", "powsum")}
FACTORIES = {aten.new_empty, aten.new_empty_strided, aten.new_full, aten.new_ones, aten.new_zeros}
ALONG = {  # ops with an argument ``dim`` or ``dims``, or along all dims
    aten._log_softmax, aten._softmax, aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.argsort,
    aten.cummax, aten.cummin, aten.cumprod, aten.cumsum, aten.flip, aten.kthvalue, aten.linalg_vector_norm,
    aten.logsumexp, aten.max, aten.mean, aten.median, aten.min, aten.norm, aten.prod, aten.select, aten.slice,
    aten.sort, aten.split, aten.split_with_sizes, aten.std, aten.sum, aten.topk, aten.unbind, aten.var,
}  # fmt: skip
NORM = aten.linalg_vector_norm


def dispatch(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of an op on global tensors."""
    if getattr(func, "overloadpacket", None) is not NORM:
        complete_norms()
    for way in _ways(func):
        result = way(make, func, args, kwargs)
        if result is not NotImplemented:
            return result
    return on_wholes(make, func, args, kwargs)


@functools.cache
def _ways(func: Any) -> tuple[Way, ...]:
    """The ways to try before computing an op on wholes."""
    if not isinstance(func, torch._ops.OpOverload) or any(each.is_out for each in func._schema.arguments):
        return ()
    packet, name, is_pointwise = func.overloadpacket, func._schema.name, torch.Tag.pointwise in func.tags
    if torch.Tag.nondeterministic_seeded in func.tags:
        return (random_on_wholes,)
    if packet in FUSED or (name.startswith("aten::_foreach_") and name not in NOT_BY_ELEMENT):
        return (on_lists_of_pieces,)
    if packet in ALONG or packet in REDUCTIONS:
        return (norm, along_dims, reduction) if packet is NORM else (along_dims, reduction)
    ways: dict[Any, Way] = {
        aten._amp_foreach_non_finite_check_and_unscale_: unscale,
        aten._foreach_norm: norms,
        aten.equal: equal,
        aten.unsqueeze: unsqueeze,
        **dict.fromkeys((aten.t, aten.transpose, aten.permute), permute),
        **dict.fromkeys(FACTORIES, factory),
    }
    way = ways.get(packet, on_pieces if packet in ELEMENTWISE or is_pointwise else None)
    return () if way is None else (way,)


def on_pieces(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise op: all operands are cut like the one that is written, else like the one with the most dims."""
    is_mutable = _is_mutable(func)
    operands = [each for each in ((*args, *kwargs.values()) if kwargs else args) if isinstance(each, Tensor)]
    if is_mutable:
        leader: Any = args[0]
        if not isinstance(leader, DTensor) or is_copy(leader):
            return NotImplemented
    else:
        leader = _leader(operands)
    spec, shape = leader._spec, leader.shape
    if len(operands) > 1 and not all(_broadcasts(each.shape, shape) for each in operands):
        return NotImplemented
    if type(leader) is DTensor and cut_dims(leader) is None:
        return NotImplemented
    pieces = [_piece(each, spec, shape, func) if isinstance(each, Tensor) else each for each in args]
    named = {name: _piece(each, spec, shape, func) for name, each in kwargs.items()} if kwargs else {}
    local = made_beside(func, *pieces, **named)
    local = func(*pieces, **named) if local is None else local
    if is_mutable:
        _note_written((leader,))
        return leader
    result = _like(make, local, spec, shape)
    if is_copy(leader) and func._schema._is_view_op():
        result.is_copy = True
    return result


def _note_written(tensors: Iterable[Any]) -> None:
    """Count a write in the versions of pieces, which ``x.data`` shares with ``x``; torch does not below autograd."""
    pieces = [each._local_tensor for each in tensors if isinstance(each, DTensor)]
    increment_version([each for each in pieces if not each.is_inference()])


@functools.cache
def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _leader(operands: Sequence[Tensor]) -> DTensor:
    """The operand with the most dims, preferably a cut one."""
    tensors = [each for each in operands if isinstance(each, DTensor)]
    if len(tensors) == 1:
        return tensors[0]
    return max(tensors, key=lambda each: (not is_whole(each), each.dim()))


def _piece(value: Any, spec: Any, shape: Sequence[int], func: Any) -> Any:
    """The piece of a tensor, cut like one of this spec and shape; any other value as it is."""
    if isinstance(value, DTensor):
        if value._spec is spec or (is_cut_alike(value._spec, spec) and value.shape == shape):
            return value._local_tensor
        value = whole(value, name_of(func))
    return piece_of(value, spec, shape) if isinstance(value, Tensor) and value.numel() != 1 else value


def _broadcasts(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a tensor can be broadcast to a shape."""
    if shape == other:
        return True
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(size in (1, target) for size, target in pairs)


def _like(make: Make, local: Any, spec: Any, shape: Sequence[int]) -> Any:
    """The results of an elementwise op on a tensor of this spec and shape."""
    if not isinstance(local, Tensor):
        return [_like(make, each, spec, shape) for each in local]
    if local.dtype != spec.tensor_meta.dtype or spec.tensor_meta.shape != shape:
        spec = spec_like(spec, spec.placements, local, shape)
    return make(local, spec)


def on_lists_of_pieces(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise op on lists: the tensors at one index are cut like the one in the first list."""
    leaders = args[0]
    specs = [each._spec if isinstance(each, DTensor) else None for each in leaders]
    if {*map(type, leaders)} & {Tensor, DTensor} and any(
        isinstance(each, DTensor) and cut_dims(each) is None for each in leaders
    ):
        return NotImplemented
    if any(map(is_copy, leaders)):
        return NotImplemented

    def pieces(value: Any) -> Any:
        if isinstance(value, DTensor):
            return whole(value, name_of(func))
        if not isinstance(value, (list, tuple)) or len(value) != len(leaders):
            return value
        return [
            each._local_tensor if isinstance(each, DTensor) and each._spec is spec
            else _piece(each, spec, leader.shape, func) if spec is not None
            else whole(each, name_of(func)) if isinstance(each, DTensor)
            else each
            for each, spec, leader in zip(value, specs, leaders, strict=True)
        ]  # fmt: skip

    found = func(*map(pieces, args), **{name: pieces(value) for name, value in kwargs.items()})
    if _is_mutable(func):
        _note_written(leaders)
        return None
    rows = zip(found, specs, leaders, strict=True)
    return [each if spec is None else _like(make, each, spec, leader.shape) for each, spec, leader in rows]


def along_dims(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An op along dims that are not cut: the results are cut in the other dims."""
    x: Any = args[0] if args else None
    cut, dims = _cut_and_dims(func, x, args, kwargs)
    if cut is None or cut & dims or any(isinstance(each, DTensor) for each in (*args[1:], *kwargs.values())):
        return NotImplemented

    def result(local: Tensor) -> DTensor:
        kept = [dim for dim in range(x.ndim) if local.ndim == x.ndim or dim not in dims]
        sizes = [x.shape[dim] if dim in cut else size for dim, size in zip(kept, local.shape, strict=True)]
        return make(local, spec_like(x._spec, with_dims(x._spec.placements, kept), local, sizes))

    return pytree.tree_map_only(Tensor, result, func(x._local_tensor, *args[1:], **kwargs))


def reduction(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A reduction over all cut dims, and maybe others; the results are whole."""
    x: Any = args[0] if args else None
    cut, dims = _cut_and_dims(func, x, args, kwargs)
    if cut is None or not cut <= dims:
        return NotImplemented
    named = named_arguments(func, args, kwargs)
    if (found := reduction_of(func.overloadpacket, x, named, dims)) is None:
        return NotImplemented
    local = found.on_piece(x._local_tensor, sorted(dims), bool(named.get("keepdim")))
    return _whole(make, found.on_rows(from_all(local, x, name_of(func))), x)


def _cut_and_dims(func: Any, x: Any, args: Args, kwargs: Kwargs) -> tuple[set[int] | None, set[int]]:
    """The cut dims of an operand, None if there are none, and the dims that an op works along."""
    cut = cut_dims(x) if isinstance(x, DTensor) else None
    if not cut:
        return None, set()
    named = named_arguments(func, args, kwargs)
    dims = named.get("dim", named.get("dims"))
    if dims is None and any(
        each.name == "dim" and isinstance(each.default_value, int) for each in func._schema.arguments
    ):
        dims = next(each.default_value for each in func._schema.arguments if each.name == "dim")
    listed = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    return cut, {dim % x.ndim for dim in listed}


def norm(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The norm of a whole cut tensor; its collective is deferred."""
    x = args[0]
    if not cut_dims(x) or len(args) > 2 or kwargs or (deferred := deferred_norm(x, *args[1:])) is None:
        return NotImplemented
    return _whole(make, deferred, x)


def norms(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The norms of a list: one op on all pieces, and one collective for all tensors that are cut over the same axes."""
    named = named_arguments(func, args, kwargs)
    tensors, order = named["self"], float(named.get("ord", 2))
    halves = {torch.bfloat16, torch.float16} & {each.dtype for each in tensors}
    cuts = [cut_dims(each) if isinstance(each, DTensor) else set() for each in tensors]
    if halves or order <= 0 or None in cuts or named.get("dtype") is not None:
        return NotImplemented
    pieces = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    numbers = func([each if each.numel() else each.new_zeros(1) for each in pieces], order)
    found = [DeferredNorm(number, order, x, number.dtype) if cut else number
             for number, x, cut in zip(numbers, tensors, cuts, strict=True)]  # fmt: skip
    complete_norms()
    values = [each.number if isinstance(each, DeferredNorm) else each for each in found]
    pairs = zip(values, tensors, strict=True)
    return [_whole(make, value, x) if isinstance(x, DTensor) else value for value, x in pairs]


def equal(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Whether two tensors have the same elements, compared piece by piece."""
    x, y = args if isinstance(args[0], DTensor) else reversed(args)
    if cut_dims(x) is None or is_whole(x) or x.shape != y.shape:
        return NotImplemented
    local = func(x._local_tensor, _piece(y, x._spec, x.shape, func))
    return bool(from_all(torch.tensor(local, device=x._local_tensor.device), x, name_of(func)).all())


def permute(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view with the dims in another order."""
    x = args[0]
    if not cut_dims(x):
        return NotImplemented
    order = func(
        torch.empty(tuple(range(x.ndim)), device="meta"), *args[1:], **kwargs
    ).shape  # each size is the number of its old dim
    local = func(x._local_tensor, *args[1:], **kwargs)
    return make(local, spec_like(x._spec, with_dims(x._spec.placements, order), local, [x.shape[dim] for dim in order]))


def unsqueeze(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view with one more dim."""
    x, dim = args
    if not cut_dims(x):
        return NotImplemented
    dims = list(range(x.ndim))
    dims.insert(dim % (x.ndim + 1), -1)
    local, sizes = func(x._local_tensor, dim), [1 if dim < 0 else x.shape[dim] for dim in dims]
    return make(local, spec_like(x._spec, with_dims(x._spec.placements, dims), local, sizes))


def factory(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A new tensor with a tensor's dtype and device; whole on every rank."""
    x = args[0]
    return _whole(make, func(x._local_tensor, *args[1:], **kwargs), x)


def unscale(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The check of ``GradScaler``: all ranks of the mesh see an overflow in any piece."""
    gradients, *numbers = args
    found, inverse = (whole(each, name_of(func)) if isinstance(each, DTensor) else each for each in numbers)
    func([each._local_tensor if isinstance(each, DTensor) else each for each in gradients], found, inverse)
    for mesh in {each._spec.mesh: None for each in gradients if isinstance(each, DTensor) and not is_whole(each)}:
        for dim in range(mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(dim))


def random_on_wholes(make: Make, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A random op: all ranks take the numbers that the first rank of the mesh draws."""
    return on_wholes(make, func, args, kwargs, is_random=True)


def on_wholes(make: Make, func: Any, args: Args, kwargs: Kwargs, is_random: bool = False) -> Any:
    """Any op, on wholes. A result that would be a view of a gathered operand is a copy; writing to it is an error."""
    tensors = _tensors((*args, *kwargs.values()))
    globals_ = [each for each in tensors if isinstance(each, DTensor)]
    schema: Any = getattr(func, "_schema", None)
    written = _tensors(_written(func, args, kwargs)) if schema is not None and schema.is_mutable else []
    for each in written:
        _check_is_no_copy(func, each)
    wholes = {id(each): whole(each, name_of(func)) if isinstance(each, DTensor) else each for each in tensors}
    sources = {id(wholes[id(each)]): each for each in tensors}
    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, lambda each: wholes[id(each)], (args, dict(kwargs)))
    result = func(*plain_args, **plain_kwargs)
    if is_random:
        _broadcast([wholes[id(each)] for each in written] or _tensors((result,)), globals_[0]._spec.mesh)
    for each in written:
        if isinstance(each, DTensor) and not is_whole(each):
            value = wholes[id(each)]
            if value.shape != each.shape:
                what, problem = f"of shape {list(each.shape)}", "its shape would change"
                raise ShardingError(
                    f"{name_of(func)} on a cut tensor", what, problem, "use the op that is not in place"
                )
            each._local_tensor.copy_(piece_of(value, each._spec, each.shape))
    _note_written(written)
    is_view = schema is not None and schema._is_view_op()
    makes_copy = is_view and any(not is_whole(each) or is_copy(each) for each in globals_)

    def wrap(value: Tensor) -> Tensor:
        if (source := sources.get(id(value))) is not None:
            return source
        new: Any = _whole(make, value, globals_[0])
        new.is_copy = makes_copy
        return new

    return pytree.tree_map_only(Tensor, wrap, result)


def is_copy(tensor: Any) -> bool:
    """Whether a tensor should be a view of a cut one, but is a copy."""
    return getattr(tensor, "is_copy", False)


def _check_is_no_copy(func: Any, tensor: Tensor) -> None:
    if is_copy(tensor):
        who, what = f"{name_of(func)} on a view of a cut tensor", f"of shape {list(tensor.shape)}"
        problem, remedy = "it is a copy: the tensor would stay as it is", "write to the tensor itself: x[index] = value"
        raise ShardingError(who, what, problem, remedy)


@functools.cache
def name_of(func: Any) -> str:
    """The name of an op, as in ``torch``."""
    return str(getattr(func, "overloadpacket", func)).removeprefix("aten.")


def _written(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that an op writes."""
    named = named_arguments(func, args, kwargs)
    return [named[each.name] for each in func._schema.arguments if each.is_write and each.name in named]


def named_arguments(func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of an op by name, without those that were left out."""
    return {**{each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tuple(values)) if isinstance(each, Tensor)]


def _broadcast(tensors: Sequence[Tensor], mesh: Any) -> None:
    """Copy the values of a mesh's first rank to all its ranks, in place."""
    for each in tensors:
        dense = each.contiguous()
        for dim in range(mesh.ndim):
            dist.broadcast(dense, group=mesh.get_group(dim), group_src=0)
        if dense is not each:
            each.copy_(dense)


def _whole(make: Make, value: Tensor, source: DTensor) -> DTensor:
    """A tensor that every rank holds, on the mesh of another."""
    replicated: list[Placement] = [Replicate()] * source._spec.mesh.ndim
    return make(value, spec_like(source._spec, replicated, value, tuple(value.shape)))
