"""The price of a plan: seconds of a step and bytes on a rank, computed from its compiled program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from torch import nn

from shardc.capture.annotations import named_by
from shardc.capture.call import names_of
from shardc.costs.count import flops_of, on_machine
from shardc.costs.memory import memory_of
from shardc.costs.step_time import COMPUTING, step_timeline
from shardc.language.machine import Machine
from shardc.options import AUTO
from shardc.passes.lower.localize import changes_work, localize
from shardc.passes.order import WHOLE
from shardc.program.program import Program
from shardc.program.traffic import collectives_of
from shardc.report.explain.blocks import Blocks, modules_of, repeated_blocks, with_blocks
from shardc.search.pricing.compiling import REFUSALS, PlanCompiler
from shardc.search.pricing.workers import Workers
from shardc.search.space.lists import glob_of_blocks, lists_of
from shardc.search.space.plan import Plan
from shardc.wire import Wire

NUM_AHEAD = 2  # plans for each process to compile ahead if each may make those after it useless
Machines = Sequence[Machine]
Question = tuple[int, Plan, Machines]  # the ``id`` of a compiler, a plan, and machines


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a step on one rank.

    ``computing``: seconds of computation, the optimizer's included. ``exposed``: seconds in which the rank waits for
    others. ``wire_bytes``: bytes sent. ``flops``: operations. The other fields are the bytes by class of ``memory_of``.
    """

    computing: float
    exposed: float
    parameters: float
    gradients: float
    optimizer: float
    saved: float
    gathered: float
    peak: float
    wire_bytes: float
    flops: float
    offloaded: float = 0.0
    saved_below: float = 0.0
    residuals: float = 0.0

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.computing + self.exposed

    def further(self, before: Price, count: int) -> Price:
        """The cost of ``count`` more blocks, if one more block raises the price from ``before`` to this one.

        Parameters are gathered block by block, so more blocks do not raise ``gathered``. If one more block shortens the
        wait, since it computes while others send, further blocks are not assumed to shorten it again.
        """
        last = Price(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))
        all_of_them = Price(*(count * getattr(last, each.name) for each in fields(self)))
        exposed = max(last.exposed, all_of_them.exposed)
        return replace(all_of_them, exposed=exposed, gathered=max(0, last.gathered))

    def plus(self, other: Price) -> Price:
        """The sum of two prices."""
        return Price(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


Prices = tuple[Price, ...]  # on each of some machines


def price_of(program: Program) -> Price:
    """The price of a lowered program or a later one, on the machine that it was compiled for."""
    computing, exposed = _seconds(program)
    sent = sum(each.times * each.wire_bytes for each in collectives_of(program))
    return Price(computing, exposed, **memory_of(program), wire_bytes=sent, flops=flops_of(program, of_rank=True))


def _seconds(program: Program) -> tuple[float, float]:
    """Seconds of a step in which a rank computes, and in which it waits for others."""
    line = step_timeline(program)
    computing = sum(task.seconds for task in line.on(COMPUTING))
    return computing, max(0.0, line.makespan - computing)


def _num_parameters(compiler: PlanCompiler) -> int:
    return len(list(compiler.model.parameters()))


@dataclass(eq=False)
class Pricer:
    """Prices plans of a model by compiling them for one and for two of its repeated blocks.

    Each further block of a list is assumed to cost what the second one adds. The price of the whole model is therefore
    the price with one block of each list, plus what the further blocks add, for lists of equal length together. A model
    of few blocks in several lists is compiled whole.

    ``lists``: the names of blocks by the path of their list; empty if the model does not run with fewer blocks, or if
    patterns ``given`` by the user name others. ``few``: the compiler for one block of each list. ``longer``: compilers
    for two blocks of the lists of one length. ``whole``: the compiler for the whole model if that is faster, else None.
    ``jobs``: the number of processes for the plans of ``ahead``.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    optimizer: str = "adamw"
    wire: Wire | None = None
    given: Sequence[str] = ()
    jobs: int = 1
    _prices: dict[object, Prices | None] = field(default_factory=dict)
    _asked: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lists, self.few = self._of_one(repeated_blocks(self.model))
        of_length: dict[int, dict[str, Blocks]] = {}
        for path, blocks in self.lists.items():
            of_length.setdefault(len(blocks), {})[path] = blocks
        first = self._first(1, self.lists)
        self.longer = {tuple(lists): self._compiler(first | self._first(2, lists)) for lists in of_length.values()}
        self.whole: PlanCompiler | None = None
        if sum(map(_num_parameters, (self.few, *self.longer.values()))) > len(list(self.model.parameters())):
            pairs, self.few = self._of_one(repeated_blocks(self.model, more_than=1))
            self.whole, self.longer = self._compiler({}) if pairs else self.few, {}
        self.compilers = {id(each): each for each in (self.few, *self.longer.values(), self.whole) if each}
        self.workers = Workers(self._answer, self.jobs)

    @property
    def num_compiled(self) -> int:
        """The number of programs compiled, without those of ``ahead`` that nobody asked for."""
        return len(self._asked)

    def _of_one(self, lists: Mapping[str, Blocks]) -> tuple[Mapping[str, Blocks], PlanCompiler]:
        """The lists, and a compiler for the model with one block of each list.

        No lists, and a compiler for the whole model, if the smaller model cannot run or lacks an annotated value.
        """
        few = self._compiler(self._first(1, lists))
        return (lists, few) if not lists or (few.can_capture and self._has_all(few)) else ({}, self._compiler({}))

    def _has_all(self, few: PlanCompiler) -> bool:
        """Whether each of the user's annotations names something in a model of few blocks."""
        names = names_of(few.model, few.args, few.kwargs)
        return all(named_by(pattern, names) for pattern in self.given)

    @property
    def blocks(self) -> str | None:
        """A glob over the blocks of the model; None if it has no list of them."""
        return glob_of_blocks(self.lists or lists_of(self.model))

    def _first(self, count: int, lists: Mapping[str, Blocks]) -> dict[str, tuple[str, ...]]:
        return {path: modules_of(blocks[:count]) for path, blocks in lists.items()}

    def _compiler(self, kept: Mapping[str, Sequence[str]]) -> PlanCompiler:
        return PlanCompiler(with_blocks(self.model, kept), self.args, self.kwargs)

    def of_few(self, plan: Plan, machines: Machines) -> Prices | None:
        """The price for one block of each list, on each machine; None for a plan that cannot be compiled."""
        return self._price(self.few, plan, machines)

    def of_all(self, plan: Plan, machines: Machines) -> Prices | None:
        """The price for the whole model, on each machine."""
        few = self.of_few(plan, machines)
        if few is None:
            return None
        if self.whole is not None:
            return self._price(self.whole, plan, machines)
        total = list(few)
        for paths, compiler in self.longer.items():
            longer = self._price(compiler, plan, machines)
            if longer is None:
                return None
            num_further = len(self.lists[paths[0]]) - 1
            for i, (price, base) in enumerate(zip(longer, few, strict=True)):
                total[i] = total[i].plus(price.further(base, num_further))
        return tuple(total)

    @property
    def num_ahead(self) -> int:
        """The number of plans to compile ahead if each may make those after it useless."""
        return NUM_AHEAD * self.jobs if self.jobs > 1 else 0

    def ahead(self, plans: Iterable[Plan], machines: Machines, of_few: bool = False) -> None:
        """Compile plans whose prices may be asked for next, in several processes if there are several ``jobs``.

        ``of_few``: only ``of_few`` will be asked for them.
        """
        if self.jobs > 1 and all(each.can_capture for each in self.compilers.values()):  # captured before the fork
            plans = list(dict.fromkeys(plans))
            self._ahead([self.few], plans, machines)
            if not of_few:
                compilable = [plan for plan in plans if self.known(plan, machines)]
                self._ahead([each for each in self.compilers.values() if each is not self.few], compilable, machines)

    def known(self, plan: Plan, machines: Machines) -> Prices | None:
        """The price for one block of each list if ``ahead`` or ``of_few`` has found one."""
        return self._prices.get(_key(id(self.few), plan, machines))

    def _ahead(self, compilers: Iterable[PlanCompiler], plans: Iterable[Plan], machines: Machines) -> None:
        questions = [(id(compiler), plan, tuple(machines)) for plan, compiler in product(plans, compilers)]
        for question, prices in self.workers.map([each for each in questions if _key(*each) not in self._prices]):
            self._prices[_key(*question)] = prices

    def _price(self, compiler: PlanCompiler, plan: Plan, machines: Machines) -> Prices | None:
        question = id(compiler), plan, machines
        key = _key(*question)
        self._asked.add(key)
        if key not in self._prices:
            self._prices[key] = self._answer(question)
        return self._prices[key]

    def _answer(self, question: Question) -> Prices | None:
        """The prices of a plan on some machines, by one compiler; None if it cannot be compiled."""
        compiler, plan, machines = question
        with suppress(*REFUSALS):
            return self._compiled_prices(self.compilers[compiler], plan, machines)
        return None

    def _compiled_prices(self, compiler: PlanCompiler, plan: Plan, machines: Machines) -> Prices:
        if plan.overlap == AUTO:  # the program depends on the links
            return tuple(price_of(self._program(compiler, plan, machine)) for machine in machines)
        program = self._program(compiler, plan, machines[0])
        price = price_of(program)
        times = [_seconds(on_machine(program, machine)) for machine in machines[1:]]
        return price, *(replace(price, computing=computing, exposed=exposed) for computing, exposed in times)

    def _program(self, compiler: PlanCompiler, plan: Plan, machine: Machine) -> Program:
        options = plan.compiler_options(self.optimizer, self.wire, machine)
        program = compiler.program(plan.stage_mesh, plan.annotations, options, until=WHOLE)
        return localize(program) if changes_work(program) else program


def _key(compiler: int, plan: Plan, machines: Machines) -> object:
    return compiler, plan, repr(tuple(machines))
