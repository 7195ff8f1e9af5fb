"""A command line carried out: its target loaded and compiled, what was made written, and how long it took."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.cli.arguments import DTYPES
from shardc.language.errors import ShardingError, UsageError
from shardc.language.machine import machine_of
from shardc.language.partition import P
from shardc.options import Precision

if TYPE_CHECKING:
    from shardc.api import Compiled
    from shardc.cli.target import Target


def load(options: argparse.Namespace, device: str) -> Target:
    """The target's model, inputs and annotations."""
    from shardc.cli.target import Wish, load_target

    with progress(f"loading {options.target}"):
        wish = Wish(dict(options.settings), options.batch, options.seq, device)
        return load_target(options.target, wish, options.mesh)


def annotations_of(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Those of ``--annotate``, which stand in place of an hf target's and beside a function's."""
    given: dict[str, Any] = {}
    for text in options.annotate:
        pattern, equals, spec = text.rpartition("=")
        if not pattern:
            what = "no pattern" if equals else "no '='"
            remedy = f"write --annotate '{'x' if equals else text or 'x'}={spec if equals else 'dp'}'"
            raise ShardingError(f"--annotate {text!r}", what, "an annotation reads PATTERN=SPEC", remedy)
        said = _spec(text, spec)
        if given.get(pattern, said) != said:
            what, problem = f"{spec}, and {given[pattern]}", f"two annotations of {pattern} say different things"
            raise ShardingError(f"--annotate {text!r}", what, problem, "leave one of them out")
        given[pattern] = said
    if options.target.startswith("hf:"):
        return given or dict(target.annotations)
    return {**target.annotations, **given}


def _spec(annotation: str, text: str) -> P:
    """What a SPEC says; an error names the argument and writes as one types there."""
    try:
        return P.parse(text)
    except ShardingError as error:
        remedy = f"{error.remedy}; a SPEC reads dp,-,tp: an axis, - whole, ? open, dp+tp several axes"
        raise ShardingError(f"--annotate {annotation!r}", error.what, error.problem, remedy) from None


def compile_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``compile`` that every command takes."""
    return {
        "zero": options.zero,
        "pipeline": options.pipeline,
        "remat": options.remat,
        "bucket": options.bucket,
        "strict": options.strict,
        "links": machine_of(options.links, options.device),
    }


def compiled(options: argparse.Namespace) -> Compiled:
    """The target compiled for the mesh, on meta."""
    target = load(options, device="meta")
    with progress(f"compiling for {options.mesh}"):
        return compile_target(options, target)


def compile_target(options: argparse.Namespace, target: Target) -> Compiled:
    """A target compiled as the options say."""
    from shardc.api import compile

    return compile(
        target.model, options.mesh, annotations_of(options, target), args=target.args, kwargs=target.kwargs,
        train=options.train, precision=_precision(options.precision), **compile_options(options),
    )  # fmt: skip


def _precision(name: str | None) -> Precision | None:
    if name is None:
        return None
    import torch

    return Precision(getattr(torch, DTYPES[name]))


def retyped(typed: Sequence[str], command: str, left_out: Mapping[str, bool]) -> str:
    """A command line, for a shell, as that of another command that takes the same TARGET and options.

    ``left_out``: the options that the other lacks, and whether each has a value.
    """
    kept, rest = [], iter(typed[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        own = [option for option in left_out if _names(name, option)]
        if not own:
            kept.append(word)
        elif left_out[own[0]] and not equals and (name.startswith("--") or len(name) == 2):
            next(rest, None)
    return shlex.join(["shardc", command, *kept])


def _names(word: str, option: str) -> bool:
    """Whether a word of a command line names an option: by its name, or what of it is enough; ``-oFILE`` too."""
    if option.startswith("--"):
        return len(word) > 2 and option.startswith(word)
    return word.startswith(option) and not word.startswith("--")


def write(text: str, path: str | None) -> None:
    """Write to a file, or to stdout."""
    if path is None:
        _print(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        what, remedy = f"{error.strerror}", "name a file in a folder that exists and may be written"
        raise UsageError(f"-o {path}", what, "it cannot be written", remedy) from None
    print(f"shardc: wrote {path}", file=sys.stderr)


def _print(text: str) -> None:
    problem, remedy = "it cannot be written", "write to a file: -o FILE"
    if sys.stdout is None:
        raise UsageError("stdout", "it is closed", problem, remedy)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError("stdout", f"{error.strerror}", problem, remedy) from None


@contextmanager
def progress(step: str) -> Iterator[None]:
    """Say what is being done, and how long it took; what the user's code prints meanwhile is no data of ours."""
    print(f"shardc: {step} ...", end="", flush=True, file=sys.stderr)
    start = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException:
        print(" failed", file=sys.stderr)
        raise
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr)
