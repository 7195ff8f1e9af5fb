"""Values that are unknown during capture may be checked, printed and stored by a model's own lines, no more."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking_models import CHECKS, Model, logs, prints
from torch import Tensor

import shardc
from shardc import CaptureError, Mesh, P

MESH, ANNOTATIONS = Mesh(dp=2, tp=2), {"x": P("dp"), "layer.weight": P("tp")}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_model_that_checks_or_prints_values_computes_what_it_does_without(check: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Model(check).double(), torch.randn(4, 8, dtype=torch.float64)
    parallel, loss = shardc.parallelize(model, MESH, ANNOTATIONS), model(x)
    found = parallel(x)
    found.backward()
    assert torch.allclose(found, loss, rtol=0, atol=1e-14)
    for expected, parameter in zip(
        torch.autograd.grad(loss, list(model.parameters())), parallel.parameters(), strict=True
    ):
        assert torch.allclose(expected, parameter.grad, rtol=0, atol=1e-14)
    notes = "\n".join(parallel.program.program.notes)
    assert ("checking_models.py:" in notes and "no step runs it" in notes) == (check not in (prints, logs)), notes


USES: dict[str, Callable[[Tensor], Any]] = {
    "computed with": lambda y: y * y.mean().item(),
    "computed with in Python before": lambda y: y * (2 / y.mean().item() - 1),
    "branched on": lambda y: y if y.mean().item() > 0 else -y,
    "a part of a check by another name": lambda y: math.sqrt(y.mean().item()),
    "a size": lambda y: torch.zeros(int(y.sum().item())),
    "converted": lambda y: y * float(y.mean()),
    "a bound": lambda y: y.clamp(max=y.mean().item()),
    "filled in": lambda y: torch.full((), y.max().item()),
    "made a tensor of": lambda y: torch.tensor(y.max().item()),
    "written as JSON": lambda y: json.dumps(y.mean().item()),
    "a key": lambda y: {y.mean().item(): 1},
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_is_computed_with_an_unknown_number_is_refused_with_the_line(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_unknown.py:\d+: .*lambda(.|\n)*unknown during capture\n"):
        shardc.parallelize(Model(use), MESH, ANNOTATIONS)(torch.ones(4, 8))


def test_an_output_that_is_an_unknown_number_is_named() -> None:
    class Logging(Model):
        def forward(self, x: Tensor) -> Any:
            return {"loss": self.layer(x).sum(), "log": self.layer(x).mean().item()}

    with pytest.raises(CaptureError, match=r"output 'log' is a number, .*\n  return the tensor"):
        shardc.parallelize(Logging(print), MESH, ANNOTATIONS)(torch.ones(4, 8))


def test_what_is_logged_reads_nan_once(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    parallel = shardc.parallelize(Model(logs), MESH, ANNOTATIONS)
    for _ in range(3):
        parallel(torch.ones(4, 8))
    assert [each.getMessage() for each in caplog.records] == ["mean nan of 32"] and not capsys.readouterr().err


def returns_early(y: Tensor) -> Tensor:
    if y.isnan().any():
        return y
    return -y


def raises_or_else(y: Tensor) -> Tensor:
    if y.isnan().any():
        raise ValueError("nan")
    else:
        return -y


@pytest.mark.parametrize("use", [returns_early, raises_or_else])
def test_a_branch_is_no_check(use: Callable[[Tensor], Any]) -> None:
    model, x = Model(use), torch.ones(4, 8)
    parallel = shardc.parallelize(model, MESH, ANNOTATIONS)
    torch.testing.assert_close(parallel(x), model(x))
    assert not any("no step runs it" in note for note in parallel.program.program.notes)
    if use is raises_or_else:
        with pytest.raises(ValueError, match="nan"):
            parallel(x / 0 - x / 0)


def falls_back(y: Tensor) -> Tensor:
    try:
        if y.max() > 6:
            raise OverflowError
    except OverflowError:
        y = y / 2
    return y


def falls_back_from_an_assert(y: Tensor) -> Tensor:
    try:
        assert y.max() < 6
    except (AssertionError, KeyError):
        y = y / 2
    return y


def at_most_6(y: Tensor) -> None:
    if y.max() > 6:
        raise OverflowError("x")


def falls_back_from_a_function(y: Tensor) -> Tensor:
    with contextlib.suppress(OverflowError):
        at_most_6(y)
        y = y + 1
    return y


@pytest.mark.parametrize("use", [falls_back, falls_back_from_an_assert, falls_back_from_a_function])
def test_a_check_whose_error_the_model_catches_is_a_branch(use: Callable[[Tensor], Any]) -> None:
    model = Model(use)
    parallel = shardc.parallelize(model, MESH, ANNOTATIONS)
    for scale in (1, 100, 1):
        x = torch.full((4, 8), float(scale))
        torch.testing.assert_close(parallel(x), model(x))
    assert not any("no step runs it" in note for note in parallel.program.program.notes)


def rethrows(y: Tensor) -> Tensor:
    try:
        at_most_6(y)
    except KeyError:
        y = y / 2
    except OverflowError as error:
        raise ValueError("too large") from error
    return y


def test_a_check_whose_error_leaves_the_model_is_passed_over() -> None:
    model, x = Model(rethrows), torch.ones(4, 8)
    parallel = shardc.parallelize(model, MESH, ANNOTATIONS)
    torch.testing.assert_close(parallel(x), model(x))
    assert any("no step runs it" in note for note in parallel.program.program.notes)
