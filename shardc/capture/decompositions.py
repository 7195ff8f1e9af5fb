"""Ops that are traced as others, which say the same of whole values: the graph holds no strides and no odd kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch.fx.node import map_aggregate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardc.capture.call import flatten, rebuild
from shardc.capture.guards import Unfit
from shardc.language.errors import CaptureError
from shardc.ops.index import grouped_mm
from shardc.ops.pointwise import is_pointwise
from shardc.options import Precision
from shardc.program.node import ancestors, casts_behind, is_random
from shardc.program.program import Input, Program

aten = torch.ops.aten


class PlainDropout(TorchFunctionMode):
    """In the block attention with a dropout is ops, of which one draws, not a kernel that draws by itself.

    Likewise recurrent layers, between which torch's trace leaves the dropout out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention and (args[4] if len(args) > 4 else given.get("dropout_p", 0.0)):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **given)
        if func in LAYERED and (call := LayeredCall.of(args)).drops:
            return call.by_layers(func)
        return func(*args, **given)


def _random_from(x: Tensor, low: int, high: int | None = None, *, generator: Any = None) -> Tensor:
    """Whole numbers from ``low`` up to ``high``, by default to the largest that the dtype counts to."""
    largest = int(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max - 1
    return torch.randint_like(x, low, largest + 1 if high is None else high)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """A view by strides as a view by dims, where it takes every element once, else as an index."""
    start = _start(x, storage_offset)
    if _says_the_same(x, size, stride, start):
        return x.view_as(x)
    stored, order = _as_stored(x), _order(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == stored.numel():
        return stored.reshape([size[dim] for dim in order]).permute(_inverse(order))
    return stored[_places(x, size, stride, start)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """``x`` with other elements where a view by strides lies."""
    start = _start(x, storage_offset)
    if _says_the_same(x, size, stride, start):
        return src.view_as(src)
    stored, order = _as_stored(x), _order(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == stored.numel():
        written = src.permute(order).reshape(-1)
    else:
        written = aten.index_put(stored, [_places(x, size, stride, start)], src)
    own = _order(x.stride(), x.shape)
    return written.reshape([x.shape[dim] for dim in own]).permute(_inverse(own))


def _start(x: Tensor, storage_offset: int | None) -> int:
    """Where a view begins, counted from the first element of ``x``."""
    return 0 if storage_offset is None else storage_offset - int(x.storage_offset())


def _says_the_same(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> bool:
    """Whether a view is the tensor itself; how far apart the elements of a dim of size 1 are does not matter."""
    given, own = (
        [(n, s) for n, s in zip(*pair, strict=True) if n != 1] for pair in ((size, stride), (x.shape, x.stride()))
    )
    return not start and tuple(size) == tuple(x.shape) and given == own


def _order(stride: Sequence[int], size: Sequence[int]) -> list[int]:
    """The dims from the major one to the minor one, as they lie."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))


def _is_dense(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the elements lie one after the other."""
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            return False
        expected *= size[dim]
    return True


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _as_stored(x: Tensor) -> Tensor:
    """The elements as they lie, in one dim."""
    order = _order(x.stride(), x.shape)
    if not _is_dense(x.shape, x.stride(), order):
        problem = f"as_strided of a tensor that has gaps: shape {tuple(x.shape)}, strides {x.stride()}"
        raise Unfit(problem, "take it of the whole tensor, or make it contiguous before")
    return x.permute(order).reshape(-1)


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """Where each element of a view lies."""
    places = torch.full([1] * len(size), start, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        places = places + along.reshape([extent if i == dim else 1 for i in range(len(size))])
    return places


def _view_as_complex(x: Tensor) -> Tensor:
    """Its kernel asks how the pairs lie in memory, which no program says."""
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def _gradient_of_none(gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The gradient of a mean over no elements, where torch's own trace divides by their number."""
    return NotImplemented if x.numel() else torch.zeros_like(x)


TRACED_AS: dict[Any, Any] = {
    getattr(aten.random, "from"): _random_from,  # fx cannot print it: "from" is a word of Python's
    aten._grouped_mm.default: grouped_mm,  # its meta function knows bfloat16 alone
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.view_as_complex.default: _view_as_complex,
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
        ),
        _gradient_of_none,
    ),
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default,
}


Key = tuple[str, str]  # kind and name of an input of the program


class Casting:
    """The casts of one traced call; without a ``Precision`` there are none.

    The parameters of a norm that keeps running statistics stay as these are: torch's kernels want them of one dtype,
    and take a narrower input beside.

    State: ``casts``, the cast copy of each parameter and input that was cast.
    """

    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        self.precision, self.casts = precision, dict[Key, torch.Tensor]()
        self.uncast = {name for name, _ in _parameters_beside_statistics(model)}
        for module in model.modules() if precision else ():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._cast_arguments, with_kwargs=True)

    def enter(self, named: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """The same tensors, parameters and inputs as they are computed on."""
        may_cast = (key for key in named if key[0] in ("parameter", "input") and key[1] not in self.uncast)
        cast = {key: self._cast(named[key]) for key in may_cast}
        self.casts = {key: tensor for key, tensor in cast.items() if tensor is not named[key]}
        return {**named, **self.casts}

    def leave(self, entry: Input, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of what is computed on: as it is reduced, then as it arrives."""
        if gradient is None or self.precision is None or (entry.kind, entry.name) not in self.casts:
            return gradient
        arrives = self.precision.gradients if entry.kind == "parameter" else None
        return gradient.to(self.precision.reduce).to(arrives or entry.type.dtype)

    def check_unchanged(self) -> None:
        """A CaptureError where the forward wrote to a cast copy: the parameter would not hear of it."""
        for (kind, name), copied in self.casts.items():
            if copied._version:
                remedy = "write to a clone of it, or make it a buffer"
                raise CaptureError(f"{kind} {name!r}", "the forward changes it in place", remedy)

    def _cast(self, value: Any) -> Any:
        if self.precision is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value if value.dtype == self.precision.compute else value.to(self.precision.compute)

    def _cast_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A value that became wider on its way, by a buffer or in a norm, would not fit a module's parameters."""
        leaves, tree = flatten((args, kwargs))
        new = [self._cast(leaf) for _, leaf in leaves]
        is_same = all(one is other for one, (_, other) in zip(new, leaves, strict=True))
        return None if is_same else rebuild(tree, new)


def _parameters_beside_statistics(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "running_mean", None), torch.Tensor):
            yield from module.named_parameters(path, recurse=False)


def reduced_casts(program: Program) -> set[fx.Node]:
    """The casts of gradients to the dtype that they are reduced in; another may follow each."""
    precision = program.options.precision
    if precision is None:
        return set()
    ends = zip(program.outputs, program.results, strict=True)
    chains = [casts_behind(node) for output, node in ends if output.kind == "gradient" and node is not None]
    return {node for chain in chains for node in chain[:-1] if program.type(node).dtype == precision.reduce}


LAYERED = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@contextmanager
def plain_cells() -> Iterator[None]:
    """In the block recurrent layers are ops of each step, not one kernel for all."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@dataclass(frozen=True, slots=True)
class LayeredCall:
    """The arguments of one of torch's functions for all layers.

    ``sizes``: those of the batch at each step, where the sequences are packed; ``options``: whether there are biases,
    and after the number of layers and the dropout: whether it trains, runs two ways and has the batch first.
    """

    x: Tensor
    sizes: tuple[Tensor, ...]
    state: Tensor | Sequence[Tensor]
    weights: Sequence[Tensor]
    biased: bool
    num_layers: int
    chance: float
    options: tuple[bool, ...]

    @staticmethod
    def of(args: tuple[Any, ...]) -> LayeredCall:
        """The call ``(x, [sizes], state, weights, biased, num_layers, chance, trains, two ways, [batch first])``."""
        at = next(i for i, value in enumerate(args) if isinstance(value, bool)) - 2
        state, weights, biased, num_layers, chance, *options = args[at:]
        return LayeredCall(args[0], args[1:at], state, weights, biased, num_layers, chance, tuple(options))

    @property
    def drops(self) -> bool:
        """Whether something is dropped between layers."""
        return self.chance > 0 and self.num_layers > 1 and self.options[0]

    def by_layers(self, function: Any) -> tuple[Tensor, ...]:
        """What ``function`` returns of the call, one layer after the other, with the dropout between.

        torch's own decomposition (``_rnn_helper``) compares the layer's number the wrong way round and never drops.
        """
        x, finals = self.x, []
        for layer in range(self.num_layers):
            if layer:
                x = dropout(x, self.chance)
            x, *final = function(x, *self.sizes, self._state(layer), self._weights(layer), *self._one_layer)
            finals.append(final)
        return x, *(torch.cat(each) for each in zip(*finals, strict=True))

    @property
    def _one_layer(self) -> tuple[Any, ...]:
        return self.biased, 1, 0.0, *self.options

    def _state(self, layer: int) -> Any:
        if isinstance(self.state, Tensor):
            return self.state.chunk(self.num_layers)[layer]
        return [each.chunk(self.num_layers)[layer] for each in self.state]

    def _weights(self, layer: int) -> Sequence[Tensor]:
        num = len(self.weights) // self.num_layers
        return self.weights[layer * num : (layer + 1) * num]


EXPANDED = (
    aten.addr,
    aten.aminmax,
    aten.block_diag,
    aten._chunk_cat,
    aten.dist,
    aten.isin,
    aten.narrow_copy,
    aten.norm,
    aten.renorm,
    aten.trace,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    aten._weight_norm_interface,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """For each of the ops, and of those that are traced as others, the function that computes it."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(EXPANDED)
    return found | foreach_ops() | TRACED_AS


@contextlib.contextmanager
def resampling_whole() -> Iterator[None]:
    """Inside, an image is enlarged by one op, not by torch's lookups of every pixel: a cut image needs edges alone.

    Made before the python dispatcher, which finds those lookups among an op's python kernels.
    """
    names = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    names += [f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)]
    ops = [getattr(getattr(aten, name), overload) for name in names for overload in ("default", "vec")]
    before = [dict(op.py_kernels) for op in ops]
    for op in ops:
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            op.py_kernels.pop(key, None)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in zip(ops, before, strict=True):
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def known_number(asked: fx.Node, root: nn.Module) -> Any:
    """What the node would return, or None where it depends on an input or on chance. ``root`` holds the constants.

    A check by ``torch._check_tensor_all`` is taken to hold: it raises an error or does nothing.
    """
    if any(node.target is aten._is_all_true.default for node in asked.all_input_nodes):
        return True
    needed = ancestors(asked)
    if any(node.op == "placeholder" or is_random(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for node in asked.graph.nodes:
        if node in needed:
            values[node] = _evaluate(node, root, values)
    return values[asked]


def _evaluate(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return _on_one_row(node.target, args, kwargs)


def _on_one_row(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op; where the rows of dim 0 are all the same (stride 0, a batch), on one of them.

    So the cost of a capture does not grow with the batch.
    """
    tensors: list[torch.Tensor] = []
    map_aggregate((args, dict(kwargs)), lambda a: tensors.append(a) if isinstance(a, torch.Tensor) else None)
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    tall = {id(tensor) for tensor in tensors if tensor.ndim == ndim and ndim and tensor.shape[0] > 1}
    spread = [tensor for tensor in tensors if id(tensor) in tall and tensor.stride(0) == 0]
    if not spread or len({id(tensor) for tensor in spread}) < len(tall) or not _goes_by_row(target, args, ndim):
        return target(*args, **kwargs)
    first: Any = lambda value: value[:1] if id(value) in tall else value  # noqa: E731
    result = target(*map_aggregate(args, first), **kwargs)
    return result.expand(spread[0].shape[0], *result.shape[1:]) if result.ndim else result


def _goes_by_row(target: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether equal rows in give equal rows out, or one number that does not depend on how many there are."""
    if target in (aten.cat.default, aten.cumsum.default):
        return len(args) > 1 and args[1] % ndim != 0
    return is_pointwise(target) or target in (aten.all.default, aten.any.default)


OF_EACH: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp "
            "lgamma log log10 log1p log2 max mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub "
            "tan tanh trunc"
        ).split()
    },
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "addcmul": lambda x, a, b, value=1: x + value * (a * b),
    "copy": aten.copy,
    "maximum": lambda x, low: torch.clamp(x, min=low),
    "minimum": lambda x, high: torch.clamp(x, max=high),
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "zero": torch.zeros_like,
}


def foreach_ops() -> dict[Any, Callable[..., list[Tensor]]]:
    """For every op over lists that makes new ones the function that computes it tensor by tensor."""
    found: dict[Any, Callable[..., list[Tensor]]] = {}
    for name, op in OF_EACH.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet else ():
            listed = getattr(packet, overload)
            if not listed._schema.is_mutable:
                found[listed] = partial(_each, op, name.startswith("addc") and overload == "Tensor")
    return found


def _each(op: Callable[..., Tensor], has_numbers: bool, *args: Any, **kwargs: Any) -> list[Tensor]:
    """``has_numbers``: the last argument is a tensor with a number for each."""
    given = [*args[:-1], args[-1].unbind()] if has_numbers else list(args)
    count = next(len(arg) for arg in given if isinstance(arg, (list, tuple)))
    return [op(*(arg[i] if isinstance(arg, (list, tuple)) else arg for arg in given), **kwargs) for i in range(count)]
