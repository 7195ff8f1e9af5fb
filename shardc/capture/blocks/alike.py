"""Modules of one list that differ in nothing but the values of tensors and of some attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardc.capture.model_state import model_state
from shardc.capture.signature import State, fingerprint

MIN_ALIKE = 3  # blocks; one that stands for others is traced about one and a half times
MIN_MODULES = 3  # of a block, itself among them; a smaller one is traced as fast as it is looked up
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Attribute = tuple[str, str]  # the path of a module in a block, and a name


@dataclass(eq=False)
class Alike:
    """Blocks of one structure, by path. ``differing``: the attributes that have not one value in all of them.

    State: ``read``, those of them that a block has read where it was traced apart; ``noted``, by the one that is
    traced now; ``attempts``, how many were.
    """

    blocks: Mapping[str, nn.Module]
    differing: frozenset[Attribute]
    read: set[Attribute] = field(default_factory=set)
    noted: set[Attribute] = field(default_factory=set)
    attempts: int = 0

    def count_like(self, block: nn.Module) -> int:
        """How many of the blocks have what one has, itself among them, of the attributes that are read."""
        values = values_of(block, self.read)
        return sum(values_of(each, self.read) == values for each in self.blocks.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the block of code it is noted which of the differing attributes are read.

        The modules that have some are of a subclass then, with a property for each.
        """
        names = defaultdict[str, list[str]](list)
        for path, name in self.differing:
            names[path].append(name)
        with ExitStack() as stack:
            for block in self.blocks.values():
                for path, module in block.named_modules():
                    if path in names:
                        stack.callback(setattr, module, "__class__", type(module))
                        module.__class__ = self._watched(type(module), path, names[path])
            yield

    @contextmanager
    def noting(self) -> Iterator[set[Attribute]]:
        """The attributes among those that are watched which are read in the block of code."""
        self.noted = set()
        try:
            yield self.noted
        finally:
            self.read |= self.noted

    def _watched(self, kind: type[nn.Module], path: str, names: list[str]) -> type[nn.Module]:
        members: dict[str, Any] = {name: _Watched(self, (path, name), kind) for name in names}
        like = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        make: Any = type(kind)  # the metaclass
        watched: type[nn.Module] = make(kind.__name__, (_Unheard, kind), {**like, **members})
        return watched


class _Unheard:
    def __init_subclass__(cls) -> None:
        """A model's class does not hear of this subclass, which is not the user's."""


class _Watched:
    """An attribute of a module whose readings are noted."""

    def __init__(self, alike: Alike, attribute: Attribute, kind: type[nn.Module]) -> None:
        self.alike, self.attribute, self.kind = alike, attribute, kind

    def __get__(self, module: nn.Module | None, owner: Any = None) -> Any:
        _, name = self.attribute
        if module is None:
            return getattr(self.kind, name)
        self.alike.noted.add(self.attribute)
        if name not in vars(module):
            raise AttributeError(name)
        return vars(module)[name]

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self.attribute[1]] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self.attribute[1]]


def values_of(block: nn.Module, attributes: Set[Attribute]) -> Hashable:
    """What a block has for attributes."""
    if not attributes:
        return ()
    modules = dict(block.named_modules())
    return tuple((path, name, fingerprint(vars(modules[path]).get(name))) for path, name in sorted(attributes))


def alike_blocks(model: nn.Module) -> list[Alike]:
    """The blocks of a model that are alike, the outermost; those with hooks inside are left out, which may do anything.

    To be called before anything is done to the model's modules.
    """
    found, inside = list[Alike](), set[int]()
    for path, container in model.named_modules():
        if not isinstance(container, LISTS) or id(container) in inside or len(container) < MIN_ALIKE:
            continue
        groups = defaultdict[Hashable, dict[str, tuple[nn.Module, State]]](dict)
        for name, block in container.named_children():
            if len(list(block.modules())) >= MIN_MODULES and not _has_hooks(block):
                state = model_state(block)
                groups[_structure(state)][f"{path}.{name}" if path else name] = block, state
        for group in groups.values():
            if len(group) >= MIN_ALIKE:
                blocks = {path: block for path, (block, _) in group.items()}
                found.append(Alike(blocks, _differing([state for _, state in group.values()])))
                inside.update(id(module) for block in blocks.values() for module in block.modules())
    return found


def _has_hooks(block: nn.Module) -> bool:
    inner = (module for module in block.modules() if module is not block)
    return any(getattr(module, kind, None) for module in inner for kind in HOOKS)


def _modules(state: State) -> Iterator[tuple[str, Any, dict[str, Hashable]]]:
    """Name, type and attributes of each module in a state."""
    for name, entry in state:
        if name.startswith("module ") and isinstance(entry, tuple):
            kind, attributes = entry
            yield name.removeprefix("module ").strip("'"), kind, dict(attributes)


def _structure(state: State) -> Hashable:
    """What blocks that are alike have in common: all but the values of attributes."""
    modules = tuple((path, kind, tuple(attributes)) for path, kind, attributes in _modules(state))
    others = tuple(each for each in state if not (each[0].startswith("module ") and isinstance(each[1], tuple)))
    return modules, others


def _differing(states: list[State]) -> frozenset[Attribute]:
    """The attributes that have not one value in all states."""
    found = set[Attribute]()
    first = {path: attributes for path, _, attributes in _modules(states[0])}
    for state in states[1:]:
        for path, _, attributes in _modules(state):
            found.update((path, name) for name, value in attributes.items() if value != first[path][name])
    return frozenset(found)
