"""Bytes alive on one rank over a step, by class: of a program, of each rank of a pipeline, and over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from shardc.costs.count import nbytes, stored_bytes
from shardc.costs.ledger import Block, Ledger, bytes_of
from shardc.costs.replay import ledgers_of
from shardc.program.lifetime import split
from shardc.program.program import Program, residuals_of

CURVE_CLASSES = ("parameters", "inputs", "gathered", "saved", "outputs", "gradients", "working")


def memory_of(program: Program) -> dict[str, int]:
    """Bytes on one rank by class, of an annotated program or a later one; of a pipeline, on the rank of highest peak.

    ``parameters``: as they are stored, with the copies that are kept to compute on; shared bytes count once.
    ``gradients``: as they are before the optimizer's step; under stage 1 of ``Zero`` they are then whole.
    ``optimizer``: its states in the parameter's dtype, Adam's two by default (the fp32 master copy of ZeRO's paper is a
    parameter here). ``saved``: activations that forward makes and backward reads; in a pipeline the most that
    microbatches under way keep between two actions of the schedule. ``gathered``: the most bytes at a time of gathered
    parameters, and of values that the option ``saved`` names and backward brings back; in a pipeline all gathered
    bytes, since they live for the whole step, in host memory while their stage is offloaded.
    ``offloaded``: the bytes of parameters, gradients and optimizer in the tier below. ``saved_below``: the activations
    saved there, beside ``saved``. ``residuals``: the part that codes leave out of gradients, kept from step to step.
    ``peak``: the most bytes alive at a time, inputs and optimizer included. In a pipeline that counts the inputs of all
    microbatches, the sums of gradients and their summands, and messages: from their computation until they are sent,
    and from their receive until their last reader. Idle stages that are offloaded have no memory on the device.
    """
    return max(memory_by_rank(program), key=lambda memory: memory["peak"])


def memory_by_rank(program: Program) -> list[dict[str, int]]:
    """The bytes of ``memory_of`` for each rank of a lowered or localized pipeline; for other programs, for one rank."""
    return [memory_on(program, ledger) for ledger in ledgers_of(program)]


def memory_on(program: Program, ledger: Ledger, count: Callable[[Iterable[Block]], Any] = bytes_of) -> dict[str, Any]:
    """The bytes by class of one rank. ``count``: adds up the bytes of blocks, by default at the program's sizes."""
    stored, options = stored_bytes(program, ledger.parameters), program.options
    offloaded = stored.pop("offloaded")
    residuals = sum(nbytes(program.local_type(node)) for node in residuals_of(program, ledger.parameters))
    further = {"offloaded": offloaded} if options.offloads else {}
    further |= {"saved_below": count(ledger.saved_below)} if ledger.saved_below else {}
    further |= {"residuals": residuals} if residuals else {}
    return {
        **stored,
        "saved": count(ledger.saved),
        "gathered": count(ledger.gathered),
        "peak": count(ledger.most()) + (0 if options.offloads else stored["optimizer"]),
        **further,
    }


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory by class over a step.

    ``places``: the calls in the order in which they run. ``starts``: the index of the first call of each phase.
    ``changes``: by class, pairs of an index and the bytes alive from there on; ``len(places)`` is the end of the step.
    """

    places: tuple[fx.Node, ...]
    starts: dict[str, int]
    changes: dict[str, list[tuple[int, int]]]

    def record(self) -> dict[str, Any]:
        """The JSON form, without classes that have no bytes."""
        classes = {name: changes for name, changes in self.changes.items() if changes}
        return {"places": [node.name for node in self.places], "starts": self.starts, "classes": classes}


def memory_curve(program: Program) -> MemoryCurve:
    """The memory of a program without stages; the highest sum over classes is the ``peak`` of ``memory_of``.

    ``parameters``: as stored, with the copies kept to compute on. ``inputs``: data and buffers. ``gathered``,
    ``saved``, ``optimizer``: see ``memory_of``. ``outputs``, ``gradients``: results. ``working``: freed in the phase
    that made it.
    """
    (ledger,), parts = ledgers_of(program), split(program)
    starts = {"update": 0, "forward": len(parts.update), "backward": len(parts.update) + len(parts.forward)}
    changes = {kind: _changes(ledger.curve(kind)) for kind in CURVE_CLASSES}
    states = 0 if program.options.offloads else stored_bytes(program, ledger.parameters)["optimizer"]
    return MemoryCurve(tuple(ledger.calls), starts, {**changes, "optimizer": [(0, states)] if states else []})


def _changes(levels: Sequence[int]) -> list[tuple[int, int]]:
    return [(i, now) for i, (before, now) in enumerate(pairwise((0, *levels))) if now != before]
