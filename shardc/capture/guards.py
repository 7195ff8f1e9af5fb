"""What a forward may not do while it is captured, since its graph would not do it: found, and said with the line."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.location import failing_line, failing_place, is_users_line
from shardc.capture.model import changed
from shardc.language.errors import CaptureError, raised, said
from shardc.language.sharding import TensorType
from shardc.ops.linalg import STEADY
from shardc.program.inference import types_of
from shardc.program.node import ancestors, is_random, op_name
from shardc.program.opaque import Opaque, flat_call


class Unfit(RuntimeError):
    """A call that has no place in a graph."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)


class Refusals(TorchFunctionMode):
    """Raises an Unfit for what tracing would silently leave out or would fail at without a reason.

    State: ``_reads``, whether the function of torch that is running is one by which the user's line reads values; None
    where none is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reads: bool | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and args[0] is args[1]:  # a module converted to the dtype that it has
            return None
        if func in _REFUSED:
            raise Unfit(*_REFUSED[func])
        if (kwargs or {}).get("generator") is not None:
            raise Unfit(*_GENERATOR)
        before, self._reads = self._reads, func in _READS and is_users_line(sys._getframe())
        try:
            if func is Tensor.__format__ and self._reads and not args[0].ndim:
                return _formatted(*args)
            return func(*args, **(kwargs or {}))
        finally:
            self._reads = before

    def is_users(self, is_number: bool) -> bool:
        """Whether it is the user's own line that asks for a value now, and no op or module of torch."""
        return is_number if self._reads is None else self._reads


def _formatted(number: Tensor, spec: str) -> str:
    """As eagerly, by its value; one without a known value and a form may be part of a message: as a tensor prints."""
    try:
        return format(number.item(), spec)
    except DATA_DEPENDENT:
        if spec:
            raise
        return str(number)


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
    *(Tensor.__getitem__, Tensor.__setitem__),
}
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
    """Look for what the block does to Python's state, which no step does again.

    Numbers drawn by ``random`` or NumPy are a CaptureError: every step would see the same. Numbers and strings of
    modules that change are a warning.
    """
    drawn, held = _random_states(), _numbers(model)
    yield
    now = _random_states()
    for name, before in drawn.items():
        if now[name] != before:
            raise CaptureError(
                f"forward of {type(model).__name__}",
                f"it draws from {name}: what was drawn during capture would be drawn in every step",
                "draw with torch, or outside of the model and pass it as an argument",
            )
    changed = [name for name, value in _numbers(model).items() if held.get(name, value) != value]
    if changed:
        who, what = f"forward of {type(model).__name__}", f"it changes {', '.join(changed[:4])}"
        problem = "that happens while it is captured, and in no step after"
        text = said(who, what, problem, "hold what changes from step to step in a buffer")
        warnings.warn(text, stacklevel=5)


@contextmanager
def no_seeds() -> Iterator[None]:
    """In the block a generator of torch's is not seeded: an Unfit."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unfit(*_SEED)

    with ExitStack() as stack:
        for holder in (torch, torch.random):
            for name in ("manual_seed", "seed"):
                stack.enter_context(changed(holder, name, refuse))
        yield


def _random_states() -> dict[str, bytes]:
    numpy = sys.modules.get("numpy.random")
    numpy_state = {} if numpy is None else {"numpy.random": pickle.dumps(numpy.get_state(legacy=False)["state"])}
    return {"random": pickle.dumps(random.getstate()), **numpy_state}


def _numbers(model: nn.Module) -> dict[str, Any]:
    """The flags, numbers and strings of all modules, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    }


def capture_error(error: Exception, model: nn.Module) -> CaptureError:
    """What an error during capture means for the user's line that raised it, and in which module."""
    where = failing_place(error, model)
    if isinstance(error, Unfit):
        return CaptureError(where, error.problem, error.remedy)
    if is_collective(error):
        return CaptureError(where, *OWN_COLLECTIVE)
    reason = f" ({error.__cause__})" if isinstance(error.__cause__, NoValueError) else ""
    if isinstance(error, DataDependentOutputException) and _is_check(failing_line(error)):
        return CaptureError(
            where,
            f"the model checks the values of a tensor, which are unknown during capture{reason}",
            "check outside of the model, or write torch._assert(condition, message), which is passed over",
        )
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            where,
            f"what runs next depends on the value of a tensor, which is unknown during capture{reason}",
            "use torch.where or torch.cond instead of a branch, check outside of the model, or pass the number to it",
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            where,
            f"the shape of a result depends on the values of a tensor{reason}",
            "use torch.where(mask, new, old), or multiply by the mask, instead of indexing with it",
        )
    if is_lookup_by_value(error):
        return CaptureError(
            where,
            "what is looked up depends on the value of a tensor, which is unknown during capture",
            "run all that could be chosen and weigh the results (torch.where, a mask), or pass the number to the model",
        )
    if any(said in str(error) for said in _NO_DATA):
        return CaptureError(
            where,
            "the values of a tensor are read, which are unknown during capture",
            "compute it with torch: torch.stack, not torch.tensor, of numbers; store and print outside of the model",
        )
    return CaptureError(
        where,
        raised(error),
        "run the model eagerly on these inputs; if that works, write this line with other ops of torch",
    )


def _is_check(where: str) -> bool:
    """Whether a line, ``file.py:line: code``, looks at values only to complain of them."""
    code = where.split(": ", 1)[-1]
    return code.startswith("assert ") or (code.startswith("if ") and ": raise " in code)


_NO_DATA = ("its data is not allocated yet", "the data pointer on an invalid python storage")


def is_collective(error: Exception) -> bool:
    """Whether a collective of torch.distributed was called, for which torch has no better error while it is traced."""
    return isinstance(error, AssertionError) and "the function c10d." in str(error)


def is_lookup_by_value(error: Exception) -> bool:
    """Whether a name or a key was not found that was made of a traced tensor."""
    return isinstance(error, (LookupError, AttributeError)) and "FunctionalTensor(" in str(error)


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_MET = TensorType((), torch.bool)  # what a guard returns besides, so that it stays alive


class GuardError(CaptureError):
    """A program ran on values for which it was not captured: ``who`` is the user's line. Nothing has happened yet.

    ``finding`` is what an op finds in the values, in words, ``expected`` what it found when the program was captured.
    """

    def __init__(self, where: str, finding: str, expected: str) -> None:
        self.finding = finding
        problem = f"{finding}, the program was captured where it gave {expected}"
        super().__init__(where, problem, "compile it anew for these inputs, as a parallelized module does")


class NoValueError(LookupError):
    """What an op would find is not known before the program runs, since: ..."""


class Guards:
    """The guards of one trace.

    State: ``met``, a result of each guard, as traced; ``names``, what each says; ``kept``, the opaque calls, which
    graphs only name; ``_graph``, what is traced, ``_real``, the values of its placeholders, and ``_unknown``, nodes of
    it that have no value.
    """

    def __init__(self, kept: list[Opaque]) -> None:
        self.met: list[Tensor] = []
        self.names: list[str] = []
        self.kept = kept
        self._graph = fx.Graph()
        self._real: dict[fx.Node, Tensor] = {}
        self._unknown: set[fx.Node] = set()

    def begin(self, values: Sequence[Tensor | None]) -> None:
        """Tell the values of the inputs of what is traced, in order; None where there is none."""
        self._graph = _graph()
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, values, strict=True)
        self._real = {node: value for node, value in pairs if value is not None and _has_values(value)}

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """What is made in the block has no value before the program runs."""
        last = next(reversed(self._graph.nodes))
        yield
        while (last := last.next).op != "root":
            self._unknown.add(last)

    def guarded(self, func: Any, args: Any, kwargs: Mapping[str, Any], where: str) -> Any:
        """What an op finds that the latest node of the graph stands for, and from now on a guard that it finds that.

        Raises a NoValueError where that cannot be known.
        """
        found = self._found(next(reversed(_graph().nodes)), func)
        given, nest = pytree.tree_flatten((args, dict(kwargs)))
        places = [i for i, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        guard = _Guard(op_name(func), flat_call(STEADY.get(func, func), given, nest, places), says(found), where)
        results = types_of(found)
        types = (results,) if isinstance(results, TensorType) else results or ()
        assert None not in types, (func, types)
        opaque = Opaque(guard.name, guard, (*types, _MET), tags=tuple(func.tags))  # type: ignore[arg-type]
        self.kept.append(opaque)
        *tensors, met = opaque(*(given[i] for i in places))
        self.met.append(met)
        self.names.append(f"{len(self.names)}: {guard.name} gives {says(found)} at {where}")
        return found if not types else tensors[0] if isinstance(results, TensorType) else tuple(tensors)

    def _found(self, asked: fx.Node, func: Any) -> Any:
        """The value of a node, from the real values of what it depends on."""
        in_order = self._known(asked, func)
        values = [self._real[node] for node in in_order if node.op == "placeholder"]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in in_order:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[asked])
        root: Any = _mode().tracer.root
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            return fx.Interpreter(fx.GraphModule(root, graph)).run(*map(_whole, values))

    def _known(self, asked: fx.Node, func: Any) -> list[fx.Node]:
        """A node and what it depends on, in order; a NoValueError where one of them has no value."""
        needed = ancestors(asked)
        if asked.target is not func or asked.graph is not self._graph:
            raise NoValueError("it is part of another op")
        if needed & self._unknown:
            raise NoValueError("it depends on a gradient that comes in later")
        if any(map(is_random, needed)):
            raise NoValueError("it depends on numbers that are drawn at random")
        absent = [node.name for node in needed if node.op == "placeholder" and node not in self._real]
        if absent:
            raise NoValueError("it depends on tensors without values: capture with real ones")
        return [node for node in asked.graph.nodes if node in needed]


class _Guard:
    """An op on flat tensors that must find what it found before; it returns what it finds if that is tensors."""

    def __init__(self, name: str, call: Callable[..., Any], expected: str, where: str) -> None:
        self.name, self.call, self.expected, self.where = name, call, expected, where

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        found = self.call(*operands)
        if says(found) != self.expected:
            raise GuardError(self.where, f"{self.name} gives {says(found)}", self.expected)
        tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        return [*tensors, torch.ones((), dtype=torch.bool, device=operands[0].device)]


def says(found: Any) -> str:
    """What an op found that a program may depend on: the types of tensors, a number itself."""
    types = types_of(found)
    if types is None:
        return repr(found)
    return str(types) if isinstance(types, TensorType) else ", ".join(map(str, types))


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _whole(tensor: Any) -> Tensor:
    """A tensor that lies cut on many ranks, gathered: all of them capture, and ask for the same ones in one order."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _mode() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode


def _graph() -> fx.Graph:
    graph: fx.Graph = _mode().tracer.graph
    return graph
