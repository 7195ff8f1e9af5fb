"""Annotations that change nothing: without them every value lies the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardc.language.sharding import Sharding
from shardc.program.program import Pin, Program

from .cut_blocks import cut_blocks
from .propagate import propagate

MOST = 8  # annotations that are left out one by one, each of which costs a propagation

_KINDS = ("input", "parameter", "buffer")  # an output that is asked for whole comes back plain, a value ends a sum


def idle_annotations(before: Program, after: Program) -> list[str]:
    """The texts of annotations of inputs and parameters that change no sharding, each on its own.

    ``before``: the program as propagate takes it, ``after``: as it leaves it. Asked for are those alone from which no
    other value has a cut, by propagating without them.
    """
    said = sorted(_candidates(after), key=[pin.text for pin in after.pins].index)
    if said and _lies_alike(before, after, said):
        return said
    return [text for text in said if _lies_alike(before, after, [text])] if 1 < len(said) <= MOST else []


def _candidates(after: Program) -> set[str]:
    """The annotations from which no other value has a cut."""
    pins: dict[str, list[Pin]] = {}
    for pin in after.pins:
        pins.setdefault(pin.text, []).append(pin)
    said = {text: its for text, its in pins.items() if all(pin.is_said and pin.kind in _KINDS for pin in its)}
    own = {text: {after.named_inputs[pin.kind, pin.name] for pin in its} for text, its in said.items()}
    spread = {
        origin.annotation
        for node in (*after.placeholders, *after.calls)
        for origins in after.origins(node)
        for origin in origins.values()
        if node not in own.get(origin.annotation, ())
    }
    return set(said) - spread


def _lies_alike(before: Program, after: Program, left_out: Collection[str]) -> bool:
    left = tuple(pin for pin in before.pins if pin.text not in left_out)
    return _lies(propagate(cut_blocks(replace(before, pins=left)))) == _lies(after)


def _lies(program: Program) -> list[Sequence[Sharding | None]]:
    return [program.shardings(node) for node in (*program.placeholders, *program.calls)]
