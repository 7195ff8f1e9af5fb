"""The runtime of a parallel module: its copied model, the programs of its calls, and the shardings of its tensors."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from shardc.capture.call import call_leaves
from shardc.capture.model import computed_tensors, override_attribute, state_names, tensors_of
from shardc.capture.model_state import LatestState, ModelTensors
from shardc.capture.signature import Signature, changing_sizes, signature_of
from shardc.capture.values.refusals import GuardError
from shardc.language.errors import CaptureError, OrderError, ShardingError, error_text
from shardc.language.mesh import warnings_among
from shardc.language.sharding import Sharding
from shardc.program.program import Pin, Program

from ..agreement.entry import Entry, Flag, Kind
from ..agreement.gate import Gate, digest
from ..agreement.program import ProgramText, guards_of
from ..agreement.request import text_of
from ..agreement.writes import Writes
from ..comm.comm import Comm
from ..comm.failure import telling_others, waiting
from ..execute.executor import Executor, Runner
from ..feedback.feedback import Feedback
from ..feedback.residuals import Source
from ..local.groups import Groups
from ..local.outer import OuterSteps
from ..tensor.reduction import complete_norms
from ..tier.stepping import SteppingInBackward
from .accumulation import Accumulation, reduce_now
from .call_sizes import CallSizes
from .compiled_call import Compilation, CompiledCall
from .conversion import Arrival, Conversion, DistributedConversion
from .optimizer import note_copied, note_in_backward
from .request import CallRequest, Key, check_untransformed, is_recomputed
from .submodule import own_forwards, stand_for_forwards
from .value import TensorValue, Value

MAX_PROGRAMS = 16  # compiled for one signature each
MAX_OF_REGIONS = 64  # made from programs of regions of sizes, each in a fraction of the time of a compile
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter, by id


class CompileFn(Protocol):
    """Compiles a call of a model. ``fixed``: shardings that are settled already, and override annotations.

    ``is_whole_model``: whether every annotation must apply to the call.
    """

    def __call__(self, model: nn.Module, *, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool,
                 fixed: tuple[Pin, ...], is_whole_model: bool) -> Compilation: ...  # fmt: skip


class ModuleRuntime:
    """The state and the work of a parallel module: a copy of the user's ``model``, and the programs of its calls.

    A call is compiled if its signature is new: shapes, dtypes, python values, ``requires_grad``, training flags,
    gradients on or off, attributes of modules and their classes. It is compiled again if an op finds values that no
    program of its signature was compiled for. ``seed`` and ``step`` key random ops; ``step`` counts calls in training
    mode. ``num_compiled`` counts compilations; ``variants`` has an entry for each signature, also if several share a
    program.
    """

    def __init__(self, model: nn.Module, conversion: Conversion, compile_fn: CompileFn,
                 make_runner: Callable[[Program, Comm], Runner] = Executor, initial: str = "trust",
                 is_compiled_soon: bool = False, gate: Gate | None = None,
                 values: Mapping[str, Value] | None = None) -> None:  # fmt: skip
        self.gate, self._writes = gate, Writes()
        self.conversion, self.compile_fn, self._make_runner = conversion, compile_fn, make_runner
        self._gathered, self._accumulation = conversion.gathered_parameters(), Accumulation()
        self.feedback = Feedback()
        self.outer: OuterSteps | None = None
        self._shardings: dict[tuple[str, str], Sharding] = {}  # of parameters and buffers, by kind and name
        self._computed_shardings: dict[tuple[str, str], Sharding] = {}  # of parameters that are stored in another one
        self.variants: OrderedDict[tuple[Signature, *Key], Variants] = OrderedDict()
        self._latest: Variants | None = None
        self._sizes: OrderedDict[Key, CallSizes] = OrderedDict()  # by signature without sizes
        self._warned: set[str] = set()  # what warnings of many signatures said
        self.mesh = conversion.comm.mesh  # ``parallel_module`` sets it to the user's mesh, with the axis of stages
        self._latest_states: dict[str, LatestState] = {}  # by the path of the called module, "" for the model
        self._is_compiled = self._returns_whole = self.is_capturing = False
        self._seed, self.step, self.num_compiled = 0, 0, 0
        self.is_seeded = False
        self._torch_seed: int | None = torch.initial_seed()  # None once another was warned of
        copies = conversion.copies(model, initial, is_compiled_soon, values)
        self._awaited = copies.awaited  # tensors that get their values when they are placed
        self._values = dict(values or {}) if copies.awaited else {}  # of those; if empty, the first rank's
        memo = computed_tensors(model) | copies.by_id  # with the copy of each parameter and buffer, tied ones once
        for parameter in model.parameters():
            memo[id(parameter)] = _new_parameter(memo[id(parameter)], parameter)
        self.model: nn.Module = copy.deepcopy(model, memo)
        stand_for_forwards(self)
        note_copied(model)

    @property
    def seed(self) -> int:
        """The seed of what the model draws; 0 until one is set, and then ``is_seeded`` is true."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed, self.is_seeded = seed, True

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module | None = None) -> Any:
        """Run the model; compile it first if no program fits the call. ``model``: a SubmoduleView to run instead."""
        with telling_others():
            who = f"a parallel {type(self.model).__name__}"
            check_untransformed(who)
            complete_norms()
            request = self._request(args, kwargs, Kind.FORWARD, model or self.model)
            if forward_ad._current_level >= 0:
                check_untransformed(who, (*request.tensors.values(), *(each for _, each in request.arguments)))
            random_key, parameters = (self.seed + self._group, self.step), request.parameters
            variants = self._compiled(request)
            if variants.latest.draws:
                if is_recomputed():
                    raise self._drawn_twice()
                if request.is_training:
                    self._warn_of_seed()
            if self.outer is not None:
                self.outer.begin()
            self.step += request.is_training
            result = variants.run(
                lambda call: call(request, random_key),
                partial(self._agreed, request),
            )
            if self.gate is not None:
                self._writes.note(parameters if request.writes else None)
            return result

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compile a call without running it; this gives parameters their shardings."""
        with telling_others():
            self._compiled(self._request(args, kwargs, Kind.COMPILE, self.model))

    @property
    def _group(self) -> int:
        """The index of this rank's group under ``local=``, where each group draws random numbers of its own; else 0."""
        return 0 if self.outer is None else self.outer.groups.index

    @property
    def program(self) -> Any:
        """The compiled program of the latest call."""
        if self._latest is None:
            what, problem = "of a module that was not called", "a call is compiled when it is made"
            raise OrderError("program", what, problem, "call the module once, or give args= to parallelize")
        return self._latest.latest.compilation

    def load_awaited(self, values: dict[str, Tensor]) -> None:
        """Load values of tensors that are on meta until they are placed; they replace those of ``weights=``.

        Each value that is taken is replaced by a meta tensor in ``values``. Raises a ShardingError if the first rank
        is about to send its own values.
        """
        tensors = self.model.state_dict(keep_vars=True)
        awaited = {id(tensors[name]): name for _, name in self._awaited if name in tensors}
        found = {name: awaited[id(tensors[name])] for name in values if id(tensors.get(name)) in awaited}
        if found and not self._values:
            who, what = f"load_state_dict of a {type(self.model).__name__}", "it has no values before its first call"
            remedy = "give args= to parallelize, or load after the first call"
            raise ShardingError(who, what, "the first rank sends its own then", remedy)
        for name, first in found.items():
            value = values[name]
            if value.shape == tensors[name].shape:  # torch has an error of its own
                whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
                self._values[first] = TensorValue(whole)
                values[name] = tensors[name].detach()

    def load_residuals(self, sources: Mapping[str, Sequence[Source]]) -> None:
        """Replace what codes left out of gradients by saved values; a program that is compiled later takes its own."""
        self.feedback.residuals.load(sources)
        for call in (call for variants in self.variants.values() for call in variants.calls):
            call.feedback.fill()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters on all ranks is at most ``max_norm``.

        Returns the norm before scaling.
        """
        self._enter_clip(max_norm, norm_type)
        comm = self.conversion.comm
        with waiting(lambda: "clip_grad_norm_", lambda: comm.ranks(comm.mesh.axis_names)):
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, foreach=True)

    def _enter_clip(self, max_norm: float, norm_type: float) -> None:
        """Enter clipping with all other ranks, with reduced gradients. Raises an OrderError if gradients are gone."""
        stepping = self._accumulation.stepping
        if stepping is not None:
            stepping.check_gradients("clip_grad_norm_")
        if self.gate is None:
            return
        reduce_now(self.parameters())
        text = f"max_norm={text_of(max_norm)}, norm_type={text_of(norm_type)}"
        entry = Entry(Kind.CLIP, self.gate.digest, request=digest(text))
        self.gate.enter(entry, {"request": lambda: text})

    @contextmanager
    def returning_whole(self) -> Iterator[None]:
        """Context in which outputs come back whole and plain, except in objects among the arguments."""
        with override_attribute(self, "_returns_whole", True):
            yield

    def take_outer_steps(self, groups: Groups, bucket: int, initial: str) -> None:
        """Train as one of several groups, which start from equal values and meet in outer steps."""
        self.outer = OuterSteps(groups, self.model, bucket, initial, groups.key)

    def step_in_backward(self, stepping: SteppingInBackward | None) -> None:
        """Let backward step parameters from now on, or no longer if None.

        Does nothing with outer steps or a sent momentum, which need whole steps of the optimizer.
        """
        if self.outer is None and self.feedback.momentum is None:
            self._accumulation.stepping = stepping
            if stepping is not None:
                note_in_backward(stepping.optimizer)

    def forget_gathered(self) -> None:
        """Forget the gathered parameters, whose values may change now."""
        if self._gathered is not None:
            self._gathered.forget()

    def named_parameters(self) -> dict[str, Tensor]:
        """The parameters that this rank holds, by name."""
        return dict(self.model.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds."""
        return self.model.parameters()

    def copied(self, model: nn.Module) -> ModuleRuntime:
        """The runtime of a copy of the model, with the same shardings, seed and step."""
        gate = None if self.gate is None else self.gate.of_copy()
        twin = type(self)(nn.Module(), self.conversion, self.compile_fn, self._make_runner, gate=gate)
        twin.model = model
        stand_for_forwards(twin)
        twin._shardings, twin._computed_shardings = dict(self._shardings), dict(self._computed_shardings)
        twin._awaited, twin._values = self._awaited, dict(self._values)
        twin._seed, twin.step, twin.mesh = self.seed, self.step, self.mesh
        twin.is_seeded = self.is_seeded
        twin._is_compiled, twin.feedback = self._is_compiled, self.feedback.copied(twin.named_parameters)
        twin.outer = None if self.outer is None else self.outer.copied(model)
        return twin

    def _request(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind, model: nn.Module
    ) -> CallRequest:  # fmt: skip
        """The request of a call of the model or of a view of it."""
        with self._telling():
            if self.outer is not None and model is self.model and not self._returns_whole:  # a group generates alone
                args, kwargs = self.outer.groups.part_of_call(model, args, kwargs)
            latest = self._latest_states.setdefault(getattr(model, "path", ""), LatestState(has_classes=True))
            state, tensors = latest.read(model)
            self.conversion.check(tensors)
            leaves, tree = call_leaves(model.forward, args, kwargs)
            arguments = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]
            train = torch.is_grad_enabled() and any(
                each.requires_grad for each in (*tensors.values(), *(leaf for _, leaf in arguments))
            )
            signature = signature_of(leaves, tree, train, state)
            placements = tuple(each.placements for _, each in arguments if isinstance(each, DTensor))
            dtypes = tuple(each.dtype for each in tensors.values())
            device = self.conversion.comm.device.type
            casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
            sends_momentum = train and self.feedback.sends_momentum
            key = signature, placements, dtypes, torch.get_autocast_dtype(device) if casts else None, sends_momentum
            return CallRequest(
                kind, model, args, kwargs, key, tensors, arguments, latest.is_training, is_whole=self._returns_whole
            )

    def _compiled(self, request: CallRequest) -> Variants:
        """The programs for a call, of which all ranks try the latest first; a new signature is compiled."""
        variants = self.variants.get(request.key)
        request.digest = b"" if variants is None else variants.request
        call = self._agreed(request, None if variants is None else variants.latest)
        if variants is None:
            variants = self.variants[request.key] = Variants(call, request.digest)
            self._forget_oldest()
        variants.calls[0] = call
        self.variants.move_to_end(request.key)
        self._latest = variants
        return variants

    def _agreed(self, request: CallRequest, call: CompiledCall | None) -> CompiledCall:
        """The compiled call that all ranks run; all of them compile if one of them has none."""
        gate = self.gate
        if gate is None:
            return call or self._new_call(request)
        is_forward = request.kind == Kind.FORWARD
        changed = self._writes.since(request.parameters) if is_forward else Flag.UNKNOWN
        request.digest = request.digest or digest(request.text())
        texts = {"request": lambda: request.text(), "is_changed": lambda: self._writes_text(changed)}
        if is_forward:
            gate.batches.note(request.arguments, request.digest)
        texts["draw"] = lambda: f"seed {self.seed}, step {self.step}"
        while True:
            gathers = call is not None and call.gathers(request.tensors)
            program = b"" if call is None else call.text.digest
            entry = Entry(
                request.kind, gate.digest, gate.calls + is_forward, request.digest, program, seed=self.seed,
                step=self.step, is_changed=changed, gathers=gathers,
            )  # fmt: skip
            passed = gate.enter(entry, texts if call is None else {**texts, "program": call.text.__str__})
            if call is not None and not passed.compiles:
                break
            call, request.writes = self._new_call(request), True
        request.writes |= passed.gathers
        gate.calls += is_forward
        if call.gather is not None:
            call.gather.agreed = passed.gathers
        return call

    def _writes_text(self, changed: Flag) -> str:
        assert self.gate is not None
        since = f"since call {self.gate.calls}" if self.gate.calls else "before its first call"
        return f"{'has' if changed == Flag.YES else 'has not'} written its parameters {since}"

    def _telling(self) -> AbstractContextManager[None]:
        """Context that tells the other ranks of an error in the block."""
        return nullcontext() if self.gate is None else self.gate.telling()

    def _new_call(self, request: CallRequest) -> CompiledCall:
        """Compile a call, outside of inference mode: later calls use its tensors, and may be outside of it, too."""
        has_grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            with self._telling():
                fixed, train = self._fixed(request), request.key[0].train
                before = self.feedback.compile_before
                compile_fn = self.compile_fn if before is None or request.sends_momentum else before
                compile_call = partial(
                    compile_fn, request.model, args=request.args, kwargs=request.kwargs, train=train, fixed=fixed,
                    is_whole_model=request.model is self.model,
                )  # fmt: skip
                sizes = self._sizes_of_calls_like(request)
                with own_forwards(self.model), override_attribute(self, "is_capturing", True):
                    count = sizes.num_compiled
                    compilation, is_of_region = sizes.compilation(request, fixed, compile_call)
                    self.num_compiled += sizes.num_compiled - count
                program = compilation.program
                text = ProgramText(program, compilation.convention.constants)
                runner = self._make_runner(program, self.conversion.comm)
            if self.gate is not None:
                entry = Entry(Kind.COMPILED, self.gate.digest, program=text.digest)
                self.gate.enter(entry, {"program": text.__str__})
                for guard in guards_of(program):
                    guard.on_result = self.gate.compare_result
            with self._telling():
                self._place(program, runner, is_whole_model=request.model is self.model)
                self._set_gradient_dtypes(program)
                self._warn(program)
                return CompiledCall(
                    compilation, self.conversion, runner, self._gathered, self._accumulation, self.feedback,
                    self.gate, text, is_of_region,
                )  # fmt: skip

    def _sizes_of_calls_like(self, request: CallRequest) -> CallSizes:
        """The programs of calls that differ from this one only in sizes."""
        key = request.key[0].without_sizes(), *request.key[1:]
        found = self._sizes.setdefault(key, CallSizes())
        self._sizes.move_to_end(key)
        if len(self._sizes) > MAX_PROGRAMS:
            self._sizes.popitem(last=False)
        return found

    def _warn(self, program: Program) -> None:
        """Warn once, on the first rank, about notes on the first program that show a likely mistake."""
        notes = () if self._is_compiled else warnings_among(program.notes)
        self._is_compiled = True
        for note in notes if 0 in self.conversion.comm.positions else ():
            what, _, remedy = note.partition(": ")
            warnings.warn(error_text(f"a {type(self.model).__name__}", f"{self.mesh}", what, remedy), stacklevel=9)

    def _forget_oldest(self) -> None:
        """Forget the least recently used program, if there are too many of a region, or of single signatures."""
        for is_of_region, limit in ((True, MAX_OF_REGIONS), (False, MAX_PROGRAMS)):
            keys = [key for key, each in self.variants.items() if each.latest.is_of_region == is_of_region]
            if len(keys) > limit:
                if not is_of_region:
                    self._warn_of_many([signature for signature, *_ in keys])
                del self.variants[keys[0]]

    def _warn_of_seed(self) -> None:
        """Warn once, on the first rank, if torch was seeded after ``parallelize``, whose own seed was not given."""
        if self.is_seeded or self._torch_seed in (None, torch.initial_seed()):
            return
        self._torch_seed = None
        if 0 in self.conversion.comm.positions:
            who, problem = f"a {type(self.model).__name__}", "its random numbers do not depend on it, but on seed=0"
            text = error_text(who, "torch was seeded after parallelize", problem, "say parallelize(..., seed=)")
            warnings.warn(text, stacklevel=5)

    def _drawn_twice(self) -> OrderError:
        who, what = f"a {type(self.model).__name__}", "a checkpoint around it calls it again in backward"
        problem = "its random numbers would differ from those of the first call"
        return OrderError(who, what, problem, "call it outside of the checkpoint, and say parallelize(..., remat=)")

    def _warn_of_many(self, signatures: Sequence[Signature]) -> None:
        *_, one, other = signatures
        differences = changing_sizes(signatures) or ["the last two differ in " + ", ".join(one.differences(other)[:4])]
        what = f"it was compiled for more than {MAX_PROGRAMS} signatures: {', '.join(differences[:4])}"
        if what in self._warned or 0 not in self.conversion.comm.positions:
            return
        self._warned.add(what)
        problem = "the oldest is forgotten, and compiled again when it comes back"
        remedy = "give it inputs of fewer shapes, or pad them; hold what changes from call to call in a buffer"
        warnings.warn(error_text(f"a {type(self.model).__name__}", what, problem, remedy), stacklevel=6)

    def _fixed(self, request: CallRequest) -> tuple[Pin, ...]:
        """Pins of the shardings that earlier calls gave to parameters and buffers, and of DTensors in the arguments."""
        tensors = request.arguments
        arguments = {("input", name): self.conversion.sharding(each, f"input {name!r}") for name, each in tensors}
        parameters, buffers, _ = state_names(self.model)
        present: dict[str, Mapping[str, Tensor]] = {"parameter": parameters, "buffer": buffers, "input": dict(tensors)}
        for (kind, name), sharding in list(self._shardings.items()):
            tensor = present[kind].get(name)
            if sharding is not None and tensor is not None and tensor.ndim != len(sharding.dims):
                del self._shardings[kind, name]  # that of a buffer which the user has replaced
        return tuple(
            Pin(name, kind, sharding, frozenset(), f"{kind} {name!r} has this sharding already")
            for (kind, name), sharding in {**self._shardings, **self._computed_shardings, **arguments}.items()
            if sharding is not None and name in present[kind]
        )

    def _place(self, program: Program, runner: Runner, is_whole_model: bool) -> None:
        """Place parameters and buffers, the first time, in the shardings in which a program reads them.

        Those that no op reads are placed only if the whole model was compiled.
        """
        tensors, arrivals = dict(tensors_of(self.model)), dict[tuple[str, str], Arrival]()
        for put, node in zip(program.inputs, program.placeholders, strict=True):
            tensor = tensors.get((put.kind, put.name))
            if tensor is None or not (is_whole_model or node.users):
                continue
            sharding = program.sharding(node)
            if put.kind == "parameter" and put.name in program.computed:
                self._computed_shardings[put.kind, put.name] = program.computed[put.name]
            if self._shardings.setdefault((put.kind, put.name), sharding) is sharding:
                label = f"{put.kind} {put.name!r}"
                if (put.kind, put.name) in self._awaited:
                    homes = self._homes_of(put.name, runner)
                    arrivals[put.kind, put.name] = Arrival(tensor, sharding, label, homes)
                    continue
                placed = self.conversion.place(tensor, sharding, label)
                if placed is not tensor:
                    become(tensor, placed)
        if self._awaited:
            self._receive(arrivals, tensors if is_whole_model else {})

    def _receive(self, arrivals: Mapping[tuple[str, str], Arrival], tensors: ModelTensors) -> None:
        """Give awaited tensors their values: those that a program reads in its shardings, others whole.

        ``tensors``: the model's tensors that may be received whole now.
        """
        conversion = self.conversion
        assert isinstance(conversion, DistributedConversion), conversion
        mesh = conversion.torch_comm.mesh
        whole = {
            key: Arrival(tensors[key], Sharding.replicated(mesh, tensors[key].ndim), f"{key[0]} {key[1]!r}")
            for key in sorted(self._awaited - arrivals.keys())
            if key in tensors
        }
        every = {**arrivals, **whole}
        arrived = list(every.values())
        values = [self._values.pop(name) for _, name in every] if self._values else None
        came = conversion.receive(arrived) if values is None else conversion.filled(arrived, values)
        for each, placed in zip(arrived, came, strict=True):
            become(each.tensor, placed)
        self._awaited -= every.keys()

    def _homes_of(self, name: str, runner: Runner) -> Sequence[int] | None:
        """The ranks of a pipeline that hold a parameter; None without a pipeline."""
        return None

    def _set_gradient_dtypes(self, program: Program) -> None:
        """Give gradients the dtype in which a program computes them, if it differs from their parameter's."""
        parameters = {name: tensor for (kind, name), tensor in tensors_of(self.model) if kind == "parameter"}
        for output, node in zip(program.outputs, program.results, strict=True):
            parameter = parameters.get(output.name) if output.kind == "gradient" and node is not None else None
            if parameter is None or node is None or parameter.dtype == program.type(node).dtype:
                continue
            if not hasattr(parameter, "grad_dtype"):
                problem = f"torch {torch.__version__} has gradients in their parameter's dtype alone"
                remedy = "leave gradients= out, or use torch 2.13"
                raise ShardingError("Precision", f"gradients={program.type(node).dtype}", problem, remedy)
            parameter.grad_dtype = program.type(node).dtype


def become(tensor: Tensor, other: Tensor) -> None:
    """Turn ``tensor`` into ``other`` in place, so that all its holders, such as an optimizer, see the new value."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)
    for kind in HOOKS if isinstance(tensor, nn.Parameter) else ():
        setattr(tensor, kind, getattr(tensor, kind))  # tells autograd's side of the tensor, which was swapped


def _new_parameter(value: Tensor, like: nn.Parameter) -> nn.Parameter:
    """A parameter that requires a gradient if ``like`` does, with the hooks that ``like`` has now."""
    parameter = nn.Parameter(value, requires_grad=like.requires_grad)
    for kind in HOOKS:
        setattr(parameter, kind, copy.copy(getattr(like, kind)))
    return parameter


MAX_VARIANTS = 8
REMEDY = (
    "let no shape depend on values: torch.where(mask, new, old) for what a mask selects, ignore_index for rows "
    "that no loss counts, padding to one length; or compute it outside of the model and pass the result"
)


class Variants:
    """Compiled calls that differ in the values that their guards expect, the latest used first; one without guards.

    ``request``: the digest of the call's request, if ranks agree on it.
    """

    def __init__(self, call: CompiledCall, request: bytes = b"") -> None:
        self.calls, self.request = [call], request

    @property
    def latest(self) -> CompiledCall:
        """The compiled call that ran last."""
        return self.calls[0]

    def run(self, run: Callable[[CompiledCall], Any], agreed: Callable[[CompiledCall | None], CompiledCall]) -> Any:
        """Run the first compiled call whose guards all hold; compile a new one if there is none. Returns its result.

        ``agreed``: takes a compiled call or None, and returns the call that all ranks run instead; they have agreed on
        the first one already. A program ends at a guard that does not hold, on every rank, and has changed nothing.
        Raises a CaptureError if too many were compiled already, and a GuardError if even a new program finds other
        values than it was captured with.
        """
        for i in range(len(self.calls)):
            call = self.calls[i] = agreed(self.calls[i]) if i else self.calls[i]
            try:
                result = run(call)
            except GuardError as error:
                latest = error
                continue
            self.calls.insert(0, self.calls.pop(i))
            return result
        if len(self.calls) == MAX_VARIANTS:
            what = f"its program depends on values, and {MAX_VARIANTS} programs were compiled already"
            raise CaptureError(latest.who, f"{what}; now {latest.finding}", REMEDY) from latest
        self.calls.insert(0, agreed(None))
        return run(self.calls[0])
