"""The costs of a program as records: stages, schedule, predicted times, memory, operations, traffic. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardc.language.machine import SentKind
from shardc.language.record import Amount, Count, Size
from shardc.language.words import Part
from shardc.options import Balance
from shardc.program.provenance import Phase


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """Bytes on one rank; of a pipeline on the rank with the highest peak.

    ``optimizer``: its states, Adam's two by default. ``saved``: what forward makes and backward uses. ``gathered``: the
    most of gathered parameters alive at a time, and of what backward brings back of what is saved elsewhere. ``peak``:
    the most alive at a time, inputs and the optimizer included. ``offloaded``: those of the first three that are in
    host memory or in files; absent where none may be. ``saved_below``: what is saved there, beside ``saved``; absent
    where nothing is. ``residuals``: what codes left out of gradients, which is in the peak; absent where they leave out
    nothing.
    """

    parameters: Count
    gradients: Count
    optimizer: Count
    saved: Count
    gathered: Count
    peak: Count
    offloaded: Count | None = None
    saved_below: Count | None = None
    residuals: Count | None = None


@dataclass(frozen=True, slots=True)
class FlopsEntry:
    """Floating-point operations of a step; a multiply and an add are two.

    ``whole``: all that the model needs, on one device; null for a localized program.
    """

    per_rank: Count
    whole: Count | None


# Traffic, and the cost of a step.


@dataclass(frozen=True, slots=True)
class TrafficEntry:
    """The collectives of one kind, over the same axes, in one phase.

    ``axes``: major first. ``values``: how many values go in them.
    """

    phase: Phase
    kind: SentKind
    axes: tuple[str, ...]
    values: Count
    count: Count
    bytes: Count
    wire_bytes: Count


Way = Literal["fetched", "offloaded"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a step in one phase between the device and the tier below: host memory, or files.

    ``way``: fetched from there, or offloaded to it.
    """

    phase: Phase
    way: Way
    count: Count
    bytes: Count


@dataclass(frozen=True, slots=True)
class RingEntry:
    """The rings of a step over the same axes, in one phase, with as many steps each: of attention, or of products.

    ``axes``: major first. ``wire_bytes``: what a rank sends in all of them. ``held``: bytes of what comes round that a
    rank holds at a time, its gradients included. ``busiest``: operations of the busiest rank beside the mean of all,
    for which all ranks wait. Predicted seconds of all of them, where a machine is named: ``computing`` of the busiest
    rank, ``sending``, and ``waited``, in which a rank has nothing to compute until what is sent arrives.
    """

    phase: Phase
    of: Literal["attention", "products"]
    axes: tuple[str, ...]
    count: Count
    steps: Count
    wire_bytes: Count
    held: Count
    busiest: Amount
    computing: Amount | None = None
    sending: Amount | None = None
    waited: Amount | None = None


@dataclass(frozen=True, slots=True)
class OuterEntry:
    """What one rank sends in an outer step of groups that train by themselves, and how long that takes.

    ``groups``: how many there are along ``axis``. ``every``: the steps from one outer step to the next, in which a rank
    sends ``wire_bytes``; where parameters are in parts, in as many pieces. ``after``: the first steps, which send as
    much each.
    """

    axis: str
    groups: Size
    every: Size
    wire_bytes: Count
    seconds: float
    after: Count = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step in numbers.

    ``mesh``: the axes of ranks, with their sizes. ``traffic``: what one rank sends in a step, in the order in which
    each first occurs. ``flops``: floating-point operations of one rank. ``copies``: absent where there are none.
    ``outer``: of outer steps, absent without any. ``rings``: absent without any.
    """

    version: Literal[1] = field(default=1, init=False)
    mesh: Mapping[str, Size]
    traffic: tuple[TrafficEntry, ...]
    memory: MemoryEntry
    flops: Count
    copies: tuple[Copies, ...] | None = None
    outer: OuterEntry | None = None
    rings: tuple[RingEntry, ...] | None = None


@dataclass(frozen=True, slots=True)
class TrafficExpression:
    """The collectives of one kind, over the same axes, in one phase.

    ``axes``: major first. ``values``: how many values go in them.
    """

    phase: Phase
    kind: SentKind
    axes: tuple[str, ...]
    values: str
    bytes: str
    wire_bytes: str


@dataclass(frozen=True, slots=True)
class MemoryExpressions:
    """Of one rank, by class."""

    parameters: str
    gradients: str
    optimizer: str
    saved: str
    gathered: str
    peak: str
    offloaded: str | None = None
    saved_below: str | None = None


@dataclass(frozen=True, slots=True)
class CostExpressions:
    """Bytes, counts and operations."""

    traffic: tuple[TrafficExpression, ...]
    memory: MemoryExpressions
    flops: str


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """Where expressions hold.

    ``low``: the least size of each symbol. ``high``: the most. ``conditions``: in words. ``compiled``: the points that
    were compiled, each the size of each symbol.
    """

    low: Mapping[str, Size]
    high: Mapping[str, Size]
    conditions: tuple[str, ...]
    compiled: tuple[Mapping[str, Size], ...]


@dataclass(frozen=True, slots=True)
class CostAt:
    """The numbers at a point of --at.

    ``point``: the size of each symbol. ``traffic``: what one rank sends in a step, in the order in which each first
    occurs. ``flops``: floating-point operations of one rank.
    """

    point: Mapping[str, Size]
    traffic: tuple[TrafficEntry, ...]
    memory: MemoryEntry
    flops: Count


@dataclass(frozen=True, slots=True)
class SymbolicCost:
    """The cost of a step as expressions, as Python reads them, of the sizes of axes and of what --symbol names.

    ``plan``: what all points of the region have in common, in 12 hexadecimal digits. ``reference``: the sizes that the
    plan was first compiled at. ``region``: where the expressions hold.
    """

    version: Literal[1] = field(default=1, init=False)
    plan: str
    reference: Mapping[str, Size]
    expressions: CostExpressions
    region: RegionEntry
    at: tuple[CostAt, ...]


# The stages of a pipeline.


@dataclass(frozen=True, slots=True)
class SentValue:
    """A value that is sent."""

    name: str
    type: str
    bytes: Count


@dataclass(frozen=True, slots=True)
class SentEntry:
    """What a stage sends to another.

    ``to``: a stage. ``after``: the part of the sender's work. ``times``: in a step. ``over``: the axis; null where both
    stages are on one rank.
    """

    to: Count
    after: Part
    times: Size
    over: str | None
    values: tuple[SentValue, ...]


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A stage of a pipeline.

    ``rank``: along the pipeline's axis. ``modules``: the first and the last, as large as they are the stage's alone.
    ``parameters``: those that it holds. ``elements``: of these parameters, whole. ``parameter_bytes``: on one rank.
    ``flops``: of a step, on one rank. ``calls``: how many calls each part of its work has. ``sent``: what goes to other
    stages. ``actions``: its part of the schedule, in the cells of torch.distributed.pipelining.
    """

    stage: Count
    rank: Count
    modules: tuple[str, str]
    parameters: tuple[str, ...]
    elements: Count
    parameter_bytes: Count
    flops: Count
    calls: Mapping[Part, Count]
    sent: tuple[SentEntry, ...]
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A stage of a pipeline that runs a call, in which part of its work, or that holds a parameter."""

    stage: Count
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """The order in which the ranks of a pipeline work.

    ``place``: the rank of each stage. ``rows``: a CSV line for each rank, as torch.distributed.pipelining reads it.
    ``makespan``: seconds of a step, estimated. ``bubble``: seconds of it in which the busiest rank is idle, estimated.
    """

    name: str
    microbatches: Size
    place: tuple[Count, ...]
    rows: tuple[str, ...]
    makespan: float
    bubble: float


# Predicted times.


@dataclass(frozen=True, slots=True)
class AxesTime:
    """The collectives over the same axes. ``waited``: for how long nothing is computed because of them."""

    axes: str
    count: Count
    seconds: Amount
    waited: Amount


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Copies between the device and the tier below, in seconds.

    ``way``: fetched, or offloaded. ``waited``: in which computing is idle until one of them ends.
    """

    way: Way
    count: Count
    seconds: Amount
    waited: Amount


@dataclass(frozen=True, slots=True)
class TimeEntry:
    """A step on the machine that was named, predicted, in seconds; of a pipeline ``step`` alone.

    ``computing``: of forward and backward, with the copies that collectives need. ``optimizer``: of its step.
    ``shared``: of collectives that take the rank's own processor. ``copies``: from the tier below and to it.
    """

    step: Amount
    computing: Amount | None = None
    optimizer: Amount | None = None
    shared: Amount | None = None
    collectives: tuple[AxesTime, ...] | None = None
    copies: tuple[CopyTime, ...] | None = None


# A model cut in stages, before there is a schedule.


@dataclass(frozen=True, slots=True)
class ReceivedValue:
    """A value that comes from another stage. ``from_``: a stage."""

    value: str
    type: str
    from_: Count
    bytes: Count


@dataclass(frozen=True, slots=True)
class CutStage:
    """A stage.

    ``modules``: first and last, of each run of them. ``parameters``: each counted once, at the first stage that reads
    it. ``flops``: of forward and backward on the given inputs. ``time``: the fraction of all stages'.
    ``activation_bytes``: what it keeps for backward. ``memory_bytes``: with parameters, gradients, Adam's states and
    the activations of the microbatches in flight under 1F1B.
    """

    stage: Count
    modules: tuple[tuple[str, str], ...]
    parameters: Count
    flops: Count
    time: Amount
    activation_bytes: Count
    memory_bytes: Count
    received_bytes: Count
    received: tuple[ReceivedValue, ...]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages read. ``parameters``: its elements."""

    name: str
    parameters: Count
    stages: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class BalanceEntry:
    """The largest part over the mean."""

    params: Amount
    flops: Amount
    time: Amount
    memory: Amount


@dataclass(frozen=True, slots=True)
class CutStages:
    """A model cut in stages.

    ``by``: in what they are even. ``bound``: 1 if no split is better, else the fraction of the heaviest stage below
    which none is known to be. ``shared``: the parameters that several stages read.
    """

    version: Literal[1] = field(default=1, init=False)
    by: Balance
    balance: BalanceEntry
    bound: Amount
    stages: tuple[CutStage, ...]
    shared: tuple[SharedParameter, ...]
