"""Chooses the module that ``parallelize`` returns: virtual ranks or torch.distributed, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardc.capture.annotations import check_annotations
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.mesh import Mesh
from shardc.options import Options, check_model
from shardc.options.zero import OPTIMIZER, PARAMETERS
from shardc.program.program import Program

from .agreement.batch import CHECK, BatchCheck
from .agreement.gate import Gate
from .agreement.meeting import Meeting, making, ranks_of
from .agreement.request import making_lines
from .comm.comm import Comm
from .comm.distributed import make_device_mesh, start_job
from .comm.failure import note_failure
from .execute.executor import Executor, Runner
from .execute.inductor import InductorExecutor
from .huggingface.hooks import take_parallel_modules
from .local.groups import Groups, mesh_of_groups
from .model_class import module_of
from .module.conversion import Conversion, conversion_on
from .module.initial import INITIAL
from .module.module import ParallelModule
from .module.runtime import CompileFn, ModuleRuntime
from .module.value import Value
from .pipeline.conversion import PipelineConversion, pipeline_on
from .pipeline.module import PipelineModule, PipelineRuntime

RUNTIMES = ("auto", "virtual", "distributed")
RUNNERS: dict[str, Callable[[Program, Comm], Runner]] = {"eager": Executor, "inductor": InductorExecutor}


def making_together(
    mesh: Any, runtime: str, model: Any, asked: Mapping[str, Any]
) -> AbstractContextManager[Meeting | None]:
    """Context in which all ranks of the mesh make a module together, with equal arguments; alone on virtual ranks.

    Starts the job's process group if torchrun has started this process.
    """
    if runtime == "distributed" and isinstance(mesh, Mesh) and isinstance(model, nn.Module):
        start_job(_device_of(model).type)
    return making(ranks_of(mesh, runtime), asked)


def groups_of(
    mesh: Any, runtime: str, model: Any, annotations: Any, make_options: Callable[[], Options], asked: Mapping[str, Any]
) -> Groups:
    """The groups of the option ``local``, once all ranks have compared their arguments.

    Each group then makes a module of its own, on its own mesh.
    """
    with making_together(mesh, runtime, model, asked) as meeting:
        check_model(model)
        check_annotations(annotations)
        options = make_options()
        options.check(Mesh.of(mesh))
        assert options.local is not None
        device_mesh = mesh_of_groups(options.local, mesh, runtime, _device_of(model).type)
        assert meeting is not None, "a DeviceMesh has ranks of a job"
        gate = meeting.meet(type(model).__name__, "\n".join(making_lines(mesh, meeting.asked)))
        return Groups(options.local, device_mesh, annotations, gate.key)


def parallel_module(
    model: nn.Module, mesh: Any, compile_fn: CompileFn, runtime: str, backend: str, options: Options, initial: str,
    is_compiled_soon: bool, check: str, meeting: Meeting | None, values: Mapping[str, Value] | None = None,
) -> ParallelModule:  # fmt: skip
    """The parallel module of a model. Raises a ShardingError for an unknown or unsupported option.

    ``mesh``: a Mesh runs on virtual ranks, a DeviceMesh on torch.distributed, unless ``runtime`` says otherwise.
    ``backend``: runs the program, ``eager`` or ``inductor``. ``options``: those of every compilation. ``initial``: the
    source of the initial values of the ranks of a job. ``is_compiled_soon``: whether a call is about to be compiled,
    which places parameters. ``check``: the calls that compare the inputs of all ranks. ``meeting``: that of the ranks
    that make the module together. ``values``: values of parameters and buffers, in place of the model's.
    """
    known_options: list[tuple[str, str, Iterable[str]]] = [
        ("runtime", runtime, RUNTIMES), ("compile", backend, RUNNERS), ("initial", initial, INITIAL),
        ("check", check, CHECK),
    ]  # fmt: skip
    for option, value, known in known_options:
        if value not in list(known):
            remedy = did_you_mean(value, known) or f"say one of {', '.join(known)}"
            raise ShardingError("parallelize", f"{option}={value!r}", f"there is no such {option}", remedy)
    nested = [path for path, each in model.named_modules() if isinstance(each, ParallelModule)]
    if nested:
        what = f"its module {nested[0]!r} is parallel already" if nested[0] else "it is parallel already"
        remedy = "give the model that it was made of, with the annotations of both"
        raise ShardingError(f"a {type(model).__name__}", what, "a program cannot hold another one", remedy)
    device = _device_of(model)
    options.check_kinds()
    if options.pipeline is not None and backend != "eager":
        what, remedy = f"compile={backend!r} with a pipeline", "leave compile or pipeline out"
        raise ShardingError("parallelize", what, "stages run eagerly", remedy)
    if options.zero is not None and options.offloaded == PARAMETERS and backend != "eager":
        what, problem = f"compile={backend!r} with {options.zero.text}", "compiled code has parameters on the device"
        remedy = f"leave compile out, or say offload={OPTIMIZER!r}"
        raise ShardingError("parallelize", what, problem, remedy)
    if options.saves_below and backend != "eager":
        what, remedy = (
            f"compile={backend!r} with saved={options.saved!r}",
            "leave compile out, or the tier out of saved",
        )
        raise ShardingError("parallelize", what, "compiled code saves on the device", remedy)
    gate: Gate | None = None
    if meeting is not None:
        further = {"compile": backend, "initial": initial, "check": check}
        further["device"] = getattr(mesh, "device_type", device.type)  # a model may be on meta
        lines = making_lines(mesh, {**meeting.asked, **further})
        gate = meeting.meet(type(model).__name__, "\n".join(lines))
        gate.batches = BatchCheck(check)
    options.check(Mesh.of(mesh))  # after the meeting, which detects ranks with different meshes
    if runtime == "distributed" and isinstance(mesh, Mesh):
        mesh = make_device_mesh(mesh, device.type)
    if runtime == "virtual":
        mesh = Mesh.of(mesh)
    of_runtime = initial, is_compiled_soon, gate, values
    try:
        module = _module(mesh, options, device, RUNNERS[backend], model, compile_fn, of_runtime)
    except Exception as error:
        note_failure(error)
        raise
    module.shardc.mesh = Mesh.of(mesh)
    take_parallel_modules(model)
    return module


def _module(
    mesh: Any, options: Options, device: torch.device, runner: Callable[[Program, Comm], Runner],
    model: nn.Module, compile_fn: CompileFn, further: tuple[str, bool, Gate | None, Mapping[str, Value] | None],
) -> ParallelModule:  # fmt: skip
    """The module on a mesh, with or without a pipeline. ``further``: the last arguments of its runtime."""
    if options.pipeline is None:
        conversion: Conversion = conversion_on(mesh, device, options.zero)
        return module_of(ParallelModule, ModuleRuntime(model, conversion, compile_fn, runner, *further))
    conversion, make_runner = pipeline_on(mesh, options.pipeline, device, options.zero)
    if isinstance(conversion, PipelineConversion):
        runtime = PipelineRuntime(model, conversion, compile_fn, make_runner, *further)
        return module_of(PipelineModule, runtime)
    return module_of(ParallelModule, ModuleRuntime(model, conversion, compile_fn, make_runner, *further))


def _device_of(model: nn.Module) -> torch.device:
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
