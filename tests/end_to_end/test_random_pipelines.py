"""A random model in a random pipeline equals one device, or is refused with the name of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_device import assert_close
from random_model import BY_ROW, SIZES, RandomModel, Step

import shardc
from shardc import Mesh, P, Zero
from shardc.options import Pipeline

ANY = (*BY_ROW, "softmax", "transpose", "flip", "roll", "max", "batch_norm", "table")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto")
MESHES = (Mesh(pp=2), Mesh(pp=3), Mesh(dp=2, pp=2), Mesh(pp=2, tp=2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[RandomModel, torch.Tensor, Mesh, dict[str, P], Pipeline, Zero | None]:
    """A model of blocks of drawn steps, each with a weight, so that there is something to cut."""
    names = draw(st.sampled_from((BY_ROW, BY_ROW, BY_ROW, ANY)))
    drawn = draw(st.lists(st.builds(Step, st.sampled_from(names), st.integers(0, 11)), min_size=4, max_size=8))
    steps = tuple(each for step in drawn for each in (step, Step("linear", step.number)))
    width, batch, length = draw(st.sampled_from(SIZES)), draw(st.integers(1, 9)), draw(st.integers(2, 5))
    torch.manual_seed(draw(st.integers(0, 99)))
    mesh, schedule = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SCHEDULES))
    chosen = {axis: {"x": P("dp")} if axis == "dp" else {"param:weights.1": P("tp")} for axis in ("dp", "tp")}
    annotations = {key: spec for axis in mesh.axis_names if axis != "pp" for key, spec in chosen[axis].items()}
    zero = draw(st.none() | st.builds(Zero, st.just("dp"), st.sampled_from((1, 2, 3)))) if "dp" in annotations else None
    model = RandomModel(width, steps)
    x = torch.randn(batch, length, width, dtype=torch.float64)
    return model, x, mesh, annotations, Pipeline("pp", draw(st.integers(1, 5)), schedule), zero


@pytest.mark.slow
@settings(max_examples=12)
@given(cases())
def test_a_random_pipeline_equals_one_device(
    case: tuple[RandomModel, torch.Tensor, Mesh, dict[str, P], Pipeline, Zero | None],
) -> None:
    model, x, mesh, annotations, pipeline, zero = case
    loss = model(x)
    loss.backward()
    try:
        piped = shardc.parallelize(model, mesh, annotations, pipeline=pipeline, zero=zero, args=(x,))
    except shardc.ShardingError as error:
        assert "the whole batch in the middle of a step" in str(error)
        return
    found = piped(x)
    found.backward()
    assert_close(found, loss, "the loss")
    for (name, mine), theirs in zip(piped.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert_close(mine.grad, theirs.grad, name)
