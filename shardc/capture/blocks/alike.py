"""Alike blocks: modules of one list that differ only in the values of tensors and of some attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardc.capture.model import override_attribute
from shardc.capture.model_state import model_state
from shardc.capture.signature import State, fingerprint

MIN_ALIKE = 3  # blocks; a template takes two traces
MIN_MODULES = 3  # of a block, itself included; a smaller one is traced as fast as it is looked up
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Attribute = tuple[str, str]  # the path of a module in a block, and a name


@dataclass(eq=False)
class Alike:
    """Blocks of one structure, by path. ``differing``: the attributes whose values differ between the blocks.

    State: ``read``, the differing attributes that traced blocks have read; ``attempts``, the number of templates tried.
    """

    blocks: Mapping[str, nn.Module]
    differing: frozenset[Attribute]
    read: set[Attribute] = field(default_factory=set)
    attempts: int = 0

    def count_like(self, block: nn.Module) -> int:
        """The number of blocks, ``block`` included, with its values of the attributes in ``read``."""
        values = values_of(block, self.read)
        return sum(values_of(each, self.read) == values for each in self.blocks.values())

    @contextmanager
    def noting(self, block: nn.Module, read: set[Attribute]) -> Iterator[None]:
        """In the block of code, add to ``read`` each differing attribute of ``block`` that is read.

        The attributes are removed from the modules, so that torch's ``__getattr__`` is asked for them. To be used
        inside ``borrow``, which restores them.
        """
        hidden, own_getattr = dict[tuple[int, str], tuple[Attribute, Any]](), nn.Module.__getattr__
        modules = dict(block.named_modules())
        for path, name in self.differing:
            attributes: dict[str, Any] = modules[path].__dict__
            hidden[id(modules[path]), name] = (path, name), attributes.pop(name)

        def noted(module: nn.Module, name: str) -> Any:
            if (id(module), name) not in hidden:
                return own_getattr(module, name)
            attribute, value = hidden[id(module), name]
            read.add(attribute)
            self.read.add(attribute)
            return value

        with override_attribute(nn.Module, "__getattr__", noted):
            yield


def values_of(block: nn.Module, attributes: Set[Attribute]) -> Hashable:
    """The fingerprints of a block's values of these attributes."""
    if not attributes:
        return ()
    modules = dict(block.named_modules())
    return tuple((path, name, fingerprint(vars(modules[path]).get(name))) for path, name in sorted(attributes))


def alike_blocks(model: nn.Module) -> list[Alike]:
    """The outermost alike blocks of a model. Blocks with hooks inside are left out, since hooks may do anything.

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
                groups[_structure(block, state)][f"{path}.{name}" if path else name] = block, state
        for group in groups.values():
            blocks = {path: block for path, (block, _) in group.items()}
            differing = _differing([state for _, state in group.values()])
            if len(group) >= MIN_ALIKE and _can_be_noted(next(iter(blocks.values())), differing):
                found.append(Alike(blocks, differing))
                inside.update(id(module) for block in blocks.values() for module in block.modules())
    return found


def _has_hooks(block: nn.Module) -> bool:
    inner = (module for module in block.modules() if module is not block)
    return any(getattr(module, kind, None) for module in inner for kind in HOOKS)


def _can_be_noted(block: nn.Module, attributes: Set[Attribute]) -> bool:
    """Whether torch's ``__getattr__`` is asked for these attributes if modules lack them: no class has their names."""
    modules = dict(block.named_modules())
    return not any(hasattr(type(modules[path]), name) for path, name in attributes)


def _modules(state: State) -> Iterator[tuple[str, Any, dict[str, Hashable]]]:
    """Name, type and attributes of each module in a state."""
    for name, entry in state:
        if name.startswith("module ") and isinstance(entry, tuple):
            kind, attributes = entry
            yield name.removeprefix("module ").strip("'"), kind, dict(attributes)


def _structure(block: nn.Module, state: State) -> Hashable:
    """The structure that alike blocks have in common: everything but the values of attributes."""
    names = tuple(tuple(vars(module)) for module in block.modules())  # a state lacks those that are None or empty
    modules = tuple((path, kind, tuple(attributes)) for path, kind, attributes in _modules(state))
    others = tuple(each for each in state if not (each[0].startswith("module ") and isinstance(each[1], tuple)))
    return names, modules, others


def _differing(states: list[State]) -> frozenset[Attribute]:
    """The attributes whose values differ between the states."""
    found = set[Attribute]()
    first = {path: attributes for path, _, attributes in _modules(states[0])}
    for state in states[1:]:
        for path, _, attributes in _modules(state):
            found.update((path, name) for name, value in attributes.items() if value != first[path][name])
    return frozenset(found)
