"""Ops and functions that are traced in another form: without strides or special kernels, or in another precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dispatch.python import no_python_dispatcher
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, interpolate, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardc.capture.containers import flatten, rebuild
from shardc.capture.values.masks import Masks
from shardc.capture.values.refusals import Unfit
from shardc.language.errors import CaptureError
from shardc.ops.attention.tiled import tiled_attention
from shardc.ops.contraction import grouped_mm
from shardc.options import Precision
from shardc.program.node import casts_behind
from shardc.program.program import Input, Program

aten = torch.ops.aten
_EXPANDED = (
    "addr aminmax block_diag _chunk_cat dist isin narrow_copy norm renorm trace _unsafe_masked_index "
    "_unsafe_masked_index_put_accumulate _weight_norm_interface"
)
EXPANDED = tuple(getattr(aten, name) for name in _EXPANDED.split())
LAYERED = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
RESAMPLING = {"upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"} | {
    f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)
}


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decomposition table of ``make_fx``: torch's own for ``EXPANDED``, ours for the others."""
    table: dict[Any, Callable[..., Any]] = get_decompositions(EXPANDED)
    for name, op in OF_EACH.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet else ():
            foreach = getattr(packet, overload)
            if not foreach._schema.is_mutable:  # it returns new tensors
                table[foreach] = partial(_tensor_by_tensor, op, name.startswith("addc") and overload == "Tensor")
    return table | TRACED_AS


class FunctionRewrites(TorchFunctionMode):
    """In the block some functions of torch run in another form, so that the trace has ops with rules.

    - Attention becomes an op of our own if it has dropout, or, on CPUs, if values have another head size than keys or
      the mask needs a gradient. Where our op does not apply, it becomes separate ops.
    - Recurrent layers with dropout between them run layer by layer.
    - Resampling stays one op, for which a rank with a part of an image needs only its neighbours' edges. Torch's Python
      dispatcher would expand it into lookups of every pixel.
    - A selection by a mask keeps one row for each element of the mask, or becomes a lookup by index.
    """

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (selected := self.masks.call(func, args, kwargs)) is not NotImplemented:
            return selected
        if func is scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in LAYERED and (call := LayeredCall.of(args)).drops:
            return call.by_layers(func)
        if func is interpolate:
            is_one_op = (args[3] if len(args) > 3 else kwargs.get("mode")) != "bicubic"
        else:
            is_one_op = getattr(func, "__name__", "").partition(".")[0] in RESAMPLING
        with no_python_dispatcher() if is_one_op else nullcontext():
            return func(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` as one op if the tensors allow it."""
    if query.ndim == key.ndim == value.ndim == 3 and not enable_gqa:
        mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else attn_mask.unsqueeze(1)
        q, k, v = (x.unsqueeze(1) for x in (query, key, value))
        return _attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1)
    if query.ndim == 4 and attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unsqueeze(0)
    if query.ndim == key.ndim == value.ndim == 4 and not enable_gqa:  # torch's kernels broadcast nothing
        enable_gqa = key.shape[1] == value.shape[1] == 1 < query.shape[1]
        batch = max(len(query), len(key), len(value))
        query, key, value = (x.expand(batch, -1, -1, -1) if len(x) == 1 < batch else x for x in (query, key, value))
    is_odd = query.shape[-1] != value.shape[-1] or (attn_mask is not None and attn_mask.requires_grad)
    if dropout_p or (is_odd and query.device.type != "cuda"):  # where no kernel of torch does it
        q, k, v = map(_as_autocast_does, (query, key, value))
        if _are_heads(q, k, v, enable_gqa) and 0.0 <= dropout_p <= 1.0:
            if attn_mask is None:
                return tiled_attention(q, k, v, None, None, dropout_p, 0, is_causal, None, scale)[0]
            if _is_mask(attn_mask, q, k) and not is_causal:
                mask = _added(attn_mask, q)
                return tiled_attention(q, k, v, None, None, dropout_p, 0, is_causal, mask, scale)[0]
    with sdpa_kernel(SDPBackend.MATH) if dropout_p else nullcontext():
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, score_mod: str
) -> Tensor:
    """Attention. The ``ScoreMod`` of this text, if there is one, changes scores before the mask is added."""
    has_fewer_keys = query.shape[1] != key.shape[1]
    if not score_mod:
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=has_fewer_keys)
    mask = None if mask is None else _added(mask, query)
    return tiled_attention(query, key, value, None, None, 0.0, 0, False, mask, scale, score_mod)[0]


def _are_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether these are ``[batch, heads, positions, size]`` of one batch and dtype with matching numbers of heads."""
    if not q.ndim == k.ndim == v.ndim == 4 or not q.dtype == k.dtype == v.dtype or k.shape[:3] != v.shape[:3]:
        return False
    is_one_batch = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    return is_one_batch and (q.shape[1] == k.shape[1] or (enable_gqa and q.shape[1] % k.shape[1] == 0))


def _is_mask(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether torch takes this mask; for any other torch raises its own error."""
    shape = (*q.shape[:3], k.shape[2])
    fits = all(own in (1, size) for own, size in zip(mask.shape[::-1], shape[::-1], strict=False))
    is_added = mask.dtype in (torch.float32, q.dtype)
    return mask.ndim in (2, 3, 4) and fits and (is_added or mask.dtype == torch.bool)


def _added(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as a term that is added to scores, of two dims or four."""
    mask = mask.unsqueeze(0) if mask.ndim == 3 else mask
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    shown, hidden = (torch.scalar_tensor(number, dtype=q.dtype, device=q.device) for number in (0.0, -torch.inf))
    return torch.where(mask, shown, hidden)


def _as_autocast_does(x: Tensor) -> Tensor:
    """A tensor in the dtype that ``torch.autocast``, if it is on, gives the operands of attention."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


@contextmanager
def unfused_recurrent_layers() -> Iterator[None]:
    """In the block recurrent layers run as ops of each step, not as one oneDNN kernel."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@dataclass(frozen=True, slots=True)
class LayeredCall:
    """The arguments of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, which run all layers.

    ``sizes``: the sizes of the batch at each step, if the sequences are packed; ``options``: ``train``,
    ``bidirectional`` and, if the sequences are not packed, ``batch_first``.
    """

    x: Tensor
    sizes: tuple[Tensor, ...]
    state: Tensor | Sequence[Tensor]
    weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    options: tuple[bool, ...]

    @staticmethod
    def of(args: tuple[Any, ...]) -> LayeredCall:
        """The call ``(x, [sizes], state, weights, has_biases, num_layers, dropout, train, bidirectional, ...)``."""
        at = next(i for i, value in enumerate(args) if isinstance(value, bool)) - 2
        state, weights, has_biases, num_layers, chance, *options = args[at:]
        return LayeredCall(args[0], args[1:at], state, weights, has_biases, num_layers, chance, tuple(options))

    @property
    def drops(self) -> bool:
        """Whether there is dropout between layers."""
        return self.dropout > 0 and self.num_layers > 1 and self.options[0]

    def by_layers(self, function: Any) -> tuple[Tensor, ...]:
        """The results of ``function``, run on one layer after the other with the dropout between.

        torch's own decomposition (``_rnn_helper``) compares the layer's number the wrong way round and never drops.
        """
        x, finals = self.x, []
        per_layer = len(self.weights) // self.num_layers
        for layer in range(self.num_layers):
            if layer:
                x = dropout(x, self.dropout)
            weights = self.weights[layer * per_layer : (layer + 1) * per_layer]
            states = [self.state] if isinstance(self.state, Tensor) else self.state
            parts = [state.chunk(self.num_layers)[layer] for state in states]
            state = parts[0] if isinstance(self.state, Tensor) else parts
            x, *final = function(x, *self.sizes, state, weights, self.has_biases, 1, 0.0, *self.options)
            finals.append(final)
        return x, *(torch.cat(states) for states in zip(*finals, strict=True))


# Views by strides. A program has no strides: such a view becomes a view by dims, or an index.


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    start = _start(x, storage_offset)
    if _is_same_view(x, size, stride, start):
        return x.view_as(x)
    flat, order = _in_memory_order(x), _major_first(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == flat.numel():
        return flat.reshape([size[dim] for dim in order]).permute(_inverse(order))
    return flat[_memory_indices(x, size, stride, start)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    start = _start(x, storage_offset)
    if _is_same_view(x, size, stride, start):
        return src.view_as(src)
    flat, order = _in_memory_order(x), _major_first(stride, size)
    if not start and _is_dense(size, stride, order) and math.prod(size) == flat.numel():
        written = src.permute(order).reshape(-1)
    else:
        written = aten.index_put(flat, [_memory_indices(x, size, stride, start)], src)
    own = _major_first(x.stride(), x.shape)
    return written.reshape([x.shape[dim] for dim in own]).permute(_inverse(own))


def _start(x: Tensor, storage_offset: int | None) -> int:
    """The first element of a view, counted from the first element of ``x``."""
    return 0 if storage_offset is None else storage_offset - int(x.storage_offset())


def _is_same_view(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> bool:
    """Whether a view is the tensor itself; the stride of a dim of size 1 does not matter."""
    strides = zip(x.shape, stride, x.stride(), strict=False)
    return not start and tuple(size) == tuple(x.shape) and all(n == 1 or new == own for n, new, own in strides)


def _major_first(stride: Sequence[int], size: Sequence[int]) -> list[int]:
    """The dims from the one of the largest stride to the one of the smallest."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))


def _is_dense(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether there are no gaps between the elements."""
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            return False
        expected *= size[dim]
    return True


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _in_memory_order(x: Tensor) -> Tensor:
    """The elements in the order of memory, in one dim."""
    order = _major_first(x.stride(), x.shape)
    if not _is_dense(x.shape, x.stride(), order):
        problem = f"as_strided of a tensor that has gaps: shape {tuple(x.shape)}, strides {x.stride()}"
        raise Unfit(problem, "take it of the whole tensor, or make it contiguous before")
    return x.permute(order).reshape(-1)


def _memory_indices(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """For each element of a view its index in memory order."""
    indices = torch.full([1] * len(size), start, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        indices = indices + along.reshape([extent if i == dim else 1 for i in range(len(size))])
    return indices


# Single ops.


def _random_from(x: Tensor, low: int, high: int | None = None, *, generator: Any = None) -> Tensor:
    """Whole numbers from ``low`` up to ``high``, by default to the largest that the dtype counts to."""
    largest = int(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max - 1
    return torch.randint_like(x, low, largest + 1 if high is None else high)


def _gradient_of_empty_mean(gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The gradient of a mean over no elements; torch's own trace divides by their number."""
    return NotImplemented if x.numel() else torch.zeros_like(x)


TRACED_AS: dict[Any, Any] = {
    getattr(aten.random, "from"): _random_from,  # fx cannot print it: "from" is a keyword of Python
    aten._grouped_mm.default: grouped_mm,  # its meta function takes bfloat16 alone
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    # Its kernel needs pairs that are adjacent in memory, which no program promises.
    aten.view_as_complex.default: lambda x: torch.complex(x.select(-1, 0), x.select(-1, 1)),
    aten.mse_loss_backward.default: _gradient_of_empty_mean,
    aten.smooth_l1_loss_backward.default: _gradient_of_empty_mean,
    aten.huber_loss_backward.default: _gradient_of_empty_mean,
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default,
}

# Ops over lists of tensors, which optimizers call.

_SAME_NAME = (
    "abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp lgamma log "
    "log10 log1p log2 max mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)
OF_EACH: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in _SAME_NAME.split()} | {
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "addcmul": lambda x, a, b, value=1: x + value * (a * b),
    "copy": aten.copy,
    "maximum": lambda x, low: torch.clamp(x, min=low),
    "minimum": lambda x, high: torch.clamp(x, max=high),
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "zero": torch.zeros_like,
}


def _tensor_by_tensor(op: Callable[..., Tensor], has_scalars: bool, *args: Any, **kwargs: Any) -> list[Tensor]:
    """``op`` on each tensor; ``has_scalars``: the last argument is a tensor with a number for each."""
    lists = [*args[:-1], args[-1].unbind()] if has_scalars else list(args)
    count = next(len(arg) for arg in lists if isinstance(arg, (list, tuple)))
    return [op(*(arg[i] if isinstance(arg, (list, tuple)) else arg for arg in lists), **kwargs) for i in range(count)]


class Casting:
    """The casts of one traced call; without a ``Precision`` there are none.

    Parameters of a norm with running statistics keep their dtype: torch's kernels require parameters and statistics of
    one dtype, and accept a narrower input.

    State: ``casts``, the cast copy of each parameter and input that was cast, by kind and name.
    """

    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        self.precision, self.casts = precision, dict[tuple[str, str], torch.Tensor]()
        self.uncast = {
            name
            for path, module in model.named_modules()
            if isinstance(getattr(module, "running_mean", None), torch.Tensor)
            for name, _ in module.named_parameters(path, recurse=False)
        }
        for module in model.modules() if precision else ():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._cast_arguments, with_kwargs=True)

    def enter(self, named: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors by kind and name, parameters and inputs cast to the dtype of computation."""
        may_cast = (key for key in named if key[0] in ("parameter", "input") and key[1] not in self.uncast)
        cast = {key: self._cast(named[key]) for key in may_cast}
        self.casts = {key: tensor for key, tensor in cast.items() if tensor is not named[key]}
        return {**named, **self.casts}

    def leave(self, entry: Input, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of a cast copy, cast to the dtype of its reduction and then to the one in which it is returned."""
        if gradient is None or self.precision is None or (entry.kind, entry.name) not in self.casts:
            return gradient
        arrives = self.precision.gradients if entry.kind == "parameter" else None
        return gradient.to(self.precision.reduce).to(arrives or entry.type.dtype)

    def check_unchanged(self) -> None:
        """Raise a CaptureError if the forward wrote to a cast copy: the parameter would not change."""
        for (kind, name), copied in self.casts.items():
            if copied._version:
                remedy = "write to a clone of it, or make it a buffer"
                raise CaptureError(f"{kind} {name!r}", "the forward changes it in place", remedy)

    def _cast(self, value: Any) -> Any:
        if self.precision is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value if value.dtype == self.precision.compute else value.to(self.precision.compute)

    def _cast_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast the arguments of a module with parameters: a buffer or a norm may have widened them."""
        leaves, tree = flatten((args, kwargs))
        new = [self._cast(leaf) for _, leaf in leaves]
        is_same = all(one is other for one, (_, other) in zip(new, leaves, strict=True))
        return None if is_same else rebuild(tree, new)


def reduced_casts(program: Program) -> set[fx.Node]:
    """The casts of gradients to the dtype of their reduction; a cast to the parameter's dtype may follow each."""
    precision = program.options.precision
    if precision is None:
        return set()
    ends = zip(program.outputs, program.results, strict=True)
    chains = [casts_behind(node) for output, node in ends if output.kind == "gradient" and node is not None]
    return {node for chain in chains for node in chain[:-1] if program.type(node).dtype == precision.reduce}
