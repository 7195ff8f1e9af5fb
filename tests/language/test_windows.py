"""Windows and their adjoint are the same on one device, on virtual ranks and on real ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardc import Mesh
from shardc.language.windows import AROUND, EDGE, FILLED, MIRRORED, Windows, overlap_add, rows_sent, windows
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh
from shardc.runtime.comm.simulated import SimulatedComm

GARBAGE = 77.0  # what a chunk holds beyond the end of its dim


@st.composite
def any_windows(draw: st.DrawFn) -> Windows:
    """Any count, sizes that do not divide, windows beyond both ends, upwards or down."""
    number = st.integers  # mirrored windows reach over the dim once
    count, length, total = draw(number(1, 8)), draw(number(1, 20)), draw(number(1, 20))
    start, stride, span = draw(number(-25, 25)), draw(number(1, 4)), draw(number(1, 9))
    window = Windows(count, length, total, start, draw(st.sampled_from((1, -1))) * stride, span, draw(number(0, 3)))
    reach = [window.start + t * window.stride + at for t in (0, total - 1) for at in (0, span - 1)]
    return replace(window, beyond=EDGE) if min(reach) <= -length or max(reach) >= 2 * length - 1 else window


def by_hand(window: Windows, x: Tensor, fill: float) -> Tensor:
    """Each window element by element."""
    joined = x.new_full((x.shape[0], window.count * window.size), fill)
    for t in range(window.total):
        for element in range(window.start + t * window.stride, window.start + t * window.stride + window.span):
            index = t // window.chunk
            at = index * window.size + element - window.first(index)
            if window.beyond != FILLED or 0 <= element < window.length:
                joined[:, at] = x[:, found_at(element, window)]
    return joined


def found_at(element: int, window: Windows) -> int:
    """The place in the dim of what stands beyond it."""
    order = list(range(window.length))
    if window.beyond == EDGE:
        return order[0] if element < 0 else order[min(element, window.length - 1)]
    period = order + order[-2:0:-1] if window.beyond == MIRRORED else order
    return period[element % len(period)]


def chunked(x: Tensor, window: Windows) -> list[Tensor]:
    """The chunk of each rank, garbage where it is beyond the end."""
    padded = torch.cat([x, x.new_full((x.shape[0], window.count * window.shard_size - x.shape[1]), GARBAGE)], 1)
    return list(padded.split(window.shard_size, 1))


@settings(max_examples=300)
@given(any_windows())
def test_windows_hold_what_their_positions_look_at(window: Windows) -> None:
    if abs(window.stride) > window.span:  # what lies between is taken along
        window = Windows(*window.values[:4], window.stride // abs(window.stride) * window.span, *window.values[5:])
    x = torch.randn(2, window.length, dtype=torch.float64)
    assert torch.equal(windows(x, (), 1, window.values, 5.0), by_hand(window, x, 5.0))


@settings(max_examples=300)
@given(any_windows())
def test_each_rank_gets_its_window_and_sends_what_is_announced(window: Windows) -> None:
    comm = SimulatedComm(Mesh(x=window.count))
    x = torch.randn(2, window.length, dtype=torch.float64)
    found = comm.start("windows", chunked(x, window), ("x",), 1, window.values, 5.0)()
    assert torch.equal(torch.cat(list(found), 1), windows(x, (), 1, window.values, 5.0))
    sent = [traffic.bytes["collective_permute"] for traffic in comm.traffic]
    assert sent == [16 * rows for rows in rows_sent(window.values)[0]]


@settings(max_examples=300)
@given(any_windows())
def test_overlap_add_is_the_adjoint_of_windows_and_the_same_on_ranks(window: Windows) -> None:
    comm = SimulatedComm(Mesh(x=window.count))
    x = torch.randn(2, window.length, dtype=torch.float64)
    y = torch.randn(2, window.count * window.size, dtype=torch.float64)
    back = overlap_add(y, (), 1, window.values)
    torch.testing.assert_close((windows(x, (), 1, window.values, 0.0) * y).sum(), (x * back).sum())
    pieces = comm.start("overlap_add", list(y.split(window.size, 1)), ("x",), 1, window.values)()
    torch.testing.assert_close(torch.cat(list(pieces), 1)[:, : window.length], back)
    sent = [traffic.bytes["collective_permute"] for traffic in comm.traffic]
    assert sent == [16 * rows for rows in rows_sent(window.values)[1]]


def test_a_dim_as_it_is_takes_nothing_of_neighbours() -> None:
    assert Windows(4, 16, 16, 0).is_identity
    assert not Windows(4, 15, 15, 0).is_identity, "the last chunk ends in what is no element"
    assert not any(rows_sent(Windows(4, 15, 15, 0).values)[0])


CASES = [
    Windows(4, 16, 16, -1, 1, 3), Windows(4, 9, 5, -1, 2, 3), Windows(4, 5, 9, -2), Windows(4, 10, 10, 9, -1),
    Windows(4, 10, 10, -3, beyond=AROUND), Windows(4, 9, 13, -2, beyond=MIRRORED),
    Windows(4, 6, 6, -7, 1, 15), Windows(4, 8, 8, 0),
]  # fmt: skip
SHUFFLED = Mesh(dp=2, tp=2, device_ids=(3, 1, 2, 0))


def run_on_gloo():
    """The cases in which this rank's result or count differs from the virtual ranks'."""
    wrong = []
    for mesh in (Mesh(dp=2, tp=2), SHUFFLED):
        comm = TorchComm(make_device_mesh(mesh))
        for window in CASES:
            generator = torch.Generator().manual_seed(0)
            x, y = (
                torch.randint(-8, 8, (3, size, 2), generator=generator).float()
                for size in (window.count * window.shard_size, window.count * window.size)
            )
            for axes in (("dp", "tp"), ("tp", "dp")):
                for kind, whole, extra in (("windows", x, (5.0,)), ("overlap_add", y, ())):
                    virtual = SimulatedComm(mesh)
                    args = (axes, 1, window.values, *extra)
                    index = [mesh.index(i, tuple(map(mesh.axis, axes))) for i in range(4)]
                    pieces = [whole.chunk(4, 1)[i] for i in index]
                    comm.traffic[0].clear()
                    (result,) = comm.start(kind, [pieces[comm.position]], *args)()
                    expected = virtual.start(kind, pieces, *args)()[comm.position]
                    if not torch.equal(result, expected) or comm.traffic[0] != virtual.traffic[comm.position]:
                        wrong.append((mesh, kind, axes, window))
    return wrong


def test_real_ranks_get_what_virtual_ranks_get(gloo):
    assert gloo.run(run_on_gloo) == [[]] * 4
