"""Higher-order ops while a model is captured.

``torch.cond`` and ``while_loop`` become opaque calls: their bodies are traced apart, each with its vector-Jacobian
product, and tensors that they close over are further operands. ``associative_scan``, ``flex_attention`` and a short
``map`` or ``scan`` are written out as ops, which have rules. ``torch.compile`` inside a model does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.decompositions import attention
from shardc.capture.model import override_attribute
from shardc.capture.values.refusals import user_location
from shardc.capture.values.scores import added_to, steps_between, sum_of
from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.ops.attention.mask import Step
from shardc.ops.attention.score import ScoreMod, run_steps
from shardc.ops.reduction import wide_dtype
from shardc.program.node import last_node, takes_device
from shardc.program.opaque import Opaque, call, hold_opaques

Tensors = Sequence[Tensor]
Run = Callable[..., Tensors]
_HOME = "torch._higher_order_ops"
MAX_STEPS = 64  # of a map or scan that is written out
REPLACED = ("cond", "while_loop", "map_impl", "scan", "associative_scan", "flex_attention")  # no such op is ever called


@contextlib.contextmanager
def higher_order_ops(kept: list[Opaque]) -> Iterator[None]:
    """In the block this file's functions replace higher-order ops. ``kept`` collects opaque calls, named by key."""
    places: dict[tuple[str, str], Any] = {
        (f"{_HOME}.cond", "cond_op"): partial(_cond, kept),
        (f"{_HOME}.while_loop", "while_loop_op"): partial(_while_loop, kept),
        (f"{_HOME}.map", "map_impl"): lambda f, xs, args: _scan(kept, lambda *row: ([], f(*row, *args)), [], xs, ())[1],
        (f"{_HOME}.scan", "scan_op"): partial(_scan, kept),
        (f"{_HOME}.associative_scan", "associative_scan_op"): _associative_scan,
        ("torch.nn.attention.flex_attention", "flex_attention_hop"): _flex_attention,
        ("torch.nn.attention.flex_attention", "_validate_device"): lambda *_: None,  # ops have a backward everywhere
        ("torch", "compile"): lambda model=None, **options: (lambda fn: fn) if model is None else model,
    }
    if "torch._dynamo" in sys.modules:  # else nothing is compiled yet, and its import takes seconds
        places["torch._dynamo.config", "error_on_nested_fx_trace"] = False
    with contextlib.ExitStack() as stack:
        for (module, name), value in places.items():
            stack.enter_context(override_attribute(importlib.import_module(module), name, value))
        yield


# Opaque calls.


def _cond(kept: list[Opaque], pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any],
          operands: Any = ()) -> Any:  # fmt: skip
    """Run one branch, the same on every rank, and its backward."""
    leaves, nest = pytree.tree_flatten(operands)
    captured = Bodies("torch.cond")

    def body(fn: Callable[..., Any]) -> Body:
        return captured.body(lambda _, *leaves: fn(*pytree.tree_unflatten(list(leaves), nest)), [pred, *leaves])

    one, other = body(true_fn), body(false_fn)
    if (one.types, one.tree) != (other.types, other.tree):
        problem = f"one branch returns {_listed(one.types)}, the other {_listed(other.types)}"
        captured.refuse(problem, "let both return tensors of the same shapes and dtypes")
    branches = one.traced(), other.traced()
    forward: Run = lambda pred, *rest: branches[not pred].forward([pred, *rest])  # noqa: E731
    backward: Run = lambda pred, *rest: branches[not pred].vjp([pred, *rest])  # noqa: E731
    return _called(kept, "cond", forward, backward, one.types, [pred, *leaves, *captured.outside], one.tree)


def _while_loop(kept: list[Opaque], cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any,
                additional: Any) -> Any:  # fmt: skip
    """Run the loop whole on every rank."""
    device = next((leaf.device for leaf in carried if isinstance(leaf, Tensor)), None)
    carry = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device) for leaf in carried]
    captured, types = Bodies("while_loop"), tuple(map(TensorType.of, carry))
    bodies = [captured.body(fn, [*carry, *additional]) for fn in (cond_fn, body_fn)]
    test, step = (body.traced() for body in bodies)
    _check_carry(captured, types, step.types)
    operands = [*carry, *additional, *captured.outside]
    loop = While(test, step, len(carry), len(operands))
    return _called(kept, "while_loop", loop.forward, loop.backward, types, operands, bodies[1].tree)


def _called(kept: list[Opaque], name: str, forward: Run, backward: Run, types: tuple[TensorType, ...],
            operands: Sequence[Tensor], tree: Any) -> Any:  # fmt: skip
    calls = Opaque(name, forward, types), Opaque(f"{name}_backward", backward, floating(map(TensorType.of, operands)))
    kept += calls
    return pytree.tree_unflatten(list(call(*calls, operands)), tree)


def _check_carry(captured: Bodies, before: tuple[TensorType, ...], after: tuple[TensorType, ...]) -> None:
    if after != before:
        captured.refuse(f"its body turns {_listed(before)} into {_listed(after)}", "return a carry as it was given")


# Written out.


def _scan(kept: list[Opaque], combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor],
          additional_inputs: Any) -> Any:  # fmt: skip
    """Write out all steps and stack their outputs. A long scan is an opaque call, which runs whole on every rank."""
    if len(xs[0]) > MAX_STEPS:
        captured, types = Bodies("scan"), tuple(map(TensorType.of, init))
        body = captured.body(combine, [*init, *(x[0] for x in xs), *additional_inputs])
        step = body.traced()
        _check_carry(captured, types, step.types[: len(init)])
        stacked = (TensorType((len(xs[0]), *type_.shape), type_.dtype) for type_ in step.types[len(init) :])
        operands = [*init, *xs, *additional_inputs, *captured.outside]
        loop = Scan(step, len(init), len(xs), len(operands))
        return _called(kept, "scan", loop.forward, loop.backward, (*types, *stacked), operands, body.tree)
    carry: Any = list(init)
    outputs = []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        carry, output = combine(*pytree.tree_leaves(carry), *row, *additional_inputs)
        outputs.append(output)
    return carry, pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)


def _associative_scan(combine: Callable[..., Any], xs: Sequence[Tensor], additional_inputs: Any) -> Any:
    """A scan whose number of steps is the logarithm of the length; each step is on all pairs of neighbours at once."""
    scan = importlib.import_module(f"{_HOME}.associative_scan").generic_associative_scan
    nest = pytree.tree_structure(combine(*(x[0] for x in xs), *(x[0] for x in xs)))
    many = torch.vmap(lambda *rows: tuple(pytree.tree_leaves(combine(*rows))))
    return pytree.tree_unflatten(scan(many, list(xs), additional_inputs=additional_inputs), nest)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float,
                    kernel_options: Any, score_buffers: Any = (), mask_buffers: Any = ()) -> Any:  # fmt: skip
    """Fused attention with a mask, also if each score is changed by itself; else scores, mask and softmax as ops.

    The logsumexp is computed by separate ops, which are removed if nothing reads it.
    """
    plain = importlib.import_module(f"{_HOME}.flex_attention").math_attention
    out, *others = plain(query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
    is_unchanged = score_mod is importlib.import_module("torch.nn.attention.flex_attention")._identity
    if query.size(0) != key.size(0):
        return out, *others
    try:
        seen = _seen(query, key, block_mask[-1], mask_buffers)
        changed = ("", None) if is_unchanged else _changed(query, key, score_mod, score_buffers)
    except (RuntimeError, IndexError, TypeError, ValueError):  # a function of single positions, as vmap passes them
        return out, *others
    if changed is None or (seen is not None and seen.dim() != 4):
        return out, *others
    text, mask = changed
    if mask is None:
        mask = seen
    elif seen is not None:
        mask = torch.where(seen, mask, torch.scalar_tensor(-torch.inf, dtype=mask.dtype, device=mask.device))
    return attention(query, key, value, mask, scale, text), *others


def _vectors(query: Tensor, key: Tensor) -> list[Tensor]:
    """The indices of samples, heads, queries and keys, as ``[samples, heads, queries, keys]``."""
    sizes = *query.shape[:3], key.shape[2]
    return [
        torch.arange(size, device=query.device).view([size if i == dim else 1 for i in range(4)])
        for dim, size in enumerate(sizes)
    ]


def _seen(query: Tensor, key: Tensor, mask_mod: Callable[..., Tensor], buffers: Sequence[Any]) -> Tensor | None:
    """The mask of the keys that each query sees, computed on vectors of positions; None if all are seen."""
    seen = mask_mod(*_vectors(query, key), *buffers)
    return seen if seen.dim() else None


def _changed(
    query: Tensor, key: Tensor, score_mod: Callable[..., Tensor], buffers: Sequence[Any]
) -> tuple[str, Tensor | None] | None:
    """A function of scores as a change of each by itself, the text of a ``ScoreMod``, and a term that is then added.

    None for a function of another form.
    """
    captured, vectors = Bodies("flex_attention"), _vectors(query, key)
    scores = query.new_empty((), dtype=wide_dtype(query.dtype)).expand(*query.shape[:3], key.shape[2])
    traced = captured.body(lambda *given: score_mod(*given, *buffers), [scores, *vectors]).traced()
    root, added = added_to(traced.forward_graph.graph)
    first = next(iter(root.graph.nodes))
    changed = "" if root is first else _changing(steps_between([first], root), scores)
    if changed is None:
        return None
    total = sum_of(traced.forward_graph, added, [*vectors, *captured.outside])
    mask = None if total is None else total.reshape((1,) * (4 - total.dim()) + total.shape).to(query.dtype)
    return changed, mask


def _changing(steps: tuple[Step, ...] | None, scores: Tensor) -> str | None:
    """The text of the ``ScoreMod`` of these steps; None if there are none, or if its derivative is not such steps."""
    if steps is None:
        return None
    vjp = Bodies("flex_attention").body(lambda s: run_steps(steps, [s]), [scores]).traced().vjp_graph.graph
    results: Any = last_node(vjp).args[0]
    derivative = steps_between([node for node in vjp.nodes if node.op == "placeholder"], results[0])
    return None if derivative is None else ScoreMod(steps, derivative).text


def _listed(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"


@dataclass(frozen=True)
class TracedBody:
    """A body as two graphs over flat tensors: from operands to results of these ``types``, and its backward.

    The backward takes the operands and the gradients of floating results; it returns those of floating operands.
    """

    forward_graph: fx.GraphModule
    vjp_graph: fx.GraphModule
    types: tuple[TensorType, ...]

    def forward(self, operands: Tensors) -> Tensors:
        """The results of the body, on the device of the operands."""
        return _OnDevice(self.forward_graph, operands[0].device).run(*operands)

    def vjp(self, operands: Tensors) -> Tensors:
        """The vector-Jacobian product: the gradient of every floating operand, zeros where there is none."""
        return _OnDevice(self.vjp_graph, operands[0].device).run(*operands)


@dataclass
class Bodies:
    """The bodies of one higher-order op, and the outer ``tensors`` that they close over, which are operands of all.

    ``tensors`` grows with each call of ``body``; bodies are traced after the last of these calls.
    """

    name: str
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def outside(self) -> list[Tensor]:
        """The outer tensors as seen by the op. Inside a body of another op they are operands of that op."""
        return [torch.ops.aten.alias(tensor) for tensor in self.tensors]

    def body(self, fn: Callable[..., Any], operands: Sequence[Tensor]) -> Body:
        """The body of a function, which runs once to find the tensors that it reads and the nesting of its result."""
        body = Body(self, fn, operands)
        with _apart() as mode:
            fakes = list(map(_standin, operands))
            with _Outer(mode, self.tensors):
                leaves, body.tree = pytree.tree_flatten(fn(*fakes))
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                self.refuse("a function given to it returns what is no tensor", "return tensors alone")
            body.types = tuple(map(TensorType.of, leaves))
        return body

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raise a CaptureError that names the user's line."""
        where = user_location(sys._getframe(1)) or "the model"
        raise CaptureError(f"{where}: {self.name}", problem, remedy)


class Body:
    """A function argument of a higher-order op."""

    tree: Any
    types: tuple[TensorType, ...]
    mode: FakeTensorMode

    def __init__(self, captured: Bodies, fn: Callable[..., Any], operands: Sequence[Tensor]) -> None:
        self.captured, self.fn, self.operands = captured, fn, operands

    def traced(self) -> TracedBody:
        """The graphs of the body, over its operands and then the outer tensors of all bodies."""
        operands = [*self.operands, *self.captured.tensors]
        with _apart() as self.mode:
            fakes = list(map(_standin, operands))
            tangents = [torch.empty(t.shape, dtype=t.dtype, device=fakes[0].device) for t in floating(self.types)]
            # Operands are returned as they are at the end, which shows in-place changes.
            forward = _graph(lambda *operands: [*self._call(operands), *operands], fakes)
            self._check(forward, len(operands))
            vjp = _graph(self._vjp, [*fakes, *tangents])
        return TracedBody(forward, vjp, self.types)

    def _call(self, operands: Sequence[Tensor]) -> list[Tensor]:
        size = len(self.operands)
        inner = {id(outer): tensor for outer, tensor in zip(self.captured.tensors, operands[size:], strict=True)}
        with _Outer(self.mode, [], inner):
            return pytree.tree_leaves(self.fn(*operands[:size]))

    def _vjp(self, *tensors: Tensor) -> list[Tensor]:
        size = len(self.operands) + len(self.captured.tensors)
        operands = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors[:size]]
        with torch.enable_grad():
            results = [tensor for tensor in self._call(operands) if tensor.is_floating_point()]
        pairs = [(r, t) for r, t in zip(results, tensors[size:], strict=True) if r.requires_grad]
        sources = [tensor for tensor in operands if tensor.is_floating_point()]
        if not pairs or not sources:
            return [torch.zeros_like(source) for source in sources]
        gradients = torch.autograd.grad([r for r, _ in pairs], sources, [t for _, t in pairs], allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True)]

    def _check(self, forward: fx.GraphModule, count: int) -> None:
        """Refuse a body that draws random numbers or writes to an operand; drop the operands from its results."""
        placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
        output = last_node(forward.graph)
        results: Any = output.args[0]
        if list(results[-count:]) != placeholders:
            self.captured.refuse("a function given to it changes a tensor in place that is not its own", "clone it")
        for node in forward.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                problem = f"{node.target} in it draws random numbers, which would not be the same on every rank"
                self.captured.refuse(problem, "draw them before, and give them to it as an operand")
        output.args = (list(results[:-count]),)
        forward.graph.eliminate_dead_code()
        forward.recompile()


class _Outer(TorchFunctionMode):
    """Replaces tensors of the outer trace by their stand-ins in a body.

    ``standins``: by the id of an outer tensor. A new outer tensor is added to ``outer`` and gets a stand-in.
    """

    def __init__(self, mode: FakeTensorMode, outer: list[Tensor], standins: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.mode, self.outer = mode, outer
        self.standins = dict(standins or {id(tensor): _standin(tensor) for tensor in outer})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self.mode:  # else a body in this body
            args, kwargs = pytree.tree_map_only(Tensor, self._inside, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _inside(self, tensor: Tensor) -> Tensor:
        fake = torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor
        is_outer = isinstance(fake, FakeTensor) and fake.fake_mode is not self.mode  # else a constant, or of this body
        if id(tensor) not in self.standins and is_outer:
            self.outer.append(tensor)
            self.standins[id(tensor)] = _standin(tensor)
        return self.standins.get(id(tensor), tensor)


class _OnDevice(fx.Interpreter):
    """Runs a traced body on the device of its operands."""

    def __init__(self, graph: fx.GraphModule, device: torch.device) -> None:
        super().__init__(graph)
        self.device = device

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        placed = {**kwargs, "device": self.device} if takes_device(target) else kwargs
        return super().call_function(target, args, placed)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to(self.device)


@contextlib.contextmanager
def _apart() -> Iterator[FakeTensorMode]:
    """In the block a separate trace runs, hidden from the outer one."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher():
        yield mode


def _graph(fn: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    traced = make_fx(dispatch_functionalize(fn, FunctionalTensorMode()))(*fakes)
    hold_opaques(traced)
    return traced


def _standin(tensor: Tensor) -> Tensor:
    standin = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return standin.requires_grad_(tensor.requires_grad)


def floating(types: Iterable[TensorType]) -> tuple[TensorType, ...]:
    """The floating types, whose tensors have gradients."""
    return tuple(type_ for type_ in types if type_.dtype.is_floating_point)


@dataclass(frozen=True, slots=True)
class While:
    """``while test(state, rest): state = step(state, rest)``; of ``num_given`` operands ``size`` are the state."""

    test: TracedBody
    step: TracedBody
    size: int
    num_given: int

    def forward(self, *given: Tensor) -> Tensors:
        """The state at the end."""
        return deque(self._states(given), maxlen=1)[0]

    def backward(self, *given: Tensor) -> Tensors:
        """The gradients of floating operands, from the operands and the gradients of the final state."""
        operands, tangents = given[: self.num_given], given[self.num_given :]
        rest = operands[self.size :]
        sums = _zeros(rest)
        for state in reversed(list(self._states(operands))[:-1]):
            gradients = self.step.vjp([*state, *rest, *tangents])
            sums = _added(sums, gradients[len(tangents) :])
            tangents = tuple(gradients[: len(tangents)])
        return [*tangents, *sums]

    def _states(self, given: Tensors) -> Iterator[Tensors]:
        state, rest = given[: self.size], given[self.size :]
        yield state
        while self.test.forward([*state, *rest])[0]:
            state = self.step.forward([*state, *rest])
            yield state


@dataclass(frozen=True, slots=True)
class Scan:
    """``carry, output = step(carry, row, rest)`` for every row: ``size`` carries, then ``num_xs`` columns of rows."""

    step: TracedBody
    size: int
    num_xs: int
    num_given: int

    def forward(self, *given: Tensor) -> Tensors:
        """The last carry, and the outputs of all rows, stacked."""
        steps = [results for _, results in self._steps(given)]
        outputs = zip(*(results[self.size :] for results in steps), strict=True)
        return [*steps[-1][: self.size], *(torch.stack(column) for column in outputs)]

    def backward(self, *given: Tensor) -> Tensors:
        """The gradients of floating operands, from the operands and the gradients of all floating results."""
        carry, columns, rest = self._parts(given)
        num_carry, num_rows = len(_zeros(carry)), len(_zeros(columns))
        tangents, outputs = given[self.num_given :][:num_carry], given[self.num_given :][num_carry:]
        sums, rows = _zeros(rest), list[Tensors]()
        for i, (operands, _) in reversed(list(enumerate(self._steps(given)))):
            gradients = tuple(self.step.vjp([*operands, *tangents, *(column[i] for column in outputs)]))
            tangents, parts = gradients[:num_carry], gradients[num_carry + num_rows :]
            rows.append(gradients[num_carry : num_carry + num_rows])
            sums = _added(sums, parts)
        return [*tangents, *(torch.stack(column) for column in zip(*reversed(rows), strict=True)), *sums]

    def _parts(self, given: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        end = self.size + self.num_xs
        return given[: self.size], given[self.size : end], given[end : self.num_given]

    def _steps(self, given: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
        """The operands and the results of each step."""
        carry, columns, rest = self._parts(given)
        for i in range(len(columns[0])):
            operands = [*carry, *(column[i] for column in columns), *rest]
            results = self.step.forward(operands)
            yield operands, results
            carry = results[: self.size]


def _zeros(tensors: Tensors) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors if tensor.is_floating_point()]


def _added(sums: Tensors, parts: Tensors) -> list[Tensor]:
    return [total + part for total, part in zip(sums, parts, strict=True)]
