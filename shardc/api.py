"""The front door: compile a model for a mesh without processes or devices, inspect the result, run or train it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardc import compiler
from shardc.cache.cache import Cache
from shardc.capture.annotations import Match, Spec, annotated_parameters, annotations_about, check_annotations
from shardc.capture.call import input_values, rebuild_call, state_of
from shardc.capture.values.region import Symbols
from shardc.compile_region import CompiledRegion, compile_region
from shardc.compiler import Request
from shardc.language.errors import OptionError, ShardingError, did_you_mean, raise_all
from shardc.language.machine import Links, machine_of
from shardc.language.mesh import Mesh
from shardc.language.sharding import Sharding
from shardc.language.text import bytes_text
from shardc.options import (
    ADAM,
    AUTO,
    BUCKET,
    Local,
    Momentum,
    Options,
    Pipeline,
    Precision,
    Remat,
    Saved,
    Zero,
    check_call,
    check_draw,
    check_maker,
    check_model,
    check_values,
)
from shardc.program.collective import Collective
from shardc.program.program import Pin, Program, gradient_names, shardings_of
from shardc.program.traffic import collectives_of
from shardc.report.explain.strict import strict_offences
from shardc.schedules.named import Timeline
from shardc.wire import Wire

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardc.costs.step import StepCost
    from shardc.report.explain.explanation import Explanation
    from shardc.report.explain.records import Advice, Alternative
    from shardc.runtime.module.module import ParallelModule


class Compiled(compiler.Compiled):
    """A compiled model: its programs, and methods to inspect, run and recompile it."""

    __slots__ = ()

    def __repr__(self) -> str:
        assert self.request is not None, "compiled by hand"
        sent = sum(each.times * each.wire_bytes for each in self.collectives)
        text = f"{type(self.model).__name__} on {self.request.mesh}"
        return f"Compiled({text}: {len(self.collectives)} collectives, {bytes_text(sent)} sent by a rank)"

    def _repr_html_(self) -> str:
        """The display in notebooks: collectives and memory; ``dump("html")`` is the full report."""
        return f"<pre>{escape(repr(self))}\n\n{escape(self.dump(only='collectives,memory'))}</pre>"

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step, in order."""
        return collectives_of(self.program)

    @property
    def shardings(self) -> dict[str, Sharding]:
        """The sharding of every parameter, buffer, input, output and node, by name."""
        return shardings_of(self.program)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on one rank by class: parameters, gradients, optimizer, saved and others; and the peak of them all."""
        from shardc.costs.memory import memory_of

        return memory_of(self.program)

    @property
    def timeline(self) -> Timeline:
        """The predicted timeline of a step: each call and collective of a rank; in a pipeline, of all ranks."""
        from shardc.costs.step_time import step_timeline

        return Timeline.of(step_timeline(self.program))

    @property
    def cost(self) -> StepCost:
        """The cost of a step on one rank: bytes by phase, kind and axes, memory by class, floating-point operations."""
        from shardc.costs.step import step_cost

        return step_cost(self.program)

    def recompile(self, **changes: Any) -> Compiled:
        """Compile the model again with some arguments of ``shardc.compile`` changed; this program stays as it is.

        Arguments that are not given keep their values. The model is captured again, which takes most of the time of a
        compile, if ``args``, ``kwargs``, ``train``, ``differentiable``, ``precision`` or annotations of modules'
        outputs change, or if the model itself has changed.

        Raises an OptionError for an argument that ``compile`` does not have, otherwise what ``compile`` raises.
        """
        assert self.request is not None, "compiled by hand"
        known = None if {"args", "kwargs"} & changes.keys() else self
        return _compiled(self.model, _changed(self.request, changes), known)

    def dump(self, format: str = "text", only: str = "") -> str:
        """The program as text, json, dot or html. ``only`` restricts it to some tables, or to some values and modules.

        It takes what ``--only`` takes: names of tables, ``"collectives,memory"``, or a glob, ``"blocks.0.*"``.
        """
        from shardc.report.dump.dump import dump

        return dump(self, format, only=only)

    def explain(self, name: str) -> Explanation:
        """Explain the sharding of a parameter, input, output or module, or a node by the name that the dump prints.

        Raises a ShardingError, with similar names, for an unknown name.
        """
        from shardc.report.explain.explain import explain

        return explain(self, name)

    def advise(self, name: str, tries: int = 12) -> Advice:
        """Changes that would remove a collective, found by at most ``tries`` further compilations.

        Raises a ShardingError, with similar names, if no collective has this name.
        """
        from shardc.report.explain.advice import advise

        return advise(self, name, tries)

    def choices(self) -> dict[str, tuple[Alternative, ...]]:
        """The alternatives that the compiler chose from at each collective, by name."""
        from shardc.report.explain.alternatives import choices

        return choices(self)

    def simulate(
        self, *args: Any, grad_outputs: Any = None, seed: int = 0, step: int = 0, **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Run every rank in this process; return whole outputs in the model's own containers, whole gradients by name.

        The gradient of an input that shares its name with a parameter is named ``input:NAME``. ``grad_outputs``: the
        gradient of each differentiable output, by name; by default ones.
        """
        from shardc.runtime.simulator import simulate

        return self.run(simulate, self.program, args, kwargs, grad_outputs, seed, step)

    def run(
        self,
        runtime: Any,
        program: Program,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        grad_outputs: Mapping[str, torch.Tensor] | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Run a program of any level through ``runtime(program, inputs by kind and name) -> results``."""
        results = runtime(program, self.inputs(program, args, kwargs, grad_outputs, seed, step))
        outputs, gradients = (
            [result for output, result in zip(program.outputs, results, strict=True) if output.kind == kind]
            for kind in ("output", "gradient")
        )
        pairs = zip(program.outputs, results, strict=True)
        changed = {output.name: result for output, result in pairs if output.kind == "changed"}
        args, kwargs = rebuild_call(self.convention.forward, args, kwargs, changed)
        result = self.convention.unflatten(outputs, args, kwargs)
        return result, dict(zip(gradient_names(program), gradients, strict=True))

    def compile_region(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], fixed: tuple[Pin, ...], symbols: Symbols
    ) -> CompiledRegion:
        """Compile the model with the options of this one for a region of sizes of the dims that have symbols."""
        assert self.request is not None
        request = replace(self.request, args=args, kwargs=kwargs, fixed=fixed)
        return compile_region(self.model, request, symbols, type(self))

    def inputs(
        self,
        program: Program,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        grad_outputs: Mapping[str, torch.Tensor] | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> list[torch.Tensor]:
        """The whole values of the inputs of a program of any level, in order."""
        check_draw(seed, step)
        tensors = self.convention.flatten(args, kwargs or {})
        check_values(dict(zip(self.convention.names, tensors, strict=True)))
        state = state_of(self.model, self.convention.constants)
        return list(input_values(program, state, tensors, grad_outputs or {}, (seed, step)))


def compile(
    model: nn.Module,
    mesh: Any,
    annotations: Mapping[str, Spec] | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = True,
    differentiable: tuple[str, ...] = (),
    zero: Zero | None = None,
    pipeline: Pipeline | None = None,
    precision: Precision | None = None,
    remat: Remat | None = None,
    bucket: int = BUCKET,
    links: Links = None,
    optimizer: str = ADAM,
    attention: str = AUTO,
    wire: Wire | None = None,
    saved: Saved | None = None,
    momentum: Momentum | None = None,
    overlap: str | None = None,
    local: Local | None = None,
    fixed: tuple[Pin, ...] = (),
    strict: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Compiled:
    """Capture a model, propagate a few annotations to every value, and rewrite it for each rank of a mesh.

    No process is started and no device is needed. Example inputs have global shapes.

    Args:
        model: the model, which is not changed; its parameters may be on meta.
        mesh: a Mesh or a DeviceMesh.
        annotations: ``{pattern: P(...)}``, patterns over names of parameters, buffers, inputs, modules and outputs.
        args: example inputs, by position; meta tensors will do.
        kwargs: example inputs, by name.
        train: compile a backward too. It starts from the field ``loss``, else from the 0-dim outputs, else from all.
        differentiable: further outputs that a gradient may reach, by name.
        zero: see ``Zero``.
        pipeline: see ``Pipeline``.
        precision: see ``Precision``.
        remat: see ``Remat``.
        bucket: the size in bytes of buckets of collectives that are sent together; 1 sends each alone.
        links: the machine for which times are estimated: ``{"tp": "nvlink", "dp": "ib"}``, ``"nvlink"`` for all axes, a
            file that ``shardc bench-links`` wrote, or a ``Machine``.
        optimizer: ``adam``, ``adamw``, ``momentum`` or ``sgd``. Its states are counted as memory, its step as time.
        attention: how attention is computed where positions are cut. ``"ring"``: keys and values go from rank to rank.
            ``"ulysses"``: neighbouring ranks cut heads in place of positions, as many ranks as the heads of keys allow;
            keys go round among the groups of neighbours. ``"gather"``: keys and values are whole on every rank. The
            default is whatever sends the fewest bytes among rings, shared heads and mixtures of both. With a learned
            mask attention is a ring, unless this option says otherwise.
        wire: the codecs in which values are sent, ``{"dp": "int8", "tp activations": "bf16"}``. A key names an axis,
            contents (``gradients``, ``parameters``, ``activations``), a glob over modules and parameters, or several
            of these. Of the keys that match, the one with the most words applies, and of those the last. Codecs are
            ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` and ``"int4"``; None sends values as they are. Sums are
            computed in float32. ``"1bit"`` and ``"topk:0.01"``, which sends the largest hundredth, apply to gradients
            alone unless the key names other contents. What they leave out of a gradient is added to that of the next
            step.
        saved: the axes that cut values while they are saved for backward, by a glob over the modules that read them,
            ``{"blocks.*": "tp"}``. Where ranks would all save the same value, each saves a piece of it, and backward
            gathers the pieces. The axes cut the last dim that they divide; ``P(None, "tp")`` names a dim. ``"host"``
            saves values in host memory, and the absolute path of a folder saves them in files there; backward fetches
            them one layer ahead. ``("tp", "host")`` saves pieces in host memory. Of the keys that match, the last
            applies; None saves values whole.
        momentum: ``Momentum(after=500)`` sends Adam's momentum in place of gradients, in the codecs of ``wire`` (1-bit
            Adam). This compiles the steps that send momentum; ``parallelize`` also runs the steps before them.
        overlap: ``"ring"`` computes matrix products in chunks where an operand is gathered or the sum is scattered, as
            in sequence parallelism: a rank multiplies one chunk while the next is on its way. ``"auto"`` does so where
            it is faster on the machine of ``links``. The bytes sent do not change; numbers agree up to rounding.
        local: ``Local("dc", every=20)`` lets groups of ranks along an axis train by themselves and meet every 20 steps
            (DiLoCo). The compiled program is that of one group; example inputs that the axis cuts are those of all
            groups.
        fixed: shardings that are already decided and override annotations.
        strict: raise a ShardingError for every op without a rule, every gather that no annotation asks for, and every
            annotation without effect.
        cache: a folder that keeps the compiled programs of captured models for later processes. It may be shared;
            reading it runs nothing that it contains.

    Returns:
        The compiled program: ``collectives``, ``shardings``, ``memory``, ``dump``, ``explain``, ``simulate``.

    Raises:
        ShardingError: for an error in annotations, mesh, inputs or options.
        CaptureError: for a model that cannot be captured.

    Examples:
        >>> import torch, shardc
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> mesh, annotations = shardc.Mesh(dp=2, tp=2), {"input": shardc.P("dp"), "weight": shardc.P(None, "tp")}
        >>> program = shardc.compile(model, mesh, annotations, args=(torch.ones(6, 8),), train=False)
        >>> program.collectives
        (<all_reduce_tp: all_reduce over tp, forward, 48 bytes sent>,)
    """
    described, machine = Mesh.of(mesh), machine_of(links)
    options = Options(
        zero, precision, remat, bucket, pipeline, machine, optimizer, attention, wire, saved, momentum, overlap, local
    )
    request = Request(described, annotations or {}, args, kwargs or {}, train, differentiable, options, fixed, strict)
    kept = Cache(Path(cache)) if isinstance(cache, (str, os.PathLike)) else cache
    return _compiled(model, request, cache=kept)


def _compile_call(model: nn.Module, *, is_whole_model: bool, **asked: Any) -> Compiled:
    """Compile a call of a parallel module: of the whole model, or of one module with the annotations about it."""
    if not is_whole_model:
        if asked["pipeline"] is not None:
            what, problem = "called by itself, in a pipeline", "a pipeline runs the whole model"
            raise ShardingError(f"a module of {type(model).__name__}", what, problem, "call the parallel module")
        about = annotations_about(asked["annotations"] or {}, model, asked["args"], asked["kwargs"])
        asked |= {"annotations": about, "differentiable": ()}
    return compile(model, **asked)


def _compiled(
    model: nn.Module, request: Request, known: compiler.Compiled | None = None, cache: Cache | None = None
) -> Compiled:
    """Compile the model as requested. ``known``: an earlier compilation of it, whose unchanged parts are reused."""
    request.options.check(request.mesh)
    check_model(model)
    check_call(request.args, request.kwargs, request.train, request.differentiable, request.strict)
    data = compiler.compile_request(model, request, known, cache)
    compiled = Compiled(**{each.name: getattr(data, each.name) for each in fields(data)})
    if request.strict:
        raise_all(strict_offences(compiled))
    return compiled


def _changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """The request with some arguments of ``compile`` changed.

    Raises an OptionError for an unknown name, and for another mesh where ``fixed`` has shardings on the present one.
    """
    options = {each.name for each in fields(Options)} - {"machine"} | {"links"}
    known = sorted({each.name for each in fields(Request)} - {"options"} | options)
    problem = "it takes arguments of shardc.compile, but for the model"
    raise_all([
        OptionError(f"recompile({name}=...)", "there is no such argument", problem,
                    (name != "model" and did_you_mean(name, known)) or f"say one of {', '.join(known)}")
        for name in changes if name not in known
    ])  # fmt: skip
    mesh = Mesh.of(changes.get("mesh", request.mesh))
    if request.fixed and "fixed" not in changes and mesh != request.mesh:
        what, problem = f"fixed= has shardings on {request.mesh}", f"there are none of them on {mesh}"
        raise OptionError("recompile(mesh=...)", what, problem, "say fixed= too, () for none")
    other_options = {name: value for name, value in changes.items() if name in options and name != "links"}
    if "links" in changes:
        other_options["machine"] = machine_of(changes["links"])
    others = {name: value for name, value in changes.items() if name not in options}
    others |= {name: others[name] or {} for name in ("annotations", "kwargs") if name in others}
    return replace(request, **others | {"mesh": mesh, "options": replace(request.options, **other_options)})


def parallelize(
    model: nn.Module,
    mesh: Any,
    annotations: Mapping[str, Spec] | None = None,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    runtime: Literal["auto", "virtual", "distributed"] = "auto",
    compile: Literal["eager", "inductor"] = "eager",
    differentiable: tuple[str, ...] = (),
    zero: Zero | None = None,
    pipeline: Pipeline | None = None,
    precision: Precision | None = None,
    remat: Remat | None = None,
    bucket: int = BUCKET,
    links: Links = None,
    optimizer: str = ADAM,
    attention: str = AUTO,
    wire: Wire | None = None,
    saved: Saved | None = None,
    momentum: Momentum | None = None,
    overlap: str | None = None,
    local: Local | None = None,
    strict: bool = False,
    initial: Literal["broadcast", "check", "trust"] = "broadcast",
    check: Literal["first", "always", "never"] = "always",
    seed: int | None = None,
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> ParallelModule:
    """Make a module that runs the model on a mesh; the model itself is not changed.

    With a Mesh the module runs on virtual ranks in this process, and its parameters are plain tensors. With a
    DeviceMesh, or with ``runtime="distributed"`` in a job started by torchrun, it runs on torch.distributed, and every
    parameter is a DTensor. The module is compiled at once if ``args`` or ``kwargs`` are given, else at the first call,
    and again for each new signature. Options that are not listed are those of ``compile``. Warns of an axis of the mesh
    that cuts no work.

    Args:
        model: the model, whose parameters and buffers are copied; they may be on meta.
        mesh: a Mesh, or the DeviceMesh of a job.
        annotations: ``{pattern: P(...)}``, as in ``compile``.
        args: example inputs, by position, to compile at once.
        kwargs: example inputs, by name.
        runtime: ``"virtual"`` or ``"distributed"``; by default the one that fits the mesh.
        compile: ``"inductor"`` compiles forward and backward with Inductor, collectives included.
        initial: the initial values on a DeviceMesh. ``"broadcast"``: all ranks start from the values of its first rank,
            each being sent what it stores; the models of other ranks may be on meta. ``"check"`` sends no values, and
            raises a ShardingError for the first tensor that differs between ranks; ``"trust"`` does not compare.
            DTensors are kept as they are.
        check: when to compare the checksums of plain inputs, which are the whole batch and equal on all ranks: in every
            call (``"always"``), in the ``"first"`` call of each signature, or ``"never"``.
        seed: the seed of the model's random numbers, such as dropout; by default 0, or that of the first Trainer
            of the module. They are the same on every mesh, and new in each step of training. ``torch.manual_seed`` does
            not change them; ``module.seed = 1`` does.
        weights: values for the model, which may be on meta: a folder of safetensors files, as ``save_pretrained``
            writes it, or a state dict. On a DeviceMesh each rank reads its own shards alone, when the first call is
            compiled.
        cache: as in ``compile``. In a job the first rank reads programs or runs the passes, and sends the result.

    Returns:
        A module with the names, the methods and the attributes of the model; ``program`` is the program compiled last.

    Raises:
        ShardingError: for a wrong argument; in a job also, on every rank, if arguments differ between ranks.
        CaptureError: for a model that cannot be captured.

    Examples:
        >>> import torch, shardc
        >>> model, x = torch.nn.Linear(8, 4), torch.ones(6, 8)
        >>> parallel = shardc.parallelize(model, shardc.Mesh(tp=2), {"weight": shardc.P("tp")})
        >>> parallel(x).sum().backward()
        >>> torch.allclose(parallel(x), model(x)), parallel.weight.grad.shape
        (True, torch.Size([4, 8]))
    """
    from shardc.runtime.checkpoint.weights import weights_of
    from shardc.runtime.parallel import groups_of, making_together, parallel_module

    has_call = args is not None or kwargs is not None
    args, kwargs = () if args is None else args, {} if kwargs is None else kwargs
    asked: dict[str, Any] = {
        "annotations": annotations, "differentiable": differentiable, "zero": zero, "pipeline": pipeline,
        "precision": precision, "remat": remat, "bucket": bucket, "links": links, "optimizer": optimizer,
        "attention": attention, "wire": wire, "saved": saved,
        "momentum": momentum, "overlap": overlap, "local": local, "strict": strict,
    }  # fmt: skip

    def options() -> Options:
        machine, common = machine_of(links), (attention, wire, saved, momentum, overlap, local)
        return Options(zero, precision, remat, bucket, pipeline, machine, optimizer, *common)

    groups = None if local is None else groups_of(mesh, runtime, model, annotations or {}, options, asked)
    if groups is not None:
        mesh, asked["local"] = groups.mesh, groups.option.among(groups.comm.mesh)
    with making_together(mesh, runtime, model, {**asked, "cache": cache is not None}) as meeting:
        check_model(model)
        check_annotations(annotations or {})
        check_draw(0 if seed is None else seed, 0)
        check_call(args, kwargs, True, differentiable, strict)
        kept = None if cache is None else Cache(Path(cache), None if meeting is None else meeting.agreement)
        compile_fn = partial(_compile_call, mesh=mesh, cache=kept, **asked)
        values = None if weights is None else weights_of(model, weights, partial(_initial_values, model))
        module = parallel_module(
            model, mesh, compile_fn, runtime, compile, options(), initial, has_call, check, meeting, values
        )
        if seed is not None:
            module.shardc.seed = seed
        if groups is not None:
            module.shardc.take_outer_steps(groups, bucket, initial)
        if momentum is not None:
            before = {"wire": momentum.before, "momentum": None}
            compile_before = partial(_compile_call, mesh=mesh, cache=kept, **asked | before)
            module.shardc.feedback.send_momentum(momentum, module.shardc.named_parameters, compile_before)
    if has_call:
        module.shardc.compile_for(args, kwargs)
    return module


def _initial_values(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The values that the initialisers of a model on meta give the tensors of these names."""
    from shardc.capture.initial_values import record_initializers
    from shardc.passes.canonicalize.canonicalize import canonicalize
    from shardc.passes.canonicalize.draw_random import name_draws
    from shardc.runtime.initialize.initialize import values_of

    initialized = record_initializers(model)
    return values_of(canonicalize(name_draws(initialized.program)), initialized.constants, names)


def init_parameters(
    model: nn.Module | Callable[[], nn.Module],
    mesh: Any,
    annotations: Mapping[str, Spec] | None = None,
    *,
    seed: int = 0,
    initialize: Callable[[nn.Module], Any] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Initialize a model on meta. Each rank computes its own shards only; every mesh gives the same bits.

    Random numbers come from a counter that is keyed by the seed, the parameter's name and the element's index. An
    initialiser that needs its tensor whole, as ``orthogonal_`` does, makes it whole on every rank, with a warning that
    names the parameter.

    Args:
        model: a model made under ``torch.device("meta")``, whose modules' own initialisers run; or a function that
            makes a model, whose constructor runs as it is.
        mesh: on a Mesh parameters become plain whole tensors, on a DeviceMesh DTensors.
        annotations: as in ``compile``; annotated parameters are cut accordingly.
        seed: a whole number; another seed draws other values.
        initialize: ``initialize(model)`` runs in place of the modules' own initialisers.
        args: example inputs, by position. With them parameters are cut as in a compiled call, inferred cuts included.
        kwargs: example inputs, by name.

    Returns:
        The model, for ``parallelize`` to take.

    Raises:
        ShardingError: for values that the constructor wrote on meta and that no initialiser writes again.
        CaptureError: for an initialiser whose next op depends on numbers that it drew.

    Examples:
        >>> import torch, shardc
        >>> make, annotations = lambda: torch.nn.Linear(8, 4), {"weight": shardc.P("tp")}
        >>> models = [shardc.init_parameters(make, shardc.Mesh(tp=size), annotations) for size in (1, 3)]
        >>> torch.equal(models[0].weight, models[1].weight)
        True
    """
    from shardc.capture.initial_values import record_initializers
    from shardc.passes.canonicalize.canonicalize import canonicalize
    from shardc.passes.canonicalize.draw_random import name_draws
    from shardc.runtime.initialize.initialize import initialize as place

    check_maker(model, initialize)
    check_draw(seed, 0)
    check_annotations(annotations or {})
    recorded, described = record_initializers(model, initialize), Mesh.of(mesh)
    recorded = replace(recorded, program=canonicalize(name_draws(recorded.program)))
    specs: Mapping[str, Match] = {}
    inferred: Mapping[str, Sharding] = {}
    if args is None and kwargs is None:
        specs = annotated_parameters(annotations or {}, recorded.model, described)
    else:
        args = () if args is None else args
        check_call(args, kwargs or {}, True, (), False)
        program = compile(recorded.model, described, annotations, args=args, kwargs=kwargs).program
        inputs = program.named_inputs.items()
        inferred = {name: program.sharding(node) for (kind, name), node in inputs if kind in ("parameter", "buffer")}

    def sharding(name: str, shape: tuple[int, ...]) -> Sharding:
        if name in specs:
            return specs[name].spec.sharding(described, shape, specs[name].who("parameter"))
        return inferred.get(name) or Sharding.replicated(described, len(shape))

    return place(recorded, mesh, sharding, seed)
