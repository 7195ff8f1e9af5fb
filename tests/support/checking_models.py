"""Models that check or print values. They are not in a test file, since pytest rewrites its asserts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(8, 8), check

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.check(y)
        return y.square().mean()


def asserts_all(y: Tensor) -> None:
    assert y.isfinite().all(), "not finite"


def asserts_none(y: Tensor) -> None:
    assert not y.isnan().any()


def asserts_both(y: Tensor) -> None:
    assert not (y.isnan().any() or (y > 1e6).any()) and y.abs().max() < 1e6, f"{y}"


def asserts_a_number(y: Tensor) -> None:
    assert y.abs().max().item() < 1e6
    assert 0 <= y.abs().min().item() <= 1e6


def asserts_equality(y: Tensor) -> None:
    assert torch.equal(y, y) and torch.allclose(y, y)


def asserts_on_lines(y: Tensor) -> None:
    assert (
        y.isfinite().all()
        and not y.isnan().any()
    ), "not finite"  # fmt: skip


def raises(y: Tensor) -> None:
    if y.isnan().any():
        raise ValueError("nan")
    if not y.isfinite().all() or y.max().item() > 1e6:
        raise ValueError("not finite")


def prints(y: Tensor) -> None:
    print(f"{y.mean().item():.4f} {y.max():.2f} {round(y.min().item(), 3)} {y.sum().item()}", y.mean().item())


def prints_what_it_computes(y: Tensor) -> None:
    mean = 0.9 * 1 + 0.1 * y.mean().item()
    print(f"{100 * mean:.1f}% {-abs(mean)} {mean**2 / 2}", y.sum(0).tolist(), y[:2].tolist())
    print("%.3f %d %s" % (y.mean().item(), y.sum().item(), y.max().item()), "%g" % mean)  # noqa: UP031
    assert abs(mean) < 1e6


def logs(y: Tensor) -> None:
    logging.getLogger(__name__).warning("mean %.3f of %d", y.mean().item(), y.numel())


CHECKS = (
    asserts_all,
    asserts_none,
    asserts_both,
    asserts_a_number,
    asserts_equality,
    asserts_on_lines,
    raises,
    prints,
    prints_what_it_computes,
    logs,
)
