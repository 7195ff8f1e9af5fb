"""Worker processes: results are those of the function, and lost items are left to the caller."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from left_processes import no_process_left

from shardc.search.pricing.workers import Workers


def work(item: int) -> tuple[int, int]:
    """Square a number and name the process; 3 is an error, 5 kills the process, 7 takes long."""
    if item == 3:
        raise ValueError
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30.0 if item == 7 else 0.01)
    return item**2, os.getpid()


def test_each_item_has_its_result_from_another_process() -> None:
    workers = Workers(work, 3)
    found = dict(workers.map(range(8, 48)))
    workers.close()
    assert {item: square for item, (square, _) in found.items()} == {item: item**2 for item in range(8, 48)}
    processes = {process for _, process in found.values()}
    assert len(processes) == 3 and os.getpid() not in processes


def test_processes_are_kept_until_they_are_closed() -> None:
    workers, processes = Workers(work, 2), list[set[int]]()
    for _ in range(2):
        for _ in range(2):
            processes.append({process for _, (_, process) in workers.map(range(8, 28))})
        workers.close()
    assert processes[0] == processes[1] and processes[2] == processes[3] and processes[1].isdisjoint(processes[2])


def test_an_item_with_an_error_has_no_result() -> None:
    workers = Workers(work, 2)
    assert sorted(item for item, _ in workers.map(range(5))) == [0, 1, 2, 4]
    assert sorted(item for item, _ in workers.map([8, 9])) == [8, 9]
    workers.close()


def test_the_others_go_on_if_a_process_dies() -> None:
    workers = Workers(work, 2)
    assert sorted(item for item, _ in workers.map([5, *range(8, 28)])) == [*range(8, 28)]
    assert len({process for _, (_, process) in workers.map(range(8, 28))}) == 1, "none takes its place"
    assert workers.map([5, 8]) == [] and workers.map([8, 9]) == [], "no process is left"


@contextmanager
def ended_after(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise the error if the block runs for so long."""

    def interrupt(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_map_ends_its_processes_and_the_next_one_has_its_own_results() -> None:
    workers = Workers(work, 2)
    with no_process_left(), pytest.raises(KeyboardInterrupt), ended_after(0.5, KeyboardInterrupt):
        workers.map([7, 7, 8, 9])
    assert {item: square for item, (square, _) in workers.map([8, 9])} == {8: 64, 9: 81}
    workers.close()


def add_up(size: int) -> float:
    return float(torch.ones(size).sum())


def test_computing_in_threads_of_the_first_process_does_not_hang_the_others() -> None:
    before, workers = torch.get_num_threads(), Workers(add_up, 2)
    torch.set_num_threads(2)
    try:
        assert add_up(10**7) == 10**7, "this starts the threads"
        with ended_after(60.0, RuntimeError):
            assert sorted(workers.map([10**7, 10**7 + 1])) == [(10**7, 10**7), (10**7 + 1, 10**7 + 1)]
    finally:
        workers.close()
        torch.set_num_threads(before)


def daemonic(connection: Any) -> None:
    connection.send(Workers(work, 2).map([8, 9]))


def test_a_daemonic_process_has_none() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=daemonic, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60) and ours.recv() == []
    process.join()


@pytest.mark.parametrize(("count", "items"), [(1, [8, 9]), (2, [8]), (2, [])])
def test_no_process_starts_for_one_item_or_one_job(count: int, items: list[int]) -> None:
    with no_process_left():
        assert Workers(work, count).map(items) == []


def serve(connection: Any) -> None:
    workers = Workers(work, 2)
    connection.send([process for _, (_, process) in workers.map(range(8, 28))])
    time.sleep(60)


def test_they_end_when_the_first_process_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    first = context.Process(target=serve, args=(theirs,))
    first.start()
    assert ours.poll(60)
    processes = set(ours.recv())
    first.kill()
    first.join()
    deadline = time.monotonic() + 30
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
