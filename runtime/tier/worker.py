"""A thread that copies or steps beside computation, which a process that is forked has of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Worker:
    """A thread that calls functions one after the other, in the order in which they are submitted.

    It starts at the first of them. A process that is forked has no threads of the other one, and starts its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Let the thread call a function; the future has what it returns."""
        return self._executor.submit(function, *args, **kwargs)

    def _begin(self) -> None:
        self._executor = ThreadPoolExecutor(1, self.name)
