"""What is chosen for a whole model: products in rings where they are faster, and host memory where memory is short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from search_models import Residual

import shardc
from shardc import Mesh, P, Remat, Zero
from shardc.language.machine import Device, Link, Machine
from shardc.language.text import bytes_text
from shardc.search.suggestion import Suggestion
from shardc.verify import verify

SEQUENCE = {"*.2.weight": P(None, "tp"), "tokens": P(None, "tp")}
DATA = {"ids": P("dp")}
FIXED = {"mesh": "2", "pipeline": None}
SLOW = Device({"float32": 1e9}, 1e10, host=1e9)
LINKS = Machine({"*": Link(1e-9, 1e7)}, SLOW)


def model_of(hidden: int, layers: int) -> Residual:
    torch.manual_seed(0)
    return Residual(32, hidden, layers)


def ids_of(samples: int) -> torch.Tensor:
    return torch.randint(64, (samples, 16), generator=torch.Generator().manual_seed(1))


def check(suggestion: Suggestion, model: Residual, ids: torch.Tensor) -> None:
    """The suggestion costs what its program costs, and its numbers are those of one device."""
    program = shardc.compile(model, args=(ids,), **suggestion)
    assert (program.memory, program.timeline.makespan) == (suggestion.memory, suggestion.seconds)
    options = {name: suggestion[name] for name in suggestion if name not in ("mesh", "annotations")}
    differences = verify(model, suggestion.mesh, suggestion.annotations, args=(ids,), options=options)
    assert all(difference.is_small for difference in differences)


def test_products_are_in_rings_where_that_is_faster() -> None:
    model, ids = model_of(hidden=128, layers=2), ids_of(4)
    ways: dict[str, Any] = {"args": (ids,), "annotations": SEQUENCE}
    fixed = {**FIXED, "zero": 0, "remat": None}
    found = shardc.suggest(model, 2, links=LINKS, fix=fixed, **ways)
    first, plain = found[0], shardc.suggest(model, 2, links=LINKS, fix={**fixed, "overlap": None}, **ways)[0]
    assert (first.overlap, plain.overlap) == ("auto", None)
    check(first, model, ids)
    twin = shardc.compile(model, args=(ids,), **{**first, "overlap": None})
    assert first.seconds < 0.97 * twin.timeline.makespan
    assert twin.memory == plain.memory and twin.timeline.makespan == plain.seconds
    assert "overlap='auto')" in first.text() and "overlap='auto'" in first.summary()
    assert first.to_json()["overlap"] == "auto" and "overlap" not in plain.to_json()
    (reason,) = (each for each in first.reasons if each.startswith("overlap='auto'"))
    assert f"(+{plain.seconds / first.seconds - 1:.1%})" in reason
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert not any(each.overlap is None and each.annotations == first.annotations for each in found)


def test_products_stay_plain_where_rings_gain_nothing() -> None:
    fast = Machine({"*": Link(1e-9, 1e10)}, SLOW)
    ways: dict[str, Any] = {"args": (ids_of(4),), "annotations": SEQUENCE, "links": fast}
    found = shardc.suggest(model_of(hidden=128, layers=2), 2, fix={**FIXED, "zero": 0, "remat": None}, **ways)
    assert not any(each.overlap for each in found)


# Eight blocks over many samples: what they save is far larger than parameters.
LARGE: dict[str, Any] = {"links": LINKS, "optimizer": "sgd", "annotations": DATA}


def test_what_is_saved_goes_to_host_memory_where_that_is_faster_than_to_compute_it_again() -> None:
    model, ids = model_of(hidden=32, layers=8), ids_of(128)
    recomputed = shardc.compile(model, Mesh(dp=2), args=(ids,), remat=Remat("blocks.*"), **LARGE)
    ways = {**LARGE, "args": (ids,), "memory": recomputed.memory["peak"] + 100_000, "top": 4}
    fixed = {**FIXED, "dp": 2, "zero": 0}
    found = shardc.suggest(model, 2, fix=fixed, **ways)
    first = found[0]
    assert first.saved == {"blocks.*": "host"} and first.remat is None
    assert any(each.remat and each.saved is None and each.seconds > 1.1 * first.seconds for each in found)
    check(first, model, ids)
    assert "saved={'blocks.*': 'host'})" in first.text() and first.to_json()["saved"] == {"blocks.*": "host"}
    assert any(each.startswith("saved={'blocks.*': 'host'}: with all saved whole on") for each in first.reasons)
    below = first.memory["saved_below"]
    assert f"copies to the tier below and back: {bytes_text(2 * below)} a step" in first.reasons[-1]
    slow = Machine(LINKS.links, Device({"float32": 1e9}, 1e10, host=1e6))
    for changes in ({"fix": {**fixed, "saved": None}}, {"fix": fixed, "links": slow}):
        other = shardc.suggest(model, 2, **{**ways, **changes})[0]
        assert other.saved is None and other.remat


def test_where_nothing_fits_what_blocks_save_goes_to_host_memory_before_parameters_do() -> None:
    """Of many blocks, since some copies are under way at a time."""
    model, ids = model_of(hidden=32, layers=24), ids_of(128)
    every = shardc.compile(model, Mesh(dp=2), args=(ids,), remat=Remat("blocks.*"), zero=Zero("dp", 3), **LARGE)
    ways = {**LARGE, "args": (ids,), "memory": every.memory["peak"] - every.memory["saved"] // 3, "top": 1}
    first = shardc.suggest(model, 2, fix={**FIXED, "dp": 2, "zero": [0, 3]}, **ways)[0]
    assert first.fits and first.saved == {"blocks.*": "host"}
    assert first.zero is None or first.zero.offload is None
    check(first, model, ids)


WHOLE: dict[str, Any] = {"links": Machine({"*": "nvlink"}, "h100"), "fix": {"pipeline": None}, "top": 1}


@pytest.mark.slow
def test_no_annotation_of_the_first_suggestion_is_useless() -> None:
    """A cut of ``*.intermediate.dense.weight`` gains by the estimate, and nothing in the whole model."""
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=4))
        ids = torch.empty(128, 512, dtype=torch.int64)
    kwargs = {"input_ids": ids, "labels": ids}
    first = shardc.suggest(model, 2, kwargs=kwargs, **WHOLE)[0]
    options = {name: first[name] for name in first if name not in ("mesh", "annotations")}
    for name in first.annotations.keys() - {"input_ids", "labels"}:
        others = {each: spec for each, spec in first.annotations.items() if each != name}
        without = shardc.compile(model, first.mesh, others, kwargs=kwargs, **options)
        assert without.timeline.makespan > first.seconds


@pytest.mark.slow
def test_a_cut_that_gains_on_one_block_is_tried_on_the_whole_model() -> None:
    """The estimate for all blocks adds the wait for a gathered weight of one block to that for another."""
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        model, images = hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=4)), torch.empty(256, 3, 224, 224)
    kwargs = {"pixel_values": images, "labels": torch.empty(256, dtype=torch.int64)}
    cuts = {"pixel_values": P("dp"), "*.fc1.weight": P("dp")}
    compiled = shardc.compile(model, Mesh(dp=2), cuts, kwargs=kwargs, links=WHOLE["links"], optimizer="adamw")
    assert shardc.suggest(model, 2, kwargs=kwargs, **WHOLE)[0].seconds <= compiled.timeline.makespan


@pytest.mark.slow
def test_pairs_of_cuts_are_tried_on_the_whole_model() -> None:
    """Each of these two cuts alone makes the whole model slower."""
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        model, ids = hf.GPT2LMHeadModel(hf.GPT2Config()), torch.empty(64, 1024, dtype=torch.int64)
    kwargs, options = {"input_ids": ids, "labels": ids}, {"links": WHOLE["links"], "optimizer": "adamw"}
    data, cuts = {"input_ids": P("dp")}, {"*.c_fc.weight": P("dp"), "transformer.wpe.weight": P("dp")}
    first = shardc.suggest(model, 2, kwargs=kwargs, **WHOLE)[0]
    both, *each = [
        shardc.compile(model, Mesh(dp=2), data | further, kwargs=kwargs, **options).timeline.makespan
        for further in (cuts, *({name: spec} for name, spec in cuts.items()))
    ]
    assert first.seconds <= both < min(each)


def test_plans_may_keep_what_codes_leave_out() -> None:
    model, ids = model_of(hidden=128, layers=2), ids_of(4)
    first = shardc.suggest(model, 2, args=(ids,), wire={"dp": "1bit"}, links=LINKS, fix={**FIXED, "dp": 2}, top=1)[0]
    assert first.memory["residuals"] > 0
    check(first, model, ids)
