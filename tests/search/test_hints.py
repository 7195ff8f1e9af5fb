"""Hints say what would be faster with other numbers: in figures of ``compile``, and without a change of the plan."""

from __future__ import annotations

from typing import Any

import torch
from search_models import Residual

import shardc
from shardc import Local, P
from shardc.costs.step import outer_entry
from shardc.language.machine import Device, Link, Machine
from shardc.language.text import seconds_text
from shardc.search.suggestion import Suggestion

DEVICE = Device({"float32": 1e9}, 1e10)
ETHERNET = Machine({"*": Link(1e-6, 1e6, name="ethernet")}, DEVICE)
WAYS: dict[str, Any] = {"args": (torch.zeros(8, 16, dtype=torch.long),), "top": 2}
GIVEN: dict[str, Any] = {"annotations": {"ids": P("dp"), "param:*": P()}}  # no parameter is cut


def suggested(links: Machine, zero: int = 0, **ways: Any) -> tuple[Residual, Suggestion, Suggestion]:
    """A model with far more parameters than it computes, and the best two plans for it."""
    torch.manual_seed(0)
    model = Residual(width=32, hidden=128, layers=2)
    fixed = {"mesh": "2", "dp": 2, "zero": zero, "pipeline": None, "remat": None}
    first, *others = shardc.suggest(model, 2, links=links, fix=fixed, **{**WAYS, **ways})
    return model, first, others[0] if others else first


def test_hints_say_what_a_codec_and_groups_would_save_on_a_slow_link() -> None:
    model, first, second = suggested(ETHERNET, **GIVEN)
    assert first.wire is None and "local" not in first
    in_codes, in_groups = first.hints
    compiled = shardc.compile(model, args=WAYS["args"], **first)
    plain = compiled.timeline.makespan
    assert in_codes.startswith("wire={'dp gradients': 'int8'}: gradients over dp (ethernet) take ")
    coded = compiled.recompile(wire={"dp gradients": "int8"})
    sent = [sum(each.wire_bytes for each in plan.collectives) for plan in (coded, compiled)]
    assert f"in codes a step takes {seconds_text(coded.timeline.makespan)} (" in in_codes
    assert in_codes.endswith(f"and a rank sends {sent[0] / sent[1]:.1%} of the bytes") and sent[0] < 0.27 * sent[1]
    assert in_groups.startswith("local=Local('dp', every=20): ")
    alone = compiled.recompile(local=Local("dp", every=20))
    outer = outer_entry(alone.whole)
    assert outer is not None
    seconds = alone.timeline.makespan + outer.seconds / 20
    assert f"a step takes {seconds_text(seconds)} ({seconds / plain - 1:+.1%})" in in_groups
    assert first.to_json()["hints"] == [in_codes, in_groups]
    assert second is first or (not second.hints and "hints" not in second.to_json())


def test_of_zero_parameters_are_sent_in_codes_too_and_groups_cannot_train_by_themselves() -> None:
    (hint,) = suggested(ETHERNET, zero=3, annotations={"ids": P("dp")})[1].hints
    assert hint.startswith("wire={'dp gradients': 'int8', 'dp parameters': 'int8'}: gradients and parameters over dp")


def test_there_are_no_hints_where_nothing_would_be_gained() -> None:
    assert not suggested(Machine({"*": Link(1e-6, 1e10)}, DEVICE))[1].hints


def test_of_codecs_that_the_user_has_chosen_there_is_no_hint() -> None:
    _, first, _ = suggested(ETHERNET, **GIVEN, wire={"dp": "int8"})
    assert first.wire == {"dp": "int8"}
    assert all(hint.startswith("local=") for hint in first.hints)
