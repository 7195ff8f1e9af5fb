"""The cache: a folder with a file of compiled programs for each captured one; in a job the first rank runs the passes.

Every process captures the model itself. So a program is found by what the model computes, whatever its code reads.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from shardc.cache.key import key_of
from shardc.cache.packed import NotPackedError, pack_program, unpack_program
from shardc.language.errors import OptionError, error_text
from shardc.program.program import Program
from shardc.program.user_rules import has_user_rules

CHECKSUM = 32  # bytes of a SHA-256 of the key and the data, in front of the data
SIZE = 8  # bytes that hold the size of the first part
Passed = tuple[Program, Callable[[], Program]]  # the program that ranks run, and the one before the last pass


class Ranks(Protocol):
    """The ranks of a job. ``index``: that of this rank."""

    index: int

    def exchange(self, data: bytes) -> list[bytes]:
        """Send bytes to all ranks, and return the bytes of every rank."""


@dataclass(frozen=True)
class Cache:
    """Compiled programs in a folder, which is created.

    ``ranks``: the ranks that ask for the same program at once. The first rank reads it or runs the passes, and sends
    the result. If their programs differ, each rank works alone.
    """

    folder: Path
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "name a folder that this process may write to"
            raise OptionError(f"cache={str(self.folder)!r}", "it is no folder", str(error), remedy) from error

    def passed(self, first: Program, run: Callable[[], Passed]) -> Passed:
        """Return the compiled programs from the cache; on a miss call ``run`` and store its result."""
        key, ranks = self._key(first), self.ranks
        is_together = ranks is not None and len(set(ranks.exchange(key.encode()))) == 1
        if not key:
            return run()
        if ranks is not None and is_together and ranks.index:
            return self._loaded(ranks.exchange(b"")[0]) or run()
        text = self._read(key)
        found = self._loaded(text)
        if found is None:
            found = run()
            text = _text(found)
            self._write(key, text)
        if ranks is not None and is_together:
            ranks.exchange(text)
        return found

    def _key(self, first: Program) -> str:
        """The key; empty for a program that cannot be packed, or whose plan may depend on rules of users."""
        try:
            return "" if has_user_rules() else key_of(first)
        except NotPackedError:
            return ""

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.shardc"

    def _read(self, key: str) -> bytes:
        """The content of a key's file; empty if there is none, or if it is damaged or another key's."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return b""
        text = data[CHECKSUM:]
        return text if _checksum(key, text) == data[:CHECKSUM] else b""

    def _loaded(self, text: bytes) -> Passed | None:
        """The programs in the content of a file; None if it is empty or holds anything else."""
        if not text:
            return None
        end = SIZE + int.from_bytes(text[:SIZE], "big")
        try:
            return unpack_program(text[SIZE:end]), partial(unpack_program, text[end:])
        except Exception as error:  # of any kind: a file may hold anything
            problem = f"it cannot be read: {type(error).__name__}: {error}"
            who, what = f"cache={str(self.folder)!r}", "a file of it"
            warnings.warn(error_text(who, what, problem, "remove it, and look who writes there"), stacklevel=2)
            return None

    def _write(self, key: str, text: bytes) -> None:
        """Write a file atomically, so that no process reads a part of it."""
        if not text:
            return
        try:
            path = self.folder / f"{key}.{os.getpid()}.{time.monotonic_ns()}"
            path.write_bytes(_checksum(key, text) + text)
            path.replace(self._path(key))
        except OSError as error:
            who, problem = f"cache={str(self.folder)!r}", str(error)
            warnings.warn(error_text(who, "a file cannot be written", problem, "make room for it"), stacklevel=2)


def _checksum(key: str, text: bytes) -> bytes:
    return hashlib.sha256(key.encode() + text).digest()


def _text(passed: Passed) -> bytes:
    """The content of a file for these programs; empty if they cannot be packed."""
    local, whole = passed
    try:
        part = pack_program(local)
        return len(part).to_bytes(SIZE, "big") + part + pack_program(whole())
    except NotPackedError:
        return b""
