"""Plans: the annotations that their axes and decisions make."""

from __future__ import annotations

from dataclasses import replace

from shardc import P
from shardc.search.space.decision import Decision, Place
from shardc.search.space.meshes import is_possible
from shardc.search.space.plan import Axis, Plan

ROWS = Decision((Place("left", 0, 2),), frozenset({Place("left", 0, 2)}), 8, "parameters")
LEFT, RIGHT = (Place(name, 1, 2) for name in ("left", "right"))
COLUMNS = Decision((LEFT, RIGHT), frozenset({LEFT, RIGHT}), 6, "parameters")
AT_RIGHT = replace(COLUMNS, seeds=(RIGHT,))


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
