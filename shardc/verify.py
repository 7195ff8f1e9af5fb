"""verify: the sharded program against a single device, and the captured program against the user's eager model.

In float64 and in float32, outputs and every gradient, as max|a-b| / max(1, max|b|). The single device runs the
canonical program whole. The eager model runs with its random ops off. In float64 explicit casts to float32, such as
those of losses and norms in transformers, become casts to float64 in all of them.
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
from shardc.borrow import borrowed
from shardc.convention import call_leaves, output_leaves, rebuild_call
from shardc.mesh import Mesh
from shardc.runtime.simulator import interpret
from shardc.text import table

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
Check = Literal["sharded against single device", "single device against eager"]
Values = Mapping[str, Tensor | None]  # "output NAME" and "gradient NAME"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # the mode changes more than what is random
Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from what it should be: ``difference`` is max|a-b| / max(1, max|b|)."""

    check: Check
    dtype: str
    name: str
    difference: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether it is within the tolerance."""
        return self.difference <= self.tolerance


def verify(
    model: nn.Module,
    mesh: Mesh,
    annotations: Mapping[str, Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = True,
    progress: Progress = lambda step: nullcontext(),
) -> tuple[Difference, ...]:
    """Every difference of every check. The model and its inputs are copied, never changed."""
    found: list[Difference] = []
    for dtype, tolerance in TOLERANCES.items():
        name = str(dtype).removeprefix("torch.")
        with _computing_in(dtype):
            own = copy.deepcopy(model).to(dtype)
            own_args, own_kwargs = _converted(own, args, kwargs or {}, dtype)
            run = _Run(own, mesh, annotations, own_args, own_kwargs, train)
            checks: dict[Check, Callable[[], tuple[Values, Values]]] = {
                "sharded against single device": run.sharded_and_single,
                "single device against eager": run.single_and_eager,
            }
            for check, compare in checks.items():
                with progress(f"{name}: {check}"):
                    values, expected = compare()
                found += _differences(check, name, tolerance, values, expected)
    return tuple(found)


@dataclass(slots=True)
class _Run:
    """A model in one dtype, and its inputs."""

    model: nn.Module
    mesh: Mesh
    annotations: Mapping[str, Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool

    def sharded_and_single(self) -> tuple[Values, Values]:
        """Random ops on: both draw from shardc's generator."""
        compiled = self._compiled(self.model)
        return _named(compiled.simulate(*self.args, **self.kwargs)), self._single(compiled)

    def single_and_eager(self) -> tuple[Values, Values]:
        """Random ops off."""
        quiet = copy.deepcopy(self.model)
        for module in quiet.modules():
            module.training = module.training and isinstance(module, BATCH_NORMS)
        compiled = self._compiled(quiet)
        return self._single(compiled), self._eager(quiet, compiled)

    def _compiled(self, model: nn.Module) -> Compiled:
        return compile(model, self.mesh, self.annotations, args=self.args, kwargs=self.kwargs, train=self.train)

    def _single(self, compiled: Compiled) -> Values:
        return _named(compiled.run(interpret, compiled.at("canonicalize"), self.args, self.kwargs))

    def _eager(self, model: nn.Module, compiled: Compiled) -> Values:
        """The user's model, with gradients of the same outputs of the same tensors."""
        inputs = {
            name: value.detach().clone().requires_grad_(value.requires_grad)
            for name, value in call_leaves(model.forward, self.args, self.kwargs)[0]
            if isinstance(value, Tensor)
        }
        args, kwargs = rebuild_call(model.forward, self.args, self.kwargs, inputs)
        with borrowed(model, self.train), torch.set_grad_enabled(self.train):
            outputs = dict(output_leaves(model(*args, **kwargs))[1])
        starts = [outputs[given.name] for given in compiled.program.inputs if given.kind == "tangent"]
        torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])
        owned = {**inputs, **dict(model.named_parameters(remove_duplicate=False))}
        names = [output.name for output in compiled.program.outputs if output.kind == "gradient"]
        gradients = {f"gradient {name}": owned[name].grad for name in names}
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


class _Float64Casts(TorchFunctionMode):
    """Whatever the model casts to or makes in float32 is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Float64Casts() if dtype is torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(default)


def _differences(check: Check, dtype: str, tolerance: float, values: Values, expected: Values) -> Iterator[Difference]:
    for name in dict.fromkeys([*expected, *values]):
        distance = difference(values.get(name), expected.get(name))
        yield Difference(check, dtype, name, distance, tolerance)


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
        rows = [(each.name, f"{each.difference:.1e}", "" if each.is_small else "differs") for each in worst]
        title = f"{check}, {dtype}: {verdict} (at most {ours[0].tolerance:.0e})"
        parts.append(f"{title}\n{table(('worst', 'difference', ' '), rows)}")
    return "\n".join(parts)
