"""The work by which a device is measured: matrix products, attention, elementwise ops, an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardc.language.sharding import dtype_name

PRODUCTS = ((1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256), (256, 1024, 1024), (1024, 256, 4096))  # m, k, n
LARGE = ((4096, 4096, 4096), (8192, 1024, 4096))  # for accelerators, which smaller products do not fill
ROWS, WIDTH = 2048, 1024  # of elementwise ops


@dataclass(frozen=True, slots=True)
class Work:
    """Calls and their operations and bytes, as in ``Computed``; ``repeat``: how often they run in a row."""

    name: str
    rate: str
    run: Callable[[], object]
    flops: int = 0
    nbytes: int = 0
    dtype: str = "float32"
    repeat: int = 4


def works(device: torch.device) -> Iterator[Work]:
    """All work for a device."""
    is_cpu = device.type == "cpu"
    for dtype in (torch.float32, torch.float64) if is_cpu else (torch.float32, torch.bfloat16):
        for m, k, n in (PRODUCTS if dtype is torch.float32 else PRODUCTS[:2]) if is_cpu else LARGE:
            a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
            name = dtype_name(dtype)
            yield Work(f"mm {m}x{k}x{n}", "flops", lambda a=a, b=b: a @ b, 2 * m * k * n, dtype=name)  # type: ignore[misc]
    query, key, value = (torch.randn(4, 4, 256, 64, device=device, requires_grad=True) for _ in range(3))

    def attention() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), out.detach())

    flops = 7 * 2 * 4 * 4 * 256 * 256 * 64  # of 2 products forward and 5 backward
    yield Work("attention", "attention", attention, flops)
    yield from _others(device)
    yield _update(device)
    one = torch.ones((), device=device)
    yield Work("add", "call", lambda: one + one, nbytes=12, repeat=200)


def _others(device: torch.device) -> Iterator[Work]:
    """Ops that read and write memory; each has a new result, like a program's ops."""
    x, y = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    weight, nbytes = torch.ones(WIDTH, device=device), x.nbytes
    yield Work("add", "memory", lambda: x + y, nbytes=3 * nbytes)
    yield Work("gelu", "memory", lambda: F.gelu(x), nbytes=2 * nbytes)
    yield Work("norm", "memory", lambda: F.layer_norm(x, (WIDTH,), weight, weight), nbytes=2 * nbytes)
    yield Work("softmax", "memory", lambda: torch.log_softmax(x, -1), nbytes=2 * nbytes)
    yield Work("copy", "memory", lambda: x.t().contiguous(), nbytes=2 * nbytes)
    yield Work("sum", "memory", lambda: x.sum(0), nbytes=nbytes)


def _update(device: torch.device) -> Work:
    """AdamW's step reads parameter, gradient and two states, and writes all but the gradient."""
    parameters = [nn.Parameter(torch.ones(2**18, device=device)) for _ in range(8)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    step = torch.optim.AdamW(parameters, fused=True).step
    return Work("AdamW", "update", step, nbytes=7 * sum(each.nbytes for each in parameters))
