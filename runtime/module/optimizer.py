"""Optimizers and gradient scalers: watchers of steps, a warning of useless steps, and overflows on other ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardc.language.errors import OrderError, error_text

from ..agreement.agreement import Agreement
from ..agreement.entry import Entry, Kind
from ..agreement.gate import Gate
from ..comm.failure import waiting
from ..tensor.global_tensor import GlobalTensor
from ..tier.files import folder_of


class StepWatcher:
    """Is notified of the steps of optimizers that hold one of the parameters that it watches.

    ``sees_begin``: whether it is notified of their beginning too.
    """

    sees_begin = False

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Tensor]] = []
        _watchers[self] = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters, and no others."""
        self._watched = [weakref.ref(parameter) for parameter in parameters]

    def watched(self) -> list[Tensor]:
        """The watched parameters that are alive."""
        return [tensor for tensor in (reference() for reference in self._watched) if tensor is not None]

    def note_begin(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Note that an optimizer is about to write parameters."""

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has written parameters."""
        raise NotImplementedError

    def check_unscale(self, optimizer: Optimizer) -> None:
        """Raise an error if the gradients of an optimizer's parameters cannot be unscaled."""


VARIANCE_STEPS = "variance_steps"  # in a state of 1-bit Adam: the number of steps that a variance counts
_watchers: weakref.WeakKeyDictionary[StepWatcher, None] = weakref.WeakKeyDictionary()  # in one order on all ranks
_copied: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were parallelized
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_cut: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # the state of each, once cut
_in_backward: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that a backward steps


def note_copied(model: nn.Module) -> None:
    """Note that a model's parameters were copied: an optimizer of the originals trains nothing, and gets a warning."""
    _copied.add(model)


def _warn_of_copied(optimizer: Optimizer) -> None:
    """Warn at an optimizer's first step if it holds parameters that were copied, and none of these has a gradient."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    stepped = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    for model in _copied:
        own = [each for each in model.parameters() if each.requires_grad and id(each) in stepped]
        if own and all(each.grad is None for each in own):
            what = f"of parameters of the {type(model).__name__} that was given to parallelize, whose copy is trained"
            problem, remedy = "they have no gradients", "give it the parameters of what parallelize returns"
            warnings.warn(error_text(f"a step of {type(optimizer).__name__}", what, problem, remedy), stacklevel=4)
            return


def _watchers_of(optimizer: Optimizer, watchers: Iterable[StepWatcher]) -> list[StepWatcher]:
    """The watchers of a parameter of an optimizer."""
    watched = [(watcher, tensors) for watcher in watchers if (tensors := watcher.watched())]
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]} if watched else ()
    return [watcher for watcher, tensors in watched if any(id(tensor) in stepped for tensor in tensors)]


def _tell_of_begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers_of(optimizer, [each for each in _watchers if each.sees_begin]):
        watcher.note_begin(optimizer, any(each is not None for each in (*args[1:], *kwargs.values())))


def _tell_of_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _warn_of_copied(optimizer)
    for watcher in _watchers_of(optimizer, _watchers):
        watcher.note_step(optimizer)


register_optimizer_step_post_hook(_tell_of_step)


def whole_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer with whole plain tensors in host memory, on the first rank of the job.

    Every rank must call it, and holds one gathered tensor at a time; ranks other than the first get {}.
    """
    found = optimizer.state_dict()
    if not any(isinstance(each, DTensor) for values in found["state"].values() for each in values.values()):
        return found
    is_first = dist.get_rank() == 0

    def kept(value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
            return value.cpu() if is_first else None
        return value

    state = {i: {key: kept(each) for key, each in values.items()} for i, values in found["state"].items()}
    return {**found, "state": state} if is_first else {}


@torch.no_grad()
def _cut_loaded_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Cut loaded tensors of an optimizer's state like their parameters. A load is noticed by the new state dict."""
    if _cut.get(optimizer) is optimizer.state:
        return
    if not _watchers_of(optimizer, [each for each in _watchers if each.sees_begin]):
        _count_all_steps(optimizer)
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, GlobalTensor) and isinstance(values, dict):
            for key, each in values.items():
                if isinstance(each, Tensor) and each.ndim and each.shape == parameter.shape:
                    if not _is_stored_as(each, parameter):
                        values[key] = torch.empty_like(parameter, dtype=each.dtype).copy_(each)
    _cut[optimizer] = optimizer.state


def _count_all_steps(optimizer: Optimizer) -> None:
    """Rescale variances of 1-bit Adam for torch's Adam, which assumes that they count each step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if (counted := state.pop(VARIANCE_STEPS, None)) is not None:
                weights = (1 - group["betas"][1] ** float(steps) for steps in (state["step"], counted))
                state["exp_avg_sq"].mul_(next(weights) / next(weights))


def _is_stored_as(state: Tensor, parameter: GlobalTensor) -> bool:
    """Whether a tensor of an optimizer's state is cut like its parameter, and in the same folder if that has a file."""
    if not isinstance(state, DTensor) or state.placements != parameter.placements:
        return False
    return folder_of(state._local_tensor) == folder_of(parameter._local_tensor)


register_optimizer_step_pre_hook(_cut_loaded_state)
register_optimizer_step_pre_hook(_tell_of_begin)


def keep_state_of_meta(optimizer: Optimizer) -> None:
    """Keep loaded state of parameters that are on meta until they are placed; torch would move that state to meta."""
    loaded: dict[str, Any] = {}

    def remember(_: Optimizer, state_dict: dict[str, Any]) -> None:
        loaded.update(state_dict)

    def keep(_: Optimizer) -> None:
        numbers = [each for group in loaded["param_groups"] for each in group["params"]]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter.is_meta and number in loaded["state"]:
                optimizer.state[parameter] = dict(loaded["state"][number])
        loaded.clear()

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(keep)


# By the mesh of parallel modules: the group of their pipeline's ranks, and the gate that all ranks of the job pass.
_PIPELINES: dict[DeviceMesh, tuple[ProcessGroup | None, Gate | None]] = {}
_UNSCALE = torch.amp.GradScaler._unscale_grads_


def share_overflows(device_mesh: DeviceMesh, agreement: Agreement | None, pipeline: ProcessGroup | None = None) -> None:
    """Make all ranks of a mesh and of its pipeline skip a step if ``GradScaler`` finds an overflow on one of them.

    torch shares an overflow only over the axes that cut the first gradient, and ranks that skip different steps
    diverge. So this replaces a method of GradScaler; optimizers without parameters on such a mesh are not affected.
    """
    _PIPELINES[device_mesh] = pipeline, None if agreement is None else Gate(agreement, "", "1")
    check_unscaling()


def check_unscaling() -> None:
    """Let watchers reject the unscaling of gradients by ``GradScaler``."""
    torch.amp.GradScaler._unscale_grads_ = _unscale_on_all_ranks  # type: ignore[assignment,method-assign]


def note_in_backward(optimizer: Optimizer) -> None:
    """Note that backward steps this optimizer, so that a later use of ``GradScaler`` on it raises an error."""
    _in_backward.add(optimizer)
    check_unscaling()


def _check_not_gone(optimizer: Optimizer) -> None:
    """Raise an OrderError if a backward has stepped the parameters of an optimizer, so that no gradients are left."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if optimizer in _in_backward and all(each.grad is None for each in parameters):
        what, problem = "after step_in_backward", "parameters are stepped, with gradients of the scaled loss"
        raise OrderError("GradScaler", what, problem, "leave the block out, or the scaler: bfloat16 needs none")


def _unscale_on_all_ranks(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Unscale gradients. Returns by device 1 if any rank has a gradient that is not finite.

    Empty without gradients, unless the mesh belongs to a pipeline, whose other stages may have some.
    """
    _check_not_gone(optimizer)
    for watcher in _watchers:
        watcher.check_unscale(optimizer)
    parameters = [each for group in optimizer.param_groups for each in group["params"] if isinstance(each, DTensor)]
    meshes = dict.fromkeys(each.device_mesh for each in parameters if each.device_mesh in _PIPELINES)
    for gate in filter(None, dict.fromkeys(_PIPELINES[mesh][1] for mesh in meshes)):
        gate.enter(Entry(Kind.UNSCALE, b""))
    by_device = _UNSCALE(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    for mesh in meshes:
        pipeline, _ = _PIPELINES[mesh]
        if not by_device and pipeline is None:
            continue
        overflow = torch.stack([found_inf, *(each.to(found_inf.device) for each in by_device.values())]).amax()
        overflow = overflow.to(mesh.device_type)
        columns = zip(*(each.placements for each in parameters if each.device_mesh == mesh), strict=True)
        is_whole = [all(each.is_replicate() for each in column) for column in columns]
        cut: list[Placement] = [Replicate() if whole else Partial("max") for whole in is_whole]
        with waiting(lambda: "GradScaler's search for an overflow", mesh.mesh.flatten().tolist):
            overflow = DTensor.from_local(overflow, mesh, cut, run_check=False).full_tensor()
            if pipeline is not None:
                dist.all_reduce(overflow, dist.ReduceOp.MAX, pipeline)
        by_device = {device: overflow.to(device) for device in by_device or (overflow.device,)}
    return by_device
