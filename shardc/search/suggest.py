"""``shardc.suggest``: the plans that are best for a model on a number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardc.capture.annotations import check_annotations
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.machine import Device
from shardc.language.partition import P
from shardc.options import Remat, check_call, check_model
from shardc.search.decision import decisions_of, tensors_of
from shardc.search.pipelines import Estimate, num_stages_of, with_stages
from shardc.search.plan import Plan
from shardc.search.price import Price, Pricer
from shardc.search.question import question, with_batch
from shardc.search.reasons import reasons
from shardc.search.search import Found, Progress, Search
from shardc.search.shorten import Annotations, shortened
from shardc.search.suggestion import Suggestion
from shardc.search.task import Objective, Task
from shardc.search.whole import Cost, WholeCompiler, cost_of

NUM_WHOLE = 6  # plans that are compiled whole, with and without a pipeline each, at least
PROMISING = 1.3  # a pipeline is compiled where it is estimated to take no longer than the best plan by this factor


def suggest(
    model: nn.Module,
    devices: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    annotations: Mapping[str, P] | None = None,
    memory: int | str | None = None,
    links: Any = None,
    device: Device | str | None = None,
    nodes: int = 1,
    batch: int | None = None,
    fix: Mapping[str, Any] | None = None,
    objective: Objective = "time",
    optimizer: str = "adamw",
    top: int = 5,
    progress: Progress | None = None,
) -> tuple[Suggestion, ...]:
    """The best plans for training a model on a number of devices, the best first. No device is needed.

    Args:
        model: parameters may be on meta; nothing is computed.
        devices: the number of ranks.
        args, kwargs: a call of the model with the whole batch, on any device or on meta.
        annotations: what must stay; the search fills in the rest.
        memory: bytes that a rank has, or a text such as ``"80GB"``.
        links: ``"nvlink"``, or ``("nvlink", "infiniband")`` inside and between nodes: presets or ``Link``s; a
            ``Machine``; a file that ``shardc bench-links`` measured.
        device: a preset, ``"h100"``, or a ``Device``.
        nodes: how many nodes the devices are in.
        batch: the samples of a step, where they are not those of the call.
        fix: the size of an axis, ``{"tp": 4}``, or an option, ``{"zero": 3}``, ``{"pipeline": None}``; a list allows
            each of its values.
        objective: ``"time"`` of a step, or ``"memory"`` at its peak.
        optimizer: whose states are stored.
        top: the number of suggestions.
        progress: called with a line of text now and then.

    Returns:
        Suggestions, which ``shardc.parallelize(model, **suggestion)`` takes. Each was compiled whole: its figures are
        those of ``shardc.compile``. Where none fits in memory, the nearest come first. Ctrl-C ends the search, and the
        best plans so far are returned.

    Raises:
        ShardingError: for arguments that have no meaning, or where no plan keeps what is fixed.
        CaptureError: for a model that cannot be captured.
    """
    kwargs = kwargs or {}
    check_model(model)
    check_call(args, kwargs, True, (), False)
    check_annotations(annotations or {})
    args, kwargs, num_samples = with_batch(model, args, kwargs, batch)
    pricer = Pricer(model, args, kwargs, optimizer)
    remats = [Remat(f"{path}.*".lstrip(".")) for path in list(pricer.lists)[:1]]
    task = question(devices, annotations, memory, links, device, nodes, fix or {}, objective, optimizer, remats)
    return _Suggesting(model, args, kwargs, num_samples, task, pricer, top, progress or (lambda what: None)).run()


@dataclass(eq=False)
class _Suggesting:
    """One call of ``suggest``. State: ``whole``, plans compiled whole, with their costs."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    num_samples: int
    task: Task
    pricer: Pricer
    top: int
    progress: Progress
    whole: dict[Plan, Cost] = field(default_factory=dict)

    def run(self) -> tuple[Suggestion, ...]:
        tensors = tensors_of(self.pricer.few, self.model)
        search = Search(self.pricer, decisions_of(self.pricer.few, tensors), self.task, self.progress)
        compiler = WholeCompiler(self.model, self.args, self.kwargs, self.task)
        estimates: list[Estimate] = []
        try:
            search.run()
            estimates = self._pipelines(search)
        except KeyboardInterrupt:
            self.progress("the search ends here: the best plans so far are compiled")
        plain = [each.plan for each in search.best(max(NUM_WHOLE, self.top))]
        for plan in (*plain, *(each.plan for each in estimates)):
            self._compile(compiler, plan)
        best = sorted(self.whole, key=lambda plan: _found(plan, self.whole[plan]).rank(self.task))
        everything = (*search.found.values(), *(_found(*each) for each in self.whole.items()))
        return tuple(self._suggestion(plan, everything) for plan in best[: self.top])

    def _pipelines(self, search: Search) -> list[Estimate]:
        """The plans with a pipeline that are worth compiling, by estimates."""
        best = search.best()
        limit = PROMISING * best[0].price.seconds if best and best[0].price.peak <= self.task.memory else float("inf")
        found: list[Estimate] = []
        for num_stages in num_stages_of(self.task, self.pricer.num_blocks):
            plans = search.for_devices(self.task.devices // num_stages)
            for each in plans:
                found += with_stages(each.plan, each.price, num_stages, self.num_samples)
        fitting = [each for each in found if each.peak <= self.task.memory and each.seconds <= limit]
        fitting = sorted(fitting, key=lambda each: (each.seconds, each.peak, str(each.plan)))
        return (
            fitting[:NUM_WHOLE] or sorted(found, key=lambda each: each.peak)[:NUM_WHOLE]
            if limit == float("inf")
            else fitting[:NUM_WHOLE]
        )

    def _compile(self, compiler: WholeCompiler, plan: Plan) -> None:
        self.progress(f"compiling {plan.mesh}, plan {len(self.whole) + 1}")
        try:
            self.whole[plan] = cost_of(compiler.compiled(plan).program)
        except (ShardingError, CaptureError, NotImplementedError):
            return

    def _suggestion(self, plan: Plan, everything: Iterable[Found]) -> Suggestion:
        cost = self.whole[plan]
        annotations = shortened(plan, lambda changed: self._is_same(plan, changed))
        others = [each for each in everything if each.plan != plan]
        limit = None if self.task.memory == float("inf") else int(self.task.memory)
        links = {name: self.task.machine.link((name,), plan.mesh).name for name in plan.mesh.axis_names}
        return Suggestion(
            plan.mesh, annotations, plan.zero, plan.remat, plan.precision, plan.pipeline, self.task.machine,
            self.task.optimizer, cost, limit, reasons(_found(plan, cost), others, self.task), links,
        )  # fmt: skip

    def _is_same(self, plan: Plan, annotations: Annotations) -> bool:
        """Whether a plan costs the same with other annotations, for two blocks and without its pipeline."""
        plan = replace(plan, pipeline=None, num_stages=1)
        changed = replace(plan, written=tuple(annotations.items()))
        machines = (self.task.machine,)
        return self.pricer.of_few(changed, machines) == self.pricer.of_few(plan, machines)


def _found(plan: Plan, cost: Cost) -> Found:
    """A plan compiled whole as the search has plans."""
    return Found(plan, Price(cost.seconds, cost.computing, **cost.memory, wire_bytes=cost.wire_bytes, flops=cost.flops))
