"""Sums of tensors over the ranks of a group, sent as values or as codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from shardc.ops.codes import add_codes, decode_rows, encode_rows
from shardc.program.collective import wire_bytes

from ..comm.comm import Traffic
from ..comm.process_group import Group, all_gather, all_reduce, all_to_all
from ..comm.scatter import batches


def sums(tensors: Sequence[Tensor], group: Group, codec: str | None, bucket: int, traffic: Traffic) -> Iterator[Tensor]:
    """The sums of tensors over a group, bit-identical on all its ranks.

    ``bucket``: the most bytes of tensors that are sent together. ``traffic`` counts the bytes that this rank sends.
    """
    for few in _buckets(tensors, bucket):
        if group.size == 1:
            yield from few
        elif codec is None:
            yield from _sums_of_values(few, group, traffic)
        else:
            yield from _sums_of_codes(few, group, codec, traffic)


def _sums_of_values(tensors: Sequence[Tensor], group: Group, traffic: Traffic) -> Iterator[Tensor]:
    flat = torch.cat([each.reshape(-1) for each in tensors])
    traffic.count("all_reduce", wire_bytes("all_reduce", flat.nbytes, group.size))
    pieces = all_reduce(flat, group, "sum", is_own=True)().split([each.numel() for each in tensors])
    yield from (piece.view(each.shape) for each, piece in zip(tensors, pieces, strict=True))


def _sums_of_codes(tensors: Sequence[Tensor], group: Group, codec: str, traffic: Traffic) -> Iterator[Tensor]:
    """An all_reduce of codes: each rank adds one piece of all tensors, and sends the codes of the sum."""
    none, dtype = (0,) * len(tensors), tensors[0].dtype
    codes = encode_rows("all_reduce", codec, group.size, none, none, *tensors)
    traffic.count("all_to_all", wire_bytes("all_to_all", codes.nbytes, group.size))
    added = add_codes(codec, dtype, (), all_to_all(codes, group, 0, 1)())
    codes = encode_rows("all_gather", codec, group.size, (0,), (0,), added)
    traffic.count("all_gather", wire_bytes("all_gather", codes.nbytes * group.size, group.size))
    shapes = tuple(tuple(each.shape) for each in tensors)
    found = decode_rows("all_reduce", codec, none, shapes, shapes, dtype, all_gather(codes, group, 0)())
    yield from found if isinstance(found, tuple) else (found,)


def _buckets(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Lists of successive tensors of one dtype and of at most ``size`` bytes; a larger tensor is alone in its list."""
    for _, each in groupby(tensors, lambda tensor: tensor.dtype):
        alike = list(each)
        yield from ([alike[i] for i in batch] for batch in batches([tensor.nbytes for tensor in alike], size))
