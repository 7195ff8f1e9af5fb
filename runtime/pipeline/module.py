"""The module that ``parallelize`` returns for a pipeline on torch.distributed: a rank holds its stages' parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardc.capture.model import tensors_of
from shardc.language.errors import OrderError, ShardingError, raise_all
from shardc.program.program import Pin

from ..comm.dtensor import local
from ..comm.failure import waiting
from ..execute.executor import Runner
from ..module.compiled_call import CompiledCall
from ..module.module import ParallelModule
from ..module.request import CallRequest
from ..module.runtime import ModuleRuntime, become
from ..tensor.global_tensor import GlobalTensor
from .conversion import PipelineConversion
from .runner import PipelineRunner


class PipelineModule(ParallelModule):
    """A model of which this rank holds some stages; other parameters are on meta, with their names and shapes.

    All ranks hold a parameter until a call reads it; from then on only the ranks that read it hold it.
    """

    shardc: PipelineRuntime

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds; before the first call is compiled, all parameters."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if self.shardc.holds(parameter):
                yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The parameters and buffers that this rank holds, by name."""
        state = super().state_dict(*args, **kwargs)
        for name in self.shardc.absent():
            state.pop(kwargs.get("prefix", "") + name, None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the parameters that this rank holds, from a dict of these or of the whole model."""
        absent = self.shardc.absent()
        own = {name: value for name, value in state_dict.items() if name not in absent}
        result = super().load_state_dict(own, False, assign)
        missing = [name for name in result.missing_keys if name not in absent]
        if strict and (missing or result.unexpected_keys):
            what = f"it lacks {missing}, and has {result.unexpected_keys}, which the model does not have"
            raise OrderError("state_dict", what, "names are those of the model", "rename them, or say strict=False")
        return type(result)(missing, result.unexpected_keys)


class PipelineRuntime(ModuleRuntime):
    """The runtime of a rank of a pipeline.

    State, by the name of a parameter: ``_homes``, the pipeline's ranks that hold it, the first of which counts it in
    norms; ``_stages``, the stages that read it. ``_elsewhere``: the ids of parameters that this rank does not hold.
    """

    conversion: PipelineConversion

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere, self._homes = set[int](), dict[str, tuple[int, ...]]()
        self._stages: dict[str, frozenset[int]] = {}

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank holds a parameter."""
        return id(parameter) not in self._elsewhere

    def absent(self) -> set[str]:
        """The names of parameters that this rank does not hold."""
        return {name for (_, name), each in tensors_of(self.model) if id(each) in self._elsewhere}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds."""
        return filter(self.holds, self.model.parameters())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters of all stages is at most ``max_norm``.

        Every rank of the pipeline must call it; torch's own function sees one rank's stages alone. Returns the norm
        before scaling.
        """
        self._enter_clip(max_norm, norm_type)
        channel = self.conversion.channel
        own = [
            each.grad for name, each in self.model.named_parameters() if self.holds(each) and self.is_first_home(name)
        ]
        gradients = [gradient for gradient in own if isinstance(gradient, DTensor)]
        with waiting(lambda: f"clip_grad_norm_ over {channel.axis} and each stage", lambda: self.conversion.ranks):
            total = norm_over_stages(gradients, norm_type, self.conversion.comm.device, channel.process_groups[0])
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        dtypes = (each.dtype for (kind, _), each in tensors_of(self.model) if kind == "parameter")
        return total.to(functools.reduce(torch.promote_types, dtypes, torch.float32))

    def is_first_home(self, name: str) -> bool:
        """Whether this rank's index in the pipeline is the first that holds a parameter; before a call that is 0."""
        return self._homes.get(name, (0,))[0] == self.conversion.channel.at

    def _new_call(self, request: CallRequest) -> CompiledCall:
        call = super()._new_call(request)
        assert isinstance(call.runner, PipelineRunner)
        readers = call.runner.readers
        raise_all(list(self._misplaced(readers, call.runner.trained)))
        self._stages = call.runner.stages.holders | self._stages
        is_first, self._homes = not self._homes, readers | self._homes
        parameters = {name: each for (kind, name), each in tensors_of(self.model) if kind == "parameter"}
        absent = [parameters[name] for name, ranks in self._homes.items() if self.conversion.channel.at not in ranks]
        self._elsewhere |= set(map(id, absent))
        for each in absent if is_first else ():  # later an optimizer or a graph may use them
            assert isinstance(each, DTensor), type(each)
            piece, mesh, shape, stride = local(each).to("meta"), each.device_mesh, each.shape, each.stride()
            on_meta = DTensor.from_local(piece, mesh, each.placements, run_check=False, shape=shape, stride=stride)
            become(each, GlobalTensor.of(on_meta))
        return call

    def _homes_of(self, name: str, runner: Runner) -> Sequence[int] | None:
        assert isinstance(runner, PipelineRunner)
        return self._homes.get(name) or runner.readers.get(name)

    def _fixed(self, request: CallRequest) -> tuple[Pin, ...]:
        """Pin parameters to their stages, too, even if other stages would be better balanced for this call."""
        pins = super()._fixed(request)
        none: frozenset[int] = frozenset()
        stages = [self._stages.get(pin.name, none) if pin.kind == "parameter" else none for pin in pins]
        return tuple(replace(pin, stages=of_pin) for pin, of_pin in zip(pins, stages, strict=True))

    def _misplaced(self, readers: Mapping[str, tuple[int, ...]], trained: set[str]) -> Iterator[ShardingError]:
        """An error for each parameter that a call reads on a rank without it, or leaves untrained on a rank with it."""
        axis = self.conversion.pipeline.axis
        for name, ranks in readers.items():
            homes = self._homes.get(name, ranks)
            if not set(ranks) <= set(homes) or (name in trained and set(ranks) != set(homes)):
                yield ShardingError(
                    f"parameter {name!r}", f"this call reads it on {_ranks(ranks)} of {axis!r}",
                    f"by an earlier call {_ranks(homes)} {'alone holds' if len(homes) == 1 else 'hold'} it",
                    "make a call first that reads all parameters, and say where stages begin: Pipeline(cuts=...)",
                )  # fmt: skip

    def copied(self, model: nn.Module) -> PipelineRuntime:
        """The runtime of a copy of the model, which holds the same parameters on this rank."""
        twin = super().copied(model)
        assert isinstance(twin, PipelineRuntime)
        absent, twin._homes, twin._stages = self.absent(), dict(self._homes), dict(self._stages)
        twin._elsewhere = {id(each) for (_, name), each in tensors_of(model) if name in absent}
        return twin


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def norm_over_stages(
    gradients: Sequence[DTensor], norm_type: float, device: torch.device, pipeline: ProcessGroup
) -> Tensor:
    """The norm of the gradients of all ranks of a stage and of all ranks of the ``pipeline``, in float64.

    Norms of shards are computed where the shards are stored, which may be host memory, and reduced on the device. Their
    dtype is float64 on every rank, whatever dtypes its stages have, even if they have no gradient.
    """
    is_max = math.isinf(norm_type)
    shards: dict[tuple[bool, ...], list[Tensor]] = {}  # by whether each axis cuts them
    for gradient in gradients:
        cut = tuple(not each.is_replicate() for each in gradient.placements)
        shards.setdefault(cut, []).append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for cut, group in shards.items():
        norm = nn.utils.get_total_norm([each for each in group if each.numel()], norm_type).to(device, torch.float64)
        placements: list[Placement] = [Partial("max" if is_max else "sum") if each else Replicate() for each in cut]
        own = norm if is_max else norm**norm_type
        part = DTensor.from_local(own, gradients[0].device_mesh, placements, run_check=False).full_tensor()
        total = torch.maximum(total, part) if is_max else total + part
    dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, pipeline)
    return total if is_max else total ** (1 / norm_type)
