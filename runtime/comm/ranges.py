"""Whether ops are being traced or profiled, and named ranges in a profile: ``phase/module/op``, as in predicted traces.

``torch.profiler.profile`` records the ranges, and ``torch.autograd.profiler.emit_nvtx`` hands them on to NVTX. Without
a profiler there are none, and they cost nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode

WAIT = " (wait)"  # a collective has a range where it is started, and this one where it is waited for
NO_RANGE: AbstractContextManager[Any] = nullcontext()


def is_traced() -> bool:
    """Whether ops are recorded by a dispatch mode: then each of them must be pure."""
    return _get_current_dispatch_mode() is not None


def is_profiled() -> bool:
    """Whether a profiler is on and ops run, rather than being recorded."""
    return profiler._is_profiler_enabled and not is_traced()


def in_range(name: str) -> AbstractContextManager[Any]:
    """A range of this name under a profiler, else nothing."""
    return record_function(name) if is_profiled() else NO_RANGE
