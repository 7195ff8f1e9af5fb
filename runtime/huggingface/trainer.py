"""A Trainer for a parallel module: batches are global, and every rank takes part in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.trainer import Trainer

from shardc.language.errors import ShardingError

from ..checkpoint.export import whole_state
from ..module.module import ParallelModule, is_on_ranks
from ..pipeline.module import PipelineModule
from .accelerator import become_one_device, device_of, is_of_the_job, joined, states_whole
from .draws import load_draws, save_draws

WHO = "a Trainer of a parallel module"


def adopt(trainer: Trainer, model: ParallelModule) -> None:
    """Let a Trainer train a parallel module. Raises a ShardingError for arguments that do not fit one.

    A module to which no seed was given, and which has not been trained yet, gets that of the Trainer.
    """
    if not isinstance(trainer, ParallelTrainer):
        kind: Any = type(trainer)
        trainer.__class__ = joined(ParallelTrainer, kind)
    for name, value, problem, remedy in _misfits(trainer.args, model) if is_on_ranks(model) else ():
        raise ShardingError(WHO, f"{name}={value!r}", problem, remedy)
    if not model.shardc.is_seeded and model.shardc.step == 0:
        model.shardc.seed = trainer.args.seed
    if not is_on_ranks(model):
        return
    if not is_of_the_job(trainer.accelerator) and _join_job(trainer.args, model):
        trainer.create_accelerator_and_postprocess()  # which adopts the module
        return
    become_one_device(trainer.accelerator, model)
    trainer.gather_function = trainer.accelerator.gather_for_metrics


def _join_job(args: Any, model: ParallelModule) -> bool:
    """Set arguments for a job of CPU processes, which by default they take for a single process."""
    if device_of(model).type != "cpu" or args.use_cpu or args.accelerator_config.use_configured_state:
        return False
    args.use_cpu = True
    vars(args).pop("_setup_devices", None)  # a cached property
    return bool(args.device.type == "cpu")


def _misfits(args: Any, model: ParallelModule) -> list[tuple[str, Any, str, str]]:
    """Arguments that do not fit: name, value, problem and remedy of each."""
    found: list[tuple[str, Any, str, str]] = []
    if args.save_on_each_node:
        problem = "the first rank of the job writes for all"
        found.append(("save_on_each_node", True, problem, "leave it out, and save where every node can read"))
    for name in ("fsdp", "deepspeed"):
        if value := getattr(args, name, None):
            problem, remedy = "the module is cut already", f"leave {name} out, and say zero= in parallelize"
            found.append((name, value, problem, remedy))
    if isinstance(model, PipelineModule) and args.save_strategy != "no" and not args.save_only_model:
        problem = "each stage has an optimizer of its own parameters, and the Trainer saves one"
        remedy = "say save_only_model=True, or save_strategy='no' and call shardc.save in a callback"
        found.append(("save_strategy", str(args.save_strategy.value), problem, remedy))
    return found


class ParallelTrainer(Trainer):
    """A Trainer of a parallel module.

    ``per_device_train_batch_size`` is the size of the whole batch, since all ranks count as one device. The first rank
    saves, with tensors gathered from all ranks.
    """

    current_flos: float

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; every rank must call it."""
        with self._as_one_process():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; every rank must call it."""
        with self._as_one_process():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; every rank must call it, and gets all predictions."""
        with self._as_one_process():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """Context in which ``args.world_size`` is 1 on ranks: they share one batch and one random state."""
        state = self.args.distributed_state
        if is_on_ranks(self.model) and state is not None:
            self.args.distributed_state = OneProcess(state)
        try:
            yield
        finally:
            self.args.distributed_state = state

    def store_flos(self) -> None:
        """Count the operations of a step once, not for each rank."""
        if not is_on_ranks(self.model):
            super().store_flos()
            return
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if not is_on_ranks(model):
            super()._move_model_to_device(model, device)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model: the first rank writes the tensors that all ranks send."""
        if state_dict is None:
            if not hasattr(type(self.model), "save_pretrained"):
                state_dict = {name: each.clone() for name, each in whole_state(self.model).items()}  # tied ones twice
            elif not self.args.should_save:
                self.model.save_pretrained(output_dir or self.args.output_dir)
        if self.args.should_save:
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's whole state, as one device would."""
        with states_whole([self.optimizer] if is_on_ranks(self.model) else ()):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save or not is_on_ranks(self.model):
            super()._save_rng_state(output_dir)
            save_draws(output_dir, [self.model], writes=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_draws(checkpoint, [self.model])


class OneProcess:
    """Accelerate's state of this process, with 1 as the number of processes."""

    def __init__(self, state: Any) -> None:
        self._state, self.num_processes = state, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)
