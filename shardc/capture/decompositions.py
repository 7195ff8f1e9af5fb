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
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardc.capture.refusals import Unfit
from shardc.ops.contraction import grouped_mm

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
