"""ZeRO in a pipeline: a stage gathers each parameter that it reads once a step, and reduces its gradient once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import gpt
import pytest
import torch
from measuring import measured_by_rank, without_optimizer
from pipeline_models import Model, data
from torch import Tensor, fx, nn

import shardc
from shardc import Mesh, P, Precision, Remat, Zero
from shardc.api import Compiled
from shardc.costs.count import nbytes
from shardc.costs.memory import memory_by_rank
from shardc.options import Pipeline
from shardc.program.communication import chain, members
from shardc.program.program import parameters_of
from shardc.program.stages import Stage, stages_of
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.pipeline.runner import PipelineRunner
from shardc.runtime.simulator import _stage_mesh, cut_inputs

pytestmark = pytest.mark.xdist_group("pipeline_zero")  # who shares what is made once


@dataclass(frozen=True)
class Plan:
    """A schedule and its settings, of a Model with these settings or of a GPT; ``options`` beside pipeline and zero."""

    model: Mapping[str, bool | float] | gpt.Config
    schedule: str = "1f1b"
    mesh: Mesh = field(default_factory=lambda: Mesh(dp=2, pp=2))
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, P] = field(default_factory=lambda: gpt.DATA)
    rows: int = 8

    @property
    def pipeline(self) -> Pipeline:
        """The option."""
        return Pipeline(microbatches=4, schedule=self.schedule, **self.settings)

    def made(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A model in float64, and a batch."""
        torch.manual_seed(0)
        if isinstance(self.model, gpt.Config):
            model, batch, _, _ = gpt._target(self.model, {}, batch=self.rows)
            return model.double(), batch
        return Model(**self.model).double(), data(self.rows)  # type: ignore[arg-type]

    def compiled(self, stage: Any = 3, train: bool = True) -> tuple[Compiled, tuple[Tensor, ...]]:
        """Under a stage of ZeRO, and the batch."""
        (model, args), zero = self.made(), Zero("dp", stage)
        options = {"pipeline": self.pipeline, "zero": zero, "train": train, **self.options}
        return shardc.compile(model, self.mesh, dict(self.annotations), args=args, **options), args


TIED = {"is_tied": True}
GPT = gpt.Config(vocab=20, context=6, layers=2, heads=2, width=8, fused=False, tied=True)
PLANS = {
    "1f1b, tied": Plan(TIED),
    "gpipe, frozen": Plan({"is_frozen": True}, "gpipe"),
    "interleaved, dropout": Plan(TIED | {"dropout": 0.3}, "interleaved"),
    "zb-h1, recomputed": Plan({}, "zb-h1", options={"remat": Remat("blocks.*", collectives=True)}),
    "zb-v, tied, uneven": Plan(TIED, "zb-v", Mesh(dp=3, pp=2), rows=10),
    "offload, tied": Plan(TIED, "interleaved", settings={"chunks": 3, "offload": True}),
    "1f1b, tensor": Plan(GPT, mesh=Mesh(dp=2, tp=2, pp=2), annotations=gpt.DATA | gpt.MEGATRON),
    "1f1b, budget": Plan(GPT, options={"remat": Remat(budget=25_000)}),
    "zb-h1, bfloat16": Plan(GPT, "zb-h1", options={"precision": Precision()}),
}
FAST, NARROW = "1f1b, tied", "zb-h1, bfloat16"
SWEPT = (
    "gpipe, frozen",
    "zb-h1, recomputed",
    "zb-v, tied, uneven",
    "interleaved, dropout",
    "offload, tied",
    "1f1b, tensor",
    "1f1b, budget",
)


@cache
def compiled_as(name: str, stage: int) -> tuple[Compiled, tuple[Tensor, ...]]:
    """The plan of a name under a stage of ZeRO, and the batch; compiled once."""
    return PLANS[name].compiled(stage)


def names(*fast: str, without: str = "") -> list[Any]:
    """Of plans, all but the fast ones marked as slow or as a sweep."""
    marks = {name: pytest.mark.sweep if name in SWEPT else pytest.mark.slow for name in PLANS if name != without}
    return [name if name in fast else pytest.param(name, marks=mark) for name, mark in marks.items()]


def gathered(compiled: Compiled, stage: Stage) -> Counter[str]:
    """How often a stage gathers each parameter over dp in a step."""
    parameters = {node: name for name, node in parameters_of(compiled.program).items()}
    parts = (part for node in stage.parts["once"] for part in members(node))
    moved = (_input(part.operand) for part in parts if part.kind == "all_gather" and part.args[0] == ("dp",))
    return Counter(parameters[node] for node in moved)


def _input(node: fx.Node) -> fx.Node:
    found = chain(node)
    assert found is not None, node
    return found[0].all_input_nodes[0] if found else node


def stored(compiled: Compiled, names: Iterable[str]) -> int:
    """The bytes of parameters on one rank between steps."""
    nodes = parameters_of(compiled.program)
    return sum(nbytes(compiled.program.local_type(nodes[name])) for name in names)


def announced(compiled: Compiled) -> Counter[str]:
    """Bytes by kind that the ranks of all stages send each other in a step, one of each stage."""
    found: Counter[str] = Counter()
    for each in compiled.collectives:
        if each.kind != "send":
            found[each.kind] += each.wire_bytes * each.times
    return +found


def counted(compiled: Compiled, args: tuple[Tensor, ...]) -> Counter[str]:
    """The same, on virtual ranks."""
    program = compiled.program
    assert program.mesh is not None
    comm = SimulatedComm(_stage_mesh(program.mesh))
    PipelineRunner(program, comm).forward(cut_inputs(program, compiled.inputs(program, args)))
    assert all(traffic.bytes == comm.traffic[0].bytes for traffic in comm.traffic)
    return +comm.traffic[0].bytes


@pytest.mark.parametrize("name", names(FAST))
def test_stage_3_gathers_once_for_forward_and_backward_and_one_copy_lives(name: str) -> None:
    plan = PLANS[name]
    compiled, args = compiled_as(name, 3)
    program, ranks = compiled.program, plan.mesh.axis_size("dp")
    held = [stage.parameters for stage in stages_of(program).stages]
    assert [gathered(compiled, stage) for stage in stages_of(program).stages] == list(map(Counter, held))
    narrow = 4 if name == NARROW else 1  # of float64 to bfloat16
    assert announced(compiled)["all_gather"] == (ranks - 1) * sum(stored(compiled, each) for each in held) // narrow
    memory, place = memory_by_rank(program), plan.pipeline.place(program.num_stages)
    for rank, found in enumerate(memory):
        here = (stored(compiled, names) for names, at in zip(held, place, strict=True) if at == rank)
        assert found["gathered"] == ranks * sum(here) // narrow
    assert announced(compiled) == counted(compiled, args)
    assert [without_optimizer(each, plan.pipeline.offload) for each in memory] == measured_by_rank(compiled, *args)


@pytest.mark.parametrize("name", names(FAST, without=NARROW))
def test_gradients_are_those_of_one_device(name: str) -> None:
    """Of the model itself; with dropout, which draws as shardc does, on a mesh of one rank."""
    compiled, args = compiled_as(name, 3)
    loss, gradients = compiled.simulate(*args)
    alone = PLANS[name].made()[0]
    alone = shardc.parallelize(alone, Mesh(one=1)) if "dropout" in name else alone
    expected = alone(*args)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    trained = {each: parameter.grad for each, parameter in alone.named_parameters() if parameter.requires_grad}
    torch.testing.assert_close(gradients, trained, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [FAST, NARROW])
def test_evaluation_gathers_what_training_does(name: str) -> None:
    compiled, args = PLANS[name].compiled(train=False)
    assert announced(compiled)["all_gather"] == announced(compiled_as(name, 3)[0])["all_gather"]
    assert announced(compiled) == counted(compiled, args)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", [FAST, NARROW])
def test_a_stage_moves_no_weight_that_it_does_not_read(name: str, stage: int) -> None:
    """A tied weight goes in no bucket with others of its first stage, nor gradients of one stage with another's."""
    compiled, _ = compiled_as(name, stage)
    held = stages_of(compiled.program).holders
    assert [name for name, stages in held.items() if len(stages) > 1] == [next(iter(held))]
    pieces = sum(stored(compiled, [name]) * len(stages) for name, stages in held.items())
    narrow, reduced = (4, 2) if name == NARROW else (1, 1)  # of float64 to bfloat16, and to float32
    assert announced(compiled)["all_gather"] == pieces // narrow
    assert announced(compiled)["reduce_scatter"] == pieces // reduced


def test_a_gather_is_explained_by_what_reads_it_in_its_stage() -> None:
    compiled, _ = compiled_as(FAST, 3)
    gathers = [each for each in compiled.collectives if each.kind == "all_gather" and "embed.weight" in each.cause]
    wants = [compiled.explain(each.name).wants for each in gathers]
    assert [(each.stage, each.phase) for each in gathers] == [(0, "forward"), (1, "forward")]
    assert [want and (want.op, want.module) for want in wants] == [("embedding", "embed"), ("dot", "head")]


def test_a_rank_reduces_once_what_two_of_its_stages_hold() -> None:
    """In a V the first stage and the last are on one rank, and with them both uses of a tied weight."""
    compiled, _ = replace(PLANS[FAST], schedule="zb-v").compiled()
    stages, place = stages_of(compiled.program), (0, 1, 1, 0)
    assert stages.holders["embed.weight"] == {0, 3}
    pieces = stored(compiled, stages.holders)
    assert announced(compiled)["reduce_scatter"] == pieces
    ends = [way for way in stages.crossings if way.part == "after" and place[way.source] != place[way.target]]
    assert [(way.source, way.target) for way in ends] == [(3, 1)]  # the loss, once to each rank
