"""Annotations that are on no value of a program: of modules that it does not call, and what another says already."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardc.annotations import Matched
from shardc.error import ShardingError
from shardc.node import arguments, is_annotation
from shardc.pin import Pin
from shardc.program import Program


def unused_annotations(captured: Program, matched: Matched, asked: Collection[Pin]) -> Iterator[ShardingError]:
    """An error for each, of which a program has a note, and which ``strict`` raises; ``asked``: what was resolved."""
    used = {arguments(node)["said"] for node in captured.calls if is_annotation(node)} | {pin.text for pin in asked}
    modules = {entry.text: entry.name for entry in matched.entries if entry.kind == "module"}
    for text in matched.texts:
        if text in used:
            continue
        if text in modules:
            problem = f"the model does not call {modules[text]!r}, or nothing that it returns is a tensor"
            yield _no_effect(text, "the output of a module", problem, "annotate what is in the model")
        else:
            problem = "what it names has an annotation already, which says the same"
            yield _no_effect(text, "a pattern", problem, "annotate something else")


def idle_error(text: str) -> ShardingError:
    """The error for an annotation that changes nothing."""
    return _no_effect(text, "a pattern", "without it every value lies the same", "cut something by it")


def note_of(error: ShardingError) -> str:
    """What the dump says of one, in a line."""
    return f"{error.who} has no effect: {error.problem}; {error.remedy}"


def _no_effect(text: str, what: str, problem: str, remedy: str) -> ShardingError:
    return ShardingError(f"annotation {text}", what, problem, f"leave it out, or {remedy}")
