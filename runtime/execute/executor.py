"""Runs the parts of a program over the ranks in this process, on both runtimes.

The *update* part computes values that stay valid until a parameter is written. The *forward* part computes outputs and
new buffers. The *backward* part is the rest, and runs on tangents. The values of the forward part that it reads are
saved for backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from shardc.language.errors import second_backward
from shardc.language.machine import LOCAL_KINDS
from shardc.ops.tier import offload
from shardc.program.collective import COLLECTIVES, collective_kind
from shardc.program.communication import deferrable
from shardc.program.lifetime import PART_OF, is_new, split
from shardc.program.program import Program, ends_of

from ..comm.comm import Comm
from ..comm.dtensor import same_bits
from .deferred import Deferred, Sums, Totals, move
from .lower import PartGraph, lower
from .part import Env, PartRunner, Values
from .rewrite import Taker, with_takers, with_targets

Rows = list[list[Tensor | None]]  # for each rank the program's outputs, with None for those of other parts


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context without autocast: a program contains its casts."""
    is_available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if is_available else nullcontext()


class Runner:
    """Runs the parts of one program, as ``Executor`` does. By default it defers no reductions and keeps no values.

    Each runner has its own type for the values ``saved`` for backward. ``computes_in_forward``: whether ``forward``
    takes residuals and computes the gradients too; in place of new residuals ``backward`` then returns their changes.
    """

    computes_in_forward = False

    def update(self, inputs: Sequence[Values], into: Sequence[Values] = ()) -> Rows:
        raise NotImplementedError

    def forward(self, inputs: Sequence[Values], computed: Sequence[Values] | None = None) -> tuple[Rows, Any]:
        raise NotImplementedError

    def backward(
        self, saved: Any, tangents: Sequence[Values], keep: bool = False, takers: Sequence[Taker] = ()
    ) -> Rows:
        raise NotImplementedError

    @property
    def taken(self) -> frozenset[int]:
        """The indices of outputs that are gradients which a function may take while backward is running."""
        return frozenset()

    @property
    def deferred(self) -> frozenset[int]:
        """The indices of outputs that are gradients whose reductions may run once for several backwards."""
        return frozenset()

    def accumulate(
        self, saved: Any, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool,
        takers: Sequence[Taker] = (),
    ) -> tuple[Rows, Sums]:  # fmt: skip
        raise NotImplementedError

    def close(self, sums: Sums, inputs: Sequence[Values]) -> Rows:
        raise NotImplementedError

    def reads_input(self, index: int) -> bool:
        """Whether a rank of this process reads an input."""
        return True

    def keeps_input(self, index: int) -> bool:
        """Whether an input is saved for backward."""
        return False

    def keeps_output(self, index: int) -> bool:
        """Whether an output is saved for backward."""
        return False


@dataclass(frozen=True, slots=True)
class SavedEnvs:
    """The values that a forward run saves for the backward run: an ``Env`` for each rank, empty once it is freed."""

    envs: tuple[Env, ...]

    def take(self, keep: bool, used_up: Collection[int]) -> tuple[Env, ...]:
        """Return the envs, and free them unless ``keep`` is set. Raises an OrderError if they were freed before.

        ``used_up``: the slots whose memory the backward run overwrites; with ``keep`` they are cloned.
        """
        if not all(self.envs):
            raise second_backward()
        result = tuple(list(env) for env in self.envs)
        if keep:
            for env, slot in product(result, used_up):
                env[slot] = env[slot].clone()
        else:
            for env in self.envs:
                env.clear()
        return result

    @property
    def tensors(self) -> Iterator[tuple[Tensor, ...]]:
        """The live tensors of each rank."""
        return (tuple(value for value in env if isinstance(value, Tensor)) for env in self.envs)


class Executor(Runner):
    """Runs a program. Without a ``comm`` it runs on one device, where collectives are identities.

    ``is_eager``: ops run; else they are traced for a compiler, which chooses kernels itself. An executor holds no
    values but constants, so that several forward runs may wait for their backward.
    """

    def __init__(
        self, program: Program, comm: Comm | None = None, device: torch.device | str = "cpu", is_eager: bool = True
    ) -> None:
        assert (comm is not None) == (program.level == "localized"), program.level
        self.program, self.comm, self._is_eager = program, comm, is_eager
        self._slots = {node: i for i, node in enumerate(program.graph.nodes)}
        self._inputs = [self._slots[node] for node in program.placeholders]
        self._results = [None if node is None else self._slots[node] for node in program.results]
        self._results_by_part = {
            part: [
                (slot, i)
                for i, (slot, output) in enumerate(zip(self._results, program.outputs, strict=True))
                if slot is not None and PART_OF[output.kind] == part
            ]
            for part in ("update", "forward", "backward")
        }
        self._device = comm.device if comm else torch.device(device)
        has_constants = is_eager and comm is not None and len(comm.positions) == 1
        once = constants(program) if has_constants else []
        whole, left_out = split(program), set(once)
        parts = (whole.update, whole.forward, whole.backward)
        self._calls = [[node for node in part if node not in left_out] for part in parts]
        fwd, bwd = self._lower(self._calls[1]), self._lower_backward(self._calls[2])
        self._saved = {*bwd.reads, *(self._slots_of("backward") - bwd.nodes.keys())}
        self._update = self._part(self._lower(self._calls[0]), self._slots_of("update"))
        self._fwd = self._part(fwd, self._saved | self._slots_of("forward"))
        self._bwd = self._part(bwd, self._slots_of("backward"))
        self._blank: Env = [None] * len(self._slots)
        if once:
            read = {slot for part in (self._update, self._fwd, self._bwd) for slot in part.reads}
            with without_autocast(self._device):
                self._part(self._lower(once), read).run([self._blank], comm)
            share(self._blank)

    def update(self, inputs: Sequence[Values], into: Sequence[Values] = ()) -> Rows:
        """Run the update part on the parameters among ``inputs``, one row for each rank.

        Returns for each rank the ``computed`` results, in the order of the program's outputs, with None for the others.
        Results are written to the tensors of ``into``, if there are any: by the gathers themselves if the runtime can
        do that, else by copies.
        """
        envs = self._envs(inputs)
        for env, values in zip(envs, into, strict=False):
            env += values
        self._run(self._update_into if into else self._update, envs)
        return [self._collect(env, "update") for env in envs]

    @cached_property
    def _update_into(self) -> PartRunner:
        """The update part that writes its results to tensors, which are in slots after those of the program."""
        part, results = self._lower(self._calls[0]), self._results_by_part["update"]
        targets = {slot: len(self._slots) + i for slot, i in results}
        with_targets(part, targets, in_place=self.comm is not None and self.comm.gathers_in_place)
        return self._part(part, self._slots_of("update"))

    def forward(self, inputs: Sequence[Values], computed: Sequence[Values] | None = None) -> tuple[Rows, SavedEnvs]:
        """Run the forward part on ``inputs``, a row for each rank in the order of the program's, None for tangents.

        ``computed``: results of ``update``; without them the update part runs first. Returns for each rank the part's
        results, in the order of the program's outputs, with None for the others; and the values saved for backward.
        """
        envs = self._envs(inputs)
        if computed is None:
            self._run(self._update, envs)
        else:
            for slot, i in self._results_by_part["update"]:
                for env, values in zip(envs, computed, strict=True):
                    env[slot] = values[i]
        self._run(self._fwd, envs)
        outputs = [self._collect(env, "forward") for env in envs]
        saved = [list(self._blank) for _ in envs]
        for (env, copy), slot in product(zip(envs, saved, strict=True), self._saved):
            copy[slot] = env[slot]
        return outputs, SavedEnvs(tuple(saved))

    def backward(
        self, saved: SavedEnvs, tangents: Sequence[Values], keep: bool = False, takers: Sequence[Taker] = ()
    ) -> Rows:
        """Run the backward part on ``tangents``, a row for each rank in the order of the program's inputs.

        Returns for each rank the gradients, in the order of the program's outputs, with None for the others. The
        ``takers``, one for each rank, get their gradients as they are computed; for these, too, it returns None. Frees
        the saved values unless ``keep`` is set. Raises an OrderError if they were freed before.
        """
        part = self._bwd_taken if takers else self._bwd
        envs = self._filled(saved.take(keep, part.used_up), tangents)
        for env, taker in zip(envs, takers, strict=False):
            env.append(taker)
        self._run(part, envs)
        return [self._collect(env, "backward") for env in envs]

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._taken)

    @cached_property
    def _taken(self) -> dict[int, tuple[int, int]]:
        """By index of an output, the slots of a gradient that goes to the tier below and of its parameter."""
        if not self._is_eager or self.program.options.offloaded is None:
            return {}
        slots, ends = self._slots, enumerate(ends_of(self.program))
        return {
            i: (slots[result], slots[owner])
            for i, (output, owner, result) in ends
            if output.kind == "gradient" and owner is not None and result is not None and result.target is offload
        }

    @cached_property
    def _bwd_taken(self) -> PartRunner:
        """The backward part that passes gradients to a function, which is in the last slot."""
        part = self._lower_backward(self._calls[2])
        with_takers(part, self._taken, len(self._slots))
        return self._part(part, self._slots_of("backward"))

    def accumulate(
        self, saved: SavedEnvs, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool,
        takers: Sequence[Taker] = (),
    ) -> tuple[Rows, Sums]:  # fmt: skip
        """Run the backward part without the reductions that may be deferred, and add to the ``totals`` of earlier runs.

        Returns the gradients that are not ``deferred``, and the sums to be reduced later. The last run reduces them,
        and returns all gradients and no sums. Otherwise like ``backward``.
        """
        part = self._deferred.part(totals, is_last, bool(takers))
        envs = self._filled(saved.take(keep, part.used_up), tangents)
        for env, taker in zip_longest(envs, takers):
            env += [None] * len(self._slots) + [taker]
        if totals is not None:
            move(totals.sums, envs, len(self._slots))
        self._run(part, envs)
        sums = [] if is_last else [{slot: env[slot] for slot in self._deferred.open} for env in envs]
        return [self._collect(env, "backward") for env in envs], sums

    def close(self, sums: Sums, inputs: Sequence[Values]) -> Rows:
        """Run the deferred reductions. Returns for each rank their results, with None for all others.

        ``inputs``: the residuals and momenta that they read, a row for each rank in the order of the program's inputs.
        """
        envs = self._envs(inputs)
        move(sums, envs)
        self._run(self._deferred.closing, envs)
        return [self._collect(env, "backward") for env in envs]

    @cached_property
    def deferred(self) -> frozenset[int]:
        slots, outputs = {self._slots[node] for node in self._deferrable}, self.program.outputs
        results = self._results_by_part["backward"]
        return frozenset(i for slot, i in results if slot in slots and outputs[i].kind == "gradient")

    @cached_property
    def _deferrable(self) -> frozenset[fx.Node]:
        return deferrable(self.program) if self.comm else frozenset()

    @cached_property
    def _deferred(self) -> Deferred:
        kept = self._slots_of("backward")
        return Deferred(self._calls[2], self._deferrable, self._slots, kept, self._lower_backward, self._taken)

    def keeps_input(self, index: int) -> bool:
        return self._inputs[index] in self._saved

    def keeps_output(self, index: int) -> bool:
        return self._results[index] in self._saved

    def _lower(self, calls: Sequence[fx.Node], before: Sequence[fx.Node] = ()) -> PartGraph:
        return lower(calls, self._slots, self._device, self.program, self._is_eager, before)

    def _lower_backward(self, calls: Sequence[fx.Node], before: Sequence[fx.Node] = ()) -> PartGraph:
        """Lower calls of the backward part that run after the calls ``before`` of it."""
        return self._lower(calls, (*self._calls[1], *before))

    def _part(self, graph: PartGraph, kept: Collection[int]) -> PartRunner:
        return PartRunner(graph, kept, self._is_eager)

    def _run(self, part: PartRunner, envs: Sequence[Env]) -> None:
        part.run(envs, self.comm)

    def _envs(self, inputs: Sequence[Values]) -> list[Env]:
        return self._filled([list(self._blank) for _ in inputs], inputs)

    def _filled(self, envs: Sequence[Env], inputs: Sequence[Values]) -> list[Env]:
        """The envs with the inputs of each rank; an input of None leaves its slot as it is."""
        for env, values in zip(envs, inputs, strict=True):
            for slot, value in zip(self._inputs, values, strict=True):
                if value is not None:
                    env[slot] = value
        return list(envs)

    def _collect(self, env: Env, part: str) -> list[Tensor | None]:
        """The results of a part, in the order of the program's outputs."""
        results: list[Tensor | None] = [None] * len(self._results)
        for slot, i in self._results_by_part[part]:
            results[i] = env[slot]
        return results

    def _slots_of(self, part: str) -> set[int]:
        """The slots of a part's results."""
        return {slot for slot, _ in self._results_by_part[part]}


LARGEST = 2**20  # bytes; a larger constant is not worth its memory between steps


def constants(program: Program) -> list[fx.Node]:
    """The calls of torch's ops and of local collectives whose results are small and the same at every step, in order.

    Leaves out results whose memory a user may see: those that are returned, or may share memory with a returned one.
    """
    result: dict[fx.Node, None] = {}
    for node in program.calls:
        target: Any = node.target
        if target in COLLECTIVES:
            is_repeatable = collective_kind(node) in LOCAL_KINDS
        else:
            is_torch = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
            is_repeatable = is_torch and torch.Tag.nondeterministic_seeded not in target.tags
        if is_repeatable and result.keys() >= set(node.all_input_nodes) and not program.has_many(node):
            if (type_ := program.local_type(node)) is not None and type_.nbytes <= LARGEST:
                result[node] = None
    for node in reversed(list(result)):
        if not all(user in result or is_new(user) for user in node.users):
            del result[node]
    for node in list(result):  # in order, so that calls that read removed ones are removed, too
        if not result.keys() >= set(node.all_input_nodes):
            del result[node]
    return list(result)


def share(values: list[Any]) -> None:
    """Replace tensors of equal bits, such as the masks of all layers, by one of them; none of them is ever written."""
    by_type: dict[tuple[Any, ...], list[Tensor]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and not (value.is_conj() or value.is_neg()):
            others = by_type.setdefault((value.dtype, value.shape, value.stride()), [])
            values[i] = next((each for each in others if same_bits(each, value)), value)
            if values[i] is value:
                others.append(value)
