"""The options of compile and parallelize: what is stored where between uses, in which precision, what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardc.error import ShardingError, raise_all
from shardc.mesh import Mesh

if TYPE_CHECKING:
    import torch

STAGES = (1, 2, 3)
BUCKET = 25 * 2**20  # bytes, as many as DDP's


@dataclass(frozen=True, slots=True)
class Zero:
    """Between uses every parameter, its gradient and its optimizer state lie cut over one more mesh axis.

    ``stage`` 3 gathers a parameter where it is used and frees it after, in backward once more. Stages 1 and 2 keep one
    gathered copy between steps, which is gathered again once the optimizer has written the parameters. Stages 2 and 3
    reduce_scatter each gradient where it is made; stage 1 once a step, after the last backward. Source: ZeRO,
    Rajbhandari et al. 2020.
    """

    axis: str = "dp"
    stage: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ShardingError("Zero", f"stage={self.stage!r}", "there is no such stage", "say 1, 2 or 3")

    def check(self, mesh: Mesh) -> None:
        """A ShardingError where the mesh has no such axis."""
        mesh.axis_size(self.axis)


def _dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(frozen=True, slots=True)
class Precision:
    """The model computes in ``compute``, gradients are reduced in ``reduce``, parameters stay as they are.

    Floating parameters are cast before they are gathered, once after each write, and the cast copy is kept. Floating
    inputs are cast, of the model and of each module that holds parameters of its own; buffers and outputs are not, nor
    the parameters of a batch norm, which go with its running statistics. A
    gradient is cast to ``reduce`` before it is reduced, and arrives in ``gradients``, by default its parameter's dtype:
    SGD takes any, Adam of torch.optim its parameter's alone. Source: Micikevicius et al. 2018; the defaults are those
    of FSDP2's MixedPrecisionPolicy with ``cast_forward_inputs``.
    """

    compute: torch.dtype = field(default_factory=lambda: _dtype("bfloat16"))
    reduce: torch.dtype = field(default_factory=lambda: _dtype("float32"))
    gradients: torch.dtype | None = None

    def __post_init__(self) -> None:
        given = {"compute": self.compute, "reduce": self.reduce, "gradients": self.gradients or self.reduce}
        raise_all([_no_float(name, dtype) for name, dtype in given.items() if not is_float(dtype)])


def is_float(dtype: Any) -> bool:
    """Whether it is a dtype of floating-point numbers."""
    return type(dtype).__name__ == "dtype" and bool(dtype.is_floating_point)


def _no_float(name: str, dtype: Any) -> ShardingError:
    remedy = "say torch.bfloat16, torch.float16 or torch.float32"
    return ShardingError("Precision", f"{name}={dtype!r}", "it is no floating dtype", remedy)


@dataclass(frozen=True, slots=True)
class Remat:
    """What backward reads of forward is made again there, just before it is read, from less that is saved.

    ``blocks``: a glob over module paths, ``h.*``. Of the outermost modules that it matches the first and every
    ``every``-th after it keep nothing but what comes in; every 2nd halves both what is gained and what is done again.
    ``budget``: the bytes that a rank may save; what is made again is what costs least, by a minimum cut. It lives
    until its last reader, so that far below the inputs of all blocks the peak rises again.
    The result of a collective is saved and never asked for twice, unless ``collectives``: less memory, more wire.
    Sources: Chen et al. 2016; Korthikanti et al. 2022.
    """

    blocks: str = ""
    every: int = 1
    budget: int | None = None
    collectives: bool = False

    def __post_init__(self) -> None:
        if bool(self.blocks) == (self.budget is not None):
            what = "both blocks and budget" if self.blocks else "neither blocks nor budget"
            raise ShardingError(
                "Remat", what, "one of them says what is saved", "say blocks='h.*', or budget=10**9 for a gigabyte"
            )
        if self.every < 1:
            raise ShardingError("Remat", f"every={self.every}", "it counts blocks from 1", "say 1 for all, 2 for half")
        if self.budget is not None and self.budget < 0:
            raise ShardingError("Remat", f"budget={self.budget}", "bytes are not negative", "say how many may be saved")


@dataclass(frozen=True, slots=True)
class Options:
    """What a program is compiled with beside mesh and annotations.

    ``bucket``: of collectives that go together, the bytes that a rank has for them; 1 lets each go alone. A bucket is
    packed for the wire, in memory of less than twice as many bytes; larger buckets are fewer.
    """

    zero: Zero | None = None
    precision: Precision | None = None
    remat: Remat | None = None
    bucket: int = BUCKET

    def check(self, mesh: Mesh) -> None:
        """A ShardingError for an option that is of another type or does not fit the mesh."""
        given = (("zero", self.zero, Zero), ("precision", self.precision, Precision), ("remat", self.remat, Remat))
        for name, value, wanted in given:
            if value is not None and not isinstance(value, wanted):
                problem, remedy = f"it is no shardc.{wanted.__name__}", f"say {name}=shardc.{wanted.__name__}(...)"
                raise ShardingError(f"option {name}", f"{name}={value!r}", problem, remedy)
        if type(self.bucket) is not int or self.bucket < 1:
            what, remedy = f"bucket={self.bucket!r}", f"say 1 to let each go alone, or {BUCKET} as it is by default"
            raise ShardingError("option bucket", what, "it counts the bytes of collectives that go together", remedy)
        if self.zero is not None:
            self.zero.check(mesh)
