"""A trace as records: Chrome's trace event format, which ui.perfetto.dev reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardc.language.record import Amount, Count


@dataclass(frozen=True, slots=True)
class TraceArgs:
    """The name of a process or a lane."""

    name: str


@dataclass(frozen=True, slots=True)
class TraceName:
    """What a process or a lane is called. ``pid``: 0 computation, 1 communication. ``tid``: a lane."""

    name: Literal["process_name", "thread_name"]
    ph: Literal["M"] = field(default="M", init=False)
    pid: Literal[0, 1]
    tid: Count
    args: TraceArgs


@dataclass(frozen=True, slots=True)
class Sent:
    """What a collective sends.

    ``axes``: major first. ``wire_bytes``: what a rank sends. ``steps``: messages that follow one another, as in a ring.
    ``waited``: microseconds in which nothing is computed because of it.
    """

    axes: tuple[str, ...]
    wire_bytes: Count
    steps: Count
    waited: Amount = 0.0


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Something that takes time.

    ``name``: phase/module/op; of a pipeline an action, such as 0F1. ``cat``: the kind of a collective, the phase of all
    else; of a pipeline the kind of an action. ``ts``: its start, in microseconds. ``dur``: microseconds. ``pid``: 0
    computation, 1 communication. ``tid``: a lane. ``args``: of a collective.
    """

    name: str
    cat: str
    ph: Literal["X"] = field(default="X", init=False)
    ts: Amount
    dur: Amount
    pid: Literal[0, 1]
    tid: Count
    args: Sent | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A step as it is predicted, in Chrome's trace event format: for ui.perfetto.dev."""

    displayTimeUnit: Literal["ms"] = field(default="ms", init=False)
    traceEvents: tuple[TraceName | TraceSlice, ...]
