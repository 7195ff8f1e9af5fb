"""The executor of both runtimes: a program as a list of instructions, run over the ranks that live in this process.

A program runs in parts. The *update* part makes what is kept until a parameter is written. The *forward* part is what
outputs and new buffers need beside; the *backward* part is the rest, and starts when the tangents are given. What is
alive between the two is what is saved for backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from shardc.language.collective_kind import LOCAL_KINDS
from shardc.language.errors import second_backward
from shardc.program.code_motion import deferrable
from shardc.program.collective import COLLECTIVES, collective_kind
from shardc.program.lifetime import PART_OF, is_new, split
from shardc.program.program import Program

from ..comm.comm import Comm
from .code import Part
from .deferred import Deferred, Sums, Totals, move
from .instruction import Env, Instruction, instructions, with_deaths, with_waits
from .interpreter import Values, run


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward run keeps for the backward run: an ``Env`` for each rank, empty once it is freed.

    ``used_up``: the slots whose memory the backward run writes over.
    """

    envs: tuple[Env, ...]
    used_up: Collection[int] = ()

    def take(self, keep: bool) -> tuple[Env, ...]:
        """The envs, to be used up, or copies to ``keep`` what is saved. RuntimeError if that was freed before."""
        if not all(self.envs):
            raise second_backward()
        taken = tuple(list(env) for env in self.envs)
        if keep:
            for env, slot in product(taken, self.used_up):
                env[slot] = env[slot].clone()
        else:
            for env in self.envs:
                env.clear()
        return taken

    @property
    def tensors(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors alive, for each rank."""
        return (tuple(value for value in env if isinstance(value, Tensor)) for env in self.envs)


class Executor:
    """A program ready to run. Without a ``comm`` it runs on one device, where collectives are identities.

    ``is_eager``: its ops run; else they are recorded for a compiler, which chooses kernels itself.

    It holds no values but constants: several forward runs may wait for their backward.
    """

    def __init__(
        self, program: Program, comm: Comm | None = None, device: torch.device | str = "cpu", is_eager: bool = True
    ) -> None:
        assert (comm is not None) == (program.level == "localized"), program.level
        self.program, self.comm = program, comm
        slots = {node: i for i, node in enumerate(program.graph.nodes)}
        self._num_slots = len(slots)
        self._inputs = [slots[node] for node in program.placeholders]
        self._results = [None if node is None else slots[node] for node in program.results]
        self._part = [PART_OF[output.kind] for output in program.outputs]
        self._ends: dict[str, list[tuple[int, int]]] = {}
        place = comm.device if comm else torch.device(device)
        is_of_rank = is_eager and comm is not None and len(comm.positions) == 1
        once = constants(program) if is_of_rank else []
        parts = _without(program, once)
        made_once, update, fwd, bwd = (
            with_waits(instructions(part, slots, place, program, is_eager, before))
            for part, before in zip((once, *parts), ((), (), (), parts[1]), strict=True)
        )
        self._used_up = {each.uses_up for each in bwd} - {-1}
        made = {slot for slot, _ in self._results_of("update")}
        self._kept = self._read_by(bwd, "backward") - {each.result for each in bwd}
        self._update = Part(with_deaths(update, made))
        results = self._kept | {slot for slot, _ in self._results_of("forward")}
        self._fwd = Part(with_deaths(fwd, results))
        self._bwd = Part(with_deaths(bwd, {slot for slot, _ in self._results_of("backward")}))
        self._blank: Env = [None] * self._num_slots
        read = {slot for part in (update, fwd, bwd) for each in part for slot in each.reads}
        if once:
            with torch.autocast(place.type, enabled=False):  # casts are in the program already
                run(with_deaths(made_once, read), [self._blank], comm)
            share(self._blank)

    @cached_property
    def deferred(self) -> frozenset[int]:
        """Of the program's outputs, those gradients whose reductions may run once for several backwards."""
        return frozenset(i for slot, i in self._results_of("backward") if slot in self._late)

    @cached_property
    def _late(self) -> set[int]:
        """The slots of what may wait."""
        late = deferrable(self.program) if self.comm else ()
        return {slot for slot, node in enumerate(self.program.graph.nodes) if node in late}

    @cached_property
    def _deferred(self) -> Deferred:
        """The backward part, parted so."""
        results = {slot for slot, _ in self._results_of("backward")}
        return Deferred(self._bwd, self._late, results, self._num_slots)

    @cached_property
    def _kept_in(self) -> dict[tuple[int, int], int]:
        """Of what the update part returns, where among the outputs it stands, by the call that makes it."""
        slots = {node: slot for slot, node in enumerate(self.program.graph.nodes)}
        ends = [(node, i) for i, node in enumerate(self.program.results) if node and self._part[i] == "update"]
        return {(slots[node], place): i for each, i in ends for node, place in [self.program.value(each)]}

    def update(self, inputs: Sequence[Values], into: Sequence[Values] | None = None) -> list[list[Tensor | None]]:
        """Run the update part: ``inputs`` for each rank, of which it reads parameters alone.

        Returns for each rank the ``computed`` results, parallel to the program's outputs, with None for the others;
        each is put ``into`` a tensor where there is one: by its gather, where the runtime can, or else copied.
        """
        envs, places = self._envs(inputs), dict(self._results_of("update"))
        is_together = self.comm is not None and self.comm.gathers_in_place  # else one at a time: there is a second copy
        for some in [self._update] if is_together else [[each] for each in self._update]:
            self._run(some, envs, into)
            made = [each.result for each in some if each.result in places]
            for slot, (env, values) in product(made, zip(envs, into or (), strict=False)):
                if (kept := values[places[slot]]) is not None and kept is not env[slot]:
                    env[slot] = kept.copy_(env[slot])
        return [self._collect(env, "update") for env in envs]

    def forward(
        self, inputs: Sequence[Values], computed: Sequence[Values] | None = None
    ) -> tuple[list[list[Tensor | None]], Saved]:
        """Run the forward part: ``inputs`` for each rank, parallel to the program's, None for tangents.

        ``computed`` is what ``update`` gave; without it the update part is run first. Returns for each rank the
        outputs, parallel to the program's, with None for the others; and what is saved.
        """
        envs = self._envs(inputs)
        if computed is None:
            self._run(self._update, envs)
        else:
            for slot, i in self._results_of("update"):
                for env, values in zip(envs, computed, strict=True):
                    env[slot] = values[i]
        self._run(self._fwd, envs)
        outputs = [self._collect(env, "forward") for env in envs]
        saved = self._empty_envs(len(envs))
        for (env, mine), slot in product(zip(envs, saved, strict=True), self._kept):
            mine[slot] = env[slot]
        return outputs, Saved(tuple(saved), self._used_up)

    def backward(self, saved: Saved, tangents: Sequence[Values], keep: bool = False) -> list[list[Tensor | None]]:
        """Run the backward part: ``tangents`` for each rank, parallel to the program's inputs, None elsewhere.

        Returns for each rank the gradients, parallel to the program's outputs, with None for the others. Frees what
        was saved unless told to ``keep`` it. RuntimeError if that was freed before.
        """
        envs = saved.take(keep)
        self._place(envs, tangents)
        self._run(self._bwd, envs)
        return [self._collect(env, "backward") for env in envs]

    def accumulate(
        self, saved: Saved, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool
    ) -> tuple[list[list[Tensor | None]], Sums]:
        """Run the backward part but for reductions that may wait: the gradients without the ``deferred``, and sums.

        ``totals`` of backwards before are used up, and what this one makes is added. One that ``is_last`` reduces them:
        all gradients are returned, and no sums. Else as ``backward``.
        """
        envs = saved.take(keep)
        self._place(envs, tangents)
        for env in envs:
            env += [None] * self._num_slots
        if totals is not None:
            move(totals.sums, envs, self._num_slots)
        self._run(self._deferred.instructions(totals, is_last), envs)
        sums = [] if is_last else [{slot: env[slot] for slot in self._deferred.open} for env in envs]
        return [self._collect(env, "backward") for env in envs], sums

    def close(self, sums: Sums) -> list[list[Tensor | None]]:
        """Run the reductions that waited: for each rank the ``deferred`` gradients, with None for the others."""
        envs = self._empty_envs(len(sums))
        move(sums, envs)
        self._run(self._deferred.closing, envs)
        return [self._collect(env, "backward") for env in envs]

    def keeps_input(self, index: int) -> bool:
        """Whether an input is saved for backward."""
        return self._inputs[index] in self._kept

    def keeps_output(self, index: int) -> bool:
        """Whether an output is saved for backward."""
        return self._results[index] in self._kept

    def _run(
        self, instructions: Iterable[Instruction], envs: Sequence[Env], into: Sequence[Values] | None = None
    ) -> None:
        run(instructions, envs, self.comm, self._kept_in if into else {}, into or ())

    def _envs(self, inputs: Sequence[Values]) -> list[Env]:
        envs = self._empty_envs(len(inputs))
        self._place(envs, inputs)
        return envs

    def _empty_envs(self, count: int) -> list[Env]:
        return [list(self._blank) for _ in range(count)]

    def _place(self, envs: Sequence[Env], inputs: Sequence[Values]) -> None:
        for env, values in zip(envs, inputs, strict=True):
            for slot, value in zip(self._inputs, values, strict=True):
                if value is not None:
                    env[slot] = value

    def _collect(self, env: Env, part: str) -> list[Tensor | None]:
        results: list[Tensor | None] = [None] * len(self._results)
        for slot, i in self._results_of(part):
            results[i] = env[slot]
        return results

    def _results_of(self, part: str) -> list[tuple[int, int]]:
        """The slot of each result of one part, and where among the program's outputs it stands."""
        if part not in self._ends:
            pairs = enumerate(zip(self._results, self._part, strict=True))
            self._ends[part] = [(slot, i) for i, (slot, made_by) in pairs if slot is not None and made_by == part]
        return self._ends[part]

    def _read_by(self, instructions: Sequence[Instruction], part: str) -> set[int]:
        """The slots that a part reads."""
        return {slot for each in instructions for slot in each.reads} | {slot for slot, _ in self._results_of(part)}


def _without(program: Program, once: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The calls of the update, the forward and the backward part that are not done once."""
    parts, known = split(program), set(once)
    return [[each for each in part if each not in known] for part in (parts.update, parts.forward, parts.backward)]


LARGEST = 2**20  # bytes; what is larger is not worth its memory between steps


def constants(program: Program) -> list[fx.Node]:
    """The calls whose results are the same at every step and small, in program order.

    None of which a user could be given the memory: what is returned, or looked at by what may be.
    """
    found: dict[fx.Node, None] = {}
    for node in program.calls:
        if found.keys() >= set(node.all_input_nodes) and not program.has_many(node) and _is_repeatable(node):
            type_ = program.local_type(node)
            if type_ is not None and type_.nbytes <= LARGEST:
                found[node] = None
    for node in reversed(list(found)):
        if not all(user in found or is_new(user) for user in node.users):
            del found[node]
    return list(found)


def share(values: list[Any]) -> None:
    """Let tensors of the same bits be one, as the masks that every layer makes; none of them is ever written."""
    seen: dict[tuple[Any, ...], list[Tensor]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and not (value.is_conj() or value.is_neg()):
            alike = seen.setdefault((value.dtype, value.shape, value.stride()), [])
            values[i] = next((each for each in alike if torch.equal(_bits(each), _bits(value))), value)
            if values[i] is value:
                alike.append(value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether a call does the same each time, sends nothing, and is torch's."""
    if node.target in COLLECTIVES:
        return collective_kind(node) in LOCAL_KINDS
    target: Any = node.target
    is_torch = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return is_torch and torch.Tag.nondeterministic_seeded not in target.tags


class Runner(Protocol):
    """The parts of one program, as ``Executor`` says; what is ``saved`` is a runner's own."""

    def update(self, inputs: Sequence[Values], into: Sequence[Values] | None = None) -> list[list[Tensor | None]]: ...
    def forward(
        self, inputs: Sequence[Values], computed: Sequence[Values] | None = None
    ) -> tuple[list[list[Tensor | None]], Any]: ...
    def backward(self, saved: Any, tangents: Sequence[Values], keep: bool = False) -> list[list[Tensor | None]]: ...
    def accumulate(
        self, saved: Any, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool
    ) -> tuple[list[list[Tensor | None]], Sums]: ...
    def close(self, sums: Sums) -> list[list[Tensor | None]]: ...
    @property
    def deferred(self) -> frozenset[int]: ...
    def keeps_input(self, index: int) -> bool: ...
    def keeps_output(self, index: int) -> bool: ...
