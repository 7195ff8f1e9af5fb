"""The kinds of collectives, by name."""

from typing import Literal

Kind = Literal[
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "send",
    "recv",
    "shard_slice",
    "mask_padding",
    "rechunk",
]
WHOLE_PAYLOAD = ("collective_permute", "send", "recv")  # is what a rank sends
LOCAL_KINDS = ("shard_slice", "mask_padding")  # a rank's own work, by where it stands on the mesh
