"""Optimizer steps during backward: each parameter is stepped as soon as its gradient is computed.

This is for parameters in the tier below, where steps and copies take longer than backward itself. The optimizer is the
user's own. Stepping one parameter after the other equals stepping all of them, since steps read no other parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from shardc.language.errors import OrderError, ShardingError

from ..comm.dtensor import own_part
from ..execute.deferred import Totals
from .blocks import Blocks, part_of, steps_in_blocks
from .tier import Tier
from .worker import Worker

# Optimizers whose step of a parameter reads no other parameter, and needs no collective if the parameter is cut.
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
WORKER = Worker("shardc-step")  # one thread, with which a kernel's own threads stay
# Gradients that may wait, and their bytes; each is alive until its step is done. A larger one waits alone.
MOST_WAITING, MOST_BYTES = 3, 2**25


class SteppingInBackward:
    """The context of ``step_in_backward``: a thread steps an optimizer during one backward.

    State of a block: ``stepped``, a hook on each parameter whose step has begun; autograd calls it if another part of
    the loss gives that parameter a gradient, which sets ``_is_read_twice``. ``_waiting``: steps that may be unfinished,
    with the bytes of their gradients.
    """

    def __init__(self, optimizer: Optimizer, attach: Callable[[SteppingInBackward | None], None]) -> None:
        self.optimizer, self._attach = optimizer, attach
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self.stepped = list[RemovableHandle]()
        self._is_read_twice = False

    def __enter__(self) -> None:
        self._groups = {id(each): group for group in self.optimizer.param_groups for each in group["params"]}
        self._part, self._is_read_twice, self._blocks = part_of(self.optimizer), False, Blocks()
        self._attach(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        """Wait for the steps, and step parameters that still have a gradient; after an error step nothing more."""
        self._attach(None)
        WORKER.submit(lambda: None).result()  # returns once all steps are done, also those of outer blocks
        self._blocks = Blocks()  # frees the memory
        waiting, self._waiting = self._waiting, deque()
        for hook in self.stepped:
            hook.remove()
        self.stepped.clear()
        if error is None:
            if not all(step.done() for step, _ in waiting):
                what, problem = "in a process that was forked in its block", "steps had begun in the other process"
                raise OrderError("step_in_backward", what, problem, "fork before the block, or after it")
            for step, _ in waiting:
                step.result()
            if self._is_read_twice:
                raise _read_twice("another part of the loss reads a parameter that is stepped already")
            self.optimizer.step()
            self.optimizer.zero_grad()

    def steps(self, parameter: Tensor) -> bool:
        """Whether a parameter can be stepped as soon as its gradient is computed: no hook needs the gradient."""
        has_hooks = bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
        return id(parameter) in self._groups and not has_hooks and _is_elementwise(self.optimizer)

    def begin_backward(self) -> None:
        """Raise an OrderError in the second backward of a block."""
        if self.stepped:
            raise _read_twice("a second backward begins in its block, or the loss has two calls of the module")

    def check_gradients(self, who: str) -> None:
        """Raise an OrderError if ``who`` would read gradients that are gone."""
        if self.stepped:
            what, problem = "in the block of step_in_backward", "gradients are gone once their parameters are stepped"
            raise OrderError(who, what, problem, "leave the block out: backward, clip_grad_norm_, optimizer.step()")

    def step(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Let the thread call ``gradient`` and step the parameter; wait first if too many gradients are waiting."""
        self.stepped.append(parameter.register_hook(self._note_gradient))
        nbytes = own_part(parameter).nbytes
        while self._waiting and self._is_full(nbytes):
            self._waiting.popleft()[0].result()
        self._waiting.append((WORKER.submit(self._step, parameter, gradient), nbytes))

    def _is_full(self, nbytes: int) -> bool:
        """Whether another gradient of ``nbytes`` bytes would be too much to wait."""
        return len(self._waiting) == MOST_WAITING or nbytes + sum(size for _, size in self._waiting) > MOST_BYTES

    def _note_gradient(self, gradient: Tensor | None) -> None:
        """Note autograd's gradient of a stepped parameter; None if no other part of the loss gives it one."""
        self._is_read_twice |= gradient is not None

    def _step(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        before, parameter.grad = parameter.grad, None
        parameter.grad = gradient() if before is None else before.add_(gradient())
        self._part.param_groups = [{**self._groups[id(parameter)], "params": [parameter]}]
        step = self._blocks.step if steps_in_blocks(parameter) else type(self.optimizer).step
        step(self._part)  # not the wrapper that a learning-rate scheduler has put on the instance
        parameter.grad = None


class Gradients:
    """Takes the gradients of a program on the ranks of this process as they are computed, and steps their parameters.

    ``tier``: that of the parameters; virtual ranks have none. ``parameters``: by index of the program's outputs.
    ``gradient_of``: makes a gradient of its shards on all ranks. ``totals``: the sums of earlier backwards, which are
    part of the gradients. ``takers``: functions that take gradients, one for each rank.
    """

    def __init__(self, stepping: SteppingInBackward, tier: Tier | None, parameters: Mapping[int, Tensor],
                 gradient_of: Callable[[int, Sequence[Tensor]], Tensor], count: int,
                 totals: Totals | None) -> None:  # fmt: skip
        self._stepping, self._tier, self._parameters, self._gradient_of = stepping, tier, parameters, gradient_of
        self._shards: dict[int, list[Callable[[], Tensor]]] = {}
        self.takers, self.totals = [self.take] * count, totals

    def take(self, output: int, shard: Tensor) -> None:
        """Take a rank's shard of a gradient; ranks call this in order."""
        shards = self._shards.setdefault(output, [])
        shards.append((lambda: shard) if self._tier is None else self._tier.lend(shard))
        if len(shards) == len(self.takers):
            self._stepping.step(self._parameters[output], partial(self._gradient, output))

    def _gradient(self, output: int) -> Tensor:
        return self._gradient_of(output, [wait() for wait in self._shards.pop(output)])


def step_in_backward(module: nn.Module, optimizer: Optimizer) -> SteppingInBackward:
    """Context in which backward steps the optimizer, for parameters that are in host memory or in files.

    Each parameter is stepped as soon as its gradient is computed, while backward goes on, and its gradient is freed.
    The other parameters are stepped when the block ends. These are all parameters if the module has no
    ``Zero(offload=...)``, with Inductor, in pipelines, and for an optimizer that has hooks or whose steps read several
    parameters. The block replaces ``loss.backward(); optimizer.step(); optimizer.zero_grad()``, with equal results.

    Nothing can read gradients after it: clip by value in a hook of each parameter, and use no ``GradScaler``.

    Args:
        module: the module that ``parallelize`` returned.
        optimizer: an optimizer of its parameters, and possibly of others.

    Raises:
        OrderError: in the block, for a second backward, or a loss with two calls of the module; at its end, if another
            part of the loss reads a parameter that was stepped. The step is not complete then.

    Examples:
        >>> import shardc
        >>> with shardc.step_in_backward(parallel, optimizer):  # doctest: +SKIP
        ...     loss.backward()
    """
    for what, given, kind in (("module", module, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            problem, remedy = f"it is no {kind.__module__}.{kind.__name__}", "say step_in_backward(parallel, optimizer)"
            raise ShardingError(f"step_in_backward({what}=...)", f"a {type(given).__name__}", problem, remedy)
    runtime: Any = getattr(module, "shardc", None)
    attach: Any = getattr(runtime, "step_in_backward", lambda stepping: None)
    return SteppingInBackward(optimizer, attach)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is an unmodified one of torch's, apart from a learning-rate scheduler's wrapper."""
    own = optimizer.__dict__.get("step")
    is_own = own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    return type(optimizer) in ELEMENTWISE and not is_own and not has_hooks


def _read_twice(problem: str) -> OrderError:
    remedy = "call optimizer.step() after backward, without the block"
    return OrderError("step_in_backward", "parameters are stepped once they have gradients", problem, remedy)
