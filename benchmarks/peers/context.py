"""Context parallel peers: causal attention of this rank's positions, by torch's own ring and by a handwritten ring.

``torch.distributed.tensor.experimental.context_parallel`` of torch 2.13 supports only the kernels of CUDA: on a CPU it
raises a NotImplementedError. This module calls its ring, ``_templated_ring_attention``, in the same way with the CPU
kernel and the same load balancing: of 2 N pieces of the positions, rank i has pieces i and 2 N - 1 - i. The ring runs
on plain tensors, without the dispatch of DTensor that ``context_parallel`` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
KEYS, GRADIENTS = 1, 2  # tags of messages


def in_order(x: Tensor) -> Tensor:
    """This rank's part of ``[batch, position, width]``, cut in the order of positions."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def balanced(x: Tensor) -> Tensor:
    """This rank's part of ``[batch, position, width]``: a piece of the first half, and its mirror image."""
    pieces, rank = x.chunk(2 * dist.get_world_size(), 1), dist.get_rank()
    return torch.cat([pieces[rank], pieces[-1 - rank]], 1)


def torch_attention(method: str) -> Attend:
    """torch's ring over ``balanced`` positions. ``method``: how keys and values move, ``allgather`` or ``alltoall``."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch_ring.set_rotate_method(method)
        out: Tensor = _TorchRing.apply(q, k, v, method)
        return out

    return attend


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
        ring: Any = torch_ring._templated_ring_attention
        out, lse = ring(dist.group.WORLD, 2, FORWARD, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.method = method
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        torch_ring.set_rotate_method(ctx.method)
        ring: Any = torch_ring._templated_ring_attention_backward
        saved = ctx.saved_tensors
        dq, dk, dv = ring(dist.group.WORLD, 2, BACKWARD, grad, "grad_out", *saved, is_causal=True, dropout_p=0.0)
        return dq, dk, dv, None


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A ring over positions ``in_order``: keys and values travel in one message while the rank computes."""
    out: Tensor = _RingByHand.apply(q, k, v)
    return out


class _RingByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = met = torch.stack([k, v])
        for step in range(ranks):
            arriving = _to_next(met, KEYS) if step + 1 < ranks else None
            if step == 0:
                out, lse = FORWARD(q, *met, 0.0, True)
            elif step <= rank:
                more, further = FORWARD(q, *met, 0.0, False)
                out.lerp_(more, torch.sigmoid(further - lse).unsqueeze(-1))
                lse = torch.logaddexp(lse, further)
            met = arriving() if arriving else met
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, met, out, lse = ctx.saved_tensors
        of_queries, of_own = torch.zeros_like(q), torch.zeros_like(met)
        travelling: Callable[[], Tensor] = lambda: torch.zeros_like(met)  # noqa: E731
        for step in range(ranks):
            arriving = _to_next(met, KEYS) if step + 1 < ranks else None
            part = None
            if step <= rank:
                dq, *part = BACKWARD(grad, q, *met, out, lse, 0.0, step == 0)
                of_queries += dq
            total = of_own if step == 0 else travelling()
            for sum_, each in zip(total, part or (), strict=False):
                sum_ += each
            if step > 0:
                travelling = _to_next(total, GRADIENTS)
            met = arriving() if arriving else met
        return of_queries, *(of_own + travelling())


def _to_next(x: Tensor, tag: int) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank. The returned function waits for the previous rank's tensor."""
    rank, ranks, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    works = [dist.irecv(received, (rank - 1) % ranks, tag=tag), dist.isend(x, (rank + 1) % ranks, tag=tag)]

    def arrived() -> Tensor:
        for work in works:
            assert work is not None
            work.wait()
        return received

    return arrived
