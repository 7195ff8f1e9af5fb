"""The inputs of a GSPMD case: small integers, valid positions for indices, and smaller sizes for large cases."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from .gather import Dims
from .ops import Case, full_text, updated_dims

MOST_ELEMENTS = 30_000_000  # a case with more is run on smaller sizes
MOST_MULTIPLICATIONS = 10_000_000_000


def inputs(case: Case) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the inputs; the starts of an update, which XLA passes separately, come last."""
    for tensor in case.fields["inputs"]:
        yield tuple(tensor["shape"]), getattr(torch, tensor["dtype"])
    if case.op == "dynamic_update_slice" and not case.name.startswith("op/"):
        yield from (((), torch.int32) for _ in updated_dims(case))


def values(case: Case) -> list[Tensor]:
    """Small random integers; for indices, valid positions."""
    random = torch.Generator().manual_seed(0)
    limit = _index_limit(case)
    found: list[Tensor] = []
    for i, (shape, dtype) in enumerate(inputs(case)):
        is_index = limit is not None and not dtype.is_floating_point and i > 0 and (i == 1 or not shape)
        if case.op == "dynamic_update_slice" and shape:
            is_index = False
        low, high = (0, max(1, limit or 1)) if is_index else (-4, 5)
        found.append(torch.randint(low, high, shape, generator=random).to(dtype))
    return found


def _index_limit(case: Case) -> int | None:
    """The exclusive upper bound of all indices: the fewest positions that an index can have; None without indices."""
    shapes = case.shapes("inputs")
    if case.op == "dynamic_update_slice":
        rows = zip(*shapes[:2], strict=True)
        return min(size - piece for size, piece in rows if size != piece)
    if case.op in ("gather", "scatter") and not case.name.startswith("op/"):
        return positions(case)
    by_op = {"gather": shapes[0][-1], "cross_entropy": shapes[0][-1], "cross_entropy_backward": shapes[0][-1],
             "embedding": shapes[0][0], "embedding_backward": shapes[0][0]} if shapes else {}  # fmt: skip
    return by_op.get(case.op)


def positions(case: Case) -> int:
    """The number of positions at which a piece can start, in the taken dim that has the fewest."""
    x, *_, last = (torch.empty(shape, device="meta") for shape in case.shapes("inputs"))
    dims = Dims.parse(full_text(case), x, last if case.op == "scatter" else None)
    return min(x.shape[dim] - dims.sizes[dim] + 1 for dim in dims.taken(x))


def is_large(case: Case) -> bool:
    """Whether the case takes too long to run at its sizes."""
    work = 0
    if case.op == "einsum":
        letters = dict(
            zip("".join(case.text.partition("->")[0].split(",")), sum(case.shapes("inputs"), ()), strict=True)
        )
        work = torch.Size(letters.values()).numel()
    elif case.op == "conv":
        kernel, out = case.shapes("inputs")[1], case.shapes("outputs")[0]
        work = math.prod(kernel) * math.prod(out) // max(out[-1], 1)
    return case.elements > MOST_ELEMENTS or work > MOST_MULTIPLICATIONS


def smaller(case: Case) -> Case:
    """The same case with smaller sizes for large dims, which the mesh divides as before; windows keep their size."""
    unit = 2 * case.mesh.size
    fields = json.loads(json.dumps(case.fields))
    kept = {size for shape in case.shapes("inputs") for size in shape} if case.op == "conv" else set()
    if case.op == "conv":
        kept -= {shape[i] for shape, at in zip(case.shapes("inputs"), _plain_dims(case), strict=True) for i in at}
    for tensor in (*fields["inputs"], *fields["outputs"]):
        tensor["shape"] = [size if size in kept else _smaller(size, unit) for size in tensor["shape"]]
    fields["torch"] = re.sub(r"(slice_sizes={)(.*?)}", lambda found: found[1] + ",".join(
        str(_smaller(int(n), unit)) for n in found[2].split(",")) + "}", case.text)  # fmt: skip
    return Case(fields)


def _plain_dims(case: Case) -> Iterator[list[int]]:
    """The dims of input and kernel that the window does not slide along."""
    for labels in re.search(r"dim_labels=(\w+)_(\w+)->", case.text).groups():  # type: ignore[union-attr]
        yield [i for i, letter in enumerate(labels) if not letter.isdigit()]


def _smaller(size: int, unit: int) -> int:
    return size if size < 2 * unit else size % unit + unit
