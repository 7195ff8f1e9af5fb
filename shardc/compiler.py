"""The compiler: a model and what was asked of it go in, a program for each rank comes out, as data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from shardc.capture.annotations import Matched, Spec, idle_error, match, note_of, resolve, unused_annotations
from shardc.capture.call import CallingConvention, flatten, rebuild
from shardc.capture.capture import Captured, capture, is_same_capture
from shardc.capture.microbatches import check_loss, empty_microbatches, with_microbatches
from shardc.costs.stage_schedule import schedule_of
from shardc.costs.step_time import slow_link_note
from shardc.language.errors import CaptureError, OptionError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.options import Options
from shardc.passes.order import PROPAGATED, UNANNOTATED, Pass, run_passes
from shardc.passes.propagate.idle_annotations import idle_annotations
from shardc.program.idle_axes import idle_axis_notes
from shardc.program.program import Pin, Program

if TYPE_CHECKING:
    from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``shardc.compile`` without the model: enough to compile it again with a change.

    ``fixed``: shardings of values that stand above every annotation.
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
    """A compiled model, as data; ``shardc.Compiled`` adds what a user asks of it.

    ``program``: the last one, in the shapes of one rank. ``after``: the program after capture and after each pass, by
    name. ``seconds``: how long each of them took. ``request``: what was asked, with example inputs on meta.
    ``captured``: the model as it was captured, which no pass touches but to bind rules.
    """

    model: nn.Module
    program: Program
    convention: CallingConvention
    after: Mapping[str, Program] = field(repr=False)
    seconds: Mapping[str, float] = field(default_factory=dict)
    request: Request | None = field(default=None, repr=False)
    captured: Captured | None = field(default=None, repr=False)

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
        """The program after a pass, which is named or given; ``"capture"`` is the first.

        Raises an OptionError, with near names, for a name that no pass has.
        """
        name = name if isinstance(name, str) else name.__name__
        if name not in self.after:
            known, remedy = ", ".join(self.after), did_you_mean(name, self.after) or "name one of them"
            raise OptionError(f"pass {name!r}", f"the passes are {known}", "there is no such pass", remedy)
        return self.after[name]

    @property
    def whole(self) -> Program:
        """The last program in global shapes: it has every collective, and is what dump and explain speak of."""
        return [program for program in self.after.values() if program.level != "localized"][-1]


def compile_request(model: nn.Module, request: Request, known: Captured | None = None) -> Compiled:
    """Capture a model, pin what is annotated, and run the passes.

    ``known``: a capture of the model, which is kept if the request would give the same.

    Raises a ShardingError for what the user did wrong, a CaptureError for a model that cannot be captured.
    """
    after, seconds = dict[str, Program](), dict[str, float]()

    def watch(name: str, program: Program, took: float) -> None:
        after[name], seconds[name] = program, took

    start = time.perf_counter()
    matched = match_annotations(model, request)
    captured = capture_model(model, request, matched) if known is None else keep_capture(known, model, request, matched)
    pins = resolve_pins(captured.program, request, matched)
    unused = list(unused_annotations(captured.program, matched, pins))
    if request.strict:
        raise_all(unused)
    watch("capture", first_program(captured.program, request, pins), time.perf_counter() - start)
    with torch._C.DisableTorchFunction():  # modes of the caller, as a default device is one, are for the model's code
        local = run_passes(after["capture"], watch)
    unused += map(idle_error, idle_annotations(after[UNANNOTATED.__name__], after[PROPAGATED.__name__]))
    request = replace(request, **_on_meta(request))
    compiled = Compiled(model, local, captured.convention, after, seconds, request, captured)
    if request.options.pipeline:
        schedule_of(local)  # raises for an op that needs the whole batch, and for a schedule that cannot run
    whole = compiled.whole
    notes = (*filter(None, [slow_link_note(whole)]), *idle_axis_notes(whole), *map(note_of, unused))
    for name, program in after.items():
        if program is whole or program is local:  # those that people look at
            after[name] = replace(program, notes=(*program.notes, *notes))
    return replace(compiled, program=next(reversed(after.values())))


def match_annotations(model: nn.Module, request: Request) -> Matched:
    """The names that each pattern means. Raises a ShardingError for a pattern that means none, or too much."""
    mesh = request.options.stage_mesh(request.mesh)
    return match(request.annotations, model, request.args, request.kwargs, mesh)


def capture_model(model: nn.Module, request: Request, matched: Matched) -> Captured:
    """The joint graph of the model, with annotations of module outputs in it. Raises a CaptureError."""
    return capture(model, request.args, request.kwargs, **_about_capture(request, matched))


def keep_capture(known: Captured, model: nn.Module, request: Request, matched: Matched) -> Captured:
    """A capture of the model, its rules unbound; another one if request or model differ in what a capture depends on.

    Raises a CaptureError where that needs values of inputs, which the request of a compiled model has not.
    """
    if is_same_capture(known, model, request.args, request.kwargs, **_about_capture(request, matched)):
        return replace(known, program=known.program.unbound())
    try:
        return capture_model(model, request, matched)
    except CaptureError as error:
        if known.has_guards:
            problem = "the model has to be captured again, by values of its inputs, of which the types alone were kept"
            raise CaptureError(error.who, problem, "say args= and kwargs= too, with values") from error
        raise


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
    """The captured program with mesh, options and pins: what the first pass takes."""
    options, notes = request.options, captured.notes
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
