"""A process that is forked from one which has fetched and stepped goes on with what is offloaded, and never hangs."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Zero
from shardc.language.errors import OrderError
from shardc.runtime.tier import stepping


def in_child(compute: Callable[[], Any]) -> str:
    """What a function returns in a forked process, as text; nothing where it raises an error."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writer, repr(compute()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    has_ended = bool(select.select([reader], [], [], 20)[0])
    answer = os.read(reader, 2**16).decode() if has_ended else "it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return answer


def offloaded(to: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module of this rank alone, and its optimizer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a process that is forked lacks the others
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("alone", "dp"))["dp"]
    parallel = shardc.parallelize(nn.Linear(8, 4), mesh, {}, zero=Zero("dp", 3, offload="parameters", to=to))
    return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1)


def forked(to: str) -> dict[str, tuple[str, str]]:
    """By what is done, the answers of a child and of this process, which goes on after it."""
    (parallel, optimizer), x = offloaded(to), torch.ones(2, 8)

    def call() -> list[float]:
        with torch.no_grad():
            return parallel(x).flatten().tolist()

    def step() -> list[float]:
        with shardc.step_in_backward(parallel, optimizer):
            parallel(x).sum().backward()
        return call()

    step()
    found = {"call": (in_child(call), repr(call()))}
    before = [each.detach().clone() for each in parallel.parameters()]
    in_a_child = in_child(step)
    for each, value in zip(parallel.parameters(), before, strict=True):  # which a file has shared with it
        each.data.copy_(value)
    return {**found, "step": (in_a_child, repr(step()))}


@pytest.mark.parametrize("to", ["host", "folder"])
def test_a_forked_process_goes_on(gloo: GlooPool, tmp_path: Path, to: str) -> None:
    for found in gloo.run(forked, to if to == "host" else str(tmp_path)):
        for what, (in_a_child, here) in found.items():
            assert in_a_child == here, what


def forked_in_the_block() -> tuple[str, bool]:
    """What a child is told that ends the block, and whether this process steps."""
    (parallel, optimizer), may_step = offloaded("host"), threading.Event()
    before = [each.detach().clone() for each in parallel.parameters()]
    loss, block = parallel(torch.ones(2, 8)).sum(), shardc.step_in_backward(parallel, optimizer)
    with block:
        stepping.WORKER.submit(may_step.wait)
        loss.backward()
        answer = in_child(lambda: ended(block))
        may_step.set()
    return answer, not any(map(torch.equal, before, parallel.parameters()))


def ended(block: Any) -> str:
    try:
        block.__exit__(None, None, None)
    except OrderError as error:
        return str(error)
    return "no error"


def test_steps_that_had_begun_before_a_fork_are_an_error_in_the_child(gloo: GlooPool) -> None:
    for answer, has_stepped in gloo.run(forked_in_the_block):
        assert "forked in its block" in answer and "fork before the block, or after it" in answer
        assert has_stepped
