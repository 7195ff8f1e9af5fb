"""The collectives: what each does to a sharding, and how many bytes it moves.

In a *lowered* program they stand between global values and are identities, like the functions below; localize gives
them local values and a runtime executes them. ``axes`` are printed axis parts, major first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardc.sharding import num_shards, parse_part

if TYPE_CHECKING:
    from torch import fx

    from shardc.program import Program

Kind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "send", "recv", "shard_slice"
]


def all_gather(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """``axes`` are the minor cuts of ``dim``; the pieces are joined, and those axes cut nothing any more."""
    return x


def shard_slice(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Each rank keeps its piece of ``dim``, which ``axes`` now cut as the minor ones. Local."""
    return x


def all_reduce(x: Any, axes: tuple[str, ...], op: str) -> Any:
    """The reduction that was open over ``axes`` is done."""
    return x


def reduce_scatter(x: Any, axes: tuple[str, ...], op: str, dim: int) -> Any:
    """The reduction that was open over ``axes`` is done and each rank keeps its piece of ``dim``."""
    return x


def all_to_all(x: Any, axes: tuple[str, ...], src_dim: int, dst_dim: int) -> Any:
    """``axes`` move from the minor end of ``src_dim`` to the minor end of ``dst_dim``."""
    return x


def collective_permute(x: Any, src_axes: tuple[str, ...], dst_axes: tuple[str, ...]) -> Any:
    """Local values change places: the one at index i along ``src_axes`` goes to index i along ``dst_axes``."""
    return x


def reshard(x: Any) -> Any:
    """A change of sharding, still abstract; the target is the node's own sharding."""
    return x


COLLECTIVES: dict[Callable[..., Any], Kind] = {
    all_gather: "all_gather",
    shard_slice: "shard_slice",
    all_reduce: "all_reduce",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
    collective_permute: "collective_permute",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    ``axes`` are printed axis parts; shapes are one rank's; ``bytes`` is the payload (the larger of input and output
    on one rank), ``wire_bytes`` what one rank sends by the ring algorithm; ``name`` is the node's, ``source`` the line
    of the user's model, ``node`` the node whose value it moves, ``cause`` says why it is there.
    """

    kind: Kind
    axes: tuple[str, ...]
    dtype: str
    local_shape_in: tuple[int, ...]
    local_shape_out: tuple[int, ...]
    bytes: int
    wire_bytes: int
    name: str = ""
    phase: Literal["forward", "backward", "update"] = "forward"
    node: str = ""
    source: str = ""
    cause: str = ""


def wire_bytes(kind: Kind, payload: int, group_size: int) -> int:
    """Bytes that one rank sends, by the ring algorithms: ``payload`` is the larger of its input and output.

    all_gather, reduce_scatter and all_to_all send (n-1)/n of it, all_reduce twice that, permute and send all.
    """
    n = group_size
    if kind == "shard_slice" or n == 1:
        return 0
    if kind in ("collective_permute", "send", "recv"):
        return payload
    once = payload * (n - 1) // n
    return 2 * once if kind == "all_reduce" else once


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """Every collective of a lowered or localized program, in program order; a local slice is none."""
    found = (node for node in program.calls if node.target in COLLECTIVES)
    return tuple(_collective(program, node) for node in found if node.target is not shard_slice)


def _collective(program: Program, node: fx.Node) -> Collective:
    moved: fx.Node = node.args[0]  # type: ignore[assignment]
    axes: tuple[str, ...] = node.args[1]  # type: ignore[assignment]
    before, after = program.local_type(moved), program.local_type(node)
    assert program.mesh is not None and before is not None and after is not None, node
    kind, payload = COLLECTIVES[node.target], max(before.nbytes, after.nbytes)  # type: ignore[index]
    group_size = num_shards(tuple(parse_part(axis, program.mesh) for axis in axes))
    return Collective(
        kind, axes, str(after.dtype).removeprefix("torch."), before.shape, after.shape,
        payload, wire_bytes(kind, payload, group_size), name=node.name, node=moved.name,
        phase=program.source(node).phase, source=program.source(node).location, cause=program.cause(node),
    )  # fmt: skip
