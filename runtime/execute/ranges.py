"""Ranges in a measured trace: under a profiler each call runs within ``phase/module/op``, as in the predicted one.

``torch.profiler.profile`` records them, and ``torch.autograd.profiler.emit_nvtx`` hands them on to NVTX. Without a
profiler there are none, and they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from ..comm.functional import is_traced
from .instruction import Env, Instruction

WAIT = " (wait)"  # a collective's range is where it is started, this one where it is waited for
NONE: AbstractContextManager[Any] = nullcontext()


def is_profiled() -> bool:
    """Whether a profiler is on, and ops run rather than being recorded for a compiler."""
    return profiler._is_profiler_enabled and not is_traced()


def in_range(name: str) -> AbstractContextManager[Any]:
    """A range under a profiler, else nothing."""
    return record_function(name) if is_profiled() else NONE


def in_ranges(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """The instructions, the call of each in a range of its name."""
    return (replace(each, call=partial(_ranged, each)) if each.name else each for each in instructions)


def _ranged(each: Instruction, env: Env) -> Any:
    with record_function(each.name):
        return each.call(env)
