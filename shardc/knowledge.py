"""What is found out about a finished program once, and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from shardc.program import Program

Found = TypeVar("Found")


def kept(find: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """The function, with what it found of a program kept there: of one that no pass changes any more."""

    @wraps(find)
    def found(program: Program) -> Found:
        if find not in program.known:
            program.known[find] = find(program)
        result: Found = program.known[find]
        return result

    return found
