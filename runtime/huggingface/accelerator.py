"""An Accelerator for a parallel module on ranks: all ranks count as one device, and read whole batches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import new_class
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, get_sampler, prepare_data_loader
from accelerate.utils import DistributedType, broadcast_object_list, operations
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardc.language.errors import ShardingError

from ..agreement.entry import Entry, Kind
from ..agreement.gate import Gate
from ..checkpoint.export import whole_state
from ..checkpoint.state import Names
from ..module.module import ParallelModule, is_on_ranks
from ..module.optimizer import keep_state_of_meta, whole_optimizer_state
from .draws import load_draws, save_draws

OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
WHO = "an Accelerator of a parallel module"


def become_one_device(accelerator: Accelerator, model: ParallelModule) -> None:
    """Make an Accelerator treat all ranks as one device. Raises a ShardingError if its settings do not allow that."""
    if isinstance(accelerator, OneDevice) or (not is_on_ranks(model) and accelerator.num_processes > 1):
        return
    if is_on_ranks(model):
        _check_set_up(accelerator, model)
    kind: Any = type(accelerator)
    accelerator.__class__ = joined(OneDevice, kind)
    agreement = None if model.shardc.gate is None else model.shardc.gate.agreement
    accelerator._gate = None if agreement is None else Gate(agreement, f"a DataLoader of {type(model).__name__}", "1")


def _check_set_up(accelerator: Accelerator, model: ParallelModule) -> None:
    parallelism = accelerator.parallelism_config
    if accelerator.distributed_type in OTHERS or parallelism is not None:
        what = "parallelism_config" if parallelism is not None else accelerator.distributed_type.value
        remedy = "leave it out, and give the mesh, annotations and zero= to parallelize"
        raise ShardingError(WHO, f"it uses {what}", "the module is cut already", remedy)
    if accelerator._dataloaders and accelerator.num_processes > 1:
        what, problem = "it has prepared a DataLoader already", "that one splits each batch over the ranks"
        remedy = "say prepare(model, optimizer, loader) in one call, or prepare the model first"
        raise ShardingError(WHO, what, problem, remedy)
    if accelerator.device.type != device_of(model).type:
        what, problem = f"its device is {accelerator.device}", f"the mesh is one of {device_of(model).type}"
        remedy = "make the mesh by init_device_mesh of that device type, or say cpu=True (use_cpu=True in arguments)"
        raise ShardingError(WHO, what, problem, remedy)
    if not is_of_the_job(accelerator):
        what, problem = f"it knows 1 process on {accelerator.device}", f"the job has {dist.get_world_size()}"
        raise ShardingError(WHO, what, problem, "say Accelerator(cpu=True)")


def is_of_the_job(accelerator: Accelerator) -> bool:
    """Whether an Accelerator knows of all processes; on CPUs it does so only with ``cpu=True``."""
    return not dist.is_initialized() or accelerator.state.num_processes == dist.get_world_size()


def device_of(model: ParallelModule) -> torch.device:
    """The device of this rank."""
    device: torch.device = model.shardc.conversion.comm.device
    return device


@functools.cache
def joined(further: Any, kind: Any) -> Any:
    """A subclass of ``kind`` with the same name, in which the methods of ``further`` come first."""
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return new_class(kind.__name__, (further, kind), {}, lambda namespace: namespace.update(body))


class OneDevice(Accelerator):
    """An Accelerator to which all ranks are one device, so that ``num_processes`` is 1.

    The parallel module is not wrapped. Every rank reads every batch whole, in the first rank's order. A scheduler steps
    once for each step of the optimizer. Gathering makes outputs whole and plain, without repetition. The first rank
    saves whole states. ``is_main_process``, ``wait_for_everyone`` and ``print`` still treat ranks as processes.
    """

    _is_one_device = True  # read by hooks, which do not import accelerate
    flag_tensor: Tensor | None
    _gate: Gate | None

    @property
    def num_processes(self) -> int:
        """The number of devices that share a batch: 1."""
        return 1

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Give a parallel module autocast, and leave it where it is; prepare other modules as usual."""
        if is_on_ranks(model):
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader whose batches are whole and equal on every rank; the first rank draws their order."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        if self.dispatch_batches:
            what, problem = "dispatch_batches=True", "each rank would get rows of its own, and it takes the whole batch"
            raise ShardingError(WHO, what, problem, "leave it out: every rank reads the dataset")
        prepared = prepare_data_loader(
            data_loader, self.device, num_processes=1, process_index=0, rng_types=[], dispatch_batches=False,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            use_seedable_sampler=self.use_seedable_sampler, data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader,
        )  # fmt: skip
        sampler = get_sampler(prepared)
        prepared.synchronized_generator = getattr(sampler, "generator", None)
        prepared.rng_types = FirstRanksDraws(self._gate, sampler)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An optimizer that may load its state before the first call has placed the parameters."""
        is_new = not getattr(optimizer, "_is_accelerate_prepared", False)
        optimizer = super().prepare_optimizer(optimizer, device_placement)
        if is_new:
            keep_state_of_meta(optimizer.optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that steps once for each step of the optimizer, on any number of ranks."""
        scheduler = super().prepare_scheduler(scheduler)
        scheduler.split_batches = True
        return scheduler

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all parameters, including those of other pipeline stages."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in filter(is_on_ranks, self._models):
            if {id(each) for each in parameters} == {id(each) for each in model.parameters()}:
                self.unscale_gradients()
                return _whole(model.shardc.clip_grad_norm_(max_norm, norm_type))
        return _whole(super().clip_grad_norm_(parameters, max_norm, norm_type))

    def gather(self, tensor: Any) -> Any:
        """Make tensors whole and plain on every rank; all ranks must call it."""
        return operations.recursively_apply(_whole, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as one device does: of the last batch no more than its samples."""
        if not use_gather_object and all(isinstance(each, Tensor) for each in tree_leaves(input_data)):
            return super().gather_for_metrics(input_data)
        state = self.gradient_state
        return input_data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Make tensors whole and plain: with one device there is nothing to reduce."""
        return self.gather(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Make tensors whole and plain: with one device there is nothing to pad."""
        return self.gather(tensor)

    def check_trigger(self) -> Any:
        """Whether any rank has called ``set_trigger``."""
        flag: Tensor | None = self.flag_tensor
        self.flag_tensor = operations.reduce(torch.tensor(0, device=self.device) if flag is None else flag, "sum")
        return super().check_trigger()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Whole plain tensors in host memory on the first rank, none on others; every rank must call it."""
        return whole_state(model) if is_on_ranks(model) else super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save models and optimizers whole, and the parallel modules' random keys; every rank must call it."""

        def save(models: Sequence[nn.Module], weights: Any, folder: str) -> None:
            save_draws(folder, models, self.is_main_process)

        handle = self.register_save_state_pre_hook(save)
        try:
            with states_whole(self._optimizers):
                return super().save_state(*args, **kwargs)
        finally:
            handle.remove()
            self.wait_for_everyone()

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a state of ``save_state``, written on this or any other mesh or device."""

        def load(models: list[Any], folder: str) -> None:
            load_draws(folder, models)
            models[:] = [LoadedByName(each) if is_on_ranks(each) else each for each in models]

        handle = self.register_load_state_pre_hook(load)
        try:
            super().load_state(*args, **kwargs)
        finally:
            handle.remove()


class FirstRanksDraws:
    """The random states that Accelerate shares at the start of an epoch, which all ranks begin together."""

    def __init__(self, gate: Gate | None, sampler: Any) -> None:
        self._gate, self._sampler = gate, sampler

    def __iter__(self) -> Iterator[str]:
        if self._gate is None:
            return
        self._gate.enter(Entry(Kind.EPOCH, self._gate.digest))
        yield "torch"
        if isinstance(self._sampler, SeedableRandomSampler):
            (self._sampler.initial_seed,) = broadcast_object_list([self._sampler.initial_seed])
        elif isinstance(getattr(self._sampler, "generator", None), torch.Generator):
            yield "generator"


class LoadedByName:
    """A parallel module for ``load_model`` of safetensors, which would look for tied tensors by their memory."""

    def __init__(self, module: ParallelModule) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Tensor]:
        """Empty, so that safetensors finds no tied tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> Any:
        """Load whole plain tensors; tied ones may be there under one of their names only."""
        aliases = Names.of(self.module).aliases
        first = {aliases.get(name, name): value for name, value in state_dict.items()}
        state_dict = {**state_dict, **first, **{alias: first[name] for alias, name in aliases.items() if name in first}}
        return self.module.load_state_dict(state_dict, strict)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def states_whole(optimizers: Iterable[Any]) -> Iterator[None]:
    """Context in which ``state_dict`` of Accelerate's optimizers is whole, on the first rank; every rank enters it."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            state = whole_optimizer_state(optimizer.optimizer)
            optimizer.state_dict = functools.partial(dict, state)
            stack.callback(delattr, optimizer, "state_dict")
        yield
