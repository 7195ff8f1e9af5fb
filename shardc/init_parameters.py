"""A front door: the initial values of a model, each rank's shards alone, the same bits on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardc.annotations import Match, Spec, annotated_parameters, check_annotations
from shardc.api import compile
from shardc.mesh import Mesh
from shardc.sharding import Sharding

if TYPE_CHECKING:
    from torch import nn

Shardings = Callable[[str, tuple[int, ...]], Sharding]  # of a parameter's name and shape


def init_parameters(
    model: nn.Module | Callable[[], nn.Module],
    mesh: Any,
    annotations: Mapping[str, Spec] | None = None,
    *,
    seed: int = 0,
    initialize: Callable[[nn.Module], Any] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Give a model on meta its initial values, each rank its shards only: the same bits on every mesh.

    ``model``: one made under ``torch.device("meta")``, whose modules' own initialisers run, or ``initialize(model)``
    instead; or a function that makes a model, whose constructor runs as it is. On a Mesh parameters come out plain and
    whole, on a DeviceMesh as DTensors, for ``parallelize`` to take. A parameter is cut as it is annotated; with example
    ``args`` or ``kwargs`` as a call of the model is compiled, so that what is inferred is cut as well.

    Numbers are drawn by a counter, keyed by seed, the parameter's name and the index in it. An initialiser that needs
    its tensor whole, as ``orthogonal_`` does, makes it whole on every rank, with a warning that names the parameter.
    """
    from shardc.admission import check_call, check_draw, check_maker
    from shardc.initializer import record_initializers
    from shardc.passes.canonicalize import canonicalize
    from shardc.passes.name_draws import name_draws
    from shardc.runtime.initialize import initialize as place

    check_maker(model, initialize)
    check_draw(seed, 0)
    check_annotations(annotations or {})
    found = record_initializers(model, initialize)
    found = replace(found, program=canonicalize(name_draws(found.program)))
    if args is None and kwargs is None:
        shardings = _annotated(annotations or {}, found.model, Mesh.of(mesh))
    else:
        given = () if args is None else args
        check_call(given, kwargs or {}, True, (), False)
        shardings = _compiled(found.model, Mesh.of(mesh), annotations, given, kwargs)
    return place(found, mesh, shardings, seed)


def _annotated(annotations: Mapping[str, Spec], model: nn.Module, mesh: Mesh) -> Shardings:
    return partial(_sharding, annotated_parameters(annotations, model, mesh), mesh)


def _sharding(specs: Mapping[str, Match], mesh: Mesh, name: str, shape: tuple[int, ...]) -> Sharding:
    if name not in specs:
        return Sharding.replicated(mesh, len(shape))
    return specs[name].spec.sharding(mesh, shape, specs[name].who("parameter"))


def _compiled(
    model: nn.Module,
    mesh: Mesh,
    annotations: Mapping[str, Spec] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Shardings:
    program = compile(model, mesh, annotations, args=args, kwargs=kwargs).program
    found = {
        name: program.sharding(node)
        for (kind, name), node in program.named_inputs.items()
        if kind in ("parameter", "buffer")
    }
    return lambda name, shape: found.get(name) or Sharding.replicated(mesh, len(shape))
