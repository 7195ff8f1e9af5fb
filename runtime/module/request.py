"""The request of a call of a parallel module."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor

from shardc.capture.model_state import ModelTensors
from shardc.capture.signature import Signature
from shardc.language.errors import ShardingError

from ..agreement.entry import Kind
from ..agreement.request import request_lines

Key = tuple[Hashable, ...]
RECOMPUTING = ("backward", "unpack_hook")  # functions of torch.utils.checkpoint that call a model again


def is_recomputed() -> bool:
    """Whether ``torch.utils.checkpoint`` makes the present call in backward, a second time."""
    frame = sys._getframe() if torch._C._current_graph_task_id() != -1 else None
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__ and frame.f_code.co_name in RECOMPUTING:
            return True
        frame = frame.f_back
    return False


def check_untransformed(what: str, tensors: Iterable[Tensor | None] = ()) -> None:
    """Raise a ShardingError within a transform of ``torch.func``, and for a tensor that is batched or has a tangent."""
    is_within = torch._C._functorch.peek_interpreter_stack() is not None
    if is_within or any(each is not None and _is_transformed(each) for each in tensors):
        problem = "its program runs on plain tensors, which vmap, grad and jvp replace by their own"
        raise ShardingError("torch.func", what, problem, "take gradients by backward() or torch.autograd.grad")


def _is_transformed(x: Tensor) -> bool:
    """Whether autograd has batched a tensor, or forward-mode differentiation follows it."""
    has_tangent = not isinstance(x, DTensor) and forward_ad.unpack_dual(x).tangent is not None
    return has_tangent or torch._C._functorch.is_legacy_batchedtensor(x)


@dataclass(slots=True)
class CallRequest:
    """The arguments of a call, and the state that its program depends on. ``model`` may be a SubmoduleView.

    ``tensors``: the model's, by kind and name. ``arguments``: the tensors among the arguments. ``key``: the signature,
    and everything else that a program depends on. ``digest``: that of ``text``, if ranks must agree on it. ``writes``:
    whether the call places or gathers parameters. ``is_training``: whether a module is in training mode. ``is_whole``:
    whether outputs come back whole and plain.
    """

    kind: Kind
    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    key: tuple[Signature, *Key]
    tensors: ModelTensors
    arguments: Sequence[tuple[str, Tensor]]
    is_training: bool
    digest: bytes = b""
    writes: bool = False
    is_whole: bool = False

    @property
    def sends_momentum(self) -> bool:
        """Whether the call's backward sends the optimizer's momentum."""
        return bool(self.key[-1])

    @property
    def parameters(self) -> list[Tensor]:
        """The model's parameters."""
        return [each for (kind, _), each in self.tensors.items() if kind == "parameter"]

    def text(self) -> str:
        """The parts of the request that must be equal on every rank, as text."""
        called = getattr(self.model, "path", "the model")
        further = [f"autocast of the mesh {list(self.key)[3:]}", f"a call of {called}"]
        return "\n".join(request_lines(self.key[0], self.model, self.arguments, further))
