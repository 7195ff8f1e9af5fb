"""Runs instructions over the ranks that live in this process: one after the other, or as the code made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardc.error import CaptureError, ShardingError, raised_by_model

from .code import Code, Part
from .comm import Starter
from .flat import start_packed
from .instruction import Env, Instruction
from .late import late
from .ranges import WAIT, in_range, in_ranges, is_profiled

Values = Sequence[Tensor | None]  # parallel to a program's inputs, or to its outputs


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that is under way."""

    instruction: Instruction
    results: Callable[[], Sequence[Any]]

    def wait(self) -> Sequence[Any]:
        """Its results."""
        with in_range(self.instruction.name + WAIT):
            return self.results()

    def finish(self, envs: Sequence[Env]) -> None:
        """Wait for it, and put its results where they are read."""
        for env, result in zip(envs, self.wait(), strict=True):
            env[self.instruction.result] = result


def run(
    instructions: Iterable[Instruction],
    envs: Sequence[Env],
    comm: Starter | None,
    kept: Mapping[tuple[int, int], int] | None = None,
    into: Sequence[Values] = (),
) -> None:
    """Run instructions, an ``Env`` for each rank of ``comm`` that lives in this process.

    Collectives are started in the order of the program, which is the same on every rank, and waited for late.
    ``into``: for each rank tensors where what gathers make may be put, ``kept`` by slot and member.
    """
    if isinstance(instructions, Part) and len(envs) == 1 and not is_profiled():
        if (code := instructions.code()) is not None:
            _run_code(code, envs[0], comm, kept or {}, into)
            return
    started: dict[int, Started] = {}
    for each in in_ranges(instructions) if is_profiled() else instructions:
        for slot in each.waits:
            if slot in started:
                started.pop(slot).finish(envs)
        if each.collective:
            rows = [[env[slot] for slot in each.reads] for env in envs]
            with in_range(each.name):
                begun = Started(each, _start(each, rows, comm, kept or {}, into))
            if each.is_late:
                ((operand,),), (env,) = rows, envs
                env[each.result] = late(operand, begun.wait)
            else:
                started[each.result] = begun
        else:
            _call(each, envs)
        for slot in each.dead:
            for env in envs:
                env[slot] = None
    for left in started.values():
        left.finish(envs)


def _call(each: Instruction, envs: Sequence[Env]) -> None:
    """Run an instruction that sends nothing."""
    call, result = each.call, each.result
    try:
        for env in envs:
            env[result] = call(env)
    except Exception as error:
        _note_place(error, each)
        raise


def _note_place(error: Exception, each: Instruction) -> None:
    """Say where in the model an op failed; an index that is out of bounds is in what the user gave."""
    place = f"{each.line or 'the model'}, {each.name}"
    if isinstance(error, IndexError) or "out of bounds" in str(error):
        raised_by_model(error, place)
    elif not isinstance(error, (CaptureError, ShardingError)):
        error.add_note(f"in {place}")


def _run_code(
    code: Code, env: Env, comm: Starter | None, kept: Mapping[tuple[int, int], int], into: Sequence[Values]
) -> None:
    try:
        code.run(env, lambda each, rows, buffer: _start(each, rows, comm, kept, into, buffer))
    except Exception as error:
        if (each := code.place(error)) is not None:
            _note_place(error, each)
        raise


def _start(
    each: Instruction,
    rows: Sequence[Sequence[Any]],
    comm: Starter | None,
    kept: Mapping[tuple[int, int], int],
    into: Sequence[Values],
    buffer: Tensor | None = None,
) -> Callable[[], Sequence[Any]]:
    """Start a collective of operands, for each rank a row, or of the ``buffer`` they are in; what waits for it."""
    assert comm is not None, each
    places = _places(each, kept, into) if into else ()
    if each.flat is not None:
        return comm.start_bucket(each.flat, rows, places) if buffer is None else start_packed(comm, each.flat, [buffer])
    xs, first = [row[0] for row in rows], [place for place, *_ in places]
    return comm.start(each.collective, xs, *each.args[1:], is_own=each.is_own, into=first)


def _places(
    each: Instruction, kept: Mapping[tuple[int, int], int], into: Sequence[Values]
) -> list[list[Tensor | None]]:
    """Where the results of a collective may be put, for each rank a row."""
    results = [kept.get((each.result, i)) for i in range(len(each.reads))]
    return [[None if i is None else values[i] for i in results] for values in into]
