"""On gloo gathers and reductions are messages into given memory; their values equal those of the collectives."""

from unittest import mock

import pytest
import torch
from parallel_models import MLP, batch

import shardc
from shardc import P, Zero
from shardc.language.mesh import Mesh
from shardc.language.partition import parse_parts
from shardc.runtime.comm import messages, process_group
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh

MESHES = (Mesh(dp=4), Mesh(dp=2, tp=2))
GROUPS = (("dp",), ("dp", "tp"), ("tp", "dp"))
SHAPES = (((8,), 0), ((4, 12), 0), ((8, 4, 2), 1), ((0, 4), 0), ((4, 8), 1))
DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.int64)


def values(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randint(-8, 8, shape, generator=generator).to(dtype), dim) for shape, dim in SHAPES]


def groups():
    for mesh in MESHES:
        comm = TorchComm(make_device_mesh(mesh))
        yield from (comm.group(parse_parts(axes, mesh)) for axes in GROUPS if set(axes) <= set(mesh.axis_names))


def run_both_ways(small):
    """Whether every value is that of torch's collective, whether a value goes alone from so many bytes on."""
    found = []
    with mock.patch.object(messages, "SMALL", small):
        for group in groups():
            for dtype in DTYPES:
                given = values(torch.distributed.get_rank(), dtype)
                gathered = messages.all_gather([(x, dim, None) for x, dim in given], group)()
                found += map(torch.equal, gathered, (process_group.all_gather(x, group, dim)() for x, dim in given))
                for op in ("sum", "max") if dtype is not torch.bool else ():
                    kept = messages.reduce_scatter(given, op, group)()
                    wanted = (process_group.reduce_scatter(x, group, op, dim)() for x, dim in given)
                    found += map(torch.equal, kept, wanted)
    return found


@pytest.mark.parametrize("small", [0, 100, 2**17])
def test_values_are_those_of_the_backends_collectives(gloo, small):
    for found in gloo.run(run_both_ways, small):
        assert found and all(found)


def run_into():
    """Whether a piece is gathered into memory that it is rows of, with nothing copied and no tensor made meanwhile."""
    group = next(group for group in groups() if group.size == 4)
    whole = torch.zeros(4 * 2**16)
    piece = whole[group.index * 2**16 :][: 2**16].fill_(group.index + 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        (made,) = messages.all_gather([(piece, 0, whole)], group)()
    used = {event.name() for event in profile.profiler.kineto_results.events()}
    return made is whole and whole.view(4, -1).mean(1).tolist() == [1, 2, 3, 4], used & {"aten::copy_", "[memory]"}


def test_a_piece_is_gathered_into_its_own_memory_without_a_copy(gloo):
    assert gloo.run(run_into) == [(True, set())] * 4


def run_update(stage, bucket):
    """Of a forward after an optimizer's step: the calls of gathers and waits, in order; whether pieces lie in place."""
    parallel = shardc.parallelize(
        MLP(), make_device_mesh(Mesh(dp=4)), {"x": P("dp")}, args=batch(0), zero=Zero("dp", stage), bucket=bucket
    )
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(*batch(0)).backward()
    optimizer.step()
    calls, places, gather = [], [], messages.all_gather

    def noting(given, group):
        calls.append("start")
        places.extend((x.untyped_storage().data_ptr(), place.untyped_storage().data_ptr()) for x, _, place in given)
        finish = gather(given, group)
        return lambda: (calls.append("wait"), finish())[1]

    with mock.patch.object(messages, "all_gather", noting):
        parallel(*batch(1))
    return calls, len(places), all(mine == kept for mine, kept in places)


@pytest.mark.parametrize("stage", [1, 2])
def test_after_a_step_all_kept_copies_are_gathered_together_in_place(gloo, stage):
    for bucket, calls in ((25 * 2**20, ["start", "wait"]), (1, ["start"] * 4 + ["wait"] * 4)):
        assert gloo.run(run_update, stage, bucket) == [(calls, 4, True)] * 4


def run_into_turned():
    group = next(group for group in groups() if group.size == 4)
    turned = torch.zeros(2**8, 4 * 2**8)
    (made,) = messages.all_gather([(torch.ones(2**8, 2**8), 1, turned)], group)()
    return made is turned and bool(turned.all())


def test_pieces_joined_along_another_dim_land_in_the_given_memory(gloo):
    assert all(gloo.run(run_into_turned))


def run_rotate():
    """What arrives, by the backend's collective, of tensors apart; then of those that arrived, which are not copied."""
    group = next(group for group in groups() if group.size == 4)
    apart = [torch.full(shape, float(group.index)) for shape in ((2, 3), (4,))]
    met = process_group.rotate(apart, group, 1)()
    with mock.patch.object(torch, "cat", side_effect=AssertionError("what arrived is copied")):
        again = process_group.rotate(met, group, 1)()
    return group.index, [[x.unique().item() for x in row] for row in (met, again)], [x.shape for x in again]


def test_what_arrived_together_is_sent_on_without_a_copy(gloo):
    for index, found, shapes in gloo.run(run_rotate):
        assert found == [[(index - 1) % 4] * 2, [(index - 2) % 4] * 2]
        assert shapes == [(2, 3), (4,)]


def test_tensors_that_do_not_follow_one_another_in_memory_are_copied():
    x = torch.arange(12.0)
    for row in ((x[:4], x[8:]), (x[4:8], x[:4]), (x.view(3, 4)[:, :2], x[8:]), (x[:4], torch.ones(2))):
        assert torch.equal(process_group.in_one(row), torch.cat([each.flatten() for each in row]))
    together = process_group.in_one((x[2:8].view(2, 3), x[8:]))
    assert torch.equal(together, x[2:]) and together.data_ptr() == x[2:].data_ptr()
