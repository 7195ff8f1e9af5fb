"""The user's lines: which frame of a stack is neither torch's, nor ours, nor of the standard library or NumPy."""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

_GENERATED = ("<frozen", "<string", "<eval_with_key")
_DISPATCH = ("handle_torch_function", "__torch_function__")  # how torch asks a mode
_SUBCLASSES = os.path.join(os.path.dirname(torch.__file__), "_subclasses", "")  # of tensors, whose methods ask again


def user_location(frame: FrameType | None, stop: CodeType | None = None) -> str:
    """``file.py:line`` of the user's innermost frame, from ``frame`` up to the one that runs ``stop``."""
    while frame is not None and frame.f_code is not stop:
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users_line(frame: FrameType | None) -> bool:
    """Whether it is the user's line that calls the function of torch which a mode is asked for in ``frame``."""
    while frame is not None and (frame.f_code.co_name in _DISPATCH or frame.f_code.co_filename.startswith(_SUBCLASSES)):
        is_python = frame.f_code.co_name == _DISPATCH[0]  # the function itself has a frame
        frame = frame.f_back and frame.f_back.f_back if is_python else frame.f_back
    return frame is not None and _is_users(frame.f_code.co_filename)


def failing_line(error: BaseException) -> str:
    """``file.py:line: code`` of the user's innermost frame through which an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return "the model"
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"


def failing_place(error: BaseException, model: nn.Module) -> str:
    """The ``failing_line``, and the module in which it failed where that is not the model itself."""
    module = failing_module(error, model)
    return f"{failing_line(error)}{f', in {module}' if module else ''}"


def failing_module(error: BaseException, model: nn.Module) -> str:
    """``path (Class)`` of the innermost module of a model, but itself, through which an error passed; else nothing."""
    paths = {id(module): f"{path} ({type(module).__name__})" for path, module in model.named_modules() if path}
    found = [paths.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(found)), "")


@cache
def _is_users(filename: str) -> bool:
    standard = filename.startswith((sysconfig.get_paths()["stdlib"], *_GENERATED)) and "site-packages" not in filename
    standard |= f"site-packages{os.sep}numpy{os.sep}" in filename
    homes = (os.path.dirname(torch.__file__), str(Path(__file__).resolve().parents[1]))
    return not standard and not filename.startswith(tuple(home + os.sep for home in homes))
