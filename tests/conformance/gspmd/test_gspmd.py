"""A share of GSPMD's cases: as many as before are right and send no more bytes than the reference."""

from __future__ import annotations

import pytest
from printed import compiled, value

from conformance.gspmd import propagation, rules
from conformance.gspmd.ops import Case
from conformance.gspmd.score import cases, entries, is_scored, score
from conformance.suite import Result
from shardc import Mesh, P

pytestmark = pytest.mark.xdist_group("gspmd")  # tests that share the results run in one worker
SMALL = 20_000  # elements of all inputs and outputs


@pytest.fixture(scope="module")
def results() -> list[tuple[Case, Result]]:
    """The results of every third small case; the suite itself scores all cases."""
    small = [case for case in cases() if case.elements <= SMALL]
    assert len(small) == 180
    return [(case, score(case)) for case in small[::3]]


@pytest.mark.share
def test_no_case_has_other_values_or_local_shapes_than_expected(results: list[tuple[Case, Result]]) -> None:
    assert [result for _, result in results if result.outcome == "wrong"] == []


@pytest.mark.share
def test_as_many_cases_are_right_and_lean_as_before(results: list[tuple[Case, Result]]) -> None:
    right = [(case, result) for case, result in results if result.outcome == "right"]
    assert len(right) == 60
    assert sum(is_scored(case) and result.facts["is_lean"] for case, result in right) >= 54


def test_dims_that_shardy_may_cut_may_be_cut() -> None:
    found = [rules.check(fields) for fields in entries("rules")]
    assert [result for result in found if result.outcome == "wrong"] == []
    assert sum(result.outcome == "right" for result in found) == 32


def test_annotations_propagate_as_in_shardy() -> None:
    found = [propagation.check(fields) for fields in entries("propagation")]
    assert [result for result in found if result.outcome == "wrong"] == []
    assert sum(result.outcome == "right" for result in found) == 37


def test_where_shardc_is_not_shardy_it_sends_no_more_bytes() -> None:
    fields = {each["name"].removeprefix("sdy/prop/"): each for each in entries("propagation")}
    found = {name: propagation.bytes_of_both(fields[name]) for name in propagation.OTHERWISE}
    assert {name: pair for name, pair in found.items() if pair[0] > pair[1]} == {}
    assert max(found.values(), key=lambda pair: pair[1] - pair[0]) == (64, 384)


def test_an_output_that_is_an_input_may_be_placed_otherwise() -> None:
    annotations = {"x": P("a", "b"), "output:0": P("b", "a")}
    program = compiled(lambda x: (x, x), Mesh(a=2, b=2), annotations, x=value(4, 4))
    assert [str(program.shardings[name]) for name in ("x", "0", "1")] == ["[_@a, _@b]", "[_@b, _@a]", "[_@a, _@b]"]
    assert [each.kind for each in program.collectives] == ["collective_permute"]


def test_a_dim_of_one_element_may_be_cut_where_the_user_says_so() -> None:
    annotations = {"x": P(None, None, "a"), "output:0": P("a", "b"), "output:1": P("b", "a")}
    program = compiled(lambda x: (x, x.reshape(6, 1) * 2), Mesh(a=3, b=2), annotations, x=value(1, 2, 3))
    assert [str(program.shardings[name]) for name in ("0", "1")] == ["[_@a, _@b, _]", "[_@b, _@a]"]


def test_dims_that_a_reshard_views_apart_stand_beside_a_cut_of_one_element() -> None:
    annotations = {"x": P("b", "a"), "output:output": P("a", "b")}
    program = compiled(lambda x: x.reshape(54, 1) + 1, Mesh(a=3, b=2), annotations, x=value(9, 6, 1))
    assert str(program.shardings["output"]) == "[_@a, _@b]"


def test_a_merge_keeps_the_cuts_of_a_dim_smaller_than_its_axes() -> None:
    program = compiled(lambda x: x.reshape(4, 4) + 1, Mesh(a=2, b=4), {"x": P(("a", "b"))}, x=value(2, 2, 4))
    assert str(program.shardings["output"]) == "[(_@a+b 2), _]"
