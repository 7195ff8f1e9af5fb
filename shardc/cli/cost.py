"""``shardc cost``: the cost of a step on one rank, in numbers or as functions of the mesh and of named sizes."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import LARGEST, add_command, add_compile_options, add_output_options, sizes, unreadable
from shardc.cli.compile import compile_target, compiled, load_quietly, with_warnings, write
from shardc.costs.records import Cost
from shardc.language.errors import ShardingError, UsageError, did_you_mean
from shardc.language.record import json_text

if TYPE_CHECKING:
    from shardc.api import Compiled
    from shardc.costs.step import StepCost
    from shardc.report.symbolic.plan import Repeated


def add(commands: Any) -> None:
    """Add the command."""
    help_ = "print what a step costs a rank, in bytes sent, memory and operations; also as functions of the mesh"
    parser = add_command(commands, "cost", help_)
    add_compile_options(parser)
    add_output_options(parser, "cost", ("text", "json"))
    parser.add_argument(
        "--symbolic", action="store_true",
        help="print functions of the sizes of the mesh's axes, and the region where they hold",
    )  # fmt: skip
    parser.add_argument(
        "--symbol", metavar="NAME=WHAT", type=_symbol, action="append", default=[],
        help="name a size: of a dim of an input, B=ids.0; of a setting, d=n_embd; the length of a list of modules, "
        "L=blocks (the longest list is L unless another is named); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--at", metavar="NAME=SIZE,...", type=_point, action="append", default=[],
        help="evaluate the functions at these sizes, without compiling there; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--recompile", action="store_true",
        help="compile at each --at outside of the region, or where the plan has no functions",
    )  # fmt: skip


def _symbol(text: str) -> tuple[str, str]:
    name, _, what = text.partition("=")
    if not name.isidentifier() or not what:
        raise unreadable(text, "it does not read as a name and what it names", "write --symbol B=input_ids.0")
    return name, what


def _point(text: str) -> dict[str, int]:
    example = "--at dp=64,tp=8,B=512"
    point = sizes(text, "symbols", example)
    if not all(point.values()):
        raise unreadable(text, "it does not read as symbols and their sizes", f"write {example}")
    if len(point) <= text.count(","):
        raise unreadable(text, "it has a symbol twice", f"write each symbol once, as in {example}")
    if max(point.values()) > LARGEST:
        raise unreadable(text, f"a size is more than {LARGEST}, the largest count", "say less")
    return point


def run(options: argparse.Namespace) -> int:
    """Compile, and write numbers or functions. CHECK_FAILED if the plan does not hold at a point."""
    if options.recompile and not options.at:
        what, remedy = "without --at", "say --at dp=64 too, where to compile, or leave --recompile out"
        raise UsageError("--recompile", what, "there is no point at which to compile anew", remedy)
    if options.symbolic or options.symbol or options.at:
        return _run_symbolic(options)
    from shardc.costs.rings import rings_of, rings_text
    from shardc.costs.step import outer_entry, outer_note
    from shardc.program.stages import has_stages

    program = compiled(options)
    cost = program.cost
    outer, rings = outer_entry(program.whole), rings_of(program.whole)
    note = outer_note(outer)
    texts = [cost.text(), rings_text(rings, has_stages(program.whole)), note and f"{note}\n"]
    text = with_warnings("\n".join(filter(None, texts)), program.whole.notes)
    record = Cost(options.mesh.sizes, *cost.entries(), cost.copies or None, outer, rings or None)
    write(text if options.format == "text" else json_text(record), options.output)
    return GOOD


def _run_symbolic(options: argparse.Namespace) -> int:
    from shardc.program.idle_axes import idle_axis_notes
    from shardc.report.symbolic.plan import numbers_text, plan_record, plan_text, symbolic_plan

    if options.wire:
        problem, remedy = "codes fill up whole blocks, and so have no expression", "leave --wire out, or --symbolic"
        raise UsageError("--wire", "with --symbolic", problem, remedy)
    if options.local:
        problem, remedy = "outer steps have no expression", "leave --local out, or --symbolic"
        raise UsageError("--local", "with --symbolic", problem, remedy)
    target = symbolic_target(options)
    for point in options.at:
        for name in (name for name in point if name not in target.reference):
            typed = ",".join(f"{symbol}={size}" for symbol, size in point.items())
            remedy = did_you_mean(name, target.reference) or f"name one of {', '.join(target.reference)}"
            raise UsageError(f"--at {typed}", f"{name!r}", "it is no axis of the mesh and no --symbol", remedy)
    points = [{**target.reference, **point} for point in options.at]  # other sizes stay as they are

    def tell(point: str) -> None:
        print(f"shardc: compiling at {point}", file=sys.stderr)

    try:
        plan = symbolic_plan(target.compile, target.reference, options.mesh.axis_names, target.repeated, tell)
    except ShardingError as error:
        if not points or not options.recompile or options.format == "json":
            raise
        print(f"shardc: no expressions: {error}", file=sys.stderr)
        write(numbers_text([(point, target.compile(point).cost) for point in points]), options.output)
        return GOOD
    costs: list[tuple[Mapping[str, int], StepCost]] = []
    for point in points:
        reason = plan.why_not(point)
        if reason:
            anew = "compiled anew, since " * options.recompile
            print(f"shardc: {anew}{plan.refusal(point, reason)}", file=sys.stderr)
        if not reason or options.recompile:
            costs.append((point, target.compile(point).cost if reason else plan.at(point)))
    notes = idle_axis_notes(plan.here)
    text = with_warnings(plan_text(plan, costs), notes)
    write(json_text(plan_record(plan, costs)) if options.format == "json" else text, options.output)
    return GOOD if len(costs) == len(points) else CHECK_FAILED


# A target with named sizes.

LAYERS = "L"  # the symbol for the number of repeated modules if no --symbol names it
HF_LAYERS = "num_hidden_layers"


@dataclass(frozen=True)
class SymbolicTarget:
    """A target whose sizes have names.

    ``reference``: the size of each symbol in the target as loaded. ``dims``: for each symbol of a dim of an input, the
    dim and its size; it stands for every input with that size there. ``settings``: for each symbol of a setting, the
    setting. ``repeated``: a list of modules and the symbol of its length.
    """

    options: argparse.Namespace
    reference: Mapping[str, int]
    dims: Mapping[str, tuple[int, int]]
    settings: Mapping[str, str]
    repeated: Repeated | None

    def compile(self, point: Mapping[str, int]) -> Compiled:
        """Compile the target at the sizes of a point."""
        from shardc.cli.targets.target import set_list_length, with_input_sizes
        from shardc.report.symbolic.symbolic_program import mesh_at

        options = copy.copy(self.options)
        options.mesh = mesh_at(self.options.mesh.axis_names, point)
        settings = {key: point[name] for name, key in self.settings.items()}
        options.settings = list({**dict(self.options.settings), **settings}.items())
        target = load_quietly(options, "meta")
        if self.repeated is not None:
            length = point[self.repeated.symbol]
            set_list_length(target.model, self.repeated.path, length)
            config: Any = getattr(target.model, "config", None)
            if options.target.startswith("hf:") and hasattr(config, HF_LAYERS):
                setattr(config, HF_LAYERS, length)
        dims = {dim_and_size: point[name] for name, dim_and_size in self.dims.items()}
        return compile_target(options, with_input_sizes(target, dims))


def symbolic_target(options: argparse.Namespace) -> SymbolicTarget:
    """The target with the symbols of ``--symbol``. Raises a UsageError for one that is taken or names no size."""
    from shardc.cli.targets.target import default_sizes, input_shapes, module_lists
    from shardc.report.symbolic.plan import Repeated

    target = load_quietly(options, "meta")
    reference: dict[str, int] = options.mesh.sizes
    dims: dict[str, tuple[int, int]] = {}
    settings: dict[str, str] = {}
    repeated: Repeated | None = None
    lists, inputs = module_lists(target.model), input_shapes(target)
    for name, what in options.symbol:
        if name in reference:
            raise _not_named(name, what, f"the name {name} is taken", "name it otherwise")
        path, _, dim = what.rpartition(".")
        if path in inputs and dim.isdigit() and int(dim) < len(inputs[path]):
            reference[name] = inputs[path][int(dim)]
            dims[name] = int(dim), reference[name]
        elif what in lists and _is_chosen_as_a_whole(options):
            problem = "stages, or what is made again, go by all modules together, so that their number is fixed"
            raise _not_named(name, what, problem, f"leave {name} out")
        elif what in lists:
            reference[name], repeated = lists[what], Repeated(name, what)
        else:
            known = default_sizes(options.target, dict(options.settings))
            if what not in known:
                names = [f"{each}.{dim}" for each, shape in inputs.items() for dim in range(len(shape))]
                names += [*lists, *known]
                remedy = did_you_mean(what, names) or f"name one of {', '.join(names)}"
                raise _not_named(name, what, "it is no dim of an input, no list of modules and no setting", remedy)
            reference[name], settings[name] = known[what], what
    if repeated is None and lists and LAYERS not in reference and not _is_chosen_as_a_whole(options):
        path = max(lists, key=lists.__getitem__)
        reference[LAYERS], repeated = lists[path], Repeated(LAYERS, path)
    return SymbolicTarget(options, reference, dims, settings, repeated)


def _is_chosen_as_a_whole(options: argparse.Namespace) -> bool:
    """Whether the compiler chooses stages or saved activations over all modules: fewer would not predict them."""
    return options.pipeline is not None or (options.remat is not None and options.remat.budget is not None)


def _not_named(name: str, what: str, problem: str, remedy: str) -> UsageError:
    return UsageError(f"--symbol {name}={what}", f"{what!r}", problem, remedy)
