"""Models that are the same but for their values, captured once: a capture depends on no mesh and on no schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn

from shardc import compiler
from shardc.capture.annotations import Matched
from shardc.capture.capture import Captured
from shardc.compiler import Request

_CAPTURED: dict[tuple[str, bool], Captured] = {}


@contextmanager
def captured_once(name: str) -> Iterator[None]:
    """In the block, calls of models of one name and mode get the graph of the first of them.

    Half the time of most compiles goes into capture. The models must have equal calls, and no annotated modules.
    """
    capture_model = compiler.capture_model

    def capture(model: nn.Module, request: Request, matched: Matched) -> Captured:
        assert not matched.modules
        key = (name, request.train)
        if key not in _CAPTURED:
            _CAPTURED[key] = capture_model(model, request, matched)
        return _CAPTURED[key]

    with mock.patch.object(compiler, "capture_model", capture):
        yield
