"""A program drawn for graphviz."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from torch import fx

from shardc.announcement import collectives_of, is_collective
from shardc.collective import COLLECTIVES
from shardc.error import ShardingError
from shardc.fallback import fallbacks_of
from shardc.only import Only
from shardc.program import Program
from shardc.stage import has_stages
from shardc.stage_record import StageRecord
from shardc.text import bytes_text, op_names, type_text

COLLECTIVE_COLOR, FALLBACK_COLOR, MESSAGE_COLOR = "#f4a261", "#e76f51", "#2a9d8f"


def program_dot(program: Program, only: Only | None = None) -> str:
    """The graph for graphviz: a box for each module, collectives and ops without a rule coloured.

    Of a pipeline there is a box for each stage around those of its modules, and a bold edge for each value that is sent
    to another stage, with its bytes; a call that several stages make stands in the first. ``only`` draws some values.
    """
    if only is not None and only.tables:
        what = f"--only {only.text}"
        raise ShardingError(
            what, "with --format dot", "a table cannot be drawn", "say a glob, or --format text or json"
        )
    found = _Drawing(program, only.nodes if only else frozenset(program.graph.nodes))
    return "\n".join(["digraph program {", "  node [shape=box, fontname=monospace];", *found.lines(), "}"]) + "\n"


@dataclass(frozen=True)
class _Drawing:
    program: Program
    only: frozenset[fx.Node]

    def lines(self) -> Iterator[str]:
        """The boxes of stages and modules, then the edges."""
        numbers = count()
        if self._stages is None:
            yield from self._modules(self._nodes, numbers, "  ")
        else:
            for i, entry in enumerate(self._stages.entries()):
                inside = [node for node in self._nodes if self._stage.get(node) == i]
                lines = list(self._modules(inside, numbers, "    "))
                yield from _box(f"stage_{i}", f"stage {i} on rank {entry['rank']}", lines, "  ")
            yield from self._modules([node for node in self._nodes if node not in self._stage], numbers, "  ")
        yield from self._edges()

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return [node for node in self.program.graph.nodes if node.op != "output" and node in self.only]

    def _modules(self, nodes: list[fx.Node], numbers: Iterator[int], indent: str) -> Iterator[str]:
        boxes: dict[str, list[fx.Node]] = {}
        for node in nodes:
            boxes.setdefault(self.program.source(node).module, []).append(node)
        for module, inside in boxes.items():
            number = next(numbers)
            if module:
                yield from _box(str(number), module, [f"{indent}  {self._node(node)}" for node in inside], indent)
            else:
                yield from (f"{indent}{self._node(node)}" for node in inside)

    def _node(self, node: fx.Node) -> str:
        fill = f', style=filled, fillcolor="{self._colors[node]}"' if node in self._colors else ""
        op = node.op if node.op == "placeholder" else self._called.get(node.target, "getitem")
        label = f"{node.name}\n{op} {type_text(self.program, node)}{self._moved.get(node.name, '')}"
        return f"{_quoted(node.name)} [label={_quoted(label)}{fill}];"

    def _edges(self) -> Iterator[str]:
        labels = dict(self._sent)  # each on one edge, whoever reads the value there
        edges = [(operand, node) for node in self._nodes for operand in node.all_input_nodes]
        for operand, node in edges:
            if operand in self.only:
                way = operand.name, self._stage.get(node, -1)
                style = f' [style=bold, color="{MESSAGE_COLOR}"{labels.pop(way, "")}]' if way in self._sent else ""
                yield f"  {_quoted(operand.name)} -> {_quoted(node.name)}{style};"

    # Facts about nodes, found once.

    @cached_property
    def _called(self) -> Mapping[Any, str]:
        return op_names(self.program)

    @cached_property
    def _colors(self) -> Mapping[fx.Node, str]:
        colors = dict.fromkeys(fallbacks_of(self.program), FALLBACK_COLOR)
        moving = (node for node in self.program.calls if node.target in COLLECTIVES or is_collective(node))
        return colors | dict.fromkeys(moving, COLLECTIVE_COLOR)

    @cached_property
    def _moved(self) -> Mapping[str, str]:
        return {found.name: f"\n{bytes_text(found.wire_bytes)}" for found in collectives_of(self.program)}

    @cached_property
    def _stages(self) -> StageRecord | None:
        return StageRecord(self.program) if has_stages(self.program) else None

    @cached_property
    def _stage(self) -> Mapping[fx.Node, int]:
        """The first stage that runs a call or holds a parameter."""
        runs = self._stages.runs if self._stages else {}
        return {node: each[0]["stage"] for node, each in runs.items()}

    @cached_property
    def _sent(self) -> Mapping[tuple[str, int], str]:
        """What is sent of a value, by its name and the stage that reads it."""
        entries = self._stages.entries() if self._stages else []
        ways = ((way, value) for entry in entries for way in entry["sent"] for value in way["values"])
        return {
            (value["name"], way["to"]): f', label="{bytes_text(value["bytes"])}, {way["times"]} times"'
            for way, value in ways
        }


def _box(name: str, label: str, lines: list[str], indent: str) -> Iterator[str]:
    yield f"{indent}subgraph cluster_{name} {{"
    yield f"{indent}  label={_quoted(label)};"
    yield from lines
    yield f"{indent}}}"


def _quoted(text: str) -> str:
    return json.dumps(text)
