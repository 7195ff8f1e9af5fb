"""What ``parallelize`` returns for a pipeline on torch.distributed: a rank holds the parameters of its own stages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.capture.model import tensors_of
from shardc.language.errors import OrderError, ShardingError, raise_all
from shardc.program.program import Pin

from ..comm.dtensor import local
from ..module.module import ParallelModule, become
from ..module.optimizer import norm_over_stages
from ..module.step import Step
from .border import PipelineBorder
from .step import PipelineRunner


class PipelineModule(ParallelModule):
    """A model of which this rank holds some stages: of the other parameters only names and shapes are left, on meta.

    State: ``_homes``, by name the pipeline's ranks that hold a parameter, the one that counts it as its own first:
    those that read it in the first call that does, for good; until then all ranks hold it. ``_stages``, by name the
    stages that read it there. ``_elsewhere``, the ids of those that this rank does not hold.
    """

    _border: PipelineBorder

    def __init__(self, *args: Any) -> None:
        self._elsewhere, self._homes = set[int](), dict[str, tuple[int, ...]]()
        self._stages: dict[str, frozenset[int]] = {}
        super().__init__(*args)  # what is set later is the model's

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds: all of them until a call is compiled."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in self._elsewhere:
                yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What this rank holds, by name."""
        found = super().state_dict(*args, **kwargs)
        for name in self._absent():
            found.pop(kwargs.get("prefix", "") + name, None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what this rank holds, from a dict of that or of the whole model."""
        absent = self._absent()
        given = {name: value for name, value in state_dict.items() if name not in absent}
        result = super().load_state_dict(given, False, assign)
        missing = [name for name in result.missing_keys if name not in absent]
        if strict and (missing or result.unexpected_keys):
            what = f"it lacks {missing}, and has {result.unexpected_keys} which the model has not"
            raise OrderError("state_dict", what, "names are those of the model", "rename them, or say strict=False")
        return type(result)(missing, result.unexpected_keys)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters of all stages is at most ``max_norm``.

        Every rank of the pipeline calls it; torch's own function sees one rank's stages alone.
        """
        own = [parameter.grad for name, parameter in self.named_parameters() if self._owns(name)]
        gradients = [gradient for gradient in own if isinstance(gradient, DTensor)]
        total = norm_over_stages(gradients, norm_type, self._border.comm.device, self._border.channel.groups[0])
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        dtypes = (each.dtype for (kind, _), each in tensors_of(self._model) if kind == "parameter")
        return total.to(functools.reduce(torch.promote_types, dtypes, torch.float32))

    def _new_step(self, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool) -> Step:
        step = super()._new_step(args, kwargs, train)
        assert isinstance(step.runner, PipelineRunner)
        readers = step.runner.readers
        raise_all(list(self._misplaced(readers, step.runner.trained)))
        self._stages = step.runner.stages.holders | self._stages
        is_first, self._homes = not self._homes, readers | self._homes
        parameters = {name: each for (kind, name), each in tensors_of(self._model) if kind == "parameter"}
        absent = [parameters[name] for name, ranks in self._homes.items() if self._border.channel.at not in ranks]
        self._elsewhere |= set(map(id, absent))
        for each in absent if is_first else ():  # later on an optimizer or a graph may look at them
            become(each, _on_meta(each))
        return step

    def _fixed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Pin, ...]:
        """Parameters stay in their stages too, whatever is even in a call of other shapes."""
        pins = super()._fixed(args, kwargs)
        held = (self._stages.get(pin.name, frozenset()) if pin.kind == "parameter" else frozenset() for pin in pins)
        return tuple(replace(pin, stages=stages) for pin, stages in zip(pins, held, strict=True))

    def _misplaced(self, readers: Mapping[str, tuple[int, ...]], trained: set[str]) -> Iterator[ShardingError]:
        """An error for each parameter that a call reads where it is not, or does not train wherever it is."""
        axis = self._border.pipeline.axis
        for name, ranks in readers.items():
            held = self._homes.get(name, ranks)
            if not set(ranks) <= set(held) or (name in trained and set(ranks) != set(held)):
                yield ShardingError(
                    f"parameter {name!r}", f"this call reads it on {_ranks(ranks)} of {axis!r}",
                    f"by an earlier call {_ranks(held)} {'alone holds' if len(held) == 1 else 'hold'} it",
                    "make a call first that reads all parameters, and say where stages begin: Pipeline(cuts=...)",
                )  # fmt: skip

    def _owns(self, name: str) -> bool:
        return self._border.channel.at == self._homes.get(name, (0,))[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineModule:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, PipelineModule)
        absent, twin._homes, twin._stages = self._absent(), dict(self._homes), dict(self._stages)
        twin._elsewhere = {id(each) for (_, name), each in tensors_of(twin._model) if name in absent}
        return twin

    def _absent(self) -> set[str]:
        return {name for (_, name), each in tensors_of(self._model) if id(each) in self._elsewhere}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _on_meta(parameter: Tensor) -> Tensor:
    """A DTensor like this one that holds nothing."""
    assert isinstance(parameter, DTensor), type(parameter)
    piece, mesh = local(parameter).to("meta"), parameter.device_mesh
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(piece, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
