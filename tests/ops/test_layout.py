"""Memory layouts that kernels of torch need, which the executor and rings give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardc.ops.attention import kernels
from shardc.ops.attention.joining import Joined
from shardc.ops.attention.kernels import Scores
from shardc.ops.attention.layout import EFFICIENT_BACKWARD, LAYOUTS, ROW, with_long_rows
from shardc.ops.attention.ring import Ring
from shardc.runtime.execute.kernel import kernel_of

BATCH, HEADS, ROWS, SIZE = 2, 3, 40, 8


def operands() -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradient, queries, keys, values and result, with positions inside heads in memory; a mask; a logsumexp."""
    tensors = [torch.randn(BATCH, HEADS, ROWS, SIZE) for _ in range(5)]
    return tensors, torch.zeros(BATCH, HEADS, ROWS, ROWS), torch.zeros(BATCH, HEADS, ROWS)


def is_ready(bias: Tensor, out: Tensor) -> bool:
    """Whether CUDA's kernel reads them right: it takes its own strides for the result."""
    reads = torch.as_strided(out, out.shape, (ROWS * HEADS * SIZE, SIZE, HEADS * SIZE, 1), out.storage_offset())
    return torch.equal(reads, out) and bias.stride(-1) == 1 and all(each % ROW == 0 for each in bias.stride()[:-1])


def test_the_executor_gives_the_backward_of_cudas_efficient_attention_its_layout() -> None:
    seen = list[Any]()
    node = fx.Graph().call_function(EFFICIENT_BACKWARD)
    (grad, q, k, v, out), mask, lse = operands()
    kernel_of(node, lambda *args: seen.extend(args))(grad, q, k, v, mask, out, lse, None, None, 0.0, [True] * 4)
    assert is_ready(seen[4], seen[5]) and torch.equal(seen[5], out) and torch.equal(seen[4], mask)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)])
def test_the_executor_gives_the_backward_of_cudnns_attention_its_result_as_forward_made_it(order: Any) -> None:
    """Whatever layout it was saved in: the kernel keeps that of a result by those of queries, keys and values."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    seen, (tensors, _, lse) = list[Any](), operands()
    queries = tensors[1].permute(order).contiguous().permute(order)
    given = [tensors[0], queries, *tensors[2:], lse]
    kernel_of(fx.Graph().call_function(op), lambda *args: seen.extend(args))(*given, None, None, None)
    assert seen[4].stride() == queries.stride() and torch.equal(seen[4], given[4])
    for found, expected in zip([*seen[:4], seen[5]], [*given[:4], lse], strict=True):
        assert found is expected


def test_so_do_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        seen.extend(args)
        return args[1], args[2], args[3], torch.empty(0)

    monkeypatch.setattr(kernels, "EFFICIENT_BACKWARD", backward)
    (grad, q, k, v, out), mask, lse = operands()
    narrow = Scores(mask[:, :, :, 3:], False, None)
    kernels._Efficient().backward(grad, q, k[:, :, 3:], v[:, :, 3:], out, lse, narrow)
    assert is_ready(seen[4], seen[5]) and torch.equal(seen[5], out)


def test_a_ring_leaves_its_result_in_that_layout() -> None:
    (_, q, k, v, _), _, _ = operands()
    joined = Joined(Ring("flash_attention_for_cpu", 1, ROWS, ROWS, True, None), 0, q, v)
    joined.meet(0, k, v)
    assert joined.results[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("width", [16, 17, 40, 64])
@pytest.mark.parametrize("start", [0, 1, 16])
def test_rows_of_a_mask_begin_at_multiples(width: int, start: int) -> None:
    mask = torch.randn(2, 1, 4, width + start)[..., start:]
    found = with_long_rows(mask)
    assert torch.equal(found, mask) and all(
        place % ROW == 0 for place in (found.storage_offset(), *found.stride()[:-1])
    )
    shared = torch.randn(width).expand(4, width)
    assert with_long_rows(shared).stride(0) == 0


@pytest.mark.parametrize("op", LAYOUTS, ids=str)
def test_a_tensor_that_is_ready_is_not_copied(op: Any) -> None:
    x = torch.randn(BATCH, ROWS, HEADS, 2 * ROW).transpose(1, 2)
    ready = x.contiguous() if "group_norm" in str(op) else x
    for at in range(6):
        assert LAYOUTS[op](at, [ready] * 6).data_ptr() == ready.data_ptr()
