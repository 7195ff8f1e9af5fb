"""The kinds of collectives, and how many messages of a ring follow each other in one."""

from typing import Literal

CollectiveKind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "send", "recv", "shard_slice",
    "mask_padding", "rechunk",
]  # fmt: skip
WHOLE_PAYLOAD = ("collective_permute", "send", "recv")  # a rank sends its whole operand
LOCAL_KINDS = ("shard_slice", "mask_padding")  # nothing is sent: a rank's own work, by its position on the mesh


def num_steps(kind: CollectiveKind, num_ranks: int) -> int:
    """Messages that follow each other: in a ring every rank sends n-1, for an all_reduce twice as many."""
    if kind in LOCAL_KINDS or num_ranks == 1:
        return 0
    if kind in (*WHOLE_PAYLOAD, "rechunk"):
        return 1
    return (2 if kind == "all_reduce" else 1) * (num_ranks - 1)
