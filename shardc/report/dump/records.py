"""A dump, and the difference of two, as records, version 1. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardc.costs.records import (
    Copies,
    FlopsEntry,
    MemoryEntry,
    RingEntry,
    RunEntry,
    ScheduleEntry,
    StageEntry,
    TimeEntry,
)
from shardc.language.machine import SentKind
from shardc.language.record import FURTHER, Count, Size
from shardc.language.words import Level
from shardc.program.provenance import Phase


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A buffer, an input or an output of the model.

    ``name``: as the user's model calls it. ``shape``: of the whole value; of one rank's part in a localized program.
    ``dtype``: of torch, as float32. ``sharding``: as f32[8@dp, 64]{sum tp}; null where there is none yet, or no more.
    ``local_shape``: of what one rank holds.
    """

    name: str
    shape: tuple[Count, ...]
    dtype: str
    sharding: str | None
    local_shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class ParameterEntry(ValueEntry):
    """A parameter. ``stages``: of a pipeline, the stages that hold it."""

    stages: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """What ranks exchange, or a message from a stage of a pipeline to another.

    ``id``: its node's name; of a pipeline unique over stages. ``axes``: the mesh axes, or parts of axes as tp:(2)2,
    over which ranks exchange; major first. ``local_shape_in``: one rank's, before. ``local_shape_out``: one rank's,
    after. ``bytes``: the larger of one rank's input and output, padding included. ``wire_bytes``: what one rank sends
    by the ring algorithm; where ranks differ, the most. ``wire_bytes_total``: what all ranks send; of a pipeline, those
    of the stage. ``node``: the values that it moves, joined by a comma and a blank. ``source``: the lines of the user's
    model, file.py:line, likewise. ``cause``: why it is there, down to the annotations; parts end with a semicolon.
    ``stage``: of a pipeline, whose it is. ``times``: of a pipeline, how often it goes in a step. ``steps``: of a ring,
    how often keys and values go on to a neighbour. ``codec``: of what is sent in codes.
    """

    id: str
    kind: SentKind
    axes: tuple[str, ...]
    dtype: str
    local_shape_in: tuple[Count, ...]
    local_shape_out: tuple[Count, ...]
    bytes: Count
    wire_bytes: Count
    wire_bytes_total: Count
    phase: Phase
    node: str
    source: str
    cause: str
    stage: Count | None = None
    times: Size | None = None
    steps: Count | None = None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A value of the program, in order.

    ``op``: what makes it; placeholder for what comes in, getitem for one of several results. ``type``: as
    f32[8@dp, 64]{sum tp}; several in parentheses. ``operands``: the names of the values that it is made of.
    ``module``: the path of the user's module; empty for the model itself. ``source``: the user's line, file.py:line.
    ``runs``: of a pipeline, who runs it.
    """

    name: str
    op: str
    type: str
    operands: tuple[str, ...]
    phase: Phase
    module: str
    source: str
    runs: tuple[RunEntry, ...] | None = None


@dataclass(frozen=True, slots=True)
class Dump:
    """A program after a pass. Bytes and shapes are those of one rank where they are not said to be whole.

    ``mesh``: the axes of ranks, with their sizes. ``only``: what was asked for, where other tables, or other entries of
    tables, are left out. ``collectives``: in the order of the program. ``fallbacks``: ops without a rule, which run
    whole on every rank. ``stages``: of a pipeline, once its program is lowered. ``schedule``: of a pipeline.
    ``copies``: between the device and the tier below, of a step; absent where there are none. ``rings``: those of
    attention and of products, with ``time``; absent where there are none.
    ``notes``: what the compiler has to say of what it did. ``seconds``: what capture and each pass took; only where
    asked for.
    """

    CONDITIONS: ClassVar[Mapping[str, Any]] = {
        "anyOf": [
            {"required": ["collectives", "parameters", "buffers", "inputs", "outputs", "fallbacks", "memory", "flops",
                          "stages", "notes", "nodes"]},
            {"required": ["only"]},
        ]
    }  # fmt: skip

    version: Literal[1] = field(default=1, init=False)
    level: Level
    mesh: Mapping[str, Size]
    only: str | None = None
    collectives: tuple[CollectiveEntry, ...] | None = None
    parameters: tuple[ParameterEntry, ...] | None = None
    buffers: tuple[ValueEntry, ...] | None = None
    inputs: tuple[ValueEntry, ...] | None = None
    outputs: tuple[ValueEntry, ...] | None = None
    fallbacks: tuple[NodeEntry, ...] | None = None
    memory: MemoryEntry | None = None
    copies: tuple[Copies, ...] | None = None
    flops: FlopsEntry | None = None
    stages: tuple[StageEntry, ...] | None = None
    schedule: ScheduleEntry | None = None
    time: TimeEntry | None = None
    rings: tuple[RingEntry, ...] | None = None
    notes: tuple[str, ...] | None = None
    nodes: tuple[NodeEntry, ...] | None = None
    seconds: Mapping[str, float] | None = None


# The difference of two dumps.

Pair = tuple[Any, Any]  # as it was, and as it is


@dataclass(frozen=True, slots=True)
class ChangedParameter:
    """As it was, and as it is; null where it is not there."""

    name: str
    before: ParameterEntry | None
    after: ParameterEntry | None


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """As it was, and as it is; null where it is not there."""

    name: str
    before: ValueEntry | None
    after: ValueEntry | None


@dataclass(frozen=True, slots=True)
class ChangedCollective:
    """One that is not as it was."""

    before: CollectiveEntry
    after: CollectiveEntry


@dataclass(frozen=True, slots=True)
class ChangedTotal:
    """Those of one phase and kind, over the same axes. ``axes``: joined by +. ``count``: in a step."""

    phase: Literal[Phase, ""]
    kind: str
    axes: str
    count: tuple[Count, Count]
    bytes: tuple[Count, Count]
    wire_bytes: tuple[Count, Count]


@dataclass(frozen=True, slots=True)
class ChangedCollectives:
    """Which came, went and changed, and what that adds up to.

    ``totals``: of a phase, a kind and axes, where they differ; last of all together, by empty names.
    """

    came: tuple[CollectiveEntry, ...]
    went: tuple[CollectiveEntry, ...]
    changed: tuple[ChangedCollective, ...]
    totals: tuple[ChangedTotal, ...]


@dataclass(frozen=True, slots=True)
class ChangedStage:
    """What is not the same of a stage, by key of a dump's stage."""

    changed: Mapping[str, Pair] = field(metadata=FURTHER)
    stage: Count


@dataclass(frozen=True, slots=True)
class ChangedFallbacks:
    """Ops without a rule that came and went."""

    came: tuple[NodeEntry, ...]
    went: tuple[NodeEntry, ...]


@dataclass(frozen=True, slots=True)
class ChangedNotes:
    """Remarks of the compiler that came and went."""

    came: tuple[str, ...]
    went: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two plans; a key that is absent is of what is the same. Pairs are as it was, and as it is.

    ``mesh``: the axes of ranks, with their sizes. ``parameters``, ``buffers``, ``inputs``, ``outputs``: those that are
    not the same. ``memory``: bytes on one rank, by class. ``flops``: floating-point operations. ``schedule``: of a
    pipeline, by key of a dump's schedule. ``time``: by key of a dump's time. ``stages``: of a pipeline. ``ops``: how
    many calls of each op there are. ``left_out``: tables that one of the plans, a part of a dump, does not have, and
    which are not compared.
    """

    version: Literal[1] = field(default=1, init=False)
    level: tuple[Level, Level] | None = None
    mesh: tuple[Mapping[str, Size], Mapping[str, Size]] | None = None
    collectives: ChangedCollectives | None = None
    parameters: tuple[ChangedParameter, ...] | None = None
    buffers: tuple[ChangedValue, ...] | None = None
    inputs: tuple[ChangedValue, ...] | None = None
    outputs: tuple[ChangedValue, ...] | None = None
    memory: Mapping[str, tuple[int | None, int | None]] | None = None
    flops: Mapping[str, tuple[int | None, int | None]] | None = None
    schedule: Mapping[str, Pair] | None = None
    time: Mapping[str, Pair] | None = None
    stages: tuple[ChangedStage, ...] | None = None
    fallbacks: ChangedFallbacks | None = None
    notes: ChangedNotes | None = None
    ops: Mapping[str, tuple[Count, Count]] | None = None
    left_out: tuple[str, ...] | None = None
