"""Runs a part of a program as Python that fx generates, for one rank or for several ranks of this process."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from shardc.language.errors import CaptureError, ShardingError, note_place_in_model

from ..comm.comm import Comm
from ..comm.failure import explained, is_communication
from ..comm.process_group import is_profiled
from .lower import Collective, PartGraph, Place
from .rewrite import over_ranks, with_buffers, with_ranges, with_waits

Env = list[Any]  # the values of one rank, by slot; None before a value is computed and after its last reader
Values = Sequence[Tensor | None]  # in the order of a program's inputs, or of its outputs


def present(values: Values) -> list[Tensor]:
    """The values without None."""
    return [each for each in values if each is not None]


class PartRunner:
    """Runs a part of a program on envs.

    ``reads``: the slots that it takes; ``dead``: those of them that nobody reads later. ``results``: the slots that it
    fills. State: ``_modules``, by the number of ranks and whether calls have ranges.
    """

    def __init__(self, part: PartGraph, kept: Collection[int], is_eager: bool = True) -> None:
        """``kept``: the slots that are read later. ``is_eager``: products are written to the buffers of buckets."""
        self.reads, self.places, self.used_up = tuple(part.reads), dict(part.places), part.used_up
        computed = {slot: node for slot, node in part.nodes.items() if slot in kept and part.values not in node.args}
        self.dead, self.results = tuple(slot for slot in self.reads if slot not in kept), tuple(computed)
        self.graph = part.graph
        self.graph.output(tuple(computed.values()))
        if is_eager:
            with_buffers(self.graph)
        for wait, start in with_waits(self.graph).items():
            self.places[wait] = self.places[start]
        self._modules: dict[tuple[int, bool], fx.GraphModule] = {}

    def run(self, envs: Sequence[Env], comm: Comm | None) -> None:
        """Run the part, with one env for each rank of ``comm`` in this process.

        Collectives are started in program order, which is the same on every rank, and are waited for before their first
        reader.
        """
        if not self.results and not self.places:
            return
        key = len(envs), is_profiled()
        module = self._modules.get(key) or self.module(*key)
        try:
            results = module.forward(self.take(envs), comm)
        except Exception as error:
            if (place := self.place_of(error, module)) is not None:
                _raise_located(error, place, comm)
            raise
        self.put(envs, results)

    def module(self, count: int, has_ranges: bool = False) -> fx.GraphModule:
        """The module for ``count`` ranks; for several ranks each value is a list with an entry for each of them."""
        if (count, has_ranges) not in self._modules:
            graph = copy.deepcopy(self.graph)
            if count > 1:
                over_ranks(graph, count)
            if has_ranges:
                with_ranges(graph, self.places)
            self._modules[count, has_ranges] = fx.GraphModule(nn.Module(), graph)
        return self._modules[count, has_ranges]

    def take(self, envs: Sequence[Env]) -> list[Any]:
        """Return the values that the part reads; remove those that nobody reads later from the envs."""
        if len(envs) == 1:
            values: list[Any] = list(map(envs[0].__getitem__, self.reads))
        else:
            values = list(zip(*(map(env.__getitem__, self.reads) for env in envs), strict=True))
        for slot, env in product(self.dead, envs):
            env[slot] = None
        return values

    def put(self, envs: Sequence[Env], results: Sequence[Any]) -> None:
        """Store the part's results."""
        for slot, result in zip(self.results, results, strict=True):
            for env, value in zip(envs, result if len(envs) > 1 else (result,), strict=True):
                env[slot] = value

    def place_of(self, error: BaseException, module: fx.GraphModule) -> Place | None:
        """The place of the call that raised an error; a collective raises where it is started or waited for."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not module.forward.__code__:
            trace = trace.tb_next
        return None if trace is None else self.place_at(module, trace.tb_lineno)

    def place_at(self, module: fx.GraphModule, line: int) -> Place | None:
        """The place that a line of the generated Python comes from."""
        return self.places.get(module.code.split("\n")[line - 1].partition("=")[0].strip())


def _raise_located(error: Exception, place: Place, comm: Comm | None) -> NoReturn:
    """Raise the error of a call with its place in the model, and for a collective with the rank that is gone."""
    if place.collective is not None and comm is not None and is_communication(error):
        who, axes = _collective_text(place, place.collective), place.collective.axes
        raise explained(who, comm.ranks(axes)) from error.with_traceback(None)
    location = ", ".join(filter(None, (place.line or "the model", place.name)))
    if isinstance(error, IndexError) or "out of bounds" in str(error):  # comes from the user's data
        note_place_in_model(error, location)
    elif not isinstance(error, (CaptureError, ShardingError)):
        error.add_note(f"in {location}")
    raise error


def _collective_text(place: Place, collective: Collective) -> str:
    """``all_reduce_tp (down, model.py:14) over tp``; a bucket by its first value and the number of the others."""
    phase, _, rest = place.name.partition("/")
    module, _, name = rest.rpartition("/")
    module = "" if module == "(model)" else module
    where = [module if phase == "forward" else f"{phase} of {module}" if module else phase, place.line]
    if collective.layout is not None:
        first, *others = collective.layout.parts
        where.append(f"with {first.operand.name}" + (f" and {len(others)} more" if others else ""))
    return f"{name} ({', '.join(filter(None, where))}) over {', '.join(collective.axes)}"
