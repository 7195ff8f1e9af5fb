"""The selection of ``dump --only``: tables by name, and values by globs over their names and modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from shardc.costs.count import has_machine
from shardc.language.errors import OptionError, did_you_mean
from shardc.program.collective import Collective
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import value_names
from shardc.program.traffic import collectives_of
from shardc.report.dump.schema import TABLES


@dataclass(frozen=True)
class Selection:
    """The part of a program that ``text`` selects: names of tables, and globs, joined by commas.

    A glob is over the printed names of values, inputs, outputs and collectives, and over module paths: the name of a
    module selects everything inside it. ``collectives``: those that are selected, and those that move a selected value.
    """

    text: str
    tables: tuple[str, ...]
    nodes: frozenset[fx.Node] = frozenset()
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def of(program: Program, text: str) -> Selection:
        """Select a part of a program. Raises an OptionError if a glob matches nothing or a table does not exist yet."""
        if not isinstance(text, str):
            problem, remedy = "it names tables and globs in one text", "say only='memory,blocks.0.*'"
            raise OptionError(f"only={text!r}", f"of type {type(text).__name__}", problem, remedy)
        words = [word for word in text.split(",") if word]
        tables = tuple(word for word in words if word in TABLES)
        if "stages" in tables and not has_stages(program):
            what = f"a program that is {program.level}, with {program.options.pipeline or 'no pipeline'}"
            remedy = "say --pipeline, and no --after before lower_reshards"
            raise OptionError("--only stages", what, "it has no stages yet", remedy)
        if "time" in tables and not has_machine(program):
            problem = "there is no machine to predict it for, or nothing is sent yet"
            remedy = "say --links and --device, and no early --after"
            raise OptionError("--only time", f"a program that is {program.level}", problem, remedy)
        globs = [word for word in words if word not in TABLES]
        return Selection(text, tables, *(_select(program, globs) if globs else ()))


def _select(program: Program, globs: Sequence[str]) -> tuple[frozenset[fx.Node], tuple[Collective, ...]]:
    names, collectives = _names(program), collectives_of(program)
    every = {name for of_node in names.values() for name in of_node} | {each.name for each in collectives}
    for glob in globs:
        if not any(_matches(name, glob) for name in every):
            raise OptionError(
                f"--only {glob!r}",
                f"a table ({', '.join(TABLES)}), or a glob over {len(every)} names of values and modules",
                "it is no table, and finds no value and no module",
                did_you_mean(glob, [*TABLES, *sorted(every)]) or "write '*' before or after a part of the name",
            )

    def is_selected(names: Iterable[str]) -> bool:
        return any(_matches(name, glob) for name in names for glob in globs)

    nodes = frozenset(node for node, of_node in names.items() if is_selected(of_node))
    moved = {node.name for node in nodes}
    related = (each for each in collectives if is_selected([each.name]) or moved & {each.name, *each.node.split(", ")})
    return nodes, tuple(related)


def _names(program: Program) -> dict[fx.Node, tuple[str, ...]]:
    """The names that select each node: its own, its name as an output, and its module."""
    shown = value_names(program)
    names = {node: [node.name, shown[node], program.source(node).module] for node in shown if node.op != "output"}
    for output, node in zip(program.outputs, program.results, strict=True):
        if node is not None and output.kind == "output":
            names[node].append(output.name)
    return {node: tuple(dict.fromkeys(filter(None, each))) for node, each in names.items()}


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")
