"""A value whose sharding is fixed: what annotations are resolved to."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.sharding import Sharding

PARAMETER_FIRST, DATA, PARAMETER, YIELDING = -1, 0, 1, 2  # who speaks first about an axis: passes/pins.py says why


@dataclass(frozen=True, slots=True)
class Pin:
    """A value whose sharding the user fixed.

    ``name``: of an input, or of a node when ``kind`` is ``value``. ``open``: dims left to propagation. ``text``: the
    annotation as the user wrote it. ``kind`` decides who yields on conflict: inputs and values come before parameters.
    ``is_asked``: an output that is to come back whole, and is computed as it comes. ``stages``: of a pipeline, those
    that hold a parameter already.
    """

    name: str
    kind: str
    sharding: Sharding
    open: frozenset[int]
    text: str
    priority: int = 0
    is_asked: bool = False
    stages: frozenset[int] = frozenset()

    @property
    def is_said(self) -> bool:
        """Whether an annotation says it, and not a parameter that lies so already, nor a pipeline."""
        return ": P(" in self.text
