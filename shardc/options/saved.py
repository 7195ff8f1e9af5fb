"""The ``saved`` option: the cuts and places of values while they are saved for backward.

A value that is whole on every rank along an axis takes memory on each of them from forward until backward reads it.
With the option each rank saves its piece, and backward gathers the pieces before it reads them (ZeRO-R's partitioned
activations; Megatron's distributed saved activations). Meanwhile a saved value may be in the tier below the device's
memory: in host memory, or in files of a folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P

from .zero import HOST

Part = str | os.PathLike[str] | P
Entry = Part | Sequence[Part]  # axes or a P, and then a tier
Saved = Mapping[str, Entry | None]
EXAMPLE = "saved={'blocks.*': 'tp'}, or saved={'blocks.*': 'host'}"


@dataclass(frozen=True, slots=True)
class SavedAs:
    """The form of a saved value: cut over ``axes``, in the tier ``to``, which is ``"host"`` or a folder.

    ``dim``: the dim that is cut; None leaves it to the compiler. ``to``: None for a value on the device.
    """

    axes: tuple[str, ...]
    dim: int | None
    to: str | None


def saved_as(entry: Any) -> SavedAs | None:
    """Read an entry of the option; None if it has no meaning."""
    *cuts, last = entry if isinstance(entry, (tuple, list)) and entry else (entry,)
    if (to := _tier(last)) is None:
        cuts.append(last)
    if len(cuts) == 1 and isinstance(cuts[0], P):
        dims = {dim: names for dim, given in enumerate(cuts[0].entries) if (names := _names(given))}
        return next((SavedAs(names, dim, to) for dim, names in dims.items()), None) if len(dims) == 1 else None
    return SavedAs(tuple(cuts), None, to) if all(isinstance(name, str) for name in cuts) else None


def _tier(part: Any) -> str | None:
    if isinstance(part, str) and os.path.isabs(part):
        return os.path.normpath(part)
    return HOST if part == HOST else None


def with_text(saved: Any) -> Any:
    """The option with paths as text, for printing, packing, and comparison between ranks."""

    def text(part: Any) -> Any:
        return os.fspath(part) if isinstance(part, os.PathLike) else part

    if not isinstance(saved, Mapping):
        return saved
    return {
        key: type(entry)(map(text, entry)) if isinstance(entry, (tuple, list)) else text(entry)
        for key, entry in saved.items()
    }


def tier_text(tier: str) -> str:
    """A tier in words."""
    return "host memory" if tier == HOST else f"files of {tier}"


def key_for(saved: Saved, modules: Collection[str]) -> str | None:
    """The key for a value that these modules read: the last that matches one of them."""
    return next((key for key in reversed(list(saved)) if any(fnmatchcase(path, key) for path in modules)), None)


def check_saved(saved: Any, mesh: Mesh) -> None:
    """Raise an OptionError for all entries of the option that have no meaning on a mesh."""
    if not isinstance(saved, Mapping):
        problem = "it maps globs over modules to axes, or to where values are"
        raise OptionError("option saved", f"saved={saved!r}", problem, f"say {EXAMPLE}")
    errors = []
    for key, entry in saved.items():
        who = f"saved={{{key!r}: {entry!r}}}"
        if not isinstance(key, str) or not key:
            errors.append(OptionError(who, f"{key!r}", "it is no glob over the paths of modules", f"say {EXAMPLE}"))
        how = None if entry is None else saved_as(entry)
        if how is not None:
            errors += _misnamed(who, how, mesh)
        elif entry is not None:
            problem = "it is neither axes, nor a P with one dim cut, nor 'host' or the path of a folder, nor None"
            errors.append(OptionError(who, f"{entry!r}", problem, f"say {EXAMPLE}"))
    raise_all(errors)


def _misnamed(who: str, how: SavedAs, mesh: Mesh) -> Iterator[OptionError]:
    for i, name in enumerate(how.axes):
        if name not in mesh.axis_names:
            known = f"say one of {', '.join(mesh.axis_names)}, or last {HOST!r} or the absolute path of a folder"
            remedy = did_you_mean(name, mesh.axis_names) or known
            yield OptionError(who, f"{name!r}", "it is no axis of the mesh", remedy)
        elif name in how.axes[:i]:
            yield OptionError(who, f"{name!r}", "an axis cuts a value once", "name it once")
    if how.to == HOST and HOST in mesh.axis_names:
        problem = "it is host memory, and an axis of the mesh"
        remedy = f"say P({HOST!r}) to cut dim 0 over the axis; for host memory give the axis another name"
        yield OptionError(who, repr(HOST), problem, remedy)


def _names(given: Any) -> tuple[str, ...]:
    each = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(name for name in each if isinstance(name, str))
