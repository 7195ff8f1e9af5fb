"""Ctrl-C on a waiting rank: a signal raises KeyboardInterrupt only in Python, to which gloo's waits do not return."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PATIENCE = 0.3  # seconds for the main thread to return to Python by itself


@dataclass(slots=True)
class _Watch:
    """The state of the thread that is woken by signals.

    ``fd``: the file descriptor to which Python writes a signal's number. ``run``: the number of the main thread's
    current block, or 0. ``runs``: the number of blocks so far.
    """

    fd: int
    run: int = 0
    runs: int = 0


@contextlib.contextmanager
def interruptible(end_waits: Callable[[], None]) -> Iterator[None]:
    """Context that Ctrl-C can end even while it waits for other ranks; ``end_waits`` makes such a wait fail.

    Python writes signals to one file descriptor (``signal.set_wakeup_fd``). If an event loop has set it, this does
    nothing. A program that handles Ctrl-C itself sees no change.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _watch(end_waits)
    before = signal.set_wakeup_fd(watch.fd, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        yield
        return
    watch.runs += 1
    watch.run = watch.runs
    try:
        yield
    finally:
        watch.run = 0
        signal.set_wakeup_fd(-1)


@functools.cache
def _watch(end_waits: Callable[[], None]) -> _Watch:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watch = _Watch(writer)
    threading.Thread(target=_listen, args=(reader, watch, end_waits), name="shardc Ctrl-C", daemon=True).start()
    return watch


def _listen(reader: int, watch: _Watch, end_waits: Callable[[], None]) -> None:
    while numbers := os.read(reader, 64):
        run = watch.run
        if signal.SIGINT in numbers and run and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(PATIENCE)
            if watch.run == run:
                end_waits()
