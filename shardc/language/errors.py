"""Errors for users. Each names who (an argument or node), what it is, what does not fit, and what to do."""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def error_text(who: str, what: str, problem: str, remedy: str) -> str:
    """The four parts of an error or a warning as text."""
    return f"{who}: {what}\n  {problem}\n  {remedy}"


class UserError(Exception):
    """An error that can be pickled: Ray and process pools send errors to the process that waits for the result."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the parts; by default pickle recreates an error from its message alone."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class FourPartError(UserError):
    """An error in four parts: its subject, a description of that, the problem, and the remedy."""

    def __init__(self, who: str, what: str, problem: str, remedy: str) -> None:
        self.who, self.what, self.problem, self.remedy = who, what, problem, remedy
        super().__init__(error_text(who, what, problem, remedy))

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """The arguments of the error, from which another rank can raise the same error."""
        return self.who, self.what, self.problem, self.remedy


class ShardingError(FourPartError, ValueError):
    """A mistake in an annotation, a mesh or an input.

    ``who`` names the argument or node by path, ``what`` describes it (shape, sharding, sizes), ``problem`` says what
    does not fit, ``remedy`` what to type instead.
    """


def raise_all(errors: Sequence[ShardingError]) -> None:
    """Raise one error, of the first one's type, that lists all errors, equal problems once; do nothing without any."""
    if not errors:
        return
    groups: dict[tuple[str, str], list[ShardingError]] = {}
    for error in errors:
        groups.setdefault((error.problem, error.remedy), []).append(error)
    texts = []
    for first, *others in groups.values():
        likewise = ", ".join(error.who for error in others)
        texts.append(f"{first}\n  likewise {likewise}" if others else str(first))
    joined = type(errors[0])(*errors[0].parts)
    joined.args = ("\n".join([f"{len(texts)} problems:"] * (len(texts) > 1) + texts),)
    raise joined


class OptionError(ShardingError):
    """A mistake outside the annotations: in an option, a machine, the name of a pass or of a table."""


class UsageError(OptionError):
    """A mistake on the command line: ``who`` is the argument, ``remedy`` what to type instead."""


class CaptureError(UserError, RuntimeError):
    """A model that cannot be captured: ``who`` is the user's line or tensor, ``problem`` why, ``remedy`` a change."""

    def __init__(self, who: str, problem: str, remedy: str) -> None:
        self.who, self.problem, self.remedy = who, problem, remedy
        super().__init__(f"{who}\n  {problem}\n  {remedy}")


class OrderError(FourPartError, RuntimeError):
    """Calls in an invalid order, in the four parts of a ``ShardingError``."""


class CommunicationError(UserError, RuntimeError):
    """A collective that did not end: ``who`` is the collective with its ranks, ``problem`` names the lost rank."""

    def __init__(self, who: str, problem: str) -> None:
        self.who, self.problem = who, problem
        super().__init__(f"{who}: {problem}")


class CheckpointError(FourPartError, RuntimeError):
    """A checkpoint that cannot be written or read, in the parts of a ``ShardingError``; ``who``: the file or tensor."""


class RankError(FourPartError, RuntimeError):
    """Another rank of the job has failed: the four parts of a ``ShardingError``, with that rank's own message."""


class InternalError(FourPartError, RuntimeError):
    """A fault of shardc itself, in the four parts of a ``ShardingError``: the pass, the op and line, and the cause."""


REPORT = "this is a fault of shardc: please report it, with the traceback, the model and the annotations"


def second_backward() -> OrderError:
    """The error for a second backward through one forward; like torch's, it is a RuntimeError."""
    what, problem = "a second one through one forward", "what the forward saved is freed by the first"
    return OrderError("backward", what, problem, "say retain_graph=True in the first, or run the model once more")


_RAISED = "raised by the model at "


def note_place_in_model(error: Exception, place: str) -> None:
    """Add a note to an error that the user's code or one of its ops raised: the place in the model."""
    error.add_note(_RAISED + place)


def place_in_model(error: Exception) -> str:
    """The place in the model that ``note_place_in_model`` noted, or the empty string."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_RAISED) for note in notes if note.startswith(_RAISED)), "")


def error_line(error: BaseException) -> str:
    """The type of an error and its message, if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """``did you mean a or b?`` with the near matches of a name, or the empty string."""
    near = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""
