"""Zigzag: stretches that cover all positions once, for any number of them; and how an annotation says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc import Mesh, P, ShardingError, blocks
from shardc.ops.zigzag import in_order, in_zigzag, stretches, zigzag


@given(st.integers(0, 60), st.integers(1, 9))
def test_each_rank_has_an_early_and_a_late_stretch_and_as_many_positions_as_torch_gives_it(
    length: int, count: int
) -> None:
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(count)] if length else []
    own = [stretches(length, count, index) for index in range(count)]
    assert [len(early) + len(late) for early, late in own] == chunks + [0] * (count - len(chunks))
    full = [each for each in own if sum(map(len, each)) == sum(map(len, own[0]))]
    assert all(0 <= len(early) - len(late) <= 1 for early, late in full)
    assert sorted(i for stretch in in_zigzag(length, count) for i in stretch) == list(range(length))
    assert all(max(early) < min(late) for early, late in own if early and late)


@given(st.integers(1, 9), st.integers(1, 8), st.data())
def test_the_last_positions_are_the_last_in_zigzag_too(count: int, half: int, data: st.DataObject) -> None:
    left_out = data.draw(st.integers(0, min(half, count - 1)))
    order, shorter = (
        [i for stretch in in_zigzag(length, count) for i in stretch]
        for length in (2 * half * count, 2 * half * count - left_out)
    )
    assert order[: len(shorter)] == shorter


@given(st.integers(1, 3), st.integers(0, 20), st.integers(1, 3), st.integers(1, 5))
def test_zigzag_and_in_order_are_inverses(outer: int, length: int, inner: int, count: int) -> None:
    x = torch.randn(2, outer * length * inner, 3)
    args = 1, outer, inner, count
    there = zigzag(x, *args)
    assert torch.equal(in_order(there, *args), x)
    order = torch.tensor([i for stretch in in_zigzag(length, count) for i in stretch], dtype=torch.long)
    assert torch.equal(there.view(2, outer, length, inner, 3), x.view(2, outer, length, inner, 3)[:, :, order])


def test_an_annotation_says_zigzag_as_it_is_read() -> None:
    spec = P("dp", "cp:zigzag", None)
    assert (str(spec), repr(spec)) == ("dp,cp:zigzag,-", "P('dp', 'cp:zigzag', None)")
    assert P.parse(str(spec)) == spec
    assert (spec.zigzags, spec.axes, spec.in_order()) == ({1: "cp"}, ("dp", "cp"), P("dp", "cp", None))
    assert spec.sharding(Mesh(dp=2, cp=2), (4, 8, 2), "x") == spec.in_order().sharding(Mesh(dp=2, cp=2), (4, 8, 2), "x")


@pytest.mark.parametrize(
    "entry", [("dp", "cp:zigzag"), ("cp:zigzag", P.OPEN), "cp:(1)2:zigzag", blocks(2, "cp:zigzag")], ids=str
)
def test_zigzag_goes_with_nothing_else(entry: Any) -> None:
    with pytest.raises(ShardingError) as error:
        P(None, entry)
    assert "write 'cp:zigzag' alone" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"), [("sp:zigzag", "it has no such axis"), ("cp:zigzags", "or 'cp:zigzag' for positions")]
)
def test_what_is_no_zigzag_is_an_error(spec: str, said: str) -> None:
    with pytest.raises(ShardingError) as error:
        P(spec).sharding(Mesh(dp=2, cp=2), (8,), "x")
    assert said in str(error.value)
