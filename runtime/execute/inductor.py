"""Runs the forward and the backward part of a program as code compiled by Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.program.program import Program

from ..comm.comm import Comm, Traffic
from ..comm.failure import waiting
from ..comm.process_group import in_range
from .executor import Executor, Rows, SavedEnvs
from .part import Env, PartRunner, Values
from .rewrite import Taker

# Random bits wrap modulo 2**64; the indices that Inductor propagates do not. The overlap passes are those that torch
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


class InductorExecutor(Executor):
    """An executor of one rank whose forward and backward parts are traced and compiled at their first run.

    Under a profiler each part is one range, since fused kernels belong to no single module. The update part consists of
    collectives only and runs uncompiled, and reductions are not deferred. State: ``_compiled``, by part.
    """

    comm: Comm
    deferred = frozenset()

    def __init__(self, program: Program, comm: Comm) -> None:
        super().__init__(program, comm, is_eager=False)
        self._compiled: dict[PartRunner, CompiledPart] = {}

    def forward(self, inputs: Sequence[Values], computed: Sequence[Values] | None = None) -> tuple[Rows, SavedEnvs]:
        return super().forward(_contiguous(inputs), computed)

    def backward(
        self, saved: SavedEnvs, tangents: Sequence[Values], keep: bool = False, takers: Sequence[Taker] = ()
    ) -> Rows:
        return super().backward(saved, _contiguous(tangents), keep, takers)

    def _run(self, part: PartRunner, envs: Sequence[Env]) -> None:
        if part not in (self._fwd, self._bwd):
            part.run(envs, self.comm)
            return
        name, axes = "forward" if part is self._fwd else "backward", self.comm.mesh.axis_names
        values = part.take(envs)
        if part not in self._compiled:
            self._compiled[part] = CompiledPart(part, values, self.comm)
        text = f"a collective of {name}, compiled by Inductor, over {', '.join(axes)}"
        # An error names the rank that is gone; compiled code does not know the collective.
        with in_range(f"{name}/(model)/inductor"), waiting(lambda: text, lambda: self.comm.ranks(axes)):
            part.put(envs, self._compiled[part](values))


class CompiledPart:
    """One compiled part. State: ``_sent``, the traffic of one run."""

    def __init__(self, part: PartRunner, example: Sequence[Any], comm: Comm) -> None:
        """``example``: the values that the part reads; for several ranks each is a list with an entry for each rank."""
        self._comm = comm
        self._sent = [replace(traffic, calls=Counter(), bytes=Counter()) for traffic in comm.traffic]
        self._exchange(self._sent)
        forward = part.module(len(comm.positions)).forward
        graph = make_fx(lambda *values: forward(list(values), comm), tracing_mode="fake")(*example)
        self._exchange(self._sent)
        # Not the GraphModule: its __call__ walks the traceback of an error, such as a guard's, and Dynamo traces that.
        self._call: Callable[..., Sequence[Tensor]] = torch.compile(
            graph.forward, fullgraph=True, dynamic=False, options=OPTIONS
        )

    def __call__(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the part."""
        results = self._call(*values)
        for traffic, sent in zip(self._comm.traffic, self._sent, strict=True):
            traffic.calls.update(sent.calls)
            traffic.bytes.update(sent.bytes)
        return results

    def _exchange(self, others: Sequence[Traffic]) -> None:
        """Swap the traffic counters with ``others``, since tracing sends nothing."""
        for traffic, other in zip(self._comm.traffic, others, strict=True):
            traffic.calls, other.calls = other.calls, traffic.calls
            traffic.bytes, other.bytes = other.bytes, traffic.bytes


def _contiguous(rows: Sequence[Values]) -> list[list[Tensor | None]]:
    """The rows with contiguous tensors, as the compiled parts expect them."""
    return [[None if value is None else value.contiguous() for value in values] for values in rows]
