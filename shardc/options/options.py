"""All options of a compilation, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.machine import Machine
from shardc.language.mesh import Mesh
from shardc.wire import Wire, check_wire

from .local import Local
from .momentum import Momentum
from .pipeline import Pipeline
from .precision import Precision
from .remat import Remat
from .saved import Saved, check_saved, saved_as, with_text
from .zero import HOST, STAGES, Offloaded, Zero

BUCKET = 25 * 2**20  # bytes, as many as DDP's
ADAM = "adam"
OPTIMIZERS = {ADAM: 2, "adamw": 2, "momentum": 1, "sgd": 0}  # states of each parameter, of its shape and dtype
AUTO, RING, ULYSSES, GATHER = "auto", "ring", "ulysses", "gather"
OVERLAPS = (AUTO, RING)  # ways to compute products beside gathers and sums
ATTENTIONS = (AUTO, RING, ULYSSES, GATHER)  # ways to compute attention whose positions are cut


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a compilation, besides mesh and annotations.

    ``bucket``: bytes of a rank in one bucket of collectives that are sent together; 1 sends each alone. Packing takes
    less than twice as much memory. ``machine``: the machine that times are estimated for. ``optimizer``: one of
    ``OPTIMIZERS``, whose states count as memory and whose step counts as time. ``attention``: the method for attention
    over cut positions, one of ``ATTENTIONS``. ``wire``: the codecs of sent values, as in ``shardc/wire.py``. ``saved``:
    the cuts and places of values while they are saved for backward. ``momentum``: the steps that send Adam's momentum.
    ``overlap``: the method for products beside gathers and sums, one of ``OVERLAPS``. ``local``: the groups of ranks
    that train independently.
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
    saved: Saved | None = field(default=None, hash=False)
    momentum: Momentum | None = None
    overlap: str | None = None
    local: Local | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", with_text(self.saved))

    @property
    def optimizer_states(self) -> int:
        """The number of tensors that the optimizer keeps for each parameter, of its shape and dtype.

        ``local`` adds two for outer steps: the parameters from which groups begin, and the outer optimizer's momentum.
        """
        return OPTIMIZERS[self.optimizer] + (2 if self.local is not None else 0)

    @property
    def offloaded(self) -> Offloaded | None:
        """The values that ``Zero`` stores in the tier below the device's memory; None if there are none."""
        return None if self.zero is None else self.zero.offload

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's states are in the tier below the device's memory."""
        return self.offloaded is not None or (self.pipeline is not None and self.pipeline.offload)

    @property
    def saves_below(self) -> bool:
        """Whether values are saved for backward in the tier below the device's memory."""
        entries = self.saved.values() if isinstance(self.saved, Mapping) else ()
        return any(how is not None and how.to is not None for how in map(saved_as, entries))

    @property
    def in_files(self) -> bool:
        """Whether ``Zero`` offloads to files."""
        return self.zero is not None and self.zero.to != HOST

    def stage_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of annotations: with a pipeline the ranks of one stage, else all ranks of a group."""
        mesh = self.group_mesh(mesh)
        return self.pipeline.stage_mesh(mesh) if self.pipeline else mesh

    def compute_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the program: with a pipeline the ranks of one stage and an axis of microbatches, else a group."""
        mesh = self.group_mesh(mesh)
        return self.pipeline.compute_mesh(mesh) if self.pipeline else mesh

    def group_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of one group that trains independently; all ranks without the option ``local``."""
        return mesh if self.local is None else self.local.group_mesh(mesh)

    def check(self, mesh: Mesh) -> None:
        """Raise an OptionError for an option that has a wrong type or does not fit the mesh."""
        self.check_kinds()
        for option in (self.zero, self.pipeline, self.machine):
            if option is not None:
                option.check(mesh)
        if self.wire is not None:
            check_wire(self.wire, mesh)
        if self.saved is not None:
            check_saved(self.saved, self.stage_mesh(mesh))
        if self.momentum is not None:
            self.momentum.check(mesh, self.wire, self.zero, self.pipeline)
        if self.local is not None:
            self.local.check(mesh, self.zero, self.pipeline, self.momentum, self.wire)
        if self.zero and self.pipeline and self.pipeline.axis in self.zero.axes:
            what, problem = f"with Pipeline({self.pipeline.axis!r})", "a parameter is held by the ranks of one stage"
            raise OptionError(f"Zero({self.zero.axis!r})", what, problem, "name another axis in one of them")
        if self.zero and self.offloaded and self.pipeline and self.pipeline.offload:
            what, problem = (
                f"with Pipeline({self.pipeline.axis!r}, offload=True)",
                "both say where parameters are stored",
            )
            raise OptionError(self.zero.text, what, problem, "leave offload out of one of them")
        if self.saves_below and self.pipeline and self.pipeline.offload:
            what = f"with Pipeline({self.pipeline.axis!r}, offload=True)"
            remedy = "leave the tier out of saved, or offload out of the pipeline"
            raise OptionError(f"saved={self.saved!r}", what, "both say where what is saved is", remedy)

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
        if self.overlap not in (None, *OVERLAPS):
            remedy = did_you_mean(str(self.overlap), OVERLAPS) or f"say one of {', '.join(OVERLAPS)}, or None"
            what, problem = f"overlap={self.overlap!r}", "there is no such way to compute products"
            raise OptionError("option overlap", what, problem, remedy)


KINDS: Mapping[str, tuple[type, str]] = {  # the type of each option, and an example
    "zero": (Zero, "Zero('dp', stage=3)"),
    "precision": (Precision, "Precision(compute=torch.bfloat16)"),
    "remat": (Remat, "Remat('blocks.*')"),
    "pipeline": (Pipeline, "Pipeline('pp', microbatches=8)"),
    "momentum": (Momentum, "Momentum(after=500)"),
    "local": (Local, "Local('dc', every=20)"),
}
