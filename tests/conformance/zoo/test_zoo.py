"""A share of the model zoo: ``python -m tests.conformance zoo`` runs all of it."""

import pytest

pytest.importorskip("transformers")

from conformance.zoo.run import Case, run


@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral"])
def test_a_model_of_the_zoo_equals_the_single_device_with_no_op_run_whole(model):
    result = run(Case(model, "even", "dp=2,tp=2"))
    assert result.outcome == "right", result.detail
    assert not result.facts["fallbacks"]
