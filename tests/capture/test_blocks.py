"""Blocks that are alike are traced once, and the captured program is the one that all of them traced would give."""

from __future__ import annotations

import contextvars
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc.capture.capture as capturing
from shardc import CaptureError, Precision
from shardc.capture.capture import capture
from shardc.compile_region import is_same_program
from shardc.program.program import Program

COUNT = 4


class Block(nn.Module):
    """Counts how often it is traced."""

    traced = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.lift, self.lower = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        Block.traced += 1
        return x + self.lower(F.gelu(self.lift(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, make: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(make(i) for i in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class OfTorch(nn.Sequential):
    """Has no line of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())


class Dropping(Block):
    """Draws."""

    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.5)


class Returning(Block):
    """Returns an argument as it is, and a result that the last block's caller does not use."""

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        y = super().forward(x)
        return y + bias, bias, y.mean(-1)


class Sharing(Stack):
    """A bias for all blocks, and what the first ones return beside."""

    def __init__(self) -> None:
        super().__init__(Returning)
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        means, bias, x = [], self.bias * 2, x * self.scale
        for block in self.blocks:
            x, bias, mean = block(x, bias=bias)
            means.append(mean)
        return x.square().mean() + torch.stack(means[:-1]).sum()


class Tied(Stack):
    """Blocks of one weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.lift.weight = self.blocks[0].lift.weight


class Alternating(Block):
    """Half of the blocks differ by an attribute."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x.tanh() if self.index % 2 else x


class ByKind(Block):
    """Two kinds of blocks, of which an attribute tells."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = "wide" if index < COUNT - 1 else "narrow"

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x if self.kind == "wide" else x.tanh()


def results_of(program: Program) -> list[Any]:
    """What each output of a program is, as a tree of calls, whatever their order is."""
    trees: dict[fx.Node, int] = {}
    for i, node in enumerate(program.graph.nodes):
        if node.op != "output":
            args = fx.map_arg((node.args, node.kwargs), trees.__getitem__)
            trees[node] = hash((i if node.op == "placeholder" else str(node.target), repr(args), program.types(node)))
    return [node and trees[node] for node in program.results]


def same_with_and_without(
    model: nn.Module, *args: Any, patch: pytest.MonkeyPatch, is_in_order: bool = True, **options: Any
) -> None:
    """Check that the capture with blocks traced once is the one without, the sources of its nodes included.

    ``is_in_order``: sums of what several blocks share come where they come without.
    """
    once = capture(model, args, {}, **options)
    with patch.context() as context:
        context.setattr(capturing, "alike_blocks", lambda model: [])
        each = capture(model, args, {}, **options)
    assert once.convention.outputs == each.convention.outputs
    assert once.program.notes == each.program.notes
    assert results_of(once.program) == results_of(each.program)
    if not is_in_order:
        return
    assert is_same_program(once.program, each.program)
    for one, other in zip(once.program.graph.nodes, each.program.graph.nodes, strict=True):
        source, expected = once.program.source(one), each.program.source(other)
        assert (one.name, source, source.ordinal) == (other.name, expected, expected.ordinal)


@pytest.mark.parametrize(
    "make",
    [Stack, lambda: Stack(Dropping), lambda: Stack(OfTorch), Sharing, Tied],
    ids=["plain", "draws", "of torch", "shares", "tied"],
)
@pytest.mark.parametrize("kind", ["train", "no grad", "precision", "autocast", "frozen"])
def test_the_program_is_that_of_all_blocks(make: Callable[[], nn.Module], kind: str, monkeypatch: Any) -> None:
    model = make()
    options: dict[str, Any] = {"train": kind != "no grad"}
    if kind == "precision":
        options["precision"] = Precision()
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lower" in name)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        is_in_order = not isinstance(model, Sharing | Tied)
        same_with_and_without(model, torch.randn(3, 8), patch=monkeypatch, is_in_order=is_in_order, **options)


def test_two_blocks_are_traced(monkeypatch: Any) -> None:
    monkeypatch.setattr(Block, "traced", 0)
    capture(Stack(), (torch.randn(3, 8),), {})
    assert Block.traced == 2
    monkeypatch.setattr(Block, "traced", 0)
    capture(Stack(), (torch.randn(3, 8),), {}, train=False)
    assert Block.traced == 2


class Doubling(torch.autograd.Function):
    """Counts how often its backward is traced."""

    traced = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Doubling.traced += 1
        return gradient * 2


class Doubled(Block):
    def forward(self, x: Tensor) -> Any:
        return Doubling.apply(super().forward(x))


def test_of_the_second_block_the_forward_alone_is_traced(monkeypatch: Any) -> None:
    monkeypatch.setattr(Block, "traced", 0)
    monkeypatch.setattr(Doubling, "traced", 0)
    capture(Stack(Doubled), (torch.randn(3, 8),), {})
    assert (Block.traced, Doubling.traced) == (2, 1)
    same_with_and_without(Stack(Doubled), torch.randn(3, 8), patch=monkeypatch)


def test_blocks_that_differ_by_an_attribute_are_traced_each(monkeypatch: Any) -> None:
    same_with_and_without(Stack(Alternating), torch.randn(3, 8), patch=monkeypatch)


def test_blocks_of_the_commonest_kind_are_traced_once(monkeypatch: Any) -> None:
    same_with_and_without(Stack(ByKind), torch.randn(3, 8), patch=monkeypatch)
    monkeypatch.setattr(Block, "traced", 0)
    capture(Stack(ByKind), (torch.randn(3, 8),), {}, train=False)
    assert Block.traced == 3


# What a block may do besides: each is found, and its model captured whole.


class Scaled(Block):
    """Reads its index."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / (self.index + 1)


class Normed(Block):
    """Writes to buffers."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return self.batch(super().forward(x))


class Remembering(Block):
    """Keeps a tensor, which the model reads."""

    def forward(self, x: Tensor) -> Any:
        self.latest = x.mean()
        return super().forward(x)


class Writing(Block):
    """Writes to its argument."""

    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        return super().forward(x)


class Viewing(Block):
    """Returns a view of its argument, to which the model writes."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if self.training is None else x.view(-1, 8)


class Halving(Block):
    """Returns one half of its argument, to which the model writes."""

    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, super().forward(x)], -1) if self.training is None else x.chunk(1)[0]


class Penalized(Stack):
    """Takes gradients itself, of one of the results, and of all in the end."""

    def __init__(self, is_differentiated: bool) -> None:
        super().__init__(Returning)
        self.is_differentiated = is_differentiated

    def forward(self, x: Tensor) -> Tensor:
        x = first = x * self.scale
        means = []
        for block in self.blocks:
            x, _, mean = block(x, bias=self.scale)
            means.append(mean)
        [slope] = torch.autograd.grad(means[-1].sum(), [first], create_graph=self.is_differentiated, retain_graph=True)
        return x.square().mean() + slope.square().sum() + torch.stack(means[:-1]).sum()


class Counted(Block):
    """Counts in the model, which reads it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.counts.append(1)
        return super().forward(x)


class Effects(Stack):
    """Reads what blocks leave behind."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            y = block(x)
            if isinstance(block, Viewing | Halving):
                y += 1
                y = y + x
            x = y
        latest = [block.latest for block in self.blocks if hasattr(block, "latest")]
        counts = [sum(block.counts) for block in self.blocks if hasattr(block, "counts")]
        return x.square().mean() + sum(latest) + sum(counts)


class Leaking(Stack):
    """Hears of tensors inside of blocks, by hooks that are set before it runs or as it does."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.is_late, self.heard = is_late, list[Tensor]()
        if not is_late:
            self.hook()

    def hook(self) -> None:
        for block in self.blocks:
            block.lift.register_forward_hook(lambda module, args, output: self.hear(output))

    def hear(self, output: Tensor) -> Tensor:
        self.heard.append(output.mean())
        return output

    def forward(self, x: Tensor) -> Tensor:
        self.heard.clear()
        if self.is_late:
            self.hook()
        loss = super().forward(x)
        return loss + torch.stack(self.heard).sum()


LOG: list[Tensor] = []


class Logging(Block):
    """Leaves tensors where nothing of the model is."""

    def forward(self, x: Tensor) -> Any:
        LOG.append(x.mean())
        return super().forward(x)


class Logged(Stack):
    """Reads them."""

    def __init__(self) -> None:
        super().__init__(Logging)

    def forward(self, x: Tensor) -> Tensor:
        LOG.clear()
        loss = super().forward(x)
        return loss + torch.stack(LOG).sum()


VARIABLE, LAYER = contextvars.ContextVar("scale", default=1.0), [0]


class Outside(Block):
    """Reads what is set around it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * VARIABLE.get() * (LAYER[0] + 1)


class Setting(Stack):
    """Sets it, for all blocks or for each, and sets it back."""

    def __init__(self, is_each: bool) -> None:
        super().__init__(Outside)
        self.is_each = is_each

    def forward(self, x: Tensor) -> Tensor:
        token = VARIABLE.set(3.0)
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            LAYER[0] = i if self.is_each else 1
            x = block(x)
        VARIABLE.reset(token)
        LAYER[0] = 0
        return x.square().mean()


class Even(Block):
    """A class of its own."""


class ByClass(Stack):
    """Looks at the classes of blocks."""

    def __init__(self) -> None:
        super().__init__(lambda i: (Even, Block)[i % 2](i))
        self.blocks.extend((Even, Block)[i % 2](i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x) * {Even: 2.0, Block: 1.0}[type(block)]
        return x.square().mean()


class Hooked(Block):
    """Reads its index in backward alone."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * (1 + self.index))
        return y


class Found(Block):
    """Finds its place in the list."""

    home: ClassVar[list[nn.Module]] = []

    def __init__(self, index: int) -> None:
        super().__init__(index)
        Found.home[index:] = [self]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + next(i for i, each in enumerate(Found.home) if each is self))


class ByVars(Block):
    """Reads an attribute past torch."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + vars(self)["index"])


class Clearing(Stack):
    """Clears a global list once it has read it."""

    def __init__(self) -> None:
        super().__init__(Logging)

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x) + torch.stack(LOG).sum()
        LOG.clear()
        return loss


class Drawing(Stack):
    """Draws in blocks what it has seeded."""

    class Block(Block):
        """Draws."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * (2 if random.random() < 0.5 else 1)

    def __init__(self) -> None:
        super().__init__(Drawing.Block)

    def forward(self, x: Tensor) -> Tensor:
        state = random.getstate()
        random.seed(3)
        loss = super().forward(x)
        random.setstate(state)
        return loss


class Nesting(Block):
    """Writes deep into an attribute."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.state = {"sizes": [0]}

    def forward(self, x: Tensor) -> Any:
        self.state["sizes"][0] = len(x)
        return super().forward(x)


class Nested(Stack):
    """Reads it."""

    def __init__(self) -> None:
        super().__init__(Nesting)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.state["sizes"][0] = 0
        return super().forward(x) * sum(block.state["sizes"][0] for block in self.blocks)


class Skipping(Block):
    """Looks whether it has an attribute, which one of the blocks has."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 2:
            self.skip = None

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (2 if hasattr(self, "skip") else 1)


EFFECTS = {
    "set around all": lambda: Setting(False),
    "set around each": lambda: Setting(True),
    "classes": ByClass,
    "hooks of gradients": lambda: Stack(Hooked),
    "its place": lambda: Stack(Found),
    "vars": lambda: Stack(ByVars),
    "a list that is cleared after": Clearing,
    "numbers that are seeded": Drawing,
    "deep attributes": Nested,
    "an attribute that is None": lambda: Stack(Skipping),
    "reads its index": lambda: Stack(Scaled),
    "writes to buffers": lambda: Stack(Normed),
    "keeps a tensor": lambda: Effects(Remembering),
    "writes to its argument": lambda: Effects(Writing),
    "returns a view": lambda: Effects(Viewing),
    "takes gradients": functools.partial(Penalized, False),
    "takes gradients that have gradients": functools.partial(Penalized, True),
    "appends to a list": lambda: Effects(Counted),
    "hooks": functools.partial(Leaking, False),
    "hooks set late": functools.partial(Leaking, True),
    "a global list": Logged,
}


@pytest.mark.parametrize("what", EFFECTS)
@pytest.mark.filterwarnings("ignore:hooks of")
def test_what_blocks_do_besides_is_in_the_program(what: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model, x = EFFECTS[what](), torch.randn(3, 8)
    same_with_and_without(model, x, patch=monkeypatch, is_in_order=not isinstance(model, Penalized))
    LOG.clear()


class LateClearing(Clearing):
    """Its last block has a gradient of other strides than the others."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        loss = x.sum() + torch.stack(LOG).sum()
        LOG.clear()
        return loss


def test_tensors_of_an_earlier_trace_are_an_error() -> None:
    with pytest.raises(CaptureError, match="clear that as forward begins"):
        capture(LateClearing(), (torch.randn(3, 8),), {})
    LOG.clear()


def test_one_of_several_views_is_written_to(monkeypatch: Any) -> None:
    same_with_and_without(Effects(Halving), torch.randn(3, 8), patch=monkeypatch, train=False)


def test_the_model_is_left_as_it_was() -> None:
    model = Stack(Scaled)
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    capture(model, (torch.randn(3, 8),), {})
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before


class Registered(Block):
    """A class that hears of its subclasses."""

    heard: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registered.heard.append(cls.__name__)


def test_a_class_does_not_hear_of_what_stands_for_it() -> None:
    capture(Stack(Registered), (torch.randn(3, 8),), {})
    assert not Registered.heard
