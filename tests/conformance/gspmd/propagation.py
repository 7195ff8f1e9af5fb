"""Shardy's propagation cases: a few values are annotated, and all others must get the same shardings as in Shardy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.program.program import Program

from ..suite import Result

Fields = Mapping[str, Any]

# Intended differences from Shardy.
MORE = "a view keeps more cuts: those of the minor factor beside those of the major"
CHUNKS = "a dim cut unevenly lies in other chunks than its parts would"
COPY = "an annotation is of a copy, so that what it is a copy of may lie otherwise"
LATER = "an axis that another factor has is no part of a contraction here; insert_reshards decides it by bytes"
OTHERWISE = {
    "basic_propagation/reshape_merge_dim_major_factor_partially_sharded": MORE,
    "basic_propagation/non_minor_most_factor_non_divisible_sub_axis": CHUNKS,
    "basic_propagation/merge_dim_non_minor_most_factor_non_divisible_multiple_axes": MORE,
    "basic_propagation/merge_dim_non_minor_most_factor_propagate_sub_axis_and_concat": MORE,
    "aggressive_propagation/allow_partial_sideways_propagation_if_conflicting_with_result": COPY,
    "aggressive_propagation/prefer_most_sharded_factor_on_operand_elementwise_op": COPY,
    "op_priority_propagation/defer_forward_propagation_for_multi_use_ops": "two users or one, a cut goes forward",
    "op_priority_propagation/chained_dot_generals": LATER,
    "user_priority_propagation/different_priorities_from_ops": LATER,
}


def check(fields: Fields) -> Result:
    """Propagate a case, and compare its shardings with Shardy's."""
    name = fields["name"].removeprefix("sdy/prop/")
    cannot = _cannot_say(fields)
    if cannot:
        return Result(name, "apart", cannot)
    program = _propagated(fields)
    differs = "; ".join(_differences(fields, program))
    if differs and name in OTHERWISE:
        ours, theirs = bytes_of_both(fields)
        return Result(name, "apart", f"{OTHERWISE[name]}; a rank sends {ours} B, {theirs} B as in Shardy: {differs}")
    return Result(name, "wrong" if differs else "right", differs)


def _cannot_say(fields: Fields) -> str:
    """The feature of the case that no annotation of shardc expresses; empty if there is none."""
    said = [entry["sharding"] for entry in (*fields["args"], *fields["ops"]) if entry["sharding"]]
    if any(op["op"] not in OPS for op in fields["ops"]):
        return "an op that torch has not"
    if any("unreduced" in sharding or "replicated" in sharding for sharding in said):
        return "axes kept away from a value, or a sum asked to stay open"
    expected = fields["expected"]["args"]
    for arg in fields["args"]:
        dims = (arg["sharding"] or {}).get("dims", []), (expected.get(arg["name"]) or {}).get("dims", [])
        if any(before["axes"] != now["axes"][: len(before["axes"])] for before, now in zip(*dims, strict=False)):
            return "an argument has the annotation of a result in the file, which is not kept in what it expects"
    return ""


class _Model(nn.Module):
    """The ops of a case. All their results are returned, with the annotations of the case."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.fields = fields

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip((arg["name"] for arg in self.fields["args"]), args, strict=True))
        for op in self.fields["ops"]:
            given = [values[name] for name in re.findall(r"%(\w+)", op["args"])]
            made = OPS[op["op"]](op, given)
            values[op["out"]] = shardc.annotate(made, _spec(op["sharding"])) if op["sharding"] else made
        return tuple(values[op["out"]] for op in self.fields["ops"])


def _spec(sharding: Fields) -> P:
    entries = [(*dim["axes"], *[P.OPEN] * dim["open"]) for dim in sharding["dims"]]
    priorities = tuple(dim.get("priority", 0) for dim in sharding["dims"])
    return P(*(P.OPEN if entry == (P.OPEN,) else entry or None for entry in entries), priority=priorities)


def bytes_of_both(fields: Fields) -> tuple[int, int]:
    """Bytes that a rank sends with the shardings that shardc propagates, and with those of Shardy."""
    expected, open_ends = fields["expected"], {f"output:{i}": P(...) for i in range(len(fields["ops"]))}

    def pinned(entry: Fields, name: str, side: str) -> Fields:
        said = expected[side].get(name) or entry["sharding"] or {"dims": [{"axes": []}] * len(entry["shape"])}
        return {**entry, "sharding": {"dims": [{"axes": dim["axes"], "open": False} for dim in said["dims"]]}}

    args = [pinned(arg, arg["name"], "args") for arg in fields["args"]]
    theirs = {**fields, "args": args, "ops": [pinned(op, op["out"], "ops") for op in fields["ops"]]}
    ends = {f"output:{i}": _spec(op["sharding"]) for i, op in enumerate(theirs["ops"])}
    pairs = ((fields, open_ends), (theirs, ends))
    ours_sent, theirs_sent = (sum(c.wire_bytes for c in _compiled(each, said).collectives) for each, said in pairs)
    return ours_sent, theirs_sent


def _compiled(fields: Fields, ends: Mapping[str, P]) -> shardc.Compiled:
    args = [torch.empty(arg["shape"], device="meta") for arg in fields["args"]]
    said = {f"input:args.{i}": _spec(arg["sharding"]) for i, arg in enumerate(fields["args"]) if arg["sharding"]}
    return shardc.compile(_Model(fields), shardc.Mesh(**fields["mesh"]), {**said, **ends}, args=args, train=False)


def _propagated(fields: Fields) -> Program:
    ends: dict[str, P] = {}
    outs = [op["out"] for op in fields["ops"]]
    returned = [name for name in fields["returns"] if name in outs]
    for name, result in zip(returned, fields["expected"]["results"], strict=False):
        is_closed = not any(dim["open"] for dim in result["dims"])
        if fields["strategy"] != "full pipeline" and (is_closed or fields["strategy"].startswith("op-priority")):
            ends[f"output:{outs.index(name)}"] = _spec(result)  # the file has the result after propagation alone
    return _compiled(fields, ends).at("propagate")


def _differences(fields: Fields, program: Program) -> Iterator[str]:
    inputs, outputs = program.named_inputs, program.results
    expected = fields["expected"]
    given = {arg["name"]: arg["sharding"] for arg in fields["args"]} | {
        op["out"]: op["sharding"] for op in fields["ops"]
    }
    values = {f"%{arg['name']}": inputs["input", f"args.{i}"] for i, arg in enumerate(fields["args"])}
    values |= {f"%{op['out']}": node for op, node in zip(fields["ops"], outputs, strict=True) if node is not None}
    for name, node in values.items():
        said = (expected["args"] if name[1:] in expected["args"] else expected["ops"]).get(name[1:]) or given[name[1:]]
        found = [list(map(program.sharding(node).mesh.print_part, dim.all_axes)) for dim in program.sharding(node).dims]
        wanted = [dim["axes"] for dim in said["dims"]] if said else [[] for _ in found]
        if found != wanted:
            yield f"{name} is {_text(found)}, Shardy has {_text(wanted)}"


def _text(dims: list[list[str]]) -> str:
    return f"[{', '.join('+'.join(axes) or '-' for axes in dims)}]"


def _dot(op: Fields, given: list[Tensor]) -> Tensor:
    a, b = (int(n) for n in re.findall(r"\[(\d)\]", op["args"]))
    left, right = ("km" if a == 0 else "mk"), ("kn" if b == 0 else "nk")
    return torch.einsum(f"{left},{right}->mn", *given)


OPS: dict[str, Callable[[Fields, list[Tensor]], Tensor]] = {
    "add": lambda op, given: given[0] + given[1],
    "divide": lambda op, given: given[0] / given[1],
    "multiply": lambda op, given: given[0] * given[1],
    "sine": lambda op, given: given[0].sin(),
    "cosine": lambda op, given: given[0].cos(),
    "reshape": lambda op, given: given[0].reshape(op["shape"]),
    "dot_general": _dot,
    "sharding_constraint": lambda op, given: given[0],
}
