"""``dump --diff``: the values that came, went and changed between two passes, in one listing of both programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import fx

from shardc.language.errors import OptionError
from shardc.language.record import json_text
from shardc.program.program import Program
from shardc.program.text import call_line, input_text, op_names, remarks_of, result_text, type_text, value_names
from shardc.report.dump.program_record import node_entry
from shardc.report.dump.records import NodeEntry
from shardc.report.dump.selection import Selection

if TYPE_CHECKING:
    from shardc.compiler import Compiled

CONTEXT = 2  # unchanged lines around a change
T = TypeVar("T")


def dump_diff(compiled: Compiled, passes: str, format: str = "text", only: str = "") -> str:
    """The difference of the programs after two passes, ``propagate,insert_reshards``, as text or json.

    One pass alone is compared with the one before it. ``only``: a glob of values and modules, as for ``dump``. Raises
    an OptionError for an unknown pass or format.
    """
    names, known = passes.split(","), list(compiled.after)
    if len(names) == 1 and passes in known[1:]:
        names = [known[known.index(passes) - 1], passes]
    if len(names) != 2:
        what = f"{len(names)} pass{'es' if len(names) != 1 else ''} of {', '.join(known)}"
        raise OptionError(f"--diff {passes!r}", what, "a difference is between two", "say --diff PASS,PASS")
    before, after = (compiled.at(name) for name in names)
    difference = _Difference(names, _lines(before, only), _lines(after, only))
    if format == "json":
        return json_text(difference.record(before, after))
    if format == "text":
        return difference.text()
    remedy = "say --format text or json"
    raise OptionError(f"--diff {passes}", f"with --format {format}", "a difference is a listing", remedy)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program.

    ``key``: identifies the line in both programs. ``name``: the name of its value; "" for a result of the program.
    ``place``: its phase and module. ``plain_type``: its type without sharding.
    """

    key: str
    name: str
    place: str
    plain_type: str
    type: str
    text: str
    remark: str = ""

    def is_like(self, other: Line) -> bool:
        """Whether two lines agree in type, sharding and text."""
        return (self.plain_type, self.type, self.text) == (other.plain_type, other.type, other.text)


@dataclass(frozen=True, slots=True)
class ChangedNode:
    """A value that changed between two passes."""

    name: str
    before: NodeEntry
    after: NodeEntry


@dataclass(frozen=True, slots=True)
class PassDifference:
    """The values that came, went, moved and changed between two passes. ``before``, ``after``: names of the passes."""

    version: Literal[1] = field(default=1, init=False)
    before: str
    after: str
    came: tuple[NodeEntry, ...]
    went: tuple[NodeEntry, ...]
    moved: tuple[str, ...]
    changed: tuple[ChangedNode, ...]


def _lines(program: Program, only: str) -> list[Line]:
    """The lines of the values that ``only`` selects; all lines if it is empty."""
    if not only:
        return [line for _, line in _every_line(program)]
    selection = Selection.of(program, only)
    if selection.tables:
        problem, remedy = "a listing has no tables", "say a glob of values or modules; shardc diff has the tables"
        raise OptionError(f"--only {only}", "with --diff", problem, remedy)
    return [line for node, line in _every_line(program) if node in selection.nodes]


def _every_line(program: Program) -> Iterator[tuple[fx.Node | None, Line]]:
    names, ops, remarks = value_names(program), op_names(program), remarks_of(program)

    def line(node: fx.Node, place: str, text: str) -> Line:
        producer, index = program.value(node)
        types = program.types(producer)
        plain = str(types if producer is node and len(types) > 1 else types[index])
        return Line(node.name, node.name, place, plain, type_text(program, node), text, remarks.get(node, ""))

    for input_, node in zip(program.inputs, program.placeholders, strict=True):
        yield node, line(node, "inputs", input_text(program, input_, node))
    for node in program.graph.nodes:
        if node.op == "call_function":
            source = program.source(node)
            place = ", ".join(filter(None, (source.phase, source.module)))
            yield node, line(node, place, call_line(program, node, names, ops))
    for output, result in zip(program.outputs, program.results, strict=True):
        text = result_text(program, output, result, names)
        yield result, Line(f"{output.kind} {output.name}", "", "results", "", "", text)


class _Difference:
    """The difference of two programs, given as lines and named by their passes.

    ``pairs``: pairs of lines with equal keys, in the order of both programs; other lines are paired with None.
    ``came``, ``went``: names of values that only the new, or only the old, program has. ``moved``: names of values at
    another place among the others. ``changed``: names of values with another type, sharding or operands.
    """

    def __init__(self, passes: Sequence[str], before: Sequence[Line], after: Sequence[Line]) -> None:
        self.passes = passes
        self.pairs: list[tuple[Line | None, Line | None]] = []
        for is_equal, old, new in _blocks(before, after, lambda line: line.key):
            self.pairs += zip(old, new, strict=True) if is_equal else _by_place(old, new)
        self.old, self.new = ({line.name: line for line in lines if line.name} for lines in (before, after))
        self.came = [name for name in self.new if name not in self.old]
        self.went = [name for name in self.old if name not in self.new]
        both, aligned = [name for name in self.new if name in self.old], {b.name for a, b in self.pairs if a and b}
        self.moved = [name for name in both if name not in aligned]
        self.changed = [name for name in self.old if name in self.new and not self.old[name].is_like(self.new[name])]

    # Text.

    def text(self) -> str:
        """A line of counts, then the listing."""
        kinds: Counter[str] = Counter()
        for old, new in ((self.old[name], self.new[name]) for name in self.changed):
            is_type, is_sharding = old.plain_type != new.plain_type, old.type != new.type
            kinds["type" if is_type else "sharding" if is_sharding else "operands"] += 1
        how = ", ".join(f"{kinds[kind]} in {kind}" for kind in ("type", "sharding", "operands") if kinds[kind])
        counts = f"{len(self.came)} came, {len(self.went)} went, {len(self.moved)} moved, {len(self.changed)} changed"
        heading = f"{' to '.join(self.passes)}, values: {counts}{f' ({how})' if how else ''}"
        listing: list[tuple[str, Line]] = []  # every line with a blank, a minus or a plus before it
        for before, after in self.pairs:
            if before and after and before.is_like(after):
                listing.append((" ", after))
            else:
                listing += [(sign, line) for sign, line in (("-", before), ("+", after)) if line]
        return "\n".join([heading, *self._hunks(listing), ""])

    def _hunks(self, listed: Sequence[tuple[str, Line]]) -> Iterator[str]:
        """The changed lines and those around them, under their phase and module."""
        changed = [i for i, (sign, _) in enumerate(listed) if sign != " "]
        shown = {near for i in changed for near in range(i - CONTEXT, i + CONTEXT + 1) if 0 <= near < len(listed)}
        for last, i in pairwise([-2, *sorted(shown)]):
            sign, line = listed[i]
            if i != last + 1 or line.place != listed[last][1].place:
                yield f"\n@@ {line.place}" if i != last + 1 else f"@@ {line.place}"
            remark = f"  # {line.remark}" if line.remark and sign == "+" else ""
            yield f"{sign} {line.text}{remark}"

    def record(self, before: Program, after: Program) -> PassDifference:
        """The record, with entries as in a dump."""
        old, new = _entries(before), _entries(after)
        return PassDifference(
            before=self.passes[0],
            after=self.passes[1],
            came=tuple(new[name] for name in self.came),
            went=tuple(old[name] for name in self.went),
            moved=tuple(self.moved),
            changed=tuple(ChangedNode(name, old[name], new[name]) for name in self.changed),
        )


def _by_place(old: Sequence[Line], new: Sequence[Line]) -> Iterator[tuple[Line | None, Line | None]]:
    """Lines without a counterpart, each paired with None; those of one phase and module are side by side."""
    runs, others = ([list(run) for _, run in groupby(lines, lambda line: line.place)] for lines in (old, new))
    for is_equal, ours, theirs in _blocks(runs, others, lambda run: run[0].place):
        groups = zip(([run] for run in ours), ([run] for run in theirs), strict=True) if is_equal else [(ours, theirs)]
        for our_runs, their_runs in groups:
            yield from ((line, None) for run in our_runs for line in run)
            yield from ((None, line) for run in their_runs for line in run)


def _blocks(
    old: Sequence[T], new: Sequence[T], key: Callable[[T], str]
) -> Iterator[tuple[bool, Sequence[T], Sequence[T]]]:
    """The matching and the differing parts of two sequences, in order: whether their keys are equal, and both parts."""
    old_keys, new_keys = ([key(each) for each in entries] for entries in (old, new))
    for tag, i, end_i, j, end_j in SequenceMatcher(None, old_keys, new_keys, autojunk=False).get_opcodes():
        yield tag == "equal", old[i:end_i], new[j:end_j]


def _entries(program: Program) -> Mapping[str, NodeEntry]:
    ops = op_names(program)
    return {node.name: node_entry(program, node, ops) for node in program.graph.nodes if node.op != "output"}
