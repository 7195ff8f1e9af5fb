"""A share of the model zoo: ``python -m tests.conformance zoo`` runs all of it."""

import pytest
from cases import few

pytest.importorskip("transformers")

from conformance.zoo import small
from conformance.zoo.run import Case, run, run_type


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
