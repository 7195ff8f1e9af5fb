"""Failures of ranks: finds the failed rank, names the collective that others waited for, and ends all ranks.

A rank whose collective fails posts a mark in the job's store and closes its connections, so that the ranks that wait
for it fail too. Then each of them looks for the cause: a rank that has posted an error of its own, whose process is
gone or stopped, or that posts nothing. Without a failure none of this runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from weakref import ReferenceType, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from shardc.language.errors import CommunicationError, RankError, error_line

from .interrupt import interruptible

FREEING = 0.1  # seconds at exit for gloo's threads to free what they hold
SECONDS = 1.0  # to find the cause, on all ranks at once
PAUSE = 0.02  # seconds between two polls of the store
CLOSING = (1 << 20) - 1  # the tag of a message that nobody sends
LONGEST = 2000  # characters of another rank's error
MANY = 256  # ranks; in a larger job a rank asks only its own group


class HoldsGroups(Protocol):
    """An object that waits on collectives of process groups, or of bare gloo groups without torch's wrapper."""

    @property
    def process_groups(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class _Job:
    """The state of this process's job.

    ``holders``: objects that wait on process groups here. ``default``: the default process group in whose store this
    process is registered. ``is_marked``: whether an error of this rank is posted. ``meetings``: by ranks, the number of
    their meetings.
    """

    holders: WeakSet[Any] = field(default_factory=WeakSet)
    default: ReferenceType[ProcessGroup] | None = None
    is_marked: bool = False
    meetings: Counter[tuple[int, ...]] = field(default_factory=Counter)


_JOB = _Job()


def is_communication(error: BaseException) -> bool:
    """Whether an error comes from a backend of torch.distributed or from the job's store, and is not explained yet."""
    is_gloo = "/gloo/" in str(error) or "Application timeout caused pair closure" in str(error)
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and is_gloo)


@contextlib.contextmanager
def waiting(who: Callable[[], str], ranks: Sequence[int] | Callable[[], Sequence[int]]) -> Iterator[None]:
    """Context that explains errors of communication: it names the waiting collective, ``who``, and the lost rank."""
    try:
        yield
    except RuntimeError as error:
        if not is_communication(error):
            raise
        raise explained(who(), ranks() if callable(ranks) else ranks) from error.with_traceback(None)


def explained(who: str, ranks: Sequence[int]) -> CommunicationError:
    """The error of a failed collective; closes this rank's connections, so that ranks that wait for it fail too.

    ``who``: the collective, its place in the model and its axes. ``ranks``: those that take part. Takes a second if the
    cause cannot be found.
    """
    who, found = f"{who}, {ranks_text(ranks)}", list[str]()
    search = threading.Thread(target=lambda: found.append(_search(who, ranks)), daemon=True)  # the store may hang
    search.start()
    _close_all()
    search.join(2 * SECONDS)
    return CommunicationError(who, found[0] if found else _silent_store("does not answer"))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text, ``rank 1`` or ``ranks 0, 1``; of many the first eight and the last."""
    names = [str(rank) for rank in ranks]
    names = [*names[:8], "...", names[-1]] if len(names) > 12 else names
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(names)}"


def announce(holder: HoldsGroups) -> None:
    """Let a failure close the groups of ``holder``; the first call registers this process in the job's store."""
    _JOB.holders.add(holder)
    job = dist.group.WORLD
    if _JOB.is_marked:
        withdraw()
    if job is None or dist.get_backend() == "fake" or (_JOB.default is not None and _JOB.default() is job):
        return
    if _JOB.default is None:
        atexit.register(_note_at_exit)
    _JOB.default, _JOB.is_marked, rank, store = ref(job), False, dist.get_rank(), _store()
    _JOB.meetings.clear()
    store.set(f"process/{rank}", _own_process())
    for key in (f"mark/{rank}", "cause", "told"):  # of an earlier job in this store
        store.delete_key(key)


@contextlib.contextmanager
def telling_others() -> Iterator[None]:
    """Context that posts an error, so that ranks that wait for this one can name it; Ctrl-C ends its waits."""
    if _JOB.default is None:
        yield
        return
    if _JOB.is_marked:
        withdraw()
    try:
        with interruptible(_close_all):
            yield
    except BaseException as error:
        note_failure(error)
        raise


def note_failure(error: BaseException) -> None:
    """Post an error that this rank raises, so that ranks that wait for it can name it."""
    if (
        isinstance(error, (CommunicationError, RankError))
        or _JOB.default is None
        or _JOB.default() is None
        or _JOB.is_marked
    ):
        return
    _JOB.is_marked = True
    post = threading.Thread(target=_post_failure, args=(error_line(error)[:LONGEST],), daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started without memory
        post.start()
        post.join(SECONDS)


def withdraw() -> None:
    """Withdraw the posted error, since the user's program has survived it."""
    _JOB.is_marked = False
    with contextlib.suppress(RuntimeError, ValueError):
        for key in (f"mark/{dist.get_rank()}", "cause"):
            _store().delete_key(key)


def meet(ranks: Sequence[int], what: str, number: int = 0) -> bool:
    """Wait until all these ranks have arrived here. Returns whether all have the same ``number``.

    When a process group is made, torch waits for a lost rank until the job's timeout; this raises a CommunicationError
    once the process of one of the ranks is gone. ``what``: the object that they make, for errors.
    """
    if len(ranks) < 2 or _JOB.default is None:
        return True
    ordered, end, pause = tuple(sorted(ranks)), time.monotonic() + job_timeout().total_seconds(), 0.001
    _JOB.meetings[ordered] += 1
    key = f"meeting/{'-'.join(map(str, ordered))}/{_JOB.meetings[ordered]}"
    with waiting(lambda: what, ranks):
        store = _store()
        if store.compare_set(f"{key}/number", "", str(number)) != str(number).encode():
            store.compare_set(f"{key}/end", "", "differ")
        if store.add(key, 1) >= len(ordered):
            store.compare_set(f"{key}/end", "", "agree")
        while not store.check([f"{key}/end"]):
            is_late = time.monotonic() > end
            if is_late or is_one_gone(ordered):
                raise explained(what, ranks)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)
        return bool(store.get(f"{key}/end") == b"agree")


def is_one_gone(ranks: Sequence[int]) -> bool:
    """Whether the process of one of these ranks is known to be gone."""
    store = _store()
    return any(_state(store, rank) == "gone" for rank in ranks)


def job_timeout() -> timedelta:
    """The timeout of the job's default process group."""
    job = dist.group.WORLD
    assert job is not None
    return next(timeout_of(job, device) for device in job._device_types)


def timeout_of(process: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives; torch's default for fake processes, whose backend has no options."""
    options: Any = process._get_backend(device).options
    return default_pg_timeout if options is None else options._timeout


def default_store() -> Any:
    """The store through which the ranks of the job find each other."""
    return dist.distributed_c10d._get_default_store()


def own_group(purpose: str, ranks: Sequence[int], what: str) -> Any:
    """A gloo group of these ranks for one purpose: no message on it pairs with one of another purpose.

    All of the ranks must make it. torch does not register it. ``what``: its users, for errors.
    """
    meet(ranks, what)
    store = PrefixStore(f"shardc/{purpose}/{'-'.join(map(str, ranks))}", default_store())
    return ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), job_timeout())


def _store() -> Any:
    return PrefixStore("shardc/failure", default_store())


def _close_all() -> None:
    """Make all waits of this rank fail, and those of other ranks for this one."""
    for group in {each for holder in [*_JOB.holders] for each in holder.process_groups}:
        _close(group)


def _close(group: Any) -> None:
    """Close this rank's connections of a gloo group, by receives that time out; gloo has no other call for it."""
    with contextlib.suppress(RuntimeError, ValueError):
        backend: Any = group if isinstance(group, ProcessGroupGloo) else group._get_backend(torch.device("cpu"))
        for other in range(group.size()) if isinstance(backend, ProcessGroupGloo) else ():
            if other != group.rank():
                with contextlib.suppress(RuntimeError, ValueError):
                    backend.recv([torch.empty(1)], other, CLOSING).wait(timedelta(milliseconds=1))


def _search(who: str, ranks: Sequence[int]) -> str:
    """Search for the cause of a failure, in posts and processes of other ranks, for at most ``SECONDS``."""
    try:
        store, me, end = _store(), dist.get_rank(), time.monotonic() + SECONDS
        if not _JOB.is_marked:
            store.set(f"mark/{me}", f"waits {who}")
        cause, world = "", dist.get_world_size()
        asked = range(world) if world <= MANY else ranks
        while not cause and time.monotonic() < end:
            cause = _posted(store) or _evidence(store, asked)
            if not cause:
                time.sleep(PAUSE)
        if cause:
            cause = store.compare_set("cause", "", cause).decode()
        _linger(store, end)
        return cause or _without_evidence(store, who, [rank for rank in ranks if rank != me])
    except (RuntimeError, ValueError):
        return _silent_store("is gone")


def _posted(store: Any) -> str:
    """The cause that a rank has posted already; empty if there is none."""
    return store.get("cause").decode() if store.check(["cause"]) else ""


def _evidence(store: Any, ranks: Sequence[int]) -> str:
    """The cause by marks and processes of other ranks: preferably an error, else a lost rank, else a stopped one."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank == dist.get_rank():
            continue
        kind, _, text = _mark(store, rank).partition(" ")
        if kind == "failed":
            return f"rank {rank} failed: {text}"
        found.setdefault(_state(store, rank), []).append(rank)
    for state in ("gone", "stopped"):
        if state in found:
            return f"{ranks_text(found[state])} {'is' if len(found[state]) == 1 else 'are'} {state}"
    return ""


def _without_evidence(store: Any, who: str, others: Sequence[int]) -> str:
    """The likely cause if no rank is known to be gone: ranks that do not answer, or the places where others wait."""
    marks = {rank: _mark(store, rank) for rank in others}
    silent = [rank for rank, mark in marks.items() if not mark]
    busy = [rank for rank in silent if _state(store, rank) == "running"]
    if silent:
        some = busy or silent
        verb = ("is busy with something else" if len(some) == 1 else "are busy with something else") if busy else ""
        return f"{ranks_text(some)} {verb or ('does' if len(some) == 1 else 'do') + ' not answer'}"
    elsewhere = {rank: mark.removeprefix("waits ") for rank, mark in marks.items()}
    texts = [f"rank {rank} waits in {where}" for rank, where in elsewhere.items() if where != who]
    return "; ".join(texts[:3]) or "the connection broke, and all ranks are there"


def _mark(store: Any, rank: int) -> str:
    """The mark that a rank has posted: ``waits COLLECTIVE`` or ``failed ERROR``; empty if there is none."""
    return store.get(f"mark/{rank}").decode() if store.check([f"mark/{rank}"]) else ""


def _post_failure(text: str) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        store, rank = _store(), dist.get_rank()
        store.set(f"mark/{rank}", f"failed {text}")
        store.compare_set("cause", "", f"rank {rank} failed: {text}")


def _note_at_exit() -> None:
    """Post the error that ends this process, if there is one, and end others' waits before the clean-up is done.

    Then give gloo's threads time to free the Python objects of their last collectives. They need the GIL for it, and a
    C++ thread that asks for the GIL while Python is being finalized aborts the process.
    """
    if (error := getattr(sys, "last_value", None)) is not None and dist.is_initialized():
        note_failure(error)
        _close_all()
    time.sleep(FREEING)


def _silent_store(verb: str) -> str:
    """The likely cause if the job's store cannot be reached: it ends with the process that keeps it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the agent of torchrun, which keeps the job's store, {verb}"
    try:
        is_kept_by_rank_0 = _is_kept_by_rank_0()
    except ValueError:  # another thread has ended the job, as Ray does when it stops its workers
        return "this process has destroyed its process group"
    return f"rank 0, which keeps the job's store, {verb}" if is_kept_by_rank_0 else "the job's store does not answer"


def _is_kept_by_rank_0() -> bool:
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _linger(store: Any, end: float) -> None:
    """Make the rank that keeps the store wait until the others have read the cause."""
    told = store.add("told", 1)
    if dist.get_rank() == 0 and _is_kept_by_rank_0():
        alive = sum(_state(store, rank) == "running" for rank in range(min(MANY, dist.get_world_size())))
        while told < alive and time.monotonic() < end:
            time.sleep(PAUSE)
            told = store.add("told", 0)


def _own_process() -> str:
    """The identity of this process: its process id, and a name of the process-id namespace."""
    try:
        space = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        space = platform.node()
    return f"{os.getpid()} {space}"


def _state(store: Any, rank: int) -> str:
    """The state of a rank's process, ``running``, ``stopped`` or ``gone``; empty if this process cannot see it."""
    if not store.check([f"process/{rank}"]):
        return ""
    number, _, space = store.get(f"process/{rank}").decode().partition(" ")
    if space != _own_process().partition(" ")[2]:
        return ""
    try:
        os.kill(int(number), 0)
        status = Path(f"/proc/{number}/stat").read_text() if Path("/proc/self/stat").exists() else ""
    except (ProcessLookupError, FileNotFoundError):
        return "gone"
    except PermissionError:
        return "running"
    letter = status.rpartition(")")[2].split()[0] if status else "R"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")
