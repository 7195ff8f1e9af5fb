"""What a user did wrong, said in parts: who, what is, what does not fit, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def said(who: str, what: str, problem: str, remedy: str) -> str:
    """The four parts of an error or a warning, as one reads them."""
    return f"{who}: {what}\n  {problem}\n  {remedy}"


class ShardingError(ValueError):
    """A mistake in an annotation, a mesh or an input.

    ``who`` names the argument or node by path, ``what`` says what it is (shape, sharding, sizes), ``problem`` what
    does not fit, ``remedy`` what to type instead.
    """

    def __init__(self, who: str, what: str, problem: str, remedy: str) -> None:
        self.who, self.what, self.problem, self.remedy = who, what, problem, remedy
        super().__init__(said(who, what, problem, remedy))

    @staticmethod
    def all_of(errors: Sequence[ShardingError]) -> ShardingError:
        """One error for several of one kind; the first speaks for the type, all are named.

        Those with one problem and one remedy are said once, for the first, and the others are listed under it.
        """
        alike: dict[tuple[str, str], list[ShardingError]] = {}
        for error in errors:
            alike.setdefault((error.problem, error.remedy), []).append(error)
        texts = [_said_once(group) for group in alike.values()]
        joined = type(errors[0])(errors[0].who, errors[0].what, errors[0].problem, errors[0].remedy)
        joined.args = ("\n".join([f"{len(texts)} problems:"] * (len(texts) > 1) + texts),)
        return joined


def _said_once(group: list[ShardingError]) -> str:
    others = ", ".join(error.who for error in group[1:])
    return f"{group[0]}\n  likewise {others}" if others else str(group[0])


def raise_all(errors: Sequence[ShardingError]) -> None:
    """Raise what there is, as one error; nothing where there is none."""
    if errors:
        raise ShardingError.all_of(errors)


class OptionError(ShardingError):
    """A mistake in what is asked beside annotations: in an option, a machine, the name of a pass or of a table."""


class CaptureError(RuntimeError):
    """A model that has no graph: ``who`` is the user's line or tensor, ``problem`` why, ``remedy`` what to write."""

    def __init__(self, who: str, problem: str, remedy: str) -> None:
        self.who, self.problem, self.remedy = who, problem, remedy
        super().__init__(f"{who}\n  {problem}\n  {remedy}")


class OrderError(RuntimeError):
    """Calls in an order in which they cannot be, in the four parts of a ``ShardingError``."""

    def __init__(self, who: str, what: str, problem: str, remedy: str) -> None:
        self.who, self.what, self.problem, self.remedy = who, what, problem, remedy
        super().__init__(said(who, what, problem, remedy))


def second_backward() -> OrderError:
    """The error for a backward through a forward whose values are freed, as torch's is a RuntimeError."""
    what, problem = "a second one through one forward", "what the forward saved is freed by the first"
    return OrderError("backward", what, problem, "say retain_graph=True in the first, or run the model once more")


_RAISED = "raised by the model at "


def raised_by_model(error: Exception, place: str) -> None:
    """Note on an error of the user's own code, or of an op of it, where in the model it was raised."""
    error.add_note(_RAISED + place)


def place_in_model(error: Exception) -> str:
    """Where in the model an error was raised, if it is noted."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_RAISED) for note in notes if note.startswith(_RAISED)), "")


def raised(error: BaseException) -> str:
    """The type of an error, and what it says, if anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """A sentence with the near matches of a name, or the empty string."""
    near = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""


class UsageError(OptionError):
    """A command line that cannot be followed: ``who`` is the argument, ``remedy`` what to type instead."""
