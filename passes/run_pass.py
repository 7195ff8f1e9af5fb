"""One pass over a program; an error that is no user's mistake names the pass, the op and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torch import fx

from shardc.language.errors import REPORT, CaptureError, FourPartError, InternalError
from shardc.program.program import Program


def run_pass(run: Callable[[Program], Program], program: Program) -> Program:
    """The program after a pass. Raises an InternalError for any other error than one about the user's input."""
    try:
        return run(program)
    except (FourPartError, CaptureError):
        raise
    except Exception as error:
        node = _op_at(error.__traceback__)
        what = "in no op that is known" if node is None else f"at {node.target}, {program.source(node).place}"
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InternalError(f"pass {run.__name__}", what, problem, REPORT) from error


def _op_at(traceback: TracebackType | None) -> fx.Node | None:
    """The op that the innermost function of a traceback had in hand, in a variable ``node``."""
    found: fx.Node | None = None
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        found = node if isinstance(node, fx.Node) and node.op == "call_function" else found
        traceback = traceback.tb_next
    return found
