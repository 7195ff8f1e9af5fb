"""A compiled model compiles again with other arguments as if for the first time, and keeps its capture where it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gpt
import pytest
import torch
from parallel_models import TIED, TiedModel, ids
from torch import Tensor, nn

import shardc
from shardc import CaptureError, Mesh, P, Pipeline, Precision, Remat, Zero, compiler
from shardc.api import Compiled
from shardc.compiler import Request
from shardc.language.errors import OptionError
from shardc.language.rule import RULES
from shardc.program.program import Pin
from shardc.program.text import program_text


class Net(nn.Module):
    """Two layers and a batch norm, whose buffers a step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


class Branch(nn.Module):
    """A layer of which a guard says how it is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.square().mean() if x.sum() > 0 else y.abs().mean()


MESH = Mesh(dp=2, tp=2)
TWICE = {"x": P("dp"), "up.weight": P("tp"), "*p.weight": P("tp")}
DATA, MEGATRON = {"x": P("dp")}, {"x": P("dp"), "down.weight": P(None, "tp")}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "two layers": lambda: (Net(), {"mesh": MESH, "annotations": DATA, "args": (torch.empty(8, 8),)}),
    "tied": lambda: (TiedModel(), {"mesh": MESH, "annotations": TIED, "kwargs": ids(0)}),
    "gpt": lambda: (gpt.gpt()[0], {"mesh": MESH, "annotations": gpt.MEGATRON, "args": gpt.gpt()[1]}),
    "pipelines": lambda: (
        gpt.gpt()[0], {"mesh": Mesh(pp=4), "pipeline": Pipeline(microbatches=4, schedule="auto"), "args": gpt.gpt()[1]}
    ),
    "said twice": lambda: (Net(), {"mesh": MESH, "annotations": TWICE, "args": (torch.empty(8, 8),)}),
}  # fmt: skip
# Changes that follow each other, each of the result of the one before, and whether the model is captured again.
CHANGES: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "two layers": [
        ({"annotations": MEGATRON}, False),
        ({"mesh": Mesh(dp=4, tp=2), "bucket": 1}, False),
        ({"annotations": {**DATA, "up": P("dp", "tp")}}, True),
        ({"annotations": {**DATA, "up": P("dp", "tp"), "up.weight": P("tp")}}, False),
        ({"annotations": {"output:*": P()}, "zero": Zero("dp", stage=3)}, True),
        ({"zero": Zero("tp", stage=1), "optimizer": "sgd", "links": {"dp": "infiniband"}}, False),
        ({"zero": None, "precision": Precision(torch.bfloat16)}, True),
        ({"train": False, "annotations": None}, True),
        ({"args": (torch.empty(12, 8, device="meta"),)}, True),
    ],
    "tied": [
        ({"annotations": {**TIED, "embedding.weight": P("tp")}}, False),
        ({"zero": Zero("dp", stage=2), "mesh": Mesh(tp=2, dp=4)}, False),
        ({"differentiable": ("logits",)}, True),
        ({"mesh": Mesh(dp=4), "annotations": {"head.weight": P("dp")}, "zero": None}, False),
    ],
    "gpt": [
        ({"annotations": {"*.weight": P("dp"), **gpt.DATA}, "zero": Zero("tp")}, False),
        ({"zero": None, "remat": Remat("blocks.*"), "annotations": gpt.MEGATRON}, False),
        ({"remat": Remat(budget=2**20), "strict": True}, False),
        ({"remat": Remat(budget=2**19), "bucket": 1}, False),
        ({"remat": Remat("blocks.*"), "saved": {"blocks.*": P("dp")}, "overlap": "ring"}, False),
        (
            {"remat": None, "strict": False, "mesh": Mesh(dp=2, pp=2), "pipeline": Pipeline(microbatches=2),
             "annotations": gpt.DATA}, False,
        ),
        ({"pipeline": Pipeline(microbatches=4, schedule="gpipe", balance="time")}, False),
        ({"mesh": Mesh(dp=4, pp=2), "zero": Zero("dp", stage=1)}, False),
        ({"remat": Remat("blocks.*")}, False),
    ],
    "pipelines": [
        ({"bucket": 2**20}, False),
        ({"bucket": 1}, False),
        ({"mesh": Mesh(pp=2)}, False),
        ({"remat": Remat("blocks.*")}, False),
        ({"annotations": {"*.up.weight": P("pp")}, "pipeline": None, "remat": None}, False),
    ],
    "said twice": [
        ({"bucket": 1}, False),
        ({"annotations": {**DATA, "up.weight": P("tp")}}, False),
    ],
}  # fmt: skip


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests for which a model is captured from now on."""
    found: list[Request] = []
    capture_model = compiler.capture_model

    def watched(model: nn.Module, request: Request, *rest: Any) -> Any:
        found.append(request)
        return capture_model(model, request, *rest)

    monkeypatch.setattr(compiler, "capture_model", watched)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_change_gives_what_a_fresh_compile_gives_and_leaves_the_first_as_it_was(
    name: str, captures: list[Request]
) -> None:
    model, asked = MODELS[name]()
    compiled = shardc.compile(model, **asked)
    before = printed(compiled)
    for change, is_captured in CHANGES[name]:
        count = len(captures)
        changed = compiled.recompile(**change)
        assert len(captures) == count + is_captured, change
        asked |= change
        after = printed(changed)
        assert after == printed(shardc.compile(model, **asked)), change
        assert printed(compiled) == before, change
        compiled, before = changed, after


def test_the_changed_program_runs() -> None:
    model, x = Net(), torch.randn(8, 8)
    expected = model(x)
    compiled = shardc.compile(model, MESH, DATA, args=(x,))
    loss, _ = compiled.recompile(annotations=MEGATRON, zero=Zero("dp")).simulate(x)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model.up.requires_grad_(False),
        lambda model: model.double(),
        lambda model: setattr(model, "down", nn.Sequential(nn.Linear(16, 8), nn.ReLU())),
    ],
    ids=["eval", "frozen", "dtype", "a module"],
)
def test_a_model_that_changed_is_captured_again(change: Callable[[Any], Any], captures: list[Request]) -> None:
    model = Net()
    compiled = shardc.compile(model, MESH, DATA, args=(torch.empty(8, 8),))
    compiled.recompile()
    assert len(captures) == 1
    change(model)
    arguments: dict[str, Any] = {"args": (torch.empty(8, 8, dtype=model.up.weight.dtype),)}
    changed = compiled.recompile(**arguments if model.up.weight.dtype == torch.float64 else {})
    assert len(captures) == 2
    assert printed(changed) == printed(shardc.compile(model, MESH, DATA, **arguments))


def test_a_rule_that_was_registered_since_is_used(request: pytest.FixtureRequest) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return unruled(x).sum()

    compiled = shardc.compile(Model(), MESH, {"x": P("dp")}, args=(torch.empty(8, 8, requires_grad=True),), train=False)
    assert "unruled" in compiled.dump(only="fallbacks")
    shardc.register_rule(torch.ops.recompiled.unruled.default, "a b -> a b")
    request.addfinalizer(lambda: RULES.pop(torch.ops.recompiled.unruled.default))
    assert "unruled" not in compiled.recompile().dump(only="fallbacks")


@torch.library.custom_op("recompiled::unruled", mutates_args=())
def unruled(x: Tensor) -> Tensor:
    """An op without a rule."""
    return x + 1


@unruled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_guarded_program_keeps_its_capture_and_needs_values_to_be_captured_again(captures: list[Request]) -> None:
    x = torch.ones(8, 8)
    compiled = shardc.compile(Branch(), MESH, {"x": P("dp")}, args=(x,))
    wider = compiled.recompile(mesh=Mesh(dp=4, tp=2))
    assert len(captures) == 1
    assert printed(wider) == printed(shardc.compile(compiled.model, Mesh(dp=4, tp=2), {"x": P("dp")}, args=(x,)))
    with pytest.raises(CaptureError) as caught:
        compiled.recompile(precision=Precision(torch.bfloat16))
    assert str(caught.value).endswith(
        "\n  the model has to be captured again, by values of its inputs, of which the types alone were kept"
        "\n  say args= and kwargs= too, with values"
    )
    other = compiled.recompile(args=(-x,))
    assert "abs" in other.dump() and "abs" not in compiled.dump()


ERRORS: Mapping[str, tuple[dict[str, Any], str]] = {
    "a name": (
        {"annotation": {}},
        "recompile(annotation=...): there is no such argument\n"
        "  it takes arguments of shardc.compile, but for the model\n"
        "  did you mean annotations or attention or train?",
    ),
    "a model": (
        {"model": None},
        "recompile(model=...): there is no such argument\n  it takes arguments of shardc.compile, but for the model"
        "\n  say one of annotations, args, attention, bucket, differentiable, fixed, kwargs, links, local, mesh, "
        "momentum, optimizer, overlap, pipeline, precision, remat, saved, strict, train, wire, zero",
    ),
    "the mesh alone": (
        {"mesh": Mesh(dp=8)},
        "recompile(mesh=...): fixed= has shardings on Mesh(dp=2, tp=2)\n  there are none of them on Mesh(dp=8)"
        "\n  say fixed= too, () for none",
    ),
    "an option": (
        {"zero": Zero("pp")},
        "Zero('pp'): the mesh is Mesh(dp=2, tp=2)\n  it has no such axis\n  did you mean tp or dp?",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_change_and_what_to_type(case: str) -> None:
    change, expected = ERRORS[case]
    x = torch.empty(8, 8)
    sharding = P("dp").sharding(MESH, (8, 8), "x")
    fixed = (Pin("x", "input", sharding, frozenset(), "x: P('dp')"),)
    compiled = shardc.compile(Net(), MESH, args=(x,), fixed=fixed)
    with pytest.raises(OptionError) as caught:
        compiled.recompile(**change)
    assert str(caught.value) == expected


def printed(compiled: Compiled) -> tuple[str, ...]:
    """All that there is to see of a compiled model."""
    texts = [program_text(program) for program in compiled.after.values()]
    return compiled.dump(), compiled.dump("json"), str(compiled.cost), str(compiled.memory), *texts
