"""What would go wrong without a word is said once, and what a module is shows at the prompt."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from parallel_models import MLP, batch
from torch import nn

import shardc
from shardc import Mesh, P, ShardingError, Zero
from shardc.language.errors import CaptureError, OptionError

DATA = {"x": P("dp")}


def said(run: Any) -> list[str]:
    """The warnings of shardc's own while something runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if each.category is UserWarning]


# Optimizers.


def test_a_step_of_an_optimizer_of_the_original_parameters_warns_once() -> None:
    model = MLP()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = shardc.parallelize(model, Mesh(dp=2), DATA)
    parallel(*batch(0)).backward()
    assert said(before.step) == [
        "a step of SGD: of parameters of the MLP that was given to parallelize, whose copy is trained\n"
        "  they have no gradients\n"
        "  give it the parameters of what parallelize returns"
    ]
    assert said(before.step) == []
    assert said(torch.optim.SGD(parallel.parameters(), lr=0.1).step) == []


def test_a_part_that_was_parallelized_after_the_optimizer_was_made_is_warned_of() -> None:
    body = MLP()
    outer = nn.ModuleDict({"body": body, "head": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    outer["body"] = shardc.parallelize(body, Mesh(dp=2), DATA)
    outer["head"](outer["body"](*batch(0)).float().reshape(1)).sum().backward()
    (text,) = said(optimizer.step)
    assert text.startswith("a step of SGD: of parameters of the MLP")


def test_a_model_that_is_trained_beside_its_parallel_copy_is_no_mistake() -> None:
    model = MLP()
    shardc.parallelize(model, Mesh(dp=2), DATA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch(0)).backward()
    assert said(optimizer.step) == []


# Meshes.


def test_an_axis_that_cuts_no_work_is_warned_of_once() -> None:
    parallel = shardc.parallelize(MLP(), Mesh(dp=2, tp=2), DATA)
    (text,) = said(lambda: parallel(*batch(0)))
    assert text.startswith("a MLP: Mesh(dp=2, tp=2)\n  axis tp cuts nothing, so that its 2 ranks do the same work\n")
    assert said(lambda: parallel.eval()(*batch(0))) == [], "compiled again, and said already"
    assert said(lambda: copy.deepcopy(parallel)(*batch(0))) == []


def test_a_later_batch_of_one_sample_is_no_idle_axis() -> None:
    parallel, (x, target) = shardc.parallelize(MLP(), Mesh(dp=2), DATA), batch(0)
    with torch.no_grad():
        assert said(lambda: (parallel(x, target), parallel(x[:1], target[:1]))) == []


def test_an_axis_that_cuts_what_is_stored_and_no_op_is_warned_of() -> None:
    (text,) = said(lambda: shardc.parallelize(MLP(), Mesh(dp=2), {}, zero=Zero("dp", 3))(*batch(0)))
    assert "axis dp cuts what is stored and no op, so that its 2 ranks do the same work" in text
    assert text.endswith("annotate the batch of an input with it, as x: P('dp')")


# Arguments.


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"zero": 3}, "say zero=shardc.Zero('dp', stage=3)"),
        ({"zero": "dp"}, "say zero=shardc.Zero('dp', stage=3)"),
        ({"remat": True}, "say remat=shardc.Remat('blocks.*')"),
        ({"precision": torch.bfloat16}, "say precision=shardc.Precision(compute=torch.bfloat16)"),
        ({"pipeline": 4}, "say pipeline=shardc.Pipeline('pp', microbatches=8)"),
        ({"zero": Zero("tp")}, "it has no such axis\n  did you mean dp?"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_before_the_first_call(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(OptionError) as refused:
        shardc.parallelize(MLP(), Mesh(dp=2), DATA, **options)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16], ids=str)
def test_an_input_of_a_wrong_dtype_is_named(dtype: torch.dtype) -> None:
    x, target = batch(0)
    parallel = shardc.parallelize(MLP(), Mesh(dp=2), DATA)
    with pytest.raises(CaptureError) as refused:
        parallel(x.to(dtype), target)
    assert ", for 'x' is " in str(refused.value) and f"give 'x' as {x.dtype}" in str(refused.value)


def test_a_product_of_two_dtypes_that_no_input_brings_names_them() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(4, 4, dtype=torch.float64)

    with pytest.raises(CaptureError, match="a product of float(32|64) and float(32|64), for 'x' is f32"):
        shardc.compile(Mixed(), Mesh(dp=2), {}, args=(torch.ones(4, 4),))


def test_torch_compile_of_a_parallel_module_is_refused() -> None:
    compiled: Any = torch.compile(shardc.parallelize(MLP(), Mesh(dp=2), DATA))
    with pytest.raises(ShardingError, match=r"torch.compile: a parallel MLP\n.*\n  say parallelize\(..., compile="):
        compiled(*batch(0))


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5)


def test_a_seed_is_given_and_does_not_depend_on_torchs() -> None:
    def drawn(seed: int, of_torch: int) -> torch.Tensor:
        parallel = shardc.parallelize(Drop(), Mesh(dp=2), DATA, seed=seed)
        torch.manual_seed(of_torch)
        found: torch.Tensor = parallel(torch.ones(64, 8))
        return found

    assert torch.equal(drawn(1, 0), drawn(1, 7)) and not torch.equal(drawn(1, 0), drawn(2, 0))
    with pytest.raises(ShardingError, match="seed"):
        shardc.parallelize(Drop(), Mesh(dp=2), DATA, seed="1")  # type: ignore[arg-type]


def test_a_seed_of_torch_after_parallelize_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    def said(after: int, **options: Any) -> list[str]:
        torch.manual_seed(10)
        parallel = shardc.parallelize(Drop(), Mesh(dp=2), DATA, **options)
        torch.manual_seed(after)
        for _ in range(2):
            parallel(torch.ones(64, 8))
        return [str(each.message) for each in recwarn if "seeded" in str(each.message)]

    assert said(10) == said(11, seed=1) == said(11, seed=0) == []
    assert said(11) == [
        "a Drop: torch was seeded after parallelize\n"
        "  its random numbers do not depend on it, but on seed=0\n"
        "  say parallelize(..., seed=)"
    ]


# The prompt.


def test_forward_has_the_signature_of_the_model() -> None:
    model = MLP()
    parallel = shardc.parallelize(model, Mesh(dp=2), DATA)
    assert inspect.signature(parallel.forward) == inspect.signature(model.forward)
    assert inspect.signature(copy.deepcopy(parallel).forward) == inspect.signature(model.forward)


def test_modules_programs_and_their_parts_are_shown_in_a_few_lines() -> None:
    annotations = {"x": P("dp"), "down.weight": P(None, "tp")}
    parallel = shardc.parallelize(MLP(), Mesh(dp=2, tp=2), annotations)
    assert repr(parallel) == "ParallelModule(MLP on Mesh(dp=2, tp=2), virtual ranks, not called yet)"
    assert parallel._repr_html_().count("<pre>") == 1
    parallel(*batch(0))
    program = parallel.program
    assert repr(parallel) == "ParallelModule(MLP on Mesh(dp=2, tp=2), virtual ranks, compiled 1 time)"
    assert repr(program).startswith("Compiled(MLP on Mesh(dp=2, tp=2): 3 collectives, ")
    assert repr(program.shardings["x"]) == "<[_@dp, _] on Mesh(dp=2, tp=2)>"
    assert repr(program.collectives[0]).startswith("<all_reduce_tp: all_reduce over tp, forward, ")
    assert f"{program.explain('x')!r}\n" == program.explain("x").text()
    shown = parallel._repr_html_()
    assert "all_reduce_tp" in shown and "memory of one rank" in shown and "P(&#x27;dp&#x27;)" in shown


def test_a_pipeline_shows_the_mesh_that_it_was_given() -> None:
    parallel = shardc.parallelize(MLP(), Mesh(pp=2, dp=2), DATA, pipeline=shardc.Pipeline(microbatches=2))
    assert repr(parallel) == "ParallelModule(MLP on Mesh(pp=2, dp=2), virtual ranks, not called yet)"
    assert repr(copy.deepcopy(parallel)) == repr(parallel)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seed": True}, r"seed: True\n  it is a whole number"),
        ({"strict": "x"}, r"strict: 'x'\n  it is yes or no"),
        ({"differentiable": "loss"}, r"differentiable: 'loss'\n.*\n  say differentiable=\('loss',\)"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_call(given: Any, text: str) -> None:
    with pytest.raises(ShardingError, match=text):
        shardc.parallelize(MLP(), Mesh(dp=2), DATA, **given)


def test_a_stage_is_a_number_and_a_compiled_model_is_refused() -> None:
    with pytest.raises(OptionError, match="stage=True"):
        Zero("dp", True)
    model = MLP()
    model.compile()
    with pytest.raises(ShardingError, match="after compile\\(\\)\n  it is compiled already\n  leave compile"):
        shardc.parallelize(model, Mesh(dp=2), DATA)
    parallel = shardc.parallelize(MLP(), Mesh(dp=2), DATA)
    with pytest.raises(ShardingError, match="torch.compile: a parallel MLP"):
        parallel.compile()
