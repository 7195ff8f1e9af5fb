"""Two of a model's repeated blocks, which stand for all of them where many changes of a plan are tried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, groupby

from torch import nn

NUM_KEPT = 2  # blocks: the first one reads what is not a block, the last one is read by it


def repeated_blocks(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of the blocks in each list with more than two like modules in a row; outermost lists alone.

    By the list's path. Of several rows the longest; blocks before and after it are not among the names.
    """
    lists: dict[str, tuple[str, ...]] = {}
    queue, visited = [("", model)], set[nn.Module]()
    for path, module in queue:
        row = like_blocks(module)
        if len(row) > NUM_KEPT:
            lists[path] = row
        elif module not in visited:
            queue += [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        visited.add(module)
    return lists


def like_blocks(module: nn.Module) -> tuple[str, ...]:
    """The names of the longest row of like modules in a list; nothing for a module that is no list."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return ()
    rows = [tuple(name for name, _ in row) for _, row in groupby(module.named_children(), lambda each: _form(each[1]))]
    return max(rows, key=len, default=())


def _form(module: nn.Module) -> object:
    """What like modules have in common: class, and names and shapes of parameters and buffers."""
    state = chain(module.named_parameters(), module.named_buffers())
    return type(module), tuple((name, tuple(tensor.shape)) for name, tensor in state)


def lists_side_by_side(lists: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths of lists in groups: of one length and beside each other, since a model may walk them side by side."""
    groups: dict[tuple[str, int], list[str]] = {}
    for path, names in lists.items():
        groups.setdefault((path.rpartition(".")[0], len(names)), []).append(path)
    return list(map(tuple, groups.values()))


def nearest_blocks(lists: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Two blocks of each list: those that contain what is named, by the paths of modules or parameters, come first."""
    parts, kept = [name.split(".") for name in names], dict[str, tuple[str, ...]]()
    for path, blocks in lists.items():
        depth = len(path.split(".")) if path else 0
        named = [part[depth] for part in parts if ".".join(part[:depth]) == path and len(part) > depth]
        first = list(dict.fromkeys(each for each in (*named, *blocks) if each in blocks))[:NUM_KEPT]
        kept[path] = tuple(each for each in blocks if each in first)
    return kept


def with_blocks(model: nn.Module, kept: Mapping[str, Collection[str]]) -> nn.Module:
    """A model with some blocks of its lists alone. It shares all modules with the model but lists and what has them."""
    of_list = {model.get_submodule(path): _all_but(model.get_submodule(path), names) for path, names in kept.items()}
    copies: dict[nn.Module | None, nn.Module | None] = {None: None}

    def copied(module: nn.Module | None) -> nn.Module | None:
        if module is None or module in copies:
            return copies[module]
        names = of_list.get(module, module._modules)
        children = {name: copied(child) for name, child in module._modules.items() if name in names}
        copies[module] = module
        if children != module._modules:
            new = copies[module] = object.__new__(type(module))
            vars(new).update({**vars(module), "_modules": children})
        return copies[module]

    new = copied(model)
    assert new is not None
    return new


def _all_but(blocks: nn.Module, kept: Collection[str]) -> set[str]:
    """The names in a list, of its repeated blocks the kept ones alone."""
    return set(blocks._modules) - (set(like_blocks(blocks)) - set(kept))


def blocks_text(kept: Mapping[str, tuple[str, ...]]) -> str:
    """The blocks in words: ``blocks 0 and 3 of encoder.layers``."""
    return " and ".join(_list_text(path, names) for path, names in kept.items())


def _list_text(path: str, names: tuple[str, ...]) -> str:
    return f"blocks {' and '.join(names)} of {path or 'the model'}"
