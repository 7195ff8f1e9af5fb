"""A share of ``python -m tests.conformance draws``: the same numbers on meshes that do and do not divide the sizes."""

from __future__ import annotations

import pytest

from conformance.draws import cases, compare
from shardc import Mesh


@pytest.mark.share
@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(tp=3), Mesh(dp=2, tp=3, fsdp=2)], ids=repr)
def test_parameters_masks_and_steps_of_adam_are_those_of_one_rank(mesh: Mesh) -> None:
    assert mesh in cases()
    found = compare(mesh, steps=4)
    assert found.outcome == "right", found.detail


def test_every_mesh_is_a_case() -> None:
    assert len(cases()) == 42 + 2 * 15 and max(mesh.size for mesh in cases()) == 16
