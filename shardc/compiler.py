"""The compiler: from a model and a request to the program of each rank, as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardc.capture.annotations import (
    Matched,
    Spec,
    dims_of_groups,
    idle_error,
    match,
    note_of,
    resolve,
    unused_annotations,
    within_group,
)
from shardc.capture.call import CallingConvention, part_of_call, part_of_group
from shardc.capture.capture import Captured, capture, is_same_capture
from shardc.capture.containers import flatten, rebuild
from shardc.capture.microbatches import check_loss, empty_microbatches, with_microbatches
from shardc.capture.values.region import Symbols
from shardc.costs.stages.schedule import schedule_of
from shardc.costs.step import outer_entry, outer_note
from shardc.costs.step_time import slow_link_note
from shardc.language.errors import CaptureError, OptionError, ShardingError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.rule import OpRule
from shardc.ops import op_rule
from shardc.options import Options
from shardc.passes.order import (
    CAPTURE,
    KEPT,
    LATE,
    LOCAL,
    PASSES,
    PLACED,
    PROPAGATED,
    SETTLED,
    UNANNOTATED,
    WHOLE,
    Pass,
    Snapshots,
    run_passes,
)
from shardc.passes.propagate.idle_annotations import idle_annotations
from shardc.program.idle_axes import idle_axis_notes
from shardc.program.program import Pin, Program

if TYPE_CHECKING:
    from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``shardc.compile`` without the model: enough to compile it again with a change.

    ``fixed``: shardings of values that override every annotation.
    """

    mesh: Mesh
    annotations: Mapping[str, Spec] = field(default_factory=dict)
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True
    differentiable: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    fixed: tuple[Pin, ...] = ()
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled model, as data; ``shardc.Compiled`` adds methods for users.

    ``program``: the last program, in the shapes of one rank. ``after``: the program after capture and after each pass,
    by name. ``seconds``: the time that each of them took. ``request``: the arguments of the compilation, with example
    inputs on meta. ``captured``: the captured model, in which passes do nothing but bind rules; None if the program was
    made from that of a region of sizes. ``rules``: for each op its entry in the table of rules, None for an op without
    a rule. ``idle``: an error for each annotation that cuts nothing; None if the programs come from a cache.
    """

    model: nn.Module
    program: Program
    convention: CallingConvention
    after: Snapshots = field(repr=False)
    seconds: Mapping[str, float] = field(default_factory=dict)
    request: Request | None = field(default=None, repr=False)
    captured: Captured | None = field(default=None, repr=False)
    rules: Mapping[Any, OpRule | None] = field(default_factory=dict, repr=False)
    idle: tuple[ShardingError, ...] | None = field(default=None, repr=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the compiled program."""
        assert self.program.mesh is not None
        return self.program.mesh

    @property
    def graph(self) -> fx.Graph:
        """The graph after the last pass, in local shapes."""
        return self.program.graph

    def at(self, name: str | Pass) -> Program:
        """The program after a pass, given by name or as the pass itself; ``"capture"`` is the first program.

        Raises an OptionError, with similar names, for an unknown pass.
        """
        name = name if isinstance(name, str) else name.__name__
        if name not in self.after:
            known, remedy = ", ".join(self.after), did_you_mean(name, self.after) or "name one of them"
            raise OptionError(f"pass {name!r}", f"the passes are {known}", "there is no such pass", remedy)
        return self.after[name]

    @property
    def whole(self) -> Program:
        """The last program in global shapes. It has every collective; dump and explain describe it."""
        return self.at(WHOLE)


class Cache(Protocol):
    """Keeps the programs that passes make."""

    def passed(
        self, first: Program, run: Callable[[], tuple[Program, Callable[[], Program]]]
    ) -> tuple[Program, Callable[[], Program]]:
        """The local program and a function that returns the last global one: from the cache, else from ``run``."""


def compile_request(
    model: nn.Module, request: Request, known: Compiled | None = None, cache: Cache | None = None
) -> Compiled:
    """Capture a model, pin what is annotated, and run the passes.

    ``known``: an earlier compilation of the model. Its capture is kept if the request would give the same one, and so
    are the programs of its first passes, as long as these passes read nothing that has changed. ``cache``: may have the
    programs already.

    Raises a ShardingError for an error of the user's, a CaptureError for a model that cannot be captured.
    """
    making = Making(model, request, is_again=known is not None)
    matched = match_annotations(model, request)
    captured = capture_model(model, request, matched) if known is None else keep_capture(known, model, request, matched)
    first = making.begin(captured, matched)
    again = making.resume(known, first) if known is not None and captured is known.captured else None

    def run() -> Compiled:
        local = making.run(first) if again is None else making.run(making.kept[again.__name__], after=again)
        if request.options.pipeline:
            schedule_of(local)  # raises for an op that needs the whole batch, and for a schedule that cannot run
        rules = _entries(captured.program, making.kept[UNANNOTATED.__name__])
        return making.end(captured.convention, captured, rules)

    return run() if cache is None else _from_cache(cache, first, run, making, captured)


def _from_cache(
    cache: Cache, first: Program, run: Callable[[], Compiled], making: Making, captured: Captured
) -> Compiled:
    """The compiled model, with programs from the cache if it has them, else from ``run``."""
    start, compiled = time.perf_counter(), list[Compiled]()

    def passed() -> tuple[Program, Callable[[], Program]]:
        compiled.append(run())
        return compiled[0].program, lambda: compiled[0].whole

    local, whole = cache.passed(first, passed)
    if compiled:
        return compiled[0]
    kept: dict[str, Any] = {CAPTURE: first, WHOLE.__name__: whole, LOCAL.__name__: local}
    seconds = {**making.seconds, "cache": time.perf_counter() - start}
    request = replace(making.request, **_on_meta(making.request))
    rules = _entries(captured.program)
    return Compiled(making.model, local, captured.convention, Snapshots(kept), seconds, request, captured, rules)


@dataclass(slots=True)
class Making:
    """A model on its way through the compiler.

    State: ``kept``, by the name of the pass that made it, each program that later passes do not change, or a function
    that makes it; ``seconds``, the time of each pass; ``unused``, an error for each annotation that says nothing new;
    ``idle``, an error for each annotation that cuts nothing; ``of_groups``, the annotations of inputs of which each
    group of ranks has a part. ``is_again``: the model was compiled before, and may be again, with other options.
    """

    model: nn.Module
    request: Request
    kept: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unused: list[ShardingError] = field(default_factory=list)
    idle: list[ShardingError] = field(default_factory=list)
    of_groups: set[str] = field(default_factory=set)
    is_again: bool = False
    start: float = field(default_factory=time.perf_counter)

    def begin(self, captured: Captured, matched: Matched) -> Program:
        """The program that the first pass takes."""
        pins = resolve_pins(captured.program, self.request, matched)
        self.unused += unused_annotations(captured.program, matched, pins)
        self.of_groups = matched.of_groups
        if self.request.strict:
            raise_all(self.unused)
        self.kept[CAPTURE] = first_program(captured.program, self.request, pins)
        self.seconds[CAPTURE] = time.perf_counter() - self.start
        return self.kept[CAPTURE]

    def resume(self, known: Compiled, first: Program) -> Pass | None:
        """Reuse the programs of ``known`` that the passes would also make from ``first``.

        Returns the last pass that need not run again; None if all must. Up to ``UNANNOTATED`` the passes read no
        annotations but those of outputs; to cut stages they read everything. Up to ``PLACED`` they read everything but
        the options in ``LATE``.
        """
        before, late = known.at(CAPTURE), {name: getattr(first.options, name) for name in LATE}
        is_same = (before.pins, before.mesh, before.num_stages) == (first.pins, first.mesh, first.num_stages)
        is_same = is_same and replace(before.options, **late) == first.options
        if is_same and known.idle is not None and known.after.has(PLACED):
            self.idle = list(known.idle)
            for run in (UNANNOTATED, PLACED):
                program = known.at(run)  # its options have the stages that were chosen
                self.kept[run.__name__] = replace(program, options=replace(program.options, **late))
            return PLACED
        outputs, outputs_before = ([pin for pin in each.pins if pin.kind == "output"] for each in (first, before))
        if first.options.pipeline or before.options.pipeline or outputs != outputs_before:
            return None
        unannotated = replace(known.at(UNANNOTATED), mesh=first.mesh, pins=first.pins, options=first.options)
        self.kept[UNANNOTATED.__name__] = unannotated
        return UNANNOTATED

    def run(self, program: Program, after: Pass | None = None, until: Pass = LOCAL) -> Program:
        """Run the passes after ``after``, by default all, up to and including ``until``."""
        if after is not None:
            self.seconds = {each.__name__: 0.0 for each in PASSES[: PASSES.index(after) + 1]} | self.seconds
            self.kept[after.__name__] = program
        keep = (*KEPT, *[SETTLED] * self.request.strict, *[PLACED] * self.is_again)
        names = {each.__name__ for each in keep}

        def watch(name: str, program: Program, took: float) -> None:
            self.seconds[name] = took
            if name in names:
                self.kept[name] = program
            if name == PROPAGATED.__name__:
                unannotated = self.kept[UNANNOTATED.__name__]
                idle = idle_annotations(unannotated, program)
                self.idle = [idle_error(text) for text in idle if text not in self.of_groups]

        return run_passes(program, watch, after, until, keep=keep)

    def end(
        self, convention: CallingConvention, captured: Captured | None, rules: Mapping[Any, OpRule | None]
    ) -> Compiled:
        """The compiled model, once all passes have run."""
        kept, whole = self.kept, self.kept[WHOLE.__name__]
        notes = (
            *filter(None, [slow_link_note(whole), outer_note(outer_entry(whole))]),
            *idle_axis_notes(whole),
            *map(note_of, (*self.unused, *self.idle)),
        )
        for name in (WHOLE.__name__, LOCAL.__name__):  # the programs that people look at
            kept[name] = replace(kept[name], notes=(*kept[name].notes, *notes))
        request = replace(self.request, **_on_meta(self.request))
        return Compiled(
            self.model, kept[LOCAL.__name__], convention, Snapshots(kept), self.seconds, request, captured, rules,
            tuple(self.idle),
        )  # fmt: skip


def _entries(*programs: Program) -> dict[Any, OpRule | None]:
    """The entry in the table of rules for each op of some programs, None for an op without a rule."""
    return {target: op_rule(target) for target in {node.target for program in programs for node in program.calls}}


def match_annotations(model: nn.Module, request: Request) -> Matched:
    """The values that each pattern matches. Raises a ShardingError for a pattern that matches none or several kinds."""
    local, mesh = request.options.local, request.options.stage_mesh(request.mesh)
    matched = match(request.annotations, model, request.args, request.kwargs, mesh)
    return matched if local is None else within_group(matched, local.axis)


def capture_model(model: nn.Module, request: Request, matched: Matched, symbols: Symbols | None = None) -> Captured:
    """The joint graph of the model, with annotations of module outputs in it. Raises a CaptureError.

    ``symbols``: the symbols of input dims that may have other sizes.
    """
    args, kwargs = call_of_group(model, request)
    return capture(model, args, kwargs, **_about_capture(request, matched), symbols=symbols)


def keep_capture(known: Compiled, model: nn.Module, request: Request, matched: Matched) -> Captured:
    """The capture of a compiled model; a new one if the request or the model has changed in what a capture depends on.

    If the table of rules has changed, the kept capture has its rules unbound. Raises a CaptureError if a new capture
    needs values of inputs, which the request of a compiled model does not have.
    """
    captured = known.captured
    if captured is None:
        return capture_model(model, request, matched)
    args, kwargs = call_of_group(model, request)
    if is_same_capture(captured, model, args, kwargs, **_about_capture(request, matched)):
        has_same_rules = all(op_rule(target) is entry for target, entry in known.rules.items())
        return captured if has_same_rules else replace(captured, program=captured.program.unbound())
    try:
        return capture_model(model, request, matched)
    except CaptureError as error:
        if captured.has_guards:
            problem = "the model has to be captured again, by values of its inputs, of which the types alone were kept"
            raise CaptureError(error.who, problem, "say args= and kwargs= too, with values") from error
        raise


def call_of_group(model: nn.Module, request: Request) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The example inputs of one group of ranks, if groups train by themselves; else those of the request."""
    local, mesh = request.options.local, request.mesh
    if local is None or mesh.axis_size(local.axis) == 1:
        return request.args, request.kwargs
    dims = dims_of_groups(request.annotations, model, request.args, request.kwargs, mesh, local.axis)
    count = mesh.axis_size(local.axis)
    parts = {name: partial(part_of_group, count=count, index=0, dim=dim, name=name) for name, dim in dims.items()}
    return part_of_call(model.forward, request.args, request.kwargs, parts)


def _about_capture(request: Request, matched: Matched) -> dict[str, Any]:
    """The options of ``capture``."""
    return {
        "train": request.train, "modules": matched.modules, "differentiable": request.differentiable,
        "precision": request.options.precision,
    }  # fmt: skip


def resolve_pins(captured: Program, request: Request, matched: Matched) -> tuple[Pin, ...]:
    """The shardings that annotations of inputs and outputs fix."""
    return resolve(captured, matched, request.options.compute_mesh(request.mesh))


def first_program(captured: Program, request: Request, pins: tuple[Pin, ...]) -> Program:
    """The captured program with mesh, options and pins: the input of the first pass."""
    options, notes = request.options, captured.notes
    if options.local is not None:
        options = replace(options, local=options.local.among(request.mesh))
    mesh = options.compute_mesh(request.mesh)
    fixed = {(pin.kind, pin.name) for pin in request.fixed}
    pins = (*(pin for pin in pins if (pin.kind, pin.name) not in fixed), *request.fixed)
    num_stages = 1
    if options.pipeline:
        check_loss(captured)
        pins = tuple(with_microbatches(captured, pins, options.pipeline, mesh))
        notes = (*notes, *empty_microbatches(captured, pins, options.pipeline))
        num_stages = options.pipeline.num_stages(request.mesh)
    return replace(captured, mesh=mesh, pins=pins, options=options, num_stages=num_stages, notes=notes)


def _on_meta(request: Request) -> dict[str, Any]:
    """The example inputs of a request without their values, so that they may be kept."""
    leaves, tree = flatten({"args": tuple(request.args), "kwargs": dict(request.kwargs)})
    values = [leaf for _, leaf in leaves]
    for i, leaf in enumerate(values):
        if isinstance(leaf, torch.Tensor):
            values[i] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
    rebuilt: dict[str, Any] = rebuild(tree, values)
    return rebuilt
