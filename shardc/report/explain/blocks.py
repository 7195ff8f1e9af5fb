"""Two of a model's repeated blocks, which stand for all of them when many changes of a plan are tried.

A block is a module of a list or, if modules alternate, several in a row, such as a layer with experts and one without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from torch import nn

NUM_KEPT = 2  # blocks: the first one reads from outside the list, the last one is read from outside

Blocks = tuple[tuple[str, ...], ...]  # the names of the modules of each block


def repeated_blocks(model: nn.Module, more_than: int = NUM_KEPT) -> dict[str, Blocks]:
    """The blocks of each outermost list with more than ``more_than`` blocks in a row that are alike, by its path.

    If a list has several rows, its blocks are the longest row; modules before and after it are in no block.
    """
    lists: dict[str, Blocks] = {}
    queue, visited = [("", model)], set[nn.Module]()
    for path, module in queue:
        row = like_blocks(module)
        if len(row) > more_than:
            lists[path] = row
        elif module not in visited:
            queue += [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        visited.add(module)
    return lists


def like_blocks(module: nn.Module) -> Blocks:
    """The longest row of blocks in a list that are alike; of equally long rows the one with the shortest blocks.

    Empty for a module that is no list. In a block of several modules none is a leaf, as single layers are.
    """
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return ()
    children = dict(module.named_children())
    names, forms = list(children), list(map(_form, children.values()))
    best, best_length = range(0), 1
    for length in range(1, max(1, len(names) // 2) + 1):
        row = _longest_row(forms, length)
        has_leaf = any(not children[names[i]]._modules for i in row)
        if len(row) > len(best) and (length == 1 or (len(row) > length and not has_leaf)):
            best, best_length = row, length
    return tuple(tuple(names[i] for i in best[at : at + best_length]) for at in range(0, len(best), best_length))


def _longest_row(forms: Sequence[object], length: int) -> range:
    """The first longest range of a multiple of ``length`` in which each form equals the one ``length`` before it."""
    best, start = range(0), 0
    for i in range(length, len(forms) + 1):
        if i == len(forms) or forms[i] != forms[i - length]:
            best = max(best, range(start, start + (i - start) // length * length), key=len)
            start = i - length + 1
    return best


def are_alike(modules: Iterable[nn.Module]) -> bool:
    """Whether modules are of one class, with parameters and buffers of equal names and shapes."""
    return len(set(map(_form, modules))) == 1


def _form(module: nn.Module) -> object:
    """The form that modules have to share to be alike: class, and names and shapes of parameters and buffers."""
    state = chain(module.named_parameters(), module.named_buffers())
    return type(module), tuple((name, tuple(tensor.shape)) for name, tensor in state)


def modules_of(blocks: Blocks) -> tuple[str, ...]:
    """The names of all modules of some blocks."""
    return tuple(chain.from_iterable(blocks))


def nearest_blocks(lists: Mapping[str, Blocks], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The modules of two blocks of each list, preferably of blocks that contain the paths ``names``."""
    parts, kept = [name.split(".") for name in names], dict[str, tuple[str, ...]]()
    for path, blocks in lists.items():
        depth = len(path.split(".")) if path else 0
        named = [part[depth] for part in parts if ".".join(part[:depth]) == path and len(part) > depth]
        with_named = [block for name in named for block in blocks if name in block]
        first = list(dict.fromkeys((*with_named, *blocks)))[:NUM_KEPT]
        kept[path] = modules_of(tuple(block for block in blocks if block in first))
    return kept


def with_blocks(model: nn.Module, kept: Mapping[str, Collection[str]]) -> nn.Module:
    """The model with only the blocks ``kept`` in its lists. It shares all modules but the lists and their ancestors."""
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
    """The names in a list, without the names of repeated blocks that are not ``kept``."""
    return set(blocks._modules) - (set(modules_of(like_blocks(blocks))) - set(kept))


def blocks_text(kept: Mapping[str, tuple[str, ...]]) -> str:
    """The blocks in words: ``blocks 0 and 3 of encoder.layers``."""
    return " and ".join(_list_text(path, names) for path, names in kept.items())


def _list_text(path: str, names: tuple[str, ...]) -> str:
    return f"blocks {' and '.join(names)} of {path or 'the model'}"
