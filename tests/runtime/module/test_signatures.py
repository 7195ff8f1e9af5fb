"""A call is compiled once for each signature; a signature holds everything that forward may see, and nothing else."""

from __future__ import annotations

import functools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.capture.signature import fingerprint

MESH = Mesh(dp=2, tp=2)


class Pair(NamedTuple):
    one: Tensor
    other: Any


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


class Model(nn.Module):
    """A linear layer and a function that is given the model and the call's arguments."""

    scale = 1.0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.drop, self.function = nn.Linear(8, 8), nn.Dropout(0.5), function
        self.sizes, self.config, self.activation = [1, 2], SimpleNamespace(scale=1.0, inner={"shift": 0}), torch.sin
        self.factor = torch.tensor(2.0, dtype=torch.float64)
        self.table, self.hidden = torch.arange(8, dtype=torch.float64), [nn.LeakyReLU(0.1)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Counted:
    """A model alone and on the mesh, and how often it was compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.alone = Model(function).double()
        self.parallel = shardc.parallelize(self.alone, MESH, {"linear.weight": P("tp")})
        self.count, compile_fn = 0, self.parallel.shardc.compile_fn

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return compile_fn(*args, **kwargs)

        self.parallel.shardc.compile_fn = counting

    def agree(self, *args: Any, **kwargs: Any) -> int:
        """The results of a call are equal; how often the model was compiled up to now."""
        found, expected = (each(*args, **kwargs) for each in (self.parallel, self.alone))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        return self.count

    def set(self, change: Callable[[Any], Any]) -> None:
        change(self.alone)
        change(self.parallel)


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 8, dtype=torch.float64).view(count, 8) / 10


def plain(self: Model, x: Tensor, scale: float = 1.0, *, shift: Any = None) -> Tensor:
    y = self.linear(x) * scale
    return y if shift is None else y + shift


def test_shapes_and_numbers_compile_once_each_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.module.call_sizes.MAX_REGIONS", 0)
    model = Counted(plain)
    calls = [((rows(n),), {"scale": s}) for n in (2, 4, 8) for s in (1.0, 2.0, 3)]
    for _ in range(2):
        for args, kwargs in calls:
            model.agree(*args, **kwargs)
    assert model.count == len(calls)


def test_how_an_argument_is_passed_does_not_matter_and_a_default_may_be_left_out() -> None:
    def forward(self: Model, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale

    class Named(Model):
        def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
            return forward(self, x, scale) + shift

    model = shardc.parallelize(Named(forward).double(), MESH, {})
    for args, kwargs in (((rows(),), {}), ((), {"x": rows()}), ((rows(), 1.0), {}), ((rows(),), {"shift": 0.0})):
        model(*args, **kwargs)
    assert len(model.shardc.variants) == 1
    model(rows(), 2.0)
    model(rows(), shift=1.0)
    assert len(model.shardc.variants) == 3


ONE_EACH: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "dtypes of an argument": (
        lambda self, x, y: self.linear(x) * y.sum(), [torch.ones(2), torch.ones(2).double(), torch.ones(2).long()]
    ),
    "True, 1 and 1.0": (lambda self, x, y: self.linear(x) * (2 if y is True else y + 3), [True, 1, 1.0]),
    "-0.0 and 0.0": (lambda self, x, y: torch.copysign(self.linear(x), torch.tensor(y)), [0.0, -0.0]),
    "None, a tensor, nothing": (lambda self, x, y: plain(self, x, shift=y), [None, torch.ones(8)]),
    "containers that nest otherwise": (
        lambda self, x, y: self.linear(x) + (y["a"] if isinstance(y, dict) else y[-1]),
        [{"a": rows()}, [rows()], (rows(),), [1, rows()], OrderedDict(a=rows()), Pair(rows(), rows(1))],
    ),
    "fields of a dataclass": (
        lambda self, x, y: self.linear(y.x) * y.scale, [Batch(rows()), Batch(rows(), 2.0), Batch(rows(2))]
    ),
    "entries of a list of numbers": (lambda self, x, y: self.linear(x) * sum(y), [[1, 2], [2, 2], [1, 2, 0]]),
    "an array": (
        lambda self, x, y: self.linear(x) * float(y.sum()),
        [numpy.zeros(5000), numpy.eye(1, 5000, 2500)[0], numpy.zeros(4999)],
    ),
    "a plain object's attributes": (
        lambda self, x, y: self.linear(x) * y.scale, [SimpleNamespace(scale=1), SimpleNamespace(scale=2)]
    ),
    "functions": (lambda self, x, y: y(self.linear(x)), [torch.sin, torch.cos, functools.partial(torch.mul, other=3)]),
    "partial functions": (
        lambda self, x, y: y(self.linear(x)), [functools.partial(torch.mul, other=k) for k in (1, 2)]
    ),
    "a set": (lambda self, x, y: self.linear(x) * len(y), [{1, 2}, {1, 3}, {1, 2, 3}]),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
def test_each_of_these_calls_is_compiled_once(name: str) -> None:
    function, values = ONE_EACH[name]
    model = Counted(function)
    for _ in range(2):
        for value in values:
            model.agree(rows(), value)
    assert model.count == len(values)


def test_an_equal_object_is_no_new_signature() -> None:
    model = Counted(lambda self, x, y: self.linear(x) * y.scale)
    for _ in range(3):
        assert model.agree(rows(), SimpleNamespace(scale=2.0)) == 1


def test_an_argument_that_changes_in_place_is_a_new_signature() -> None:
    model = Counted(lambda self, x, y: self.linear(x) * y.scale * y.more[0])
    config = SimpleNamespace(scale=2.0, more=[1])
    assert model.agree(rows(), config) == 1
    config.scale = 3.0
    assert model.agree(rows(), config) == 2
    config.more[0] = 4
    assert model.agree(rows(), config) == 3


def renamed(model: Any) -> None:
    """Another name for the last of its attributes."""
    name, value = vars(model).popitem()
    vars(model)[f"{name}_"] = value


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a number": (lambda self, x: self.linear(x) * self.drop.p, lambda model: setattr(model.drop, "p", 0.25)),
    "a list": (lambda self, x: self.linear(x) * sum(self.sizes), lambda model: model.sizes.append(3)),
    "a config": (
        lambda self, x: self.linear(x) * self.config.scale, lambda model: setattr(model.config, "scale", 2.0)
    ),
    "deep in a config": (
        lambda self, x: self.linear(x) + self.config.inner["shift"],
        lambda model: model.config.inner.update(shift=1),
    ),
    "a function": (
        lambda self, x: self.activation(self.linear(x)), lambda model: setattr(model, "activation", torch.cos)
    ),
    "a tensor of 0 dims": (lambda self, x: self.linear(x) * self.factor, lambda model: model.factor.fill_(5.0)),
    "a tensor": (
        lambda self, x: self.linear(x) + self.table, lambda model: setattr(model, "table", model.table + 1)
    ),
    "a tensor whose numbers are read": (
        lambda self, x: self.linear(x) * self.table.tolist()[0], lambda model: model.table.add_(1)
    ),
    "a tensor that is formatted": (
        lambda self, x: self.linear(x) * float(f"{self.table[1]}"), lambda model: model.table.add_(1)
    ),
    "a tensor that is branched on": (
        lambda self, x: self.linear(x) * (2 if self.table[1:].max() > 0 else 3), lambda model: model.table.neg_()
    ),
    "the data of a tensor of 0 dims": (
        lambda self, x: self.linear(x) * self.factor, lambda model: model.factor.data.fill_(5.0)
    ),
    "the size of a tensor": (lambda self, x: self.linear(x) * self.table.numel(), lambda model: model.table.resize_(9)),
    "a class": (lambda self, x: self.linear(x) * self.scale, lambda model: setattr(Model, "scale", Model.scale + 1)),
    "a module that is no child": (
        lambda self, x: self.hidden[0](self.linear(x)), lambda model: setattr(model.hidden[0], "negative_slope", 0.5)
    ),
    "training": (lambda self, x: self.linear(x) * (2 if self.training else 3), lambda model: model.eval()),
    "a hook": (
        lambda self, x: self.linear(x),
        lambda model: model.linear.register_forward_hook(lambda module, args, output: output * 2),
    ),
    "requires_grad": (lambda self, x: self.linear(x), lambda model: model.linear.bias.requires_grad_(False)),
    "a buffer": (
        lambda self, x: self.linear(x) + len(self._buffers), lambda model: model.register_buffer("new", torch.ones(()))
    ),
    "a buffer of a child": (
        lambda self, x: self.linear(x) + len(self.linear._buffers),
        lambda model: model.linear.register_buffer("new", torch.ones(())),
    ),
    "the type of a module": (
        lambda self, x: self.linear(x) * len(type(self.drop).__name__),
        lambda model: setattr(model.drop, "__class__", nn.AlphaDropout),
    ),
    "a name": (lambda self, x: self.linear(x) + sum(map(len, vars(self.drop))), lambda model: renamed(model.drop)),
    "a module": (lambda self, x: self.drop(self.linear(x)), lambda model: setattr(model, "drop", nn.Tanh())),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_an_attribute_that_forward_reads_compiles_again(name: str) -> None:
    function, change = CHANGES[name]
    model = Counted(function)
    if name == "a module":
        model.set(lambda each: each.eval())
    for _ in range(2):
        assert model.agree(rows()) == 1
    model.set(change)
    for _ in range(2):
        assert model.agree(rows()) == 2


class Counting(nn.Module):
    """Counts calls on its class, and has a logger and a tensor without numbers."""

    calls, cache, log = 0, dict[int, int](), logging.getLogger("counting")

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bits, self.shape = nn.Linear(8, 8), torch.empty((), dtype=torch.bits8), (4, 8)

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        self.cache[self.calls] = 1
        self.shape = tuple(x.shape)
        return self.linear(x)


def test_counts_and_caches_of_classes_and_loggers_compile_nothing(recwarn: pytest.WarningsRecorder) -> None:
    parallel = shardc.parallelize(Counting(), MESH, {"linear.weight": P("tp")})
    for number in range(4):
        logging.getLogger(f"counting.{number}")
        Counting.calls += 1
        parallel(torch.ones(4, 8))
    assert parallel.shardc.num_compiled == 1
    assert not [each for each in recwarn if "it changes" in str(each.message)]


def test_a_tensor_that_changes_in_place_is_read_anew_without_a_compilation() -> None:
    model = Counted(lambda self, x: self.linear(x) + self.table)
    assert model.agree(rows()) == 1
    model.set(lambda each: each.table.add_(1))
    assert model.agree(rows()) == 1


def test_gradients_on_and_off_and_a_default_dtype_are_part_of_it() -> None:
    model = Counted(lambda self, x: self.linear(x) + torch.ones(8).sum())
    assert model.agree(rows()) == 1
    with torch.no_grad():
        assert model.agree(rows()) == 2
    with torch.inference_mode():
        assert model.agree(rows()) == 2
    assert model.agree(rows().requires_grad_()) == 3
    torch.set_default_dtype(torch.float64)
    try:
        assert model.agree(rows()) == 4
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.agree(rows()) == 4


def test_more_signatures_than_are_kept_are_warned_of_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.module.runtime.MAX_PROGRAMS", 2)
    monkeypatch.setattr("shardc.runtime.module.call_sizes.MAX_REGIONS", 0)
    model = Counted(plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (2, 4, 2, 8, 2, 4):
            model.agree(rows(count))
    assert model.count == 4, "the one that was used longest ago is forgotten"
    texts = [str(warning.message) for warning in caught if "signatures" in str(warning.message)]
    assert len(texts) == 1 and len(model.parallel.shardc.variants) == 2
    assert "more than 2 signatures: dim 0 of 'args.0' had 3 sizes\n" in texts[0]


def test_an_attribute_that_changes_in_each_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.module.runtime.MAX_PROGRAMS", 2)
    model = Counted(lambda self, x: self.linear(x) * self.drop.p * self.weight)
    with pytest.warns(UserWarning, match="the last two differ in weight of the model, p of module 'drop'\n"):
        for count in range(3):
            model.set(lambda each, count=count: setattr(each, "weight", count))  # type: ignore[misc]
            model.set(lambda each, count=count: setattr(each.drop, "p", count / 4))  # type: ignore[misc]
            model.agree(rows())


def test_a_buffer_may_be_replaced_by_one_of_other_dims() -> None:
    model = Counted(lambda self, x: self.linear(x) * self.factors)
    model.set(lambda each: each.register_buffer("factors", torch.arange(8.0, dtype=torch.float64)))
    assert model.agree(rows()) == 1
    for count, factors in enumerate((torch.full((4, 8), 2.0), torch.tensor(3.0), torch.arange(8.0)), start=2):
        model.set(lambda each, factors=factors: setattr(each, "factors", factors.double()))  # type: ignore[misc]
        model.agree(rows())
        assert model.count <= count


def test_results_keep_their_containers_and_their_values_that_are_no_tensors() -> None:
    def forward(self: Model, x: Tensor) -> Any:
        y = self.linear(x)
        return {"batch": Batch(y, 3.0), "pair": Pair(y.sum(), None), "rest": [1, "a", (x, x.t(), y[0])], "none": None}

    model = Counted(forward)
    found, expected = model.parallel(rows()), model.alone(rows())
    assert list(found) == list(expected) and type(found["batch"]) is Batch and type(found["pair"]) is Pair
    assert (found["batch"].scale, found["pair"].other, found["none"], found["rest"][:2]) == (3.0, None, None, [1, "a"])
    for mine, theirs in (
        (found["batch"].x, expected["batch"].x),
        *zip(found["rest"][2], expected["rest"][2], strict=True),
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_model_without_a_tensor_in_its_result_runs() -> None:
    assert Counted(lambda self, x: None).parallel(rows()) is None
    assert Counted(lambda self, x: {"n": 3}).parallel(rows()) == {"n": 3}


def test_running_statistics_are_those_of_the_whole_batch_step_after_step() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().sum()

    alone = Normed().double()
    parallel = shardc.parallelize(alone, MESH, {"x": P("dp")})
    for each in (alone, parallel):
        for step in range(3):
            each(rows(4) * (step + 1)).backward()
        each.eval()
    for mine, theirs in zip(parallel.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(parallel(rows()), alone(rows()))


def test_freezing_tells_values_apart_and_survives_cycles() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert fingerprint(ring) == fingerprint(ring)
    assert fingerprint(float("nan")) == fingerprint(float("nan"))
    assert len({fingerprint(value) for value in (1, 1.0, True, "1", b"1", None, (1,), [1], {1: 1}, {1})}) == 10
    assert fingerprint(list(range(1000))) == fingerprint(list(range(1000)))
    assert fingerprint([0] * 10_001) != fingerprint([0] * 10_001), "one too large stands for itself alone"
