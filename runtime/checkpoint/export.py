"""``shardc.export``: the first rank writes the whole model as a folder in Hugging Face's format."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.language.errors import CheckpointError

from ..comm.checksum import raw_bytes
from ..module.module import ParallelModule
from .file import CODES, DTYPES, Header, named_errors, write_file
from .ranks import Ranks, group_of, ranks_of
from .region import Block
from .save import Share, check_request, finish_save, shares_of
from .state import block_of, state_to_save, unwrapped

FILE = "model.safetensors"


def export(path: str | os.PathLike[str], module: nn.Module, *, file_bytes: int = 5 * 10**9) -> Path:
    """Write a module's parameters and buffers as a folder that ``from_pretrained`` of transformers loads.

    The folder has ``model.safetensors``, or several files and ``model.safetensors.index.json``, and ``config.json`` if
    the model has a config. Every rank of the job must call it. The first rank writes, and has one whole tensor in
    memory at a time. Of tied parameters it writes one, as transformers does.

    Args:
        path: the folder.
        module: a parallel module, or a plain one.
        file_bytes: the largest size of a file's tensors; only a single tensor may exceed it.

    Returns:
        The folder.

    Raises:
        CheckpointError: for a folder that cannot be written.
    """
    check_request(path, module, None, None, None)
    folder, module = Path(path), unwrapped(module)
    model: nn.Module = module.shardc.model if isinstance(module, ParallelModule) else module

    def write(tensors: WholeTensors) -> None:
        _write(folder, tensors, file_bytes)
        _write_config(folder, model, tensors)

    _on_first_rank(module, model, write)
    return folder


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """The ``save_pretrained`` of a model's class for its parallel module; every rank of a job must call it.

    The first rank writes the same files as the model's own, with the whole model in memory; ``export`` needs memory
    for one tensor.
    """

    @functools.wraps(save)
    def run(self: ParallelModule, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        def write(tensors: WholeTensors) -> None:
            state = kwargs.get("state_dict") or dict(zip(tensors.headers, tensors.values, strict=True))
            save(self, save_directory, *args, **{**kwargs, "state_dict": state, "is_main_process": True})

        _on_first_rank(self, self.shardc.model, write)

    return run


def whole_state(module: ParallelModule) -> dict[str, Tensor]:
    """The state dict of a parallel module with whole plain tensors in host memory, on the first rank; others get none.

    Every rank of the job must call it. Tied tensors are one tensor under all of their names.
    """
    state: dict[str, Tensor] = {}

    def keep(tensors: WholeTensors) -> None:
        for (name, header), value in zip(tensors.headers.items(), tensors.values, strict=True):
            assert value.shape == header.shape, (name, header)
            state.update(dict.fromkeys(tensors.all_names.get(name, [name]), value))

    _on_first_rank(module, module.shardc.model, keep)
    return state


def _on_first_rank(module: nn.Module, model: nn.Module, write: Callable[[WholeTensors], None]) -> None:
    """Call ``write`` on the first rank with the whole tensors of a module; all other ranks send their blocks.

    If several groups train by themselves, only the first one's tensors are written.
    """
    if group_of(module):
        return
    ranks = ranks_of(module, "exports")
    finish_save(ranks)
    tensors, error = None, None
    try:
        tensors = WholeTensors(module, model, ranks)
    except Exception as caught:
        error = caught
    ranks.agree(error)
    assert tensors is not None
    tensors.agree()
    if ranks.is_first:
        try:
            write(tensors)
        except Exception as caught:
            error = caught
    for _ in tensors.values:
        pass  # other ranks send their blocks; after an error the first rank still receives, so that nobody waits
    ranks.agree(error)


class WholeTensors:
    """The tensors of a module, whole on the first rank, one after the other.

    ``headers``: their types, by name, in the order of ``values``. ``all_names``: for each name the names of all tensors
    tied to it. State: ``_blocks``, on the first rank, for each name the rank's index and the block of every part.
    """

    def __init__(self, module: nn.Module, model: nn.Module, ranks: Ranks) -> None:
        state = state_to_save(module, None, {}, ranks)
        if "extra_state" in state.values:
            what, problem = f"extra state of {', '.join(state.values['extra_state'])}", "the format holds tensors alone"
            raise CheckpointError("shardc.export", what, problem, "use shardc.save, or take it out of the model")
        self.ranks, self.headers, self._blocks = ranks, dict[str, Header](), dict[str, list[Any]]()
        self._names = names_to_export(model, [key.partition("/")[2] for key in state.tensors], state.aliases)
        self.all_names = {written: [name] for name, written in self._names.items()}
        for alias, name in state.aliases.items():
            self.all_names[self._names[name]].append(alias)
        self._shares: dict[str, list[Share]] = {}
        for share in shares_of(state):
            self._shares.setdefault(share.tensor.partition("/")[2], []).append(share)
        self._types = {
            key.partition("/")[2]: [CODES[each.value.dtype], each.shape] for key, each in state.tensors.items()
        }

    def agree(self) -> None:
        """Tell the first rank all blocks, and all ranks the order of tensors."""
        own = {
            name: [[each.block.offsets, each.block.sizes] for each in shares] for name, shares in self._shares.items()
        }
        types: dict[str, Any] = {}
        for index, text in enumerate(self.ranks.collect(json.dumps([self._types, own, self._names]))):
            others, blocks, names = json.loads(text)
            types |= {names[name]: each for name, each in others.items()}
            for name, each in blocks.items():
                self._blocks.setdefault(names[name], []).extend((index, *block) for block in each)
        types = json.loads(self.ranks.agree(None, json.dumps(types) if self.ranks.is_first else "")[0])
        wide_first = sorted(types.items(), key=lambda each: -Header(each[1][0], (1,)).num_bytes)
        self.headers = {name: Header(code, tuple(shape)) for name, (code, shape) in wide_first}
        self.values = self._values()

    def _values(self) -> Iterator[Tensor]:
        """Yield the tensors on the first rank; on others send this rank's blocks and yield nothing."""
        own = {self._names[name]: shares for name, shares in self._shares.items()}
        for name, header in self.headers.items():
            shares = iter(own.get(name, ()))
            if not self.ranks.is_first:
                for share in shares:
                    self.ranks.group.send([raw_bytes(share.value.cpu())], 0, 1).wait()
                continue
            whole: Tensor | None = None
            for index, offsets, sizes in self._blocks.get(name, ()):
                block, value = Block(tuple(offsets), tuple(sizes)), next(shares).value if index == 0 else None
                if value is None:
                    value = torch.empty(block.sizes, dtype=DTYPES[header.code])
                    self.ranks.group.recv([raw_bytes(value)], index, 1).wait()
                whole = torch.empty(header.shape, dtype=value.dtype) if whole is None else whole
                block_of(whole, block.offsets, block.sizes).copy_(value)
            yield torch.empty(header.shape, dtype=DTYPES[header.code]) if whole is None else whole


def names_to_export(model: nn.Module, names: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The name under which each tensor is written; for tied ones the name that transformers does not tie on loading."""
    tied = [*(getattr(model, "_tied_weights_keys", None) or ())]

    def is_tied(name: str) -> bool:
        return any(name == each or re.search(each, name) for each in tied)

    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    return {name: min((name, *others.get(name, ())), key=is_tied) for name in names}


def _write(folder: Path, tensors: WholeTensors, file_bytes: int) -> None:
    """Write the tensors to one or several files; each file gets its name once it is on disk."""
    batches: list[dict[str, Header]] = [{}]
    for name, header in tensors.headers.items():
        if batches[-1] and sum(each.num_bytes for each in batches[-1].values()) + header.num_bytes > file_bytes:
            batches.append({})
        batches[-1][name] = header
    files = [FILE]
    if len(batches) > 1:
        files = [f"model-{i + 1:05}-of-{len(batches):05}.safetensors" for i in range(len(batches))]
    with named_errors(folder, "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, batch in zip(files, batches, strict=True):
        with _replacing(folder / file) as path:
            write_file(path, batch, (next(tensors.values) for _ in batch), {"format": "pt"})
    with named_errors(folder, "cannot be written"):
        (folder / f"{FILE}.index.json" if len(batches) == 1 else folder / FILE).unlink(missing_ok=True)
    if len(batches) > 1:
        places = {name: file for file, batch in zip(files, batches, strict=True) for name in batch}
        total = sum(each.num_bytes for each in tensors.headers.values())
        with _replacing(folder / f"{FILE}.index.json") as path:
            path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Context with a temporary path to write a file to; the file is renamed to ``path`` afterwards."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with named_errors(path, "cannot be written"):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_config(folder: Path, model: nn.Module, tensors: WholeTensors) -> None:
    """Write ``config.json`` and ``generation_config.json`` through transformers, if the model has such configs."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        codes = [each.code for each in tensors.headers.values() if DTYPES[each.code].is_floating_point]
        if codes:
            config.dtype = DTYPES[max(codes, key=codes.count)]
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
