"""The search for the plan of a model that takes the least time, or memory, on a number of devices.

It goes from small questions to large ones. Every price is computed from the program that the compiler makes of a plan.

1. Cuts of one axis (``pool.py``): sets of decisions that are worth an axis, alone or inside an axis of samples, over
   fast links and over slow ones.
2. Meshes: all shapes of one, two and three axes, each axis with a set of the pool.
3. Options: ZeRO for the fastest of these plans, and recomputation if memory is short.
4. If memory is short (``tight.py``): all sets and pairs of the pool with these options.
5. Refinement (``refine.py``): change one thing of the best plans at a time, until no change makes them better.

The search is deterministic. Of plans whose figures are equal up to rounding,
the one with fewer options and annotations is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from math import inf

from shardc.language.partition import P
from shardc.options import Zero
from shardc.search.found import Found, first_of_each, frontier, seconds_at
from shardc.search.pool import NUM_POOL, Pool, in_order, one_by_one
from shardc.search.pricing.price import Pricer, Prices
from shardc.search.space.decision import Decision
from shardc.search.space.meshes import is_possible, least_factor, name_of, named_axes, shapes
from shardc.search.space.plan import Axis, Cuts, Plan
from shardc.search.task import Progress, Task

BREADTH = 8
BREADTH_OF_STAGES = 2  # for the devices of a pipeline's stage
NUM_SIMPLE, NEAR = 3, 1.02  # short plans that are compiled whole if their time is within this factor of the best
NEARLY = 1.1  # an estimated peak within this factor of the memory may turn out to fit
NUM_RECOMPUTING = 12  # plans that recompute all blocks and are compared as they would be with less recomputation
NUM_IDLE = 2  # pairs whose outer axis is idle
AMPLE = 0.5  # a plan with a peak below this fraction of the memory need not save memory
GAIN = 0.8  # options are assumed to reduce a plan's time to no less than this fraction


@dataclass(eq=False)
class Search:
    """The search for plans of one model. ``found`` grows while it runs.

    ``decisions``: those that change the program. ``data`` and ``model``: the pool, sets of cuts with the samples and
    without them. ``inner``: sets without samples for a short axis inside an axis of samples. ``changes``: the groups
    and decisions that are most worth changing in a plan. ``breadth``: the number of plans, or pairs of sets, that go on
    to the next question; three times as many plans if none fits.
    """

    pricer: Pricer
    task: Task
    progress: Progress = lambda what: None
    breadth: int = BREADTH
    decisions: Sequence[Decision] = ()
    data: list[Cuts] = field(default_factory=list)
    model: list[Cuts] = field(default_factory=list)
    inner: list[Cuts] = field(default_factory=list)
    changes: Sequence[Cuts] = ()
    found: dict[Plan, Found] = field(default_factory=dict)

    def run(self, decisions: Iterable[Decision]) -> None:
        """Search without refinement. ``best`` returns the best plans so far at any time."""
        pool = Pool(self.pricer, self.task)
        nothing, groups = frozenset[Decision](), pool.groups(decisions)
        of_samples = [group for group in groups if all(each.kind == "samples" for each in group)]
        samples = nothing.union(*pool.distinct(nothing, of_samples))
        others = [group for group in groups if group not in of_samples]
        of_data, of_model = pool.distinct(samples, others), pool.distinct(nothing, others)
        self.data, self.model = pool.sets(samples, of_data), pool.sets(nothing, of_model)
        outer = Axis("outer", self.task.devices // least_factor(self.task.devices), samples)
        if samples and outer.size > 1 and is_possible([outer]):
            self.inner = Pool(self.pricer, self.task, (outer,)).sets(nothing, of_model)
        named = {name_of(each) for each in (*self.data, *self.model)}
        self.model += [each for each in of_model if name_of(each) in self.task.fixed_axes - named]
        self.progress(f"{len(groups)} decisions, {len(self.data) + len(self.model)} sets of them for an axis")
        self.decisions = in_order(samples.union(*of_data, *of_model))
        foremost = [*pool.foremost(samples, of_data), *pool.foremost(nothing, of_model)]
        alone = chain.from_iterable(one_by_one(group) for group in (samples, *foremost))
        self.changes = list(dict.fromkeys((*foremost, *alone)))
        self._meshes()
        self.tell("on meshes")
        self._options()
        self.tell("with options")

    def for_stages(self, num_stages: int) -> list[Found]:
        """The plans for the devices of one stage of a pipeline that no other beats in both time and memory."""
        part = Search(self.pricer, self.task.of_stage(num_stages), breadth=BREADTH_OF_STAGES)
        part.data, part.model = self.data[:2], self.model[:2]
        part._meshes()
        part._options()
        return frontier(part.found.values())

    def best(self, count: int = 1) -> list[Found]:
        """The best plans so far: one for each mesh and set of options, and one for each price and sizes of axes."""
        kinds, prices, best = set[object](), set[object](), list[Found]()
        for each in sorted(self.found.values(), key=lambda each: each.rank(self.task)):
            mesh = str(each.plan.mesh)
            kind, price = (mesh, f"{each.plan.options}"), (each.plan.shape, each.price)
            if self.task.permits(each.plan) and kind not in kinds and price not in prices:
                best.append(each)
                kinds.add(kind)
                prices.add(price)
        return best[:count]

    def finalists(self, count: int) -> list[Found]:
        """The best plans, those with the fewest annotations of about the same time, and those that may become the best.

        The fastest that nearly fit may do so, and those that recompute all blocks where that is more than is needed.
        """
        best = self.best(count)
        most = NEAR * best[0].price.seconds if best else 0.0
        permitted = [each for each in self.found.values() if self.task.permits(each.plan)]
        near = [each for each in self._fitting(permitted) if each.price.seconds <= most]
        simple = sorted(near, key=lambda each: (len(each.plan.annotations), each.rank(self.task)))[:NUM_SIMPLE]
        nearly = [each for each in permitted if 1 < each.price.peak / self.task.memory < NEARLY]
        nearly.sort(key=lambda each: each.price.seconds)
        recomputing = sorted(self.recomputing(), key=self._with_less_recomputed)
        most_likely = (*best, *simple, *nearly[:NUM_SIMPLE], *recomputing[:NUM_SIMPLE])
        return list({each.plan: each for each in most_likely}.values())

    def recomputing(self) -> list[Found]:
        """The fastest plans that fit because they recompute all blocks, if they may recompute less."""
        if not self.task.may_recompute or self.task.is_for_memory:
            return []
        fitting = [each for each in self._fitting(self.found.values()) if each.plan.remat]
        return sorted(fitting, key=lambda each: each.price.seconds)[:NUM_RECOMPUTING]

    def _with_less_recomputed(self, found: Found) -> float:
        """The estimated seconds of a plan that recomputes all blocks, if it recomputed only what memory requires."""
        without = self.found.get(replace(found.plan, remat=None))
        return inf if without is None else seconds_at(self.task.memory, found, without)

    def tell(self, which: str) -> None:
        """Say how many plans were found, and the best one."""
        best = "".join(f", the best {each.plan.mesh}, {1e3 * each.price.seconds:.1f} ms" for each in self.best())
        self.progress(f"{len(self.found)} plans {which}{best}")

    def price(self, plan: Plan, than: Plan | None = None, clearly: float = 1 / GAIN) -> Found | None:
        """Price a plan and keep it in ``found``; None if it is not allowed or cannot be compiled.

        ``than``: another plan. The result is None as well if this one is worse on one block: slower by more than the
        factor ``clearly``, and no smaller in memory, unless ``than`` needs only a part of the memory.
        """
        if plan in self.found:
            return self.found[plan]
        if not (is_possible(plan.axes) and self.task.allows(plan.axes)):
            return None
        if than is not None and self.is_worse(plan, than, clearly, self.has_plenty(than)):
            return None
        prices = self.pricer.of_all(plan, (self.task.machine,))
        if prices is None:
            return None
        self.found[plan] = Found(plan, prices[0])
        return self.found[plan]

    def prices(self, plans: Iterable[Plan], than: Plan | None = None) -> list[Found]:
        """Price several plans, as ``price`` does; those that are not allowed or cannot be compiled are left out."""
        plans = list(plans)
        self.ahead(plans, than)
        return [found for plan in plans if (found := self.price(plan, than)) is not None]

    def ahead(self, plans: Iterable[Plan], than: Plan | None = None, clearly: float = 1 / GAIN) -> None:
        """Compile what ``price`` compiles for these plans, in several processes if the pricer has them."""
        pricer, machines = self.pricer, (self.task.machine,)
        if pricer.jobs < 2:
            return
        new = [each for each in plans if each not in self.found and is_possible(each.axes)]
        new = [each for each in new if self.task.allows(each.axes)]
        if than is not None:
            pricer.ahead([*new, than], machines, of_few=True)
            few, other, has_plenty = pricer.known, pricer.known(than, machines), self.has_plenty(than)
            new = [each for each in new if not _is_worse(few(each, machines), other, clearly, has_plenty)]
        pricer.ahead(new, machines)

    def has_plenty(self, plan: Plan) -> bool:
        """Whether time is the objective and a plan in ``found`` needs only a part of the memory."""
        return not self.task.is_for_memory and self.found[plan].price.peak < AMPLE * self.task.memory

    def is_worse(self, plan: Plan, than: Plan, clearly: float, has_plenty: bool) -> bool:
        """Whether on one block a plan cannot be compiled, or is slower than another by more than a factor, ``clearly``.

        It also has to need as much memory as the other, unless ``has_plenty``.
        """
        few, other = (self.pricer.of_few(each, (self.task.machine,)) for each in (plan, than))
        return _is_worse(few, other, clearly, has_plenty)

    # Meshes.

    def _meshes(self) -> None:
        """Price plans on meshes of up to three axes, mostly with the axes of samples first.

        The outermost axis may cut nothing: a part of the devices may be faster than all. If there are given
        annotations, each axis may cut nothing beyond what they say.
        """
        idle = frozenset[Decision]()
        nothing = [idle] * bool(self.task.given)
        data, model = [*self.data, *nothing], [*self.model, *nothing]
        for blank in self.blanks():
            if self.task.devices == 1:
                self.price(replace(blank, axes=(Axis("dp", 1),)))
            self._on_shapes([(each,) for each in (*self.data, *self.model, idle)], 1, blank)
            pairs: list[tuple[Cuts, ...]] = list(product(data, (*model, *self.data[:NUM_POOL])))
            pairs = self.best_pairs(list(self._allowed(pairs, 2)) or pairs, self._shapes(2), blank)
            self._on_shapes(pairs, 2, blank)
            self._on_shapes([pair[::-1] for pair in pairs[: self.breadth // 2]], 2, blank)
            self._on_shapes([(each, each) for each in self.data[:2]], 2, blank)
            with_idle = [(idle, each) for each in (*self.data[:NUM_POOL], *self.model[:NUM_POOL])]
            self._on_shapes(self.best_pairs(with_idle, self._shapes(2), blank)[:NUM_IDLE], 2, blank)
            every = chain([(each,) * 3 for each in nothing], _triples(pairs, model))
            triples = self._allowed(dict.fromkeys(every), 3)
            most = self.breadth // 2 if self.found else 2 * self.breadth  # perhaps only three axes are allowed
            self._on_shapes(list(islice(triples, most)), 3, blank)
            nested: list[tuple[Cuts, ...]] = list(self._allowed(product(data, self.inner), 2))
            nested = self.best_pairs(nested, sorted(self._shapes(2), reverse=True), blank)
            self._on_shapes(nested[: self.breadth // 2], 2, blank)

    def blanks(self) -> Iterator[Plan]:
        """Plans without axes, with what is given and fixed: one for each allowed precision."""
        for precision in self.task.precisions:
            yield Plan((), tuple(self.task.given.items()), precision=precision, **self.task.fixed_options)

    @property
    def is_short(self) -> bool:
        """Whether memory is to be saved: it is the objective, or the fastest plan so far does not fit."""
        return any(self.task.is_for_memory or each.price.peak > self.task.memory for each in self.frontier()[:1])

    def frontier(self) -> list[Found]:
        """The permitted plans that no other beats in both time and memory, the fastest first."""
        return frontier(each for each in self.found.values() if self.task.permits(each.plan))

    def _allowed(self, sets: Iterable[tuple[Cuts, ...]], num_axes: int) -> Iterator[tuple[Cuts, ...]]:
        """The sets for ``num_axes`` axes that the task allows on some shape."""
        for each in sets:
            if any(self.task.allows(self.axes(shape, each)) for shape in self._shapes(num_axes)):
                yield each

    def best_pairs(
        self, pairs: Sequence[tuple[Cuts, ...]], shapes: Sequence[tuple[int, ...]], blank: Plan
    ) -> list[tuple[Cuts, ...]]:
        """The best pairs for one block on the first of the shapes: by time and by time times memory, in turn."""
        plans = {each: replace(blank, axes=self.axes(shape, each)) for shape in shapes[:1] for each in pairs}
        possible = {each: plan for each, plan in plans.items() if is_possible(plan.axes)}
        self.pricer.ahead(possible.values(), (self.task.machine,), of_few=True)
        priced = {each: self.pricer.of_few(plan, (self.task.machine,)) for each, plan in possible.items()}
        costs = {each: (prices[0].seconds, prices[0].peak) for each, prices in priced.items() if prices}
        by_time = sorted(costs, key=lambda each: costs[each][0])
        by_both = sorted(costs, key=lambda each: costs[each][0] * costs[each][1])
        in_turn = chain.from_iterable(zip(by_time, by_both, strict=True))
        return list(dict.fromkeys(in_turn))[: self.breadth]

    def _shapes(self, num_axes: int) -> list[tuple[int, ...]]:
        """The shapes of meshes with ``num_axes`` axes, the most even first."""
        every = shapes(self.task.devices, num_axes)
        return sorted(every, key=lambda shape: (max(shape) / min(shape), shape[::-1]))

    def _on_shapes(self, cuts: Iterable[tuple[Cuts, ...]], num_axes: int, blank: Plan) -> None:
        """Price plans on all shapes, except those that are far slower than the fastest.

        A plan that cuts nothing does not count as the fastest if it lacks a fixed stage of ZeRO.
        """
        able = (each for each in self.found.values() if self.task.allows_zero(each.plan) or each.plan.annotations)
        fastest = min(able, key=lambda each: each.price.seconds, default=None)
        on_shapes = product(self._shapes(num_axes), cuts)
        plans = [replace(blank, axes=self.axes(shape, each)) for shape, each in on_shapes]
        self.prices(plans, fastest.plan if fastest else None)

    def axes(self, shape: Sequence[int], cuts: Sequence[Cuts], names: Sequence[str] = ()) -> tuple[Axis, ...]:
        """Axes of these sizes and cuts, with their names in this task. ``names``: their names so far."""
        return named_axes(shape, cuts, self.task.given_axes, self.task.sample_axes, names)

    # Options.

    def _options(self) -> None:
        """Try ZeRO on plans that cut samples alone and on the fastest, and recomputation if memory is to be saved."""
        num_tried, best = 0, float("inf")
        bases = sorted(self.found.values(), key=self._order_of_bases)
        for base in first_of_each(bases, lambda each: (str(each.plan.mesh), _cuts_samples_alone(each.plan))):
            is_enough = num_tried >= self.breadth * (1 if best < float("inf") else 3)
            if GAIN * base.price.seconds > best and not self.task.is_for_memory:
                continue
            if is_enough:
                return
            of_data, of_model = _axes_of_data(base.plan)
            variants = [base, *self._with_zero(base.plan, of_data), *self._with_all_cut(base.plan)]
            if self.task.is_for_memory or not self._fitting(variants):
                variants += self._with_zero(base.plan, of_model)
                remats = [remat for remat in self.task.remats if remat is not None]
                variants += self.prices(replace(each.plan, remat=remat) for each in variants for remat in remats)
            fitting = [each.price.seconds for each in self._fitting(variants)]
            best, num_tried = min([best, *fitting]), num_tried + 1

    def _order_of_bases(self, found: Found) -> tuple[bool, float]:
        is_last = not (self.task.is_for_memory or _cuts_samples_alone(found.plan))
        return is_last, found.figure(self.task)

    def _fitting(self, found: Iterable[Found]) -> list[Found]:
        fitting = (each for each in found if each.price.peak <= self.task.memory)
        return [each for each in fitting if self.task.allows_zero(each.plan)]

    def _with_zero(self, plan: Plan, axes: Iterable[str]) -> list[Found]:
        return self.prices(replace(plan, zero=zero) for zero in self.zeros(plan, axes, self.stages))

    @property
    def stages(self) -> Sequence[int]:
        """The allowed stages of ZeRO without stage 1, which takes as long as stage 2, unless that is the only one."""
        return [stage for stage in self.task.stages if stage > 1] or self.task.stages

    def zeros(self, plan: Plan, axes: Iterable[str], stages: Iterable[int]) -> Iterator[Zero]:
        """ZeRO over each axis; and over all, with backward gathering over those inside nodes (the last, if all are)."""
        names, chosen = tuple(axes), [stage for stage in stages if stage]
        yield from (Zero(name, stage) for name in names for stage in chosen)  # type: ignore[arg-type]
        inside = tuple(name for name in names if self._is_inside(plan, name))
        if inside == names:
            inside = names[-1:]
        if 0 < len(inside) < len(names):
            over = inside if len(inside) > 1 else inside[0]
            yield from (Zero(names, stage, gather_over=over) for stage in chosen)  # type: ignore[arg-type]

    def _is_inside(self, plan: Plan, name: str) -> bool:
        """Whether an axis has several ranks, all of them in one node."""
        mesh, machine = plan.stage_mesh, self.task.machine
        return mesh.axis_size(name) > 1 and machine.link((name,), mesh) == machine.of_axis(name)

    def _with_all_cut(self, plan: Plan) -> list[Found]:
        """FSDP by annotation: cut every parameter over an axis of samples, if the plan cuts samples alone."""
        if plan.zero or not _cuts_samples_alone(plan) or 0 not in self.task.stages:
            return []
        annotations = tuple(plan.annotations.items())
        return self.prices(
            replace(plan, written=(*annotations, ("param:*", P(axis.name, ...)))) for axis in plan.axes if axis.cuts
        )


def _is_worse(few: Prices | None, other: Prices | None, clearly: float, has_plenty: bool) -> bool:
    if few is None or other is None:
        return few is None
    return few[0].seconds > clearly * other[0].seconds and (has_plenty or few[0].peak >= other[0].peak)


def _triples(pairs: Iterable[tuple[Cuts, ...]], model: Iterable[Cuts]) -> Iterator[tuple[Cuts, ...]]:
    """Pairs of sets with a third set in between: one of the model, or the first again (samples across and in nodes)."""
    for first, second in pairs:
        yield from ((first, other, second) for other in (*model, first) if other != second or not other)


def _cuts_samples_alone(plan: Plan) -> bool:
    kinds = {each.kind for axis in plan.axes for each in axis.cuts}
    return kinds == {"samples"}


def _axes_of_data(plan: Plan) -> tuple[list[str], list[str]]:
    """The names of the axes that cut samples, and of the others."""
    of_data, of_model = ([axis.name for axis in plan.axes if axis.cuts_samples is each] for each in (True, False))
    return of_data, of_model
