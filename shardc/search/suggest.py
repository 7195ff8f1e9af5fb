"""``shardc.suggest``: find the best plans for a model on a number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from torch import nn

from shardc.capture.annotations import check_annotations
from shardc.capture.call import names_of
from shardc.language.errors import OptionError, ShardingError
from shardc.language.machine import Device
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Remat, check_call, check_model
from shardc.report.suggest.records import Candidate
from shardc.search.found import Found, first_of_each
from shardc.search.hints import hints
from shardc.search.pipelines import Estimate, num_stages_of, with_stages
from shardc.search.pricing.compiling import REFUSALS
from shardc.search.pricing.price import Pricer
from shardc.search.pricing.whole import WholeCompiler, WholePlans
from shardc.search.pricing.workers import Workers
from shardc.search.question import AXES, check_counts, module_patterns, question, sample_axes, with_batch
from shardc.search.reasons import reasons
from shardc.search.refine import refine
from shardc.search.search import NEARLY, Search
from shardc.search.space.decision import Decision, decisions_of, tensors_of
from shardc.search.space.lists import num_parts
from shardc.search.space.plan import OPTIONS, Axis, Plan
from shardc.search.space.shorten import Annotations, shortened
from shardc.search.suggestion import Suggestion, Suggestions, plan_text
from shardc.search.task import Objective, Progress, Task
from shardc.search.tight import fit_in_memory
from shardc.search.variants import compile_variants
from shardc.wire import Wire, check_wire, wire_on

NUM_WHOLE = 3  # plans compiled whole: at least this many without a pipeline, at most with one
PROMISING = 1.15  # a pipeline is compiled if its estimated time is within this factor of the best plan's


def suggest(
    model: nn.Module,
    devices: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    annotations: Mapping[str, P] | None = None,
    memory: float | str | None = None,
    links: Any = None,
    device: Device | str | None = None,
    nodes: int = 1,
    batch: int | None = None,
    fix: Mapping[str, Any] | None = None,
    objective: Objective = "time",
    optimizer: str = "adamw",
    wire: Wire | None = None,
    top: int = 5,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Suggestions:
    """The best plans for training a model on a number of devices, the best first. No device is needed.

    Args:
        model: parameters may be on meta; nothing is computed.
        devices: the number of ranks.
        args: positional arguments of a call of the model with the whole batch, on any device or on meta.
        kwargs: keyword arguments of that call.
        annotations: annotations that must stay; the search adds others.
        memory: bytes of memory of a rank, or a text such as ``"80GB"``; by default that of the device, if it is known.
            ``float("inf")`` sets no limit.
        links: ``"nvlink"``, or ``("nvlink", "infiniband")`` inside and between nodes: presets or ``Link``s; a
            ``Machine``; a file that ``shardc bench-links`` measured.
        device: a preset, ``"h100"``, or a ``Device``.
        nodes: the number of nodes that the devices are in.
        batch: the number of samples of a step, if it is not that of the call.
        fix: what every plan must have: the size of an axis, ``{"tp": 4}``, also of one that ``annotations`` name; the
            sizes of all axes in any order, ``{"mesh": "4x2"}``; or an option, ``{"zero": 3}``, ``{"pipeline": None}``,
            ``{"overlap": None}``. A list allows each of its values.
        objective: ``"time"`` of a step, or ``"memory"`` at its peak.
        optimizer: the optimizer whose states are stored.
        wire: the codecs of all plans, as in ``compile``; entries for an axis that a plan lacks have no effect.
        top: the number of suggestions.
        jobs: the number of processes that compile plans, forked from this one; the result is the same.
        progress: called with a line of text now and then.

    Returns:
        Suggestions; ``shardc.parallelize(model, **suggestion)`` takes each of them. Each was compiled whole, so its
        figures are those of ``shardc.compile``. If none fits in memory, the nearest come first. The first one has
        ``hints``: codecs and groups that would make it faster but change numerical results, so the search never chooses
        them. Ctrl-C ends the search: the best plans so far are compiled whole, and a second one ends that too.

    Raises:
        ShardingError: for arguments without a meaning, or if no plan keeps what is fixed.
        CaptureError: for a model that cannot be captured.
        KeyboardInterrupt: for a Ctrl-C before there is any plan.
    """
    kwargs = kwargs or {}
    check_model(model)
    check_call(args, kwargs, True, (), False)
    check_annotations(annotations or {})
    check_counts(top=top, jobs=jobs, batch=1 if batch is None else batch)
    args, kwargs, num_samples = with_batch(model, args, kwargs, batch)
    if wire is not None:
        check_wire(wire, Mesh(device_ids=None, **dict.fromkeys(AXES, 1)))
    pricer = Pricer(model, args, kwargs, optimizer, wire, (*(annotations or {}), *module_patterns(fix or {})), jobs)
    remats = [] if pricer.blocks is None else [Remat(pricer.blocks)]
    task = question(
        devices, annotations, memory, links, device, nodes, fix or {}, objective, optimizer, remats,
    )  # fmt: skip
    of_samples = sample_axes(annotations or {}, names_of(model, args, kwargs))
    task = replace(task, wire=wire, sample_axes=of_samples)
    if progress is not None and not callable(progress):
        raise OptionError("suggest", f"progress={progress!r}", "it is called with lines of text", "say progress=print")
    tell = progress or (lambda what: None)
    compiler = WholeCompiler(model, args, kwargs, task)
    whole = WholePlans(compiler, task, tell, Workers(compiler.cost, jobs))
    return _Suggesting(num_samples, task, pricer, top, tell, whole).run()


@dataclass(eq=False)
class _Suggesting:
    """One call of ``suggest``.

    State: ``whole``, plans compiled whole, with their costs; ``short``, shortened annotations by axes and ``written``;
    ``is_interrupted``, whether a Ctrl-C ended a part of it.
    """

    num_samples: int
    task: Task
    pricer: Pricer
    top: int
    progress: Progress
    whole: WholePlans
    short: dict[object, Annotations] = field(default_factory=dict)
    is_interrupted: bool = False

    def run(self) -> Suggestions:
        """Search, compile the best plans whole, and give the reasons for each."""
        try:
            return self._run()
        finally:
            self.pricer.workers.close()
            self.whole.workers.close()

    def _run(self) -> Suggestions:
        tensors = tensors_of(self.pricer.few, self.whole.compiler.model, self.task.given)
        decisions = decisions_of(self.pricer.few, tensors)
        search = self._search(decisions)
        if not (self.whole.fits(self.whole.ranked()[0]) or self.is_interrupted):
            with self._until_interrupted(self.whole.ranked, "those that are compiled"):
                self._search_for_memory(decisions)
        suggestions = self._suggestions(search.found)
        everything = search.found | {plan: self.whole.found(plan) for plan in self.whole.costs}
        candidates = (_candidate(each) for each in everything.values() if self.task.permits(each.plan))
        compiled = self.pricer.num_compiled + len(self.whole.costs)
        return Suggestions(suggestions, self._bound(), compiled, candidates)

    def _search(self, decisions: Sequence[Decision]) -> Search:
        """Search, and compile the best plans whole; returns the search."""
        search, staged = Search(self.pricer, self.task, self.progress), list[Plan]()
        with self._until_interrupted(search.best, "compiled"):
            search.run(decisions)
            fit_in_memory(search)
            refine(search)
            staged = self._with_stages(search)
        self._compile(search, staged)
        return search

    def _compile(self, search: Search, staged: Sequence[Plan]) -> None:
        """Compile the best plans whole, with variants; a first Ctrl-C before the best is compiled begins again."""
        is_first = not self.is_interrupted
        with self._until_interrupted(lambda: self.whole.ranked() or is_first, "those that are compiled"):
            self.whole.compile(each.plan for each in search.finalists(max(NUM_WHOLE, self.top)))
            self.whole.compile(staged)
            if not self.whole.ranked():
                raise self._nothing()
            compile_variants(self.whole, search)
        is_missing = any(each.plan not in self.whole.tried for each in search.best())
        if is_first and self.is_interrupted and (is_missing or not self.whole.ranked()):
            self._compile(search, staged)

    def _search_for_memory(self, decisions: Sequence[Decision]) -> None:
        """Add the plans that need the least memory to those compiled whole, since no other fits."""
        self.progress("no plan fits: searching for those that need the least memory")
        task = replace(self.task, objective="memory", memory=inf)
        whole = replace(self.whole, task=task, costs={}, tried=set())
        replace(self, task=task, whole=whole)._search(decisions)
        self.whole.costs.update(whole.costs)

    @contextmanager
    def _until_interrupted(self, found: Callable[[], object], how: str) -> Iterator[None]:
        """Let a Ctrl-C end the block, and go on after it with what was ``found``; raise it if nothing was."""
        try:
            yield
        except KeyboardInterrupt:
            if not found():
                raise
            self.is_interrupted = True
            self.progress(f"interrupted: the best plans so far are {how}")

    def _best(self) -> list[Plan]:
        """The best plans, one for each mesh and set of options."""
        plans = first_of_each(self.whole.ranked(), lambda plan: (str(plan.mesh), f"{plan.options}"))
        return plans[: self.top]

    def _with_stages(self, search: Search) -> list[Plan]:
        """The plans with a pipeline that are worth compiling, by estimates."""
        best = search.best()
        is_fitting = bool(best) and best[0].price.peak <= self.task.memory
        most = (PROMISING * best[0].price.seconds, NEARLY * self.task.memory) if is_fitting else (inf, inf)
        estimates = list[Estimate]()
        for num_stages in num_stages_of(self.task, num_parts(self.whole.compiler.model)):
            found = self._estimates(search, num_stages, *most)
            if found and not (estimates or self.pricer.longer or self._can_compile(found[0].plan)):
                break  # a whole model takes long to compile, and some models allow no microbatches
            estimates += found
        return [each.plan for each in sorted(estimates, key=self._rank)[:NUM_WHOLE]]

    def _estimates(self, search: Search, num_stages: int, seconds: float, peak: float) -> list[Estimate]:
        """Plans with ``num_stages`` stages whose estimated time and peak are at most these, the best first."""
        estimates = [
            estimate
            for each in search.for_stages(num_stages)
            for estimate in with_stages(each.plan, each.price, num_stages, self.num_samples, self.task.pipelines)
            if estimate.seconds <= seconds and estimate.peak <= peak
        ]
        return sorted(estimates, key=self._rank)

    def _rank(self, estimate: Estimate) -> tuple[object, ...]:
        return self.task.excess(estimate.peak), estimate.seconds, str(estimate.plan)

    def _can_compile(self, plan: Plan) -> bool:
        self.whole.compile([plan])
        return plan in self.whole.costs

    def _suggestions(self, found: Mapping[Plan, Found]) -> list[Suggestion]:
        """The best plans as suggestions; a first Ctrl-C before there is any begins again."""
        is_first, made = not self.is_interrupted, list[Suggestion]()
        with self._until_interrupted(lambda: made or is_first, "without hints"):
            for plan in self._best():
                made.append(self._suggestion(plan, found))
            made[0] = replace(made[0], hints=hints(self.whole, self.whole.ranked()[0]))
        return made or self._suggestions(found)

    def _bound(self) -> float:
        """A lower bound in seconds: all computation in the fastest precision, spread evenly over all devices."""
        plans = [Plan((Axis("dp", 1),), precision=precision) for precision in self.task.precisions]
        prices = [each[0].computing for plan in plans if (each := self.pricer.of_all(plan, (self.task.machine,)))]
        return min(prices, default=0.0) / self.task.devices

    def _suggestion(self, plan: Plan, found: Mapping[Plan, Found]) -> Suggestion:
        cost, task = self.whole.costs[plan], self.task
        limit = None if task.memory == float("inf") else int(task.memory)
        links = {name: self._link(plan, name) for name in plan.mesh.axis_names}
        return Suggestion(
            plan.mesh, self._annotations(plan), **{name: getattr(plan, name) for name in OPTIONS}, links=task.machine,
            optimizer=task.optimizer, wire=wire_on(task.wire, plan.mesh.axis_names), cost=cost, memory_limit=limit,
            reasons=reasons(plan, self.whole, found), axis_links=links,
        )  # fmt: skip

    def _link(self, plan: Plan, axis: str) -> str:
        machine = self.task.machine
        if plan.pipeline is not None and axis == plan.pipeline.axis:
            return machine.of_stages(axis, self.task.devices).name
        return machine.link((axis,), plan.mesh).name

    def _annotations(self, plan: Plan) -> Annotations:
        """The shortened annotations of a plan, found once for plans that differ in options alone."""
        few, key = self.pricer.few, (plan.axes, plan.written)
        if key not in self.short:
            cuts = few.cuts(plan.stage_mesh, plan.annotations)
            self.short[key] = plan.annotations
            if cuts is not None:  # the whole model may compile where a part does not
                compiler = self.whole.compiler
                names = names_of(compiler.model, compiler.args, compiler.kwargs)
                self.short[key] = shortened(plan, names, lambda changed: few.cuts(plan.stage_mesh, changed) == cuts)
        return self.short[key]

    def _nothing(self) -> Exception:
        """The error if nothing was found: that of ``compile`` for the fixed parts on one rank, if it refuses them."""
        axes = tuple(Axis(name, 1) for name in self.task.given_axes or ("dp",))
        plan = Plan(axes, tuple(self.task.given.items()), **self.task.fixed_options)
        try:
            self.whole.compiler.compiled(plan)
        except REFUSALS as error:
            return error
        fix = {name: each[0] if len(each) == 1 else list(each) for name, each in self.task.fix.items()}
        what = f"{self.task.devices} devices, fix={fix}, annotations={self.task.given}"
        problem = "no plan keeps what is fixed and can be compiled"
        return ShardingError("suggest", what, problem, "fix less, or say shardc.compile to see what a plan lacks")


def _candidate(found: Found) -> Candidate:
    text = plan_text(found.plan.mesh, found.plan.options)
    return Candidate(text, found.price.seconds, int(found.price.peak))
