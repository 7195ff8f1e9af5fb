"""The cache: a folder with a file for each compiled model, by key; of the ranks of a job the first one compiles."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Generic, Protocol, TypeVar

from torch import nn

from shardc.cache.key import NoKeyError, key_of
from shardc.cache.packed import NotPackedError, pack_convention, pack_program, unpack_convention, unpack_program
from shardc.capture.call import call_signature
from shardc.compiler import Compiled, Making, Request, capture_model, match_annotations, on_meta
from shardc.language.errors import OptionError, error_text
from shardc.passes.order import CAPTURE, LOCAL, WHOLE, Snapshots
from shardc.program.program import Program

CHECKSUM = 32  # bytes of a SHA-256, before what it is of
SIZE = 8  # bytes of the size of a part


class Ranks(Protocol):
    """The ranks of a job: ``index`` of this one, and the exchange of a message with all others."""

    index: int

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes that every rank passes."""


C = TypeVar("C", bound=Compiled)


@dataclass(frozen=True)
class Cache(Generic[C]):
    """Compiled models in a folder, which is made. ``kind``: the class of those that are read.

    ``ranks``: those that ask for the same at once, each for its own model. The first one reads or compiles, and sends
    what it has; where keys differ, each compiles.
    """

    folder: Path
    kind: type[C]
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "name a folder that this process may write to"
            raise OptionError(f"cache={str(self.folder)!r}", "it is no folder", str(error), remedy) from error

    def compiled(self, model: nn.Module, request: Request, compile: Callable[[], C]) -> C:
        """The model compiled as requested: read from its file, or compiled, and then written."""
        start, ranks = time.perf_counter(), self.ranks
        key = self._key(model, request)
        is_together = ranks is not None and len(set(ranks.exchange(key.encode()))) == 1
        if not key:
            return compile()
        if ranks is not None and is_together and ranks.index:
            sent = ranks.exchange(b"")[0]
            return self._loaded(sent, model, request, start) or compile()
        text = self._read(key)
        compiled = self._loaded(text, model, request, start)
        if compiled is None:
            compiled = compile()
            text = _text(compiled, model)
            self._write(key, text)
        if ranks is not None and is_together:
            ranks.exchange(text)
        return compiled

    def _key(self, model: nn.Module, request: Request) -> str:
        """The key; none for a model that has none, with a warning."""
        try:
            return key_of(model, request)
        except NoKeyError as error:
            who, what = f"cache={str(self.folder)!r}", f"programs of a {type(model).__name__} are not kept"
            warnings.warn(error_text(who, what, str(error), "leave cache= out, or change that"), stacklevel=2)
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

    def _loaded(self, text: bytes, model: nn.Module, request: Request, start: float) -> C | None:
        """A compiled model of what a file holds; None for one that holds nothing, or anything else.

        The program before the last pass is read when it is asked for, and earlier ones are made again.
        """
        if not text:
            return None
        try:
            convention, local, whole = _parts(text)
            program = unpack_program(local)
            signature = call_signature(model, request.args, request.kwargs, request.train)
            calling = unpack_convention(convention, model, model.forward, signature)
        except (NotPackedError, UnpicklingError, ValueError, TypeError, LookupError, EOFError) as error:
            warnings.warn(error_text("cache", "a file of it", str(error), "remove it"), stacklevel=2)
            return None
        kept: dict[str, Program | Callable[[], Program]] = {
            CAPTURE: partial(_first_program, model, request), WHOLE.__name__: partial(unpack_program, whole),
            LOCAL.__name__: program,
        }  # fmt: skip
        seconds = {"cache": time.perf_counter() - start}
        return self.kind(model, program, calling, Snapshots(kept), seconds, replace(request, **on_meta(request)))

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


def _first_program(model: nn.Module, request: Request) -> Program:
    matched = match_annotations(model, request)
    return Making(model, request).begin(capture_model(model, request, matched), matched)


def _text(compiled: Compiled, model: nn.Module) -> bytes:
    """What a file holds of a compiled model; nothing for one that cannot be kept."""
    try:
        parts = [pack_convention(compiled.convention, model), *map(pack_program, (compiled.program, compiled.whole))]
    except NotPackedError:
        return b""
    return b"".join(len(part).to_bytes(SIZE, "big") + part for part in parts)


def _parts(data: bytes) -> list[bytes]:
    found = list[bytes]()
    while data:
        end = SIZE + int.from_bytes(data[:SIZE], "big")
        found.append(data[SIZE:end])
        data = data[end:]
    return found
