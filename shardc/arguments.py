"""What commands read alike: a TARGET, what it is compiled for, and the types of the values."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from typing import Any

from shardc.device import DEVICES
from shardc.error import ShardingError, did_you_mean
from shardc.link import LINKS
from shardc.mesh import Mesh
from shardc.options import BUCKET, Pipeline, Remat, Zero
from shardc.parser import unread

TARGET_HELP = """\
TARGET is path.py:function or package.module:function, returning (model, args[, kwargs[, annotations]]); a function
that takes mesh is given it. Or it is hf:MODEL_TYPE, transformers' default config of that type with random weights.
SPEC has an entry for each dim: an axis, - whole, ? open, dp+tp several axes, blocks(3,tp), a trailing ... all open.
"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXIT_CODES = "exit codes: 0 good, 1 a check failed, 2 usage, 3 capture failed, 4 bad annotation, 70 internal error"


def command(commands: Any, name: str, help_: str, operands: Sequence[str] = ("TARGET",)) -> argparse.ArgumentParser:
    """The parser of one command that works on a TARGET, or on ``operands``, each of which may be one."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=help_,
        epilog=TARGET_HELP + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = "a model: path.py:function, package.module:function, hf:gpt2"
    for operand in operands:
        parser.add_argument(
            operand.lower(), metavar=operand, help=model if operand == "TARGET" else "a plan: see below"
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
    parser.add_argument("--batch", metavar="N", type=count, help="batch size of made up inputs (8)")
    parser.add_argument("--seq", metavar="N", type=count, help="sequence length of made up inputs (64)")
    return parser


def meshed(parser: argparse.ArgumentParser, is_required: bool = True) -> argparse.ArgumentParser:
    """The same parser, of a command that compiles for a mesh."""
    parser.add_argument("--mesh", type=mesh, required=is_required, help="axes and sizes: dp=2,tp=4")
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
        "--pipeline",
        metavar="AXIS[,KEY=VALUE]...",
        type=_pipeline,
        help="cut the model in stages along an axis: pp,microbatches=8,schedule=1f1b,balance=flops; also chunks=2, "
        "offload=true and cuts=h.4+h.8, where stages begin",
    )
    parser.add_argument(
        "--remat",
        metavar="GLOB|BYTES",
        type=_remat,
        help="make again in backward what is inside modules, h.*, or all but so many bytes a rank",
    )
    parser.add_argument(
        "--bucket", metavar="BYTES", type=count, default=BUCKET, help="bytes of collectives that go together (25 MiB)"
    )
    parser.add_argument(
        "--links",
        metavar="AXIS=LINK,...|FILE",
        help=f"what joins an axis's ranks, for estimated times: {', '.join(LINKS)}; or a file of shardc bench-links",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse ops without a rule, gathers no one asked for and annotations of modules that are not called",
    )
    parser.add_argument("--device", metavar="NAME", help=f"what a rank computes on: {', '.join(DEVICES)}")
    return parser


def compiling(parser: argparse.ArgumentParser, is_required: bool = True) -> argparse.ArgumentParser:
    """The same parser, of a command that looks at the compiled program: ``meshed``, and what changes it further.

    ``is_required``: the mesh; a command that also takes dumps needs none for these.
    """
    meshed(parser, is_required)
    parser.add_argument("--precision", choices=DTYPES, help="compute in this dtype, reduce and keep parameters in fp32")
    return parser


def written(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same parser, of a command whose output may go to a file."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of stdout")
    return parser


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdigit() or not int(text):
        raise unread(text, "it is no whole number of 1 or more", "write digits alone, as in 8")
    return int(text)


def mesh(text: str) -> Mesh:
    """What ``dp=2,tp=4`` says."""
    axes = [item.partition("=") for item in text.split(",")]
    if not all(name.isidentifier() and size.isdigit() for name, _, size in axes):
        raise unread(text, "it does not read as axes and their sizes", "write --mesh dp=2,tp=4")
    if len({name for name, _, _ in axes}) < len(axes):
        raise unread(text, "it has an axis twice", "write each axis once, as in --mesh dp=2,tp=4")
    if not all(int(size) for _, _, size in axes):
        raise unread(text, "an axis has at least one rank", "write --mesh dp=2,tp=4")
    return Mesh(device_ids=None, **{name: int(size) for name, _, size in axes})


def _zero(text: str) -> Zero:
    axis, equals, stage = text.partition("=")
    if not axis.isidentifier() or (equals and not stage.isdigit()):
        raise unread(text, "it does not read as an axis and a stage", "write --zero dp=3")
    try:
        return Zero(axis, int(stage or 3))  # type: ignore[arg-type]
    except ShardingError as error:
        raise _unfit(text, error) from None


def _pipeline(text: str) -> Pipeline:
    axis, *settings = text.split(",")
    if not axis.isidentifier():
        raise unread(text, "it does not begin with an axis of the mesh", "write --pipeline pp,microbatches=8")
    given = dict(_pipeline_setting(text, each) for each in settings)
    try:
        return Pipeline(axis, **given)
    except ShardingError as error:
        raise _unfit(text, error) from None


def _pipeline_setting(text: str, setting: str) -> tuple[str, Any]:
    name, _, value = setting.partition("=")
    if name not in PIPELINE:
        remedy = did_you_mean(name, PIPELINE) or f"say one of {', '.join(f'{each}=' for each in PIPELINE)}"
        raise unread(text, "a pipeline has no such setting", remedy, repr(name))
    if not value:
        raise unread(text, f"{name} has no value", f"write {name}={PIPELINE_EXAMPLES[name]}")
    return name, PIPELINE[name](value)


def _number(text: str) -> Any:
    return int(text) if text.lstrip("-").isdigit() else text  # Pipeline says what is no count


def _globs(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


PIPELINE: dict[str, Callable[[str], Any]] = {
    "microbatches": _number,
    "schedule": str,
    "balance": str,
    "chunks": _number,
    "cuts": _globs,
    "offload": lambda text: {"true": True, "false": False}.get(text.lower(), text),
}
PIPELINE_EXAMPLES = {"microbatches": "8", "schedule": "1f1b", "balance": "flops", "chunks": "2", "cuts": "h.4+h.8"}


def _remat(text: str) -> Remat:
    try:
        return Remat(budget=int(text)) if text.lstrip("-").isdigit() else Remat(text)
    except ShardingError as error:
        raise _unfit(text, error) from None


def _unfit(text: str, error: ShardingError) -> argparse.ArgumentTypeError:
    """An error of an option, said of the argument that is read as it."""
    return unread(text, error.problem, error.remedy, error.what)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise unread(text, "it has no '='", f"write --set {text or 'n_layer'}=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
