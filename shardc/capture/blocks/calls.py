"""Calls of alike blocks: each is two nodes, forward and backward, while the model is traced, then it is written out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardc.capture.blocks.alike import MIN_ALIKE, Alike
from shardc.capture.blocks.template import BlockCall, NotAlikeError, Template, Traced, Tracker, is_same_forward
from shardc.capture.model import override_attribute
from shardc.capture.model_state import LatestState
from shardc.capture.values.refusals import Unfit
from shardc.program.node import add_copy, is_getitem
from shardc.program.provenance import Source

MAX_TEMPLATES = 4  # for alike blocks that are called in different ways; further calls are traced in place
_KEYS = count()
_ALIVE: WeakValueDictionary[int, Placed] = WeakValueDictionary()  # by the key that torch's ops take


@dataclass(eq=False)
class Placed:
    """A call of a block in the graph of the model. ``traced``: its trace, with its own backward once it has one."""

    path: str
    block: nn.Module
    template: Template
    source: Source
    start: int
    traced: Traced = field(init=False)
    has_backward: bool = False
    key: int = field(default_factory=lambda: next(_KEYS))

    def __post_init__(self) -> None:
        self.traced = self.template.traced
        _ALIVE[self.key] = self

    def source_of(self, node: fx.Node) -> Source | None:
        """The source of a node of the traced call, with this block in place of the traced one."""
        traced, source = self.traced, self.traced.sources.get(node)
        if source is None:
            return None
        module = self.path + source.module.removeprefix(traced.path) if _is_in(source.module, traced.path) else ""
        ordinal = source.ordinal if source.ordinal < 0 else source.ordinal - traced.start + self.start
        location = source.location or self.source.location  # for torch's own modules the line that calls the block
        return Source(module or source.module, location, source.phase, self.source.marks, ordinal)


def _is_in(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


@dataclass(eq=False)
class BlockCalls:
    """The calls of a model's alike blocks in one trace. ``check``, ``shapes``: those of ``Template``.

    State: ``placed``, the calls that are nodes of the graph; ``templates``, by the key of the calls that they stand
    for; ``states``, those of the blocks before the model runs, by path; ``is_tracing``, whether a template is traced.
    """

    model: nn.Module
    groups: Sequence[Alike]
    tracker: Tracker
    check: Callable[[fx.Graph], None]
    shapes: Any
    placed: list[Placed] = field(default_factory=list)
    templates: dict[Hashable, list[Template]] = field(default_factory=dict)
    states: dict[str, LatestState] = field(default_factory=dict)
    is_tracing: bool = False

    def stand_in(self) -> None:
        """Redirect calls of the blocks to this object until the model's attributes are restored."""
        with torch._C.DisableTorchFunction():  # modes would see each reading of a shape
            for alike in self.groups:
                for path, block in alike.blocks.items():
                    block.__dict__["forward"] = self._standing(alike, path, block.forward)
                    self.states[path] = LatestState()
                    self.states[path].read(block)

    def _standing(self, alike: Alike, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_tracing:
                return forward(*args, **kwargs)
            try:
                with torch._C.DisableTorchFunction():
                    call = BlockCall.of(alike.blocks[path], args, kwargs)
                    key = alike, call.key
                    if not self.states[path].is_same():
                        raise NotAlikeError  # hooks or attributes were set since
                known = self._known(key, call.block)
                template = known or self._new_template(alike, key, path, call, forward)
                if known is not None and not known.is_confirmed:
                    self._confirm(known, path, call, forward)
            except Exception:  # if the block itself is wrong, tracing it in place raises the error
                return forward(*args, **kwargs)
            return self._place(path, template, call)

        return call

    def _known(self, key: Hashable, block: nn.Module) -> Template | None:
        """The template that already stands for a call of a block, or None."""
        return next((each for each in self.templates.get(key, ()) if each.stands_for(block)), None)

    def _new_template(
        self, alike: Alike, key: Hashable, path: str, call: BlockCall, forward: Callable[..., Any]
    ) -> Template:
        """Trace a call of a block as a template. Raises a NotAlikeError if it would stand for too few blocks."""
        if alike.attempts == MAX_TEMPLATES or alike.count_like(call.block) < MIN_ALIKE:
            raise NotAlikeError
        alike.attempts += 1
        with override_attribute(self, "is_tracing", True):
            template = Template(self.model, path, call, forward, alike, self.tracker, self.check, self.shapes)
        self.templates.setdefault(key, []).append(template)
        return template

    def _confirm(self, template: Template, path: str, call: BlockCall, forward: Callable[..., Any]) -> None:
        """Trace the forward of a second block too: this shows differences that are not in attributes.

        If it differs, raises a NotAlikeError and drops the template; further calls of these blocks are traced in place.
        """
        with override_attribute(self, "is_tracing", True):
            second = Template(
                self.model, path, call, forward, template.alike, self.tracker, self.check, self.shapes,
                has_backward=False,
            )  # fmt: skip
        if not is_same_forward(second.traced, template.traced) or second.leaves != template.leaves:
            template.alike.attempts = MAX_TEMPLATES
            self.templates = {
                key: [each for each in known if each is not template] for key, known in self.templates.items()
            }
            raise NotAlikeError
        template.is_confirmed = True

    def _place(self, path: str, template: Template, call: BlockCall) -> Any:
        """Make a node of a call, and return its result."""
        placed = Placed(path, call.block, template, self.tracker.place, self.tracker.count)
        self.placed.append(placed)
        results = _Call.apply(self, placed, *call.operands)
        self.tracker.count = placed.start + template.traced.count
        return template.returned(results, call.operands)

    def write_out(self, traced: fx.GraphModule) -> None:
        """Replace each call in the traced graph by the nodes that compute it.

        Raises a NotAlikeError if the model has tensors that a block made and did not return, and an Unfit if it still
        has such tensors when all blocks are traced in place.
        """
        if any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in _constants(traced)):
            if self.placed:
                raise NotAlikeError
            raise Unfit("it reads a tensor that an earlier trace has left in a global", "clear that as forward begins")
        values = dict[int, dict[fx.Node, fx.Node]]()
        for node in list(traced.graph.nodes):
            if node.target is torch.ops.shardc.block.default:
                placed = _ALIVE[node.args[0]]
                known = values[placed.key] = dict(zip(placed.traced.operands, node.args[1], strict=True))
                self._write(traced, node, placed, placed.traced.forward, known)
                _replace(node, [known[each] for each in placed.traced.results])
            elif node.target is torch.ops.shardc.block_backward.default:
                placed = _ALIVE[node.args[0]]
                known = values[placed.key]
                known.update(zip(placed.traced.tangents, node.args[1], strict=True))
                self._write(traced, node, placed, placed.traced.backward, known)
                _replace(node, [known[each] for each in placed.traced.gradients if each is not None])

    def _write(
        self, traced: fx.GraphModule, before: fx.Node, placed: Placed, nodes: Sequence[fx.Node],
        known: dict[fx.Node, fx.Node],
    ) -> None:  # fmt: skip
        with traced.graph.inserting_before(before):
            for node in nodes:
                copied = known[node] = add_copy(traced.graph, node, known.__getitem__)
                if node.op == "get_attr":
                    copied.target = f"_block_constant_{placed.key}_{node.target}"
                    setattr(traced, copied.target, getattr(placed.traced.root, str(node.target)))
                source = placed.source_of(node)
                if source is not None:
                    self.tracker.sources[copied] = source


def _constants(traced: fx.GraphModule) -> Iterator[Any]:
    return (getattr(traced, str(node.target)) for node in traced.graph.find_nodes(op="get_attr"))


def _replace(node: fx.Node, results: Sequence[fx.Node]) -> None:
    for user in list(node.users):
        assert is_getitem(user), user
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(calls: BlockCalls, placed: Placed, *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ops.shardc.block(placed.key, operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.calls, ctx.placed, *_ = inputs
        layouts = zip(output, ctx.placed.template.results, strict=True)
        ctx.mark_non_differentiable(*(each for each, layout in layouts if not layout.requires_grad))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        placed, template = ctx.placed, ctx.placed.template
        given = {i: tangent for i, tangent in enumerate(tangents) if tangent is not None}
        with override_attribute(ctx.calls, "is_tracing", True):
            traced = template.joint(given)
        if placed.has_backward and traced is not placed.traced:
            raise NotAlikeError  # the model calls autograd.grad too, for other results
        if not template.stands_for(placed.block):
            raise NotAlikeError  # the backward reads attributes that forward did not, and they differ
        placed.traced, placed.has_backward = traced, True
        gradients = iter(torch.ops.shardc.block_backward(placed.key, list(given.values())))
        if traced.backward:
            ctx.calls.tracker.latest = placed.source_of(traced.backward[-1])
        found = iter(placed.traced.gradients)
        needed = (layout.requires_grad and next(found) is not None for layout in template.layouts)
        return None, None, *(next(gradients) if each else None for each in needed)


def _never(key: int, operands: Sequence[Tensor]) -> list[Tensor]:
    raise AssertionError("a call of a block is written out before anything runs")


def _results(key: int, operands: Sequence[Tensor]) -> list[Tensor]:
    return [layout.empty() for layout in _ALIVE[key].template.results]


def _gradients(key: int, operands: Sequence[Tensor]) -> list[Tensor]:
    return [layout.empty() for layout in _ALIVE[key].traced.gradient_layouts]


for _name, _fake in (("block", _results), ("block_backward", _gradients)):
    _schema = "(int key, Tensor[] operands) -> Tensor[]"
    torch.library.custom_op(f"shardc::{_name}", _never, mutates_args=(), schema=_schema).register_fake(_fake)
