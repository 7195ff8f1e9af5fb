"""The options of compile and parallelize, one a file; and checks of their arguments."""

from .arguments import check_call, check_draw, check_maker, check_model, check_tangents, check_values
from .local import Local
from .momentum import Momentum
from .options import ADAM, ATTENTIONS, AUTO, BUCKET, GATHER, KINDS, OPTIMIZERS, OVERLAPS, RING, ULYSSES, Options
from .pipeline import BALANCES, SCHEDULES, Balance, Pipeline
from .precision import Precision
from .remat import Remat
from .saved import Saved
from .zero import STAGES, Zero

__all__ = [
    "ADAM", "ATTENTIONS", "AUTO", "BALANCES", "BUCKET", "GATHER", "KINDS", "OPTIMIZERS", "OVERLAPS", "RING",
    "SCHEDULES", "STAGES", "ULYSSES", "Balance", "Local", "Momentum", "Options", "Pipeline", "Precision", "Remat",
    "Saved", "Zero", "check_call", "check_draw", "check_maker", "check_model", "check_tangents", "check_values",
]  # fmt: skip
