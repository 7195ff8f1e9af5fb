"""Pipelines: stages along an axis, microbatches and their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardc.language.errors import OptionError, did_you_mean, raise_all
from shardc.language.mesh import MICROBATCH, Mesh
from shardc.schedules.orders import CHUNKED, LINEAR, ORDERS, fits, looped_place, v_place

from .axis import check_axis

Balance = Literal["params", "flops", "time", "memory"]
BALANCES: tuple[str, ...] = get_args(Balance)
SCHEDULES = (*ORDERS, "auto")
MICROBATCHES, CHUNKS = 2**10, 2**10  # at most: a schedule lists every one


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Cut the model in stages along one mesh axis, and the batch in microbatches that follow each other.

    ``balance``: the quantity that is even over the stages. ``cuts``: globs over the paths of modules that begin a
    stage; a model may also call ``shardc.stage_boundary()``. ``schedule``: ``gpipe``, ``1f1b``, ``interleaved``,
    ``interleaved-zb``, ``zb-h1``, ``zb-h2``, ``zb-v`` or ``auto``. ``chunks``: the number of stages on each rank, by
    default 2 for ``interleaved``, ``interleaved-zb`` and ``zb-v``, 1 or 2 by estimated times for ``auto``, and else 1.
    If ranks have several stages, cuts may be even over ranks or over stages; those whose schedule ends first by
    estimated times are taken.
    ``max_memory``: bytes of a rank for its stages' parameters, gradients, Adam states and saved values. Stages are cut,
    and ``auto`` chooses, to fit into them.
    ``batch``: by name of an input, the dim that is cut in microbatches, or None if no dim is; by default dim 0 of all
    inputs that have the length of the first one there. ``loss_scale``: the ``torch.amp.GradScaler`` that scales the
    loss. Its scale is the gradient that backward starts from, since a pipeline runs backward before the loss is scaled;
    without it small float16 gradients would be lost.
    ``offload``: a device holds only the stage that its rank works on, and the next one, which is on its way. The others
    are in host memory, with the saved activations of their microbatches and the sums of their gradients. Parameters are
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
        """Raise an OptionError if the mesh lacks the axis, or has one with the name of the axis of microbatches."""
        check_axis(f"Pipeline({self.axis!r})", self.axis, mesh)
        if MICROBATCH in mesh.axis_names:
            problem = f"its axis {MICROBATCH!r} is the name of an axis of ours"
            raise OptionError("Pipeline", f"{mesh}", problem, "name it otherwise")

    def num_stages(self, mesh: Mesh) -> int:
        """The number of stages of the model: the ranks along the axis, times the stages of each."""
        return mesh.axis_size(self.axis) * self.chunks_a_rank

    @property
    def chunks_a_rank(self) -> int:
        """The number of stages on each rank."""
        return self.chunks or (2 if self.schedule in CHUNKED else 1)

    def place(self, num_stages: int) -> tuple[int, ...]:
        """The rank of each stage along the axis. With several a rank, ``auto`` places them in a V, as ``zb-v`` does."""
        is_v = self.schedule in ("zb-v", "auto")
        return (v_place if is_v else looped_place)(num_stages, num_stages // self.chunks_a_rank)

    def stage_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the ranks of one stage: all axes but the pipeline's; one rank if there is no other axis."""
        others = {name: size for name, size in mesh.sizes.items() if name != self.axis}
        return self._mesh(others or {self.axis: 1})

    def compute_mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the program: an axis of microbatches, and the ranks of one stage."""
        return self._mesh({MICROBATCH: self.microbatches, **self.stage_mesh(mesh).sizes})

    def _mesh(self, sizes: Mapping[str, int]) -> Mesh:
        mesh = Mesh(device_ids=None, **sizes)
        mesh.stage_axis = self.axis
        return mesh
