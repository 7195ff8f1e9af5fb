"""The lists of blocks in a model, whether the blocks are alike or not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

Lists = dict[str, tuple[str, ...]]  # the names of blocks, by the path of their list


def lists_of(model: nn.Module) -> Lists:
    """The outermost lists with several blocks. A block is an item with modules of its own, unlike a single layer."""
    lists, queue = Lists(), [("", model)]
    for path, module in queue:
        children = dict(module.named_children())
        blocks = tuple(name for name, child in children.items() if child._modules)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
            lists[path] = blocks
        else:
            queue += [(f"{path}.{name}".lstrip("."), child) for name, child in children.items()]
    return lists


def num_parts(model: nn.Module) -> int:
    """The most pipeline stages that a model can be cut into: its number of blocks or, without blocks, of matrices.

    Sibling lists of equal length count once, since a model may iterate over them together.
    """
    kinds = {(path.rpartition(".")[0], len(blocks)) for path, blocks in lists_of(model).items()}
    num_blocks = sum(length for _, length in kinds)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return num_blocks or len(matrices)


def glob_of_blocks(lists: Iterable[str]) -> str | None:
    """A glob over the blocks of all lists if these have the same name, else of the first; None without a list."""
    paths = list(lists)
    parents, names = ({path.rpartition(".")[i] for path in paths} for i in (0, 2))
    if len(paths) > 1 and len(names) == 1 and all(parents):
        return f"*.{names.pop()}.*"
    return f"{paths[0]}.*".lstrip(".") if paths else None
