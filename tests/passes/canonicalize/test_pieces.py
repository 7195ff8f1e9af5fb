"""Pieces of a value that are put together again send nothing where their dim is cut, and are as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from printed import compiled, value
from torch import Tensor

from shardc import Mesh, P

MESH = Mesh(dp=2)
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "cat of rows": lambda x: torch.cat(list(x)),
    "cat of rows along another dim": lambda x: torch.cat(list(x), 1),
    "cat of a middle dim": lambda x: torch.cat(x.unbind(1), 1),
    "cat of selected": lambda x: torch.cat([x[i] for i in range(4)]),
    "stack of rows": lambda x: torch.stack(x.unbind(0), 2),
    "cat of parts": lambda x: torch.cat(x.split([1, 2, 1])),
    "cat of slices": lambda x: torch.cat([x[:3], x[3:]]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_all_pieces_in_order_send_nothing(name: str) -> None:
    x = value(4, 6, 2)
    program = compiled(lambda x: WHOLE[name](x), MESH, {"x": P("dp")}, x=x)
    assert not program.collectives
    torch.testing.assert_close(program.simulate(x=x)[0], WHOLE[name](x))


@pytest.mark.parametrize("name", [name for name in WHOLE if name not in ("cat of selected", "cat of slices")])
def test_so_do_their_gradients(name: str) -> None:
    x = value(4, 6, 2)
    program = compiled(lambda x: WHOLE[name](x).square().sum(), MESH, {"x": P("dp")}, True, x=x.requires_grad_())
    assert {each.kind for each in program.collectives} == {"all_reduce"}


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in another order": lambda x: torch.cat([x[1], x[0], x[2], x[3]]),
    "one is missing": lambda x: torch.cat(list(x)[1:]),
    "one comes twice": lambda x: torch.cat([x[0], *x]),
    "the last is missing": lambda x: torch.cat([x[:1], x[1:3]]),
    "of two values": lambda x: torch.cat([x[0], (x + 1)[1], x[2], x[3]]),
    "steps": lambda x: torch.cat([x[::2], x[1::2]]),
    "along another dim": lambda x: torch.cat([x[:2], x[2:]], 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pieces_stay(name: str) -> None:
    x = value(4, 6, 2)
    program = compiled(lambda x: OTHERS[name](x), MESH, {"x": P("dp")}, x=x)
    torch.testing.assert_close(program.simulate(x=x)[0], OTHERS[name](x))
