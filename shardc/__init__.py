"""shardc: annotate a few tensors of a PyTorch model and run it on a mesh of devices.

The public names, each imported when it is first used (PEP 562): ``import shardc`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardc.api import Compiled, compile, init_parameters, parallelize
    from shardc.capture.annotations import annotate
    from shardc.capture.microbatches import stage_boundary
    from shardc.language.errors import CaptureError, ShardingError
    from shardc.language.mesh import Mesh
    from shardc.language.partition import P, blocks
    from shardc.language.sharding import Sharding
    from shardc.options import Pipeline, Precision, Remat, Zero
    from shardc.passes.reshard.plan_reshard import reshard_plan
    from shardc.program.collective import Collective
    from shardc.program.user_rules import check_rule, register_rule
    from shardc.runtime.module.conversion import shard_batch
    from shardc.schedules.balance import balance
    from shardc.schedules.costs import Costs, StageCost
    from shardc.schedules.named import Schedule, schedule
    from shardc.schedules.schedule import Edge

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
    "CaptureError": "language.errors",
    "annotate": "capture.annotations",
    "reshard_plan": "passes.reshard.plan_reshard",
    "Collective": "program.collective",
    "Compiled": "api",
    "Costs": "schedules.costs",
    "Edge": "schedules.schedule",
    "Schedule": "schedules.named",
    "StageCost": "schedules.costs",
    "Mesh": "language.mesh",
    "P": "language.partition",
    "Pipeline": "options",
    "Precision": "options",
    "Sharding": "language.sharding",
    "ShardingError": "language.errors",
    "Remat": "options",
    "Zero": "options",
    "balance": "schedules.balance",
    "blocks": "language.partition",
    "check_rule": "program.user_rules",
    "register_rule": "program.user_rules",
    "compile": "api",
    "init_parameters": "api",
    "parallelize": "api",
    "schedule": "schedules.named",
    "shard_batch": "runtime.module.conversion",
    "stage_boundary": "capture.microbatches",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardc.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
