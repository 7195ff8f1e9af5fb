"""``shardc cost``: what a step costs a rank, in numbers or as functions of the mesh and of named sizes."""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc.api import Compiled
from shardc.capture.call import flatten, rebuild
from shardc.cli import CHECK_FAILED, GOOD
from shardc.cli.arguments import MOST, command, compiling, unread, written
from shardc.cli.compiled import compile_target, compiled, write
from shardc.cli.target import Target, Wish, load_target
from shardc.language.errors import ShardingError, UsageError, did_you_mean
from shardc.report.symbolic.expression import mesh_at
from shardc.report.symbolic.form import Point
from shardc.report.symbolic.plan import Repeated

if TYPE_CHECKING:
    from shardc.costs.step import StepCost


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
        from shardc.language.text import json_text

        write(json_text({"version": 1, "mesh": options.mesh.sizes, **found.record()}), options.output)
    return GOOD


def _symbolic(options: argparse.Namespace) -> int:
    from shardc.language.text import json_text
    from shardc.report.symbolic.plan import symbolic_plan
    from shardc.report.symbolic.text import numbers_text, plan_record, plan_text

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


LAYERS = "L"  # what counts repeated modules if nothing else does
HF_LAYERS = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class Dim:
    """Dim ``dim`` of the inputs that have ``size`` elements there, as the named one has."""

    dim: int
    size: int


@dataclass(frozen=True)
class Family:
    """A target whose sizes have names. ``dims`` of inputs, ``settings``, and ``repeated`` modules, by symbol."""

    options: argparse.Namespace
    reference: Point
    dims: Mapping[str, Dim]
    settings: Mapping[str, str]
    repeated: Repeated | None

    def compile(self, point: Point) -> Compiled:
        """The target compiled at a point."""
        mesh = mesh_at(self.options.mesh.axis_names, point)
        settings = {**dict(self.options.settings), **{key: point[name] for name, key in self.settings.items()}}
        given = copy.copy(self.options)
        given.mesh, given.settings = mesh, list(settings.items())
        target = _with_modules(_loaded(given), self.repeated, point, given.target)
        sizes = {(dim.dim, dim.size): point[name] for name, dim in self.dims.items()}
        return compile_target(
            given,
            replace(target, args=_resized(tuple(target.args), sizes), kwargs=_resized(dict(target.kwargs), sizes)),
        )


def family(options: argparse.Namespace) -> Family:
    """What ``--symbol`` says of a target. Raises a UsageError for what is nothing of its."""
    target = _loaded(options)
    reference: dict[str, int] = options.mesh.sizes
    dims: dict[str, Dim] = {}
    settings: dict[str, str] = {}
    repeated: Repeated | None = None
    lists = _lists(target.model)
    inputs = _input_shapes(target)
    for name, what in options.symbol:
        if name in reference:
            raise _unknown(name, what, f"the name {name} is taken", "name it otherwise")
        path, _, dim = what.rpartition(".")
        if path in inputs and dim.isdigit() and int(dim) < len(inputs[path]):
            reference[name] = inputs[path][int(dim)]
            dims[name] = Dim(int(dim), reference[name])
        elif what in lists and _is_one(options):
            problem = "stages, or what is made again, go by all modules together, so that their number is fixed"
            raise _unknown(name, what, problem, f"leave {name} out")
        elif what in lists:
            reference[name], repeated = lists[what], Repeated(name, what)
        else:
            known = _settings(options)
            if what not in known:
                names = [*(f"{each}.{dim}" for each, shape in inputs.items() for dim in range(len(shape))), *lists]
                remedy = did_you_mean(what, [*names, *known]) or f"name one of {', '.join([*names, *known])}"
                raise _unknown(name, what, "it is no dim of an input, no list of modules and no setting", remedy)
            reference[name], settings[name] = known[what], what
    if repeated is None and lists and LAYERS not in reference and not _is_one(options):
        path = max(lists, key=lists.__getitem__)
        reference[LAYERS], repeated = lists[path], Repeated(LAYERS, path)
    return Family(options, reference, dims, settings, repeated)


def _is_one(options: argparse.Namespace) -> bool:
    """Whether something is chosen of all modules together, which fewer of them would not tell."""
    return options.pipeline is not None or (options.remat is not None and options.remat.budget is not None)


def _unknown(name: str, what: str, problem: str, remedy: str) -> UsageError:
    return UsageError(f"--symbol {name}={what}", f"{what!r}", problem, remedy)


def _loaded(options: argparse.Namespace) -> Target:
    return load_target(options.target, Wish(dict(options.settings), options.batch, options.seq, "meta"), options.mesh)


def _lists(model: nn.Module) -> dict[str, int]:
    """The outermost lists of two or more modules that are alike, with their lengths."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not is_inside:
            if len({_make(each) for each in module}) == 1:
                found[path] = len(module)
    return found


def _make(module: nn.Module) -> tuple[Any, ...]:
    """What modules have in common that are alike."""
    shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    return type(module), shapes, tuple(type(each) for each in module.modules())


def _input_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """By the names that annotations know inputs by."""
    given = inspect.signature(target.model.forward).bind(*target.args, **target.kwargs).arguments
    leaves = flatten(dict(given))[0]
    named = [(name.removeprefix("kwargs."), leaf) for name, leaf in leaves]
    return {name: tuple(leaf.shape) for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _settings(options: argparse.Namespace) -> dict[str, int]:
    """The settings that are numbers: as they were set, or by default."""
    place, _, name = options.target.rpartition(":")
    known: dict[str, Any]
    if place == "hf":
        from transformers import AutoConfig

        config = AutoConfig.for_model(name, **dict(options.settings))
        known = config.to_dict() | {name: getattr(config, name, None) for name in config.attribute_map}
    else:
        from shardc.cli.target import function_of

        parameters = inspect.signature(function_of(place, name)).parameters
        known = {name: each.default for name, each in parameters.items()}
    given = {**known, **dict(options.settings)}
    return {name: value for name, value in given.items() if type(value) is int}


def _resized(value: Any, sizes: Mapping[tuple[int, int], int]) -> Any:
    """The inputs on meta, their dims of a place and size at another."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [sizes.get((dim, size), size) for dim, size in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    leaves, tree = flatten(value)
    return rebuild(tree, [made(leaf) for _, leaf in leaves])


def _with_modules(target: Target, repeated: Repeated | None, point: Point, text: str) -> Target:
    """The target with as many of its repeated modules: the first of them, or the last copied."""
    if repeated is None or len(target.model.get_submodule(repeated.path)) == point[repeated.symbol]:  # type: ignore[arg-type]
        return target
    count = point[repeated.symbol]
    owner = target.model.get_submodule(repeated.path.rpartition(".")[0])
    length = len(target.model.get_submodule(repeated.path))  # type: ignore[arg-type]
    for name, module in owner.named_children():  # lists that are walked side by side grow together
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) == length:
            setattr(owner, name, _of_length(module, count))
    config = getattr(target.model, "config", None)
    if text.startswith("hf:") and hasattr(config, HF_LAYERS):
        setattr(config, HF_LAYERS, count)
    return target


def _of_length(several: nn.ModuleList | nn.Sequential, count: int) -> nn.Module:
    """The first of them, or copies of the last as well."""
    found = [*several][:count]
    found += [copy.deepcopy(found[-1]) for _ in range(count - len(found))]
    return nn.ModuleList(found) if isinstance(several, nn.ModuleList) else type(several)(*found)
