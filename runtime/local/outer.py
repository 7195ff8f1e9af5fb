"""Outer steps: combine the parameters that groups have trained by themselves (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from shardc.language.errors import OptionError, OrderError
from shardc.ops.reduction import wide_dtype
from shardc.options import Local

from ..comm.dtensor import own_part
from ..comm.failure import waiting
from ..comm.process_group import all_reduce
from ..module.optimizer import StepWatcher
from .attendance import WAITING, Attendance, Round
from .groups import Groups
from .sums import sums

PREFIX = "outer_"  # of the entries for outer steps in the state of a parameter
ANCHOR, STEPS = f"{PREFIX}anchor", f"{PREFIX}steps_since"
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

Record = dict[str, Any]


class OuterSteps(StepWatcher):
    """Counts the steps of a module's optimizers, and takes the outer steps of their parameters.

    The optimizer's state of each parameter gets entries whose names begin with ``outer_``, so that they are saved and
    loaded with it: the ``anchor``, the value in all groups after the last outer step; the ``steps_since`` then, below 0
    in the first ``after`` steps; and the state of the outer optimizer.

    State: ``_early``, by the id of a parameter, the entries if the optimizer has no state of the parameter yet;
    ``_optimizers``, the numbers of live optimizers, of ``_seen`` so far; ``_has_stepped``, whether one of them may have
    changed a group by itself; ``_copies``, the number of copies.
    """

    sees_begin = True

    def __init__(self, groups: Groups, model: nn.Module, bucket: int, initial: str, key: str) -> None:
        super().__init__()
        self.groups, self.option, self._bucket, self._initial = groups, groups.option, bucket, initial
        self._attendance = Attendance(groups, key)
        _check_outer(self.option)
        self._early, self._optimizers = dict[int, Record](), WeakKeyDictionary[Optimizer, int]()
        self._model, self._has_begun, self._has_stepped = model, False, False
        self._key, self._copies, self._seen = key, 0, 0

    def begin(self) -> None:
        """Start all groups from equal values, before the model's first call."""
        if not self._has_begun:
            self._has_begun = True
            tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
            self.groups.start_alike(tensors, self._initial)

    def copied(self, model: nn.Module) -> OuterSteps:
        """The outer steps of a copy of the model."""
        self._copies += 1
        twin = OuterSteps(self.groups, model, self._bucket, self._initial, f"{self._key}.{self._copies}")
        twin._has_begun, twin._has_stepped = self._has_begun, self._has_stepped
        return twin

    def note_loaded(self) -> None:
        """Note that values were loaded: training goes on from these, not from the first group's."""
        self._has_begun = self._has_stepped = True
        self._early.clear()

    def early_by_name(self) -> dict[str, Record]:
        """The entries of parameters of which the optimizer has no state yet, by name."""
        named = self._model.named_parameters()
        return {name: self._early[id(each)] for name, each in named if id(each) in self._early}

    def load_early(self, records: Mapping[str, Record]) -> None:
        """Take saved entries of parameters, by name."""
        self._early = {
            id(each): dict(records[name]) for name, each in self._model.named_parameters() if name in records
        }

    def watched(self) -> list[Tensor]:
        return [each for each in self._model.parameters() if each.requires_grad]

    def note_begin(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Keep the values of parameters that the optimizer is about to change for the first time, as anchors."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer], self._seen = self._seen, self._seen + 1
        own = self._own(optimizer)
        new = [(each, part) for each, part in own if ANCHOR not in self._record(optimizer, each)]
        if self._has_stepped and len(new) == len(own):
            self._level([each for each, _ in new])
        for each, part in new:
            steps = -self.option.after or self._start(part)
            self._early[id(each)] = {ANCHOR: each.detach().clone(), STEPS: steps}

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step, and take the outer steps that are due."""
        self._has_stepped, together, due = True, list[tuple[Tensor, int]](), dict[int, list[Tensor]]()
        for each, part in self._own(optimizer):
            record = self._record(optimizer, each)
            record[STEPS] += 1
            if record[STEPS] <= 0:
                together.append((each, part))
            elif record[STEPS] >= self.option.every:
                due.setdefault(part, []).append(each)
            if each.grad is not None and id(each) in self._early:  # the optimizer has made its own state by now
                optimizer.state[each].update(self._early.pop(id(each)))
        if together:
            self._step_together(optimizer, together)
        for part, parameters in due.items():
            self._step(optimizer, part, parameters)

    def step_now(self, optimizer: Optimizer) -> None:
        """Take an outer step of all parameters that have changed since their last one."""
        parts: dict[int, list[Tensor]] = {}
        for each, part in self._own(optimizer):
            if ANCHOR in self._record(optimizer, each):
                parts.setdefault(part, []).append(each)
        has_changed = self._of_all([
            any(self._record(optimizer, each)[STEPS] > 0 for each in parts.get(part, ()))
            for part in range(self.option.parts)
        ])  # fmt: skip
        for part, parameters in parts.items():
            if has_changed[part]:
                self._step(optimizer, part, parameters)

    def _of_all(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Whether each flag is set in any group; with ``patience`` in this group, which does not wait for others."""
        if self.option.patience is not None or self.groups.count == 1:
            return flags
        with waiting(lambda: WAITING, self.groups.ranks):
            found = all_reduce(
                torch.tensor(flags, dtype=torch.int64, device=self.groups.comm.device), self.groups.line, "max"
            )
            return list(map(bool, found().tolist()))

    @torch.no_grad()
    def _level(self, parameters: Sequence[Tensor]) -> None:
        """Set parameters to their mean over all groups: another optimizer begins, perhaps between outer steps."""
        own = list(map(own_part, parameters))
        wide = [each.to(self.groups.comm.device, wide_dtype(each.dtype)) for each in own]
        for each, total in zip(own, sums(wide, self.groups.line, None, self._bucket, self.groups.traffic), strict=True):
            each.copy_(total.div_(self.groups.count))

    def _own(self, optimizer: Optimizer) -> list[tuple[Tensor, int]]:
        """The optimizer's parameters that belong to the module and that this rank holds, each with its part."""
        parts = self._parts()
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        return [(each, parts[id(each)]) for each in stepped if id(each) in parts and not own_part(each).is_meta]

    def _parts(self) -> dict[int, int]:
        """The part of each parameter of the whole model, by id; parts are runs of about equally many elements."""
        parameters = self.watched()
        total, before, parts = sum(each.numel() for each in parameters), 0, dict[int, int]()
        for each in parameters:
            parts[id(each)] = min(before * self.option.parts // max(1, total), self.option.parts - 1)
            before += each.numel()
        return parts

    def _record(self, optimizer: Optimizer, parameter: Tensor) -> Record:
        """The entries of a parameter's outer steps; empty before its first step."""
        state: Record = optimizer.state.get(parameter, {})
        return state if ANCHOR in state else self._early.get(id(parameter), {})

    def _start(self, part: int) -> int:
        """The initial step count of a part, chosen so that the parts take their outer steps one after the other."""
        return self.option.every - self.option.every * (part + 1) // self.option.parts

    @torch.no_grad()
    def _step_together(self, optimizer: Optimizer, parameters: Sequence[tuple[Tensor, int]]) -> None:
        """Apply the mean change of all groups, after one of the first ``after`` steps."""
        records = [self._record(optimizer, each) for each, _ in parameters]
        with waiting(lambda: WAITING, self.groups.ranks):
            self._change(
                self._attendance.everyone, [each for each, _ in parameters], [each[ANCHOR] for each in records]
            )
        for (each, part), record in zip(parameters, records, strict=True):
            record[ANCHOR].sub_(record[ANCHOR].grad)
            record[ANCHOR].grad = None
            each.copy_(record[ANCHOR])
            record[STEPS] = record[STEPS] or self._start(part)

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, part: int, parameters: Sequence[Tensor]) -> None:
        """Take an outer step of some parameters, unless the other groups have taken it without this one."""
        records = [self._record(optimizer, each) for each in parameters]
        taken = self._attendance.round((part, self._optimizers[optimizer]))
        for record in records:
            record[STEPS] = 0
        if taken is None:
            return
        with waiting(lambda: WAITING, self.groups.ranks):
            self._change(taken, parameters, [record[ANCHOR] for record in records])
            self._step_anchors(records)
            taken.share([own_part(each) for record in records for each in _of_outer(record).values()])
        for each, record in zip(parameters, records, strict=True):
            each.copy_(record[ANCHOR])

    def _change(self, taken: Round, parameters: Sequence[Tensor], anchors: Sequence[Tensor]) -> None:
        """Set the gradients of anchors to the mean change of the groups."""
        changes = [
            _change_of(*pair, taken) for pair in zip(map(own_part, parameters), map(own_part, anchors), strict=True)
        ]
        found = sums(changes, taken.line, self.option.wire, self._bucket, self.groups.traffic)
        for anchor, total in zip(anchors, found, strict=True):
            anchor.grad = torch.empty_like(anchor)
            own_part(anchor.grad).copy_(total.div_(len(taken.counted)))

    def _step_anchors(self, records: Sequence[Record]) -> None:
        """Step the anchors by the outer optimizer, with its state from the records."""
        outer = (self.option.outer or NESTEROV)([record[ANCHOR] for record in records])
        for record in records:
            if kept := {key.removeprefix(PREFIX): each for key, each in _kept(record).items()}:
                outer.state[record[ANCHOR]] = kept
        outer.step()
        for record in records:
            record[ANCHOR].grad = None
            record.update({f"{PREFIX}{key}": each for key, each in outer.state[record[ANCHOR]].items()})


def _check_outer(option: Local) -> None:
    """Raise an OptionError if the function ``outer`` makes no optimizer that steps by gradients alone."""
    made = (option.outer or NESTEROV)([torch.zeros(1, requires_grad=True)])
    if not isinstance(made, Optimizer) or isinstance(made, torch.optim.LBFGS):
        problem = "it is no optimizer that takes a step by gradients alone"
        remedy = "say outer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), or leave it out"
        raise OptionError(option.text, f"outer= makes a {type(made).__name__}", problem, remedy)


def _change_of(parameter: Tensor, anchor: Tensor, taken: Round) -> Tensor:
    """The anchor minus the parameter, an outer optimizer's gradient; zeros for a group that does not count."""
    dtype = wide_dtype(parameter.dtype)
    if not taken.is_counted:
        return torch.zeros(parameter.shape, dtype=dtype, device=taken.device)
    return anchor.to(taken.device, dtype) - parameter.to(taken.device, dtype)


def _kept(record: Record) -> Record:
    """The outer optimizer's state of a parameter."""
    return {key: each for key, each in record.items() if key.startswith(PREFIX) and key not in (ANCHOR, STEPS)}


def _of_outer(record: Record) -> dict[str, Tensor]:
    """The tensors that are equal in all groups after an outer step."""
    return {key: each for key, each in {ANCHOR: record[ANCHOR], **_kept(record)}.items() if isinstance(each, Tensor)}


def outer_step(module: nn.Module, optimizer: Optimizer) -> None:
    """Take an outer step of all groups that train a module by themselves now, for example at the end of training.

    Every rank of every group must call it. Parameters that have not changed since their last outer step stay as they
    are.

    Args:
        module: the module that ``parallelize`` returned, with the option ``local``.
        optimizer: the optimizer of its parameters.

    Raises:
        OrderError: for a module whose ranks train together.

    Examples:
        >>> import shardc
        >>> shardc.outer_step(parallel, optimizer)  # doctest: +SKIP
    """
    outer = getattr(getattr(module, "shardc", None), "outer", None)
    if not isinstance(outer, OuterSteps):
        what, problem = f"of a {type(module).__name__}", "it is trained by all ranks together, which are alike"
        raise OrderError(
            "outer_step", what, problem, "say parallelize(..., local=Local('dc', every=20)), or leave it out"
        )
    outer.step_now(optimizer)
