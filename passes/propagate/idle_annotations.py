"""Annotations that change nothing: without them every value has the same sharding."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardc.program.program import Pin, Program

from .cut_blocks import cut_blocks
from .propagate import propagated

MOST = 8  # annotations to try one by one, at a propagation each

_KINDS = ("input", "parameter", "buffer")  # not outputs, which return whole and plain; not values, which end a sum


def idle_annotations(before: Program, after: Program) -> list[str]:
    """The texts of those annotations of inputs and parameters that change no sharding, each on its own.

    ``before``: the program before any annotation is read; ``after``: the propagated one. An annotation that cuts any
    other value is not idle. To try the rest, the program is propagated without them.
    """
    texts = sorted(_candidates(after), key=[pin.text for pin in after.pins].index)
    if texts and _is_same_without(texts, before, after):
        return texts
    return [text for text in texts if _is_same_without([text], before, after)] if 1 < len(texts) <= MOST else []


def _candidates(after: Program) -> set[str]:
    """The texts of annotations that cut no other value."""
    pins: dict[str, list[Pin]] = {}
    for pin in after.pins:
        pins.setdefault(pin.text, []).append(pin)
    nodes = {
        text: {after.named_inputs[pin.kind, pin.name] for pin in own}
        for text, own in pins.items()
        if all(pin.is_annotation and pin.kind in _KINDS for pin in own)
    }
    spread = {
        origin.annotation
        for node in (*after.placeholders, *after.calls)
        for origins in after.origins(node)
        for origin in origins.values()
        if node not in nodes.get(origin.annotation, ())
    }
    return set(nodes) - spread


def _is_same_without(texts: Collection[str], before: Program, after: Program) -> bool:
    pins = tuple(pin for pin in before.pins if pin.text not in texts)
    without = propagated(cut_blocks(replace(before, pins=pins)))
    ours, theirs = ([by.shardings(node) for node in (*by.placeholders, *by.calls)] for by in (without, after))
    return ours == theirs
