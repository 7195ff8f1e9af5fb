"""A chain of units cut into stages that fit into memory under 1F1B, the slowest of them as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shardc.chain import Received, chain, check_stages, exact_weights
from shardc.error import ShardingError

BYTES_A_PARAMETER = 16  # itself, its gradient and the two states of Adam, in fp32


def balance_under_cap(
    times: Sequence[Any],
    parameters: Sequence[int],
    activations: Sequence[int],
    num_stages: int,
    *,
    microbatches: int,
    cap: int,
    received: Received | Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The cut indices of the stages with the least greatest time that hold at most ``cap`` bytes each.

    For each unit its time, its number of parameters, and the bytes that it saves of one microbatch for backward. Stage
    s of k holds 16 bytes a parameter and the activations of ``min(microbatches, k - s)`` microbatches. Ties as in
    ``balance``. Raises a ShardingError that says how much is missing where no cut fits.
    """
    exact = exact_weights(times)
    check_stages(len(exact), num_stages)
    of_time, of_parameters, of_activations = (
        list(accumulate(given, initial=0)) for given in (exact, parameters, activations)
    )

    def memory(stage: int, start: int, end: int) -> int:
        saved = of_activations[end] - of_activations[start]
        held = of_parameters[end] - of_parameters[start]
        return BYTES_A_PARAMETER * held + min(microbatches, num_stages - stage) * saved

    def time(stage: int, start: int, end: int) -> int | None:
        return of_time[end] - of_time[start] if memory(stage, start, end) <= cap else None

    found = chain(len(exact), num_stages, time, received).best()
    if found is None:
        least = chain(len(exact), num_stages, memory).least()
        assert least is not None, (len(exact), num_stages)
        raise _too_little(len(exact), num_stages, cap, least)
    return found


def _too_little(num_units: int, num_stages: int, cap: int, least: int) -> ShardingError:
    return ShardingError(
        "balance",
        f"{num_units} units in {num_stages} stages of at most {cap} bytes",
        f"the fullest stage holds {least} bytes at least, {least - cap} more",
        f"say a cap of {least} bytes or more, more stages or fewer microbatches",
    )
