"""Instructions as one generated Python function, for a part of a program that one rank runs again and again.

::

    def part(env, start):
        v3 = env[3]; env[3] = None
        v7 = mm(v3.reshape((8, 4)), v4)
        s8 = start(instruction8, ((v7,),))
        v9 = v5[0]; v5 = None
        (v8,) = s8(); v7 = None
        env[8] = v8

A large product whose only reader is a bucket is written to its place in the bucket's buffer.

Interpreting an instruction costs as much as a small op, most of it for Python objects that are read once a step.
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

FILE = "<instructions of shardc>"
aten = torch.ops.aten
METHODS = {  # methods of tensors, which take their arguments in half the time of the op
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.view.default: "view",
    aten.unsqueeze.default: "unsqueeze",
}
Start = Callable[[Instruction, Sequence[Sequence[Any]], Tensor | None], Callable[[], Sequence[Any]]]
LARGE = 1 << 16  # elements of a product that is worth a view of its place in a buffer


class RepeatedInstructions(list[Instruction]):
    """A list of instructions that runs every step. State: ``_code``, made after a first run, when shapes are known."""

    _code: Code | None = None
    _has_run = False

    def code(self) -> Code | None:
        """The generated function; None for the first run."""
        if self._code is None and self._has_run:
            self._code = Code(self)
        self._has_run = True
        return self._code


class Code:
    """A generated function that runs instructions over the ``Env`` of one rank.

    State: ``_lines``: for each line of the text its instruction; ``_globals``: the names in the text; ``_uses``: how
    often each matrix is still multiplied; ``_views``: the names of matrices that several products share;
    ``_in_buffer``: products that are written to a buffer, each with its bucket's slot and the expression of its place.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._globals: dict[str, Any] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "put": put}
        self._uses = Counter(text for each in instructions for text in _matrices(each) if "." in text)
        self._views: dict[str, str] = {}
        self._in_buffer = _products_in_buffers(instructions)
        self._lines: list[Instruction | None] = [None]
        text = ["def part(env, start):"]
        for each, line in self._text(instructions):
            text.append(f"    {line}")
            self._lines.append(each)
        exec(compile("\n".join([*text, "    return"]), FILE, "exec"), self._globals)
        self._part: Callable[[Env, Start], None] = self._globals["part"]

    def run(self, env: Env, start: Start) -> None:
        """Run the instructions; ``start`` starts a collective of operands or of their buffer, and returns its wait."""
        self._part(env, start)

    def instruction_of(self, error: BaseException) -> Instruction | None:
        """The instruction that raised an error: of a collective, where it was started or waited for."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._part.__code__:
            trace = trace.tb_next
        return None if trace is None else self._lines[trace.tb_lineno - 1]

    def _text(self, instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction | None, str]]:
        """The lines of the function, each with its instruction.

        ``local``: slots in local variables; ``started``: collectives in flight; ``buffers``: slots of buckets that have
        a buffer.
        """
        local, started, buffers = set[int](), dict[int, Instruction](), set[int]()
        for each in instructions:
            for slot in each.waits:
                if slot in started:
                    yield started.pop(slot), f"(v{slot},) = s{slot}(); s{slot} = None"
            for slot in dict.fromkeys(each.reads):
                if slot not in local:
                    local.add(slot)
                    yield None, f"v{slot} = env[{slot}]; env[{slot}] = None"
            if each.result in self._in_buffer and (slot := self._in_buffer[each.result][0]) not in buffers:
                buffers.add(slot)
                yield None, f"b{slot}, p{slot} = instruction{slot}.layout.places(v{each.reads[0]})"
            yield from ((each, line) for line in (self._start(each) if each.collective else self._call(each)))
            local.add(each.result)
            if each.collective:
                started[each.result] = each
            for slot in each.dead:
                local.discard(slot)
                yield None, f"v{slot} = None"
        for slot, each in started.items():
            yield each, f"(v{slot},) = s{slot}()"
        yield from ((None, f"env[{slot}] = v{slot}") for slot in local)

    def _start(self, each: Instruction) -> Iterator[str]:
        """The lines that start a collective: of its operands, or of a buffer that some of them are in already."""
        slot = each.result
        self._globals[f"instruction{slot}"] = each
        others = [(i, read) for i, read in enumerate(each.reads) if read not in self._in_buffer]
        if len(others) == len(each.reads):
            yield f"s{slot} = start(instruction{slot}, (({''.join(f'v{read}, ' for read in each.reads)}),), None)"
            return
        if others:
            yield f"put([{', '.join(f'p{slot}[{i}]' for i, _ in others)}], [{', '.join(f'v{v}' for _, v in others)}])"
        yield f"s{slot} = start(instruction{slot}, (), b{slot}); b{slot} = p{slot} = None"

    def _call(self, each: Instruction) -> Iterator[str]:
        """The lines of an instruction that is no collective; matrices that several products share are made once."""
        matrices = _matrices(each)
        if not matrices:
            yield f"v{each.result} = {_expression(each, self._globals)}"
            return
        names, last_uses = list[str](), list[str]()
        for text in matrices:
            self._uses[text] -= 1
            if text not in self._views and self._uses[text] > 0:
                self._views[text] = f"w{len(self._lines)}_{len(names)}"
                yield f"{self._views[text]} = {text}"
            names.append(self._views.get(text, text))
            if self._uses[text] == 0 and text in self._views:
                last_uses.append(f"{self._views.pop(text)} = None")
        assert isinstance(each.target, BoundDot)
        bias = [f"v{slot}" for slot in each.reads[2:]]
        _, out = self._in_buffer.get(each.result, (0, ""))
        yield "; ".join([f"v{each.result} = {each.target.product_text(*names, *bias, out=out)}", *last_uses])


def _products_in_buffers(instructions: Sequence[Instruction]) -> dict[int, tuple[int, str]]:
    """By slot, the large products that only a bucket reads: the bucket's slot, and the expression of their place."""
    readers = Counter(slot for each in instructions for slot in each.reads)
    products = {
        each.result
        for each in instructions
        if _matrices(each) and isinstance(each.target, BoundDot) and each.target.is_matrix
    }
    result = dict[int, tuple[int, str]]()
    for each in instructions:
        if each.layout is not None and each.collective == "all_reduce":
            for i, (slot, shape) in enumerate(zip(each.reads, each.layout.shapes, strict=True)):
                if slot in products and readers[slot] == 1 and slot in each.dead and math.prod(shape) >= LARGE:
                    result[slot] = each.result, f"p{each.result}[{i}].view({shape})"
    return result


def _expression(each: Instruction, constants: dict[str, Any]) -> str:
    """The expression of a call, as a subscript or a method of its operand where possible."""
    if each.target is operator.getitem and isinstance(each.args[0], Slot) and type(each.args[1]) is int:
        return f"v{each.args[0].index}[{each.args[1]}]"
    if each.target in METHODS and len(each.reads) == 1 and isinstance(each.args[0], Slot) and not each.kwargs:
        return f"v{each.args[0].index}.{METHODS[each.target]}({', '.join(map(repr, each.args[1:]))})"
    return expression(each.target, each.args, each.kwargs, constants, "v{}".format)


def _matrices(each: Instruction) -> tuple[str, ...]:
    """The expressions of the two matrices of a contraction that knows its shapes; empty for other instructions."""
    if not isinstance(each.target, BoundDot) or each.collective or not each.target.is_bound:
        return ()
    return each.target.matrix_texts(*(f"v{slot}" for slot in each.reads[:2]))
