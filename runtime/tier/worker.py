"""A thread that copies or steps during computation; each forked process has its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Worker:
    """A thread that calls functions one after the other, in the order of submission.

    It starts at the first function. A forked process does not inherit threads, and starts its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Let the thread call a function; the future has its result."""
        return self._executor.submit(function, *args, **kwargs)

    def _begin(self) -> None:
        self._executor = ThreadPoolExecutor(1, self.name)
