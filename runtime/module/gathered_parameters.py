"""Parameters that are stored cut and computed on gathered (ZeRO 1 and 2): they are gathered after they were written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.program.lifetime import is_row_of_kept
from shardc.program.program import Program

from ..comm.comm import Comm
from ..execute.executor import Rows, Runner
from ..execute.interpreter import Values
from .optimizer import StepWatcher

Shards = list[Tensor]  # one for each rank that lives in this process


class GatheredParameters(StepWatcher):
    """The gathered parameters of a module, for all of its programs (``shards``, by name).

    A parameter counts as written if its version, its memory or the version of that changed, if an optimizer that holds
    it has stepped, or if its gradient changed outside of a backward, as an optimizer of one's own may do at its step.
    All ranks see the same, since all run one program. State: the versions of the parameters (``_written``) and of
    their gradients (``_gradients``) for which ``shards`` is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shards] = {}
        self._written: tuple[Any, ...] = ()
        self._gradients: tuple[Any, ...] = ()

    def is_current(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these parameters are gathered, and were not written since; they are watched from now on."""
        self.watch(parameters.values())
        is_written = self._written != self._versions() or self._gradients != self._gradient_versions()
        return parameters.keys() <= self.shards.keys() and not is_written

    def note_gathered(self) -> None:
        """The shards are those of the parameters as they are now."""
        self._written = self._versions()

    def note_backward(self) -> None:
        """Gradients are as a backward has left them."""
        self._gradients = self._gradient_versions()

    def note_step(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Gather all parameters again in the next call."""
        self._written = ()

    def _versions(self) -> tuple[Any, ...]:
        pairs = ((each, _piece(each)) for each in self.watched())
        return tuple((each._version, piece._version, piece.data_ptr()) for each, piece in pairs)

    def _gradient_versions(self) -> tuple[Any, ...]:
        gradients = (each.grad for each in self.watched())
        return tuple(None if each is None else (id(each), each._version) for each in gradients)


class ParameterGather:
    """Gathers the parameters of one program, where they were written since it was last done.

    ``outputs``: for each parameter that is gathered, by name, the index of the program's output.
    """

    def __init__(self, program: Program, runner: Runner, comm: Comm, outputs: Mapping[str, int],
                 cache: GatheredParameters) -> None:  # fmt: skip
        self.program, self.runner, self.comm, self.outputs, self.cache = program, runner, comm, outputs, cache
        self._first_rows = dict(self._find_first_rows())

    def __call__(self, values: Values, inputs: Sequence[Values]) -> Rows:
        """For each rank the gathered parameters, parallel to the program's outputs.

        ``values`` and, for each rank, ``inputs`` are parallel to the program's inputs: whole, and as shards.
        """
        pairs = zip(self.program.inputs, values, strict=True)
        parameters = {put.name: value for put, value in pairs if put.name in self.outputs and value is not None}
        if not self.cache.is_current(parameters):
            rows = self.runner.update(inputs, self._rows())
            for name, i in self.outputs.items():
                self.cache.shards[name] = [_dense(piece) for row in rows if (piece := row[i]) is not None]
            for name, row in self._first_rows.items():
                _share_memory(_piece(parameters[name]), self.cache.shards[name][0], row)
            self.cache.note_gathered()
        self.cache.note_backward()
        return self._rows()

    def _rows(self) -> Rows:
        rows: Rows = [[None] * len(self.program.outputs) for _ in self.comm.positions]
        for name, i in self.outputs.items():
            for row, piece in zip(rows, self.cache.shards.get(name, ()), strict=False):
                row[i] = piece
        return rows

    def _find_first_rows(self) -> Iterator[tuple[str, int]]:
        """For parameters whose shard is some rows of the gathered one, the first of these rows."""
        for put, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            gathered = self.program.results[self.outputs[put.name]] if put.name in self.outputs else None
            if put.kind != "parameter" or gathered is None:
                continue
            if is_row_of_kept(self.program, put.name, node, gathered):
                stored, computed = self.program.sharding(node), self.program.computed[put.name]
                added = stored.dims[0].axes[len(computed.dims[0].axes) :]
                index = stored.mesh.index(self.comm.positions[0], added)
                yield put.name, index * stored.local_shape(put.type.shape)[0]


def _piece(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _dense(gathered: Tensor) -> Tensor:
    """A contiguous tensor that shares no memory."""
    is_dense = gathered.is_contiguous() and gathered.untyped_storage().nbytes() == gathered.nbytes
    return gathered if is_dense else gathered.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _share_memory(piece: Tensor, gathered: Tensor, row: int) -> None:
    """Let a parameter's shard be rows of the gathered parameter: it is stored once."""
    rows = gathered[row : row + len(piece)]
    if piece.is_contiguous() and piece.data_ptr() != rows.data_ptr():
        piece.set_(gathered.untyped_storage(), rows.storage_offset(), piece.shape, piece.stride())
