"""The op of a GSPMD case in torch: a function of the case's inputs, made from the text of the case."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc import P

from .gather import gather, scatter
from .window import convolution, pool

Function = Callable[..., Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One case of the file, with its ``fields``."""

    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.fields["name"]

    @property
    def op(self) -> str:
        return self.fields["op"]

    @property
    def text(self) -> str:
        return self.fields["torch"]

    @property
    def mesh(self) -> shardc.Mesh:
        return shardc.Mesh(**self.fields["mesh"])

    @property
    def has_device_order(self) -> bool:
        """Whether input and output have different orders of the mesh's devices."""
        return "device_ids_out" in self.fields

    def mesh_of(self, side: str) -> shardc.Mesh:
        """The mesh with its devices in the order of the input (``in``) or the output (``out``)."""
        return shardc.Mesh(device_ids=self.fields.get(f"device_ids_{side}"), **self.fields["mesh"])

    def shapes(self, side: str) -> list[tuple[int, ...]]:
        return [tuple(tensor["shape"]) for tensor in self.fields[side]]

    @property
    def elements(self) -> int:
        """The number of elements of all inputs and outputs."""
        return sum(math.prod(shape) for side in ("inputs", "outputs") for shape in self.shapes(side))


def spec(entries: Sequence[Sequence[str]]) -> P:
    """A ``P`` from lists of axes as in the file."""
    return P(*(tuple(axes) or None for axes in entries))


def function_of(case: Case) -> Function:
    """The function of the case's inputs, followed by the numbers that are only known at run time."""
    by_name = BY_NAME.get(case.name)
    return by_name or FAMILIES[case.op](case)


def _einsum(case: Case) -> Function:
    return lambda a, b: torch.einsum(case.text, a, b)


def _elementwise(case: Case) -> Function:
    """A sum, annotated with its own sharding if that differs from the output's."""
    between = case.fields.get("op_result_spec")
    place = spec(between) if between else None
    return lambda a, b: shardc.annotate(a + b, place) if place else a + b


def _broadcast(case: Case) -> Function:
    shape, dims = (eval(found) for found in re.findall(r"\[.*?\]", case.text))

    def run(x: Tensor) -> Tensor:
        places = [x.shape[dims.index(dim)] if dim in dims else 1 for dim in range(len(shape))]
        return x.reshape(places).expand(shape)

    return run


def _slice(case: Case) -> Function:
    bounds = [[int(n) for n in part.split(":")] for part in case.text[2:-1].split(",")]
    index = tuple(slice(*part) for part in bounds)
    return lambda x: x[index]


def _pad(case: Case) -> Function:
    """Padding by ``low_high`` of each dim; negative numbers cut elements off."""
    edges = [[int(n) for n in part.split("_")] for part in case.text.split(":")[1].split(",")]
    flat = [n for low_high in reversed(edges) for n in low_high]
    return lambda x: F.pad(x, flat)


def _permute(case: Case) -> Function:
    order = eval(case.text.partition("permute")[2])
    return lambda x: x.permute(order)


def _reshape(case: Case) -> Function:
    return lambda x: x.reshape(case.shapes("outputs")[0])


def _reduce(case: Case) -> Function:
    dims = eval(case.text.partition("dim=")[2].rstrip(")"))
    return lambda x: x.sum(dims)


def _flip(case: Case) -> Function:
    dims = eval(case.text.partition("flip")[2])
    return lambda x: x.flip(dims)


def _iota(case: Case) -> Function:
    shape, dim = case.shapes("outputs")[0], int(case.text.split()[-1])

    def run() -> Tensor:
        places = [size if i == dim else 1 for i, size in enumerate(shape)]
        return torch.arange(shape[dim], dtype=torch.int32).reshape(places).expand(shape)

    return run


def updated_dims(case: Case) -> list[int]:
    """The dims in which an update is smaller than its target, and which therefore have a start."""
    x, update = case.shapes("inputs")[:2]
    return [dim for dim, sizes in enumerate(zip(x, update, strict=True)) if sizes[0] != sizes[1]]


def _dynamic_update_slice(case: Case) -> Function:
    dims, update = updated_dims(case), case.shapes("inputs")[1]

    def run(x: Tensor, u: Tensor, *starts: Tensor) -> Tensor:
        places = [start + torch.arange(update[dim]) for dim, start in zip(dims, starts, strict=True)]
        if len(dims) == 1:
            return x.index_copy(dims[0], places[0], u)
        index = tuple(place[:, None] if dim == dims[0] else place for dim, place in zip(dims, places, strict=True))
        return x.index_put(index, u)

    return run


def full_text(case: Case) -> str:
    """The text of a gather or scatter, with batching dims that the case leaves out."""
    return case.text + BATCHING.get(case.name, "")


def _gather(case: Case) -> Function:
    return lambda x, starts: gather(case.text, x, starts)


# Dims that the text of three cases leaves out; they follow from the shapes.
BATCHING = {
    "xla/ScatterAllOperandsAreSameInstruction": " operand_batching_dims={0} start_indices_batching_dims={0}",
    "xla/ScatterExplicitBatchDims": " operand_batching_dims={0,2} start_indices_batching_dims={1,0}",
    "xla/ScatterExplicitBatchAndIndexPassthroughDims2": " operand_batching_dims={0} start_indices_batching_dims={0}",
}


def _scatter(case: Case) -> Function:
    reduce = "amin" if case.name.endswith("_Min") else "sum"
    place = spec(case.fields["op_result_spec"]) if "op_result_spec" in case.fields else None
    text = full_text(case)

    def run(x: Tensor, starts: Tensor, updates: Tensor) -> Tensor:
        found = scatter(text, x, starts, updates, reduce)
        return shardc.annotate(found, place) if place else found

    return run


def _conv(case: Case) -> Function:
    return lambda x, w: convolution(case.text, x, w)


def _pool(case: Case) -> Function:
    return lambda x: pool(case.text, x)


FAMILIES: dict[str, Callable[[Case], Function]] = {
    "reshard": lambda case: lambda x: x,
    "elementwise": _elementwise,
    "einsum": _einsum,
    "broadcast": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "permute": _permute,
    "reshape": _reshape,
    "reduce": _reduce,
    "flip": _flip,
    "iota": _iota,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "conv": _conv,
    "pool": _pool,
}


# The measured ops; their text is not parsed.


def _ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over ``[batch, sequence, heads, width]``, computed by heads."""
    q, k, v = (shardc.annotate(x, P("dp", None, "tp", None)) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _cross_entropy_grad(logits: Tensor, target: Tensor) -> Tensor:
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(logits, target.long()), logits)[0]


def _weight_gradient(x: Tensor, w: Tensor, grad: Tensor) -> Tensor:
    return torch.nn.grad.conv2d_weight(x, w.shape, grad, padding=1)


BY_NAME: dict[str, Function] = {
    "op/attention_ulysses": _ulysses,
    "op/log_softmax_uneven_vocab": lambda x: x.log_softmax(-1),
    "op/cross_entropy_vocab_sharded": lambda x, t: F.cross_entropy(x, t.long()),
    "op/cross_entropy_grad_vocab_sharded": _cross_entropy_grad,
    "op/argmax_over_sharded": lambda x: x.argmax(-1),
    "op/mean_over_uneven": lambda x: x.mean(0),
    "op/embedding_vocab_sharded": lambda w, ids: F.embedding(ids, w),
    "op/embedding_vocab_sharded_uneven": lambda w, ids: F.embedding(ids, w),
    "op/embedding_grad_dim_sharded": lambda w, ids, g: aten.embedding_dense_backward(g, ids, w.shape[0], -1, False),
    "op/take_along_axis_batch_sharded": lambda x, i: x.gather(1, i.long()),
    "op/take_along_axis_gather_dim_sharded": lambda x, i: x.gather(1, i.long()),
    "op/sort_sharded_dim_rank1": lambda x: x.sort().values,
    "op/sort_other_dim_sharded": lambda x: x.sort(-1).values,
    "op/topk_other_dim_sharded": lambda x: tuple(x.topk(4)),
    "op/cumsum_other_dim": lambda x: x.cumsum(1),
    "op/flip_uneven": lambda x: x.flip(0),
    "op/roll_sharded_by_1": lambda x: x.roll(1, 0),
    "op/roll_not_sharded_dim": lambda x: x.roll(1, 1),
    "op/qkv_chunk_fused_columns": lambda x: x.chunk(3, -1),
    "op/cat_sharded_dim": lambda a, b: torch.cat([a, b], 0),
    "op/stack_new_dim": lambda a, b: torch.stack([a, b], 0),
    "op/pad_sharded_dim": lambda x: F.pad(x, (0, 0, 1, 1)),
    "op/slice_shift_one": lambda x: x[1:],
    "op/dus_sharded_dim": lambda x, u, p: x.index_copy(0, p.reshape(1).long(), u),
    "op/transpose_swap_axes": lambda x: x.t(),
    "op/conv3x3_H_sharded": lambda x, w: F.conv2d(x, w, padding=1),
    "op/conv3x3_stride2_H_sharded": lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    "op/conv_HW_sharded_2d": lambda x, w: F.conv2d(x, w, padding=1),
    "op/conv_batch_sharded": lambda x, w: F.conv2d(x, w, padding=1),
    "op/conv_in_channels_sharded": lambda x, w: F.conv2d(x, w, padding=1),
    "op/conv_wgrad_spatial_sharded": _weight_gradient,
    "op/conv_transpose_H_sharded": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1),
    "op/avgpool_2x2_no_overlap": lambda x: F.avg_pool2d(x, 2),
    "op/batchnorm_batch_sharded": lambda x: F.batch_norm(x, None, None, training=True),
    "op/linear_wgrad_fsdp": lambda x, w: x.t() @ (x @ w),
    "op/linear_dgrad_column": lambda x, w: (x @ w) @ w.t(),
}
