"""The ``saved`` option: how values are cut, and where they are, while they are saved for backward.

A value that every rank along an axis has whole takes that memory on each of them from forward until backward reads it.
With the option each rank saves its piece, and backward gathers the pieces before it reads them (ZeRO-R's partitioned
activations; Megatron's distributed saved activations). What is saved may be in the tier below the device's memory
meanwhile: in host memory, or in files of a folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def axes_of_entry(entry: Entry) -> tuple[str, ...]:
    """The axes that an entry names."""
    return tuple(name for part in _cuts(entry) for given in _entries(part) for name in _names(given))


def dim_of_entry(entry: Entry) -> int | None:
    """The dim that an entry cuts; None where it is left to the compiler."""
    cuts = _cuts(entry)
    if not cuts or not isinstance(cuts[0], P):
        return None
    return next(dim for dim, given in enumerate(cuts[0].entries) if _names(given))


def tier_of_entry(entry: Entry) -> str | None:
    """The tier that an entry names, ``"host"`` or the path of a folder; None where values stay on the device."""
    last = _parts(entry)[-1] if _parts(entry) else None
    if isinstance(last, os.PathLike) or (isinstance(last, str) and os.path.isabs(last)):
        return os.path.normpath(last)
    return HOST if last == HOST else None


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
        if entry is not None and not _is_entry(entry):
            problem = "it is neither axes, nor a P with one dim cut, nor 'host' or the path of a folder, nor None"
            errors.append(OptionError(who, f"{entry!r}", problem, f"say {EXAMPLE}"))
        elif entry is not None:
            errors += _wrong_axes(who, axes_of_entry(entry), mesh)
            errors += _ambiguous(who, entry, mesh)
    raise_all(errors)


def _wrong_axes(who: str, names: Sequence[str], mesh: Mesh) -> Iterator[OptionError]:
    for i, name in enumerate(names):
        if name not in mesh.axis_names:
            known = f"say one of {', '.join(mesh.axis_names)}, or last {HOST!r} or the absolute path of a folder"
            remedy = did_you_mean(name, mesh.axis_names) or known
            yield OptionError(who, f"{name!r}", "it is no axis of the mesh", remedy)
        elif name in names[:i]:
            yield OptionError(who, f"{name!r}", "an axis cuts a value once", "name it once")


def _ambiguous(who: str, entry: Entry, mesh: Mesh) -> Iterator[OptionError]:
    if tier_of_entry(entry) == HOST and HOST in mesh.axis_names:
        problem = "it is host memory, and an axis of the mesh"
        remedy = f"say P({HOST!r}) to cut dim 0 over the axis; for host memory give the axis another name"
        yield OptionError(who, repr(HOST), problem, remedy)


def _is_entry(entry: Any) -> bool:
    parts = _parts(entry)
    if not parts or not all(isinstance(part, (str, os.PathLike, P)) for part in parts):
        return False
    cuts = _cuts(entry)
    if any(isinstance(part, P) for part in cuts):
        return len(cuts) == 1 and len([given for given in cuts[0].entries if _names(given)]) == 1
    return all(isinstance(part, str) for part in cuts)


def _parts(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _cuts(entry: Entry) -> tuple[Any, ...]:
    """The parts of an entry that name axes."""
    parts = _parts(entry)
    return parts if tier_of_entry(entry) is None else parts[:-1]


def _entries(part: Any) -> tuple[Any, ...]:
    return part.entries if isinstance(part, P) else (part,)


def _names(given: Any) -> tuple[str, ...]:
    each = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(name for name in each if isinstance(name, str))
