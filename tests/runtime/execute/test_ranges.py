"""Profiler ranges: every op and collective of a measured step has the name that the predicted trace gives it."""

import json
from pathlib import Path
from typing import Any

import torch
from gloo_pool import GlooPool
from gpt import gpt
from torch.profiler import ProfilerActivity, profile

import shardc
from shardc import Mesh
from shardc.costs.step_time import OPERANDS_COPIED, OPTIMIZER, RESULTS_COPIED, Slice
from shardc.ops.contraction import dot
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.comm.process_group import WAIT


def profiled(mesh: Any, path: str) -> tuple[list[str], Any]:
    """The names in the trace of a step, which was written and read again; the program."""
    model, args, kwargs, annotations = gpt()
    parallel = shardc.parallelize(model, mesh, annotations, args=args, kwargs=kwargs)
    optimizer = torch.optim.SGD(parallel.parameters())

    def step() -> None:
        parallel(*args, **kwargs).backward()
        optimizer.step()  # gradients are reduced when they are read
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    found.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return [name for name in ranges if name.count("/") >= 2], parallel.program


def predicted(program: Any) -> list[str]:
    """The names of a predicted step. Copies have the names of their collectives, in whose ranges they are measured."""
    return [
        task.name.text.removesuffix(OPERANDS_COPIED).removesuffix(RESULTS_COPIED)
        for task in program.timeline.tasks
        if isinstance(task.name, Slice) and not task.name.is_share
    ]


def test_a_measured_step_has_the_ranges_of_the_predicted_one(tmp_path: Path) -> None:
    names, program = profiled(Mesh(dp=2, tp=2), str(tmp_path / "trace.json"))
    absent = {name.rpartition("/")[2] for name in predicted(program)} - {name.rpartition("/")[2] for name in names}
    biased = {node.name for node in program.graph.nodes if "add" in node.name and node.all_input_nodes[0].target is dot}
    assert absent <= {OPTIMIZER, *biased}  # a bias is added by the product's kernel
    modules = {program.program.source(node).module for node in program.program.calls} - {""}
    assert modules <= {name.split("/")[1] for name in names}
    for each in program.collectives:
        assert sum(name.endswith(f"/{each.name}") for name in names) == 1
        assert sum(name.endswith(f"/{each.name}{WAIT}") for name in names) == 1


def on_a_rank(path: str) -> tuple[list[str], list[str]]:
    mesh = make_device_mesh(Mesh(dp=2, tp=2))
    names, program = profiled(mesh, f"{path}{torch.distributed.get_rank()}")
    return names, [each.name for each in program.collectives]


def test_on_real_ranks_every_collective_is_started_and_waited_for_once(gloo: GlooPool, tmp_path: Path) -> None:
    for names, collectives in gloo.run(on_a_rank, str(tmp_path / "trace")):
        for each in collectives:
            assert sum(name.endswith(f"/{each}") for name in names) == 1
            assert sum(name.endswith(f"/{each}{WAIT}") for name in names) == 1
