"""Compiling many plans of one model; the steps that they share run once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from shardc.capture.annotations import Match
from shardc.compiler import Request, capture_model, first_program, match_annotations, resolve_pins
from shardc.language.errors import CaptureError, InternalError, ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Options
from shardc.passes.order import UNANNOTATED, Pass, run_passes
from shardc.passes.reshard.insert_reshards import insert_reshards
from shardc.program.node import arguments, is_annotation, operand
from shardc.program.program import Program

AGREED: Pass = insert_reshards  # no pass up to this one reads an option other than the pipeline
NUM_KEPT = 4  # agreed programs in the cache
DEFAULT = Options()
REFUSALS = (ShardingError, CaptureError, NotImplementedError, InternalError)  # errors for which a plan is left out


@dataclass(eq=False)
class PlanCompiler:
    """Compiles a model for meshes, annotations and options without a pipeline.

    State: ``_captured``, the captured program and the program before annotations are read, by precision and annotated
    modules, whose specs are set later; ``_seen``, the annotations compiled so far, with their mesh; ``_agreed``, the
    latest programs after ``insert_reshards``, which plans with other options share. Most annotations come once, so such
    a program is kept from the second time on.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    _captured: dict[Any, tuple[Program, Program]] = field(default_factory=dict)
    _seen: set[Any] = field(default_factory=set)
    _agreed: OrderedDict[Any, Program] = field(default_factory=OrderedDict)

    @cached_property
    def can_capture(self) -> bool:
        """Whether the model can be captured; a model without some of its blocks may raise any error."""
        try:
            self.annotated(Mesh(axis=1), {}, UNANNOTATED)
        except Exception:
            return False
        return True

    def program(self, mesh: Mesh, annotations: Mapping[str, P], options: Options, until: Pass) -> Program:
        """The program after the pass ``until``. Raises what ``shardc.compile`` raises."""
        key = _key(mesh, annotations, options)
        if key not in self._seen:
            self._seen.add(key)
            return self.annotated(mesh, annotations, until, options)
        agreed = self._agreed_program(mesh, annotations, options)
        return run_passes(replace(agreed, options=options), after=AGREED, until=until, is_verified=False)

    def cuts(self, mesh: Mesh, annotations: Mapping[str, P]) -> object:
        """The shardings of all values, reshards included: equal for annotations that make the same program.

        None for annotations that cannot be compiled.
        """
        try:
            program = self._agreed_program(mesh, annotations, DEFAULT)
        except REFUSALS:
            return None
        nodes = [node for node in program.graph.nodes if node.op != "output" and not is_annotation(node)]
        return [(node.target, program.shardings(node)) for node in nodes]

    def annotated(self, mesh: Mesh, annotations: Mapping[str, P], until: Pass, options: Options = DEFAULT) -> Program:
        """The program after the pass ``until``; nothing is shared with other annotations but the captured program."""
        request = Request(mesh, annotations, self.args, self.kwargs, options=options)
        matched = match_annotations(self.model, request)
        key = tuple((path, each.pattern) for path, each in matched.modules.items()), options.precision
        if key not in self._captured:
            captured = capture_model(self.model, request, matched)
            unannotated = run_passes(first_program(captured.program, request, ()), until=UNANNOTATED)
            self._captured[key] = captured.program, unannotated
        captured_program, program = self._captured[key]
        pins = resolve_pins(captured_program, request, matched)
        program = _with_modules(replace(program, mesh=mesh, pins=pins, options=options), matched.modules.values())
        return run_passes(program, after=UNANNOTATED, until=until, is_verified=False)

    def _agreed_program(self, mesh: Mesh, annotations: Mapping[str, P], options: Options) -> Program:
        key = _key(mesh, annotations, options)
        if key not in self._agreed:
            self._agreed[key] = self.annotated(mesh, annotations, AGREED, options)
            if len(self._agreed) > NUM_KEPT:
                self._agreed.popitem(last=False)
        self._agreed.move_to_end(key)
        return self._agreed[key]


def _key(mesh: Mesh, annotations: Mapping[str, P], options: Options) -> object:
    """What the program after ``insert_reshards`` depends on, apart from the model."""
    return tuple(mesh.sizes.items()), tuple(annotations.items()), options.precision


def _with_modules(program: Program, matches: Iterable[Match]) -> Program:
    """The program with these annotations of modules in place of those that it was captured with."""
    by_pattern = {match.pattern: match for match in matches}
    if not by_pattern:
        return program
    program = program.copy()
    for node in filter(is_annotation, program.calls):
        match = by_pattern.get(str(arguments(node)["text"]).partition(": ")[0])
        if match is not None:
            num_dims = len(program.type(node).shape)
            node.args = (operand(node), str(match.spec), match.spec.priorities(num_dims))
            node.kwargs = {"text": match.text}
    return program
