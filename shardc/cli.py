"""The command line: ``shardc dump`` and ``shardc verify``. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.error import ShardingError
from shardc.mesh import Mesh
from shardc.options import BUCKET, Precision, Remat, Zero
from shardc.partition import P

if TYPE_CHECKING:
    from shardc.target import Target

GOOD, CHECK_FAILED, USAGE, CAPTURE_FAILED, BAD_ANNOTATION, INTERNAL = 0, 1, 2, 3, 4, 70

TARGET_HELP = """\
TARGET is path.py:function or package.module:function, returning (model, args[, kwargs[, annotations]]); a function
that takes mesh is given it. Or it is hf:MODEL_TYPE, transformers' default config of that type with random weights.
SPEC has an entry for each dim: an axis, - whole, ? open, dp+tp several axes, blocks(3,tp), a trailing ... all open.
"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXIT_CODES = "exit codes: 0 good, 1 a check failed, 2 usage, 3 capture failed, 4 bad annotation, 70 internal error"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; argparse itself exits with 2."""
    options = _parser().parse_args(argv)
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

    commands = {"dump": _dump, "verify": _verify}
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardc", description="Shard a PyTorch model by a few annotations.", epilog=EXIT_CODES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    dump = _command(commands, "dump", "print the program, its shardings and its collectives")
    dump.add_argument("--format", choices=("text", "json", "dot"), default="text")
    dump.add_argument("--after", metavar="PASS", default="", help="the program as it stands after this pass")
    dump.add_argument("--only", choices=("collectives",), default="", help="leave out all else")
    dump.add_argument("--strict", action="store_true", help="refuse ops without a rule and gathers no one asked for")
    dump.add_argument("--precision", choices=DTYPES, help="compute in this dtype, reduce and keep parameters in fp32")
    dump.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of stdout")
    dump.add_argument("-v", "--verbose", action="store_true", help="also the seconds that each pass took")
    _command(commands, "verify", "hold the sharded program against a single device, and against the eager model")
    return parser


def _command(commands: Any, name: str, help_: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=help_,
        epilog=TARGET_HELP + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--mesh", type=_mesh, required=True, help="axes and sizes: dp=2,tp=4")
    parser.add_argument(
        "--annotate",
        metavar="PATTERN=SPEC",
        action="append",
        default=[],
        help="may be repeated; replaces hf defaults, adds to a function's own",
    )
    parser.add_argument(
        "--zero",
        metavar="AXIS=STAGE",
        type=_zero,
        help="store parameters cut by an axis between uses, as ZeRO does: dp=3",
    )
    parser.add_argument(
        "--remat",
        metavar="GLOB|BYTES",
        type=_remat,
        help="make again in backward what is inside modules, h.*, or all but so many bytes a rank",
    )
    parser.add_argument(
        "--bucket", metavar="BYTES", type=int, default=BUCKET, help="bytes of collectives that go together (25 MiB)"
    )
    parser.add_argument("--no-train", dest="train", action="store_false", help="forward only")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=_setting,
        dest="settings",
        help="a field of the hf config, or an argument of the function",
    )
    parser.add_argument("--batch", type=int, help="batch size of made up inputs (8)")
    parser.add_argument("--seq", type=int, help="sequence length of made up inputs (64)")
    return parser


def _mesh(text: str) -> Mesh:
    axes = [item.partition("=") for item in text.split(",")]
    if not all(name.isidentifier() and size.isdigit() for name, _, size in axes):
        raise argparse.ArgumentTypeError(f"{text!r} does not read like dp=2,tp=4")
    if len({name for name, _, _ in axes}) < len(axes):
        raise argparse.ArgumentTypeError(f"{text!r} has an axis twice")
    try:
        return Mesh(**{name: int(size) for name, _, size in axes})  # type: ignore[arg-type]
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _zero(text: str) -> Zero:
    axis, equals, stage = text.partition("=")
    if not axis.isidentifier() or (equals and not stage.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} does not read like dp=3")
    try:
        return Zero(axis, int(stage or 3))  # type: ignore[arg-type]
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _remat(text: str) -> Remat:
    try:
        return Remat(budget=int(text)) if text.lstrip("-").isdigit() else Remat(text)
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} does not read like n_layer=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


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
    return {"zero": options.zero, "remat": options.remat, "bucket": options.bucket}


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
