"""Mixed precision: the dtypes in which a model computes and gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardc.language.errors import OptionError, raise_all

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """The model computes in ``compute``, gradients are reduced in ``reduce``, parameters keep their dtype.

    Floating parameters are cast before they are gathered, once after each write, and the cast copy is kept. Floating
    inputs of the model, and of each module that holds parameters of its own, are cast. Buffers and outputs are not
    cast. Neither are the parameters of a batch norm, which have the dtype of its running statistics. A gradient is cast
    to ``reduce`` before it is reduced, and arrives in ``gradients``, by default the dtype of its parameter. SGD takes
    any dtype; Adam of torch.optim takes only that of the parameter. Source: Micikevicius et al. 2018; the defaults are
    those of FSDP2's MixedPrecisionPolicy with ``cast_forward_inputs``.
    """

    compute: torch.dtype = field(default_factory=lambda: import_module("torch").bfloat16)
    reduce: torch.dtype = field(default_factory=lambda: import_module("torch").float32)
    gradients: torch.dtype | None = None

    def __post_init__(self) -> None:
        dtypes: dict[str, Any] = {"compute": self.compute, "reduce": self.reduce}
        dtypes |= {} if self.gradients is None else {"gradients": self.gradients}
        problem, remedy = "it is no floating dtype", "say torch.bfloat16, torch.float16 or torch.float32"
        raise_all([
            OptionError(f"Precision({name}={dtype!r})", f"of type {type(dtype).__name__}", problem, remedy)
            for name, dtype in dtypes.items()
            if type(dtype).__name__ != "dtype" or not dtype.is_floating_point
        ])  # fmt: skip
