"""A step of an optimizer on parameters in files, block by block.

Elements of a parameter, of its gradient and of its states are read into memory, stepped there by the optimizer's own
code, and written while the next block is read and stepped. The numbers are those of a step of the whole
parameter, since the steps are elementwise. Little is in memory at a time, and it fits into a processor's cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

BLOCK = 2**20  # bytes of a tensor that are stepped at a time
PAGE = 4096  # where memory begins that is transferred past the page cache
PARAMETER, GRADIENT = "a parameter", "a gradient"  # beside the names of an optimizer's states
Tensors = dict[str, Tensor]


def steps_in_blocks(parameter: Tensor) -> bool:
    """Whether a parameter is in a file from which blocks are read."""
    return isinstance(parameter, DTensor) and is_open(local(parameter))


def part_of(optimizer: Optimizer) -> Any:
    """An optimizer with the same states, whose parameters can be set."""
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    return part


class Blocks:
    """Steps of parameters in blocks, and the memory of two blocks: one is written while the other is read and stepped.

    State: ``_memory``, of the tensors of these blocks by name, which serves all parameters.
    """

    def __init__(self) -> None:
        self._memory = Tensors(), Tensors()

    def step(self, optimizer: Optimizer) -> None:
        """Step the parameters of an optimizer, each of which ``steps_in_blocks``, as ``optimizer.step()`` does."""
        Optimizer.profile_hook_step(self._step_all)(optimizer)  # so that its hooks see the parameters

    @torch.no_grad()
    def _step_all(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(optimizer, group, parameter)

    def _step(self, optimizer: Optimizer, group: Mapping[str, Any], parameter: Any) -> None:
        """Step a parameter. States that the step makes are made for all of it with the first block."""
        state, writing = optimizer.state.get(parameter, {}), list[Future[None]]()
        of_elements, others = _divided(state, parameter)
        written = {PARAMETER: parameter, **of_elements}
        flat = {name: local(each).view(-1) for name, each in written.items()}
        flat[GRADIENT] = local(parameter.grad).reshape(-1)
        try:
            for part, block in self._blocks(dict(flat), writing):
                stepped, rest = _stepped(optimizer, group, block, others)
                for name in stepped.keys() - flat.keys():
                    written[name] = state[name] = torch.empty_like(parameter, dtype=stepped[name].dtype)
                    flat[name] = local(state[name]).view(-1)
                writing.append(TRANSFERRING.submit(_write, {name: flat[name][part] for name in stepped}, stepped))
        finally:
            wait(writing)  # the memory of their blocks serves other parameters
        for each in writing:
            each.result()
        state.update(rest)
        if state:
            optimizer.state[parameter] = state
        increment_version([parameter, *map(local, written.values())])

    def _blocks(self, flat: Tensors, writing: Sequence[Future[None]]) -> Iterator[tuple[slice, Tensors]]:
        """Elements, and what is in them, read once the memory of the block before the last one is written."""
        size = BLOCK // max(each.itemsize for each in flat.values())
        for i, begin in enumerate(range(0, flat[PARAMETER].numel(), size)):
            if i > 1:
                writing[i - 2].result()
            part = slice(begin, begin + size)
            yield part, self._read(flat, part, i % 2)

    def _read(self, flat: Tensors, part: slice, turn: int) -> Tensors:
        """Elements of tensors: copies of what is in files, and views of what is in memory.

        A parameter and a gradient come from the page cache, since backward has just read the one and made the other.
        """
        block = {name: each[part] for name, each in flat.items()}
        memory = self._memory[turn]
        for name, each in block.items():
            if is_open(each):
                if name not in memory:
                    memory[name] = _memory_of_block()
                place = memory[name][: each.nbytes].view(each.dtype)
                block[name] = read(each, place, is_cached=name in (PARAMETER, GRADIENT))
        return block


def _write(block: Tensors, stepped: Tensors) -> None:
    for name, values in stepped.items():
        if values.data_ptr() != block[name].data_ptr():  # else it was stepped where it is
            write(block[name], values, is_cached=False)


def _memory_of_block() -> Tensor:
    """Memory for a tensor of a block, from the beginning of a page."""
    memory = torch.empty(BLOCK + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:BLOCK]


def _divided(state: Mapping[str, Any], parameter: Tensor) -> tuple[Tensors, dict[str, Any]]:
    """The states that have an element for each of a parameter's, and the others, such as a count of steps."""
    names = {name for name, each in state.items() if isinstance(each, Tensor) and each.shape == parameter.shape}
    return {name: state[name] for name in names}, {name: each for name, each in state.items() if name not in names}


def _stepped(optimizer: Optimizer, group: Mapping[str, Any], block: Tensors,
             others: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:  # fmt: skip
    """A block of a parameter and of its states after a step, and the other states."""
    part, parameter = part_of(optimizer), nn.Parameter(block[PARAMETER])
    parameter.grad_dtype, parameter.grad = block[GRADIENT].dtype, block[GRADIENT]
    states = {name: each for name, each in block.items() if name not in (PARAMETER, GRADIENT)}
    states |= {name: each.clone() if isinstance(each, Tensor) else each for name, each in others.items()}
    part.param_groups = [{**group, "params": [parameter]}]
    part.state = defaultdict(dict, {parameter: states})
    type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]  # without its hooks
    stepped, rest = _divided(part.state[parameter], parameter)
    return {**stepped, PARAMETER: block[PARAMETER]}, rest
