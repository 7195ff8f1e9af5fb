"""Decisions: the dims that a plan may cut, in groups that propagation cuts together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from shardc.capture.annotations import named_by
from shardc.capture.call import names_of
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.passes.order import PROPAGATED
from shardc.program.node import arguments, is_annotation
from shardc.program.program import Program
from shardc.search.pricing.compiling import PlanCompiler
from shardc.search.space.names import parameter_globs

AXIS = "axis"  # the axis of the two-rank mesh on which cuts are tried
MOST_SEEDS = 4


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A dim of the tensors that a pattern matches: of parameters, of an input, or of a module's output."""

    pattern: str
    dim: int
    num_dims: int

    def __str__(self) -> str:
        return f"{self.pattern}[{self.dim}]"

    def spec(self, axis: str) -> P:
        """The annotation that cuts this dim by an axis, and leaves all others open."""
        return P(*[P.OPEN] * self.dim, axis, ...)


@dataclass(frozen=True, slots=True)
class Decision:
    """Dims that are cut together: an annotation of any of the ``seeds`` cuts all ``places``.

    ``size``: the size of the smallest of these dims. ``kind``: ``samples``, the first dim of an input; ``inputs``,
    other dims of inputs, such as positions; ``values``, an inner dim of a module's output; or ``parameters``.
    """

    seeds: tuple[Place, ...]
    places: frozenset[Place]
    size: int
    kind: str

    def __str__(self) -> str:
        return str(self.seeds[0])

    def by_seed(self) -> Iterator[Decision]:
        """The decision, which is annotated at its first seed, and a copy for each other seed, annotated there."""
        yield self
        yield from (replace(self, seeds=(seed,)) for seed in self.seeds[1:])


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model that a plan may annotate: shapes by pattern, and the pattern of each name."""

    inputs: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, tuple[int, ...]]
    values: Mapping[str, tuple[int, ...]]
    pattern_of: Mapping[tuple[str, str], str]

    def places(self) -> Iterator[Place]:
        """Every dim of two or more elements: of inputs, then of parameters from last to first, then of values."""
        for shapes in (self.inputs, dict(reversed([*self.parameters.items()])), self.values):
            for pattern, shape in shapes.items():
                dims = range(1, len(shape) - 1) if pattern in self.values else range(len(shape))
                yield from (Place(pattern, dim, len(shape)) for dim in dims if shape[dim] > 1)


def tensors_of(compiler: PlanCompiler, model: nn.Module, given: Iterable[str] = ()) -> Tensors:
    """The tensors of a model that a plan may annotate, as in ``compiler``, which may have only a few of its blocks.

    ``given``: patterns of the user's annotations; tensors that they match are left out.
    """
    program = compiler.annotated(_mesh(1), {}, PROPAGATED)
    patterns = parameter_globs(model)
    names = names_of(compiler.model, compiler.args, compiler.kwargs)
    kinds = {"param": "parameter", "input": "input"}
    taken = {(kinds.get(kind, kind), name) for pattern in given for kind, name in named_by(pattern, names)}
    inputs: dict[str, tuple[int, ...]] = {}
    parameters: dict[str, tuple[int, ...]] = {}
    pattern_of: dict[tuple[str, str], str] = {}
    for put in program.inputs:
        if put.kind in ("input", "parameter") and put.type.shape and (put.kind, put.name) not in taken:
            is_parameter = put.kind == "parameter"
            pattern = patterns.get(put.name, put.name) if is_parameter else f"input:{put.name}"
            pattern_of[put.kind, put.name] = pattern
            shapes = parameters if is_parameter else inputs
            before = shapes.get(pattern, put.type.shape)
            shapes[pattern] = tuple(map(min, before, put.type.shape))
    return Tensors(inputs, parameters, _values(compiler), pattern_of)


def _values(compiler: PlanCompiler) -> dict[str, tuple[int, ...]]:
    """The outputs, with three dims or more, of embeddings outside of all lists: positions may be cut there."""
    lists = [
        path for path, module in compiler.model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    paths = [
        path
        for path, module in compiler.model.named_modules()
        if path and isinstance(module, nn.Embedding) and not any(path.startswith(f"{each}.") for each in lists)
    ]
    annotations = {f"module:{path}": P(...) for path in paths}
    if not annotations:
        return {}
    program = compiler.annotated(_mesh(1), annotations, PROPAGATED)
    found: dict[str, tuple[int, ...]] = {}
    for node in filter(is_annotation, program.calls):
        pattern, shape = str(arguments(node)["text"]).partition(": ")[0], program.type(node).shape
        if len(shape) > 2 and program.source(node).phase == "forward":
            found.setdefault(pattern, shape)
    return found


def decisions_of(compiler: PlanCompiler, tensors: Tensors) -> tuple[Decision, ...]:
    """All decisions, each with the places that propagation alone cuts from its seeds.

    Decisions that cut only vectors of parameters are left out: sharding a bias is the work of ``Zero``.
    """
    by_places: dict[frozenset[Place], list[Place]] = {}
    for seed in tensors.places():
        places = _cut_from(compiler, tensors, seed)
        if any(place.num_dims > 1 or place.pattern in tensors.inputs for place in places):
            by_places.setdefault(places, []).append(seed)
    return tuple(_decision(places, seeds, tensors) for places, seeds in by_places.items())


def _decision(places: frozenset[Place], seeds: list[Place], tensors: Tensors) -> Decision:
    shapes = {**tensors.inputs, **tensors.parameters, **tensors.values}
    seeds = sorted(seeds, key=lambda seed: -seed.num_dims)
    size = min(shapes[place.pattern][place.dim] for place in places)
    return Decision(tuple(seeds[:MOST_SEEDS]), places, size, _kind(places, tensors))


def _cut_from(compiler: PlanCompiler, tensors: Tensors, seed: Place) -> frozenset[Place]:
    """The places that propagation cuts if ``seed`` is annotated."""
    try:
        program = compiler.annotated(_mesh(2), {seed.pattern: seed.spec(AXIS)}, PROPAGATED)
    except ShardingError:  # uneven blocks, say
        return frozenset()
    return frozenset(_cut_places(program, tensors)) | ({seed} if seed.pattern in tensors.values else set())


def _cut_places(program: Program, tensors: Tensors) -> Iterator[Place]:
    for (kind, name), node in program.named_inputs.items():
        if pattern := tensors.pattern_of.get((kind, name)):
            sharding = program.sharding(node)
            yield from (
                Place(pattern, dim, len(sharding.dims)) for dim, cut in enumerate(sharding.dims) if cut.all_axes
            )


def _kind(places: frozenset[Place], tensors: Tensors) -> str:
    patterns = {place.pattern for place in places}
    if patterns & tensors.values.keys():
        return "values"
    if any(place.pattern in tensors.inputs and place.dim == 0 for place in places):
        return "samples"
    if patterns & tensors.inputs.keys():
        return "inputs"
    return "parameters"


def _mesh(size: int) -> Mesh:
    return Mesh(device_ids=None, **{AXIS: size})
