"""The key of a program: the same in every process, and another for all that passes may see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Precision, Remat, Zero
from shardc.cache.key import key_of
from shardc.cache.packed import NotPackedError

CALL = {"args": (torch.ones(4, 6),)}


class Model(nn.Module):
    """A product and a function of it."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), scale

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.layer(x)) * self.scale).sum()


def key(model: nn.Module | None = None, mesh: Mesh | None = None, plan: Any = None, **options: Any) -> str:
    """The key of a model compiled so."""
    given = {"x": P("dp")} if plan is None else plan
    compiled = shardc.compile(model or Model(), mesh or Mesh(dp=2, tp=2), given, **{**CALL, **options})
    return key_of(compiled.at("capture"))


def test_values_make_no_difference() -> None:
    one, other = Model(), Model()
    torch.nn.init.zeros_(other.layer.weight)
    assert key(one) == key(other) == key(one, args=(torch.zeros(4, 6),))


OTHERS: dict[str, dict[str, Any]] = {
    "a number": {"model": Model(3.0)},
    "frozen": {"model": Model().requires_grad_(False)},
    "mesh": {"mesh": Mesh(dp=4)},
    "axes": {"mesh": Mesh(tp=2, dp=2)},
    "annotations": {"plan": {"x": P("tp")}},
    "open dims": {"plan": {"x": P("dp", P.OPEN)}},
    "sizes": {"args": (torch.ones(8, 6),)},
    "no gradients": {"train": False},
    "zero": {"zero": Zero("dp", 2)},
    "remat": {"remat": Remat("layer")},
    "precision": {"precision": Precision()},
    "buckets": {"bucket": 10},
    "links": {"links": {"tp": "nvlink", "dp": "nvlink"}},
    "optimizer": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_passes_may_see_is_part_of_it(what: str) -> None:
    assert key(**OTHERS[what]) != key()


def test_what_is_no_data_has_no_key() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(NotPackedError, match="cond"):
        key(Branches(), train=False)


@pytest.mark.slow
def test_it_is_one_in_all_processes() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_key; print(test_key.key())"
    path = {"PYTHONPATH": ":".join(sys.path)}
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
