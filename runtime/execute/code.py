"""Instructions as one Python function, for a part of a program that one rank runs again and again.

::

    def part(env, start):
        v3 = env[3]; env[3] = None
        v7 = mm(v3.reshape((8, 4)), v4)
        s8 = start(instruction8, ((v7,),))
        v9 = v5[0]; v5 = None
        (v8,) = s8(); v7 = None
        env[8] = v8

A large product whose only reader is a bucket is made where it goes in the buffer.

A loop over instructions costs as much again as a small op, most of it for memory that is read once a step.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.ops.contraction import BoundDot

from ..comm.comm import put
from .instruction import Env, Instruction, Slot, expression

NAME = "<instructions of shardc>"
aten = torch.ops.aten
METHODS = {  # of tensors, which take their arguments in half the time of the op
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.view.default: "view",
    aten.unsqueeze.default: "unsqueeze",
}
Rows = Sequence[Sequence[Any]]  # for each rank the operands
Start = Callable[[Instruction, Rows, Tensor | None], Callable[[], Sequence[Any]]]
LARGE = 1 << 16  # elements of a product that are worth a view of where they go


class Part(list[Instruction]):
    """Instructions that run again and again. State: ``_code``, once they have run, when contractions know shapes."""

    _code: Code | None = None
    _has_run = False

    def code(self) -> Code | None:
        """The function; None for the first run."""
        if self._code is None and self._has_run:
            self._code = Code(self)
        self._has_run = True
        return self._code


class Code:
    """A function that runs instructions over the ``Env`` of one rank.

    State: ``_lines``, by line of its text the instruction that it is of; ``_known``, what the text names; ``_left``,
    how often each matrix is still multiplied; ``_views``, what those are called that were made for several products;
    ``_placed``, the products that are made in a buffer, each with its bucket's slot and what its place there is called.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._known: dict[str, Any] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "put": put}
        self._left = Counter(text for each in instructions for text in _matrices(each) if "." in text)
        self._views: dict[str, str] = {}
        self._placed = _placed(instructions)
        self._lines: list[Instruction | None] = [None]
        text = ["def part(env, start):"]
        for each, line in self._text(instructions):
            text.append(f"    {line}")
            self._lines.append(each)
        exec(compile("\n".join([*text, "    return"]), NAME, "exec"), self._known)
        self._part: Callable[[Env, Start], None] = self._known["part"]

    def run(self, env: Env, start: Start) -> None:
        """Run them; ``start`` starts a collective of operands, or of the buffer they are in, and gives what waits."""
        self._part(env, start)

    def instruction_of(self, error: BaseException) -> Instruction | None:
        """The instruction that raised an error; None for a collective."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._part.__code__:
            trace = trace.tb_next
        found = None if trace is None else self._lines[trace.tb_lineno - 1]
        return None if found is None or found.collective else found

    def _text(self, instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction | None, str]]:
        """The lines of the function, each with its instruction."""
        made, started, buffers = set[int](), dict[int, Instruction](), set[int]()
        for each in instructions:
            for slot in each.waits:
                if slot in started:
                    yield started.pop(slot), f"(v{slot},) = s{slot}(); s{slot} = None"
            for slot in dict.fromkeys(each.reads):
                if slot not in made:
                    made.add(slot)
                    yield None, f"v{slot} = env[{slot}]; env[{slot}] = None"
            if each.result in self._placed and (slot := self._placed[each.result][0]) not in buffers:
                buffers.add(slot)
                yield None, f"b{slot}, p{slot} = instruction{slot}.layout.places(v{each.reads[0]})"
            yield from ((each, line) for line in self._call(each))
            made.add(each.result)
            if each.collective:
                started[each.result] = each
            for slot in each.dead:
                made.discard(slot)
                yield None, f"v{slot} = None"
        for slot, each in started.items():
            yield each, f"(v{slot},) = s{slot}()"
        yield from ((None, f"env[{slot}] = v{slot}") for slot in made)

    def _call(self, each: Instruction) -> Iterator[str]:
        """The lines of one instruction."""
        if each.collective:
            yield from self._start(each)
            return
        matrices = _matrices(each)
        if not matrices:
            yield f"v{each.result} = {_plain(each, self._known)}"
            return
        names, done = list[str](), list[str]()
        for text in matrices:
            self._left[text] -= 1
            if text not in self._views and self._left[text] > 0:
                self._views[text] = f"w{len(self._lines)}_{len(names)}"
                yield f"{self._views[text]} = {text}"
            names.append(self._views.get(text, text))
            if self._left[text] == 0 and text in self._views:
                done.append(f"{self._views.pop(text)} = None")
        assert isinstance(each.target, BoundDot)
        bias = [f"v{slot}" for slot in each.reads[2:]]
        _, out = self._placed.get(each.result, (0, ""))
        yield "; ".join([f"v{each.result} = {each.target.product_text(*names, *bias, out=out)}", *done])

    def _start(self, each: Instruction) -> Iterator[str]:
        """The lines that start a collective."""
        slot, operands = each.result, "".join(f"v{read}, " for read in each.reads)
        self._known[f"instruction{slot}"] = each
        others = [(i, read) for i, read in enumerate(each.reads) if read not in self._placed]
        if len(others) == len(each.reads):
            yield f"s{slot} = start(instruction{slot}, (({operands}),), None)"
            return
        if others:
            yield f"put([{', '.join(f'p{slot}[{i}]' for i, _ in others)}], [{', '.join(f'v{v}' for _, v in others)}])"
        yield f"s{slot} = start(instruction{slot}, (), b{slot}); b{slot} = p{slot} = None"


def _placed(instructions: Sequence[Instruction]) -> dict[int, tuple[int, str]]:
    """By slot, products that are made where they go in a buffer: the bucket's slot, and the place as code."""
    count = Counter(slot for each in instructions for slot in each.reads)
    matrices = {
        each.result
        for each in instructions
        if _matrices(each) and isinstance(each.target, BoundDot) and each.target.is_matrix
    }
    found = dict[int, tuple[int, str]]()
    for each in instructions:
        if each.layout is not None and each.collective == "all_reduce":
            for i, (slot, shape) in enumerate(zip(each.reads, each.layout.shapes, strict=True)):
                if slot in matrices and count[slot] == 1 and slot in each.dead and math.prod(shape) >= LARGE:
                    found[slot] = each.result, f"p{each.result}[{i}].view({shape})"
    return found


def _plain(each: Instruction, known: dict[str, Any]) -> str:
    """The expression of a call."""
    if each.target is operator.getitem and isinstance(each.args[0], Slot) and type(each.args[1]) is int:
        return f"v{each.args[0].index}[{each.args[1]}]"
    if each.target in METHODS and len(each.reads) == 1 and isinstance(each.args[0], Slot) and not each.kwargs:
        return f"v{each.args[0].index}.{METHODS[each.target]}({', '.join(map(repr, each.args[1:]))})"
    return expression(each.target, each.args, each.kwargs, known, "v{}".format)


def _matrices(each: Instruction) -> tuple[str, ...]:
    """Of a contraction that knows its shapes, the expressions of what is multiplied."""
    if not isinstance(each.target, BoundDot) or each.collective or not each.target.is_bound:
        return ()
    return each.target.matrix_texts(*(f"v{slot}" for slot in each.reads[:2]))
