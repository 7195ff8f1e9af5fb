"""Linear algebra: matrices are whole; batch dims are free, and so are columns with separate solutions.

If a kernel raises errors for some values, the batch is cut evenly: padding may hold a matrix without a factorization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.ops.reduction import along

aten = torch.ops.aten


# Factorizations: factors, pivots, error codes.
rule(aten._linalg_det.default, "... 1 1 -> ..., ... 1 1, ... 1")
rule(aten._linalg_slogdet.default, "... 1 1 -> ..., ..., ... 1 1, ... 1")
rule((aten._linalg_eigh.default, aten.linalg_eig.default), "... 1 1 -> ... 1, ... 1 1", is_even=True)
rule(aten._linalg_eigvals.default, "... 1 1 -> ... 1", is_even=True)
rule(aten._linalg_svd.default, "... 1 1 -> ... 1 1, ... 1, ... 1 1", is_even=True)
rule(aten.linalg_qr.default, "... 1 1 -> ... 1 1, ... 1 1")
rule(aten.geqrf.default, "... 1 1 -> ... 1 1, ... 1")
rule(aten.linalg_lu.default, "... 1 1 -> ... 1 1, ... 1 1, ... 1 1")
rule((aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default), "... 1 1 -> ... 1 1, ... 1, ...")
rule(aten.lu_unpack.default, "... 1 1, ... 1 -> ... 1 1, ... 1 1, ... 1 1", is_even=True)
rule(aten.linalg_cholesky_ex.default, "... 1 1 -> ... 1 1, ...")
if hasattr(aten, "cholesky"):  # torch 2.14 has none
    rule(aten.cholesky.default, "... 1 1 -> ... 1 1", is_even=True)

# Functions of a matrix.
rule(aten.linalg_inv_ex.default, "... 1 1 -> ... 1 1, ...")
rule(aten.cholesky_inverse.default, "... 1 1 -> ... 1 1", is_even=True)
rule(aten.linalg_matrix_exp.default, "... 1 1 -> ... 1 1")
rule(aten.linalg_householder_product.default, "... 1 1, ... 1 -> ... 1 1")
rule(aten.linalg_pinv.atol_rtol_tensor, "... 1 1, ..., ... -> ... 1 1", is_even=True)


def _solve_rule(spec: str) -> Callable[[OpCall], Rule]:
    """``X`` in the spec are the dims of B: its columns in ``A X = B`` are free, its rows in ``X A = B``."""

    def bind(call: OpCall) -> Rule:
        return make_rule(spec.replace("X", "... 1 n" if call.kwargs.get("left", True) else "... n 1"), call)

    return bind


rule((aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default), _solve_rule("... 1 1, ... 1, X -> X"), is_even=True)
rule(aten.linalg_solve_triangular.default, _solve_rule("... 1 1, X -> X"))
rule(aten.cholesky_solve.default, _solve_rule("X, ... 1 1 -> X"))
rule(aten.triangular_solve.default, "... 1 1, ... 1 1 -> ... 1 1, ... 1 1", is_even=True)
rule(aten.ormqr.default, lambda call: make_rule("... 1 1, ... 1, ... 1 1 -> ... 1 1", call))


def _right_side(call: OpCall) -> str:
    """The spec of B: a batch of vectors if it has one dim less than A and agrees with it, else of matrices."""
    a, b = call.operands
    assert a is not None and b is not None
    has_vectors = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and b.shape == a.shape[:-1])
    return "... 1" if has_vectors else "... 1 1"


def _least_squares_rule(call: OpCall) -> Rule:
    """A result that the driver does not compute is empty."""
    x = _right_side(call)
    sides = [
        "1" if result and result.shape == (0,) else side
        for side, result in zip((x, "... 1", "...", "... 1"), call.results, strict=True)
    ]
    return make_rule(f"... 1 1, {x} -> {', '.join(sides)}", call)


rule(
    aten._linalg_solve_ex.default,
    lambda call: make_rule("... 1 1, X -> X, ... 1 1, ... 1, ...".replace("X", _right_side(call)), call),
)
rule(aten.linalg_lstsq.default, _least_squares_rule, is_even=True)
rule(aten.linalg_cross.default, along(lambda call: call.kwargs.get("dim", -1), linear="0 1"))

# Distances between the rows of two matrices.
rule((aten._cdist_forward.default, aten._euclidean_dist.default), "... p 1, ... r 1 -> ... p r")
rule(aten._cdist_backward.default, "... p r, ... p 1, ... r 1, ... p r -> ... p 1")


def _lstsq(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> tuple[Tensor, ...]:
    """Least squares by singular values in place of LAPACK's default driver, whose results differ from run to run."""
    if a.is_cuda or driver not in (None, "gelsy"):
        return tuple(aten.linalg_lstsq(a, b, rcond=rcond, driver=driver))
    solution, residuals, rank, values = aten.linalg_lstsq(a, b, rcond=rcond, driver="gelsd")
    return solution, residuals.new_empty(0), rank, values.new_empty(0)


STEADY: dict[Any, Callable[..., Any]] = {aten.linalg_lstsq.default: _lstsq}  # ops that ranks must agree on, bit for bit


fft = (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
rule(fft, along(lambda call: call.args[1], linear="0"))
