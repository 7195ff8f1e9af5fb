"""A suggestion: a plan that was compiled whole, with its cost and the reasons for each of its choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from shardc.costs.records import MemoryEntry
from shardc.language.machine import Machine, MachineEntry
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.record import json_of
from shardc.language.text import bytes_text, seconds_text
from shardc.options import Pipeline, Precision, Remat, Saved, Zero
from shardc.options.saved import saved_as
from shardc.report.suggest.records import Candidate, PipelineEntry, Suggested, SuggestionEntry, TimeParts, ZeroEntry
from shardc.search.pricing.whole import Cost
from shardc.search.space.plan import OPTIONS
from shardc.wire import Wire

KEYS = ("mesh", "annotations", *OPTIONS, "links", "optimizer", "wire")


@dataclass(frozen=True, slots=True)
class Suggestion(Mapping[str, Any]):
    """A plan for a model and its cost, as a mapping of arguments of ``shardc.parallelize`` and ``shardc.compile``.

    ``links``: the machine of the prediction. ``cost``: the cost of the program compiled whole. ``memory_limit``: the
    bytes of memory of a rank, or None. ``reasons``: a sentence for each choice, with the cost of the next best one.
    ``axis_links``: the link of each axis. ``hints``: options that would be faster but change numerical results, for you
    to choose; only the best plan has them.
    """

    mesh: Mesh
    annotations: Mapping[str, P]
    zero: Zero | None
    remat: Remat | None
    precision: Precision | None
    pipeline: Pipeline | None
    overlap: Literal["auto", "ring"] | None
    saved: Saved | None
    links: Machine
    optimizer: str
    wire: Wire | None
    cost: Cost
    memory_limit: int | None = None
    reasons: tuple[str, ...] = ()
    axis_links: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def __getitem__(self, key: str) -> Any:
        return {name: getattr(self, name) for name in KEYS}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.cost.seconds

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes on a rank by class, as ``shardc.Compiled.memory`` has them."""
        return self.cost.memory

    @property
    def excess(self) -> int:
        """The bytes by which the plan exceeds the memory; 0 if it fits."""
        return 0 if self.memory_limit is None else max(0, self.cost.memory["peak"] - self.memory_limit)

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.excess == 0

    def text(self) -> str:
        """Python that can be pasted before a call of ``parallelize``."""
        lines = [f"mesh = shardc.Mesh({', '.join(f'{name}={size}' for name, size in self.mesh.sizes.items())})"]
        lines += [
            "annotations = {",
            *(f"    {name!r}: {_qualified(spec)}," for name, spec in self.annotations.items()),
            "}",
        ]
        options = self._options | ({"wire": self.wire} if self.wire else {})
        arguments = [f"{name}={_argument(option)}" for name, option in options.items()]
        lines.append(f"model = shardc.parallelize({', '.join(['model', 'mesh', 'annotations', *arguments])})")
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """One line: mesh, options, predicted time and memory."""
        peak = bytes_text(self.cost.memory["peak"])
        fits = "" if self.fits else f", {bytes_text(self.excess)} too much"
        return f"{plan_text(self.mesh, self._options)}: {seconds_text(self.seconds)} a step, peak {peak}{fits}"

    @property
    def _options(self) -> dict[str, Any]:
        return {name: option for name in OPTIONS if (option := getattr(self, name)) is not None}

    def entry(self) -> SuggestionEntry:
        """The record of its JSON form."""
        cost, pipeline = self.cost, self.pipeline
        return SuggestionEntry(
            mesh=self.mesh.sizes,
            links=self.axis_links,
            annotations={name: repr(spec) for name, spec in self.annotations.items()},
            zero=None if self.zero is None else _entry(self.zero),
            remat=None if self.remat is None else python_text(self.remat),
            precision=None if self.precision is None else python_text(self.precision),
            pipeline=None
            if pipeline is None
            else PipelineEntry(pipeline.axis, pipeline.microbatches, pipeline.schedule, pipeline.balance),
            wire=self.wire,
            overlap=self.overlap,
            saved=None if self.saved is None else {key: _saved_text(entry) for key, entry in self.saved.items()},
            seconds=TimeParts(cost.seconds, cost.computing, cost.exposed, cost.bubble),
            memory=MemoryEntry(**cost.memory),
            excess=self.excess,
            wire_bytes=cost.wire_bytes,
            collectives=cost.num_collectives,
            flops=cost.flops,
            reasons=self.reasons,
            python=self.text(),
            hints=self.hints or None,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which ``shardc suggest --schema`` describes."""
        found: dict[str, Any] = json_of(self.entry())
        return found


class Suggestions(tuple[Suggestion, ...]):
    """Suggestions, the best first.

    ``bound``: a lower bound in seconds for all plans of the search: all computation, spread evenly over all devices,
    without any wait. ``compiled``: the number of programs that the search compiled. ``candidates``: all plans that were
    priced.
    """

    bound: float
    compiled: int
    candidates: tuple[Candidate, ...]

    def __new__(
        cls, found: Iterable[Suggestion], bound: float = 0.0, compiled: int = 0, candidates: Iterable[Candidate] = ()
    ) -> Suggestions:
        """Make suggestions of those found, with the other results of the search."""
        self = super().__new__(cls, found)
        self.bound, self.compiled, self.candidates = bound, compiled, tuple(candidates)
        return self


def suggested(suggestions: Suggestions, model: str) -> Suggested:
    """The record of the suggestions for a model, of which there has to be at least one."""
    first, machine = suggestions[0], suggestions[0].links
    entry = MachineEntry(machine.links, machine.device, machine.node or None, machine.between)
    return Suggested(
        model, first.mesh.size, first.memory_limit, entry, suggestions.bound, suggestions.compiled,
        tuple(each.entry() for each in suggestions), suggestions.candidates,
    )  # fmt: skip


def _entry(zero: Zero) -> ZeroEntry:
    return ZeroEntry("+".join(zero.axes), zero.stage, "+".join(zero.fast_axes) or None, zero.offload)


def _saved_text(entry: Any) -> str | None:
    """An entry of ``saved`` in the syntax of the command line: ``tp+host``."""
    how = saved_as(entry)
    return None if how is None else "+".join([*how.axes, *filter(None, [how.to])])


def plan_text(mesh: Mesh, options: Mapping[str, Any]) -> str:
    """A mesh and the options of a plan in one line."""
    return ", ".join(
        [f"{mesh}", *(f"{name}=" * (not is_dataclass(each)) + python_text(each) for name, each in options.items())]
    )


def python_text(option: Any) -> str:
    """An option as Python code, without fields that have their defaults, except for a few that are always shown."""
    if not is_dataclass(option):
        return repr(dict(option) if isinstance(option, Mapping) else option)
    said = {"axis", "stage", "microbatches", "schedule"}
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    defaults = {each.name: each.default for each in fields(option) if each.name not in said}
    values = {name: value for name, value in values.items() if value != {} and value != defaults.get(name, ...)}
    return f"{type(option).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def _argument(option: Any) -> str:
    """An option as Python code in which every name is qualified by ``shardc``."""
    if isinstance(option, Mapping):
        return f"{{{', '.join(f'{key!r}: {_qualified(entry)}' for key, entry in option.items())}}}"
    return "shardc." * is_dataclass(option) + python_text(option)


def _qualified(spec: Any) -> str:
    return (
        repr(spec).replace("P(", "shardc.P(", 1).replace("P.OPEN", "shardc.P.OPEN").replace("blocks(", "shardc.blocks(")
    )
