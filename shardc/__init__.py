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
    from shardc.language.errors import CaptureError, CheckpointError, CommunicationError, ShardingError
    from shardc.language.mesh import Mesh
    from shardc.language.partition import P, blocks
    from shardc.language.sharding import Sharding
    from shardc.options import Local, Momentum, Pipeline, Precision, Remat, Zero
    from shardc.passes.reshard.plan_reshard import reshard_plan
    from shardc.program.collective import Collective
    from shardc.program.user_rules import check_rule, register_rule
    from shardc.runtime.checkpoint.checkpointable import checkpointable
    from shardc.runtime.checkpoint.export import export
    from shardc.runtime.checkpoint.load import load
    from shardc.runtime.checkpoint.save import save
    from shardc.runtime.local.outer import outer_step
    from shardc.runtime.module.conversion import shard_batch
    from shardc.runtime.module.loader import shard_loader
    from shardc.runtime.tier.stepping import step_in_backward
    from shardc.schedules.balance import balance
    from shardc.schedules.named import Schedule, schedule
    from shardc.schedules.schedule import Edge
    from shardc.schedules.simulate import Costs, StageCost
    from shardc.search.suggest import suggest
    from shardc.search.suggestion import Suggestion

__all__ = [
    "CaptureError", "CheckpointError", "Collective", "CommunicationError", "Compiled", "Costs", "Edge", "Local", "Mesh",
    "Momentum", "P", "Pipeline", "Precision", "Remat", "Schedule", "Sharding", "ShardingError", "StageCost",
    "Suggestion", "Zero",
    "annotate", "balance", "blocks", "check_rule", "checkpointable", "compile", "export", "init_parameters", "load",
    "outer_step", "parallelize", "register_rule", "reshard_plan", "save", "schedule", "shard_batch", "shard_loader",
    "stage_boundary", "step_in_backward", "suggest",
]  # fmt: skip

_MODULES = {
    "api": "Compiled compile init_parameters parallelize",
    "capture.annotations": "annotate",
    "capture.microbatches": "stage_boundary",
    "language.errors": "CaptureError CheckpointError CommunicationError ShardingError",
    "language.mesh": "Mesh",
    "language.partition": "P blocks",
    "language.sharding": "Sharding",
    "options": "Local Momentum Pipeline Precision Remat Zero",
    "passes.reshard.plan_reshard": "reshard_plan",
    "program.collective": "Collective",
    "program.user_rules": "check_rule register_rule",
    "runtime.checkpoint.checkpointable": "checkpointable",
    "runtime.checkpoint.export": "export",
    "runtime.checkpoint.load": "load",
    "runtime.checkpoint.save": "save",
    "runtime.local.outer": "outer_step",
    "runtime.module.conversion": "shard_batch",
    "runtime.module.loader": "shard_loader",
    "runtime.tier.stepping": "step_in_backward",
    "schedules.balance": "balance",
    "schedules.simulate": "Costs StageCost",
    "schedules.named": "Schedule schedule",
    "schedules.schedule": "Edge",
    "search.suggest": "suggest",
    "search.suggestion": "Suggestion",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardc.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
