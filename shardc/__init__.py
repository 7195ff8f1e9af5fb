"""shardc: annotate a few tensors of a PyTorch model and run it on a mesh of devices.

The public names, each imported when it is first used (PEP 562): ``import shardc`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardc.api import Compiled, compile, parallelize
    from shardc.collective import Collective
    from shardc.error import ShardingError
    from shardc.mesh import Mesh
    from shardc.sharding import P, Sharding, blocks

__all__ = ["Collective", "Compiled", "Mesh", "P", "Sharding", "ShardingError", "blocks", "compile", "parallelize"]

_HOMES = {
    "Collective": "collective",
    "Compiled": "api",
    "Mesh": "mesh",
    "P": "sharding",
    "Sharding": "sharding",
    "ShardingError": "error",
    "blocks": "sharding",
    "compile": "api",
    "parallelize": "api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardc.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
