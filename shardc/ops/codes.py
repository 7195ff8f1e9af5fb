"""Encode values for the wire, and decode them: local ops of one rank.

Codes are a tensor ``[senders, receivers, length]``. A rank sends the rows of ``[1, count, length]``, one to each of
``count`` ranks; an all_to_all turns it into ``[count, 1, length]``, with one row from each. A row holds the values of
several tensors one after the other, each padded to whole blocks. A block is its scale, a float32, followed by its
codes, so that it can be read alone. A block of ``topk`` is the places of the kept values, followed by these as bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.wire import KEPT, TOPK, VALUES, Codec, codec_named

Dims = tuple[int, ...]
Shapes = tuple[tuple[int, ...], ...]
CUT = ("reduce_scatter", "all_to_all")  # collectives that send each rank a piece of every value
JOINED = ("all_gather", "all_to_all")  # collectives that join the pieces that arrive
INDEX, BEFORE = 6, 8  # the places of ``index`` and ``before`` among the arguments of ``left_out_rows`` and ``left_out``
AT_ONCE = 2**22  # values that are encoded or decoded at a time, which takes several times their memory
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # codecs without scales: casts
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the code of the largest value of a block


def codes_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor of codes, for values of a dtype."""
    return sum_dtype(dtype) if codec is VALUES else CASTS.get(codec.name, torch.uint8)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are summed and encoded."""
    return torch.promote_types(dtype, torch.float32)


def encode_rows(kind: str, codec: str, count: int, dims: Dims, lengths: tuple[int, ...], *xs: Tensor) -> Tensor:
    """The codes ``[1, count, length]`` of the values of a collective among ``count`` ranks.

    Each value is cut along its dim in ``dims`` into ``count`` pieces of its length in ``lengths``; the last piece is
    padded with zeros. For an all_reduce all values are flattened and joined, and the result is cut. For an all_gather
    and a collective_permute there is one row.
    """
    by = codec_named(codec)
    return _encode(_rows(kind, by, count, dims, lengths, xs), by).unsqueeze(0)


def _rows(kind: str, codec: Codec, count: int, dims: Dims, lengths: tuple[int, ...], xs: Sequence[Tensor]) -> Tensor:
    """The values of a collective as rows of whole blocks; see ``encode_rows``."""
    dtype = sum_dtype(xs[0].dtype)
    if kind in CUT:
        pieces = [_pieces(x, count, *cut) for x, *cut in zip(xs, dims, lengths, strict=True)]
    else:
        pieces = [x.reshape(1, -1) for x in xs]
    joined = _joined([_filled(rows.to(dtype), codec.block) for rows in pieces], 1)
    return _filled(joined, codec.block * count).view(count, -1) if kind == "all_reduce" else joined


def add_codes(codec: str, dtype: torch.dtype, own: Sequence[Tensor], codes: Tensor) -> Tensor:
    """The sum ``[1, length]`` of the rows of codes ``[count, 1, length]``.

    ``own``: if given, the number of this rank's piece and the values of its all_reduce, of which that piece is added as
    it is, in place of its codes.
    """
    by, rows = codec_named(codec), codes.squeeze(1)
    if not own:
        return _decode(rows, by, sum_dtype(dtype), adds=True)
    index, *xs = own
    piece = _rows("all_reduce", by, len(rows), (), (), xs).index_select(0, index)
    return _decode(rows.index_fill(0, index, 0), by, piece.dtype, adds=True).add_(piece)  # codes of zeros are zeros


def decode_rows(
    kind: str, codec: str, dims: Dims, pieces: Shapes, shapes: Shapes, dtype: torch.dtype, codes: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """The results of a collective, of these ``shapes``, from its codes ``[count, 1, length]``.

    Each row has a piece of every value, of the shapes ``pieces``. A reduce_scatter adds the pieces; an all_gather and
    an all_to_all join them along the dims ``dims``. The rows of an all_reduce are one row that was cut.
    """
    by = codec_named(codec)
    rows = _decode(codes.squeeze(1), by, sum_dtype(dtype), adds=kind == "reduce_scatter")
    if kind == "all_reduce":
        rows = rows.reshape(1, -1)
    results = []
    for dim, piece, shape, found in zip(dims, pieces, shapes, _values(rows, pieces, by.block), strict=True):
        values = found.to(dtype).reshape(-1, *piece)
        results.append(_rejoined(values, dim, shape[dim]).contiguous() if kind in JOINED else values.reshape(shape))
    return tuple(results) if len(results) > 1 else results[0]


def _values(rows: Tensor, pieces: Sequence[Dims], block: int) -> Iterator[Tensor]:
    """The pieces of each value, one in each row, flattened."""
    start = 0
    for piece in pieces:
        numel = math.prod(piece)
        yield rows[:, start : start + numel]
        start += numel + -numel % block


def _rejoined(pieces: Tensor, dim: int, size: int) -> Tensor:
    """Pieces joined along a dim, which is truncated to its size."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """A value plus its residual, ``[1, *shape]``, which codes left out before."""
    return x.to(residual.dtype) + residual.squeeze(0)


def mix_momentum(x: Tensor, momentum: Tensor, beta: float, ranks: int) -> Tensor:
    """This rank's part of the new momentum, from its gradient and the old momentum; the sum over ``ranks`` is whole."""
    return x.to(momentum.dtype).mul(1 - beta).add_(momentum, alpha=beta / ranks)


def left_out_rows(
    kind: str, codec: str, count: int, dims: Dims, lengths: tuple[int, ...], codes: Tensor, index: Tensor | None,
    rest: Tensor | None, before: Sequence[Tensor], *xs: Tensor,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The residuals that the codes of ``encode_rows`` leave out: ``[1, *shape]`` for each value.

    ``rest``: the residual of the sum of this rank's own piece, which has the number ``index``. Residuals that are nan
    or inf become 0. ``before``: the tensors to which ``replace_residuals`` writes.
    """
    rows = _rows(kind, codec_named(codec), count, dims, lengths, xs)
    left = rows - _decode(codes.squeeze(0), codec_named(codec), rows.dtype)
    if index is not None and rest is not None:
        left.index_copy_(0, index, rest.view(1, -1))
    left.nan_to_num_(0.0, 0.0, 0.0)
    left = left.view(1, -1) if kind == "all_reduce" else left
    pieces = [
        (*x.shape[:dim], length, *x.shape[dim + 1 :]) if kind in CUT else tuple(x.shape)
        for x, dim, length in zip(xs, dims, lengths, strict=True)
    ]
    results = []
    for x, dim, piece, values in zip(xs, dims, pieces, _values(left, pieces, codec_named(codec).block), strict=True):
        whole = _rejoined(values.reshape(-1, *piece), dim, x.shape[dim]) if kind in CUT else values
        results.append(whole.reshape(1, *x.shape).contiguous())
    return tuple(results) if len(results) > 1 else results[0]


def replace_residuals(*args: Any) -> Tensor | tuple[Tensor, ...]:
    """``left_out_rows``, written over the residuals of the last step if there are any."""
    before: Sequence[Tensor] = args[BEFORE]
    found = left_out_rows(*args)
    results = found if isinstance(found, tuple) else (found,)
    for residual, result in zip(before, results, strict=False):
        residual.copy_(result)
    written = tuple(before) or results
    return written if len(written) > 1 else written[0]


def _pieces(x: Tensor, count: int, dim: int, length: int) -> Tensor:
    """The pieces of a value, one in each row."""
    missing = count * length - x.shape[dim]
    x = pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
    return x.unflatten(dim, (count, length)).movedim(dim, 0).flatten(1)


def _filled(rows: Tensor, block: int) -> Tensor:
    """The rows padded with zeros to whole blocks."""
    missing = -rows.shape[1] % block
    return pad(rows, (0, missing)) if missing else rows


def _encode(rows: Tensor, codec: Codec) -> Tensor:
    """The codes of rows of whole blocks."""
    if not codec.header:
        return rows.to(codes_dtype(codec, rows.dtype))
    blocks = rows.reshape(-1, codec.block)
    codes = [_encode_blocks(each, codec) for each in blocks.split(AT_ONCE // codec.block)]
    return _joined(codes, 0).view(len(rows), -1)


def _encode_blocks(blocks: Tensor, codec: Codec) -> Tensor:
    if codec.name.startswith(TOPK):
        places = blocks.abs().topk(codec.header // KEPT, 1).indices
        kept = blocks.gather(1, places).to(torch.bfloat16)
        return torch.cat([places.to(torch.uint8), kept.view(torch.uint8)], 1)
    scale = _scale(blocks.abs(), codec).float()
    scaled = blocks / torch.where(scale > 0, scale, 1)  # with a nan or inf the scale is one too, and all is nan
    return torch.cat([scale.view(torch.uint8), _round(scaled, codec)], 1)


def _scale(magnitudes: Tensor, codec: Codec) -> Tensor:
    """The scale of each block; for signs the one with the least error, nan if a value is not finite."""
    if codec.name == "1bit":
        scale = magnitudes.mean(1, keepdim=True)
        return torch.where(scale.isfinite(), scale, torch.nan)
    return magnitudes.amax(1, keepdim=True) / LARGEST[codec.name]


def _decode(rows: Tensor, codec: Codec, dtype: torch.dtype, adds: bool = False) -> Tensor:
    """The values of rows of codes; ``adds``: their sum, as one row."""
    if not codec.header:
        return rows.sum(0, dtype=dtype, keepdim=True) if adds else rows.to(dtype)
    blocks = rows.unflatten(1, (-1, codec.block_length))
    values = [
        _decode_blocks(each, codec, dtype) for each in blocks.split(max(1, AT_ONCE // codec.block // len(rows)), 1)
    ]
    return _joined([each.sum(0, keepdim=True) if adds else each for each in values], 1).flatten(1)


def _decode_blocks(blocks: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    if codec.name.startswith(TOPK):
        count = codec.header // KEPT
        places, kept = blocks.split([count, codec.header - count], -1)
        values = blocks.new_zeros((*blocks.shape[:-1], codec.block), dtype=dtype)
        return values.scatter_(
            -1, places.long(), kept.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(dtype)
        )
    scale = blocks[..., : codec.header].contiguous().view(torch.float32)
    return _unround(blocks[..., codec.header :], codec).to(dtype) * scale


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0]


def _round(scaled: Tensor, codec: Codec) -> Tensor:
    """The codes of values between the smallest and the largest code, as bytes; eight signs in a byte."""
    if codec.name == "1bit":
        signs = (scaled >= 0).to(torch.uint8).unflatten(1, (-1, 8))
        return (signs << torch.arange(8, dtype=torch.uint8, device=scaled.device)).sum(2, dtype=torch.uint8)
    if codec.name == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    largest = LARGEST[codec.name]
    codes = scaled.round().clamp(-largest, largest).to(torch.int8)
    if codec.name == "int8":
        return codes.view(torch.uint8)
    high, low = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return high * 16 + low


def _unround(codes: Tensor, codec: Codec) -> Tensor:
    if codec.name == "1bit":
        bits = codes.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=codes.device)
        return (bits & 1).flatten(-2).to(torch.int8) * 2 - 1
    if codec.name == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if codec.name == "int8":
        return codes.view(torch.int8)
    return torch.stack([codes >> 4, codes & 15], -1).flatten(-2).to(torch.int8) - 8
