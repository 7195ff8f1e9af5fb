"""The Graphviz form of a program: its values in boxes of stages, phases and modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count, takewhile

from torch import fx

from shardc.costs.stages.record import StageRecord
from shardc.language.errors import OptionError
from shardc.language.text import bytes_text
from shardc.program.collective import COLLECTIVES
from shardc.program.communication import bucket, is_collective
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import op_names, type_text, value_names
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.dump.selection import Selection

COLLECTIVE_COLOR, FALLBACK_COLOR, MESSAGE_COLOR, SAVED_COLOR = "#f4a261", "#e76f51", "#2a9d8f", "#9aa5b1"
MOST = 4  # most types, and most further lines, in a node
STYLE = """\
  node [shape=box, fontname=monospace];
  edge [arrowsize=0.6, fontname="sans-serif"];
  graph [fontname="sans-serif", color="#9aa5b1", ranksep=0.3, nodesep=0.2, labelloc=t, labeljust=l];"""


def program_dot(program: Program, selection: Selection | None = None) -> str:
    """The program, or the selected values, in the language of Graphviz.

    Boxes of modules are inside boxes of phases. Collectives and ops without a rule are coloured. Values that forward
    saves for backward have dashed edges, which do not affect the layout. With a pipeline each stage has a box around
    these, and each value that is sent to another stage has a bold edge with its bytes; a call that several stages make
    is in the box of the first. Raises an OptionError if tables are selected.
    """
    if selection is not None and selection.tables:
        what, remedy = f"--only {selection.text}", "say a glob, or --format text or json"
        raise OptionError(what, "with --format dot", "a table cannot be drawn", remedy)
    drawing = _Drawing(program, selection.nodes if selection else frozenset(program.graph.nodes))
    return "\n".join(["digraph program {", STYLE, *drawing.lines(), "}"]) + "\n"


class _Drawing:
    """A drawing of the ``selected`` nodes."""

    def __init__(self, program: Program, selected: frozenset[fx.Node]) -> None:
        self.program, self.selected = program, selected
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._names, self._ops = value_names(program), op_names(program)
        self._stages = StageRecord(program) if has_stages(program) else None

    def lines(self) -> Iterator[str]:
        """The boxes of stages, phases and modules, then the edges."""
        numbers = count()
        if self._stages is None:
            yield from self._phases(self._nodes, numbers, "  ")
        else:
            for i, entry in enumerate(self._stages.entries()):
                inside = [node for node in self._nodes if self._stage.get(node) == i]
                lines = list(self._phases(inside, numbers, "    "))
                yield from _box(f"stage_{i}", f"stage {i} on rank {entry.rank}", lines, "  ")
            yield from self._phases([node for node in self._nodes if node not in self._stage], numbers, "  ")
        yield from self._edges()

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        """The nodes to draw: no unread inputs, and no results of buckets that the program returns unchanged."""
        nodes = [node for node in self.program.graph.nodes if node.op != "output" and node in self.selected]
        return [node for node in nodes if (node.op != "placeholder" or node.users) and node not in self._returned]

    @cached_property
    def _returned(self) -> Mapping[fx.Node, fx.Node]:
        """Results of buckets that the program returns unchanged, each with its bucket, which lists them instead."""
        producers = {node: self.program.value(node)[0] for node in self.program.graph.nodes if is_getitem(node)}
        return {
            node: producer
            for node, producer in producers.items()
            if producer.target is bucket and {user.op for user in node.users} == {"output"}
        }

    def _module(self, node: fx.Node) -> str:
        """The module that a node is drawn in; for a bucket, the innermost module that has all its members."""
        members = [node, *(node.all_input_nodes if node.target is bucket else ())]
        return _common_module([self.program.source(each).module for each in members])

    def _phases(self, nodes: list[fx.Node], numbers: Iterator[int], indent: str) -> Iterator[str]:
        """A box for each phase, unless there is only one."""
        phases: dict[str, list[fx.Node]] = {}
        for node in nodes:
            phases.setdefault(self._phase(node), []).append(node)
        for phase, inside in phases.items():
            if len(phases) == 1:
                yield from self._modules(inside, "", numbers, indent)
            else:
                number = next(numbers)
                yield from _box(str(number), phase, list(self._modules(inside, "", numbers, f"{indent}  ")), indent)

    def _phase(self, node: fx.Node) -> str:
        input_ = self._inputs.get(node)
        return "backward" if input_ is not None and input_.kind == "tangent" else self.program.source(node).phase

    def _modules(self, nodes: list[fx.Node], path: str, numbers: Iterator[int], indent: str) -> Iterator[str]:
        """The nodes of a module, and a box for each module inside that has nodes or several modules of its own."""
        boxes: dict[str, list[fx.Node]] = {}
        for node in nodes:
            inner = self._module(node).removeprefix(path).removeprefix(".")
            boxes.setdefault(inner.partition(".")[0], []).append(node)
        for name, inside in boxes.items():
            if not name:
                yield from (f"{indent}{self._node(node)}" for node in inside)
                continue
            module = _common_module([self._module(node) for node in inside])
            number = next(numbers)
            yield from _box(str(number), module, list(self._modules(inside, module, numbers, f"{indent}  ")), indent)

    def _node(self, node: fx.Node) -> str:
        fill = f', style=filled, fillcolor="{self._colors[node]}"' if node in self._colors else ""
        name, input_ = self._names[node], self._inputs.get(node)
        op = input_.kind if input_ else self._ops.get(node.target, "getitem")
        title = name if op in name else f"{op} {name}" if input_ else f"{name} = {op}"
        further = self._further.get(node, [])
        rest = [f"and {len(further) - MOST} more"] if len(further) > MOST + 1 else further[MOST:]
        types = self.program.types(node) if self.program.has_many(node) else ()
        first = next((str(type_) for type_ in types if type_ is not None), "")
        type_ = f"({first}, and {len(types) - 1} more)" if len(types) > MOST else type_text(self.program, node)
        label = "\n".join([title, type_, *further[:MOST], *rest])
        return f"{_quoted(node.name)} [label={_quoted(label)}{fill}];"

    def _edges(self) -> Iterator[str]:
        labels = dict(self._messages)  # each label is on the first edge to its stage
        drawn = set(self._nodes)
        edges = [(operand, node) for node in self._nodes for operand in node.all_input_nodes if operand in drawn]
        for operand, node in edges:
            message, is_member = (operand.name, self._stage.get(node, -1)), node.target is bucket
            style = ""
            if message in self._messages:
                style = f' [style=bold, color="{MESSAGE_COLOR}"{labels.pop(message, "")}]'
            elif self._phase(operand) != self._phase(node) or (is_member and operand is not node.all_input_nodes[-1]):
                style = f' [style=dashed, color="{SAVED_COLOR}", constraint=false]'
            yield f"  {_quoted(operand.name)} -> {_quoted(node.name)}{style};"

    # Facts about nodes, each computed once.

    @cached_property
    def _colors(self) -> Mapping[fx.Node, str]:
        collectives = (node for node in self.program.calls if node.target in COLLECTIVES or is_collective(node))
        fallbacks = dict.fromkeys(fallbacks_of(self.program), FALLBACK_COLOR)
        return fallbacks | dict.fromkeys(collectives, COLLECTIVE_COLOR)

    @cached_property
    def _further(self) -> Mapping[fx.Node, list[str]]:
        """Further lines of nodes: the bytes that a collective sends, and the results of the program."""
        sent = {each.name: f"sends {bytes_text(each.wire_bytes)}" for each in collectives_of(self.program)}
        lines = {node: [sent[node.name]] if node.name in sent else [] for node in self._nodes}
        for output, result in zip(self.program.outputs, self.program.results, strict=True):
            if result is not None and (node := self._returned.get(result, result)) in lines:
                lines[node].append(f"{output.kind} {output.name}")
        return lines

    @cached_property
    def _stage(self) -> Mapping[fx.Node, int]:
        """The first stage that runs a call or holds a parameter."""
        runs = self._stages.runs if self._stages else {}
        return {node: each[0].stage for node, each in runs.items()}

    @cached_property
    def _messages(self) -> Mapping[tuple[str, int], str]:
        """The label of each message between stages, by the value's name and the stage that reads it."""
        entries = self._stages.entries() if self._stages else ()
        return {
            (value.name, sent.to): f', label="{bytes_text(value.bytes)}, {sent.times} times"'
            for entry in entries
            for sent in entry.sent
            for value in sent.values
        }


def _common_module(paths: list[str]) -> str:
    """The innermost module that all paths are inside."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))


def _box(name: str, label: str, lines: list[str], indent: str) -> Iterator[str]:
    yield f"{indent}subgraph cluster_{name} {{"
    yield f"{indent}  label={_quoted(label)};"
    yield from lines
    yield f"{indent}}}"


def _quoted(text: str) -> str:
    return json.dumps(text)
