"""Errors for what a graph cannot repeat, with the user's line and module, and guards that check values in each run."""

from __future__ import annotations

import math
import os
import pickle
import random
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, reduce
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.model import hold_same, override_attribute
from shardc.capture.signature import READ_VALUES, fingerprint
from shardc.capture.values.symbols import Sizes, value_at
from shardc.capture.values.unknown import UnknownNumber, UnknownValueError, passing_check
from shardc.language.errors import CaptureError, error_line, error_text
from shardc.language.sharding import TensorType
from shardc.language.size import number_of
from shardc.ops.linalg import STEADY
from shardc.ops.pointwise import is_pointwise
from shardc.program.inference import types_of
from shardc.program.node import add_copy, is_random, is_size, last_node, nodes_after, op_name, reached
from shardc.program.opaque import Opaque, flat_call


class Unfit(RuntimeError):
    """A call that cannot be part of a graph."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)


class Refusals(TorchFunctionMode):
    """Raises an Unfit for functions that tracing would silently leave out, or would fail at without a clear reason.

    ``reads_numbers``: the model's own lines may read whole numbers, each under a guard. State: ``is_user_read``,
    whether the running function of torch reads values for the user's own line; None if no function is running.
    ``passed_over``: the places of checks that no step runs. ``gave_unknown``: whether a line of the user's has an
    UnknownNumber. ``comparisons``: the results of comparing two whole numbers, if these may be read.
    """

    def __init__(self, reads_numbers: bool) -> None:
        super().__init__()
        self.reads_numbers = reads_numbers
        self.is_user_read: bool | None = None
        self.passed_over: dict[str, None] = {}
        self.gave_unknown = False
        self.comparisons: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and args[0] is args[1]:  # a module converted to the dtype that it has
            return None
        if func in _FROM_LISTS and (stacked := _stack_of_numbers(*args, **kwargs)) is not None:
            return stacked
        if func in _INDEXING:
            args = (args[0], _with_stacks(args[1]), *args[2:])
        if func in _REFUSED:
            raise Unfit(*_REFUSED[func])
        if kwargs.get("generator") is not None:
            raise Unfit(*_GENERATOR)
        before, self.is_user_read = self.is_user_read, func in _READS and is_users_line(sys._getframe())
        try:
            if self.reads_numbers and (read := self._whole_numbers(func, args)) is not None:
                return read
            if func is Tensor.__format__ and self.is_user_read and not args[0].ndim:
                self._note_reading(args[:1])
                return self._formatted(*args)
            result = func(*args, **kwargs)
            if func in _READS:
                self._note_reading(args)
            return result
        except DataDependentOutputException:
            frame = users_frame(sys._getframe()) if self.is_user_read and before is None else None
            return self._unknown(func, args[0], frame, _caller(sys._getframe(), is_direct=True))
        finally:
            self.is_user_read = before

    def _note_reading(self, args: Any) -> None:
        """Note that the program depends on the values of the model's own tensors from which ``args`` are computed."""
        for x in (each for each in args if isinstance(each, Tensor)):
            for tensor in constants_behind(x):
                READ_VALUES.setdefault(tensor, 0 if tensor.is_inference() else tensor._version)

    def _whole_numbers(self, func: Any, args: Any) -> Any:
        """The result of a function that reads or compares whole numbers; None for any other."""
        if func is Tensor.tolist and is_whole(args[0]):
            return _nested(numbers(args[0]), args[0].shape)
        if func is Tensor.__int__ and args[0].is_floating_point():
            return numbers(args[0].long())[0]
        if func in _COMPARISONS and all(map(_is_whole_number, args)):
            self.comparisons.append(func(*args))
            return self.comparisons[-1]
        return None

    def _formatted(self, number: Tensor, spec: str) -> str:
        """A number as text; one that is unknown may be part of a message."""
        try:
            return format(number.item(), spec)
        except DATA_DEPENDENT:
            return format(UnknownNumber(self.pass_over), spec) if spec else str(number)

    def _unknown(self, func: Any, x: Tensor, frame: FrameType | None, caller: FrameType | None) -> Any:
        """The result of reading a value that is unknown during capture; else raises the present error again.

        ``frame``: that of the user's line, if that line reads; ``caller``: that of the caller of ``func``. A line that
        only checks the value is passed over, a branch reads a number under a guard, any other line gets an
        UnknownNumber.
        """
        passing = None if frame is None or func not in _TESTS else passing_check(frame)
        if frame is not None and passing is not None:
            self.pass_over(frame)
            return passing
        is_branch = frame is not None and caller is not None and caller.f_code.co_name == "__bool__"
        is_compared = func in (Tensor.__bool__, Tensor.item) and any(x is each for each in self.comparisons)
        if is_compared or (is_branch and self.reads_numbers):
            return bool(numbers((x != 0).long())[0])
        if frame is None or func not in (Tensor.item, Tensor.__float__):
            raise
        if caller is None or (caller is not frame and caller.f_code.co_name not in _TOLIST):
            raise
        self.gave_unknown = True
        if func is Tensor.__float__:  # which returns nothing but numbers
            raise UnknownValueError from None
        return UnknownNumber(self.pass_over)

    def pass_over(self, frame: FrameType) -> None:
        """Remember that no step runs the check of a line."""
        self.passed_over[f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"] = None


def is_whole(x: Tensor) -> bool:
    """Whether a tensor holds whole numbers, which may be sizes; truth values do not count."""
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _is_whole_number(x: Any) -> bool:
    return isinstance(x, int) or (isinstance(x, Tensor) and not x.ndim and is_whole(x))


def _stack_of_numbers(data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor | None:
    """The result of torch.tensor for nested lists with tensors of one number in them; None for other data.

    To autograd it is a constant, as torch's own is.
    """
    leaves = pytree.tree_leaves(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or isinstance(data, Tensor) or any(each.numel() != 1 for each in tensors):
        return None
    dtypes = [leaf.dtype if isinstance(leaf, Tensor) else torch.tensor(leaf).dtype for leaf in leaves]
    dtype = dtype or reduce(torch.promote_types, dtypes)
    device = options.get("device") or tensors[0].device

    def stack(data: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            return torch.stack([stack(each) for each in data])
        if isinstance(data, Tensor):
            return data.detach().reshape(()).to(device, dtype)
        return torch.full((), data, dtype=dtype, device=device)

    return stack(data).requires_grad_(options.get("requires_grad", False))


def _with_stacks(index: Any) -> Any:
    """The index, with a tensor in place of each list of numbers that has tensors among the numbers."""
    if not isinstance(index, tuple):
        return index
    stacks = (_stack_of_numbers(entry) if isinstance(entry, (list, tuple)) else None for entry in index)
    return tuple(entry if stack is None else stack for entry, stack in zip(index, stacks, strict=True))


@torch.library.custom_op("shardc::numbers", mutates_args=(), schema="(Tensor x) -> int[]")
def numbers(x: Tensor) -> list[int]:
    """The numbers of a tensor, in order: one op, and so one guard, for all of them."""
    return x.flatten().tolist()


@numbers.register_fake
def _(x: Tensor) -> list[int]:
    raise DataDependentOutputException(torch.ops.shardc.numbers.default)


def _nested(numbers: list[int], shape: Sequence[int]) -> Any:
    """The numbers as ``tolist`` of a tensor of that shape returns them."""
    if not shape:
        return numbers[0]
    step = math.prod(shape[1:])
    return [_nested(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


_GENERATOR = (
    "a generator of the model's own would draw the same numbers in every step, on every rank",
    "leave generator= out: what is drawn depends on seed, step and the index of the element alone",
)
_SEED = (
    "the model itself seeds torch's generator: it would draw the same numbers in every step",
    "leave it out: what is drawn depends on seed and step, of the parallelized module or of simulate(seed=, step=)",
)
OWN_COLLECTIVE = (
    "the model itself communicates: what it sends would be sent beside what annotations make necessary",
    "take it out and write the model for one device: shardc sends what is missing; or communicate outside of it",
)
_NUMPY = (
    "NumPy reads the values of a tensor, which are unknown during capture",
    "compute it with torch, or outside of the model",
)
_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, torch.is_nonzero),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__format__),
    *(Tensor.__contains__, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
}
_TESTS = {  # functions that give one truth value
    *(Tensor.__bool__, Tensor.item, Tensor.is_nonzero, torch.is_nonzero),
    *(Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, Tensor.__contains__),
}
_COMPARISONS = {
    *(Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, Tensor.eq, Tensor.ne),
    *(Tensor.__eq__, Tensor.__ne__),
}
_TOLIST = ("tolist", "<listcomp>")  # frames of torch's tolist, which calls item
_FROM_LISTS = {torch.tensor, torch.as_tensor}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_REFUSED: dict[Any, tuple[str, str]] = {
    Tensor.numpy: _NUMPY,
    Tensor.__array__: _NUMPY,
    Tensor.backward: (
        "the model itself calls backward",
        "return the loss and call backward on that; for a gradient inside a model there is torch.autograd.grad",
    ),
    _SET_DATA: (
        "the assignment to .data is seen by no graph",
        "write to a buffer with copy_; change parameters outside of forward",
    ),
}


@contextmanager
def python_effects(model: nn.Module) -> Iterator[None]:
    """Find effects of the block on Python's state, which no step will repeat.

    Numbers drawn by ``random`` or NumPy raise a CaptureError: every step would see the same ones. Attributes of modules
    that have other values, and dicts and lists in them that have other contents, give a warning.
    """
    who = f"forward of {type(model).__name__}"
    states, attributes = random_states(), _attributes(model)
    yield
    states_after = random_states()
    for name, before in states.items():
        if states_after[name] != before:
            problem = f"it draws from {name}: what was drawn during capture would be drawn in every step"
            raise CaptureError(who, problem, "draw with torch, or outside of the model and pass it as an argument")
    changes = [name for name, after in _attributes(model).items() if not _is_same(attributes.get(name), after)]
    if changes:
        what = f"it changes {', '.join(changes[:4])}{', …' * (len(changes) > 4)}"
        problem = "that happens while it is captured, and in no step after"
        remedy = "hold what changes from step to step in a buffer, and return what is read outside of forward"
        warnings.warn(error_text(who, what, problem, remedy), stacklevel=4)


@contextmanager
def no_seeds() -> Iterator[None]:
    """In the block seeding torch's generator raises an Unfit."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unfit(*_SEED)

    with ExitStack() as stack:
        for holder, name in product((torch, torch.random), ("manual_seed", "seed")):
            stack.enter_context(override_attribute(holder, name, refuse))
        yield


def random_states() -> dict[str, bytes]:
    """The states of Python's and NumPy's own generators, pickled, by name."""
    numpy = sys.modules.get("numpy.random")
    numpy_state = {} if numpy is None else {"numpy.random": pickle.dumps(numpy.get_state(legacy=False))}
    return {"random": pickle.dumps(random.getstate()), **numpy_state}


def set_random_states(states: Mapping[str, bytes]) -> None:
    """Put the generators back into states that they had."""
    random.setstate(pickle.loads(states["random"]))
    if "numpy.random" in states:
        sys.modules["numpy.random"].set_state(pickle.loads(states["numpy.random"]))


def _attributes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The attributes of all modules by path, each with a copy if it is a dict or a list. Torch's own are left out."""
    return {
        f"{path}.{name}" if path else name: (value, value.copy() if isinstance(value, (dict, list)) else ())
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not any(f"{name}{suffix}" in module._parameters for suffix in _NORMED)
    }


_OF_TORCH = {*vars(nn.Module()), "forward", "_flat_weights", "_flat_weight_refs"}  # the last two of recurrent layers
_NORMED = ("_g", "_v", "_orig")  # hooks of torch compute the attribute from these parameters before each forward


def _is_same(before: tuple[Any, Any] | None, after: tuple[Any, Any]) -> bool:
    """Whether an attribute is unchanged. ``before``: None if it did not exist; then reading it outside is an error."""
    if before is None:
        return True
    (old, old_entries), (new, entries) = before, after
    return hold_same(old_entries, entries) if old is new else fingerprint(old) == fingerprint(new)


def capture_error(error: Exception, model: nn.Module) -> CaptureError:
    """The error to show for an error during capture, with the user's line and module that raised it."""
    where = failing_place(error, model)
    if isinstance(error, Unfit):
        return CaptureError(where, error.problem, error.remedy)
    if is_collective(error):
        return CaptureError(where, *OWN_COLLECTIVE)
    reason = f" ({error.__cause__})" if isinstance(error.__cause__, NoValueError) else ""
    code = failing_line(error).split(": ", 1)[-1]
    is_check = code.startswith("assert ") or (code.startswith("if ") and ": raise " in code)
    if isinstance(error, UnknownValueError) or UnknownNumber.__name__ in str(error):
        problem = "the model computes with the value of a tensor, which is unknown during capture"
        remedy = "compute with the tensor, without item() and float(); print(x.item()) and assert x.item() > 0 may stay"
    elif isinstance(error, DataDependentOutputException) and is_check:
        problem = f"the model checks the values of a tensor, which are unknown during capture{reason}"
        remedy = "check outside of the model, or write torch._assert(condition, message), which is passed over"
    elif isinstance(error, DataDependentOutputException):
        problem = f"what runs next depends on the value of a tensor, which is unknown during capture{reason}"
        comparison = "branch on a comparison of tensors (if (a == b).all():, if x.max() > 3:), "
        remedy = (
            f"{'' if RANDOM in reason else comparison}use torch.where or torch.cond, or pass the number to the model"
        )
    elif isinstance(error, DynamicOutputShapeException):
        problem = f"the shape of a result depends on the values of a tensor{reason}"
        remedy = "use torch.where(mask, new, old), or multiply by the mask, instead of indexing with it"
    elif is_lookup_by_value(error):
        problem = "what is looked up depends on the value of a tensor, which is unknown during capture"
        remedy = (
            "run all that could be chosen and weigh the results (torch.where, a mask), or pass the number to the model"
        )
    elif _WRITTEN in str(error):
        problem = "it writes to a tensor that is a plain attribute or a global, which no step would repeat"
        remedy = "hold it in a buffer: self.register_buffer(name, tensor, persistent=False)"
    elif any(text in str(error) for text in _NO_DATA):
        problem = "the values of a tensor are read, which are unknown during capture"
        remedy = (
            "compute it with torch: torch.stack, not torch.Tensor, of numbers; store and print outside of the model"
        )
    else:
        problem = error_line(error)
        remedy = "run the model eagerly on these inputs; if that works, write this line with other ops of torch"
    return CaptureError(where, problem, remedy)


_WRITTEN = "mutating a non-functional tensor with a functional tensor"
_NO_DATA = ("its data is not allocated yet", "the data pointer on an invalid python storage")


def is_collective(error: Exception) -> bool:
    """Whether an error comes from a collective of torch.distributed; torch has no better one under tracing."""
    return isinstance(error, AssertionError) and "the function c10d." in str(error)


def is_lookup_by_value(error: Exception) -> bool:
    """Whether a lookup failed by a name or key that was computed from a traced tensor."""
    return isinstance(error, (LookupError, AttributeError)) and "FunctionalTensor(" in str(error)


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


# Operands that decide the shapes of results by their own shape alone, not by their values.
READ_BY_SHAPE: Mapping[Any, tuple[int, ...]] = {torch.ops.aten._ctc_loss.Tensor: (0,)}


class NoValueError(LookupError):
    """The result of an op is unknown before the program runs; the message says why."""


RANDOM = "it depends on numbers that are drawn at random"


_GENERATED = ("<frozen", "<string", "<eval_with_key")
_DISPATCH = ("handle_torch_function", "__torch_function__")  # by which torch calls a mode
_SUBCLASSES = os.path.join(os.path.dirname(torch.__file__), "_subclasses", "")  # their methods call modes again


def user_location(frame: FrameType | None, stop: CodeType | None = None) -> str:
    """``file.py:line`` of the user's innermost frame, from ``frame`` up to the one that runs ``stop``."""
    while frame is not None and frame.f_code is not stop:
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users_line(frame: FrameType | None) -> bool:
    """Whether the user's line called the function of torch that a mode handles in ``frame``."""
    return users_frame(frame) is not None


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the user's line that called the function of torch that a mode handles in ``frame``, if one did."""
    frame = _caller(frame)
    return frame if frame is not None and _is_users(frame.f_code.co_filename) else None


def _caller(frame: FrameType | None, is_direct: bool = False) -> FrameType | None:
    """The frame that called the function that a mode handles in ``frame``.

    Methods of torch's tensor subclasses are skipped, unless ``is_direct``.
    """
    while frame is not None:
        is_method = frame.f_code.co_filename.startswith(_SUBCLASSES) and not is_direct
        if frame.f_code.co_name not in _DISPATCH and not is_method:
            break
        is_python = frame.f_code.co_name == _DISPATCH[0]  # the function itself has a frame
        frame = frame.f_back and frame.f_back.f_back if is_python else frame.f_back
    return frame


def failing_line(error: BaseException) -> str:
    """``file.py:line: code`` of the user's innermost frame in an error's traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return "the model"
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"


def failing_place(error: BaseException, model: nn.Module) -> str:
    """The ``failing_line``, and ``path (Class)`` of the innermost submodule in the error's traceback, if any."""
    names = {id(module): f", in {path} ({type(module).__name__})" for path, module in model.named_modules() if path}
    modules = [names.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return failing_line(error) + next(filter(None, reversed(modules)), "")


@cache
def _is_users(filename: str) -> bool:
    standard = filename.startswith((sysconfig.get_paths()["stdlib"], *_GENERATED)) and "site-packages" not in filename
    standard |= f"site-packages{os.sep}numpy{os.sep}" in filename
    homes = (os.path.dirname(torch.__file__), str(Path(__file__).resolve().parents[2]))
    return not standard and not filename.startswith(tuple(home + os.sep for home in homes))


aten = torch.ops.aten
_PASSED = TensorType((), torch.bool)  # a further result of each guard, which keeps it in the program


class GuardError(CaptureError):
    """A program ran on values for which it was not captured; raised before the step has any effect.

    ``who`` is the user's line, ``finding`` the result of an op on the values, in words, ``expected`` its result at
    capture.
    """

    def __init__(self, where: str, finding: str, expected: str) -> None:
        self.finding = finding
        problem = f"{finding}, the program was captured where it gave {expected}"
        super().__init__(where, problem, "compile it anew for these inputs, as a parallelized module does")


class Guards:
    """The guards of one trace.

    State: ``results``, a traced result of each guard; ``names``, the text of each; ``opaque``, the opaque calls, which
    graphs name by their keys alone; ``_graph``, the traced graph; ``_values`` of its placeholders; ``_unknown``, nodes
    of it that have no value before the program runs.
    """

    def __init__(self, opaque: list[Opaque]) -> None:
        self.results: list[Tensor] = []
        self.names: list[str] = []
        self.opaque = opaque
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Tensor] = {}
        self._unknown: set[fx.Node] = set()

    def begin(self, values: Sequence[Tensor | None]) -> None:
        """Set the values of the traced function's inputs, in order; None for an input without one."""
        self._graph = _tracer().graph
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._values = {
            node: value
            for node, value in zip(placeholders, values, strict=True)
            if value is not None and not value.is_meta and not isinstance(value, FakeTensor)
        }

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """The tensors that are made in the block have no value before the program runs."""
        last = last_node(self._graph)
        yield
        self._unknown.update(nodes_after(last))

    def add(self, func: Any, args: Any, kwargs: Mapping[str, Any], where: str) -> Any:
        """Return the result of an op on the values at capture, and insert a guard that it is the same in every step.

        The op is the latest node of the graph. Raises a NoValueError if its operands are unknown.
        """
        node: Any = last_node(_tracer().graph)
        if node.target is not func:
            raise NoValueError("it is part of another op")
        with _disable_current_modes(), no_python_dispatcher():
            by_shape = READ_BY_SHAPE.get(func, ())
            zeros = {node.args[i]: torch.zeros(args[i].shape, dtype=args[i].dtype) for i in by_shape}
        value = self._value(node, zeros)
        leaves, nest = pytree.tree_flatten((args, dict(kwargs)))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        call = flat_call(STEADY.get(func, func), leaves, nest, positions)
        guard = Guard(op_name(func), call, result_text(value), where)
        results = types_of(value)
        entries = results if isinstance(results, tuple) else (results,)
        types = tuple(each for each in entries if each is not None)  # numbers have none
        tensors = self._insert(guard, [leaves[i] for i in positions], types, func.tags)
        return value if not types else tensors[0] if isinstance(results, TensorType) else tuple(tensors)

    def choose(self, name: str, call: Callable[[Tensor], str], x: Tensor, where: str) -> str:
        """The text that ``call`` returns for a tensor's values at capture; every step must give the same.

        Values that are unknown before the program runs count as zeros here.
        """
        try:
            value = self._value(node_of(x), {})
        except NoValueError:
            with _disable_current_modes():
                value = torch.zeros(x.shape, dtype=x.dtype)
        with _disable_current_modes():
            found = call(value)
        self._insert(Guard(name, call, found, where), [x], (), ())
        return found

    def _insert(self, guard: Guard, operands: Sequence[Tensor], types: Sequence[Any], tags: Sequence[Any]) -> Any:
        """Insert a guard as an opaque op, and return its tensors."""
        opaque = Opaque(guard.name, guard, (*types, _PASSED), tags=tuple(tags))
        self.opaque.append(opaque)
        *tensors, passed = opaque(*operands)
        self.results.append(passed)
        self.names.append(f"{len(self.names)}: {guard.name} gives {guard.expected} at {guard.where}")
        return tensors

    def _value(self, node: fx.Node | None, known: Mapping[Any, Tensor]) -> Any:
        """The value of a node, computed from ``known`` values and those of the placeholders that it depends on.

        Raises a NoValueError if it depends on anything else.
        """
        if node is None or node.graph is not self._graph:
            raise NoValueError("it is part of another op")
        needed = reached([node], lambda each: () if each in known else each.all_input_nodes)
        read = needed - known.keys()
        if read & self._unknown:
            raise NoValueError("it depends on a gradient that comes in later")
        if any(map(is_random, read)):
            raise NoValueError(RANDOM)
        values = {**self._values, **known}
        if any(each.op == "placeholder" and each not in values for each in needed):
            raise NoValueError("it depends on tensors without values: capture with real ones")
        in_order = [each for each in node.graph.nodes if each in needed]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for each in in_order:
            is_given = each.op == "placeholder" or each in known
            copies[each] = graph.placeholder(each.name) if is_given else add_copy(graph, each, copies.__getitem__)
        graph.output(copies[node])
        given: list[Any] = [values[each] for each in in_order if copies[each].op == "placeholder"]
        module = fx.GraphModule(_tracer().root, graph)
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            # All ranks capture, and so gather the same DTensors in the same order.
            whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in given]
            return fx.Interpreter(module).run(*(value.detach() for value in whole))


class Guard:
    """An op on flat tensors whose result must be the expected one; it returns the tensors of the result and a flag.

    ``on_result`` is called with each result, in words, before the check.
    """

    def __init__(self, name: str, call: Callable[..., Any], expected: str, where: str) -> None:
        self.name, self.call, self.expected, self.where = name, call, expected, where
        self.on_result: Callable[[str], None] | None = None

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        """Run the op. Raises a GuardError if its result is not that at capture."""
        result = self.call(*operands)
        if self.on_result is not None:
            self.on_result(f"{self.name} gives {result_text(result)} at {self.where}")
        if result_text(result) != self.expected:
            raise GuardError(self.where, f"{self.name} gives {result_text(result)}", self.expected)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return [*tensors, torch.ones((), dtype=torch.bool, device=operands[0].device)]


def result_text(result: Any) -> str:
    """The part of an op's result on which a program may depend: the types of tensors, numbers and texts themselves."""
    if isinstance(result, str):
        return result
    if isinstance(result, (list, tuple)):
        return ", ".join(map(result_text, result))
    return repr(result) if (type_ := types_of(result)) is None else str(type_)


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def node_of(x: Tensor) -> fx.Node | None:
    """The node of the traced graph that computes a tensor as it is now; None for a constant."""
    if not isinstance(x, FunctionalTensor):
        return None
    torch._sync(x)  # type: ignore[attr-defined]
    return _tracked(torch._from_functional_tensor(x.elem))


def _tracked(x: Tensor) -> fx.Node | None:
    tracked = _tracer().tensor_tracker.get(x)
    return None if tracked is None else tracked.proxy.node


def constants_behind(x: Tensor) -> Iterator[Tensor]:
    """The tensors of the model, no parameters or buffers, from which the values of a tensor are computed."""
    if not isinstance(x, (FakeTensor, FunctionalTensor)):
        yield x
    elif get_proxy_mode() and (node := _tracked(x) if isinstance(x, FakeTensor) else node_of(x)) is not None:
        for each in reached([node], lambda each: each.all_input_nodes):
            if each.op == "get_attr":
                yield getattr(_tracer().root, str(each.target))


def known_number(node: fx.Node, root: nn.Module, sizes: Sizes | None = None) -> Any:
    """The number that a node returns, or None if it depends on an input or on random numbers.

    ``root`` holds the constants of the graph. ``sizes``: those to compute it for, by default those of the capture. A
    ``torch._check_tensor_all`` is taken to hold.
    """
    if any(each.target is aten._is_all_true.default for each in node.all_input_nodes):
        return True
    needed = reached([node], lambda each: () if is_size(each) else each.all_input_nodes)
    if any(each.op == "placeholder" or is_random(each) for each in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for each in (each for each in node.graph.nodes if each in needed):
        if is_size(each):
            values[each] = value_at(number_of(each.meta["val"]), sizes)
        elif each.op == "get_attr":
            values[each] = getattr(root, str(each.target))
        else:
            args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = _on_one_row(each.target, args, kwargs)
    return values[node]


def _on_one_row(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on one row where all rows of dim 0 are the same (stride 0), so that a large batch costs nothing."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    tall = {id(tensor) for tensor in tensors if tensor.ndim == ndim and ndim and tensor.shape[0] > 1}
    spread = [tensor for tensor in tensors if id(tensor) in tall and tensor.stride(0) == 0]
    if not spread or len({id(tensor) for tensor in spread}) < len(tall) or not _is_rowwise(target, args, ndim):
        return target(*args, **kwargs)
    first: Any = lambda value: value[:1] if id(value) in tall else value  # noqa: E731
    result = target(*map_aggregate(args, first), **kwargs)
    return result.expand(spread[0].shape[0], *result.shape[1:]) if result.ndim else result


def _is_rowwise(target: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether equal rows give equal rows, or one number that does not depend on their count."""
    if target in (aten.cat.default, aten.cumsum.default):
        return len(args) > 1 and args[1] % ndim != 0
    return is_pointwise(target) or target in (aten.all.default, aten.any.default)
