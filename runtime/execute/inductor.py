"""Runs the forward and the backward part of a program as code compiled by Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.program.program import Program

from ..comm.comm import Comm, Traffic
from ..comm.failure import waiting
from ..comm.process_group import in_range
from .executor import Executor, Rows, Runner, SavedEnvs
from .interpreter import Values

Compiled = Callable[..., Sequence[Tensor]]
Table = Sequence[Sequence[Any]]  # for each rank a row of tensors, or None

# Random bits wrap modulo 2**64, but indices that Inductor propagates do not. The overlap passes are those that torch
# recommends; without them every collective starts after all computation.
OPTIONS: dict[str, Any] = {
    "constant_and_index_propagation": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}


class InductorRunner(Runner):
    """Runs a program as its executor does; each part is traced from the executor and compiled at its first run.

    Under a profiler each part is one range, since fused kernels belong to no single module. The update part consists of
    collectives only and runs uncompiled. State: ``_fwd`` and ``_bwd``, the compiled parts.
    """

    def __init__(self, program: Program, comm: Comm) -> None:
        self._executor, self._comm = Executor(program, comm, is_eager=False), comm
        self._fwd: CompiledPart | None = None
        self._bwd: CompiledPart | None = None

    def keeps_input(self, index: int) -> bool:
        return self._executor.keeps_input(index)

    def keeps_output(self, index: int) -> bool:
        return self._executor.keeps_output(index)

    def update(self, inputs: Sequence[Values], into: Sequence[Values] = ()) -> Rows:
        return self._executor.update(inputs, into)

    def forward(self, inputs: Sequence[Values], computed: Sequence[Values] | None = None) -> tuple[Rows, SavedEnvs]:
        def run(tables: Sequence[Table]) -> Sequence[Table]:
            outputs, saved = self._executor.forward(tables[0], tables[1] or None)
            return outputs, saved.envs

        tables = [_contiguous(inputs), computed or ()]
        if self._fwd is None:
            self._fwd = CompiledPart(run, tables, self._comm)
        with in_range("forward/(model)/inductor"), self._waiting("forward"):
            outputs, envs = self._fwd(tables)
        return outputs, SavedEnvs(tuple(envs))

    def backward(self, saved: SavedEnvs, tangents: Sequence[Values], keep: bool = False) -> Rows:
        def run(tables: Sequence[Table]) -> Sequence[Table]:
            envs, tangents = tables
            return (self._executor.backward(SavedEnvs(tuple(map(list, envs))), tangents),)

        tables = [saved.take(keep), _contiguous(tangents)]
        if self._bwd is None:
            self._bwd = CompiledPart(run, tables, self._comm)
        with in_range("backward/(model)/inductor"), self._waiting("backward"):
            (gradients,) = self._bwd(tables)
        return gradients

    def _waiting(self, part: str) -> AbstractContextManager[None]:
        """Let an error of a collective say which rank is gone; compiled code does not know which collective it was."""
        axes = self._comm.mesh.axis_names
        return waiting(
            lambda: f"a collective of {part}, compiled by Inductor, over {', '.join(axes)}",
            lambda: self._comm.ranks(axes),
        )


class CompiledPart:
    """One compiled part, with tables in and out.

    State: ``_places``: the indices of tensors among the flat arguments; ``_result_lengths``: those of the rows of
    results; ``_sent``: the traffic of a run.
    """

    def __init__(self, run: Callable[[Sequence[Table]], Sequence[Table]], example: Sequence[Table], comm: Comm) -> None:
        flat, lengths, self._comm = _flat(example), _lengths(example), comm
        assert all(value is None or isinstance(value, Tensor) for value in flat), list(map(type, flat))
        self._places = [i for i, value in enumerate(flat) if value is not None]

        def run_flat(*tensors: Tensor) -> list[Any]:
            values = dict(zip(self._places, tensors, strict=True))
            results = run(_nested(map(values.get, range(len(flat))), lengths))
            self._result_lengths = _lengths(results)
            return _flat(results)

        before = [replace(traffic, calls=Counter(), bytes=Counter()) for traffic in comm.traffic]
        self._exchange(before)
        graph = make_fx(run_flat, tracing_mode="fake")(*(flat[i] for i in self._places))
        self._exchange(before)
        self._sent = before
        # Not the module: its call goes through the traceback of an error, such as a guard raises, which Dynamo traces.
        self._compiled: Compiled = torch.compile(graph.forward, fullgraph=True, dynamic=False, options=OPTIONS)

    def __call__(self, tables: Sequence[Table]) -> list[list[list[Any]]]:
        """Run the part."""
        flat = _flat(tables)
        results = self._compiled(*[flat[i] for i in self._places])
        for traffic, sent in zip(self._comm.traffic, self._sent, strict=True):
            traffic.calls.update(sent.calls)
            traffic.bytes.update(sent.bytes)
        return _nested(results, self._result_lengths)

    def _exchange(self, others: Sequence[Traffic]) -> None:
        """Swap the traffic counters with others, since tracing sends nothing."""
        for traffic, other in zip(self._comm.traffic, others, strict=True):
            traffic.calls, other.calls = other.calls, traffic.calls
            traffic.bytes, other.bytes = other.bytes, traffic.bytes


def _contiguous(rows: Sequence[Values]) -> list[list[Tensor | None]]:
    """The rows with contiguous tensors, for which the parts are traced."""
    return [[None if value is None else value.contiguous() for value in values] for values in rows]


def _flat(tables: Sequence[Table]) -> list[Any]:
    return [value for table in tables for row in table for value in row]


def _lengths(tables: Sequence[Table]) -> list[list[int]]:
    return [[len(row) for row in table] for table in tables]


def _nested(flat: Iterable[Any], lengths: Sequence[Sequence[int]]) -> list[list[list[Any]]]:
    rest = iter(flat)
    return [[list(islice(rest, length)) for length in table] for table in lengths]
