"""Captures equal calls of equal models once: a capture depends on no mesh, no plan and no schedule.

Most compiles spend half of their time in capture. The key is the one by which a parallel module decides whether to
compile again: everything that a forward may read besides the values of tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardc import compiler
from shardc.capture.annotations import Matched
from shardc.capture.call import call_leaves
from shardc.capture.capture import Captured
from shardc.capture.model import state_names
from shardc.capture.model_state import model_state
from shardc.capture.signature import signature_of
from shardc.capture.values.region import Symbols
from shardc.compiler import Request
from shardc.program.opaque import Opaque

TESTS = Path(__file__).parents[1]
ABOUT_CAPTURE = ("api", "capture")  # folders whose tests capture each model anew
MOST = 64
_CAPTURED: OrderedDict[Hashable, Captured] = OrderedDict()


def is_about_capture(path: Path) -> bool:
    """Whether the tests of a file test capture itself."""
    return path.relative_to(TESTS).parts[0] in ABOUT_CAPTURE


@contextmanager
def captured_once() -> Iterator[None]:
    """Within the block, reuse the capture of an equal call of an equal model.

    Captures are not reused if annotations name modules, sizes are symbols, or a group trains by itself (``local``).
    """
    capture_model = compiler.capture_model

    def capture(model: nn.Module, request: Request, matched: Matched, symbols: Symbols | None = None) -> Captured:
        if matched.modules or symbols or request.options.local is not None:
            return capture_model(model, request, matched, symbols)
        key = _key(model, request)
        found = _CAPTURED.get(key)
        if found is None:
            found = capture_model(model, request, matched)
            if not _is_of_one_call(found):
                _CAPTURED[key] = found
                if len(_CAPTURED) > MOST:
                    _CAPTURED.popitem(last=False)
        return found

    with mock.patch.object(compiler, "capture_model", capture):
        yield


def _is_of_one_call(captured: Captured) -> bool:
    """Whether a capture depends on values, or holds tensors or functions, that can differ in an equal call."""
    program = captured.program
    is_opaque = any(isinstance(node.target, Opaque) for node in program.calls)
    is_guarded = any(output.kind == "guard" for output in program.outputs)
    return is_opaque or is_guarded or bool(captured.convention.constants)


def _key(model: nn.Module, request: Request) -> Hashable:
    leaves, tree = call_leaves(model.forward, request.args, request.kwargs)
    parameters, buffers, _ = state_names(model)
    passed = {name: value for name, value in leaves if isinstance(value, torch.Tensor)}
    tensors = {**parameters, **buffers, **passed}
    types: Any = tuple((name, each.dtype, each.device) for name, each in tensors.items())
    signature = signature_of(leaves, tree, request.train, model_state(model, has_classes=True))
    return signature, types, request.differentiable, request.options.precision
