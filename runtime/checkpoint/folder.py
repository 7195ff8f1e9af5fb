"""The folder of a run's checkpoints: a new one is written next to the others, and published by one rename.

::

    run/ckpt/step-00000010/    a checkpoint: index.json and safetensors files
    run/ckpt/step-00000020/
    run/ckpt/latest            one line: the name of the latest, and the SHA-256 of its index
    run/ckpt/.saving-...       an unfinished checkpoint; the next save removes it if its job has died
    run/ckpt/group-1/          the checkpoints of a further group of ranks that trains by itself (the option local)

A step that is saved again is published as ``step-00000020.1``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardc.language.errors import CheckpointError

from .file import named_errors, regular_file
from .index import NAME

PUBLISHED = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
LATEST = "latest"
_LATEST_LINE = re.compile(rf"({PUBLISHED.pattern}) ([0-9a-f]{{64}})\n")
_TEMPORARY = re.compile(r"\.(saving|removing|latest)-[0-9a-f]{16}")


@contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    """Context with a folder to write a checkpoint to; it is removed at the end unless it was published."""
    with named_errors(root, "cannot be written"):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        folder = root / f".saving-{secrets.token_hex(8)}"
        folder.mkdir()
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, step: int, index: bytes) -> Path:
    """Rename a complete folder to its final name, and make ``latest`` point to it. Its files must be on disk."""
    index_sha256 = hashlib.sha256(index).hexdigest()
    root, name, version = folder.parent, f"step-{step:08}", 0
    with named_errors(root, "cannot be written"):
        sync(folder)
        while True:
            published = root / (f"{name}.{version}" if version else name)
            try:
                if not published.exists():  # rename would replace an empty folder
                    folder.rename(published)
                    break
            except OSError:
                if not published.exists():
                    raise
            version += 1
        sync(root)
        pointer = root / f".latest-{secrets.token_hex(8)}"
        with open(pointer, "xb") as file:
            file.write(f"{published.name} {index_sha256}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        pointer.replace(root / LATEST)
        sync(root)
    return published


def resolve(path: Path) -> tuple[Path, str | None]:
    """The checkpoint at a path, or the latest of a run at the path; with the SHA-256 of its index, None if unknown."""
    if (path / NAME).exists():
        return path, None
    found = published_in(path)
    if not os.path.lexists(path / LATEST):
        if not found:
            what = "no checkpoint is there" if path.exists() else "there is no such folder"
            problem = f"a checkpoint has a file {NAME!r}, the folder of a run has {LATEST!r}"
            raise CheckpointError(str(path), what, problem, "give the path that shardc.save was given")
        return path / max(found, key=_order), None  # the job died before it wrote the first pointer
    pointer = path / LATEST
    with named_errors(pointer, "cannot be read"), open(regular_file(pointer), "rb") as file:
        line = _LATEST_LINE.fullmatch(file.read(200).decode(errors="replace"))
    names = ", ".join(sorted(found, key=_order)[-3:]) or "none"
    remedy = f"load one of the published checkpoints by its own path: {names}"
    if line is None:
        raise CheckpointError(str(pointer), "not the name of a checkpoint and a SHA-256", "it was damaged", remedy)
    if line[1] not in found:
        raise CheckpointError(str(pointer), f"it names {line[1]}", "which is not there", remedy)
    return path / line[1], line[4]


def folder_of_group(root: Path, group: int) -> Path:
    """The folder of a group's checkpoints; the first group's is that of the run."""
    return root / f"group-{group}" if group else root


def resolve_of_group(path: Path, group: int) -> tuple[Path, str | None]:
    """``resolve`` for a group of ranks: its own checkpoint of the same name if there is one, else the first group's."""
    found, sha256 = resolve(path)
    own = folder_of_group(found.parent, group) / found.name
    return (own, None) if group and (own / NAME).exists() else (found, sha256)


def published_in(root: Path) -> list[str]:
    """The names of the published checkpoints."""
    if not root.is_dir():
        return []
    return [each.name for each in os.scandir(root) if PUBLISHED.fullmatch(each.name) and each.is_dir()]


def next_step(root: Path) -> int:
    """The number after the largest of the published checkpoints."""
    return max((_order(name)[0] + 1 for name in published_in(root)), default=0)


def keep_latest(root: Path, count: int, latest: Path) -> None:
    """Remove all published checkpoints but the last ``count``, which include ``latest``."""
    times = {name: _time(root / name) for name in published_in(root) if name != latest.name}
    oldest = sorted(times, key=lambda name: (times[name], _order(name)))
    for name in oldest[: max(0, len(oldest) - (count - 1))]:
        _remove(root / name)


def remove_leftovers(root: Path) -> None:
    """Remove leftovers of killed jobs: temporary files, and folders that nobody is writing to."""
    for each in list(os.scandir(root)):
        if not _TEMPORARY.fullmatch(each.name) or each.is_symlink():
            continue
        if not each.is_dir():
            Path(each.path).unlink(missing_ok=True)
        elif _is_free(Path(each.path)):
            shutil.rmtree(each.path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Write a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a checkpoint: rename it first, so that nobody finds half of it. The next save retries after a failure."""
    hidden = folder.with_name(f".removing-{secrets.token_hex(8)}")
    try:
        folder.rename(hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def _order(name: str) -> tuple[int, int]:
    found = PUBLISHED.fullmatch(name)
    assert found is not None, name
    return int(found[1]), int(found[2] or 0)


def _time(folder: Path) -> int:
    try:
        return (folder / NAME).stat().st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, at most until this process ends; without effect if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_free(folder: Path) -> bool:
    """Whether no process holds the lock on a folder, which a writer does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
