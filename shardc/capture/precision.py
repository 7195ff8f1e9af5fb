"""Mixed precision: parameters and inputs are cast where the forward begins, gradients where the backward ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from shardc.capture.call import flatten, rebuild
from shardc.language.errors import CaptureError
from shardc.options import Precision
from shardc.program.node import casts_behind
from shardc.program.program import Input, Program


class Casting:
    """The casts of one traced call; without a ``Precision`` there are none.

    Parameters of a norm with running statistics keep their dtype: torch's kernels require parameters and statistics of
    one dtype, and accept a narrower input.

    State: ``casts``, the cast copy of each parameter and input that was cast, by kind and name.
    """

    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        self.precision, self.casts = precision, dict[tuple[str, str], torch.Tensor]()
        self.uncast = {
            name
            for path, module in model.named_modules()
            if isinstance(getattr(module, "running_mean", None), torch.Tensor)
            for name, _ in module.named_parameters(path, recurse=False)
        }
        for module in model.modules() if precision else ():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._cast_arguments, with_kwargs=True)

    def enter(self, named: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors by kind and name, parameters and inputs cast to the dtype of computation."""
        may_cast = (key for key in named if key[0] in ("parameter", "input") and key[1] not in self.uncast)
        cast = {key: self._cast(named[key]) for key in may_cast}
        self.casts = {key: tensor for key, tensor in cast.items() if tensor is not named[key]}
        return {**named, **self.casts}

    def leave(self, entry: Input, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of a cast copy, cast to the dtype of its reduction and then to that of ``entry``."""
        if gradient is None or self.precision is None or (entry.kind, entry.name) not in self.casts:
            return gradient
        arrives = self.precision.gradients if entry.kind == "parameter" else None
        return gradient.to(self.precision.reduce).to(arrives or entry.type.dtype)

    def check_unchanged(self) -> None:
        """Raise a CaptureError if the forward wrote to a cast copy: the parameter would not change."""
        for (kind, name), copied in self.casts.items():
            if copied._version:
                remedy = "write to a clone of it, or make it a buffer"
                raise CaptureError(f"{kind} {name!r}", "the forward changes it in place", remedy)

    def _cast(self, value: Any) -> Any:
        if self.precision is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value if value.dtype == self.precision.compute else value.to(self.precision.compute)

    def _cast_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast the arguments of a module with parameters: a buffer or a norm may have widened them."""
        leaves, tree = flatten((args, kwargs))
        new = [self._cast(leaf) for _, leaf in leaves]
        is_same = all(one is other for one, (_, other) in zip(new, leaves, strict=True))
        return None if is_same else rebuild(tree, new)


def reduced_casts(program: Program) -> set[fx.Node]:
    """The casts of gradients to the dtype of their reduction; a cast to the parameter's dtype may follow each."""
    precision = program.options.precision
    if precision is None:
        return set()
    ends = zip(program.outputs, program.results, strict=True)
    chains = [casts_behind(node) for output, node in ends if output.kind == "gradient" and node is not None]
    return {node for chain in chains for node in chain[:-1] if program.type(node).dtype == precision.reduce}
