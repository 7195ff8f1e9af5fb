"""An entry: a message of fixed size that says what a rank is about to do before it runs collectives."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

DIGEST, WIDE_DIGEST = 16, 32  # bytes of a digest of a request, and of a program or a batch
_FORMAT = struct.Struct(f"!BBBB8sQ{DIGEST}s{WIDE_DIGEST}s{WIDE_DIGEST}sQQ")
_WHOLE = 2**64 - 1


class Kind(IntEnum):
    """The actions of a rank that lead to collectives."""

    CONSTRUCT = 1
    COMPILE = 2
    COMPILED = 3
    FORWARD = 4
    BACKWARD = 5
    REDUCE = 6
    CLIP = 7
    UNSCALE = 8
    GUARD = 9
    READ = 10
    EPOCH = 11
    CHECKPOINT = 12


class Flag(IntEnum):
    """A yes or no that must be equal on all ranks that know it."""

    NO = 0
    YES = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """The action that a rank is about to take, with its operands.

    ``module``: a digest of the module's number and name. ``call``: the number of a forward call. ``request``: a digest
    of the arguments: shapes, flags, options. ``program``: the digest of the program to run; empty if it must be
    compiled. ``is_changed``: in forward, whether parameters were written since the last one; in backward, whether there
    are gradients already. ``gathers``: whether stored parameters must be gathered; all ranks gather if one must.
    ``batch``: a digest of the checksums of plain inputs, if they are compared.
    """

    kind: Kind
    module: bytes
    call: int = 0
    request: bytes = b""
    program: bytes = b""
    batch: bytes = b""
    seed: int = 0
    step: int = 0
    is_changed: Flag = Flag.UNKNOWN
    gathers: bool = False

    def pack(self) -> bytes:
        """The entry as bytes; all entries have the same size."""
        return _FORMAT.pack(
            self.kind, self.is_changed, self.gathers, bool(self.program), self.module, self.call,
            self.request, self.program, self.batch, self.seed & _WHOLE, self.step & _WHOLE,
        )  # fmt: skip

    @staticmethod
    def unpack(data: bytes) -> Entry:
        """The entry packed in ``data``; its digests are padded with zero bytes to their full size."""
        kind, changed, gathers, compiled, module, call, request, program, batch, seed, step = _FORMAT.unpack(data)
        program = program if compiled else b""
        return Entry(Kind(kind), module, call, request, program, batch, seed, step, Flag(changed), bool(gathers))
