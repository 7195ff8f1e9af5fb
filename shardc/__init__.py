"""shardc: annotate a few tensors of a PyTorch model and run it on a mesh of devices.

The public names, each imported when it is first used (PEP 562): ``import shardc`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardc.action import Edge, Schedule
    from shardc.annotations import annotate
    from shardc.api import Compiled, compile, parallelize
    from shardc.chain import balance
    from shardc.collective import Collective
    from shardc.error import CaptureError, ShardingError
    from shardc.init_parameters import init_parameters
    from shardc.mesh import Mesh
    from shardc.options import Pipeline, Precision, Remat, Zero
    from shardc.partition import P, blocks
    from shardc.passes.reshard_plan import reshard_plan
    from shardc.registration import register_rule
    from shardc.rule_check import check_rule
    from shardc.runtime.border import shard_batch
    from shardc.schedule_order import schedule
    from shardc.sharding import Sharding
    from shardc.stage_cost import Costs, StageCost
    from shardc.stage_mark import stage_boundary

__all__ = [
    "CaptureError",
    "Collective",
    "Compiled",
    "Costs",
    "Edge",
    "Mesh",
    "P",
    "Pipeline",
    "Precision",
    "Remat",
    "Schedule",
    "Sharding",
    "ShardingError",
    "StageCost",
    "Zero",
    "annotate",
    "balance",
    "blocks",
    "check_rule",
    "compile",
    "init_parameters",
    "parallelize",
    "register_rule",
    "reshard_plan",
    "schedule",
    "shard_batch",
    "stage_boundary",
]

_HOMES = {
    "CaptureError": "error",
    "annotate": "annotations",
    "reshard_plan": "passes.reshard_plan",
    "Collective": "collective",
    "Compiled": "api",
    "Costs": "stage_cost",
    "Edge": "action",
    "Schedule": "action",
    "StageCost": "stage_cost",
    "Mesh": "mesh",
    "P": "partition",
    "Pipeline": "options",
    "Precision": "options",
    "Sharding": "sharding",
    "ShardingError": "error",
    "Remat": "options",
    "Zero": "options",
    "balance": "chain",
    "blocks": "partition",
    "check_rule": "rule_check",
    "register_rule": "registration",
    "compile": "api",
    "init_parameters": "init_parameters",
    "parallelize": "api",
    "schedule": "schedule_order",
    "shard_batch": "runtime.border",
    "stage_boundary": "stage_mark",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardc.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
