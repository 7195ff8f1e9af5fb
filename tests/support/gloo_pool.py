"""Four gloo processes that all tests of a session share, because starting them takes seconds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from captured_once import captured_once, is_about_capture
from collector import exempt_imports
from torch.distributed import device_mesh

from shardc.runtime.comm.launch import Workers

NUM_RANKS = 4
SECONDS = 120


@dataclass(frozen=True)
class ByPath:
    """A function of a test file, found by the path of the file: a worker cannot import test files as modules."""

    path: str
    name: str

    def __call__(self, *args: Any) -> Any:
        module = sys.modules.get(self.path) or self._load()
        capturing = nullcontext() if is_about_capture(Path(self.path)) else captured_once()
        try:
            with capturing, mock.patch.object(device_mesh, "new_group", _group_of_mesh):
                return getattr(module, self.name)(*args)
        finally:
            _end_groups()

    def _load(self) -> Any:
        spec = importlib.util.spec_from_file_location(self.path, self.path)
        module = sys.modules[self.path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        exempt_imports()
        return module


@dataclass(frozen=True)
class InGroups:
    """Calls a function; returns its result, and the number of groups that this rank is in afterwards."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> tuple[Any, int]:
        return self.function(*args), len(dist.distributed_c10d._world.pg_names)


_groups_of_meshes: dict[Hashable, Any] = {}


def _group_of_mesh(ranks: list[int], **options: Any) -> Any:
    """The group along an axis of a mesh, which equal meshes of all functions share.

    Each group has threads that wake a hundred times a second. With 200 groups they take a fifth of a processor in each
    process, also while other tests run.
    """
    key = dist.group.WORLD, tuple(ranks), *sorted(options.items())
    if key not in _groups_of_meshes:
        _groups_of_meshes[key] = dist.new_group(ranks, **options)
    return _groups_of_meshes[key]


def _end_groups() -> None:
    """End the groups that a function leaves, since each has a thread that wakes often.

    Groups of all ranks and of device meshes stay: DTensor knows them by name, and an equal mesh uses them again.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)


class GlooPool:
    """Runs module-level functions of test files on every rank; started at the first use, and again after a failure.

    It is also started again after a function that leaves ranks in different numbers of groups: they could make no more.
    """

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of ``fn(*args)`` by rank."""
        if self._workers is None or not self._workers.is_alive:
            self._workers = Workers(NUM_RANKS, private_network=True)
        call = InGroups(ByPath(fn.__code__.co_filename, fn.__name__))
        results, num_groups = zip(*self._workers.run(call, *args, timeout=SECONDS), strict=True)
        if len(set(num_groups)) > 1:
            self.close()
        return [*results]

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None and self._workers.is_alive:
            self._workers.close()


POOL = GlooPool()


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    yield POOL
    POOL.close()
