"""The ``saved`` option: by which further axes values are cut while they are saved for backward.

A value that every rank along an axis has whole takes that memory on each of them from forward until backward reads it.
With the option each rank saves its piece, and backward gathers the pieces before it reads them (ZeRO-R's partitioned
activations; Megatron's distributed saved activations).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P

Entry = str | Sequence[str] | P
Saved = Mapping[str, Entry | None]
EXAMPLE = "saved={'blocks.*': 'tp'}"


def axes_of_entry(entry: Entry) -> tuple[str, ...]:
    """The axes that an entry names."""
    if isinstance(entry, P):
        return tuple(name for given in entry.entries for name in _names(given))
    return _names(entry)


def dim_of_entry(entry: Entry) -> int | None:
    """The dim that an entry cuts; None where it is left to the compiler."""
    if not isinstance(entry, P):
        return None
    return next(dim for dim, given in enumerate(entry.entries) if _names(given))


def key_for(saved: Saved, modules: Collection[str]) -> str | None:
    """The key for a value that these modules read: the last that matches one of them."""
    return next((key for key in reversed(list(saved)) if any(fnmatchcase(path, key) for path in modules)), None)


def check_saved(saved: Any, mesh: Mesh) -> None:
    """Raise an OptionError for all entries of the option that have no meaning on a mesh."""
    if not isinstance(saved, Mapping):
        raise OptionError("option saved", f"saved={saved!r}", "it maps globs over modules to axes", f"say {EXAMPLE}")
    errors = []
    for key, entry in saved.items():
        who = f"saved={{{key!r}: {entry!r}}}"
        if not isinstance(key, str) or not key:
            errors.append(OptionError(who, f"{key!r}", "it is no glob over the paths of modules", f"say {EXAMPLE}"))
        if entry is not None and not _is_entry(entry):
            problem = "it is neither axes, nor a P with one dim cut, nor None"
            errors.append(OptionError(who, f"{entry!r}", problem, f"say {EXAMPLE}"))
        elif entry is not None:
            errors += _wrong_axes(who, axes_of_entry(entry), mesh)
    raise_all(errors)


def _wrong_axes(who: str, names: Sequence[str], mesh: Mesh) -> Iterator[OptionError]:
    for i, name in enumerate(names):
        if name not in mesh.axis_names:
            remedy = did_you_mean(name, mesh.axis_names) or f"say one of {', '.join(mesh.axis_names)}"
            yield OptionError(who, f"{name!r}", "it is no axis of the mesh", remedy)
        elif name in names[:i]:
            yield OptionError(who, f"{name!r}", "an axis cuts a value once", "name it once")


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, P):
        return len([given for given in entry.entries if _names(given)]) == 1
    names = entry if isinstance(entry, (tuple, list)) else (entry,)
    return bool(names) and all(isinstance(name, str) for name in names)


def _names(given: Any) -> tuple[str, ...]:
    each = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(name for name in each if isinstance(name, str))
