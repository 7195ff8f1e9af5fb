"""Runs instructions over the ranks that live in this process: one instruction after the other, or as generated code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from shardc.language.errors import CaptureError, ShardingError, note_place_in_model

from ..comm.comm import Comm, start_packed
from ..comm.ranges import WAIT, in_range, is_profiled
from .code import RepeatedInstructions
from .instruction import Env, Instruction

Values = Sequence[Tensor | None]  # parallel to a program's inputs, or to its outputs
Places = Mapping[tuple[int, int], int]  # by slot and bucket member of a gather, the index of a program's output
Wait = Callable[[], Sequence[Any]]  # waits for a collective, and returns its results


def run(instructions: Iterable[Instruction], envs: Sequence[Env], comm: Comm | None, places: Places | None = None,
        into: Sequence[Values] = ()) -> None:  # fmt: skip
    """Run instructions, with one ``Env`` for each rank of ``comm`` that lives in this process.

    Collectives are started in program order, which is the same on every rank, and waited for before their first reader.
    ``into``: for each rank, parallel to the program's outputs, tensors that the gathers in ``places`` may write to.
    """
    if isinstance(instructions, RepeatedInstructions) and len(envs) == 1 and not is_profiled():
        if (code := instructions.code()) is not None:
            try:
                code.run(envs[0], lambda each, rows, buffer: _start(each, rows, comm, places or {}, into, buffer))
            except Exception as error:
                if (failed := code.instruction_of(error)) is not None:
                    _add_location(error, failed)
                raise
            return
    started: dict[int, tuple[Instruction, Wait]] = {}
    for each in instructions:
        for slot in each.waits:
            if slot in started:
                _finish(*started.pop(slot), envs)
        if each.collective:
            rows = [[env[slot] for slot in each.reads] for env in envs]
            with in_range(each.name):
                started[each.result] = each, _start(each, rows, comm, places or {}, into)
        else:
            _call(each, envs)
        for slot, env in product(each.dead, envs):
            env[slot] = None
    for each, wait in started.values():
        _finish(each, wait, envs)


def _call(each: Instruction, envs: Sequence[Env]) -> None:
    """Run an instruction that is no collective."""
    call, result, has_range = each.call, each.result, bool(each.name) and is_profiled()
    try:
        for env in envs:
            if has_range:
                with in_range(each.name):
                    env[result] = call(env)
            else:
                env[result] = call(env)
    except Exception as error:
        _add_location(error, each)
        raise


def _add_location(error: Exception, each: Instruction) -> None:
    """Add the line of the model to the error of an op; an index out of bounds comes from the user's data."""
    location = f"{each.line or 'the model'}, {each.name}"
    if isinstance(error, IndexError) or "out of bounds" in str(error):
        note_place_in_model(error, location)
    elif not isinstance(error, (CaptureError, ShardingError)):
        error.add_note(f"in {location}")


def _start(each: Instruction, rows: Sequence[Sequence[Any]], comm: Comm | None, places: Places, into: Sequence[Values],
           buffer: Tensor | None = None) -> Wait:  # fmt: skip
    """Start a collective of operands, one row for each rank, or of the ``buffer`` that contains them."""
    assert comm is not None, each
    if each.layout is not None and buffer is not None:
        return start_packed(comm, each.layout, [buffer])
    outputs = [places.get((each.result, member)) for member in range(len(each.reads))] if into else []
    targets = [[None if i is None else values[i] for i in outputs] for values in into]
    if each.layout is not None:
        return comm.start_bucket(each.layout, rows, targets)
    xs, own = [row[0] for row in rows], [target for target, *_ in targets]
    return comm.start(each.collective, xs, *each.args[1:], is_own=each.is_own, into=own)


def _finish(each: Instruction, wait: Wait, envs: Sequence[Env]) -> None:
    """Wait for the results of a collective, and store them in its slot."""
    with in_range(each.name + WAIT):
        results = wait()
    for env, result in zip(envs, results, strict=True):
        env[each.result] = result
