"""The module that ``parallelize`` returns: the user's model as an ``nn.Module`` that runs on every rank of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.language.errors import ShardingError

from .conversion import DistributedConversion
from .runtime import ModuleRuntime

RUNTIME, FORWARD, MODEL = "shardc", "_shardc_forward", "_shardc_model"  # the names that are ours
# Attributes of the runtime that the module offers, unless the model has an attribute of that name.
OFFERED = {"seed", "step", "program", "compile_for", "clip_grad_norm_"}
# Attributes of a call besides its forward: the model has its own, which are captured.
CALL = ("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_forward_hooks",
        "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs", "_compiled_call_impl")  # fmt: skip
READ_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # of the module that it wraps


class ParallelModule(nn.Module):
    """A model that computes on a mesh, with the module tree and the names of the user's model.

    The user's model is left as it was: modules and tensors are copied. On a DeviceMesh each parameter and buffer is a
    DTensor, replicated until the first call is compiled, and in its propagated sharding from then on; on virtual ranks
    they stay plain and whole.

    Inputs of a call are global values, plain tensors or DTensors. 0-dim outputs and vectors of at most 1,024 elements
    are plain; on a DeviceMesh others are DTensors unless an annotation ``output:NAME`` is ``P()``.

    ``module_of`` makes its class, a subclass of the model's: methods of the model, such as ``generate``, call this
    module. It shares all attributes with the copied model but those of a call: ``forward``, and hooks that are set on
    it, which run outside of the program. Everything that shardc adds is in ``shardc``, a ModuleRuntime. Its ``seed``,
    ``step``, ``program``, ``compile_for`` and ``clip_grad_norm_`` are attributes of the module too, unless the model
    has an attribute of that name.
    """

    __slots__ = (RUNTIME, FORWARD, *CALL)

    if TYPE_CHECKING:
        shardc: ModuleRuntime
        seed: int
        step: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a new model of the model's class; ``of`` makes a parallel module."""
        return getattr(cls, MODEL)(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Keep this subclass, which is not the user's, from the model's own ``__init_subclass__``."""

    @classmethod
    def of(cls, runtime: ModuleRuntime) -> ParallelModule:
        """The parallel module of a runtime."""
        module: ParallelModule = object.__new__(cls)
        module._begin(runtime)
        return module

    def _begin(self, runtime: ModuleRuntime) -> None:
        if hasattr(runtime.model, RUNTIME):
            what, problem = f"its attribute {RUNTIME!r}", "under that name the parallel module keeps what is its own"
            raise ShardingError(type(runtime.model).__name__, what, problem, "rename the attribute")
        object.__setattr__(self, "__dict__", runtime.model.__dict__)
        fresh = vars(nn.Module())
        for name, value in {RUNTIME: runtime, FORWARD: None, **{name: fresh.get(name) for name in CALL}}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        runtime, model = self.shardc, type(self.shardc.model).__name__
        ranks = "ranks of a job" if is_on_ranks(self) else "virtual ranks"
        count = runtime.num_compiled
        calls = "not called yet" if count == 0 else f"compiled {count} time{'s' * (count != 1)}"
        return f"ParallelModule({model} on {runtime.mesh}, {ranks}, {calls})"

    def _repr_html_(self) -> str:
        """The representation in notebooks: this module, and its latest program if there is one."""
        program = self.shardc.program if self.shardc.variants else None
        return f"<pre>{escape(repr(self))}</pre>" + (program._repr_html_() if program is not None else "")

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch between training and evaluation, as for every module."""
        super().train(mode)
        self.shardc.forget_gathered()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers, each as a DTensor or as a whole plain tensor, which is cut."""
        if not isinstance(state_dict, Mapping):
            what, problem = f"of type {type(state_dict).__name__}", "it maps names to tensors"
            raise ShardingError("state_dict", what, problem, "give what model.state_dict() or torch.load returns")
        own, loaded, conversion = self.state_dict(), dict(state_dict), self.shardc.conversion
        self.shardc.load_awaited(loaded)
        if self.shardc.outer is not None:
            self.shardc.outer.note_loaded()
        for name, value in loaded.items():
            if isinstance(own.get(name), DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                sharding = conversion.sharding(own[name], name)
                assert sharding is not None
                loaded[name] = conversion.place(conversion.copy(value), sharding, name)
        return super().load_state_dict(loaded, strict, assign)

    def __getattr__(self, name: str) -> Any:
        """Find a parameter, a buffer or a module of the model, else an offered attribute of the runtime."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == READ_BY_DDP and is_on_ranks(self):
                raise _wrapping_error(type(self).__name__) from None
            if name not in OFFERED:
                raise
            return getattr(self.shardc, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, or of the runtime if ``__getattr__`` would find it there."""
        if name in OFFERED and not hasattr(self.shardc.model, name):
            setattr(self.shardc, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = memo[id(self)] = type(self).of(self.shardc.copied(copy.deepcopy(self.shardc.model, memo)))
        for name in CALL:
            object.__setattr__(twin, name, copy.deepcopy(getattr(self, name), memo))
        if self._shardc_forward is not None:
            object.__setattr__(twin, FORWARD, copy.deepcopy(self._shardc_forward, memo))
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` and the hooks of this module; a ``__call__`` of the model's class is part of the program."""
        return nn.Module.__call__(self, *args, **kwargs)

    def __copy__(self) -> NoReturn:
        who, problem = f"a parallel {type(self.shardc.model).__name__}", "both would train the same parameters"
        raise ShardingError("copy.copy", who, problem, "use copy.deepcopy, or the module itself")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        problem = "its programs and process groups belong to this process"
        remedy = "save it with shardc.save(path, module), or pickle its state_dict() and call parallelize again"
        raise ShardingError("pickle", f"a parallel {type(self.shardc.model).__name__}", problem, remedy)

    def share_memory(self) -> NoReturn:
        """Raise a ShardingError: each rank computes on tensors of its own."""
        problem = "each rank of a mesh computes on tensors of its own"
        remedy = "start the ranks with torchrun, or call share_memory() on the model and parallelize it in each process"
        raise ShardingError("share_memory", f"a parallel {type(self.shardc.model).__name__}", problem, remedy)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a ShardingError, as ``torch.compile`` of the module does."""
        raise _compiling_error(type(self.shardc.model).__name__)


def is_on_ranks(module: Any) -> bool:
    """Whether this is a parallel module on the ranks of a job, not on virtual ones."""
    return isinstance(module, ParallelModule) and isinstance(module.shardc.conversion, DistributedConversion)


def _wrapping_error(name: str) -> ShardingError:
    """The error for a module that DDP wraps, as Ray Train's ``prepare_model`` does."""
    problem = "its gradients are reduced already, and its parameters are cut when the first call is compiled"
    return ShardingError(
        "DistributedDataParallel", f"a parallel {name}", problem, "leave it out: train the module itself"
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiling(name: str) -> NoReturn:
    """Raise the error for a module that ``torch.compile`` traces."""
    raise _compiling_error(name)


def _compiling_error(name: str) -> ShardingError:
    problem = "its programs are compiled by shardc, which torch.compile cannot look into"
    return ShardingError("torch.compile", f"a parallel {name}", problem, "say parallelize(..., compile='inductor')")
