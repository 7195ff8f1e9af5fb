"""Annotations: patterns over names, resolved to shardings, and ``annotate`` inside a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardc.capture.call import flatten, names_of, rebuild
from shardc.capture.model import state_names
from shardc.language.errors import ShardingError, did_you_mean, raise_all
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import TensorType
from shardc.ops.pointwise import annotate_op
from shardc.program.node import arguments, is_annotation
from shardc.program.program import Pin, Program

Spec = P | Sequence[Any]
"""The value of an annotation: a P, or one DTensor placement for each axis of the mesh."""


@dataclass(frozen=True, slots=True)
class Match:
    """The annotation of one value: ``kind`` is ``param`` (buffers too), ``input``, ``module`` or ``output``.

    The name of an output is still a pattern: outputs are known only after capture.
    """

    kind: str
    name: str
    spec: P
    pattern: str

    @property
    def text(self) -> str:
        """The annotation as the user wrote it."""
        return f"{self.pattern}: {self.spec!r}"

    def who(self, kind: str) -> str:
        """The value in an error: its kind and name, and the pattern where that differs."""
        by = "" if self.pattern in (self.name, f"{self.kind}:{self.name}") else f" (annotated by {self.pattern!r})"
        return f"{kind} {self.name!r}{by}"


@dataclass(frozen=True, slots=True)
class Matched:
    """The annotated values, each once, in the order of the annotations; ``texts``: all annotations."""

    entries: tuple[Match, ...]
    texts: tuple[str, ...] = ()

    @property
    def modules(self) -> dict[str, Match]:
        """The annotations of modules' outputs, by module path: they are needed during capture."""
        return {entry.name: entry for entry in self.entries if entry.kind == "module"}


def match(
    annotations: Mapping[str, Spec], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
) -> Matched:
    """The values of a model and of a call that each pattern matches."""
    check_annotations(annotations)
    return match_names(annotations, names_of(model, args, kwargs), mesh)


def check_annotations(annotations: Any) -> None:
    """Raise a ShardingError for annotations that are no mapping."""
    if not isinstance(annotations, Mapping):
        raise ShardingError(
            "annotations",
            f"of type {type(annotations).__name__}",
            "annotations map patterns to specs",
            "write {'*.weight': P('tp')}",
        )


def annotated_parameters(annotations: Mapping[str, Spec], model: nn.Module, mesh: Mesh) -> dict[str, Match]:
    """The annotations of parameters and buffers; patterns of other values, which only a call has, are left out."""
    parameters, buffers, aliases = state_names(model)
    known = {"param": {name: name for name in (*parameters, *buffers)} | aliases}
    patterns = {p: spec for p, spec in annotations.items() if any(kind == "param" for kind, _ in named_by(p, known))}
    return {entry.name: entry for entry in match_names(patterns, known, mesh).entries}


def match_names(annotations: Mapping[str, Spec], names: Names, mesh: Mesh) -> Matched:
    """The values that each pattern matches, under their first name.

    A pattern is a glob over the names of parameters, buffers, inputs and modules; a prefix ``param:``, ``input:``,
    ``module:`` or ``output:`` restricts it to one kind. Raises a ShardingError for patterns that match nothing or
    several kinds, and for two that disagree on one value.
    """
    found: list[Match] = []
    lost: list[ShardingError] = []
    torn: list[ShardingError] = []
    for pattern, given in annotations.items():
        spec = spec_of(given, mesh, f"annotation {pattern!r}")
        values = named_by(pattern, names)
        if not values:
            lost.append(unmatched(pattern, names))
        elif len({kind for kind, _ in values}) > 1:
            torn.append(ambiguous(pattern, values))
        found += [Match(kind, name, spec, pattern) for kind, name in values]
    raise_all(lost)
    raise_all(torn)
    return Matched(_agreed(found), tuple(dict.fromkeys(entry.text for entry in found)))


def resolve(program: Program, matched: Matched, mesh: Mesh) -> tuple[Pin, ...]:
    """The pins of a captured program's inputs and outputs; its graph has the annotations of modules."""
    types = _types(program)
    known = [entry for entry in matched.entries if entry.kind not in ("output", "module")]
    known += _outputs(matched, {name: name for kind, name in types if kind == "output"})
    pins: list[Pin] = []
    errors: list[ShardingError] = []
    for entry in _agreed(known):
        try:
            pins.append(_pin(entry, *types[entry.kind, entry.name], mesh))
        except ShardingError as error:
            errors.append(error)
    raise_all(errors)
    return tuple(pins)


def spec_of(given: Any, mesh: Mesh, who: str) -> P:
    """The spec as a P; it may be DTensor placements, one for each axis of the mesh."""
    if isinstance(given, P):
        return given
    if not isinstance(given, Sequence) or not all(hasattr(entry, "is_replicate") for entry in given):
        problem = "an annotation is a P or a sequence of DTensor placements"
        raise ShardingError(who, repr(given), problem, _meant(given))
    if len(given) != len(mesh.axis_names):
        raise ShardingError(
            who,
            repr(given),
            f"{len(given)} placement{'s' * (len(given) != 1)} for the {len(mesh.axis_names)} axes of {mesh}",
            "write one placement for each axis",
        )
    axes: dict[int, tuple[str, ...]] = {}
    for name, placement in zip(mesh.axis_names, given, strict=True):
        if not placement.is_replicate():
            dim = _cut_dim(placement, who)
            axes[dim] = (*axes.get(dim, ()), name)
    return P(*(axes.get(dim) for dim in range(max(axes, default=-1) + 1)))


def _meant(given: Any) -> str:
    """The remedy for a text or a sequence in place of a P."""
    if isinstance(given, (str, tuple, list)):
        try:
            return f"write {P.parse(given) if isinstance(given, str) else P(*given)!r}"
        except ShardingError:
            pass
    return "write for example P('dp', None)"


def annotate(x: torch.Tensor, spec: P) -> torch.Tensor:
    """Annotate a value inside a model with a sharding, which its gradient gets too. The identity outside shardc."""
    if not isinstance(spec, P):
        raise ShardingError(_caller(), repr(spec), "an annotation inside a model is a P", _meant(spec))
    if not hasattr(x, "clone"):
        what, remedy = f"of type {type(x).__name__}", "annotate the tensors in it, one by one"
        raise ShardingError(_caller(), what, "only a tensor lies on a mesh", remedy)
    return _annotated(x, spec)


def _caller() -> str:
    """``annotate``, and the line that called it."""
    frame = sys._getframe(2)
    return f"annotate ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _annotated(x: torch.Tensor, spec: P, text: str = "") -> torch.Tensor:
    return annotate_op()(x, str(spec), spec.priority, text=text) if _CAPTURING.get() else x


def annotate_output(output: Any, entry: Match) -> Any:
    """A module's output with every tensor in it annotated."""
    leaves, tree = flatten(output)
    return rebuild(
        tree,
        [_annotated(leaf, entry.spec, entry.text) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves],
    )


@contextmanager
def annotating() -> Iterator[None]:
    """In the block ``annotate`` adds an op to the graph."""
    annotate_op()
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


_CAPTURING: ContextVar[bool] = ContextVar("capturing", default=False)


def _outputs(matched: Matched, names: Mapping[str, str]) -> list[Match]:
    """The annotations of outputs, one for each output that a pattern matches."""
    patterns = [entry for entry in matched.entries if entry.kind == "output"]
    raise_all([unmatched(entry.pattern, {"output": names}) for entry in patterns if not glob(entry.name, names)])
    return [Match("output", name, entry.spec, entry.pattern) for entry in patterns for name in glob(entry.name, names)]


def _agreed(matches: Sequence[Match]) -> tuple[Match, ...]:
    """The matches, one for each value; raises a ShardingError where two specs of one value differ."""
    found: dict[tuple[str, str], Match] = {}
    errors: list[ShardingError] = []
    for entry in matches:
        other = found.setdefault((entry.kind, entry.name), entry)
        if other.spec != entry.spec:
            errors.append(_torn(other, entry))
    raise_all(errors)
    return tuple(found.values())


def _torn(one: Match, other: Match) -> ShardingError:
    return ShardingError(
        f"{'parameter' if one.kind == 'param' else one.kind} {one.name!r}",
        f"{one.text}, and {other.text}",
        "two annotations say different things of one value",
        "make the patterns disjoint, or the specs equal",
    )


def _types(program: Program) -> dict[tuple[str, str], tuple[str, TensorType]]:
    """By the (kind, name) of a match the kind of its pin and the type."""
    found: dict[tuple[str, str], tuple[str, TensorType]] = {}
    for entry in program.inputs:
        if entry.kind in ("parameter", "buffer", "input"):
            found["input" if entry.kind == "input" else "param", entry.name] = (entry.kind, entry.type)
    for output, node in zip(program.outputs, program.results, strict=True):
        if output.kind == "output" and node is not None:
            found["output", output.name] = ("output", program.type(node))
    return found


def _pin(entry: Match, kind: str, type_: TensorType, mesh: Mesh) -> Pin:
    sharding = entry.spec.sharding(mesh, type_.shape, entry.who(kind))
    if kind in ("parameter", "buffer"):
        sharding = sharding.storable(type_.shape)
    open_ = frozenset(dim for dim in range(len(type_.shape)) if entry.spec.is_open(dim))
    return Pin(entry.name, kind, sharding, open_, entry.text, entry.spec.priority)


def _cut_dim(placement: Any, who: str) -> int:
    dim: int = getattr(placement, "dim", -1)
    if not placement.is_shard() or hasattr(placement, "split_factor") or dim < 0:
        raise ShardingError(
            who,
            repr(placement),
            "only Shard with a dim of 0 or more and Replicate say how a value lies",
            "write the annotation as a P",
        )
    return dim


KINDS = ("param", "input", "module", "output")
Names = Mapping[str, Mapping[str, str]]
"""By kind (``param``, ``input``, ``module``): every name of a value, with its first name."""


def named_by(pattern: str, names: Names) -> list[tuple[str, str]]:
    """The (kind, name) of every value that a pattern matches, each once; for outputs the pattern itself."""
    if not isinstance(pattern, str):
        problem, remedy = "a pattern is a string, a glob over names", "write for example '*.weight'"
        raise ShardingError(f"annotation {pattern!r}", f"of type {type(pattern).__name__}", problem, remedy)
    prefix, colon, rest = pattern.partition(":")
    if not colon:
        return [(kind, name) for kind in KINDS for name in glob(pattern, names.get(kind, {}))]
    if prefix not in KINDS:
        raise ShardingError(
            f"annotation {pattern!r}",
            f"prefix {prefix!r}",
            f"a prefix is one of {', '.join(f'{kind}:' for kind in KINDS)}",
            did_you_mean(prefix, KINDS) or "leave the prefix away",
        )
    return [("output", rest)] if prefix == "output" else [(prefix, name) for name in glob(rest, names.get(prefix, {}))]


def glob(pattern: str, names: Mapping[str, str]) -> list[str]:
    """The first names of the values that a glob matches, each once."""
    return list(dict.fromkeys(known for name, known in names.items() if fnmatchcase(name, pattern)))


def unmatched(pattern: str, names: Names) -> ShardingError:
    """The error for a pattern that matches nothing."""
    prefix, colon, rest = pattern.partition(":")
    searched = [prefix] if colon else list(names)
    candidates = [name for kind in searched for name in names.get(kind, {})]
    return ShardingError(
        f"annotation {pattern!r}",
        f"a pattern over {len(candidates)} name{'s' * (len(candidates) != 1)} ({', '.join(searched)})",
        "it matches nothing",
        did_you_mean(rest if colon else pattern, candidates) or f"use one of {', '.join(candidates[:8])}",
    )


def ambiguous(pattern: str, values: Sequence[tuple[str, str]]) -> ShardingError:
    """The error for a pattern that matches values of several kinds."""
    one = dict(reversed(values))  # the first of each kind
    return ShardingError(
        f"annotation {pattern!r}",
        "it matches " + " and ".join(f"the {kind} {one[kind]!r}" for kind in KINDS if kind in one),
        "these are values of several kinds",
        "write " + " or ".join(repr(f"{kind}:{pattern}") for kind in KINDS if kind in one),
    )


def unused_annotations(captured: Program, matched: Matched, pins: Collection[Pin]) -> Iterator[ShardingError]:
    """An error for each annotation without effect: a note, or raised by ``strict``; ``pins``: the resolved ones."""
    used = {arguments(node)["text"] for node in captured.calls if is_annotation(node)} | {pin.text for pin in pins}
    modules = {entry.text: entry.name for entry in matched.entries if entry.kind == "module"}
    for text in matched.texts:
        if text in used:
            continue
        if text in modules:
            problem = f"the model does not call {modules[text]!r}, or nothing that it returns is a tensor"
            yield _no_effect(text, "the output of a module", problem, "annotate what is in the model")
        else:
            problem = "what it names has an annotation already, which says the same"
            yield _no_effect(text, "a pattern", problem, "annotate something else")


def idle_error(text: str) -> ShardingError:
    """The error for an annotation that changes nothing."""
    return _no_effect(text, "a pattern", "without it every value lies the same", "cut something by it")


def note_of(error: ShardingError) -> str:
    """The note on an error about an annotation, in one line."""
    return f"{error.who} has no effect: {error.problem}; {error.remedy}"


def _no_effect(text: str, what: str, problem: str, remedy: str) -> ShardingError:
    return ShardingError(f"annotation {text}", what, problem, f"leave it out, or {remedy}")
