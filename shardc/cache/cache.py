"""The cache: a folder with a file for what passes make of each program; of the ranks of a job the first one runs them.

A model is captured in every process, so that a program is found by what the model computes, whatever its code reads.
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

CHECKSUM = 32  # bytes of a SHA-256, before what it is of
SIZE = 8  # bytes of the size of the first part
Passed = tuple[Program, Callable[[], Program]]  # the program that ranks run, and that before the last pass


class Ranks(Protocol):
    """The ranks of a job: ``index`` of this one, and the exchange of a message with all others."""

    index: int

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes that every rank passes."""


@dataclass(frozen=True)
class Cache:
    """What passes have made of programs, in a folder, which is made.

    ``ranks``: those that ask for the same at once. The first one reads or runs passes, and sends what it has; where
    their programs differ, each does it alone.
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
        """What passes make of a program: read from its file, or made by ``run``, and then written."""
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
        """The key; none for a program that is not kept, or whose plan may depend on rules that are not shardc's."""
        try:
            return "" if has_user_rules() else key_of(first)
        except NotPackedError:
            return ""

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.shardc"

    def _read(self, key: str) -> bytes:
        """What the file of a key holds; nothing where there is none, or one that is damaged."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return b""
        text = data[CHECKSUM:]
        return text if hashlib.sha256(text).digest() == data[:CHECKSUM] else b""

    def _loaded(self, text: bytes) -> Passed | None:
        """The programs that a file holds; None for one that holds nothing, or anything else."""
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
        """Write a file at once, so that no process reads a part of one."""
        if not text:
            return
        try:
            path = self.folder / f"{key}.{os.getpid()}.{time.monotonic_ns()}"
            path.write_bytes(hashlib.sha256(text).digest() + text)
            path.replace(self._path(key))
        except OSError as error:
            who, problem = f"cache={str(self.folder)!r}", str(error)
            warnings.warn(error_text(who, "a file cannot be written", problem, "make room for it"), stacklevel=2)


def _text(passed: Passed) -> bytes:
    """What a file holds of programs; nothing where they cannot be kept."""
    local, whole = passed
    try:
        part = pack_program(local)
        return len(part).to_bytes(SIZE, "big") + part + pack_program(whole())
    except NotPackedError:
        return b""
