"""verify: the sharded program against a single device, and the captured program against the user's eager model.

In float64 and in float32, outputs and every gradient, as max|a-b| / max(1, max|b|). The single device runs the
canonical program whole. The eager model runs with its random ops off. In float64 explicit casts to float32, such as
those of losses and norms in transformers, become casts to float64 in all of them.

Some models magnify what float32 rounds, such as deep ones with batch norms of few images. A tensor that float32 puts
further than the tolerance from float64 on one device already is held to four times that distance, and is said to be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.api import Compiled, compile
from shardc.capture.call import call_leaves, output_leaves, rebuild_call
from shardc.capture.model import borrow, computed_tensors
from shardc.language.mesh import Mesh
from shardc.language.sharding import dtype_name
from shardc.language.text import table
from shardc.program.program import Program, gradient_names
from shardc.runtime.simulator import interpret

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
NUM_ROUNDINGS = 4  # two programs round, each in its own order
LOOSEST = 1e-3  # beyond it float32 says nothing of a tensor
Check = Literal["sharded against single device", "single device against eager"]
Values = Mapping[str, Tensor | None]  # "output NAME" and "gradient NAME"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Functions = Mapping[Any, Callable[..., Any]]
GROUPED = ((torch, "_grouped_mm"), (nn.functional, "grouped_mm"))
Watch = Callable[[Compiled], None]
Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from what it should be: ``difference`` is max|a-b| / max(1, max|b|).

    ``tolerance``: that of the dtype, or what float32 itself does to the tensor, where that is more.
    """

    check: Check
    dtype: str
    name: str
    difference: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether it is within the tolerance."""
        return self.difference <= self.tolerance

    @property
    def is_rounding(self) -> bool:
        """Whether it is small only beside what float32 does to the tensor on one device."""
        return self.is_small and self.difference > TOLERANCES[getattr(torch, self.dtype)]


def verify(
    model: nn.Module,
    mesh: Mesh,
    annotations: Mapping[str, Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = True,
    options: Mapping[str, Any] | None = None,
    progress: Progress = lambda step: nullcontext(),
    watch: Watch = lambda compiled: None,
) -> tuple[Difference, ...]:
    """Every difference of every check. The model and its inputs are copied, never changed.

    ``options``: further ones of ``compile``. ``watch`` is given each program whose numbers are compared with those of a
    single device.
    """
    found: list[Difference] = []
    exact: dict[str, Tensor] = {}
    for dtype in TOLERANCES:
        own = copy.deepcopy(model, computed_tensors(model)).to(dtype)
        own_args, own_kwargs = _converted(own, args, kwargs or {}, dtype)
        run = _Run(own, mesh, annotations, own_args, own_kwargs, train, options or {}, dtype, progress, watch, exact)
        found += run.differences()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Run:
    """A model in one dtype, and its inputs. ``exact``: what a single device makes in float64, if nothing is drawn."""

    model: nn.Module
    mesh: Mesh
    annotations: Mapping[str, Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool
    options: Mapping[str, Any]
    dtype: torch.dtype
    progress: Progress
    watch: Watch
    exact: dict[str, Tensor]

    def differences(self) -> Iterator[Difference]:
        """Sharded and single device draw alike from shardc's generator; against eager nothing is drawn."""
        compiled = self._compiled(self.model)
        self.watch(compiled)
        with self._step(f"{self.mesh.size} virtual ranks"):
            sharded = _named(compiled.simulate(*self.args, **self.kwargs))
        single = self._single(compiled)
        draws = _draws(compiled.at("canonicalize"))
        if self.dtype is torch.float64 and not draws:
            self.exact.update({name: value for name, value in single.items() if value is not None})
        yield from self._between("sharded against single device", sharded, single)
        quiet = self.model
        if draws:
            quiet = _without_random_ops(self.model)
            compiled = self._compiled(quiet)
            single = self._single(compiled)
        with self._step("eager"), _casting_to(self.dtype, {**CASTS, **KERNELS}):
            eager = self._eager(quiet, compiled.program)
        yield from self._between("single device against eager", single, eager)

    def _step(self, what: str) -> AbstractContextManager[None]:
        return self.progress(f"{dtype_name(self.dtype)}: {what}")

    def _between(self, check: Check, values: Values, expected: Values) -> Iterator[Difference]:
        for name in dict.fromkeys([*expected, *values]):
            apart = difference(values.get(name), expected.get(name))
            yield Difference(check, dtype_name(self.dtype), name, apart, self._tolerance(name, expected.get(name)))

    def _tolerance(self, name: str, expected: Tensor | None) -> float:
        exact = self.exact.get(name)
        if expected is None or exact is None or self.dtype is torch.float64 or not expected.is_floating_point():
            return TOLERANCES[self.dtype]
        rounded = NUM_ROUNDINGS * difference(expected, exact.to(expected.dtype))
        return max(TOLERANCES[self.dtype], rounded if rounded <= LOOSEST else 0.0)

    def _compiled(self, model: nn.Module) -> Compiled:
        with self._step("compiling"), _casting_to(self.dtype):
            return compile(
                model, self.mesh, self.annotations, args=self.args, kwargs=self.kwargs, train=self.train, **self.options
            )

    def _single(self, compiled: Compiled) -> Values:
        with self._step("single device"):
            return _named(compiled.run(interpret, compiled.at("canonicalize"), self.args, self.kwargs))

    def _eager(self, model: nn.Module, program: Program) -> Values:
        """The user's model, with gradients of the same outputs of the same tensors."""
        inputs = {
            name: value.detach().clone().requires_grad_(value.requires_grad)
            for name, value in call_leaves(model.forward, self.args, self.kwargs)[0]
            if isinstance(value, Tensor)
        }
        args, kwargs = rebuild_call(model.forward, self.args, self.kwargs, inputs)
        with borrow(model, self.train), torch.set_grad_enabled(self.train):
            outputs = dict(output_leaves(model(*args, **kwargs))[1])
        starts = [outputs[given.name] for given in program.inputs if given.kind == "tangent"]
        torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])
        owned: dict[str, Mapping[str, Tensor]] = {
            "input": inputs,
            "parameter": dict(model.named_parameters(remove_duplicate=False)),
            "buffer": dict(model.named_buffers(remove_duplicate=False)),
        }
        gradients = {f"gradient {name}": owned[kind][key].grad for name, (kind, key) in gradient_names(program).items()}
        return {**{f"output {name}": value.detach() for name, value in outputs.items()}, **gradients}


def _converted(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every floating input in ``dtype``."""
    leaves, _ = call_leaves(model.forward, args, kwargs)
    floats = {name: value for name, value in leaves if isinstance(value, Tensor) and value.is_floating_point()}
    ours = {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in floats.items()}
    return rebuild_call(model.forward, args, kwargs, ours)


def _named(result: tuple[Any, Mapping[str, Tensor | None]]) -> Values:
    outputs, gradients = result
    named: dict[str, Tensor | None] = {f"output {name}": value for name, value in output_leaves(outputs)[1]}
    return named | {f"gradient {name}": value for name, value in gradients.items()}


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor, **unused: Any) -> Tensor:
    """Each group of rows with its own matrix, which torch's kernel does not do in float64."""
    ends = offs.tolist()
    groups = [a[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, b, strict=False)]
    return torch.cat([*groups, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


CASTS: Functions = {torch.Tensor.float: torch.Tensor.double}
KERNELS: Functions = {getattr(place, name): _grouped_mm for place, name in GROUPED if hasattr(place, name)}


class _Float64Casts(TorchFunctionMode):
    """Whatever the model casts to or makes in float32 is float64."""

    def __init__(self, replaced: Functions) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = self.replaced.get(func, func)
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def _casting_to(dtype: torch.dtype, replaced: Functions = CASTS) -> Iterator[None]:
    """The user's code runs with ``dtype`` as default, and its casts to float32 are to ``dtype``.

    ``replaced``: functions that run as others in float64.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Float64Casts(replaced) if dtype is torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(default)


def _draws(program: Program) -> bool:
    """Whether a random op is left."""
    nodes = zip(program.inputs, program.placeholders, strict=True)
    return any(given.kind == "random" and bool(node.users) for given, node in nodes)


def _without_random_ops(model: nn.Module) -> nn.Module:
    """A copy in the mode of evaluation, save for batch norms, which that mode would change more than in their draws."""
    quiet = copy.deepcopy(model, computed_tensors(model))
    for module in quiet.modules():
        module.training = module.training and isinstance(module, BATCH_NORMS)
    return quiet


def difference(value: Tensor | None, expected: Tensor | None) -> float:
    """max|a-b| / max(1, max|b|); an absent tensor is zero, and infinities and NaN must stand in the same places."""
    if value is None or expected is None:
        present = value if expected is None else expected
        return 0.0 if present is None else difference(present, torch.zeros_like(present))
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    value, expected = value.double(), expected.double()
    same = (value == expected) | (value.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (value - expected).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    size = expected.abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(apart.max()) / max(1.0, float(size.max()))


def differences_text(found: Sequence[Difference], num_worst: int = 5) -> str:
    """Each check with its worst tensors, and whether it holds."""
    parts = []
    for check, dtype in dict.fromkeys((each.check, each.dtype) for each in found):
        ours = [each for each in found if (each.check, each.dtype) == (check, dtype)]
        bad = [each for each in ours if not each.is_small]
        verdict = f"{len(bad)} of {len(ours)} tensors differ" if bad else f"{len(ours)} tensors agree"
        worst = sorted(ours, key=lambda each: (-each.difference, each.name))[: max(num_worst, len(bad))]
        rows = [(each.name, f"{each.difference:.1e}", _remark(each)) for each in worst]
        title = f"{check}, {dtype}: {verdict} (at most {TOLERANCES[getattr(torch, dtype)]:.0e})"
        parts.append(f"{title}\n{table(('worst', 'difference', ' '), rows)}")
    return "\n".join(parts)


def _remark(found: Difference) -> str:
    if found.is_rounding:
        return f"of {found.tolerance:.1e}, four times what {found.dtype} is off by on one device"
    return "" if found.is_small else "differs"
