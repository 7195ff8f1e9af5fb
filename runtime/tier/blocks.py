"""A step of an optimizer on parameters in files, block by block.

A block of a parameter, of its gradient and of its states is read into memory, stepped there by the optimizer's own
code, and written. Meanwhile the next block is read and the last one is written, so three blocks are in memory at a
time. The results equal those of a step of the whole parameter, since steps are elementwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..comm.dtensor import local
from .files import is_open, read, write
from .tier import TRANSFERRING
from .worker import Worker

BLOCK = 2**21  # bytes of a tensor that are stepped at a time
NUM_BLOCKS = 3  # in memory: one is read, one is stepped, one is written
WRITING = Worker("shardc-write")  # one thread, apart from the one that reads
PAGE = 4096  # alignment of memory for transfers past the page cache
PARAMETER, GRADIENT = "a parameter", "a gradient"  # keys next to the names of an optimizer's states
Tensors = dict[str, Tensor]
Futures = list[Future[Any]]


def steps_in_blocks(parameter: Tensor) -> bool:
    """Whether a parameter is in a file that blocks can be read from."""
    return isinstance(parameter, DTensor) and is_open(local(parameter))


def part_of(optimizer: Optimizer) -> Any:
    """An optimizer with the same states, whose parameters can be set."""
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    return part


class Blocks:
    """Steps parameters in blocks.

    State: ``_memory``, for each of the blocks in memory that of its tensors by name, shared by all parameters.
    """

    def __init__(self) -> None:
        self._memory = [Tensors() for _ in range(NUM_BLOCKS)]

    def step(self, optimizer: Optimizer) -> None:
        """Do ``optimizer.step()`` in blocks; ``steps_in_blocks`` must hold for all its parameters."""
        Optimizer.profile_hook_step(self._step_all)(optimizer)  # runs the optimizer's hooks

    @torch.no_grad()
    def _step_all(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(optimizer, group, parameter)

    def _step(self, optimizer: Optimizer, group: Mapping[str, Any], parameter: Any) -> None:
        """Step a parameter. States that the step of the first block creates are created for the whole parameter."""
        state, reading, writing = optimizer.state.get(parameter, {}), Futures(), Futures()
        of_elements, others = _divided(state, parameter)
        written = {PARAMETER: parameter, **of_elements}
        flat = {name: local(each).view(-1) for name, each in written.items()}
        flat[GRADIENT] = local(parameter.grad).reshape(-1)
        try:
            for part, block in self._blocks(dict(flat), reading, writing):
                stepped, rest = _stepped(optimizer, group, block, others)
                for name in stepped.keys() - flat.keys():
                    written[name] = state[name] = torch.empty_like(parameter, dtype=stepped[name].dtype)
                    flat[name] = local(state[name]).view(-1)
                writing.append(WRITING.submit(_write, {name: flat[name][part] for name in stepped}, stepped))
        finally:
            wait((*reading, *writing))  # before other parameters reuse the blocks' memory
        for each in writing:
            each.result()
        state.update(rest)
        if state:
            optimizer.state[parameter] = state
        increment_version([parameter, *map(local, written.values())])

    def _blocks(self, flat: Tensors, reading: Futures, writing: Futures) -> Iterator[tuple[slice, Tensors]]:
        """Yield the slice and the tensors of each block in turn, while a thread reads the next one.

        ``reading`` and ``writing``: for each block so far its read, and its write, which the caller appends. A block
        is read into the memory of an earlier one that has been written.
        """
        size = BLOCK // max(each.itemsize for each in flat.values())
        parts = [slice(begin, begin + size) for begin in range(0, flat[PARAMETER].numel(), size)]
        for i, part in enumerate(parts):
            if i >= NUM_BLOCKS:
                writing[i - NUM_BLOCKS].result()
            reading.append(TRANSFERRING.submit(self._read, flat, part, i % NUM_BLOCKS))
            if i:
                yield parts[i - 1], reading[i - 1].result()
        yield parts[-1], reading[-1].result()

    def _read(self, flat: Tensors, part: slice, turn: int) -> Tensors:
        """A block of tensors: copies for tensors in files, views for tensors in memory.

        A gradient goes through the page cache, since backward has just made it.
        """
        block = {name: each[part] for name, each in flat.items()}
        memory = self._memory[turn]
        for name, each in block.items():
            if is_open(each):
                if name not in memory:
                    memory[name] = _memory_of_block()
                place = memory[name][: each.nbytes].view(each.dtype)
                block[name] = read(each, place, is_cached=name == GRADIENT)
        return block


def _write(block: Tensors, stepped: Tensors) -> None:
    for name, values in stepped.items():
        if values.data_ptr() != block[name].data_ptr():  # else it was stepped in place
            write(block[name], values, is_cached=False)


def _memory_of_block() -> Tensor:
    """Memory for a tensor of a block, aligned to a page."""
    memory = torch.empty(BLOCK + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:BLOCK]


def _divided(state: Mapping[str, Any], parameter: Tensor) -> tuple[Tensors, dict[str, Any]]:
    """The states of a parameter's shape, and the others, such as a step count."""
    names = {name for name, each in state.items() if isinstance(each, Tensor) and each.shape == parameter.shape}
    return {name: state[name] for name in names}, {name: each for name, each in state.items() if name not in names}


def _stepped(optimizer: Optimizer, group: Mapping[str, Any], block: Tensors,
             others: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:  # fmt: skip
    """Step a block. Returns the block of the parameter and of its states afterwards, and the other states."""
    part, parameter = part_of(optimizer), nn.Parameter(block[PARAMETER])
    parameter.grad_dtype, parameter.grad = block[GRADIENT].dtype, block[GRADIENT]
    states = {name: each for name, each in block.items() if name not in (PARAMETER, GRADIENT)}
    states |= {name: each.clone() if isinstance(each, Tensor) else each for name, each in others.items()}
    part.param_groups = [{**group, "params": [parameter]}]
    part.state = defaultdict(dict, {parameter: states})
    type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]  # without hooks
    stepped, rest = _divided(part.state[parameter], parameter)
    return {**stepped, PARAMETER: block[PARAMETER]}, rest
