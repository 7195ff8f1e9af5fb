"""The values of a model on meta, from a state dict or from a folder that transformers wrote."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardc.capture.model import state_names
from shardc.language.errors import CheckpointError, did_you_mean, error_text
from shardc.language.sharding import TensorType

from ..huggingface.stored import under_names_of
from ..module.value import TensorValue, Value, WholeValue
from .file import DTYPES, OpenFile, named_errors

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
Initial = Callable[[Sequence[str]], Mapping[str, Tensor]]


def weights_of(model: nn.Module, source: Any, initial: Initial) -> dict[str, Value]:
    """The values of a model's parameters and buffers, by name; those in files are read when they are copied.

    ``source``: a mapping of names to tensors, or a folder with safetensors files, as transformers writes it. Names may
    lack or have the prefix of the model's base, and a transformers model's tensors may be stored in other parts.
    ``initial``: computes buffers on meta that the source lacks, by their names. Raises a CheckpointError for a
    parameter that the source lacks, or a tensor of another shape.
    """
    is_state = isinstance(source, Mapping)
    stored = ((name, TensorValue(each)) for name, each in source.items()) if is_state else _values_in(Path(source))
    given = under_names_of(model, dict(stored))
    parameters, buffers, aliases = state_names(model)
    names = {name: name for name in (*parameters, *buffers)}
    found: dict[str, Value] = {}
    used = set[str]()
    for name, first in (*names.items(), *aliases.items()):
        key = next((each for each in _keys(model, name) if each in given), None)
        if key is not None:
            used.add(key)
            found.setdefault(first, given[key])
    _check(parameters, buffers, found, given)
    if unused := [key for key in given if key not in used]:
        what = (
            f"{len(unused)} tensors that the model lacks: {', '.join(unused[:4])}{', ...' if len(unused) > 4 else ''}"
        )
        warnings.warn(
            error_text(_who(source), what, "they are not read", "see whether it is that model's"), stacklevel=4
        )
    lacking = [name for name in buffers if name not in found]
    others = {name: buffers[name] for name in lacking if not buffers[name].is_meta}
    if on_meta := [name for name in lacking if buffers[name].is_meta]:
        others |= initial(on_meta)
    return found | {name: TensorValue(each) for name, each in others.items()}


@dataclass(frozen=True)
class FileValue(WholeValue):
    """The value of a tensor in a file, whose pages are in this process's memory only while it is read."""

    file: OpenFile
    key: str

    @property
    def type(self) -> TensorType:
        header = self.file.headers[self.key]
        return TensorType(header.shape, DTYPES[header.code])

    def reading(self) -> AbstractContextManager[Tensor]:
        return self.file.reading(self.key)


def _who(source: Any) -> str:
    return "weights" if isinstance(source, Mapping) else f"weights {str(source)!r}"


def _keys(model: nn.Module, name: str) -> Iterator[str]:
    """The names under which a tensor of a model may be saved."""
    yield name
    prefix = getattr(model, "base_model_prefix", "")
    if prefix:
        yield name.removeprefix(f"{prefix}.")
        yield f"{prefix}.{name}"


def _check(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], found: Mapping[str, Value],
    given: Mapping[str, Value],
) -> None:  # fmt: skip
    for name in parameters:
        if name not in found:
            remedy = did_you_mean(name, given) or "give the model that was saved, or weights=model.state_dict() of one"
            raise CheckpointError(f"parameter {name!r}", "it has no values", "the weights do not have it", remedy)
    for name, tensor in (*parameters.items(), *buffers.items()):
        if name in found and found[name].type.shape != tuple(tensor.shape):
            what, problem = f"of shape {list(tensor.shape)}", f"the weights have {list(found[name].type.shape)}"
            raise CheckpointError(f"tensor {name!r}", what, problem, "make the model with the config that was saved")


def _values_in(folder: Path) -> Iterator[tuple[str, WholeValue]]:
    """The values of the tensors in the safetensors files of a folder; no tensor is read yet."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    with named_errors(folder / INDEX, "cannot be read"):
        if (folder / INDEX).exists():
            index = json.loads((folder / INDEX).read_text())
            files = [folder / name for name in dict.fromkeys(index["weight_map"].values())]
    if not files:
        what, problem = "a folder", "there is no safetensors file in it"
        raise CheckpointError(str(folder), what if folder.is_dir() else "no folder", problem, "give one that has some")
    for path in files:
        file = OpenFile(Path(os.path.realpath(path)))  # the hub's cache consists of links
        yield from ((key, FileValue(file, key)) for key in file.headers)
