"""What commands read alike: a TARGET, what it is compiled for, and the types of the values."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

from shardc.cli import USAGE
from shardc.language.errors import ShardingError, UsageError, did_you_mean
from shardc.language.machine import DEVICES, LINKS
from shardc.language.mesh import MOST_RANKS, Mesh
from shardc.options import BUCKET, Pipeline, Remat, Zero
from shardc.report.dump.json import schema_text

TARGET_HELP = """\
TARGET is path.py:function or package.module:function, returning (model, args[, kwargs[, annotations]]); a function
that takes mesh is given it. Or it is hf:MODEL_TYPE, transformers' default config of that type with random weights.
SPEC has an entry for each dim: an axis, - whole, ? open, dp+tp several axes, blocks(3,tp), a trailing ... all open.
"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXIT_CODES = """\
exit codes: 0 good, 1 a check failed, 2 usage, 3 capture failed, 4 bad annotation, 70 internal error, 130 interrupted
"""
MOST = 2**40  # of anything that is counted: beyond it torch's own sizes overflow


def command(commands: Any, name: str, help_: str, operands: Sequence[str] = ("TARGET",)) -> Parser:
    """The parser of one command that works on a TARGET, or on ``operands``, each of which may be one."""
    parser: Parser = commands.add_parser(
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


def meshed(parser: Parser, is_required: bool = True) -> Parser:
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
        type=named,
        help=f"what joins an axis's ranks, for estimated times: {', '.join(LINKS)}; or a file of shardc bench-links",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse ops without a rule, gathers no one asked for and annotations of modules that are not called",
    )
    parser.add_argument("--device", metavar="NAME", type=named, help=f"what a rank computes on: {', '.join(DEVICES)}")
    return parser


def compiling(parser: Parser, is_required: bool = True) -> Parser:
    """The same parser, of a command that looks at the compiled program: ``meshed``, and what changes it further.

    ``is_required``: the mesh; a command that also takes dumps needs none for these.
    """
    meshed(parser, is_required)
    parser.add_argument("--precision", choices=DTYPES, help="compute in this dtype, reduce and keep parameters in fp32")
    parser.set_defaults(compiling=parser.names)
    return parser


def check_dumps(options: argparse.Namespace, dumps: Sequence[str]) -> None:
    """A UsageError for options of ``compiling`` where there is nothing to compile, but dumps alone."""
    idle = [name for name in options.given if name in options.compiling]
    if idle:
        what = f"with {' and '.join(dict.fromkeys(dumps))}"
        problem = "a dump is of a plan that is compiled already, for its own mesh and options"
        remedy = f"leave {'them' if len(idle) > 1 else 'it'} out, or name the TARGET, path.py:function, not its dump"
        raise UsageError(", ".join(idle), what, problem, remedy)


def written(parser: Parser, schema: str = "") -> Parser:
    """The same parser, of a command whose output may go to a file; ``schema``: the name of that of its JSON."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of stdout")
    if schema:
        form = "what it writes" if schema == "trace" else "--format json"
        help_ = f"print the JSON Schema of {form}, and no more"
        parser.add_argument("--schema", action=_Schema, const=schema, nargs=0, help=help_)
    return parser


class _Schema(argparse.Action):
    """Prints the schema and ends, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *further: Any) -> None:
        print(schema_text(self.const), end="")
        parser.exit()


def named(text: str) -> str:
    """A text that is not empty."""
    if not text.strip(" ,"):
        raise unread(text, "it names nothing", "say a name, or leave the option out")
    return text


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or not int(text[:20]):
        raise unread(text, "it is no whole number of 1 or more", "write digits alone, as in 8")
    if int(text[:20]) > MOST:
        raise unread(text, f"it is more than {MOST}, beyond which nothing is counted", "say less")
    return int(text)


def mesh(text: str) -> Mesh:
    """What ``dp=2,tp=4`` says."""
    axes = [item.partition("=") for item in text.split(",")]
    if not all(name.isidentifier() and size.isdecimal() for name, _, size in axes):
        raise unread(text, "it does not read as axes and their sizes", "write --mesh dp=2,tp=4")
    if len({name for name, _, _ in axes}) < len(axes):
        raise unread(text, "it has an axis twice", "write each axis once, as in --mesh dp=2,tp=4")
    sizes = [int(size[:20]) for _, _, size in axes]
    if not all(sizes):
        raise unread(text, "an axis has at least one rank", "write --mesh dp=2,tp=4")
    if prod(sizes) > MOST_RANKS:
        remedy = f"say sizes whose product is at most {MOST_RANKS}"
        raise unread(text, f"a mesh has at most {MOST_RANKS} ranks", remedy, f"{prod(sizes)} ranks")
    return Mesh(device_ids=None, **{name: size for (name, _, _), size in zip(axes, sizes, strict=True)})


def _zero(text: str) -> Zero:
    axis, equals, stage = text.partition("=")
    if not axis.isidentifier() or (equals and not stage.isdecimal()):
        raise unread(text, "it does not read as an axis and a stage", "write --zero dp=3")
    try:
        return Zero(axis, int(stage or 3))  # type: ignore[arg-type]
    except ShardingError as error:
        raise _unfit(text, error) from None


def _pipeline(text: str) -> Pipeline:
    axis, *settings = text.split(",")
    if not axis.isidentifier():
        raise unread(text, "it does not begin with an axis of the mesh", "write --pipeline pp,microbatches=8")
    given = [_pipeline_setting(text, each) for each in settings]
    twice = [name for name in dict(given) if [each for each, _ in given].count(name) > 1]
    if twice:
        raise unread(text, f"it says {twice[0]} twice", "say each setting once")
    try:
        return Pipeline(axis, **dict(given))
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
    return int(text[:20]) if text.removeprefix("-").isdecimal() else text  # Pipeline says what is no count


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
    if not text or (re.fullmatch(r"[\d.e]+[kKMGT]?i?B?", text) and not text.isdecimal()):
        raise unread(text, "it is no glob over modules, and no number of bytes", "write 'h.*', or digits alone")
    try:
        return Remat(budget=int(text[:20])) if text.removeprefix("-").isdecimal() else Remat(text)
    except ShardingError as error:
        raise _unfit(text, error) from None


def _unfit(text: str, error: ShardingError) -> argparse.ArgumentTypeError:
    """An error of an option, said of the argument that is read as it."""
    return unread(text, error.problem, error.remedy, error.what)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        what = "it names nothing" if equals else "it has no '='"
        raise unread(text, what, f"write --set {text if name else 'n_layer'}=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # no Python value: text
        return name, value


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
