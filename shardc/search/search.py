"""The search: which plan of a model takes the least time, or memory, on a number of devices.

It goes from small questions to large ones. Every plan is priced by the compiler's own program for it.

1. Cuts of one axis (``pool.py``): sets of decisions that are worth an axis, over fast links and slow ones.
2. Meshes: all shapes of one, two and three axes, each axis with a set of the pool.
3. Options: ZeRO for the fastest of these plans, and recomputation where memory asks for it.
4. Refinement: single decisions of the best plans are taken out or put in until nothing gets better.

State: ``found``, the whole plans so far. All of it is deterministic; of equal plans the one is better that has fewer
options and annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

from shardc.options import Zero
from shardc.search.decision import Decision
from shardc.search.meshes import is_possible, named_axes, shapes
from shardc.search.plan import Axis, Cuts, Plan
from shardc.search.pool import Pool
from shardc.search.price import Price, Pricer
from shardc.search.task import Task

NUM_PAIRS = 8  # pairs of sets that are tried on meshes of every shape
NUM_FOR_STAGES = 4  # plans for the devices of a stage, the fastest and the smallest
NUM_WITH_OPTIONS = 8  # plans that options are tried for
NUM_REFINED = 2
GAIN = 0.8  # options make a plan no faster than this part of its time

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and its price for the whole model."""

    plan: Plan
    price: Price

    def rank(self, task: Task) -> tuple[object, ...]:
        """A smaller rank is better: what fits in memory, then the least time or memory, then the shortest plan."""
        excess = max(0.0, self.price.peak - task.memory)
        figure = task.figure(self.price.seconds, self.price.peak)
        plan = self.plan
        num_options = sum(each is not None for each in (plan.zero, plan.remat, plan.precision, plan.pipeline))
        text = str(plan.annotations)
        return excess, float(f"{figure:.6g}"), num_options, len(plan.annotations), len(text), str(plan.mesh), text


@dataclass(eq=False)
class Search:
    """The search of one model, whose ``found`` plans grow while it runs."""

    pricer: Pricer
    decisions: Sequence[Decision]
    task: Task
    progress: Progress = lambda what: None
    breadth: int = NUM_PAIRS
    data: Sequence[Cuts] = ()
    model: Sequence[Cuts] = ()
    found: dict[Plan, Found] = field(default_factory=dict)

    def run(self) -> None:
        """Search; ``best`` has the best plans so far at any time."""
        pool = Pool(self.pricer, self.task)
        decisions = pool.distinct(self.decisions)
        samples = frozenset(each for each in decisions if each.kind == "samples")
        others = [each for each in decisions if each not in samples]
        self.data, self.model = pool.sets(samples, others), pool.sets(frozenset(), others)
        self.progress(f"{len(decisions)} decisions, {len(self.data) + len(self.model)} sets of them for an axis")
        self._meshes()
        self.progress(f"{len(self.found)} plans on meshes, the best {self._text()}")
        self._options()
        self.progress(f"{len(self.found)} plans with options, the best {self._text()}")
        for each in self.best(NUM_REFINED):
            self._refine(each, decisions)
        self.progress(f"{len(self.found)} plans refined, the best {self._text()}")

    def best(self, count: int = 1) -> list[Found]:
        """The best plans so far."""
        return sorted(self.found.values(), key=lambda each: each.rank(self.task))[:count]

    def _text(self) -> str:
        best = self.best()
        return f"{best[0].plan.mesh}, {1e3 * best[0].price.seconds:.1f} ms" if best else "nothing"

    def price(self, plan: Plan, than: Plan | None = None) -> Found | None:
        """The plan with its price, kept among those found; None where it is not allowed or cannot be compiled.

        ``than``: another plan; None where two blocks tell that this one is worse than that, in time and in memory.
        """
        if plan in self.found:
            return self.found[plan]
        if not (is_possible(plan.axes) and self.task.allows(plan.axes)):
            return None
        if than is not None:
            few, other = (self.pricer.of_few(each, (self.task.machine,)) for each in (plan, than))
            if few is None or (other and few[0].seconds > other[0].seconds and few[0].peak >= other[0].peak):
                return None
        prices = self.pricer.of_all(plan, (self.task.machine,))
        if prices is None:
            return None
        self.found[plan] = Found(plan, prices[0])
        return self.found[plan]

    # Meshes.

    def _meshes(self) -> None:
        """Plans on meshes of up to three axes, those of samples before the others."""
        given = tuple(self.task.given.items())
        for precision in self.task.precisions:
            blank = Plan((), given, precision=precision)
            self._all([(each,) for each in (*self.data, *self.model)], 1, blank)
            pairs = self._all(list(product(self.data, self.model)), 2, blank, self.breadth)
            if self.task.machine.between is not None:
                self._all([(each, each) for each in self.data[:2]], 2, blank)
            triples = [(first, other, second) for first, second in pairs for other in self.model if other != second]
            self._all(triples, 3, blank, self.breadth // 2)

    def for_devices(self, devices: int) -> list[Found]:
        """The best plans for fewer devices, as the devices of one stage of a pipeline are."""
        if devices == 1:
            alone = self.price(Plan((Axis("dp", 1),), tuple(self.task.given.items())))
            return [] if alone is None else [alone, *self._with_remat(alone.plan)]
        task = replace(
            self.task, devices=devices, sizes={name: n for name, n in self.task.sizes.items() if name != "pp"}
        )
        part = Search(self.pricer, (), task, breadth=3, data=self.data[:2], model=self.model[:2])
        part._meshes()
        part._options()
        by_memory = sorted(part.found.values(), key=lambda each: each.price.peak)
        return [*part.best(NUM_FOR_STAGES), *by_memory[:NUM_FOR_STAGES]]

    def _all(
        self, cuts: Sequence[tuple[Cuts, ...]], num_axes: int, blank: Plan, most: int = 0
    ) -> list[tuple[Cuts, ...]]:
        """Price sets of cuts on all shapes; with ``most``, those alone that are best on the most even shape.

        Returns these.
        """
        every = sorted(shapes(self.task.devices, num_axes), key=lambda shape: (max(shape) / min(shape), shape[::-1]))
        if not every:
            return []
        if most:
            first = {each: self._on(every[0], each, blank) for each in cuts}
            known = [(each, found) for each, found in first.items() if found]
            best = sorted(known, key=lambda pair: pair[1].rank(self.task))
            fastest = sorted(known, key=lambda pair: pair[1].price.seconds)
            pairs = chain.from_iterable(zip(best, fastest, strict=True))
            cuts = list(dict.fromkeys(each for each, _ in pairs))[:most]
        for shape, each in product(every, cuts):
            self._on(shape, each, blank)
        return list(cuts)

    def _on(self, shape: Sequence[int], cuts: Sequence[Cuts], blank: Plan) -> Found | None:
        return self.price(replace(blank, axes=named_axes(shape, cuts)))

    # Options.

    def _options(self) -> None:
        """ZeRO for the fastest plans; recomputation for those that do not fit with it."""
        fastest = sorted(self.found.values(), key=lambda each: each.price.seconds)
        done, best = 0, float("inf")
        for base in fastest:
            if done >= NUM_WITH_OPTIONS and (best < float("inf") or done >= 3 * NUM_WITH_OPTIONS):
                break
            if GAIN * base.price.seconds > best:
                break
            variants = [base, *self._with_zero(base.plan)]
            if not any(each.price.peak <= self.task.memory for each in variants):
                variants += [found for plan in variants for found in self._with_remat(plan.plan)]
            fitting = [each.price.seconds for each in variants if each.price.peak <= self.task.memory]
            best, done = min([best, *fitting]), done + 1

    def _with_zero(self, plan: Plan) -> list[Found]:
        axes = [axis.name for axis in plan.axes if any(each.kind == "samples" for each in axis.cuts)]
        options = [Zero(axis, stage) for axis in axes for stage in self.task.stages if stage]  # type: ignore[arg-type]
        return self._priced(replace(plan, zero=zero) for zero in options)

    def _with_remat(self, plan: Plan) -> list[Found]:
        return self._priced(replace(plan, remat=remat) for remat in self.task.remats if remat is not None)

    def _priced(self, plans: Iterable[Plan]) -> list[Found]:
        return [found for plan in plans if (found := self.price(plan)) is not None]

    # Refinement.

    def _refine(self, start: Found, decisions: Sequence[Decision]) -> None:
        """Toggle single decisions of a plan's axes, as long as that makes it better."""
        best, is_better = start, True
        while is_better:
            before = best
            for plan in self._neighbours(best.plan, decisions):
                found = self.price(plan, best.plan)
                if found is not None and found.rank(self.task) < best.rank(self.task):
                    best = found
            is_better = best is not before

    def _neighbours(self, plan: Plan, decisions: Sequence[Decision]) -> Iterator[Plan]:
        for i, axis in enumerate(plan.axes):
            for decision in decisions:
                changed = replace(axis, cuts=axis.cuts ^ {decision})
                yield replace(plan, axes=(*plan.axes[:i], changed, *plan.axes[i + 1 :]))
