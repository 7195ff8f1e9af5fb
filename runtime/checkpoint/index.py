"""The index of a checkpoint: its tensors, the blocks of each and their files, and values that are not tensors.

The last line of the file is the SHA-256 of all lines before it, so that a changed index is rejected too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.language.errors import CheckpointError, did_you_mean

from .file import DTYPES, FormatError, named_errors, regular_file, strict_json
from .region import Block, is_covered

NAME = "index.json"
FORMAT = "shardc checkpoint"
VERSION = 1
MOST_BYTES = 2**31
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint: its size in bytes and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, with its file and its key in that file."""

    block: Block
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its dtype in safetensors' code, its global shape, and its blocks."""

    code: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.code} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint. ``aliases``: further names of tied parameters. ``notes``: for people only."""

    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]
    notes: Mapping[str, str]

    def text(self) -> bytes:
        """The content of the file: JSON, a line for each tensor, and the SHA-256 of all other lines in the last one."""
        tensors = {name: _tensor_json(each) for name, each in self.tensors.items()}
        files = {name: {"bytes": each.size, "sha256": each.sha256} for name, each in self.files.items()}
        head = {"format": FORMAT, "version": VERSION, "notes": self.notes, "aliases": self.aliases}
        lines = [f"{_dumps(key)}: {_dumps(value)}" for key, value in (head | {"values": self.values}).items()]
        lines += [f'"{key}": {_lines(table)}' for key, table in (("files", files), ("tensors", tensors))]
        return sealed(("{\n" + ",\n".join(lines)).encode())

    @staticmethod
    def read(path: Path) -> tuple[Index, str]:
        """Read an index; return it and the SHA-256 of its file. A CheckpointError names the file and the problem."""
        with named_errors(path, "cannot be read"), open(regular_file(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
        try:
            index = Index.parse(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"[:500]
            remedy = "the file was changed or damaged: load another checkpoint"
            raise CheckpointError(str(path), "no index of a checkpoint", problem, remedy) from error
        return index, hashlib.sha256(data).hexdigest()

    @staticmethod
    def parse(data: bytes) -> Index:
        """The index in the bytes of a file. For anything else raises one of the errors that ``read`` catches."""
        if len(data) > MOST_BYTES:
            raise FormatError(f"it has more than {MOST_BYTES} bytes")
        body, _, _ = data.rpartition(SEAL)
        if sealed(body) != data:
            raise FormatError("its last line is not the SHA-256 of the lines before it")
        content = strict_json(data)
        if content["format"] != FORMAT or content["version"] != VERSION:
            what = f"format {content['format']!r} version {content['version']!r}"
            raise FormatError(f"it is of {what}, this shardc reads {FORMAT!r} version {VERSION}")
        files = {name: _file_of(name, each) for name, each in content["files"].items()}
        tensors = {name: _tensor_of(name, each) for name, each in content["tensors"].items()}
        aliases = {str(name): str(each) for name, each in content["aliases"].items()}
        index = Index(files, tensors, aliases, dict(content["values"]), dict(content["notes"]))
        for problem in index.problems():
            raise FormatError(problem)
        return index

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies: blocks that overlap or leave gaps, missing files and names."""
        stored = dict.fromkeys(self.files, 0)
        keys = set[tuple[str, str]]()
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                if piece.file not in stored:
                    yield f"tensor {name!r} is in {piece.file!r}, which is not among its files"
                    return
                if len(piece.block.offsets) != len(tensor.shape) or len(piece.block.sizes) != len(tensor.shape):
                    yield f"a block of tensor {name!r} has another number of dims"
                    return
                stored[piece.file] += piece.block.numel * DTYPES[tensor.code].itemsize
                if (piece.file, piece.key) in keys:
                    yield f"two blocks are {piece.key!r} of {piece.file}"
                keys.add((piece.file, piece.key))
            if not is_covered(tensor.shape, [piece.block for piece in tensor.pieces]):
                yield f"the blocks of tensor {name!r} do not cover {list(tensor.shape)} once"
        for name, size in stored.items():
            if size > self.files[name].size:
                yield f"{size} bytes of tensors are in {name}, which has {self.files[name].size}"
        for alias, name in self.aliases.items():
            if f"model/{name}" not in self.tensors:
                yield f"{alias!r} is tied to {name!r}, which is not there"


SEAL = b',\n"sha256": '


def sealed(body: bytes) -> bytes:
    """The content of a file: ``body``, and its SHA-256 in the last line."""
    return body + SEAL + f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _lines(table: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"  {_dumps(key)}: {_dumps(value)}" for key, value in table.items()) + "\n}"


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _tensor_json(tensor: TensorEntry) -> dict[str, Any]:
    pieces = [
        {"offsets": each.block.offsets, "sizes": each.block.sizes, "file": each.file, "key": each.key}
        for each in tensor.pieces
    ]
    return {"dtype": tensor.code, "shape": tensor.shape, "pieces": pieces}


def _tensor_of(name: str, content: Any) -> TensorEntry:
    code = content["dtype"]
    if code not in DTYPES:
        raise FormatError(f"tensor {name!r} has dtype {code!r}: {did_you_mean(code, DTYPES) or 'there is no such one'}")
    pieces = (
        Piece(Block(_sizes(each["offsets"]), _sizes(each["sizes"])), _text(each["file"]), _text(each["key"]))
        for each in content["pieces"]
    )
    return TensorEntry(code, _sizes(content["shape"]), tuple(pieces))


def _file_of(name: str, content: Any) -> FileEntry:
    (size,), sha256 = _sizes([content["bytes"]]), _text(content["sha256"])
    if not FILE_NAME.fullmatch(name):
        raise FormatError(f"{name!r} is no name of a file in the checkpoint's own folder")
    if not SHA256.fullmatch(sha256):
        raise FormatError(f"{sha256!r} is no SHA-256")
    return FileEntry(size, sha256)


def _sizes(content: Any) -> tuple[int, ...]:
    if not isinstance(content, list) or not all(type(size) is int and 0 <= size < 2**63 for size in content):
        raise FormatError(f"{str(content)[:80]} are no sizes")
    return tuple(content)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise FormatError(f"{str(content)[:80]} is no string")
    return content
