"""The options of compile and parallelize: ZeRO, precision, rematerialization, pipelines; and checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardc.language.errors import OptionError, ShardingError, did_you_mean, raise_all
from shardc.language.machine import Machine
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.schedules.orders import CHUNKED, LINEAR, ORDERS, fits, looped_place, v_place
from shardc.wire import Wire, check_wire

if TYPE_CHECKING:
    import torch
    from torch import nn

STAGES = (1, 2, 3)
Balance = Literal["params", "flops", "time", "memory"]
BALANCES: tuple[str, ...] = get_args(Balance)
SCHEDULES = (*ORDERS, "auto")
BUCKET = 25 * 2**20  # bytes, as many as DDP's
ADAM = "adam"
OPTIMIZERS = {ADAM: 2, "adamw": 2, "momentum": 1, "sgd": 0}  # states of each parameter, of its shape and dtype
AUTO, RING, ULYSSES, GATHER = "auto", "ring", "ulysses", "gather"
ATTENTIONS = (AUTO, RING, ULYSSES, GATHER)  # ways to compute attention whose positions are cut
MICROBATCHES, CHUNKS = 2**10, 2**10  # at most: a schedule lists every one


@dataclass(frozen=True, slots=True)
class Zero:
    """Between uses every parameter, its gradient and its optimizer state are cut over one more mesh axis, or several.

    ``stage`` 3 gathers a parameter where it is used and frees it after, in backward once more; each stage of a Pipeline
    gathers it once a step, for all microbatches. Stages 1 and 2 keep one gathered copy between steps, which is gathered
    again once the optimizer has written the parameters. Stages 2 and 3 reduce_scatter each gradient where it is
    computed; stage 1 once a step, after the last backward.

    ``gather_over``: the axes on fast links, where others are on slow links. A parameter is then gathered in two steps:
    over the slow axes, which gives each rank a piece of it, and over the fast axes. Stage 3 keeps the piece until
    backward, which gathers over the fast axes alone. A gradient is reduced over the fast axes first, so that the slow
    axes carry a piece of it. An axis that only ``gather_over`` names cuts what is stored too. A parameter is gathered
    and reduced in one step if none of its dims is a multiple of the number of ranks along all these axes.

    Sources: ZeRO, Rajbhandari et al. 2020; hpZ and qgZ of ZeRO++, Wang et al. 2023.
    """

    axis: str | tuple[str, ...] = "dp"
    stage: Literal[1, 2, 3] = 3
    gather_over: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("axis", "gather_over"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise OptionError("Zero", f"stage={self.stage!r}", "there is no such stage", "say 1, 2 or 3")
        if self.gather_over is not None and not self.slow_axes:
            problem, remedy = "no axis is left to gather over before", "name the axes on slow links too, as axis"
            raise OptionError(self._who, f"gather_over={self.gather_over!r}", problem, remedy)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts what is stored."""
        return tuple(dict.fromkeys((*_names(self.axis), *self.fast_axes)))

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """The axes of ``gather_over``."""
        return _names(self.gather_over)

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """The axes that are not in ``gather_over``."""
        return tuple(axis for axis in self.axes if axis not in self.fast_axes)

    @property
    def text(self) -> str:
        """The option as Python code."""
        return repr(self)

    def __repr__(self) -> str:
        over = "" if self.gather_over is None else f", gather_over={self.gather_over!r}"
        return f"Zero(axis={self.axis!r}, stage={self.stage}{over})"

    @property
    def flag(self) -> str:
        """The option as one types it on the command line: ``dp=3``, or ``dp+node=3,gather_over=node``."""
        over = f",gather_over={'+'.join(self.fast_axes)}" if self.fast_axes else ""
        return f"{'+'.join(self.axes)}={self.stage}{over}"

    def renamed(self, names: Mapping[str, str]) -> Zero:
        """The same over axes of other names."""

        def rename(axes: Any) -> Any:
            return names[axes] if isinstance(axes, str) else axes and tuple(map(names.__getitem__, axes))

        return replace(self, axis=rename(self.axis), gather_over=rename(self.gather_over))

    @property
    def _who(self) -> str:
        return f"Zero({self.axis!r})"

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError where the mesh has no such axis."""
        for axis in self.axes or (self.axis,):
            _check_axis(self._who, axis, mesh)  # type: ignore[arg-type]


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


@dataclass(frozen=True, slots=True)
class Precision:
    """The model computes in ``compute``, gradients are reduced in ``reduce``, parameters keep their dtype.

    Floating parameters are cast before they are gathered, once after each write, and the cast copy is kept. Floating
    inputs are cast, of the model and of each module that holds parameters of its own; buffers and outputs are not, nor
    the parameters of a batch norm, which have the dtype of its running statistics. A gradient is cast to ``reduce``
    before it is reduced, and arrives in ``gradients``, by default its parameter's dtype: SGD takes any, Adam of
    torch.optim only its parameter's. Source: Micikevicius et al. 2018; the defaults are those of FSDP2's
    MixedPrecisionPolicy with ``cast_forward_inputs``.
    """

    compute: torch.dtype = field(default_factory=lambda: import_module("torch").bfloat16)
    reduce: torch.dtype = field(default_factory=lambda: import_module("torch").float32)
    gradients: torch.dtype | None = None

    def __post_init__(self) -> None:
        dtypes: dict[str, Any] = {"compute": self.compute, "reduce": self.reduce}
        dtypes |= {} if self.gradients is None else {"gradients": self.gradients}
        problem, remedy = "it is no floating dtype", "say torch.bfloat16, torch.float16 or torch.float32"
        raise_all([
            OptionError(f"Precision({name}={dtype!r})", f"of type {type(dtype).__name__}", problem, remedy)
            for name, dtype in dtypes.items()
            if type(dtype).__name__ != "dtype" or not dtype.is_floating_point
        ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remat:
    """Backward computes some activations again, just before it reads them, from fewer that are saved.

    ``blocks``: a glob over module paths, ``h.*``. Of the outermost modules that it matches the first and every
    ``every``-th after it save only their inputs; every 2nd halves both the memory saved and the work repeated.
    ``budget``: the bytes that a rank may save, of a pipeline those of all microbatches in flight; a minimum cut chooses
    the activations that cost least to repeat. A repeated activation lives until its last reader, so that far below the
    inputs of all blocks the peak rises again. Results of collectives are saved, never sent again, unless
    ``collectives``: less memory, more wire. Sources: Chen et al. 2016; Korthikanti et al. 2022.
    """

    blocks: str = ""
    every: int = 1
    budget: int | None = None
    collectives: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, str):
            problem, remedy = (
                "it is a glob over the paths of modules",
                "say blocks='h.*', or budget= for a number of bytes",
            )
            raise OptionError("Remat", f"blocks={self.blocks!r}", problem, remedy)
        if bool(self.blocks) == (self.budget is not None):
            what = "both blocks and budget" if self.blocks else "neither blocks nor budget"
            remedy = "say blocks='h.*', or budget=10**9 for a gigabyte"
            raise OptionError("Remat", what, "one of them says what is saved", remedy)
        if type(self.every) is not int or self.every < 1:
            raise OptionError("Remat", f"every={self.every}", "it counts blocks from 1", "say 1 for all, 2 for half")
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            what, problem = f"budget={self.budget!r}", "it is a whole number of bytes, 0 or more"
            raise OptionError("Remat", what, problem, "say budget=10**9 for a gigabyte")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The model is cut in stages along one mesh axis, and the batch in microbatches that follow each other.

    ``balance``: what is even over the stages; ``cuts``: globs over module paths, at whose start a stage begins, or
    ``shardc.stage_boundary()`` in the model. ``schedule``: ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1``, ``zb-h2``,
    ``zb-v`` or ``auto``. ``chunks``: stages a rank, by default 2 for ``interleaved`` and ``zb-v``, 1 or 2 for ``auto``
    as estimated times say, and else 1. Of cuts into several stages a rank, even over ranks or over stages, the one is
    taken whose schedule ends first by estimated times.
    ``max_memory``: bytes that a rank has for its stages' parameters, gradients, Adam and saved values: stages are cut,
    and ``auto`` chooses, so that these are enough.
    ``batch``: for an input by name the dim that is cut in microbatches, None where no dim is; by default dim 0 of all
    inputs as long there as the first. ``loss_scale``: the ``torch.amp.GradScaler`` that scales the loss. Its scale is
    the gradient that backward starts from, since a pipeline runs backward before the loss is scaled; without it small
    float16 gradients would be lost.
    ``offload``: only the stage that a rank works on is on its device, and the next one on its way there. The others are
    in host memory, with the saved activations of their microbatches and the sums of their gradients. Parameters are
    stored and gradients arrive in host memory, so that the optimizer works there.
    A batch of 10 in 4 microbatches is 3, 3, 3 and 1 rows, and a mean is over all 10.
    Sources: GPipe, Huang et al. 2019; PipeDream, Narayanan et al. 2019; Zero Bubble, Qi et al. 2024.
    """

    axis: str = "pp"
    microbatches: int = 8
    schedule: str = "1f1b"
    balance: Balance = "params"
    cuts: tuple[str, ...] | None = None
    chunks: int | None = None
    max_memory: int | None = None
    batch: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    loss_scale: Any = None
    offload: bool = False

    def __post_init__(self) -> None:
        self._check_count("microbatches", "it counts pieces of a batch", MICROBATCHES)
        for name, names in (("schedule", SCHEDULES), ("balance", BALANCES)):
            value = getattr(self, name)
            if value not in names:
                remedy = did_you_mean(str(value), names) or f"say one of {', '.join(names)}"
                raise OptionError("Pipeline", f"{name}={value!r}", f"there is no such {name}", remedy)
        if self.chunks is not None:
            self._check_count("chunks", "it counts a rank's stages", CHUNKS)
        if self.schedule != "auto" and not fits(self.schedule, self.chunks_a_rank, 1):
            problem = "it has one stage a rank" if self.schedule in LINEAR else "it has two stages a rank"
            others = [name for name in ORDERS if fits(name, self.chunks_a_rank, 1)]
            what = f"schedule={self.schedule!r}, chunks={self.chunks}"
            raise OptionError("Pipeline", what, problem, f"leave chunks out, or say {' or '.join(others)} for these")
        self._check_types()
        self._check_offload()

    def _check_count(self, name: str, problem: str, most: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not 1 <= value <= most:
            remedy = f"say {most} or less" if type(value) is int and value > most else "say 1 or more"
            raise OptionError("Pipeline", f"{name}={value!r}", problem, remedy)

    def _check_types(self) -> None:
        """Raise one OptionError for all settings of a wrong type."""
        dims = self.batch.values() if isinstance(self.batch, Mapping) else [""]
        checks = {
            "cuts": (
                isinstance(self.cuts or (), (tuple, list)) and all(isinstance(glob, str) for glob in self.cuts or ()),
                "it lists globs over the paths of modules", "say cuts=('h.4', 'h.8')",
            ),
            "max_memory": (
                self.max_memory is None or (type(self.max_memory) is int and self.max_memory > 0),
                "it is a whole number of bytes", "say max_memory=8 * 10**9 for 8 gigabytes",
            ),
            "batch": (
                all(dim is None or type(dim) is int for dim in dims),
                "it maps the names of inputs to a dim, or to None", "say batch={'mask': 1, 'table': None}",
            ),
            "loss_scale": (
                self.loss_scale is None or hasattr(self.loss_scale, "get_scale"),
                "it is no torch.amp.GradScaler", "say loss_scale=torch.amp.GradScaler(), the one that you step",
            ),
        }  # fmt: skip
        raise_all([
            OptionError("Pipeline", f"{name}={getattr(self, name)!r}", problem, remedy)
            for name, (is_good, problem, remedy) in checks.items() if not is_good
        ])  # fmt: skip

    def _check_offload(self) -> None:
        who, what = "Pipeline", f"offload={self.offload!r}"
        if not isinstance(self.offload, bool):
            raise OptionError(who, what, "idle stages are in host memory or are not", "say True or False")
        if self.offload and self.chunks_a_rank == 1:
            problem, remedy = "a rank has one stage, which is never idle", "say chunks=3 or more, or leave offload out"
            raise OptionError(who, f"{what}, chunks={self.chunks}", problem, remedy)
        if self.offload and self.max_memory is not None:
            remedy = "leave max_memory out, and see program.memory['peak']"
            raise OptionError(
                who, f"{what}, max_memory={self.max_memory}", "it bounds what all stages of a rank hold", remedy
            )

    @property
    def text(self) -> str:
        """The axis and the number of microbatches as Python code."""
        return f"Pipeline(axis={self.axis!r}, microbatches={self.microbatches})"

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError where the mesh has no such axis, or one with the name of the axis of microbatches."""
        _check_axis(f"Pipeline({self.axis!r})", self.axis, mesh)
        if MICROBATCH in mesh.axis_names:
            problem = f"its axis {MICROBATCH!r} is the name of an axis of ours"
            raise OptionError("Pipeline", f"{mesh}", problem, "name it otherwise")

    def num_stages(self, mesh: Mesh) -> int:
        """Stages of the model: the ranks along the axis, times the stages of each."""
        return mesh.axis_size(self.axis) * self.chunks_a_rank

    @property
    def chunks_a_rank(self) -> int:
        """Stages that each rank holds."""
        return self.chunks or (2 if self.schedule in CHUNKED else 1)

    def place(self, num_stages: int) -> tuple[int, ...]:
        """The rank of each stage along the axis; with several a rank ``auto`` places them in a V, as ``zb-v`` does."""
        is_v = self.schedule in ("zb-v", "auto")
        return (v_place if is_v else looped_place)(num_stages, num_stages // self.chunks_a_rank)

    def stage_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the ranks of one stage: all axes but the pipeline's; of one rank where there is no other."""
        others = {name: size for name, size in mesh.sizes.items() if name != self.axis}
        return self._mesh(others or {self.axis: 1})

    def compute_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the program: an axis of microbatches, and the ranks of one stage."""
        return self._mesh({MICROBATCH: self.microbatches, **self.stage_mesh(mesh).sizes})

    def _mesh(self, sizes: Mapping[str, int]) -> Mesh:
        mesh = Mesh(device_ids=None, **sizes)
        mesh.stage_axis = self.axis
        return mesh


def _check_axis(who: str, axis: str, mesh: Mesh) -> None:
    """Raise an OptionError in the name of an option where the mesh has no such axis."""
    try:
        mesh.axis_size(axis)
    except ShardingError as error:
        raise OptionError(who, error.what, error.problem, error.remedy) from None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a compilation, beside mesh and annotations.

    ``bucket``: bytes of a rank in one bucket of collectives that are sent together; 1 sends each alone. Packing takes
    memory of less than twice as many bytes. ``machine``: the one that times are estimated for. ``optimizer``: one of
    ``OPTIMIZERS``, whose states count as memory and whose step counts as time. ``attention``: how it is computed where
    positions are cut, one of ``ATTENTIONS``. ``wire``: the codecs of what is sent, as ``shardc/wire.py`` has them.
    """

    zero: Zero | None = None
    precision: Precision | None = None
    remat: Remat | None = None
    bucket: int = BUCKET
    pipeline: Pipeline | None = None
    machine: Machine = field(default_factory=Machine)
    optimizer: str = ADAM
    attention: str = AUTO
    wire: Wire | None = field(default=None, hash=False)

    @property
    def optimizer_states(self) -> int:
        """The tensors that the optimizer keeps for each parameter, of its shape and dtype."""
        return OPTIMIZERS[self.optimizer]

    def stage_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of annotations: with a pipeline the ranks of one stage, else all of them."""
        return self.pipeline.stage_mesh(mesh) if self.pipeline else mesh

    def compute_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the program: with a pipeline the ranks of one stage and an axis of microbatches, else all."""
        return self.pipeline.compute_mesh(mesh) if self.pipeline else mesh

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError for an option that has a wrong type or does not fit the mesh."""
        self.check_kinds()
        for option in (self.zero, self.pipeline, self.machine):
            if option is not None:
                option.check(mesh)
        if self.wire is not None:
            check_wire(self.wire, mesh)
        if self.zero and self.pipeline and self.pipeline.axis in self.zero.axes:
            what, problem = f"with Pipeline({self.pipeline.axis!r})", "a parameter is held by the ranks of one stage"
            raise OptionError(f"Zero({self.zero.axis!r})", what, problem, "name another axis in one of them")

    def check_kinds(self) -> None:
        """Raise an OptionError for an option that has a wrong type."""
        for name, (expected, example) in KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, expected):
                problem = f"it is no shardc.{expected.__name__}"
                is_stage = name == "zero" and type(value) is int and value in STAGES
                example = f"Zero('dp', stage={value})" if is_stage else example
                raise OptionError(f"option {name}", f"{name}={value!r}", problem, f"say {name}=shardc.{example}")
        if type(self.bucket) is not int or self.bucket < 1:
            what, remedy = f"bucket={self.bucket!r}", f"say 1 to let each go alone, or {BUCKET} as it is by default"
            raise OptionError("option bucket", what, "it counts the bytes of collectives that go together", remedy)
        if self.optimizer not in OPTIMIZERS:
            remedy = did_you_mean(str(self.optimizer), OPTIMIZERS) or f"say one of {', '.join(OPTIMIZERS)}"
            what, problem = f"optimizer={self.optimizer!r}", "its states are not known"
            raise OptionError("option optimizer", what, problem, remedy)
        if self.attention not in ATTENTIONS:
            remedy = did_you_mean(str(self.attention), ATTENTIONS) or f"say one of {', '.join(ATTENTIONS)}"
            what, problem = f"attention={self.attention!r}", "there is no such way to compute it"
            raise OptionError("option attention", what, problem, remedy)


KINDS: Mapping[str, tuple[type, str]] = {  # of options, each with an example
    "zero": (Zero, "Zero('dp', stage=3)"),
    "precision": (Precision, "Precision(compute=torch.bfloat16)"),
    "remat": (Remat, "Remat('blocks.*')"),
    "pipeline": (Pipeline, "Pipeline('pp', microbatches=8)"),
}

# Checks of the arguments of compile, parallelize and simulate.


def check_model(model: Any) -> None:
    """Raise a ShardingError for what is no module, or for a module whose ops cannot be captured."""
    who, problem = "model", "shardc compiles an nn.Module"
    if isinstance(model, type):
        raise ShardingError(who, f"the class {model.__name__}", problem, f"make one: {model.__name__}(...)")
    if not hasattr(model, "named_parameters"):
        remedy = "put the function in a module's forward" if callable(model) else "give an nn.Module"
        raise ShardingError(who, f"of type {type(model).__name__}", problem, remedy)
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        remedy = f"give the {type(inner).__name__} itself, and to parallelize compile='inductor'"
        raise ShardingError(who, f"a {type(inner).__name__} in torch.compile", "it is compiled already", remedy)
    if getattr(model, "_compiled_call_impl", None) is not None:
        problem, remedy = "it is compiled already", "leave compile() out, and say compile='inductor' to parallelize"
        raise ShardingError(who, f"a {type(model).__name__} after compile()", problem, remedy)
    _check_modules(model)


def _check_modules(model: nn.Module) -> None:
    import torch
    from torch.nn.parameter import is_lazy

    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"{f'module {scripted[0]!r}' if scripted[0] else 'it'} is a ScriptModule"
        raise ShardingError("model", what, "its ops cannot be seen", "give the nn.Module that it was scripted from")
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        what, remedy = f"it has no shape yet, as {len(lazy) - 1} others", "call the model once, so that it is made"
        raise ShardingError(f"parameter {lazy[0]!r}", what, "its module is lazy", remedy)


def check_maker(model: Any, initialize: Any = None) -> None:
    """Raise a ShardingError for arguments of ``init_parameters`` that make no model, or give it no values."""
    if initialize is not None and not callable(initialize):
        raise _wrong_type("initialize", initialize, "it is a function of the model", "say initialize=lambda model: ...")
    if not callable(model):
        problem = "it takes a model on meta, or a function that makes one"
        raise _wrong_type("init_parameters", model, problem, "give init_parameters(lambda: Model(config), ...)")


def check_call(args: Any, kwargs: Any, train: Any, differentiable: Any, strict: Any) -> None:
    """Raise a ShardingError for all arguments of ``compile`` beside model, mesh and options that have a wrong type."""
    errors = [
        _wrong_type(name, value, "it is yes or no", f"say {name}=True or {name}=False")
        for name, value in (("train", train), ("strict", strict))
        if not isinstance(value, bool)
    ]
    if isinstance(args, (str, bytes, Mapping)) or not hasattr(args, "__iter__"):
        by_name = isinstance(args, Mapping)
        remedy = "say kwargs= for arguments by name" if by_name else "say args=(x,) for a single input"
        errors.append(_wrong_type("args", args, "it holds the positional arguments of forward, in order", remedy))
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        problem = "it holds the arguments of forward that are given by name"
        errors.append(_wrong_type("kwargs", kwargs, problem, "say kwargs={'name': value}"))
    if isinstance(differentiable, str) or not isinstance(differentiable, (tuple, list)):
        remedy = f"say differentiable=({differentiable!r},)" if isinstance(differentiable, str) else "say ('logits',)"
        errors.append(_wrong_type("differentiable", differentiable, "it lists names of outputs", remedy))
    raise_all(errors)


def check_draw(seed: Any, step: Any) -> None:
    """Raise a ShardingError for a seed or a step of random numbers that is no whole number."""
    raise_all([
        _wrong_type(name, value, "it is a whole number of less than 64 bits", f"say {name}=0")
        for name, value in (("seed", seed), ("step", step))
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63
    ])  # fmt: skip


def check_values(inputs: Mapping[str, Any]) -> None:
    """Raise a ShardingError for every input on meta, which has a shape but no values."""
    problem, remedy = "a program runs on values", "give a tensor that has some"
    raise_all([
        ShardingError(f"input {name!r}", f"shape {list(x.shape)}, on meta", problem, remedy)
        for name, x in inputs.items() if x.is_meta
    ])  # fmt: skip


def check_tangents(grad_outputs: Any, names: list[str]) -> None:
    """Raise a ShardingError where the gradients of outputs are not tensors by name."""
    if not isinstance(grad_outputs, Mapping):
        remedy = f"say grad_outputs={{{names[0]!r}: ...}}" if names else "leave it out: no output has a gradient"
        raise _wrong_type("grad_outputs", grad_outputs, "it maps the names of outputs to their gradients", remedy)
    raise_all([
        _wrong_type(f"grad_outputs[{name!r}]", value, "a gradient is a tensor", "give a tensor like the output")
        for name, value in grad_outputs.items() if not (hasattr(value, "shape") and hasattr(value, "dtype"))
    ])  # fmt: skip


def _wrong_type(name: str, value: Any, problem: str, remedy: str) -> ShardingError:
    text = repr(value)
    what = f"of type {type(value).__name__}" if len(text) > 60 or "\n" in text else text
    return ShardingError(name, what, problem, remedy)
