"""``verify``: compare the sharded program with a single device, and that with the user's eager model.

It compares outputs and every gradient in float64 and in float32, as max|a-b| / max(1, max|b|). The single device runs
the canonical program whole. The eager model runs with its random ops off. In float64, explicit casts to float32, such
as those of losses and norms in transformers, become casts to float64 in every program.

Some models magnify the rounding of float32, such as deep ones with batch norms of few images. If float32 on one device
alone exceeds the tolerance, four times its error is allowed, and the output says so.

With the option ``wire``, nodes that encode and decode run, but codes are the values themselves. So the plan is checked,
and not the error of a codec. With ``local`` one group of ranks is compared, on its part of the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.api import Compiled, compile
from shardc.capture.call import call_leaves, named_arguments, output_leaves, rebuild_call
from shardc.capture.model import borrow, computed_tensors
from shardc.capture.objects import preserved
from shardc.compiler import call_of_group
from shardc.language.mesh import Mesh
from shardc.language.sharding import dtype_name
from shardc.language.text import table
from shardc.program.program import Program, gradient_names
from shardc.runtime.simulator import interpret
from shardc.wire import VALUES

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
NUM_ROUNDINGS = 4  # two programs round, each in its own order
LOOSEST = 1e-3  # beyond this allowance float32 proves nothing, and the plain tolerance applies
Check = Literal["sharded against single device", "single device against eager"]
Values = Mapping[str, Tensor | None]  # by "output NAME" and "gradient NAME"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Functions = Mapping[Any, Callable[..., Any]]
Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance of a tensor from its expected value: ``difference`` is max|a-b| / max(1, max|b|).

    ``rounding``: the error of float32, by the same measure: the distance of one device from its value in float64, or
    that of the two compared tensors in float64, scaled to the precision of float32, if that is more. It is 0 in
    float64. ``tolerance``: that of the dtype, or ``NUM_ROUNDINGS`` times the rounding, if that is more and at most
    ``LOOSEST``.
    """

    check: Check
    dtype: str
    name: str
    difference: float
    tolerance: float
    rounding: float

    @property
    def is_small(self) -> bool:
        """Whether it is within the tolerance."""
        return self.difference <= self.tolerance

    @property
    def is_rounding(self) -> bool:
        """Whether it is small only because float32 is inexact on one device, too."""
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
    watch: Callable[[Compiled], None] = lambda compiled: None,
) -> tuple[Difference, ...]:
    """Every difference of both checks in both dtypes. The model and its inputs are copied and never changed.

    ``options``: further options of ``compile``. ``watch`` is called with each compiled model that is compared with a
    single device. Raises what ``compile`` raises.
    """
    differences: list[Difference] = []
    given = dict(options or {})
    if given.get("wire"):
        given["wire"] = {key: codec and VALUES.name for key, codec in given["wire"].items()}
        given["momentum"] = None  # it has no meaning without codes
    exact: dict[tuple[Check, str], _Exact] = {}
    for dtype in TOLERANCES:
        copied = _in_dtype(copy.deepcopy(model, computed_tensors(model)), dtype)
        own_args, own_kwargs = _converted(copied, args, kwargs or {}, dtype)
        run = _Run(copied, mesh, annotations, own_args, own_kwargs, train, given, dtype, progress, exact)
        differences += run.differences(watch)
    return tuple(differences)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with all floating-point tensors in ``dtype``: parameters, buffers, and plain tensors of its modules."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, name, value.to(dtype))
    return model.to(dtype)


def _converted(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every floating-point input in ``dtype``."""
    leaves, _ = call_leaves(model.forward, args, kwargs)
    floats = {name: value for name, value in leaves if isinstance(value, Tensor) and value.is_floating_point()}
    copies = {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in floats.items()}
    return rebuild_call(model.forward, args, kwargs, copies)


class _Exact(NamedTuple):
    """The expected tensor in float64, and the distance of the compared tensor from it."""

    expected: Tensor | None
    distance: float

    def rounding(self, expected: Tensor | None) -> float:
        """The error of float32: the larger of two distances.

        One is that of the expected tensor from its value in float64. The other is that of the two tensors in float64,
        scaled to the precision of float32, since both programs do the same in both dtypes.
        """
        units = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
        if expected is None or self.expected is None or not expected.is_floating_point():
            return 0.0
        return max(units * self.distance, difference(expected, self.expected.to(expected.dtype)))


@dataclass(frozen=True, slots=True)
class _Run:
    """A model and its inputs in one dtype. ``exact``: the results in float64, where random numbers are the same."""

    model: nn.Module
    mesh: Mesh
    annotations: Mapping[str, Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool
    options: Mapping[str, Any]
    dtype: torch.dtype
    progress: Progress
    exact: dict[tuple[Check, str], _Exact]

    def differences(self, watch: Callable[[Compiled], None]) -> Iterator[Difference]:
        """The differences of both checks. In the first both sides draw the same numbers; in the second none draws."""
        compiled = self._compile(self.model)
        watch(compiled)
        assert compiled.request is not None
        args, kwargs = call_of_group(self.model, replace(compiled.request, args=self.args, kwargs=self.kwargs))
        with self._step(self._ranks_text()), _default_dtype(self.dtype):
            sharded = _by_name(compiled.simulate(*args, **kwargs))
        single = self._on_single_device(compiled, args, kwargs)
        canonical = compiled.at("canonicalize")
        nodes = zip(canonical.inputs, canonical.placeholders, strict=True)
        draws = any(input_.kind == "random" and bool(node.users) for input_, node in nodes)
        yield from self._between("sharded against single device", sharded, single)
        quiet = self.model
        if draws:
            # evaluation mode, but for batch norms, which it would change more than random ops
            quiet = copy.deepcopy(self.model, computed_tensors(self.model))
            for module in quiet.modules():
                module.training = module.training and isinstance(module, BATCH_NORMS)
            compiled = self._compile(quiet)
            single = self._on_single_device(compiled, args, kwargs)
        with self._step("eager"), _casting_to(self.dtype, {**CASTS, **KERNELS}):
            eager = self._eager(quiet, compiled.program, args, kwargs)
        yield from self._between("single device against eager", single, eager)

    def _step(self, what: str) -> AbstractContextManager[None]:
        return self.progress(f"{dtype_name(self.dtype)}: {what}")

    def _ranks_text(self) -> str:
        local = self.options.get("local")
        if local is None:
            return f"{self.mesh.size} virtual ranks"
        return f"{local.group_mesh(self.mesh).size} virtual ranks of one group"

    def _between(self, check: Check, values: Values, expected: Values) -> Iterator[Difference]:
        """The differences of ``values`` from ``expected``, which are the two sides of a check."""
        for name in dict.fromkeys([*expected, *values]):
            reference = expected.get(name)
            distance = difference(values.get(name), reference)
            exact = self.exact.setdefault((check, name), _Exact(reference, distance))
            rounding = 0.0 if self.dtype is torch.float64 else exact.rounding(reference)
            tolerance = NUM_ROUNDINGS * rounding if NUM_ROUNDINGS * rounding <= LOOSEST else 0.0
            tolerance = max(tolerance, TOLERANCES[self.dtype])
            yield Difference(check, dtype_name(self.dtype), name, distance, tolerance, rounding)

    def _compile(self, model: nn.Module) -> Compiled:
        with self._step("compiling"), _casting_to(self.dtype):
            return compile(
                model, self.mesh, self.annotations, args=self.args, kwargs=self.kwargs, train=self.train, **self.options
            )

    def _on_single_device(self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        with self._step("single device"), _default_dtype(self.dtype):
            return _by_name(compiled.run(interpret, compiled.at("canonicalize"), args, kwargs))

    def _eager(self, model: nn.Module, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """Outputs of the user's model, and gradients of the outputs that the program starts backward from."""
        inputs = {
            name: value.detach().clone().requires_grad_(value.requires_grad)
            for name, value in call_leaves(model.forward, args, kwargs)[0]
            if isinstance(value, Tensor)
        }
        args, kwargs = rebuild_call(model.forward, args, kwargs, inputs)
        before = preserved(named_arguments(model.forward, args, kwargs))
        with borrow(model, self.train), before, torch.set_grad_enabled(self.train):
            outputs = dict(output_leaves(model(*args, **kwargs))[1])
        starts = [outputs[input_.name] for input_ in program.inputs if input_.kind == "tangent"]
        torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])
        leaves: dict[str, Mapping[str, Tensor]] = {
            "input": inputs,
            "parameter": dict(model.named_parameters(remove_duplicate=False)),
            "buffer": dict(model.named_buffers(remove_duplicate=False)),
        }
        gradients = {name: leaves[kind][key].grad for name, (kind, key) in gradient_names(program).items()}
        return _named({name: value.detach() for name, value in outputs.items()}, gradients)


def _by_name(result: tuple[Any, Mapping[str, Tensor | None]]) -> Values:
    outputs, gradients = result
    return _named(dict(output_leaves(outputs)[1]), gradients)


def _named(outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Values:
    named: dict[str, Tensor | None] = {f"output {name}": value for name, value in outputs.items()}
    return named | {f"gradient {name}": value for name, value in gradients.items()}


# Eager models in float64.


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor, **unused: Any) -> Tensor:
    """Multiply each group of rows by its own matrix, which torch's kernel cannot do in float64."""
    ends = offs.tolist()
    groups = [a[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, b, strict=False)]
    return torch.cat([*groups, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


GROUPED = ((torch, "_grouped_mm"), (nn.functional, "grouped_mm"))
CASTS: Functions = {torch.Tensor.float: torch.Tensor.double}
KERNELS: Functions = {getattr(place, name): _grouped_mm for place, name in GROUPED if hasattr(place, name)}


class _Float64Casts(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every call of torch, and some functions by others."""

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
    """Run the user's code with ``dtype`` as the default dtype. In float64 casts to float32 become casts to float64.

    ``replaced``: functions that are replaced by others in float64.
    """
    with _default_dtype(dtype), _Float64Casts(replaced) if dtype is torch.float64 else nullcontext():
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype in the block. It is the dtype of an integer tensor plus 0.5, also as a program runs."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


# Distances.


def difference(value: Tensor | None, expected: Tensor | None) -> float:
    """max|a-b| / max(1, max|b|). An absent tensor counts as zeros; infinities and NaN must be in the same places."""
    if value is None or expected is None:
        present = value if expected is None else expected
        return 0.0 if present is None else difference(present, torch.zeros_like(present))
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    value, expected = value.double(), expected.double()
    same = (value == expected) | (value.isnan() & expected.isnan())
    distance = torch.where(same, 0.0, (value - expected).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    size = expected.abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(distance.max()) / max(1.0, float(size.max()))


def differences_text(differences: Sequence[Difference], num_worst: int = 5) -> str:
    """The text form: each check with its verdict and its worst tensors."""
    parts = []
    for check, dtype in dict.fromkeys((each.check, each.dtype) for each in differences):
        ours = [each for each in differences if (each.check, each.dtype) == (check, dtype)]
        bad = [each for each in ours if not each.is_small]
        verdict = f"{len(bad)} of {len(ours)} tensors differ" if bad else f"{len(ours)} tensors agree"
        worst = sorted(ours, key=lambda each: (-each.difference, each.name))[: max(num_worst, len(bad))]
        rows = []
        for each in worst:
            rounding = f"of {each.tolerance:.1e}, four times what {dtype} is off by on one device"
            remark = rounding if each.is_rounding else "" if each.is_small else "differs"
            rows.append((each.name, f"{each.difference:.1e}", remark))
        title = f"{check}, {dtype}: {verdict} (at most {TOLERANCES[getattr(torch, dtype)]:.0e})"
        parts.append(f"{title}\n{table(('worst', 'difference', ' '), rows)}")
    return "\n".join(parts)
