"""The module that ``parallelize`` returns: the user's model as an ``nn.Module`` that runs on every rank of a mesh."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.language.errors import ShardingError

from .conversion import DistributedConversion
from .runtime import ModuleRuntime

RUNTIME = "shardc"  # the one name that is ours
SHARED = {"training"}  # attributes that are the parallel module's and the model's
# What the module offers of its runtime, where the model has no attribute of that name.
OFFERED = {"seed", "step", "program", "compile_for", "clip_grad_norm_"}
OWN = frozenset({RUNTIME, *vars(nn.Module())})


class ParallelModule(nn.Module):
    """A model that computes on a mesh, with the module tree and the names of the user's model.

    The user's model is left as it was: modules and tensors are copied. On a DeviceMesh each parameter and buffer is a
    DTensor, replicated until the first call is compiled, and in its propagated sharding from then on; on virtual ranks
    they stay plain and whole. Attributes that ``nn.Module`` does not have are those of the copied model.

    All that shardc adds lives in ``shardc``, a ModuleRuntime. Its ``seed``, ``step``, ``program``, ``compile_for`` and
    ``clip_grad_norm_`` are attributes of the module too, unless the model has an attribute of that name.
    """

    if TYPE_CHECKING:
        shardc: ModuleRuntime
        seed: int
        step: int

    def __init__(self, runtime: ModuleRuntime) -> None:
        super().__init__()
        if hasattr(runtime.model, RUNTIME):
            what, problem = f"its attribute {RUNTIME!r}", "under that name the parallel module keeps what is its own"
            raise ShardingError(type(runtime.model).__name__, what, problem, "rename the attribute")
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = runtime.model.__dict__[name]
        self.__dict__[RUNTIME] = runtime
        self.__dict__["forward"] = _with_signature(runtime)
        self.training = runtime.model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, whose signature this has on a module. Inputs are global values, plain tensors or DTensors.

        0-dim outputs and vectors of at most 1,024 elements are plain. On a DeviceMesh other outputs are DTensors unless
        an annotation ``output:NAME`` is ``P()``.
        """
        return self.shardc.forward(args, kwargs)

    def __repr__(self) -> str:
        runtime, model = self.shardc, type(self.shardc.model).__name__
        ranks = "ranks of a job" if isinstance(runtime.conversion, DistributedConversion) else "virtual ranks"
        count = len(runtime.variants)
        calls = "not called yet" if count == 0 else f"{count} signature{'s' * (count != 1)} compiled"
        return f"ParallelModule({model} on {runtime.mesh}, {ranks}, {calls})"

    def _repr_html_(self) -> str:
        """What notebooks show: the latest program, once there is one."""
        program = self.shardc.program if self.shardc.variants else None
        return f"<pre>{escape(repr(self))}</pre>" + (program._repr_html_() if program is not None else "")

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch between training and evaluation, as for every module."""
        super().train(mode)
        self.shardc.model.training = mode
        self.shardc.forget_gathered()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers, each as a DTensor or as a whole plain tensor, which is cut."""
        if not isinstance(state_dict, Mapping):
            what, problem = f"of type {type(state_dict).__name__}", "it maps names to tensors"
            raise ShardingError("state_dict", what, problem, "give what model.state_dict() or torch.load returns")
        own, loaded, conversion = self.state_dict(), dict(state_dict), self.shardc.conversion
        for name, value in loaded.items():
            if isinstance(own.get(name), DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                sharding = conversion.sharding(own[name], name)
                assert sharding is not None
                loaded[name] = conversion.place(conversion.copy(value), sharding, name)
        return super().load_state_dict(loaded, strict, assign)

    def __getattr__(self, name: str) -> Any:
        """What ``nn.Module`` does not find: the model's attribute, or else the runtime's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if RUNTIME not in self.__dict__:
                raise
            return getattr(self._owner(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, which reads it, or of the runtime, as ``__getattr__`` finds it."""
        if self._is_own(name):
            super().__setattr__(name, value)
        if not self._is_own(name) or name in SHARED:
            setattr(self._owner(name), name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it was set."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._owner(name), name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is set on this module and not on the model: ``nn.Module``'s, and those of the class."""
        return RUNTIME not in self.__dict__ or name in OWN or hasattr(type(self), name)

    def _owner(self, name: str) -> nn.Module | ModuleRuntime:
        """The object that has an attribute which is not set on this module itself."""
        is_ours = name in OFFERED and not hasattr(self.shardc.model, name)
        return self.shardc if is_ours else self.shardc.model

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = memo[id(self)] = type(self)(self.shardc.copied(copy.deepcopy(self.shardc.model, memo)))
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        problem = "its programs and process groups belong to this process"
        remedy = "save it with shardc.save(path, module), or pickle its state_dict() and call parallelize again"
        raise ShardingError("pickle", f"a parallel {type(self.shardc.model).__name__}", problem, remedy)

    def share_memory(self) -> NoReturn:
        """Refused: each rank computes on tensors of its own."""
        problem = "each rank of a mesh computes on tensors of its own"
        remedy = "start the ranks with torchrun, or call share_memory() on the model and parallelize it in each process"
        raise ShardingError("share_memory", f"a parallel {type(self.shardc.model).__name__}", problem, remedy)


def _with_signature(runtime: ModuleRuntime) -> Callable[..., Any]:
    """The forward of a parallel module, with the signature and the docstring of the model's."""

    @functools.wraps(runtime.model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiling(type(runtime.model).__name__)
        return runtime.forward(args, kwargs)

    return forward


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiling(name: str) -> NoReturn:
    problem = "its programs are compiled by shardc, which torch.compile cannot look into"
    raise ShardingError("torch.compile", f"a parallel {name}", problem, "say parallelize(..., compile='inductor')")
