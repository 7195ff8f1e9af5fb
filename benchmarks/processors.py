"""Gives each rank a fixed share of the processors: like a device, a rank that waits leaves no time to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

ROOT = Path("/sys/fs/cgroup")
PERIOD = 10_000  # microseconds; a rank that has used up its share waits for the next period
NAME = "shardc-rank"


@contextmanager
def shares_left_behind() -> Iterator[None]:
    """Remove the groups of ``take_share`` when the ranks that were started in the block have ended."""
    try:
        yield
    finally:
        for group in _parent().glob(f"{NAME}*-{os.getpid()}"):
            group.rmdir()


def take_share() -> None:
    """Limit this rank, and the threads that it starts, to its part of the processors of this machine.

    Raises a RuntimeError if there are no control groups, which need Linux and root.
    """
    part = PERIOD * len(os.sched_getaffinity(0)) // dist.get_world_size()
    group = _parent() / f"{NAME}{dist.get_rank()}-{os.getppid()}"
    try:
        group.mkdir(exist_ok=True)
        for name, value in _limits(group, part).items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(f"{os.getpid()}")
    except OSError as error:
        raise RuntimeError(f"--share needs control groups for processors: Linux, and root's rights ({error})") from None


def _parent() -> Path:
    """The parent folder of the groups: that of the ``cpu`` controller in cgroup v1, the root in v2."""
    return ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT


def _limits(group: Path, part: int) -> dict[str, str]:
    if group.parent == ROOT:
        return {"../cgroup.subtree_control": "+cpu", "cpu.max": f"{part} {PERIOD}"}
    return {"cpu.cfs_period_us": f"{PERIOD}", "cpu.cfs_quota_us": f"{part}"}
