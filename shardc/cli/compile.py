"""Steps that commands share: load a target, compile it for a command line, write the output, show progress."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.cli.arguments import DTYPES
from shardc.language.errors import ShardingError, UsageError
from shardc.language.machine import machine_of
from shardc.language.mesh import warnings_among
from shardc.language.partition import P
from shardc.language.text import printable
from shardc.options import Precision

if TYPE_CHECKING:
    from shardc.api import Compiled
    from shardc.cli.targets.target import Target


def compiled(options: argparse.Namespace) -> Compiled:
    """Load the target on meta tensors and compile it for ``--mesh``."""
    target = load(options, device="meta")
    with progress(f"compiling for {options.mesh}"):
        return compile_target(options, target)


def load(options: argparse.Namespace, device: str) -> Target:
    """Load the model, inputs and annotations of TARGET and report it on stderr; made-up inputs are on ``device``."""
    with progress(f"loading {options.target}"):
        target = load_quietly(options, device)
    if options.target.startswith("hf:"):
        from shardc.cli.targets.target import sizes_text

        print(printable(f"shardc: {sizes_text(options.target, target)}"), file=sys.stderr)
    return target


def load_quietly(options: argparse.Namespace, device: str) -> Target:
    """Load the model, inputs and annotations of TARGET; made-up inputs are on ``device``."""
    from shardc.cli.targets.target import TargetOptions, load_target

    target_options = TargetOptions(dict(options.settings), options.batch, options.seq, device)
    return load_target(options.target, target_options, options.mesh)


def compile_target(options: argparse.Namespace, target: Target) -> Compiled:
    """Compile a target that is loaded already."""
    import torch

    from shardc.api import compile

    precision = Precision(getattr(torch, DTYPES[options.precision])) if options.precision else None
    return compile(
        target.model, options.mesh, annotations_of(options, target), args=target.args, kwargs=target.kwargs,
        train=options.train, precision=precision, **compile_options(options),
    )  # fmt: skip


def compile_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``shardc.compile`` that every command with a mesh takes."""
    names = (
        "zero", "pipeline", "remat", "bucket", "strict", "optimizer", "attention", "wire", "saved", "momentum",
        "overlap", "local",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names} | {
        "links": machine_of(options.links, options.device, options.nodes)
    }


def annotations_of(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The annotations to compile with: ``--annotate`` replaces those of an ``hf:`` target and adds to a function's.

    Raises a ShardingError if an ``--annotate`` does not read as PATTERN=SPEC, or two contradict each other.
    """
    typed: dict[str, Any] = {}
    for text in options.annotate:
        pattern, equals, spec = text.rpartition("=")
        if not pattern:
            what = "no pattern" if equals else "no '='"
            remedy = f"write --annotate '{'x' if equals else text or 'x'}={spec if equals else 'dp'}'"
            raise ShardingError(f"--annotate {text!r}", what, "an annotation reads PATTERN=SPEC", remedy)
        try:
            parsed = P.parse(spec)
        except ShardingError as error:
            remedy = f"{error.remedy}; a SPEC reads dp,-,tp: an axis, - whole, ? open, dp+tp several axes"
            raise ShardingError(f"--annotate {text!r}", error.what, error.problem, remedy) from None
        if typed.get(pattern, parsed) != parsed:
            what, problem = f"{spec}, and {typed[pattern]}", f"two annotations of {pattern} say different things"
            raise ShardingError(f"--annotate {text!r}", what, problem, "leave one of them out")
        typed[pattern] = parsed
    if options.target.startswith("hf:"):
        return typed or dict(target.annotations)
    return {**target.annotations, **typed}


def with_warnings(text: str, notes: Iterable[str]) -> str:
    """The text, followed by a line for each note that is a warning."""
    told = warnings_among(notes)
    return "\n".join([text, *(f"{each}\n" for each in told)]) if told else text


def retyped(typed: Sequence[str], command: str, left_out: Mapping[str, bool]) -> str:
    """A line for a shell that runs ``command`` with the TARGET and options of the command line ``typed``.

    ``left_out``: the options that the other command lacks, and whether each takes a value.
    """
    words, rest = [], iter(typed[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        own = [option for option in left_out if _is_option(name, option)]
        if not own:
            words.append(word)
        elif left_out[own[0]] and not equals and (name.startswith("--") or len(name) == 2):
            next(rest, None)
    return shlex.join(["shardc", command, *words])


def _is_option(word: str, option: str) -> bool:
    """Whether a word of a command line is this option: its name, the beginning of its name, or ``-oFILE``."""
    if option.startswith("--"):
        return len(word) > 2 and option.startswith(word)
    return word.startswith(option) and not word.startswith("--")


def write(text: str, path: str | None) -> None:
    """Write a command's data to a file, or to stdout. Raises a UsageError if that fails."""
    if path is None:
        problem, remedy = "it cannot be written", "write to a file: -o FILE"
        if sys.stdout is None:
            raise UsageError("stdout", "it is closed", problem, remedy)
        try:
            sys.stdout.write(printable(text, keep="\n"))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError("stdout", f"{error.strerror}", problem, remedy) from None
        return
    try:
        Path(path).write_text(printable(text, keep="\n"), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    print(f"shardc: wrote {printable(path)}", file=sys.stderr)


def check_output(path: str | None) -> None:
    """Raise a UsageError, before long work, if ``write`` would fail: the path is a folder, or its folder is missing."""
    if path is not None and not Path(path).parent.is_dir():
        raise _unwritable(path, os.strerror(errno.ENOENT))
    if path is not None and Path(path).is_dir():
        raise _unwritable(path, os.strerror(errno.EISDIR))


def _unwritable(path: str, what: str | None) -> UsageError:
    remedy = "name a file in a folder that exists and may be written"
    return UsageError(f"-o {path}", f"{what}", "it cannot be written", remedy)


@contextmanager
def progress(step: str) -> Iterator[None]:
    """Print on stderr the step that runs now, then its duration. The output of user code goes to stderr meanwhile."""
    print(printable(f"shardc: {step} ..."), end="", flush=True, file=sys.stderr)
    start = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException:
        print(" failed", file=sys.stderr)
        raise
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr)
