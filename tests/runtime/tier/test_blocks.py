"""Steps in blocks are those of the whole to the bit, for each optimizer of elementwise steps; states are in files."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import shardc
from shardc import Zero
from shardc.runtime.comm.dtensor import local
from shardc.runtime.tier import blocks, files
from shardc.runtime.tier.files import folder_of
from shardc.runtime.tier.stepping import ELEMENTWISE

ROWS, WIDTH = 1108, 1023  # a rank has 277 rows, whose bytes are a little over 1 MB
MAKES: dict[str, Any] = {each.__name__: partial(each, lr=0.01) for each in ELEMENTWISE}
MAKES["SGD"] = partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
MAKES |= {
    "SGD without states": partial(optim.SGD, lr=0.1),
    "Adam, amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
}


def parallel_on(to: Any, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    mesh, zero = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), Zero("dp", 3, offload="parameters", to=to)
    model = nn.Linear(WIDTH, rows, dtype=dtype)
    return shardc.parallelize(model, mesh, {}, zero=zero)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Blocks of a quarter of a rank's weight and less."""
    with mock.patch.object(blocks, "BLOCK", 2**18):
        yield


def stepped_thrice(weight: Any, start: Tensor, make: Any, in_blocks: bool = True) -> list[Tensor]:
    """A weight and its states; after the first step the optimizer's state is loaded, as from a checkpoint."""
    local(weight).copy_(start)
    optimizer, generator = make([weight]), torch.Generator().manual_seed(0)
    for step in range(3):
        weight.grad = torch.empty_like(weight)
        local(weight.grad).normal_(generator=generator)
        blocks.Blocks().step(optimizer) if in_blocks else optimizer.step()
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = optimizer.state[weight]
    return [local(weight).clone(), *(_own(states[key]) for key in sorted(states) if states[key] is not None)]


def _own(state: Any) -> Tensor:
    return local(state) if state.ndim else state


def compared(folder: Path) -> dict[str, tuple[bool, bool]]:
    """By optimizer whether all is the same, and whether states are in files."""
    weight, found = parallel_on(folder).weight, {}
    start = local(weight).detach().clone()
    for name, make in MAKES.items():
        whole = stepped_thrice(weight, start, make, in_blocks=False)
        with small_blocks():
            stepped = stepped_thrice(weight, start, make)
        found[name] = are_equal(whole, stepped), {folder_of(each) for each in stepped[1:] if each.ndim} <= {str(folder)}
    with small_blocks(), mock.patch.object(files, "LARGE", 2**40):
        whole, mapped = stepped_thrice(weight, start, make, in_blocks=False), stepped_thrice(weight, start, make)
    found["states that are mapped alone"] = are_equal(whole, mapped), not any(map(files.is_open, mapped))
    return found


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_steps_in_blocks_are_those_of_the_whole(gloo: GlooPool, tmp_path: Path) -> None:
    for found in gloo.run(compared, tmp_path):
        assert found == dict.fromkeys([*MAKES, "states that are mapped alone"], (True, True))
    assert not list(tmp_path.iterdir())


def in_bfloat16(to: Any, make: Any) -> tuple[list[Tensor], bool]:
    """Parameters and states of this rank after two steps in backward, and whether the weight is stepped in blocks."""
    parallel = parallel_on(to, rows=2 * ROWS, dtype=torch.bfloat16)
    optimizer, generator = make(parallel.parameters()), torch.Generator().manual_seed(0)
    for _ in range(2):
        x = torch.randn(8, WIDTH, generator=generator).bfloat16()
        with small_blocks(), shardc.step_in_backward(parallel, optimizer):
            parallel(x).square().sum().backward()
    states = [_own(state[key]) for state in optimizer.state.values() for key in sorted(state) if state[key] is not None]
    weight: Any = parallel.weight
    with small_blocks():
        has_blocks = blocks.steps_in_blocks(weight) and local(weight).nbytes > blocks.BLOCK
    return [*map(local, parallel.parameters()), *states], has_blocks


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_in_bfloat16_are_those_of_steps_in_host_memory(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    found, wanted = gloo.run(in_bfloat16, tmp_path, MAKES[name]), gloo.run(in_bfloat16, "host", MAKES[name])
    for (own, has_blocks), (expected, _) in zip(found, wanted, strict=True):
        assert has_blocks and own[0].dtype == torch.bfloat16 and are_equal(own, expected)


def seen_by_hooks(folder: Path) -> tuple[list[list[int]], bool, bool]:
    """The parameters that hooks see in each step, whether versions count it, and whether it goes on after an error."""
    parallel, seen = parallel_on(folder), list[list[int]]()
    weight: Any = parallel.weight
    optimizer, x = optim.AdamW(parallel.parameters()), torch.ones(8, WIDTH)
    names = {id(each): i for i, each in enumerate(parallel.parameters())}
    counting = register_optimizer_step_post_hook(
        lambda part, *_: seen.append([names[id(each)] for each in part.param_groups[0]["params"]])
    )
    versions = weight._version, local(weight)._version
    with small_blocks(), shardc.step_in_backward(parallel, optimizer):
        parallel(x).sum().backward()
    counting.remove()
    is_counted = weight._version > versions[0] and local(weight)._version > versions[1]
    return sorted(seen), is_counted, _goes_on_after_an_error(parallel, optimizer, x)


def _goes_on_after_an_error(parallel: nn.Module, optimizer: Optimizer, x: Tensor) -> bool:
    loss, failing = parallel(x).sum(), mock.patch.object(files.os, "pwritev", side_effect=OSError(errno.EIO, "planted"))
    with pytest.raises(OSError, match="planted"), failing, shardc.step_in_backward(parallel, optimizer):
        loss.backward()
    parallel.zero_grad()
    weight: Any = parallel.weight
    before = local(weight).clone()
    with shardc.step_in_backward(parallel, optimizer):
        parallel(x).sum().backward()
    return not torch.equal(before, local(weight)) and bool(local(weight).isfinite().all())


def test_hooks_see_parameters_versions_count_steps_and_a_disk_that_fails_is_told(
    gloo: GlooPool, tmp_path: Path
) -> None:
    assert gloo.run(seen_by_hooks, tmp_path) == [([[0], [0, 1], [1]], True, True)] * 4
