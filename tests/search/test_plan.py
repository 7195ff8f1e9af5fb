"""Plans: the annotations that their axes and decisions make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from search_models import chain

from shardc import P
from shardc.capture.annotations import named_by
from shardc.capture.call import names_of
from shardc.search.space.decision import Decision, Place
from shardc.search.space.meshes import is_possible
from shardc.search.space.plan import Axis, Plan
from shardc.search.space.shorten import shortened

ROWS = Decision((Place("left", 0, 2),), frozenset({Place("left", 0, 2)}), 8, "parameters")
LEFT, RIGHT = (Place(name, 1, 2) for name in ("left", "right"))
COLUMNS = Decision((LEFT, RIGHT), frozenset({LEFT, RIGHT}), 6, "parameters")
AT_RIGHT = replace(COLUMNS, seeds=(RIGHT,))

NAMES = names_of(chain(8, 16, 8, 32), (torch.empty(4, 8),), {})


def cuts(annotations: dict[str, P]) -> dict[tuple[str, str], P]:
    """The spec of each value that annotations match."""
    return {value: spec for pattern, spec in annotations.items() for value in named_by(pattern, NAMES)}


def test_a_decision_is_annotated_in_a_tensor_that_its_axis_does_not_cut_yet() -> None:
    plan = Plan((Axis("tp", 2, frozenset({ROWS, COLUMNS})),))
    assert plan.annotations == {"left": P("tp", ...), "right": P(P.OPEN, "tp", ...)}


def test_a_dim_at_which_two_axes_are_annotated_is_cut_by_both() -> None:
    """A decision and its copy for another seed are two decisions; the first one moves to the seed of the second."""
    outer, inner = Axis("dp", 3, frozenset({AT_RIGHT})), Axis("tp", 2, frozenset({ROWS, COLUMNS}))
    rows = {"left": P("tp", ...)}
    assert Plan((outer, inner)).annotations == {**rows, "right": P(P.OPEN, ("dp", "tp"), ...)}
    assert Plan((inner, outer)).annotations == {**rows, "right": P(P.OPEN, ("tp", "dp"), ...)}


def test_a_decision_and_its_copy_cut_the_same_dims_for_both_axes() -> None:
    outer, inner = Axis("dp", 3, frozenset({AT_RIGHT})), Axis("tp", 2, frozenset({COLUMNS}))
    assert is_possible([outer, inner])
    assert not is_possible([outer, replace(inner, size=3)])


@pytest.mark.parametrize(
    ("annotations", "merged"),
    [
        ({"0.weight": P("tp"), "1.weight": P("tp"), "2.weight": P("tp")}, {"*.weight": P("tp")}),
        ({"0.weight": P("tp"), "2.weight": P("tp")}, {"[02].weight": P("tp")}),
        ({"0.weight": P("tp"), "1.weight": P(None, "tp"), "2.weight": P("tp")},
         {"[02].weight": P("tp"), "1.weight": P(None, "tp")}),
        ({"0.weight": P("tp"), "[12].weight": P("tp")}, {"*.weight": P("tp")}),
        ({"[!2].weight": P("tp"), "2.weight": P("tp")}, {"*.weight": P("tp")}),
        ({"param:0.weight": P("tp"), "input:input": P("dp")}, {"0.weight": P("tp"), "input": P("dp")}),
    ],
)  # fmt: skip
def test_one_glob_stands_for_annotations_that_differ_in_a_number(
    annotations: dict[str, P], merged: dict[str, P]
) -> None:
    plan = Plan((), written=tuple(annotations.items()))
    assert shortened(plan, NAMES, lambda changed: cuts(changed) == cuts(annotations)) == merged


def test_annotations_of_the_user_stay_as_they_are() -> None:
    annotations = {"0.weight": P("tp"), "1.weight": P("tp"), "2.weight": P("tp")}
    plan = Plan((), given=(("0.weight", P("tp")),), written=tuple(annotations.items()))
    short = shortened(plan, NAMES, lambda changed: cuts(changed) == cuts(annotations))
    assert short == {"0.weight": P("tp"), "[12].weight": P("tp")}
