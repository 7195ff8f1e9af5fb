"""One safetensors file: written tensor by tensor with its SHA-256, and read through a memory map.

The safetensors library writes a file only from tensors that are all in memory, and computes no hash. Here a rank needs
memory for one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shardc.language.errors import CheckpointError

from ..comm.checksum import bytes_of

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
CHUNK = 2**20  # bytes that are written or hashed at a time
MOST_HEADER = 10**8  # bytes, as in the safetensors library


class FormatError(ValueError):
    """An error in the content of a file; its reader turns it into a CheckpointError that names the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tensor in a file: its dtype in the format's code, its shape, and the range of its bytes."""

    code: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes by dtype and shape."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize


def write_file(
    path: Path, tensors: Mapping[str, Header], values: Iterable[Tensor], notes: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a new file and sync it to disk; return its size and its SHA-256.

    ``values``: those of ``tensors``, in order; they are taken one at a time. ``notes``: free text. Raises a
    CheckpointError that names the file if it cannot be written, such as on a full disk.
    """
    assert sys.byteorder == "little", sys.byteorder  # the format's byte order
    header, begin = dict[str, Any]({"__metadata__": dict(notes)} if notes else {}), 0
    for key, each in tensors.items():
        end = begin + each.num_bytes
        header[key] = {"dtype": each.code, "shape": each.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-len(text) % 8 + len(text))
    size = 0
    with named_errors(path, "cannot be written"), open(path, "xb", buffering=0) as file, Hashing() as hashing:
        size += _write(file, memoryview(len(text).to_bytes(8, "little") + text), hashing)
        for value in values:
            value = value.detach().cpu().contiguous()
            size += _write(file, bytes_of(value), hashing)
            hashing.finish()  # before the value is freed
        os.fsync(file.fileno())
    assert size == 8 + len(text) + begin, (path, size, begin)
    return size, hashing.digest.hexdigest()


def _write(file: Any, data: memoryview, hashing: Hashing) -> int:
    done = 0
    while done < len(data):
        count = file.write(data[done : done + CHUNK])
        hashing.update(data[done : done + count])
        done += count
    return done


class Hashing:
    """A SHA-256 that a thread computes while the same bytes are written."""

    def __init__(self) -> None:
        self.digest, self._waiting = hashlib.sha256(), list[Future[None]]()
        self._thread = ThreadPoolExecutor(1, "shardc.hash")

    def update(self, data: memoryview) -> None:
        """Add bytes, which must stay until ``finish`` has returned."""
        self._waiting.append(self._thread.submit(self.digest.update, data))

    def finish(self) -> None:
        """Wait for all bytes so far."""
        for each in self._waiting:
            each.result()
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


class OpenFile:
    """A file open for reading: its tensors are views of memory maps, whose bytes are read on access."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Open a regular file. CheckpointError if it is missing, no regular file, or not ``size`` bytes long."""
        self.path, self._headers = path, dict[str, Header]()
        with named_errors(path, "cannot be read"):
            self._descriptor = regular_file(path)
        weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size
        if size is not None and self._size != size:
            what, problem = f"{self._size} bytes", f"the index says {size}"
            raise CheckpointError(str(path), what, problem, "it was cut short or changed: load another checkpoint")

    def sha256(self) -> str:
        """The SHA-256 of all its bytes."""
        digest, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK))
        for begin in range(0, self._size, CHUNK):
            digest.update(chunk[: os.preadv(self._descriptor, [chunk], begin)])
        return digest.hexdigest()

    @property
    def headers(self) -> Mapping[str, Header]:
        """The tensors in the file, by key. Raises a CheckpointError if its header is malformed."""
        if not self._headers:
            try:
                self._headers = dict(self._read_header())
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                what, problem = "its header is not that of a safetensors file", f"{type(error).__name__}: {error}"
                raise CheckpointError(str(self.path), what, problem, "load another checkpoint") from error
        return self._headers

    def tensor(self, key: str) -> Tensor:
        """A tensor in a memory map."""
        return self._mapped(key)[0]

    @contextmanager
    def reading(self, key: str) -> Iterator[Tensor]:
        """Context with a tensor in a memory map, whose pages leave this process's memory afterwards."""
        tensor, pages = self._mapped(key)
        yield tensor
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, key: str) -> tuple[Tensor, mmap.mmap | None]:
        """A tensor and its memory map; None as the map of a tensor without elements."""
        header = self.headers[key]
        if not header.num_bytes:
            return torch.empty(header.shape, dtype=DTYPES[header.code]), None
        start = header.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with named_errors(self.path, "cannot be read"):
            pages = mmap.mmap(self._descriptor, header.end - start, access=mmap.ACCESS_COPY, offset=start)
        count, dtype = math.prod(header.shape), DTYPES[header.code]
        tensor = torch.frombuffer(pages, dtype=dtype, count=count, offset=header.begin - start)
        return tensor.view(header.shape), pages

    def _read_header(self) -> Iterator[tuple[str, Header]]:
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if self._size < 8 or length > min(MOST_HEADER, self._size - 8):
            raise FormatError(f"it is said to be {length} bytes long, the file is {self._size}")
        place = 0
        for key, each in strict_json(os.pread(self._descriptor, length, 8)).items():
            if key == "__metadata__":
                continue
            code, shape, (begin, end) = each["dtype"], tuple(each["shape"]), each["data_offsets"]
            header = Header(code, shape, 8 + length + begin, 8 + length + end)
            are_counts = all(type(size) is int and size >= 0 for size in (*shape, begin, end))
            if code not in DTYPES or not are_counts or begin != place or end - begin != header.num_bytes:
                raise FormatError(f"tensor {key!r}: {code} {shape} is not at bytes {begin} to {end}")
            place = end
            yield key, header
        if 8 + length + place != self._size:
            raise FormatError(f"its tensors are {place} bytes, the file has {self._size - 8 - length}")


def strict_json(text: bytes | str) -> Any:
    """Parse a JSON value. Raises a FormatError for NaN, for infinities, and for a repeated name in an object."""

    def refuse(constant: str) -> Any:
        raise FormatError(f"{constant} is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise FormatError("a name stands twice in one object")
        return found

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def regular_file(path: Path) -> int:
    """A descriptor to read a file. Raises a CheckpointError if it is a link, a folder, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not path.is_symlink():
            raise
        what, problem = "a symbolic link", "a checkpoint holds plain files, so that nothing outside of it is read"
        raise CheckpointError(str(path), what, problem, "copy the file itself into the folder") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    what, problem = "a folder, a pipe or a device", "a checkpoint holds plain files"
    raise CheckpointError(str(path), what, problem, "load another checkpoint")


@contextmanager
def named_errors(path: Path, problem: str) -> Iterator[None]:
    """Context that turns errors of the operating system into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        what = (error.strerror or type(error).__name__).lower()
        remedy = "see that the disk has room and the folder can be written"
        if problem == "cannot be read":
            remedy = "the checkpoint is not whole: load another one, or restore the file"
        raise CheckpointError(str(path), what, f"it {problem}", remedy) from error
