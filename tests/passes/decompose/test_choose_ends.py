"""Where inputs and outputs are cut by one axis along different dims, the smaller values move."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from printed import compiled, value
from torch import Tensor

from shardc import Mesh, P


def _grows(x: Tensor) -> Tensor:
    return F.conv2d(x, torch.ones(16, 2, 3, 3), padding=1)


def _shrinks(x: Tensor) -> Tensor:
    return F.conv2d(x, torch.ones(1, 2, 3, 3), padding=1)


@pytest.mark.parametrize(
    ("model", "kinds"), [(_grows, ["all_to_all", "collective_permute"]), (_shrinks, ["all_to_all"])]
)
def test_a_convolution_is_cut_as_the_smaller_of_its_ends(model: object, kinds: list[str]) -> None:
    ends = {"x": P("a"), "output:output": P(None, None, "a")}
    program = compiled(model, Mesh(a=2), ends, x=value(8, 2, 16, 16))
    assert [each.kind for each in program.collectives] == kinds
    assert sum(each.wire_bytes for each in program.collectives) < 8 * 2 * 16 * 16 * 4 // 2
    assert program.shardings["output"].local_shape((8, 1, 16, 16)) == (8, 1, 8, 16)


def test_priorities_of_the_user_s_own_stand() -> None:
    ends = {"x": P("a", priority=0), "output:output": P(None, None, "a", priority=1)}
    program = compiled(_grows, Mesh(a=2), ends, x=value(8, 2, 16, 16))
    assert [each.kind for each in program.collectives] == ["all_to_all"]
