"""The command line: ``shardc dump``, ``shardc verify`` and ``shardc stages``. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.arguments import DTYPES, parser
from shardc.error import ShardingError
from shardc.mesh import Mesh
from shardc.options import Precision
from shardc.partition import P

if TYPE_CHECKING:
    from shardc.target import Target

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; argparse itself exits with 2."""
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except Exception:
        traceback.print_exc()
        return INTERNAL


def _run(options: argparse.Namespace) -> int:
    from shardc.capture import CaptureError
    from shardc.target import UsageError

    commands = {"dump": _dump, "verify": _verify, "stages": _stages}
    try:
        return commands[options.command](options)
    except UsageError as error:
        return _complain(error, USAGE)
    except (CaptureError, NotImplementedError) as error:
        return _complain(error, CAPTURE_FAILED)
    except ShardingError as error:
        return _complain(error, BAD_ANNOTATION)


def _complain(error: Exception, code: int) -> int:
    print(f"shardc: {error}", file=sys.stderr)
    return code


def _annotations(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for text in options.annotate:
        pattern, equals, spec = text.rpartition("=")
        if not equals:
            raise ShardingError(
                f"--annotate {text!r}", "no '='", "an annotation reads PATTERN=SPEC", f"write --annotate '{text}=dp'"
            )
        given[pattern] = P.parse(spec)
    if options.target.startswith("hf:"):
        return given or dict(target.annotations)
    return {**target.annotations, **given}


def _compile_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``compile`` that every command takes."""
    return {
        "zero": options.zero,
        "pipeline": options.pipeline,
        "remat": options.remat,
        "bucket": options.bucket,
    }


def _precision(name: str | None) -> Precision | None:
    if name is None:
        return None
    import torch

    return Precision(getattr(torch, DTYPES[name]))


def _load(options: argparse.Namespace, device: str) -> Target:
    from shardc.target import Wish, load_target

    with _progress(f"loading {options.target}"):
        wish = Wish(dict(options.settings), options.batch, options.seq, device)
        return load_target(options.target, wish, options.mesh)


def _dump(options: argparse.Namespace) -> int:
    from shardc.api import compile
    from shardc.dump import dump

    _check_pass(options.after)
    target = _load(options, device="meta")
    annotations = _annotations(options, target)
    with _progress(f"compiling for {options.mesh}"):
        compiled = compile(
            target.model, options.mesh, annotations, args=target.args, kwargs=target.kwargs, train=options.train,
            strict=options.strict, precision=_precision(options.precision), **_compile_options(options),
        )  # fmt: skip
    text = dump(compiled, options.format, options.after, options.only, options.verbose)
    _write(text, options.output)
    return GOOD


def _check_pass(name: str) -> None:
    from shardc.passes.pipeline import PASSES
    from shardc.target import UsageError

    names = ["capture", *(run.__name__ for run in PASSES)]
    if name and name not in names:
        raise UsageError(f"--after {name!r}: the passes are {', '.join(names)}")


def _write(text: str, path: str | None) -> None:
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        from shardc.target import UsageError

        raise UsageError(f"-o {path}: {error.strerror}") from error
    print(f"shardc: wrote {path}", file=sys.stderr)


def _stages(options: argparse.Namespace) -> int:
    from shardc.capture import capture
    from shardc.choose_stages import Wish, split_stages
    from shardc.stages_text import stages_text

    options.mesh = options.mesh or Mesh(pp=options.stages)
    wish = Wish(options.stages, options.by, tuple(options.cut), (), options.microbatches, options.max_memory)
    target = _load(options, device="meta")
    with _progress(f"cutting into {options.stages} stages"):
        program = capture(target.model, target.args, target.kwargs, train=options.train).program
        found = split_stages(program, wish)
    _write(stages_text(found, options.format), options.output)
    return GOOD


def _verify(options: argparse.Namespace) -> int:
    from shardc.verify import differences_text, verify

    target = _load(options, device="cpu")
    annotations = _annotations(options, target)
    found = verify(
        target.model,
        options.mesh,
        annotations,
        args=target.args,
        kwargs=target.kwargs,
        train=options.train,
        options=_compile_options(options),
        progress=_progress,
    )
    _write(differences_text(found), None)
    return GOOD if all(difference.is_small for difference in found) else CHECK_FAILED


@contextmanager
def _progress(step: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    print(f"shardc: {step} ...", end="", flush=True, file=sys.stderr)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print(" failed", file=sys.stderr)
        raise
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr)
