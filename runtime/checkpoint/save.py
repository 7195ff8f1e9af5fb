"""``shardc.save``: every rank writes its share to a new folder, and the first rank publishes it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.language.errors import CheckpointError
from shardc.language.sharding import dtype_name

from ..module.module import ParallelModule
from .file import CODES, Header, named_errors, write_file
from .folder import folder_of_group, keep_latest, new_folder, next_step, publish
from .index import NAME, FileEntry, Index, Piece, TensorEntry
from .ranks import Ranks, group_of, ranks_of
from .region import Block, choose_writers
from .state import State, Stored, block_of, state_to_save, unwrapped

FILE_BYTES = 2**32  # most bytes of tensors in one file, unless a single block has more
MERGED = ("optimizer", "residuals")  # sections of values of which ranks of a pipeline have different parts


class Save:
    """A save that may still be going on; ``wait`` returns the published folder, or raises the save's error."""

    def __init__(self, request: Request, in_thread: bool) -> None:
        self._request: Request | None = request
        self._result: Path | None = None
        self._error: BaseException | None = None
        self._is_seen = False
        self._thread = threading.Thread(target=self._run, name="shardc.save", daemon=True) if in_thread else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def wait(self) -> Path:
        """Wait until the checkpoint is published; return its folder. Raises the error of the save."""
        if self._thread is not None:
            self._thread.join()
        self._is_seen = True
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait, and raise the save's error unless ``wait`` has raised it before."""
        if not self._is_seen:
            self.wait()

    def _run(self) -> None:
        assert self._request is not None
        try:
            self._result = carry_out(self._request)
        except BaseException as error:  # raised again by wait
            self._error = error
        self._request = None  # and with it the copies


_latest_saves: dict[tuple[int, ...], Save] = {}  # by the ranks that save


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Save:
    """Save a module and an optimizer as a new checkpoint in the folder ``path``; every rank of the job must call it.

    The checkpoint is ``path/step-00000010``, and ``path/latest`` names it. If groups of ranks train by themselves
    (``Local``), each group saves its own: the first one there, others in ``path/group-1`` and so on.

    Args:
        path: the folder of checkpoints.
        module: a parallel module, or a plain one.
        optimizer: the optimizer of its parameters.
        scheduler: an object with a ``state_dict``.
        scaler: likewise.
        extra: numbers, strings, tensors, lists and dicts; the first rank's are saved.
        step: the number in the checkpoint's name; by default the parallel module's own, for a plain module one more
            than the largest.
        keep: the number of checkpoints to keep; older ones are removed once this one is published.
        asynchronous: copy the values that this rank writes and return; a thread writes them while training goes on.

    Returns:
        The save, whose ``wait()`` returns the checkpoint's folder once it is published. ``wait()``, or the next save of
        this module, raises the errors of an asynchronous save.

    Raises:
        CheckpointError: for a value that cannot be saved or a folder that cannot be written; every rank raises the
            error of any rank.

    Examples:
        >>> import tempfile, torch, shardc
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(8, 4)
        >>> shardc.save(folder, model, extra={"epoch": 1}, step=10).wait().name
        'step-00000010'
        >>> loaded = shardc.load(folder, model)
        >>> loaded["step"], loaded["extra"]
        (10, {'epoch': 1})
    """
    check_request(path, module, optimizer, step, keep)
    module = unwrapped(module)
    ranks = ranks_of(module, "saves")
    finish_save(ranks)
    if step is None and isinstance(module, ParallelModule):
        step = module.shardc.step
    request = Request(folder_of_group(Path(path), group_of(module)), ranks, step, keep)
    try:
        sections = {"scheduler": scheduler, "scaler": scaler}
        values = {name: None if each is None else each.state_dict() for name, each in sections.items()}
        state = state_to_save(module, optimizer, values | {"extra": extra}, ranks)
        shares = list(shares_of(state))
        request = replace(request, state=state, shares=[each.copy() for each in shares] if asynchronous else shares)
    except Exception as error:
        request = replace(request, error=error)
    done = Save(request, asynchronous)
    if asynchronous:
        _latest_saves[ranks.ranks] = done
    else:
        done.wait()
    return done


def finish_save(ranks: Ranks) -> None:
    """Wait for the latest asynchronous save of these ranks; raise its error unless that was raised before."""
    if (latest := _latest_saves.pop(ranks.ranks, None)) is not None:
        latest.finish()


@atexit.register
def _finish_saves() -> None:
    """Wait for unfinished saves, unless the process ends by an error: other ranks may be gone then."""
    for latest in list(_latest_saves.values()) if getattr(sys, "last_value", None) is None else ():
        latest.finish()


def check_request(path: Any, module: Any, optimizer: Any, step: Any, keep: Any) -> None:
    """Raise a CheckpointError for arguments of a wrong kind."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise CheckpointError("path", repr(path), "it names no folder", "write shardc.save('run/ckpt', module)")
    if not isinstance(module, nn.Module):
        remedy = "give the module that parallelize returned, or an nn.Module"
        raise CheckpointError("module", f"of type {type(module).__name__}", "it is no module", remedy)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        remedy = "give one of torch.optim; schedulers and scalers have arguments of their own"
        raise CheckpointError("optimizer", f"of type {type(optimizer).__name__}", "it is no optimizer", remedy)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (type(value) is not int or not least <= value < 10**18):
            problem = f"it is a whole number, {least} or more"
            raise CheckpointError(name, repr(value), problem, f"write {name}={max(least, 10)}")


@dataclass(frozen=True, slots=True)
class Share:
    """A block that this rank writes: its tensor, and its values."""

    tensor: str
    block: Block
    value: Tensor
    is_whole: bool

    @property
    def key(self) -> str:
        """Its key in the file."""
        return self.tensor if self.is_whole else f"{self.tensor}{self.block}"

    @property
    def header(self) -> Header:
        """Its dtype and shape."""
        return Header(CODES[self.value.dtype], self.block.sizes)

    def copy(self) -> Share:
        """The share with a copy of its values in host memory."""
        value = torch.empty(self.value.shape, dtype=self.value.dtype).copy_(self.value)
        return replace(self, value=value)


@dataclass(frozen=True, slots=True)
class Request:
    """The state to save, and its destination. ``error``: the reason why this rank cannot save, for the other ranks."""

    root: Path
    ranks: Ranks
    step: int | None
    keep: int | None
    state: State | None = None
    shares: Sequence[Share] = ()
    error: Exception | None = None


def shares_of(state: State) -> Iterator[Share]:
    """The blocks that this rank writes; one rank writes each block, and all write about as many bytes."""
    grids: dict[Any, dict[str, Stored]] = {}
    for key, each in state.tensors.items():
        _check_storable(key, each.value)
        if each.is_saved:
            grids.setdefault((each.layout.ranks, each.layout.shape), {})[key] = each
    for tensors in grids.values():
        sizes = {key: (each.layout, _bytes_of_a_part(each)) for key, each in tensors.items()}
        for key in sorted(choose_writers(sizes), key=list(tensors).index):
            each = tensors[key]
            blocks = [stored for stored in each.layout.blocks(each.shape) if stored.block.numel]
            assert sum(stored.block.numel for stored in blocks) == each.value.numel(), (key, blocks, each.value.shape)
            for stored in blocks:
                value = block_of(each.value, stored.offsets, stored.block.sizes)
                yield Share(key, stored.block, value, stored.block.sizes == each.shape)


def _check_storable(key: str, value: Tensor) -> None:
    is_dense = value.layout == torch.strided and not value.is_meta
    if value.dtype in CODES and is_dense:
        return
    what = f"{dtype_name(value.dtype)}, {value.layout}, on {value.device}".replace("torch.", "")
    remedy = "give it memory first" if value.is_meta else "save another form of it, such as torch.view_as_real(x)"
    raise CheckpointError(key, what, "a file of safetensors holds dense tensors of fewer dtypes", remedy)


def _bytes_of_a_part(stored: Stored) -> int:
    parts = [size for size, cut in zip(stored.layout.shape, stored.layout.cuts, strict=True) if cut is not None]
    whole = stored.value.itemsize
    for size in stored.shape:
        whole *= size
    for size in parts:
        whole //= size
    return whole


def carry_out(request: Request) -> Path:
    """Write this rank's share, wait for all others, and publish. Returns the folder; old ones stay until then."""
    ranks, error = request.ranks, request.error
    with ExitStack() as stack:
        folder = request.root
        if ranks.is_first and error is None:
            try:
                folder = stack.enter_context(new_folder(request.root))
            except Exception as caught:
                error = caught
        texts = ranks.agree(error, json.dumps([[str(request.root), request.step, request.keep], str(folder)]))
        requests, folders = zip(*map(json.loads, texts), strict=True)
        _check_equal(requests)
        folder, report = Path(folders[0]), dict[str, Any]()
        try:
            report = write_shares(request, folder)
        except Exception as caught:
            error = caught
        reports = [json.loads(text) for text in ranks.collect(json.dumps(report))]  # empty from a rank with an error
        if ranks.is_first and all(reports):
            try:
                folder = _publish(request, folder, joined(request, reports))
            except Exception as caught:
                error = caught
        published = Path(ranks.agree(error, str(folder))[0])
        if ranks.is_first and request.keep is not None:
            keep_latest(request.root, request.keep, published)
        return published


def _check_equal(requests: Sequence[Any]) -> None:
    for other in requests[1:]:
        if other != requests[0]:
            what, problem = f"{requests[0]} on the first rank", f"{other} on another"
            remedy = "give every rank the same path, step and keep"
            raise CheckpointError("shardc.save: path, step, keep", what, problem, remedy)


def write_shares(request: Request, folder: Path) -> dict[str, Any]:
    """Write this rank's files; return a report of them, for JSON."""
    assert request.state is not None
    files: dict[str, Any] = {}
    pieces: list[Any] = []
    for shares in _files_of(request.shares):
        name = f"rank-{request.ranks.index:05}{f'-{len(files)}' if files else ''}.safetensors"
        headers = {share.key: share.header for share in shares}
        files[name] = write_file(folder / name, headers, (share.value for share in shares), {"format": "pt"})
        pieces += [[each.tensor, each.block.offsets, each.block.sizes, name, each.key] for each in shares]
    tensors = {
        key: [CODES[each.value.dtype], each.shape]
        for key, each in request.state.tensors.items()
        if each.is_saved and each.layout.position == 0
    }
    values = request.state.values
    values = values if request.ranks.is_first else {name: values[name] for name in MERGED if name in values}
    aliases = request.state.aliases
    return {"files": files, "pieces": pieces, "tensors": tensors, "aliases": aliases, "values": values}


def _files_of(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """The shares of each file, wider dtypes first, so that each tensor is aligned for its dtype."""
    batch, size = list[Share](), 0
    for share in shares:
        if batch and size + share.value.nbytes > FILE_BYTES:
            yield sorted(batch, key=lambda each: -each.value.itemsize)
            batch, size = [], 0
        batch.append(share)
        size += share.value.nbytes
    if batch:
        yield sorted(batch, key=lambda each: -each.value.itemsize)


def joined(request: Request, reports: Sequence[Mapping[str, Any]]) -> Index:
    """The index of the files of all ranks. Raises a CheckpointError if these do not make a checkpoint."""
    files, aliases, tensors = dict[str, FileEntry](), dict[str, str](), dict[str, TensorEntry]()
    pieces: dict[str, list[Piece]] = {}
    values: dict[str, Any] = {}
    for report in reports:
        files |= {name: FileEntry(size, sha256) for name, (size, sha256) in report["files"].items()}
        aliases |= report["aliases"]
        tensors |= {key: TensorEntry(code, tuple(shape), ()) for key, (code, shape) in report["tensors"].items()}
        for key, offsets, sizes, file, name in report["pieces"]:
            pieces.setdefault(key, []).append(Piece(Block(tuple(offsets), tuple(sizes)), file, name))
        _add_values(values, report["values"])
    tensors = {key: replace(each, pieces=tuple(pieces.get(key, ()))) for key, each in tensors.items()}
    world = request.ranks.ranks
    notes = {"torch": str(torch.__version__), "ranks": f"{len(world)}, {world[0]} to {world[-1]}"}
    values["step"] = next_step(request.root) if request.step is None else request.step
    index = Index(files, tensors, aliases, values, notes)
    for problem in index.problems():
        remedy = "call shardc.save on every rank, with one module"
        raise CheckpointError(str(request.root), "the parts of all ranks do not make a checkpoint", problem, remedy)
    return index


def _add_values(values: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Add the values of a rank, and merge sections of which ranks have different parts."""
    for name, value in report.items():
        if name not in values:
            values[name] = value
        elif name == "optimizer":
            _add_optimizer(values[name], value)
        else:
            values[name].update(value)


def _add_optimizer(own: dict[str, Any], other: Mapping[str, Any]) -> None:
    own["state"].update(other["state"])
    for group in other["groups"]:
        same = next((each for each in own["groups"] if each["options"] == group["options"]), None)
        if same is None:
            own["groups"].append(group)
        else:
            same["params"] += group["params"]


def _publish(request: Request, folder: Path, index: Index) -> Path:
    """Write the index and publish the folder. Raises a CheckpointError if a file is missing or has another size."""
    for name, entry in index.files.items():
        with named_errors(folder / name, "cannot be read"):
            size = (folder / name).stat().st_size
        if size != entry.size:
            what, problem = f"{size} bytes", f"the rank that wrote it has written {entry.size}"
            remedy = "give a folder on a file system that all ranks share"
            raise CheckpointError(str(folder / name), what, problem, remedy)
    text = index.text()
    with named_errors(folder / NAME, "cannot be written"), open(folder / NAME, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return publish(folder, index.values["step"], text)
