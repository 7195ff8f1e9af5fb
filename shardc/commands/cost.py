"""``shardc cost``: what a step costs a rank, in numbers or as functions of the mesh and of named sizes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardc.arguments import MOST, command, compiling, written
from shardc.error import ShardingError, did_you_mean
from shardc.invocation import compiled, write
from shardc.outcome import CHECK_FAILED, GOOD, UsageError
from shardc.parser import unread

if TYPE_CHECKING:
    from shardc.step_cost import StepCost


def add(commands: Any) -> None:
    """The arguments of the command."""
    help_ = "what a step costs a rank: bytes sent, memory and operations; as functions of the mesh too"
    cost = written(compiling(command(commands, "cost", help_)), "cost")
    cost.add_argument("--format", choices=("text", "json"), default="text")
    cost.add_argument(
        "--symbolic", action="store_true", help="as functions of the sizes of the mesh's axes, and where they hold"
    )
    cost.add_argument(
        "--symbol",
        metavar="NAME=WHAT",
        type=_symbol,
        action="append",
        default=[],
        help="and of a dim of an input, B=ids.0, of a setting, d=n_embd, of the length of a list of modules, L=blocks "
        "(the longest list is L unless another is named); may be repeated",
    )
    cost.add_argument(
        "--at",
        metavar="NAME=SIZE,...",
        type=_point,
        action="append",
        default=[],
        help="the numbers where symbols have these sizes, without compiling there; may be repeated",
    )
    cost.add_argument(
        "--recompile",
        action="store_true",
        help="compile at each --at where the plan does not hold, or has no expressions",
    )


def run(options: argparse.Namespace) -> int:
    """Compile, and write numbers or expressions; CHECK_FAILED where the plan does not hold at a point."""
    if options.recompile and not options.at:
        what, remedy = "without --at", "say --at dp=64 too, where to compile, or leave --recompile out"
        raise UsageError("--recompile", what, "there is no point at which to compile anew", remedy)
    if options.symbolic or options.symbol or options.at:
        return _symbolic(options)
    found = compiled(options).cost
    if options.format == "text":
        write(found.text(), options.output)
    else:
        from shardc.json_text import json_text

        write(json_text({"version": 1, "mesh": options.mesh.sizes, **found.record()}), options.output)
    return GOOD


def _symbolic(options: argparse.Namespace) -> int:
    from shardc.json_text import json_text
    from shardc.symbol_plan import symbolic_plan
    from shardc.symbol_target import family
    from shardc.symbol_text import numbers_text, plan_record, plan_text

    of = family(options)
    for point in options.at:
        _check_point(of.reference, point)
    points = [{**of.reference, **point} for point in options.at]
    try:
        plan = symbolic_plan(of.compile, of.reference, options.mesh.axis_names, of.repeated, _tell)
    except ShardingError as error:
        if not points or not options.recompile or options.format == "json":
            raise
        print(f"shardc: no expressions: {error}", file=sys.stderr)
        write(numbers_text([(point, of.compile(point).cost) for point in points]), options.output)
        return GOOD
    found: list[tuple[Mapping[str, int], StepCost]] = []
    for point in points:
        reason = plan.why_not(point)
        if not reason or options.recompile:
            found.append((point, of.compile(point).cost if reason else plan.at(point)))
        if reason:
            print(
                f"shardc: {'compiled anew, since ' * options.recompile}{plan.refusal(point, reason)}", file=sys.stderr
            )
    text = json_text(plan_record(plan, found)) if options.format == "json" else plan_text(plan, found)
    write(text, options.output)
    return GOOD if len(found) == len(points) else CHECK_FAILED


def _tell(point: str) -> None:
    print(f"shardc: compiling at {point}", file=sys.stderr)


def _check_point(reference: Mapping[str, int], point: Mapping[str, int]) -> None:
    for name in point:
        if name not in reference:
            what, problem = f"{name!r}", "it is no axis of the mesh and no --symbol"
            remedy = did_you_mean(name, reference) or f"name one of {', '.join(reference)}"
            raise UsageError(
                f"--at {','.join(f'{name}={size}' for name, size in point.items())}", what, problem, remedy
            )


def _symbol(text: str) -> tuple[str, str]:
    name, _, what = text.partition("=")
    if not name.isidentifier() or not what:
        raise unread(text, "it does not read as a name and what it names", "write --symbol B=input_ids.0")
    return name, what


def _point(text: str) -> dict[str, int]:
    sizes = [item.partition("=") for item in text.split(",")]
    if not all(name.isidentifier() and size.isdecimal() and int(size[:20]) for name, _, size in sizes):
        raise unread(text, "it does not read as symbols and their sizes", "write --at dp=64,tp=8,B=512")
    if len({name for name, _, _ in sizes}) < len(sizes):
        raise unread(text, "it has a symbol twice", "write each symbol once, as in --at dp=64,tp=8,B=512")
    if not all(int(size[:20]) <= MOST for _, _, size in sizes):
        raise unread(text, f"a size is more than {MOST}, beyond which nothing is counted", "say less")
    return {name: int(size) for name, _, size in sizes}
