"""A check of the axes that an option names."""

from __future__ import annotations

from shardc.language.errors import OptionError, ShardingError
from shardc.language.mesh import Mesh


def check_axis(who: str, axis: str, mesh: Mesh) -> None:
    """Raise an OptionError about the option ``who`` if the mesh has no such axis."""
    try:
        mesh.axis_size(axis)
    except ShardingError as error:
        raise OptionError(who, error.what, error.problem, error.remedy) from None
