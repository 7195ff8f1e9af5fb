"""What may be named to explain: every name that shardc prints, alone or as it prints it, and the model's own names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx, nn

from shardc.borrow import state_names
from shardc.fact import Source, types_of
from shardc.program import Program
from shardc.sharding import TensorType

TYPED = ("param", "input", "output", "module", "value")  # kinds that a bare name may be of
RETURNED = ("gradient", "computed", "guard")  # that share names with these: said before the name, as is a stage
PRINTED = {"parameter": "param", "buffer": "param", "collective": "value"}  # a kind by another word
WHOLE = "(model)"  # what the module is called that has no name


def kind_and_name(text: str) -> tuple[str, str]:
    """The kind that is said before a name, if any, and the name: ``param:up.weight``, ``the gradient up.weight``."""
    words = text.strip().removeprefix("the ")
    for sign in (":", " "):
        kind, found, rest = words.partition(sign)
        kind = PRINTED.get(kind, kind)
        if found and kind in (*TYPED, *RETURNED, "stage"):
            return kind, rest.strip()
    return "", text.strip()


def without_place(name: str) -> str:
    """``add_1`` of ``add_1 (blocks.0.mlp)``."""
    return re.sub(r"(?<=\S) \(.*\)$", "", name)


@dataclass(frozen=True)
class ModelNames:
    """What a model calls its parameters and modules.

    ``tied``: for each further name of a parameter or buffer the first one. ``modules``: every path, for each the first
    of that module. ``kinds``, ``types``: of each parameter and buffer by its first name.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, TensorType] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module | None) -> ModelNames:
        """Those of a model; of none, none."""
        if model is None:
            return ModelNames()
        parameters, buffers, tied = state_names(model)
        kinds = dict.fromkeys(parameters, "parameter") | dict.fromkeys(buffers, "buffer")
        types = {name: types_of(tensor) for name, tensor in {**parameters, **buffers}.items()}
        first: dict[int, str] = {}
        paths = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if path]
        modules = {path: first.setdefault(id(module), path) for path, module in paths}
        return ModelNames(
            tied, modules, kinds, {n: type_ for n, type_ in types.items() if isinstance(type_, TensorType)}
        )


def standing_for(program: Program, other: Program, node: fx.Node) -> list[fx.Node]:
    """The values of a program that stand where another, after another pass, has a node.

    They are of the same call of the user's, or else of the first that reads it; for a rank's own view, what it views.
    """
    known = {each.name: each for each in program.graph.nodes if each.op != "output"}
    made: dict[tuple[Source, int], list[fx.Node]] = {}
    for each in program.calls:
        if not program.causes(each):
            made.setdefault(_call(program, each), []).append(each)
    seen, todo = {node}, deque([node])
    while todo:
        here = todo.popleft()
        if here.name in known:
            return [known[here.name]]
        if _call(other, here) in made and other.level != "localized":
            return made[_call(other, here)]
        near = here.all_input_nodes[:1] if other.level == "localized" else [*here.users, *here.all_input_nodes]
        todo.extend(each for each in near if each not in seen and each.op != "output")
        seen.update(near)
    return []


def _call(program: Program, node: fx.Node) -> tuple[Source, int]:
    """Which call of the user's it is made for."""
    source = program.source(node)
    return source, source.ordinal
