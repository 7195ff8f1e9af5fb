"""torch.distributed on four gloo processes: the same collectives and programs as virtual ranks; DTensors."""

import functools
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_pool import ByPath
from localized import row_parallel, row_parallel_inputs, row_parallel_values
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P, blocks, parse_parts
from shardc.runtime.comm.distributed import TorchComm, gather_whole, make_device_mesh
from shardc.runtime.comm.dtensor import check_order, placements, shard, sharding_of
from shardc.runtime.comm.launch import launch
from shardc.runtime.comm.messages import parse_counters, private_loopback, sent_bytes
from shardc.runtime.comm.process_group import process_group_of, reduce_scatter
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.execute.executor import Executor
from shardc.runtime.simulator import cut_inputs, simulate
from shardc.runtime.tensor.make import to_global

MESH = Mesh(dp=2, tp=2)
SHUFFLED = Mesh(dp=2, tp=2, device_ids=(2, 0, 1, 3))
ACROSS = Mesh(dp=2, tp=2, device_ids=(0, 2, 1, 3))
WIDE = Mesh(dp=4)
LAST = -1  # of a tensor's dims
CASES = [
    (mesh, kind, axes, *args)
    for mesh in (MESH, SHUFFLED)
    for axes in (("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"))
    for kind, *args in (
        ("all_gather", 0),
        ("all_gather", LAST),
        ("shard_slice", 0),
        ("all_reduce", "sum"),
        ("all_reduce", "max"),
        ("reduce_scatter", "sum", 0),
        ("reduce_scatter", "min", LAST),
        ("all_to_all", 0, LAST),
        ("all_to_all", LAST, 0),
    )
] + [
    (MESH, "collective_permute", ("dp", "tp"), ("tp", "dp")),
    (MESH, "collective_permute", ("dp",), ("tp",)),
    (SHUFFLED, "collective_permute", ("dp", "tp"), ("tp", "dp")),
    (WIDE, "collective_permute", ("dp",), ("dp:(2)2", "dp:(1)2")),
    (WIDE, "all_gather", ("dp:(1)2",), 1),
    (WIDE, "all_reduce", ("dp:(2)2",), "sum"),
    (WIDE, "collective_permute", ("dp:(1)2",), ("dp:(2)2",)),
]
SHAPES = [(8,), (4, 8), (4, 4, 8)]


@functools.cache
def comm_of(mesh):
    return TorchComm(make_device_mesh(mesh))


def pieces_of(mesh, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 8, shape, generator=generator).float() for _ in range(mesh.size)]


def applicable(kind, args, ndim):
    return ndim > 1 or kind in ("all_reduce", "collective_permute") or (kind != "all_to_all" and args[-1] != 1)


def run_collectives():
    """The cases in which this rank's result or count differs from the virtual ranks'."""
    wrong = []
    for seed, (mesh, kind, axes, *args) in enumerate(CASES):
        for shape in SHAPES:
            if not applicable(kind, args, len(shape)):
                continue
            args = [len(shape) - 1 if arg == LAST else arg for arg in args]
            comm, virtual, pieces = comm_of(mesh), SimulatedComm(mesh), pieces_of(mesh, shape, seed)
            comm.traffic[0].clear()
            (result,) = comm.start(kind, [pieces[comm.position]], axes, *args)()
            expected = getattr(virtual, kind)(pieces, axes, *args)[comm.position]
            if not torch.equal(result, expected) or comm.traffic[0] != virtual.traffic[comm.position]:
                wrong.append((mesh, kind, axes, args, shape, result, expected))
    return wrong


def run_reduce_scatter():
    """The backend's own reduce_scatter, as on NCCL, against the one made of an all_to_all and a local sum."""
    comm = comm_of(SHUFFLED)
    pieces = pieces_of(SHUFFLED, (4, 4, 8), seed=0)
    results = []
    for axes, dim in ((("dp",), 0), (("tp", "dp"), 2), (("dp", "tp"), 1)):
        group = comm.group(parse_parts(axes, comm.mesh))
        both = [
            reduce_scatter(pieces[comm.position], replace(group, adds_locally=is_local), "sum", dim)()
            for is_local in (True, False)
        ]
        results.append(torch.equal(*both))
    return results


def test_reduce_scatter_is_the_same_by_either_way(gloo):
    assert gloo.run(run_reduce_scatter) == [[True] * 3] * 4


def test_every_collective_equals_the_virtual_ranks(gloo):
    assert gloo.run(run_collectives) == [[]] * 4


SPECS = [
    (MESH, (4, 6), P()), (MESH, (4, 6), P("dp", "tp")), (MESH, (4, 6), P("tp", "dp")), (MESH, (8, 3), P(("dp", "tp"))),
    (MESH, (8, 3), P(("tp", "dp"))), (MESH, (2, 12), P(None, blocks(3, "tp"))),
    (MESH, (2, 12), P("dp", blocks(3, "tp"))),
    (ACROSS, (8, 6), P(("tp", "dp"))), (ACROSS, (4, 6), P("dp", "tp")),
]  # fmt: skip


def run_border():
    """The cases in which torch's or our own gathering of a DTensor made here differs from the whole."""
    wrong = []
    for mesh, shape, spec in SPECS:
        comm, whole = comm_of(mesh), torch.arange(math.prod(shape)).reshape(shape).float()
        sharding = spec.sharding(mesh, shape, "x")
        piece = shard(whole, sharding, comm.position).contiguous()
        placed = to_global(piece, sharding, shape, comm.device_mesh)
        gathered = gather_whole(comm, piece, sharding, shape, "x")
        if not torch.equal(placed.full_tensor(), whole):
            wrong.append(("torch", mesh, shape, spec, placed.placements))
        if not torch.equal(gathered, whole):
            wrong.append(("ours", mesh, shape, spec))
    return wrong


def test_a_dtensor_made_of_pieces_gathers_to_the_whole(gloo):
    assert gloo.run(run_border) == [[]] * 4


def test_placements_and_sharding_convert_both_ways():
    for mesh, shape, spec in SPECS:
        sharding = spec.sharding(mesh, shape, "x")
        assert sharding_of(placements(sharding, shape), shape, mesh) == sharding


def test_placements_are_those_of_torch():
    def placed(spec, *shape):
        return placements(spec.sharding(MESH, shape, "x"), shape)

    assert placed(P(("dp", "tp")), 8) == (Shard(0), Shard(0))
    assert placed(P(("tp", "dp")), 8) == (_StridedShard(0, split_factor=2), Shard(0))
    assert placed(P(None, blocks(3, "tp")), 2, 12) == (Replicate(), _StridedShard(1, split_factor=3))


def test_a_part_of_an_axis_has_no_placement():
    with pytest.raises(ShardingError) as caught:
        placements(P("dp:(1)2").sharding(WIDE, (8,), "x"), (8,), "parameter 'k.weight'")
    assert str(caught.value).splitlines() == [
        "parameter 'k.weight': [_@dp:(1)2], cut by the part dp:(1)2 of axis 'dp'",
        "  a DTensor is cut by whole axes of the mesh only",
        "  split 'dp' into two axes of the mesh, or leave this value whole over it",
    ]


def test_a_placement_that_torch_would_gather_wrongly_is_refused():
    with pytest.raises(ShardingError, match="torch does not gather such a DTensor rightly"):
        placements(P(blocks(3, "tp", "dp")).sharding(MESH, (24,), "x"), (24,))
    check_order(ACROSS)
    with pytest.raises(ShardingError, match=r"ranks \[2, 1\] along axis 'dp'"):
        check_order(SHUFFLED)


def run_program(program, values):
    comm = comm_of(program.mesh)
    pieces = [cut_inputs(program, values)[comm.position]]
    executor = Executor(program, comm)
    outputs, saved = executor.forward(pieces)
    gradients = executor.backward(saved, pieces)
    return [a if a is not None else b for a, b in zip(outputs[0], gradients[0], strict=True)]


def run_row_parallel():
    torch.manual_seed(0)
    program = row_parallel(MESH)
    values = row_parallel_values(program, row_parallel_inputs())
    whole = simulate(program, values)
    mine = run_program(program, values)
    for node, a, b in zip(program.results, mine, whole, strict=True):
        if b is not None:
            torch.testing.assert_close(a, shard(b, program.sharding(node), comm_of(MESH).position))
    return comm_of(MESH).traffic[0].bytes["all_reduce"]


def test_one_program_runs_the_same_on_both_runtimes(gloo):
    assert len(set(gloo.run(run_row_parallel))) == 1


def run_large_mesh():
    try:
        make_device_mesh(Mesh(dp=8))
    except ShardingError as error:
        return str(error)


def test_a_mesh_larger_than_the_world_is_refused(gloo):
    assert gloo.run(run_large_mesh)[0].splitlines() == [
        "mesh: Mesh(dp=8) has 8 ranks",
        "  the job has 4",
        "  start it with torchrun --nproc-per-node 8, or make the mesh smaller",
    ]


def run_on_the_wire(megabytes, repeats):
    """What the interface and ``Comm`` counted in one round; of several, the one that others disturbed least."""
    comm = comm_of(WIDE)
    x = torch.ones(megabytes * 2**18)
    comm.start("all_gather", [x[:8]], ("dp",), 0)()
    wire = []
    for _ in range(repeats):
        comm.traffic[0].clear()
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        comm.start("all_reduce", [x], ("dp",), "sum")()
        comm.start("reduce_scatter", [x], ("dp",), "sum", 0)()
        comm.start("all_gather", [x], ("dp",), 0)()
        comm.start("all_to_all", [x.view(4, -1)], ("dp",), 1, 0)()
        dist.barrier()
        wire.append(sent_bytes() - before)
    return min(wire), sum(comm.traffic[0].bytes.values())


@pytest.mark.skipif(sent_bytes() is None, reason="no /proc/net/dev")
def test_counted_bytes_are_those_on_the_wire(gloo):
    wire, counted = zip(*gloo.run(run_on_the_wire, 4, 5), strict=True)
    assert min(wire) == pytest.approx(sum(counted), rel=0.01)


@pytest.mark.skipif(sent_bytes() is None, reason="no /proc/net/dev")
def test_a_private_loopback_counts_from_nothing_and_ends_with_its_block():
    before = sent_bytes()
    with private_loopback() as is_private:
        if not is_private:
            pytest.skip("the system does not allow it")
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            client.sendall(bytes(1000))
        inside = int(
            subprocess.run(["cat", "/proc/net/dev"], capture_output=True, text=True).stdout.split("lo:")[1].split()[8]
        )
    assert 1000 < inside < 4000
    assert sent_bytes() >= before > inside


def test_counters_are_read_by_interface():
    text = "Inter-|   Receive |  Transmit\n face |bytes packets\n    lo: 11 2 0 0 0 0 0 0 99 4 0 0 0 0 0 0\n"
    assert parse_counters(text) == {"lo": 99}


def fail_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("this rank has a problem")
    dist.barrier()


@pytest.mark.slow
def test_a_launched_job_returns_results_and_names_the_rank_that_fails():
    assert launch(os.getpid, 1) != [os.getpid()]
    with pytest.raises(RuntimeError, match=r"(?s)\Arank 1 failed:.*ValueError: this rank has a problem\s*\Z") as failed:
        launch(ByPath(__file__, "fail_on_one_rank"), 2)
    assert "rank 0" not in str(failed.value)  # which waited for rank 1


def die_on_one_rank():
    comm = comm_of(Mesh(dp=2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather_whole(comm, torch.zeros(2), P("dp").sharding(comm.mesh, (4,), "x"), (4,), "output 'logits'")


@pytest.mark.sweep
def test_a_launched_job_says_how_a_rank_died_and_where_another_waited_for_it():
    with pytest.raises(RuntimeError) as failed:
        launch(ByPath(__file__, "die_on_one_rank"), 2)
    assert str(failed.value).splitlines() == [
        "rank 1 died with exit code -9, SIGKILL",
        "rank 0 was in the gather of output 'logits' over dp, ranks 0, 1: rank 1 is gone",
    ]


def sleep_long(folder):
    (folder / f"{os.getpid()}.tmp").touch()
    (folder / f"{os.getpid()}.tmp").rename(folder / f"{os.getpid()}")
    time.sleep(600)


def launch_sleepers(folder):
    launch(ByPath(__file__, "sleep_long"), 2, folder)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_no_rank_of_a_launched_job_outlives_a_parent_that_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=ByPath(__file__, "launch_sleepers"), args=(tmp_path,))
    parent.start()
    until(lambda: len([each for each in tmp_path.iterdir() if not each.suffix]) == 2)
    parent.kill()
    parent.join()
    until(lambda: all(has_ended(int(each.name)) for each in tmp_path.iterdir()))


def make_group_after_one_of_some_ranks():
    """The error of ranks 1 and 2 for a group of theirs, where rank 1 is in a group more."""
    comm_of(MESH)
    dist.new_group([0, 1])
    dist.barrier()  # or rank 0 might end the group while rank 1 still makes it
    if dist.get_rank() in (1, 2):
        with pytest.raises(ShardingError) as error:
            process_group_of((1, 2))
        return str(error.value)


def test_ranks_in_different_numbers_of_groups_are_told_rather_than_left_waiting():
    """In processes of its own: the groups of those that all tests share depend on the tests before."""
    told = (
        "ranks 1, 2: making their process group\n  some of them are in more groups than others, as torch counts\n"
        "  make the meshes of all ranks, and run their modules once, before meshes of some ranks"
    )
    assert launch(ByPath(__file__, "make_group_after_one_of_some_ranks"), 4) == [None, told, told, None]
