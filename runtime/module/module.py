"""What ``parallelize`` returns: the user's model as an ``nn.Module`` that runs on every rank of a mesh."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.capture.call import call_leaves
from shardc.capture.model import computed_tensors, state_names, tensors_of
from shardc.capture.signature import Signature, signature_of
from shardc.language.errors import OrderError, ShardingError, error_text
from shardc.language.sharding import Sharding
from shardc.program.program import Pin, Program

from ..comm.comm import Comm
from ..execute.executor import Executor, Runner
from .border import Border
from .copies import Copies
from .gradients import Accumulation
from .optimizer import step_on_pieces, watch_overflows
from .step import Compilation, Step
from .watched import Variants, Watched

MAX_PROGRAMS = 16
SHARED = {"training"}  # ours and the model's
Tensors = Mapping[tuple[str, str], Tensor]  # parameters and buffers, by kind and name


watch_overflows()
step_on_pieces()


class CompileFn(Protocol):
    """Compiles a call of a model. ``fixed``: shardings that are settled already, and stand above annotations."""

    def __call__(self, model: nn.Module, *, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool,
                 fixed: tuple[Pin, ...]) -> Compilation: ...  # fmt: skip


class ParallelModule(nn.Module):
    """A model that computes on a mesh: the same module tree and names, parameters and buffers of its own.

    The user's model is left as it was: its modules are copied, and so is every tensor. On a DeviceMesh each parameter
    and buffer is a DTensor, replicated until the first call is compiled and in its propagated sharding from then on;
    on virtual ranks they stay plain and whole. What is no module, parameter or buffer is looked up on the copy.

    A call is compiled when its signature is new: shapes, dtypes, python values, ``requires_grad``, training flags,
    gradients on or off, a module's flags, numbers and strings; or when an op of torch finds in values what no program
    of its signature was compiled for. ``seed`` and ``step`` key random ops; ``step`` counts calls in training mode.
    """

    def __init__(self, model: nn.Module, border: Border, compile_fn: CompileFn,
                 make_runner: Callable[[Program, Comm], Runner] = Executor) -> None:  # fmt: skip
        super().__init__()
        self._border, self._compile, self._make_runner = border, compile_fn, make_runner
        self._copies, self._accumulation = border.new_copies(), Accumulation()
        self._placed: dict[tuple[str, str], Sharding] = {}
        self._computed: dict[tuple[str, str], Sharding] = {}
        self._variants: OrderedDict[tuple[Signature, *tuple[Hashable, ...]], Variants] = OrderedDict()
        self._latest: Variants | None = None
        self._latest_key: tuple[Hashable, ...] = ()
        self._checked: Tensors = {}
        self.seed, self.step = 0, 0
        self._adopt(copy.deepcopy(model, _own_tensors(model, border)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; global values in, as plain tensors or DTensors.

        0-dim outputs are plain; on a DeviceMesh others are DTensors unless an annotation ``output:NAME`` is ``P()``.
        """
        variants, tensors, given = self._variants_for(args, kwargs)
        draw = self.seed, self.step
        self.step += self.training

        def run(step: Step) -> Any:
            return step(tensors, given, draw)

        train = variants.latest.compiled.convention.signature.train
        return variants.run(run, lambda: self._new_step(args, kwargs, train))

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compile a call before it is made; parameters take their shardings."""
        self._variants_for(args, kwargs)

    @property
    def program(self) -> Any:
        """What the latest call was compiled to."""
        if self._latest is None:
            what, problem = "of a module that was not called", "a call is compiled when it is made"
            raise OrderError("program", what, problem, "call the module once, or give args= to parallelize")
        return self._latest.latest.compiled

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters on all ranks is at most ``max_norm``."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch between training and evaluation, like every module."""
        super().train(mode)
        if "_model" in self.__dict__:
            self._model.training = mode
        copies: Copies | None = self.__dict__.get("_copies")
        if copies is not None:
            copies.forget()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers, each as a DTensor or whole."""
        if not isinstance(state_dict, Mapping):
            what, problem = f"of type {type(state_dict).__name__}", "it maps names to tensors"
            raise ShardingError("state_dict", what, problem, "give what model.state_dict() or torch.load returns")
        mine = self.state_dict()
        loaded = {name: self._like(mine.get(name), value, name) for name, value in state_dict.items()}
        return super().load_state_dict(loaded, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: on the model, which reads it, where it is none of our own, as ``seed`` and ``step`` are."""
        if self._is_own(name):
            super().__setattr__(name, value)
        if not self._is_own(name) or name in SHARED:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it was set."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is ours: what was set before there was a model to adopt, and what the class has."""
        return "_own" not in self.__dict__ or name in self._own or hasattr(type(self), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = type(self)(nn.Module(), self._border, self._compile, self._make_runner)
        twin._adopt(copy.deepcopy(self._model, memo))
        twin._placed, twin._computed = dict(self._placed), dict(self._computed)
        twin.seed, twin.step = self.seed, self.step
        memo[id(self)] = twin
        return twin

    def _adopt(self, model: nn.Module) -> None:
        """Hold a model's children, parameters and buffers as one's own: the same dicts, under the same names."""
        self.__dict__["_model"], self.__dict__["_watched"] = model, Watched(model)
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.training = model.training
        self.__dict__.setdefault("_own", frozenset(vars(self)))

    def _variants_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Variants, Tensors, list[Tensor]]:
        """The programs for a call, the model's tensors, and those of the call.

        The first program is compiled if the call's signature is new.
        """
        state, tensors = self._watched.read()
        if tensors is not self._checked:
            self._border.check(tensors)
            self._checked = tensors
        leaves, tree = call_leaves(self._model.forward, args, kwargs)
        given = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors.values(), *given))
        placed = tuple(tensor.placements for tensor in given if isinstance(tensor, DTensor))
        dtypes = tuple(tensor.dtype for tensor in tensors.values())
        autocast = _autocast(self._border.comm.device.type)
        key = signature_of(leaves, tree, train, state), placed, dtypes, autocast
        if self._latest is None or key != self._latest_key:
            if key not in self._variants:
                self._variants[key] = Variants(self._new_step(args, kwargs, train))
                self._forget_oldest()
            self._variants.move_to_end(key)
            self._latest, self._latest_key = self._variants[key], key
        return self._latest, tensors, given

    def _new_step(self, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool) -> Step:
        """Compile a call; what is made here is also for calls in other modes than the user's of this one."""
        has_grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            return self._compiled_step(args, kwargs, train)

    def _compiled_step(self, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool) -> Step:
        compiled = self._compile(self._model, args=args, kwargs=kwargs, train=train, fixed=self._fixed(args, kwargs))
        self._border.agree(compiled.program)
        self._place(compiled.program)
        self._type_gradients(compiled.program)
        return Step(
            compiled,
            self._border,
            self._make_runner(compiled.program, self._border.comm),
            self._copies,
            self._accumulation,
        )

    def _forget_oldest(self) -> None:
        if len(self._variants) > MAX_PROGRAMS:
            one, other = (signature for signature, *_ in list(self._variants)[-2:])
            differences = ", ".join(one.differences(other)[:4])
            what = f"it was compiled for more than {MAX_PROGRAMS} signatures, the last two differ in {differences}"
            problem = "the oldest is forgotten, and compiled again when it comes back"
            remedy = "give it inputs of fewer shapes, or pad them"
            warnings.warn(error_text(f"a {type(self._model).__name__}", what, problem, remedy), stacklevel=4)
            self._variants.popitem(last=False)

    def _fixed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Pin, ...]:
        """The shardings that parameters still there have from before, and those of DTensors among the arguments."""
        leaves, _ = call_leaves(self._model.forward, args, kwargs)
        tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]
        given = {("input", name): self._border.sharding(tensor, f"input {name!r}") for name, tensor in tensors}
        parameters, buffers, _ = state_names(self._model)
        here: dict[str, Mapping[str, Tensor]] = {"parameter": parameters, "buffer": buffers, "input": dict(tensors)}
        return tuple(
            Pin(name, kind, sharding, frozenset(), f"{kind} {name!r} lies so already")
            for (kind, name), sharding in {**self._placed, **self._computed, **given}.items()
            if sharding is not None and name in here[kind]
        )

    def _place(self, program: Program) -> None:
        """Give parameters and buffers the shardings that a program wants, the first time."""
        tensors = dict(tensors_of(self._model))
        for put, node in zip(program.inputs, program.placeholders, strict=True):
            tensor = tensors.get((put.kind, put.name))
            if tensor is None:
                continue
            sharding = program.sharding(node)
            if put.kind == "parameter" and put.name in program.computed:
                self._computed[put.kind, put.name] = program.computed[put.name]
            before = self._placed.setdefault((put.kind, put.name), sharding)
            if before is sharding:
                placed = self._border.placed(tensor, sharding, f"{put.kind} {put.name!r}")
                if placed is not tensor:
                    become(tensor, placed)

    def _type_gradients(self, program: Program) -> None:
        """Let gradients arrive in the dtype that a program gives them, where that is not their parameter's."""
        parameters = {name: tensor for (kind, name), tensor in tensors_of(self._model) if kind == "parameter"}
        for output, node in zip(program.outputs, program.results, strict=True):
            parameter = parameters.get(output.name) if output.kind == "gradient" and node is not None else None
            if parameter is None or node is None or parameter.dtype == program.type(node).dtype:
                continue
            if not hasattr(parameter, "grad_dtype"):
                raise ShardingError(
                    "Precision", f"gradients={program.type(node).dtype}",
                    f"torch {torch.__version__} has gradients in their parameter's dtype alone",
                    "leave gradients= out, or use torch 2.13",
                )  # fmt: skip
            parameter.grad_dtype = program.type(node).dtype

    def _like(self, mine: Any, value: Any, name: str) -> Any:
        if isinstance(mine, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            sharding = self._border.sharding(mine, name)
            assert sharding is not None
            return self._border.placed(self._border.own(value), sharding, name)
        return value


def _own_tensors(model: nn.Module, border: Border) -> dict[int, Any]:
    """A memo for deepcopy: what takes the place of each parameter and buffer, tied ones once."""
    memo = computed_tensors(model)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(border.own(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = border.own(buffer)
    return memo


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def become(tensor: Tensor, other: Tensor) -> None:
    """Let every holder of ``tensor``, an optimizer among them, hold the value of ``other``."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)
