"""What ``dump --only`` keeps: tables by name, and the values that a glob over their names or modules finds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from shardc.costs.time import has_machine
from shardc.language.errors import OptionError, did_you_mean
from shardc.program.collective import Collective
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.text import value_names
from shardc.program.traffic import collectives_of
from shardc.report.dump.schema import TABLES


@dataclass(frozen=True)
class Only:
    """``tables`` and ``nodes`` are what was asked for as ``text``: names of tables, and globs, joined by commas.

    A glob is over names of values, of inputs and outputs as the user calls them, of collectives, and over module paths:
    a module's name finds all that is inside it. ``collectives`` are those found, and those that move a value found.
    """

    text: str
    tables: tuple[str, ...]
    nodes: frozenset[fx.Node] = frozenset()
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def of(program: Program, text: str) -> Only:
        """What a text keeps of a program; an OptionError where it finds nothing, or has no stages to show."""
        if not isinstance(text, str):
            problem, remedy = "it names tables and globs in one text", "say only='memory,blocks.0.*'"
            raise OptionError(f"only={text!r}", f"of type {type(text).__name__}", problem, remedy)
        words = [word for word in text.split(",") if word]
        tables = tuple(word for word in words if word in TABLES)
        if "stages" in tables and not has_stages(program):
            raise _no_stages(program)
        if "time" in tables and not has_machine(program):
            raise _no_machine(program)
        globs = [word for word in words if word not in TABLES]
        found = _found(program, globs) if globs else (frozenset[fx.Node](), ())
        return Only(text, tables, *found)


def _found(program: Program, globs: Sequence[str]) -> tuple[frozenset[fx.Node], tuple[Collective, ...]]:
    known, collectives = _names(program), collectives_of(program)
    every = {name for names in known.values() for name in names} | {each.name for each in collectives}
    for glob in globs:
        if not any(_matches(name, glob) for name in every):
            raise _nothing(glob, sorted(every))

    def is_asked(names: Iterable[str]) -> bool:
        return any(_matches(name, glob) for name in names for glob in globs)

    nodes = frozenset(node for node, names in known.items() if is_asked(names))
    moved = {node.name for node in nodes}
    ours = (each for each in collectives if is_asked([each.name]) or moved & {each.name, *each.node.split(", ")})
    return nodes, tuple(ours)


def _names(program: Program) -> dict[fx.Node, tuple[str, ...]]:
    """What each node may be asked for by: its names, those of results that it is, its module."""
    shown = value_names(program)
    names = {node: [node.name, shown[node], program.source(node).module] for node in shown if node.op != "output"}
    for output, node in zip(program.outputs, program.results, strict=True):
        if node is not None and output.kind == "output":
            names[node].append(output.name)
    return {node: tuple(dict.fromkeys(filter(None, its))) for node, its in names.items()}


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")


def _nothing(glob: str, names: Sequence[str]) -> OptionError:
    return OptionError(
        f"--only {glob!r}",
        f"a table ({', '.join(TABLES)}), or a glob over {len(names)} names of values and modules",
        "it is no table, and finds no value and no module",
        did_you_mean(glob, [*TABLES, *names]) or "write '*' before or after a part of the name",
    )


def _no_stages(program: Program) -> OptionError:
    what = f"a program that is {program.level}, with {program.options.pipeline or 'no pipeline'}"
    return OptionError(
        "--only stages", what, "it has no stages yet", "say --pipeline, and no --after before lower_reshards"
    )


def _no_machine(program: Program) -> OptionError:
    problem = "there is no machine to predict it for, or nothing is sent yet"
    return OptionError(
        "--only time", f"a program that is {program.level}", problem, "say --links and --device, and no early --after"
    )
