"""Annotations: patterns over names, resolved to shardings, and ``annotate`` inside a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardc.capture.call import call_leaves, named_arguments, names_of, optional_arguments
from shardc.capture.containers import flatten, rebuild
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

    The name of an output is still a pattern: outputs are known only after capture. ``of_all``: the annotation as the
    user wrote it, if ``spec`` is the part of it for the ranks of one group.
    """

    kind: str
    name: str
    spec: P
    pattern: str
    of_all: P | None = None

    @property
    def text(self) -> str:
        """The annotation as the user wrote it."""
        return f"{self.pattern}: {self.of_all or self.spec!r}"

    def who(self, kind: str) -> str:
        """The value as errors name it: its kind and name, and the pattern if that differs."""
        by = "" if self.pattern in (self.name, f"{self.kind}:{self.name}") else f" (annotated by {self.pattern!r})"
        return f"{kind} {self.name!r}{by}"


@dataclass(frozen=True, slots=True)
class Matched:
    """The annotated values, each once, in the order of the annotations; ``texts``: all annotations.

    ``unused``: errors for annotations that are left out, since they have no effect.
    """

    entries: tuple[Match, ...]
    texts: tuple[str, ...] = ()
    unused: tuple[ShardingError, ...] = ()

    @property
    def modules(self) -> dict[str, Match]:
        """The annotations of modules' outputs, by module path: they are needed during capture."""
        return {entry.name: entry for entry in self.entries if entry.kind == "module"}

    @property
    def of_groups(self) -> set[str]:
        """The annotations of inputs of which each group of ranks has a part."""
        return {entry.text for entry in self.entries if entry.kind == "input" and entry.of_all is not None}


def match(
    annotations: Mapping[str, Spec], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
) -> Matched:
    """The values of a model and of a call that each pattern matches.

    Annotations of optional arguments that the call leaves out, or gives as None, are ignored.
    """
    check_annotations(annotations)
    names, left_out = names_of(model, args, kwargs), optional_arguments(model.forward)
    kept = {
        pattern: spec
        for pattern, spec in annotations.items()
        if named_by(pattern, names) or not _is_about(pattern, left_out)
    }
    holders = {name.partition(".")[0] for name in names["input"]}
    others = {name: value for name, value in named_arguments(model.forward, args, kwargs) if name not in holders}
    for pattern in (each for each in kept if not named_by(each, names)):
        for name in (each for each in others if _is_about(pattern, {each: each})):
            what, problem = f"{name!r} of type {type(others[name]).__name__}", "there is no tensor in this argument"
            raise ShardingError(f"annotation {pattern!r}", what, problem, "torch.as_tensor makes one of it")
    return match_names(kept, names, mesh)


def annotations_about(
    annotations: Mapping[str, Spec], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Spec]:
    """The annotations of parameters, modules and inputs of a call; others are about other calls of the model."""
    names = names_of(model, args, kwargs)
    return {p: spec for p, spec in annotations.items() if any(kind != "output" for kind, _ in named_by(p, names))}


def dims_of_groups(
    annotations: Mapping[str, Spec], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
    mesh: Mesh, axis: str,
) -> dict[str, int]:  # fmt: skip
    """For each input of a call that annotations cut over groups of ranks along ``axis``, the dim that is cut.

    Raises a ShardingError for another input that is as long in such a dim, unless its annotation names no axis.
    """
    inputs = [entry for entry in match(annotations, model, args, kwargs, mesh).entries if entry.kind == "input"]
    dims = {entry.name: _first_cut(entry, axis) for entry in inputs if axis in entry.spec.axes}
    whole = {entry.name for entry in inputs if not entry.spec.axes}
    leaves, _ = call_leaves(model.forward, args, kwargs)
    tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
    for name in tensors:
        for cut, dim in dims.items() if name not in {*dims, *whole} else ():
            if tensors[name].shape[dim : dim + 1] == tensors[cut].shape[dim : dim + 1]:
                what = f"dim {dim} is as long as that of {cut!r}, of which groups along {axis} have a part each"
                remedy = f"cut dim {dim} by {axis!r} first too, or say P() if each group has all of it"
                raise ShardingError(f"input {name!r}", what, "no annotation says which part of it a group has", remedy)
    return dims


def within_group(matched: Matched, axis: str) -> Matched:
    """The annotations for the ranks of one of the groups along ``axis``: the same annotations without the axis.

    Annotations that name no other axis are left out; unless they are of inputs, they are reported as without effect.
    Raises a ShardingError for a parameter that the axis cuts, and for a dim that another axis cuts before it.
    """
    cut = [entry for entry in matched.entries if axis in entry.spec.axes]
    problem = f"groups along {axis} have all parameters, each of its own"
    raise_all([
        ShardingError(entry.who("parameter"), repr(entry.spec), problem, f"leave {axis!r} out")
        for entry in cut if entry.kind == "param"
    ])  # fmt: skip
    for entry in cut:
        _first_cut(entry, axis)

    def is_left_out(entry: Match) -> bool:
        return entry.spec.axes == (axis,) and not entry.spec.rest_open

    entries = tuple(
        replace(entry, spec=entry.spec.without(axis), of_all=entry.spec) if axis in entry.spec.axes else entry
        for entry in matched.entries
        if not is_left_out(entry)
    )
    own = filter(is_left_out, (entry for entry in cut if entry.kind != "input"))
    idle = {entry.text: f"the {entry.kind} {entry.name!r}" for entry in own}
    problem, remedy = f"groups along {axis} compute it each by itself", "cut it by another axis"
    unused = tuple(_no_effect(text, what, problem, remedy) for text, what in idle.items())
    return Matched(entries, tuple(dict.fromkeys(entry.text for entry in entries)), unused)


def _first_cut(entry: Match, axis: str) -> int:
    """The dim that ``axis`` cuts before all other axes. Raises a ShardingError if there is none."""
    for dim, given in enumerate(entry.spec.entries):
        if (given[0] if isinstance(given, tuple) and given else given) == axis:
            return dim
    problem, remedy = f"groups along {axis} have a stretch each of a dim", f"name {axis!r} before its other axes"
    raise ShardingError(entry.who(entry.kind), repr(entry.spec), problem, remedy)


def check_annotations(annotations: Any) -> None:
    """Raise a ShardingError for annotations that are no mapping."""
    if not isinstance(annotations, Mapping):
        what, problem = f"of type {type(annotations).__name__}", "annotations map patterns to specs"
        raise ShardingError("annotations", what, problem, "write {'*.weight': P('tp')}")


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
    matches: list[Match] = []
    without_match: list[ShardingError] = []
    ambiguous: list[ShardingError] = []
    for pattern, spec in annotations.items():
        partition = spec_of(spec, mesh, f"annotation {pattern!r}")
        values = named_by(pattern, names)
        examples = dict(reversed(values))  # by kind the first name
        kinds = [kind for kind in KINDS if kind in examples]
        if not values:
            without_match.append(unmatched(pattern, names))
        elif len(kinds) > 1:
            what = "it matches " + " and ".join(f"the {kind} {examples[kind]!r}" for kind in kinds)
            remedy = "write " + " or ".join(repr(f"{kind}:{pattern}") for kind in kinds)
            problem = "these are values of several kinds"
            ambiguous.append(ShardingError(f"annotation {pattern!r}", what, problem, remedy))
        matches += [Match(kind, name, partition, pattern) for kind, name in values]
    raise_all(without_match)
    raise_all(ambiguous)
    return Matched(_agreed(matches), tuple(dict.fromkeys(entry.text for entry in matches)))


def resolve(program: Program, matched: Matched, mesh: Mesh) -> tuple[Pin, ...]:
    """The pins of a captured program's inputs and outputs. Annotations of modules are ops in its graph."""
    values: dict[tuple[str, str], tuple[str, TensorType]] = {
        ("input" if entry.kind == "input" else "param", entry.name): (entry.kind, entry.type)
        for entry in program.inputs
        if entry.kind in ("parameter", "buffer", "input")
    }
    results = zip(program.outputs, program.results, strict=True)
    outputs = {output.name: node for output, node in results if output.kind == "output" and node is not None}
    values |= {("output", name): ("output", program.type(node)) for name, node in outputs.items()}
    matches = [entry for entry in matched.entries if entry.kind not in ("output", "module")]
    matches += _outputs(matched, {name: name for name in outputs})
    pins: list[Pin] = []
    errors: list[ShardingError] = []
    for entry in _agreed(matches):
        kind, type_ = values[entry.kind, entry.name]
        try:
            sharding = entry.spec.sharding(mesh, type_.shape, entry.who(kind))
        except ShardingError as error:
            errors.append(error)
            continue
        if kind in ("parameter", "buffer"):
            sharding = sharding.storable(type_.shape)
        open_ = frozenset(dim for dim in range(len(type_.shape)) if entry.spec.is_open(dim))
        priorities, zigzags = entry.spec.priorities(len(type_.shape)), tuple(entry.spec.zigzags.items())
        if zigzags and kind != "input":
            what, problem = (
                entry.text,
                "only positions of inputs, of modules and of values in the model are put in zigzag",
            )
            errors.append(ShardingError(entry.who(kind), what, problem, f"write {entry.spec.in_order()!r}"))
            continue
        pins.append(Pin(entry.name, kind, sharding, open_, entry.text, priorities, zigzags=zigzags))
    raise_all(errors)
    return tuple(pins)


def spec_of(spec: Any, mesh: Mesh, who: str) -> P:
    """The spec as a P. ``spec`` may also be DTensor placements, one for each axis of the mesh."""
    if isinstance(spec, P):
        return spec
    if not isinstance(spec, Sequence) or not all(hasattr(entry, "is_replicate") for entry in spec):
        problem = "an annotation is a P or a sequence of DTensor placements"
        raise ShardingError(who, repr(spec), problem, _suggested_spec(spec))
    if len(spec) != len(mesh.axis_names):
        problem = f"{len(spec)} placement{'s' * (len(spec) != 1)} for the {len(mesh.axis_names)} axes of {mesh}"
        raise ShardingError(who, repr(spec), problem, "write one placement for each axis")
    axes: dict[int, tuple[str, ...]] = {}
    for name, placement in zip(mesh.axis_names, spec, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", -1)
        if not placement.is_shard() or hasattr(placement, "split_factor") or dim < 0:
            problem = "only Shard with a dim of 0 or more and Replicate say how a value lies"
            raise ShardingError(who, repr(placement), problem, "write the annotation as a P")
        axes[dim] = (*axes.get(dim, ()), name)
    return P(*(axes.get(dim) for dim in range(max(axes, default=-1) + 1)))


def _suggested_spec(spec: Any) -> str:
    """The remedy for a text or a sequence in place of a P."""
    if isinstance(spec, (str, tuple, list)):
        try:
            return f"write {P.parse(spec) if isinstance(spec, str) else P(*spec)!r}"
        except ShardingError:
            pass
    return "write for example P('dp', None)"


def annotate(x: torch.Tensor, spec: P) -> torch.Tensor:
    """Annotate a value inside a model with a sharding, which holds for its gradient too. The identity outside shardc.

    Args:
        x: a tensor that the model computes.
        spec: an entry for each dim, ``P("dp", None, "tp")``.

    Returns:
        The same tensor.

    Raises:
        ShardingError: for a spec that is no P, and a value that is no tensor.

    Examples:
        >>> import torch, shardc
        >>> shardc.annotate(torch.ones(2), shardc.P("dp"))
        tensor([1., 1.])
    """
    caller = sys._getframe(1)
    who = f"annotate ({os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno})"
    if not isinstance(spec, P):
        raise ShardingError(who, repr(spec), "an annotation inside a model is a P", _suggested_spec(spec))
    if not hasattr(x, "clone"):
        what, remedy = f"of type {type(x).__name__}", "annotate the tensors in it, one by one"
        raise ShardingError(who, what, "only a tensor lies on a mesh", remedy)
    return _annotated(x, spec)


def _annotated(x: torch.Tensor, spec: P, text: str = "") -> torch.Tensor:
    return annotate_op()(x, str(spec), spec.priorities(x.ndim), text=text) if _CAPTURING.get() else x


def annotate_output(output: Any, entry: Match) -> Any:
    """A module's output with every tensor in it annotated."""
    leaves, tree = flatten(output)
    new = (_annotated(x, entry.spec, entry.text) if isinstance(x, torch.Tensor) else x for _, x in leaves)
    return rebuild(tree, new)


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
    agreed: dict[tuple[str, str], Match] = {}
    errors: list[ShardingError] = []
    for entry in matches:
        first = agreed.setdefault((entry.kind, entry.name), entry)
        if first.spec != entry.spec:
            who = f"{'parameter' if entry.kind == 'param' else entry.kind} {entry.name!r}"
            problem = "two annotations say different things of one value"
            remedy = "make the patterns disjoint, or the specs equal"
            errors.append(ShardingError(who, f"{first.text}, and {entry.text}", problem, remedy))
    raise_all(errors)
    return tuple(agreed.values())


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
        problem = f"a prefix is one of {', '.join(f'{kind}:' for kind in KINDS)}"
        remedy = did_you_mean(prefix, KINDS) or "leave the prefix away"
        raise ShardingError(f"annotation {pattern!r}", f"prefix {prefix!r}", problem, remedy)
    return [("output", rest)] if prefix == "output" else [(prefix, name) for name in glob(rest, names.get(prefix, {}))]


def _is_about(pattern: str, arguments: Mapping[str, str]) -> bool:
    """Whether a pattern matches an argument, or something inside it."""
    prefix, _, rest = pattern.rpartition(":")
    return prefix in ("", "input") and bool(glob(rest, arguments) or glob(rest.partition(".")[0], arguments))


def glob(pattern: str, names: Mapping[str, str]) -> list[str]:
    """The first names of the values that a glob matches, each once."""
    return list(dict.fromkeys(known for name, known in names.items() if fnmatchcase(name, pattern)))


def unmatched(pattern: str, names: Names) -> ShardingError:
    """The error for a pattern that matches nothing."""
    prefix, colon, rest = pattern.partition(":")
    kinds = [prefix] if colon else list(names)
    candidates = [name for kind in kinds for name in names.get(kind, {})]
    what = f"a pattern over {len(candidates)} name{'s' * (len(candidates) != 1)} ({', '.join(kinds)})"
    listed = ", ".join(f"{prefix}:{name}" if colon else name for name in candidates[:8])
    remedy = did_you_mean(rest if colon else pattern, candidates) or f"use one of {listed}"
    return ShardingError(f"annotation {pattern!r}", what, "it matches nothing", remedy)


def unused_annotations(captured: Program, matched: Matched, pins: Collection[Pin]) -> Iterator[ShardingError]:
    """An error for each annotation without effect, for a note or for ``strict``. ``pins``: the resolved annotations."""
    yield from matched.unused
    used = {arguments(node)["text"] for node in captured.calls if is_annotation(node)} | {pin.text for pin in pins}
    modules = {entry.text: entry.name for entry in matched.entries if entry.kind == "module"}
    for text in matched.texts:
        if text in modules and text not in used:
            problem = f"the model does not call {modules[text]!r}, or nothing that it returns is a tensor"
            yield _no_effect(text, "the output of a module", problem, "annotate what is in the model")
        elif text not in used:
            problem = "what it names has an annotation already, which says the same"
            yield _no_effect(text, "a pattern", problem, "annotate something else")


def idle_error(text: str) -> ShardingError:
    """The error for an annotation that changes nothing."""
    return _no_effect(text, "a pattern", "without it every value lies the same", "cut something by it")


def note_of(error: ShardingError) -> str:
    """An error about an annotation as a note of one line."""
    return f"{error.who} has no effect: {error.problem}; {error.remedy}"


def _no_effect(text: str, what: str, problem: str, remedy: str) -> ShardingError:
    return ShardingError(f"annotation {text}", what, problem, f"leave it out, or {remedy}")
