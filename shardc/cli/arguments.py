"""The arguments that commands share: a TARGET, the mesh and options to compile it for, and where the output goes."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NoReturn

from shardc.cli import USAGE
from shardc.language.errors import OptionError, ShardingError, UsageError, did_you_mean
from shardc.language.machine import DEVICES, LINKS, SHORT
from shardc.language.mesh import MOST_RANKS, Mesh
from shardc.language.text import bytes_of
from shardc.options import ADAM, ATTENTIONS, AUTO, BUCKET, OPTIMIZERS, OVERLAPS, Local, Momentum, Pipeline, Remat, Zero
from shardc.report.dump.schema import schema_text
from shardc.wire import CONTENTS, EXAMPLES

TARGET_HELP = """\
TARGET is path.py:function or package.module:function. The function returns (model, args[, kwargs[, annotations]]);
if it has a parameter named mesh, it is called with the mesh. hf:MODEL_TYPE is the default config of that model type
in transformers, with random weights.
SPEC has one entry for each dim: an axis; - for a whole dim; ? for an open one; dp+tp for several axes, major first;
blocks(3,tp) for each of 3 blocks; a trailing ... leaves the remaining dims open.
"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXIT_CODES = """\
exit codes: 0 good, 1 a check failed, 2 usage, 3 capture failed, 4 bad annotation, 70 internal error, 130 interrupted
"""
OBJECTIVES = ("time", "memory")
AXES = ("dp", "tp", "cp", "ep", "pp")  # the search's names of axes; also dp2, ...
MOST_JOBS = 8  # processes of a search by default
LARGEST = 2**40  # the largest count: beyond it torch's own sizes overflow


# The options that commands share.


def add_command(
    commands: Any, name: str, help_: str, operands: Sequence[str] = ("TARGET",), is_search: bool = False
) -> Parser:
    """Add the parser of a command. Each of its ``operands`` may be a TARGET.

    ``is_search``: the command searches for a training plan, for a batch of any size.
    """
    parser: Parser = commands.add_parser(
        name, help=help_, description=help_, epilog=TARGET_HELP + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model = "a model: path.py:function, package.module:function, hf:gpt2"
    for operand in operands:
        help_ = model if operand == "TARGET" else "a plan: see below"
        parser.add_argument(operand.lower(), metavar=operand, help=help_)
    if not is_search:
        parser.add_argument("--no-train", dest="train", action="store_false", help="compile forward only")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], type=_setting, dest="settings",
        help="set a field of the hf config, or an argument of the function; may be repeated",
    )  # fmt: skip
    default = (
        "or the next multiple of --devices); also of those of a function"
        if is_search
        else "or the next multiple of dp)"
    )
    parser.add_argument("--batch", metavar="N", type=count, help=f"batch size of the inputs of hf: (8, {default}")
    length = "tokens a row of the inputs of hf: (as many as a model of text has positions, at most 4096; verify: 64)"
    parser.add_argument("--seq", metavar="N", type=count, help=length)
    return parser


def add_mesh_options(parser: Parser, is_required: bool = True) -> None:
    """Add ``--mesh``, ``--annotate`` and the options of ``shardc.compile`` that every command with a mesh takes."""
    parser.add_argument("--mesh", type=mesh, required=is_required, help="axes and sizes: dp=2,tp=4")
    _add_annotate(parser, "replaces the defaults of an hf: target, adds to the annotations that a function returns")
    parser.add_argument(
        "--zero", metavar="AXES=STAGE[,KEY=VALUE]...", type=_zero,
        help="shard parameters, gradients and optimizer states over axes between uses, as ZeRO does: dp=3; "
        "dp+node=3,gather_over=node where node is on fast links; dp=3,offload=parameters,to=/scratch, or "
        "offload=optimizer, stores them in files, or to=host",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline", metavar="AXIS[,KEY=VALUE]...", type=_pipeline,
        help="cut the model into pipeline stages along an axis: pp,microbatches=8,schedule=1f1b,balance=flops; also "
        "chunks=2, offload=true, and cuts=h.4+h.8 for the modules where stages begin",
    )  # fmt: skip
    parser.add_argument(
        "--remat", metavar="GLOB|BYTES", type=_remat,
        help="recompute in backward the activations inside modules, h.*, or as many as needed to save at most so many "
        "bytes on a rank",
    )  # fmt: skip
    parser.add_argument(
        "--saved", metavar="GLOB=AXES[+TIER][,...]", type=_saved,
        help="cut over axes what is saved of the values that modules read, which backward gathers: 'h.*=tp'; or save "
        "it in host memory or files, h.*=host or h.*=/scratch; or both, h.*=tp+host; or none",
    )  # fmt: skip
    parser.add_argument(
        "--momentum", metavar="STEPS", type=_momentum,
        help="send Adam's momentum in place of gradients after so many steps, in the codecs 1bit and topk of --wire",
    )  # fmt: skip
    parser.add_argument(
        "--local", metavar="AXIS=STEPS[,KEY=VALUE]...", type=_local,
        help="let groups of ranks along an axis train by themselves, and meet every so many steps (DiLoCo): dc=20; "
        "also wire=int8, parts=4, after=100",
    )  # fmt: skip
    help_ = "size of buckets of collectives (25 MiB)"
    parser.add_argument("--bucket", metavar="BYTES", type=count, default=BUCKET, help=help_)
    _add_optimizer(parser)
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default=AUTO, help=f"how attention over cut positions is computed ({AUTO})"
    )
    help_ = "compute products in chunks while others are sent: ring; or auto, where that is faster on --links"
    parser.add_argument("--overlap", choices=OVERLAPS, help=help_)
    _add_wire(parser)
    parser.add_argument(
        "--links", metavar="LINK|AXIS=LINK,...|FILE", type=name,
        help=f"the link between ranks along all axes or along each, for predicted times: {', '.join(LINKS)}; or a file "
        "that shardc bench-links wrote",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", metavar="SIZE=LINK", type=_nodes,
        help="devices in a node, and the link between nodes, for an axis that crosses them: 8=infiniband; --links are "
        "then those inside a node, and '*=nvlink' all of them",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true",
        help="refuse ops without a rule, gathers that no annotation asks for, and annotations of modules that are "
        "never called",
    )  # fmt: skip
    help_ = f"what a rank computes on, for predicted times: {', '.join(DEVICES)}"
    parser.add_argument("--device", metavar="NAME", type=name, help=help_)


def add_compile_options(parser: Parser, is_required: bool = True) -> None:
    """Add the options of a command that shows the compiled program.

    ``is_required``: whether ``--mesh`` is required; a command that also takes dumps needs no mesh for these.
    """
    add_mesh_options(parser, is_required)
    help_ = "compute in this dtype; keep parameters and reduce in float32"
    parser.add_argument("--precision", choices=DTYPES, help=help_)
    parser.set_defaults(compile_options=parser.option_names)


def add_search_options(parser: Parser) -> None:
    """Add the options of a search for plans: devices and links, what is fixed, and the objective."""
    parser.add_argument("--devices", metavar="N", type=count, required=True, help="how many ranks: 16")
    parser.add_argument("--nodes", metavar="N", type=count, default=1, help="how many nodes they are in (1)")
    help_ = f"what a rank computes on: {', '.join(DEVICES)}; or a file that shardc bench-links wrote"
    parser.add_argument("--device", metavar="NAME|FILE", type=name, help=help_)
    parser.add_argument(
        "--links", metavar="LINK[,LINK]|FILE", type=name,
        help=f"the link inside a node, and the one between nodes: nvlink,infiniband; of {', '.join(LINKS)}; or files "
        "that shardc bench-links wrote",
    )  # fmt: skip
    help_ = "the bytes that a rank has: 80GB (those of --device, where it is named)"
    parser.add_argument("--memory", metavar="BYTES", type=nbytes, help=help_)
    parser.add_argument(
        "--fix", metavar="NAME=VALUE", type=_fixed, action="append", default=[],
        help="what a plan must have: the size of an axis, tp=4; zero=3; pipeline=none; remat=none; precision=bf16; "
        "overlap=none; saved=none; may be repeated, with one name to allow several values",
    )  # fmt: skip
    _add_annotate(parser, "the search keeps it and adds others; annotations that come with a target are not used")
    _add_optimizer(parser)
    _add_wire(parser)
    parser.add_argument("--objective", choices=OBJECTIVES, default=OBJECTIVES[0], help="what is to be small (time)")
    parser.add_argument("--top", metavar="N", type=count, default=5, help="how many plans to print (5)")
    parser.add_argument(
        "--jobs", metavar="N", type=count, default=min(_num_processors(), MOST_JOBS),
        help=f"how many processes compile plans (one for each processor, at most {MOST_JOBS})",
    )  # fmt: skip


def _num_processors() -> int:
    """Those that this process may use, where the system says so (Linux), or all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _add_annotate(parser: Parser, whose: str) -> None:
    help_ = f"annotate the tensors that a glob matches; may be repeated; {whose}"
    parser.add_argument("--annotate", metavar="PATTERN=SPEC", action="append", default=[], help=help_)


def _add_wire(parser: Parser) -> None:
    parser.add_argument(
        "--wire", metavar="KEY=CODEC[,KEY=CODEC]...", type=_wire,
        help=f"send values in fewer bytes, by axis, by what is sent ({', '.join(CONTENTS)}), by a glob over modules, "
        f"or by several of these: 'dp=int8,tp activations=bf16'; {', '.join(EXAMPLES)}, or none",
    )  # fmt: skip


def _add_optimizer(parser: Parser) -> None:
    help_ = f"the optimizer whose states a rank holds, for memory and predicted times ({ADAM})"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=ADAM, help=help_)


def check_dumps(options: argparse.Namespace, dumps: Sequence[str]) -> None:
    """Raise a UsageError for options of ``add_compile_options`` if there are only dumps and nothing to compile."""
    idle = [option for option in options.changed if option in options.compile_options]
    if idle:
        what = f"with {' and '.join(dict.fromkeys(dumps))}"
        problem = "a dump is of a plan that is compiled already, for its own mesh and options"
        remedy = f"leave {'them' if len(idle) > 1 else 'it'} out, or name the TARGET, path.py:function, not its dump"
        raise UsageError(", ".join(idle), what, problem, remedy)


def add_output_options(
    parser: Parser, schema: str, formats: Sequence[str] = (), format_help: str | None = None
) -> None:
    """Add ``--output``, ``--format`` if there are ``formats``, and ``--schema``, which prints the named JSON schema."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of stdout")
    if formats:
        parser.add_argument("--format", choices=formats, default=formats[0], help=format_help)
    help_ = f"print the JSON Schema of {'--format json' if formats else 'the output'} and exit"
    parser.add_argument("--schema", action=_PrintSchema, const=schema, nargs=0, help=help_)


class _PrintSchema(argparse.Action):
    """Prints the schema and exits, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *further: Any) -> None:
        print(schema_text(self.const), end="")
        parser.exit()


# The types of option values. Each parses a text, or raises an error with a remedy.


def name(text: str) -> str:
    """A text that is not empty."""
    if not text.strip(" ,"):
        raise unreadable(text, "it names nothing", "say a name, or leave the option out")
    return text


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or not int(text[:20]):
        raise unreadable(text, "it is no whole number of 1 or more", "write digits alone, as in 8")
    if int(text[:20]) > LARGEST:
        raise unreadable(text, f"it is more than {LARGEST}, the largest count", "say less")
    return int(text)


def nbytes(text: str) -> int:
    """A number of bytes, 80GB."""
    try:
        return bytes_of(text)
    except OptionError as error:
        raise unreadable(text, error.problem, error.remedy) from None


def sizes(text: str, what: str, example: str) -> dict[str, int]:
    """``dp=2,tp=4`` as sizes by name; ``what`` and ``example`` are for the errors."""
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(key.isidentifier() and size.isdecimal() for key, _, size in pairs):
        raise unreadable(text, f"it does not read as {what} and their sizes", f"write {example}")
    return {key: int(size[:20]) for key, _, size in pairs}


def mesh(text: str) -> Mesh:
    """The mesh that ``dp=2,tp=4`` describes."""
    axes = sizes(text, "axes", "--mesh dp=2,tp=4")
    if len(axes) <= text.count(","):
        raise unreadable(text, "it has an axis twice", "write each axis once, as in --mesh dp=2,tp=4")
    if not all(axes.values()):
        raise unreadable(text, "an axis has at least one rank", "write --mesh dp=2,tp=4")
    num_ranks = prod(axes.values())
    if num_ranks > MOST_RANKS:
        remedy = f"say sizes whose product is at most {MOST_RANKS}"
        raise unreadable(text, f"a mesh has at most {MOST_RANKS} ranks", remedy, f"{num_ranks} ranks")
    return Mesh(device_ids=None, **axes)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        problem = "it names nothing" if equals else "it has no '='"
        raise unreadable(text, problem, f"write --set {text if key else 'n_layer'}=2")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # no Python value: keep the text
        return key, value


def _nodes(text: str) -> tuple[int, str]:
    size, _, link = text.partition("=")
    known = {**LINKS, **SHORT}
    if link not in known:
        remedy = did_you_mean(link, known) or "write --nodes 8=infiniband"
        raise unreadable(text, f"it is no size and one of {', '.join(LINKS)}", remedy)
    return count(size), link


def _zero(text: str) -> Zero:
    first, *words = text.split(",")
    form = re.fullmatch(r"([^\W\d][\w+]*)(?:=(\d+))?", first)
    if form is None:
        remedy = "write --zero dp=3, or --zero dp+node=3,gather_over=node"
        raise unreadable(text, "it does not read as axes and a stage", remedy)
    axis, stage = form.groups()
    return _option(text, Zero, _axes(axis), int(stage or 3), **_settings(text, words, ZERO, "ZeRO"))


def _axes(text: str) -> str | tuple[str, ...]:
    axes = tuple(text.split("+"))
    if not all(each.isidentifier() for each in axes):
        raise unreadable(text, "it does not read as axes", "write dp, or dp+node")
    return axes if len(axes) > 1 else text


Settings = Mapping[str, tuple[Callable[[str], Any], str]]  # by name: the function that reads a setting, and an example


def _settings(text: str, words: Iterable[str], known: Settings, who: str) -> dict[str, Any]:
    """The settings ``key=value`` among the words of an option."""
    settings: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known:
            remedy = did_you_mean(key, known) or f"say one of {', '.join(f'{each}=' for each in known)}"
            raise unreadable(text, f"{who} has no such setting", remedy, repr(key))
        read, example = known[key]
        if not value:
            raise unreadable(text, f"{key} has no value", f"write {key}={example}")
        if key in settings:
            raise unreadable(text, f"it says {key} twice", "say each setting once")
        settings[key] = read(value)
    return settings


ZERO: Settings = {"gather_over": (_axes, "node"), "offload": (str, "parameters"), "to": (str, "/scratch")}


def _pipeline(text: str) -> Pipeline:
    axis, *words = text.split(",")
    if not axis.isidentifier():
        raise unreadable(text, "it does not begin with an axis of the mesh", "write --pipeline pp,microbatches=8")
    settings = _settings(text, words, PIPELINE, "a pipeline")
    return _option(text, Pipeline, axis, **settings)


def _fixed(text: str) -> tuple[str, Any]:
    """``tp=4``: an axis or an option, and the value that a plan must have; a precision stays a name."""
    key, equals, value = text.partition("=")
    is_size = key.rstrip("0123456789") in AXES or value.isdecimal()  # annotations may name other axes
    read = FIXED.get(key, count if is_size else None)
    if read is None:
        known = (*AXES, *FIXED)
        remedy = did_you_mean(key, known) or f"name one of {', '.join(known)}"
        raise unreadable(text, "a plan has no such part", remedy, repr(key))
    if not equals or not value:
        raise unreadable(text, f"{key} has no value", f"write --fix {key}={'4' if key in AXES else 'none'}")
    return key, None if value == "none" and key in FIXED else read(value)


def _wire(text: str) -> dict[str, str | None]:
    """The codecs by key: ``dp=int8,tp activations=bf16``."""
    found: dict[str, str | None] = {}
    for entry in text.split(","):
        key, equals, codec = entry.partition("=")
        if not (key.strip() and equals and codec.strip()):
            raise unreadable(text, "an entry reads KEY=CODEC", "say dp=int8", repr(entry))
        found[key.strip()] = None if codec.strip() == "none" else codec.strip()
    return found


def _momentum(text: str) -> Momentum:
    return Momentum(count(text))


def _local(text: str) -> Local:
    first, *words = text.split(",")
    axis, _, steps = first.partition("=")
    if not (axis.isidentifier() and steps):
        raise unreadable(text, "it does not begin with an axis and a number of steps", "write --local dc=20")
    return _option(text, Local, axis, count(steps), **_settings(text, words, LOCAL, "local"))


LOCAL: Settings = {"wire": (str, "int8"), "parts": (count, "4"), "after": (count, "100")}


_PARTS = re.compile(r"((?:[^+/]+\+)*)([^+/]+|/.*)")  # axes, then one more axis, a tier or a path


def _saved(text: str) -> dict[str, str | tuple[str, ...] | None]:
    """The axes and the tier by glob: ``h.*=tp,head=tp+dp,lm_head=tp+host``; a path, ``tp+/scratch``, comes last."""
    found: dict[str, str | tuple[str, ...] | None] = {}
    for entry in text.split(","):
        glob, equals, where = entry.partition("=")
        parts = _PARTS.fullmatch(where)
        if not (glob and equals and parts):
            remedy = "say 'h.*=tp', 'h.*=dp+tp' for two axes, 'h.*=host', or 'h.*=tp+/scratch'"
            raise unreadable(text, f"{entry!r} does not read GLOB=AXES", remedy)
        axes, last = parts[1].split("+")[:-1], parts[2]
        found[glob] = None if where == "none" else (*axes, last) if axes else last
    return found


def _stage(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise unreadable(text, "there is no such stage of ZeRO", "write --fix zero=3, or a stage from 0 to 3")
    return int(text)


def _one_of(words: Collection[str], example: str, text: str) -> str:
    """The text, if it is one of ``words``. ``example``: the remedy if no word is near."""
    if text not in words:
        remedy = did_you_mean(text, words) or f"write --fix {example}"
        raise unreadable(text, f"it is none of {', '.join(words)}", remedy)
    return text


def _whole_number_or_text(text: str) -> int | str:
    return int(text[:20]) if text.removeprefix("-").isdecimal() else text  # Pipeline refuses a text


PIPELINE: Settings = {
    "microbatches": (_whole_number_or_text, "8"),
    "schedule": (str, "1f1b"),
    "balance": (str, "flops"),
    "chunks": (_whole_number_or_text, "2"),
    "cuts": (lambda text: tuple(text.split("+")), "h.4+h.8"),
    "offload": (lambda text: {"true": True, "false": False}.get(text.lower(), text), "true"),
}


def _remat(text: str) -> Remat:
    if not text or (re.fullmatch(r"[\d.e]+[kKMGT]?i?B?", text) and not text.isdecimal()):
        raise unreadable(text, "it is no glob over modules, and no number of bytes", "write 'h.*', or digits alone")
    is_number = text.removeprefix("-").isdecimal()
    return _option(text, Remat, **({"budget": int(text[:20])} if is_number else {"blocks": text}))


FIXED: dict[str, Callable[[str], Any]] = {
    "mesh": str, "zero": _stage, "remat": _remat, "precision": partial(_one_of, DTYPES, "precision=bf16"),
    "pipeline": _pipeline, "overlap": partial(_one_of, OVERLAPS, "overlap=none"), "saved": _saved,
}  # fmt: skip


def _option(text: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make an option of ``shardc.compile``. Its error becomes an error of the argument that it was read from."""
    try:
        return make(*args, **kwargs)
    except ShardingError as error:
        raise unreadable(text, error.problem, error.remedy, error.what) from None


def unreadable(text: str, problem: str, remedy: str, what: str = "") -> argparse.ArgumentTypeError:
    """The error for the text of an argument, or for ``what`` in it. argparse adds the argument's name."""
    return argparse.ArgumentTypeError(f"{text!r}{': ' * bool(what)}{what}\n  {problem}\n  {remedy}")


# The parser.


class Parser(argparse.ArgumentParser):
    """An argparse parser that suggests near choices, commands and options, and prints its usage on ``--help`` alone."""

    def options(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line. An argument that no parser knows is an error of its command.

        ``typed`` of the result is the command line; ``changed`` are the names of the options that differ from their
        defaults.
        """
        typed = sys.argv[1:] if argv is None else list(argv)
        options, rest = self.parse_known_args(typed)
        subparsers = next((each for each in self._actions if isinstance(each, argparse._SubParsersAction)), None)
        parser = self if subparsers is None else subparsers.choices.get(getattr(options, subparsers.dest), self)
        if rest:
            known = [option for action in parser._actions for option in action.option_strings]
            remedy = did_you_mean(rest[0].partition("=")[0], known) or f"see {parser.prog} --help for those it has"
            parser.error(f"argument {rest[0]}: unknown\n  {parser.prog} has no such argument\n  {remedy}")
        optional = [action for action in parser._actions if action.option_strings]
        changed = [action for action in optional if getattr(options, action.dest, action.default) != action.default]
        options.typed, options.changed = typed, tuple(map(_argument_name, changed))
        return options

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of its options, without ``--help``."""
        options = (action for action in self._actions if action.option_strings and action.dest != "help")
        return tuple(map(_argument_name, options))

    def error(self, message: str) -> NoReturn:
        """Print the error, with the help texts of missing arguments, and exit."""
        words = message.replace(",", " ").split() if "\n" not in message else []
        missing = [action for action in self._actions if action.required and _argument_name(action) in words]
        remedy = "".join(
            f"\n  give {_argument_name(action)}: {action.help or ', '.join(map(str, action.choices or ()))}"
            for action in missing
        )
        remedy += "\n  leave one of them out" * ("not allowed with" in message)
        see = "" if "\n" in message or remedy else f"\n  see {self.prog} --help"
        self.exit(USAGE, f"{self.prog}: {message}{remedy}{see}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush stdout and exit. The flush notices in time if the reader is gone."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            remedy = did_you_mean(str(value), known) or f"say one of {', '.join(known)}"
            raise argparse.ArgumentError(action, f"{value!r}\n  it is none of {', '.join(known)}\n  {remedy}")


def _argument_name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
