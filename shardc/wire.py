"""The ``wire`` option: the codec in which the values of a collective are sent.

A codec writes floating-point values in fewer bytes, with a rounding error. A rank encodes each value that it sends. A
rank that receives codes decodes them and computes with the values, sums in float32. Of gradients, ``1bit`` and ``topk``
also send what they left out before (error feedback).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from statistics import NormalDist
from typing import Any

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.sharding import ceil_div

SCALE = 4  # bytes of the scale of a block, a float32
GRADIENTS, PARAMETERS, ACTIVATIONS = "gradients", "parameters", "activations"
CONTENTS = (GRADIENTS, PARAMETERS, ACTIVATIONS)  # what a collective may carry


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to write floating-point values in fewer bytes.

    ``bits``: bits per element. ``block``: the number of elements that are encoded together; no block has elements of
    two tensors. ``error``: the root mean square error of normally distributed values, relative to their root mean
    square. ``header``: the bytes of a block besides those of its elements: its scale, a float32, or the elements that
    are kept; 0 if each element is a code by itself. ``has_feedback``: what it leaves out of a gradient is added to the
    next one.
    """

    name: str
    bits: int
    block: int
    error: float
    header: int = 0
    has_feedback: bool = False

    @property
    def block_length(self) -> int:
        """The number of elements in the codes of a block: that of its bytes, or without a header that of its values."""
        return self.header + self.block * self.bits // 8 if self.header else self.block

    def length(self, numel: int) -> int:
        """The number of elements in the tensor of codes of ``numel`` values."""
        return ceil_div(numel, self.block) * self.block_length

    def nbytes(self, numel: int) -> int:
        """The bytes of the codes of ``numel`` values, the last block padded."""
        return self.length(numel) * (1 if self.header else self.bits // 8)


CODECS = {
    each.name: each
    for each in (
        Codec("fp16", 16, 1, 2.1e-4),
        Codec("bf16", 16, 1, 1.7e-3),
        Codec("int8", 8, 256, 7.0e-3, SCALE),
        Codec("fp8", 8, 256, 2.6e-2, SCALE),
        Codec("int4", 4, 128, 1.17e-1, SCALE),
        Codec("1bit", 1, 256, 6.02e-1, SCALE, has_feedback=True),
    )
}
VALUES = Codec("values", 32, 256, 0.0)  # unchanged values, in a step of a sum whose further steps send codes in blocks
TOPK, TOPK_BLOCK = "topk", 256
MOST_KEPT = 0.5  # part of the elements
KEPT = 3  # bytes of an element that is kept: its place in the block, and its value as bf16
EXAMPLES = (*CODECS, f"{TOPK}:0.01")
Wire = Mapping[str, str | None]


def codec_named(name: str) -> Codec:
    """The codec of a name from an option or a program, which must exist."""
    found = find_codec(name)
    assert found is not None, name
    return found


@cache
def find_codec(name: str) -> Codec | None:
    """One of ``CODECS``, VALUES, or ``topk:`` and the part of the elements that it keeps; None for any other name."""
    kind, _, part = name.partition(":")
    if kind != TOPK:
        return VALUES if name == VALUES.name else CODECS.get(name)
    ratio = float(part) if re.fullmatch(r"0?\.\d+", part) else 0.0
    if not 0 < ratio <= MOST_KEPT:
        return None
    count = max(1, round(ratio * TOPK_BLOCK))
    ratio, normal = count / TOPK_BLOCK, NormalDist()
    least = normal.inv_cdf(1 - ratio / 2)
    error = math.sqrt(1 - ratio - 2 * least * normal.pdf(least))
    return Codec(name, 0, TOPK_BLOCK, error, KEPT * count, has_feedback=True)


def is_codec(name: Any) -> bool:
    """Whether there is a codec of this name."""
    return isinstance(name, str) and find_codec(name) is not None


def key_of(wire: Wire, axis: str, content: str, paths: Collection[str]) -> str | None:
    """The key that applies to what is sent over an axis: of those that match, the last with the most words, or None.

    ``content``: what is sent, one of ``CONTENTS``. ``paths``: the modules and parameters that it belongs to.
    """

    def holds(word: str) -> bool:
        return word in (axis, content) or (is_glob(word) and any(fnmatchcase(path, word) for path in paths))

    found = [key for key in wire if all(map(holds, key.split()))]
    return max(reversed(found), key=lambda key: len(key.split()), default=None)


def is_glob(word: str) -> bool:
    """Whether a word of a key is a glob over the paths of modules and parameters."""
    return "." in word or "*" in word


def wire_on(wire: Wire | None, axes: Collection[str]) -> Wire | None:
    """The entries that have a meaning on a mesh with these axes; None if no entry has."""
    known = (*axes, *CONTENTS)
    kept = {
        key: name for key, name in (wire or {}).items() if all(is_glob(word) or word in known for word in key.split())
    }
    return kept or None


def check_wire(wire: Any, mesh: Mesh) -> None:
    """Raise an OptionError that lists all entries of the option that have no meaning on the mesh."""
    if not isinstance(wire, Mapping):
        example = f"{{{mesh.axis_names[0]!r}: {wire!r}}}" if is_codec(wire) else "{'dp': 'int8'}"
        problem = "it maps axes, or what is sent, to codecs"
        raise OptionError("option wire", f"wire={wire!r}", problem, f"say wire={example}")
    known = (*mesh.axis_names, *CONTENTS)
    errors = []
    for key, name in wire.items():
        who = f"wire={{{key!r}: {name!r}}}"
        words = key.split() if isinstance(key, str) else []
        for word in words or [str(key)]:
            if not words or not (word in known or is_glob(word)):
                remedy = did_you_mean(word, known) or f"say one of {', '.join(known)}, or a glob, as 'h.*'"
                errors.append(
                    OptionError(who, f"{word!r}", "it is no axis of the mesh and nothing that is sent", remedy)
                )
        if name is not None and not is_codec(name):
            remedy = did_you_mean(str(name), EXAMPLES) or f"say one of {', '.join(EXAMPLES)}, or None"
            errors.append(OptionError(who, f"{name!r}", "there is no such codec", remedy))
    raise_all(errors)
