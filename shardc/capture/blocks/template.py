"""A template: the graph of one call of a block with its backward, traced apart from the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.blocks.alike import Alike, Attribute, values_of
from shardc.capture.containers import Tree, flatten, rebuild
from shardc.capture.decompositions import decompositions
from shardc.capture.model import are_unchanged, borrow, copied_attributes, replace_tensors, state_names
from shardc.capture.model_state import LatestState
from shardc.capture.values.refusals import random_states, set_random_states
from shardc.program.node import is_getitem, is_view, last_node
from shardc.program.provenance import Phase, Source

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)  # leaves of calls and results, besides tensors


class NotAlikeError(Exception):
    """A block may not stand for others, and has to be traced where it is called."""


class Tracker(Protocol):
    """Notes the source of each node that is traced while it is active.

    ``count``: the ops of forward so far; ``latest``: the source of backward's last op.
    """

    sources: dict[fx.Node, Source]
    phase: Phase
    count: int
    latest: Source

    @property
    def place(self) -> Source:
        """The present place in the model."""

    def apart(self, path: str, stop: CodeType) -> AbstractContextManager[None]:
        """In the block of code it notes a separate trace: of the module at ``path``, which the code ``stop`` runs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a tensor that a trace depends on."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor. Raises a NotAlikeError for one that is not strided."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotAlikeError
        return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def key(self) -> Hashable:
        """The layout as a hashable value; symbolic sizes are compared by their expressions."""
        sizes = tuple(each if isinstance(each, int) else each.node.expr for each in (*self.shape, *self.stride))
        return sizes, self.dtype, self.device, self.requires_grad

    def empty(self, requires_grad: bool = False) -> Tensor:
        """A new tensor of this layout."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(requires_grad)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call takes, by its index among all of them."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call makes and returns, by its index among all of them."""

    index: int


@dataclass(frozen=True, slots=True)
class Modes:
    """Torch's modes: whether gradients are on, the default dtype, and autocast's settings for each kind of device."""

    has_grad: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, torch.dtype, bool], ...]

    @staticmethod
    def now() -> Modes:
        """The present modes."""
        autocast = ((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda"))
        return Modes(torch.is_grad_enabled(), torch.get_default_dtype(), tuple(autocast))

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the block of code gradients and autocast are as in these modes."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            for kind, dtype, is_enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            yield


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A call of a block: its flattened arguments, and the block's own tensors.

    ``leaves``: those of the arguments, with an Operand for each tensor; ``operands``: each tensor once. ``state``: for
    each parameter and buffer of the block, by name, the index of its operand; ``aliases``: further names; ``modes``:
    torch's modes.
    """

    block: nn.Module
    tree: Tree
    leaves: tuple[Any, ...]
    state: Mapping[str, int]
    aliases: Mapping[str, str]
    operands: tuple[Tensor, ...]
    modes: Modes

    @staticmethod
    def of(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockCall:
        """The call of a block with these arguments. Raises a NotAlikeError for arguments that are not plain."""
        places, operands = dict[int, int](), list[Tensor]()

        def place(tensor: Tensor) -> int:
            if id(tensor) not in places:
                places[id(tensor)] = len(operands)
                operands.append(tensor)
            return places[id(tensor)]

        leaves, tree = _plain((tuple(args), dict(kwargs)))
        described = tuple(Operand(place(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        parameters, buffers, aliases = state_names(block)
        state = {name: place(tensor) for name, tensor in {**parameters, **buffers}.items()}
        return BlockCall(block, tree, described, state, aliases, tuple(operands), Modes.now())

    @property
    def key(self) -> Hashable:
        """A hashable value that is equal for calls of alike blocks that have the same trace."""
        leaves = tuple((type(leaf), repr(leaf)) for leaf in self.leaves)  # -0.0 is not 0.0, 1 not True
        layouts = tuple(Layout.of(operand).key for operand in self.operands)
        return self.tree, leaves, tuple(self.state.items()), tuple(self.aliases.items()), layouts, self.modes

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other tensors in place of the operands."""
        leaves = (tensors[leaf.index] if isinstance(leaf, Operand) else leaf for leaf in self.leaves)
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = rebuild(self.tree, leaves)
        return arguments


def _plain(value: Any) -> tuple[list[Any], Tree]:
    """The leaves of arguments or of a result, and its tree. Raises a NotAlikeError for what is not plain."""
    leaves, tree = flatten(value)
    trees = [tree]
    while trees:
        each = trees.pop()
        if each.kind not in (None, tuple, dict):
            raise NotAlikeError
        trees += each.children
    if not all(type(leaf) in PLAIN or isinstance(leaf, Tensor) for _, leaf in leaves):
        raise NotAlikeError
    return [leaf for _, leaf in leaves], tree


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A traced call. ``given``: the key of the incoming gradients, for which ``tangents`` stand.

    ``gradients``: those of the operands that require one, None for an operand without a gradient. ``forward``,
    ``backward``: the nodes in between, in order. ``sources``, the ``start`` of forward's ordinals and their number,
    ``count``, are those of the block at ``path``.
    """

    root: fx.GraphModule
    given: Hashable
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    sources: Mapping[fx.Node, Source]
    path: str
    start: int
    count: int

    @property
    def gradient_layouts(self) -> list[Layout]:
        """The layouts of the gradients that are not None."""
        return [Layout.of(node.meta["val"]) for node in self.gradients if node is not None]


@dataclass(eq=False)
class Template:
    """A traced block that stands for others like it. ``call``: the traced call; ``shapes``: those of the region.

    ``check`` raises an error for a graph that may not stand for others. ``has_backward``: whether the backward is
    traced too.

    State: ``results``, the layouts of the tensors that it makes and returns; ``tree`` and ``leaves``, those of its
    output, with an Operand or a Result for each tensor; ``traced``, the trace, whose backward is for gradients like the
    results; ``joints``, traces for other gradients; ``is_confirmed``, whether a second block has had the same trace.
    """

    model: nn.Module
    path: str
    call: BlockCall
    own_forward: Callable[..., Any]
    alike: Alike
    tracker: Tracker
    check: Callable[[fx.Graph], None]
    shapes: Any
    has_backward: bool = True
    results: tuple[Layout, ...] = ()
    tree: Tree = field(init=False)
    leaves: tuple[Any, ...] = ()
    joints: dict[Hashable, Traced] = field(default_factory=dict)
    is_confirmed: bool = False

    def __post_init__(self) -> None:
        self.layouts = [Layout.of(operand) for operand in self.call.operands]
        self._read = set[Attribute]()
        self.traced = self._trace(None if self.has_backward else {})
        self._values = values_of(self.call.block, self._read)

    def stands_for(self, block: nn.Module) -> bool:
        """Whether an alike block has the same values of the attributes that this one has read."""
        return values_of(block, self._read) == self._values

    def returned(self, results: Sequence[Tensor], operands: Sequence[Tensor]) -> Any:
        """The output of a call, from the tensors that it makes and its operands."""
        tensors = {Operand: operands, Result: results}
        leaves = (tensors[type(leaf)][leaf.index] if type(leaf) in tensors else leaf for leaf in self.leaves)
        return rebuild(self.tree, leaves)

    def joint(self, given: Mapping[int, Tensor]) -> Traced:
        """The trace of the call with a backward for gradients like these, by the index of the result.

        Raises a NotAlikeError if the block's forward is not what it was as the model ran.
        """
        layouts = {i: Layout.of(gradient) for i, gradient in given.items()}
        key = _key(layouts)
        if key == self.traced.given:
            return self.traced
        if key not in self.joints:
            joint = self.joints[key] = self._trace(layouts)
            if not is_same_forward(joint, self.traced):
                raise NotAlikeError
            self._values = values_of(self.call.block, self._read)
        return self.joints[key]

    def _trace(self, given: Mapping[int, Layout] | None) -> Traced:
        """Trace the call with its backward.

        ``given``: the layouts of incoming gradients by the index of the result; None for one of each differentiable
        result.
        """
        found: dict[str, Any] = {}

        def run(*operands: Tensor) -> list[Tensor | None]:
            found["start"] = self.tracker.count
            with self.tracker.apart(self.path, run.__code__), borrow(self.model, train=False), self.call.modes.again():
                with self.alike.noting(self.call.block, self._read):
                    results = self._forward(operands)
                    found["count"] = self.tracker.count - found["start"]
                    found["last"] = last_node(get_proxy_mode().tracer.graph)  # type: ignore[union-attr]
                    asked = {i: each for i, each in enumerate(self.results) if each.requires_grad}
                    asked = asked if given is None else dict(given)
                    found["given"] = _key(asked)
                    tangents = [layout.empty() for layout in asked.values()]
                    gradients = self._backward([results[i] for i in asked], operands, tangents)
                return [*(each.detach() for each in results), *operands, *tangents, *gradients]

        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.shapes)
        before = random_states()
        with _disable_current_modes(), fake_mode, enable_python_dispatcher():
            fakes = [layout.empty(layout.requires_grad) for layout in self.layouts]
            root = make_fx(dispatch_functionalize(run, FunctionalTensorMode()), decompositions())(*fakes)
        if random_states() != before:
            set_random_states(before)  # the numbers are drawn again when the block is traced in place
            raise NotAlikeError
        return self._traced(root, **found)

    def _forward(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the block returns."""
        tensors, state = {name: operands[i] for name, i in self.call.state.items()}, LatestState()
        replace_tensors(self.call.block, tensors, self.call.aliases)
        with torch._C.DisableTorchFunction():
            state.read(self.call.block)
        before = copied_attributes(self.model)
        args, kwargs = self.call.arguments(operands)
        output = self.own_forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if not are_unchanged(before) or not state.is_same():
                raise NotAlikeError  # it changes attributes of modules
        leaves, self.tree = _plain(output)
        places = {id(operand): i for i, operand in enumerate(operands)}
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in places]
        made = {id(result): i for i, result in enumerate(results)}
        if len(made) < len(results) or not made:
            raise NotAlikeError
        self.leaves = tuple(
            leaf if not isinstance(leaf, Tensor)
            else Operand(places[id(leaf)]) if id(leaf) in places else Result(made[id(leaf)])
            for leaf in leaves
        )  # fmt: skip
        self.results = tuple(map(Layout.of, results))
        return results

    def _backward(
        self, starts: Sequence[Tensor], operands: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands that require one."""
        sources = [operand for operand in operands if operand.requires_grad]
        if not starts or not sources:
            return [None] * len(sources)
        self.tracker.phase = "backward"
        with torch.autocast(starts[0].device.type, enabled=False):
            return torch.autograd.grad(starts, sources, tangents, allow_unused=True)

    def _traced(self, root: fx.GraphModule, start: int, count: int, last: fx.Node, given: Hashable) -> Traced:
        nodes = list(root.graph.nodes)
        operands = tuple(node for node in nodes if node.op == "placeholder")
        end: Any = last_node(root.graph).args[0]
        returned = iter(end)
        results = tuple(_without_detach(next(returned)) for _ in self.results)
        if tuple(islice(returned, len(operands))) != operands:
            raise NotAlikeError  # it writes to an argument or a buffer
        if any(_owner(node) in operands for node in results) or len({*map(_owner, results)}) < len(results):
            raise NotAlikeError  # a write to a result would be a write to an argument, or to another result
        self.check(root.graph)
        num_gradients = sum(layout.requires_grad for layout in self.layouts)
        rest = tuple(returned)
        tangents, gradients = rest[: len(rest) - num_gradients], rest[len(rest) - num_gradients :]
        apart, split = {*operands, *tangents, last_node(root.graph)}, nodes.index(last) + 1
        forward, backward = (
            tuple(node for node in part if node not in apart) for part in (nodes[:split], nodes[split:])
        )
        return Traced(
            root, given, operands, results, tangents, gradients, forward, backward, self.tracker.sources, self.path,
            start, count,
        )  # fmt: skip


def _key(layouts: Mapping[int, Layout]) -> Hashable:
    return tuple((i, replace(layout, requires_grad=False).key) for i, layout in layouts.items())


def is_same_forward(one: Traced, other: Traced) -> bool:
    """Whether two traces of blocks have the same forward."""
    return _described(one) == _described(other)


def _described(traced: Traced) -> list[Any]:
    places: dict[fx.Node, Any] = {node: f"%{i}" for i, node in enumerate((*traced.operands, *traced.forward))}

    def value(node: fx.Node) -> Any:
        constant = getattr(traced.root, str(node.target)) if node.op == "get_attr" else None
        return repr(constant.tolist()) if isinstance(constant, Tensor) and not constant.is_meta else ""

    calls = [
        (node.op, "" if node.op == "get_attr" else node.target, value(node),
         repr(fx.map_arg((node.args, node.kwargs), places.__getitem__)))
        for node in traced.forward
    ]  # fmt: skip
    return [calls, [places[node] for node in traced.results]]


def _without_detach(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten.detach.default:
        node = node.all_input_nodes[0]
    return node


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory holds the value of a node."""
    while is_view(node) or (is_getitem(node) and is_view(node.all_input_nodes[0])):  # one of several views, as of chunk
        node = node.all_input_nodes[0]
    return node
