"""All ranks of a mesh exchange messages over a group of their own."""

import gc

import torch
import torch.distributed as dist

from shardc.language.mesh import Mesh
from shardc.runtime.agreement.agreement import agreement_on
from shardc.runtime.comm.distributed import make_device_mesh


def run_exchange(sizes):
    agreement = agreement_on(make_device_mesh(Mesh(dp=4)))
    return [agreement.exchange(bytes([dist.get_rank()]) * size[dist.get_rank()]) for size in sizes]


def test_every_rank_gets_the_bytes_of_all_in_order(gloo):
    sizes = [(1, 1, 1, 1), (0, 0, 0, 0), (252, 252, 252, 252), (3, 0, 253, 1000), (100_000, 7, 7, 7)]
    for received in gloo.run(run_exchange, sizes):
        assert received == [[bytes([rank]) * size[rank] for rank in range(4)] for size in sizes]


def run_beside_others():
    """An exchange between collectives of the default group that are started and not awaited."""
    agreement = agreement_on(make_device_mesh(Mesh(dp=2, tp=2)))
    values = [torch.full((1000,), float(dist.get_rank())) for _ in range(5)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    received = agreement.exchange(b"%d" % dist.get_rank())
    for work in works:
        work.wait()
    return received == [b"0", b"1", b"2", b"3"] and all(value.eq(6).all() for value in values)


def test_an_exchange_pairs_with_no_other_collective(gloo):
    assert all(gloo.run(run_beside_others))


def run_rows():
    """Each row of a mesh exchanges apart; meshes of the same ranks share one agreement."""
    mesh = make_device_mesh(Mesh(dp=2, tp=2))
    one, other = agreement_on(mesh["tp"]), agreement_on(mesh["tp"])
    gc.collect()
    return one is other, one.ranks, one.exchange(b"%d" % dist.get_rank())


def test_ranks_of_a_smaller_mesh_exchange_among_themselves(gloo):
    assert gloo.run(run_rows) == [(True, (0, 1), [b"0", b"1"])] * 2 + [(True, (2, 3), [b"2", b"3"])] * 2


def run_alone():
    return agreement_on(make_device_mesh(Mesh(dp=4, tp=1))["tp"]) is None


def test_one_rank_has_nobody_to_agree_with(gloo):
    assert gloo.run(run_alone) == [True] * 4
