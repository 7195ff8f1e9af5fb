"""A share of the model zoo: ``python -m tests.conformance zoo`` runs all of it."""

import pytest
import torch
from cases import few

pytest.importorskip("transformers")

from conformance.zoo import small
from conformance.zoo.run import Case, reason_of, run, run_type
from shardc.verify import Difference


@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral"])
def test_a_model_of_the_zoo_equals_the_single_device_with_no_op_run_whole(model):
    result = run(Case(model, "even", "dp=2,tp=2"))
    assert result.outcome == "right", result.detail
    assert not result.facts["fallbacks"]


INPUTS = {
    "chinese_clip": {"input_ids", "pixel_values"},
    "clip": {"pixel_values", "labels"},
    "wav2vec2": {"input_values", "labels"},
    "whisper": {"input_features", "decoder_input_ids", "labels"},
    "llava": {"input_ids", "pixel_values", "labels"},
    "segformer": {"pixel_values", "labels"},
    "videomae": {"pixel_values", "labels"},
    "patchtst": {"past_values"},
    "vitdet": {"pixel_values"},
}


@pytest.mark.parametrize("model_type", few(INPUTS, "clip", "whisper", "llava"))
def test_a_type_is_built_small_with_the_inputs_that_it_takes(model_type):
    _, inputs = small.build(model_type)
    assert set(inputs) == INPUTS[model_type]


def test_any_type_of_transformers_is_a_case():
    assert len(small.types()) > 300
    result = run_type("clip")
    assert result.outcome == "right", result.detail
    assert run_type("clip_vision_model").outcome == "right"
    assert "part of another" in run_type("clipseg_vision_model").detail


class Noisy(torch.nn.Module):
    """Adds noise, also in evaluation."""

    def forward(self, x):
        return x + torch.rand(x.shape)


@pytest.mark.parametrize(
    ("float64", "float32", "rounding", "reason"),
    [
        (1e-13, 1e-2, 1e-2, "float32 has few digits"),
        (4e-10, 1e-2, 1e-2, "float32 has few digits"),
        (1e-2, 1e-2, 1e6, ""),  # wrong in float64
        (1e-13, 1e-1, 1e-2, ""),  # more than rounding
        (1e-13, 1e-2, 1e-6, ""),  # float32 has its digits
    ],
)
def test_only_rounding_that_float64_bears_out_excuses_a_type(float64, float32, rounding, reason):
    check, plain = "sharded against single device", {"float64": 1e-10, "float32": 1e-5}
    found = [
        Difference(check, dtype, "gradient bias", distance, plain[dtype], rounding)
        for dtype, distance in (("float64", float64), ("float32", float32))
    ]
    assert reason_of(found, Noisy(), {"x": torch.ones(3)}) == reason


@pytest.mark.parametrize(("model", "reason"), [(Noisy(), "draws in evaluation"), (torch.nn.Identity(), "")])
def test_what_draws_in_evaluation_cannot_be_compared_with_eager(model, reason):
    for check, expected in (("single device against eager", reason), ("sharded against single device", "")):
        found = [Difference(check, "float64", "output output", 0.5, 1e-10, 0.0)]
        inputs = {"x" if isinstance(model, Noisy) else "input": torch.ones(3)}
        assert reason_of(found, model, inputs) == expected
