"""An argument parser whose errors say which argument, what does not fit, and what to type instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shardc.error import did_you_mean
from shardc.outcome import USAGE


class Parser(argparse.ArgumentParser):
    """An argparse parser that names near choices, commands and options, and leaves its usage to ``--help``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, _whole_number)

    def options(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The command line read, and as ``typed``; an argument that no parser has is an error of its command.

        ``given``: the names of the options that say something else than without them.
        """
        typed = sys.argv[1:] if argv is None else list(argv)
        found, rest = self.parse_known_args(typed)
        parser = self._parser_of(found)
        if rest:
            parser.refuse(rest[0])
        optional = [action for action in parser._actions if action.option_strings]
        changed = [action for action in optional if getattr(found, action.dest, action.default) != action.default]
        found.typed, found.given = typed, tuple(map(_name, changed))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its options, but ``--help``."""
        return tuple(_name(action) for action in self._actions if action.option_strings and action.dest != "help")

    def refuse(self, argument: str) -> NoReturn:
        """The error for an argument that is not known."""
        known = [option for action in self._actions for option in action.option_strings]
        remedy = did_you_mean(argument.partition("=")[0], known) or f"see {self.prog} --help for those it has"
        self.error(f"argument {argument}: unknown\n  {self.prog} has no such argument\n  {remedy}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, what the missing arguments are, and end."""
        said = message.replace(",", " ").split() if "\n" not in message else []
        lost = [action for action in self._actions if action.required and _name(action) in said]
        remedy = "".join(f"\n  give {_name(action)}: {_hint(action)}" for action in lost)
        remedy += "\n  leave one of them out" * ("not allowed with" in message)
        see = "" if "\n" in message or remedy else f"\n  see {self.prog} --help"
        self.exit(USAGE, f"{self.prog}: {message}{remedy}{see}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End, after what was printed is out: a reader that is gone is then seen in time."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            remedy = did_you_mean(str(value), known) or f"say one of {', '.join(known)}"
            problem = f"it is none of {', '.join(known)}"
            raise argparse.ArgumentError(action, f"{value!r}\n  {problem}\n  {remedy}")

    def _parser_of(self, found: argparse.Namespace) -> Parser:
        """The parser of the command that was read."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices.get(getattr(found, action.dest), self)
        return self


def unread(text: str, problem: str, remedy: str, what: str = "") -> argparse.ArgumentTypeError:
    """The error for the text of an argument, or for ``what`` in it: argparse says of which one."""
    return argparse.ArgumentTypeError(f"{text!r}{': ' * bool(what)}{what}\n  {problem}\n  {remedy}")


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _hint(action: argparse.Action) -> str:
    return action.help or ", ".join(map(str, action.choices or ()))


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise unread(text, "it is no whole number", "write digits alone, as in 8") from None
