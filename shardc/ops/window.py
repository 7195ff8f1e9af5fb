"""Windows of a cut dim, which lie with the chunk that looks at them, and the places of ops that look at windows."""

from __future__ import annotations

from shardc.ops.view import dim_names
from shardc.rule import Call, Rule, make_rule, rule
from shardc.sharding import TensorType
from shardc.window import Windows, overlap_add, windows


def places(x: TensorType, y: TensorType, count: int) -> tuple[str, dict[str, int]]:
    """A factor for each of the last ``count`` dims, which two tensors have, each of its own size; and the chunks."""
    pairs = list(zip(x.shape, y.shape, strict=True))[len(x.shape) - count :]
    names = [f"s{i}" if min(pair) > 1 else "1" for i, pair in enumerate(pairs)]
    return " ".join(names), {name: 1 for name in names if name != "1"}


def _names(call: Call) -> tuple[str, str]:
    """The specs of the tensor with the dim, and of the one with its windows."""
    names, dim = dim_names(len(call.operand.shape)), call.args[2] % len(call.operand.shape)
    before, after = names[:dim], names[dim + 1 :]
    return " ".join([*before, "n", *after]), " ".join([*before, "(n w)", *after])


def _window_rule(spec: str, call: Call, linear: str) -> Rule:
    window = Windows(*call.args[3])
    sizes = {"n": window.count, "w": window.size}
    return make_rule(spec, call, linear=linear, whole="w", sizes=sizes, chunks={"n": window.count})


def _windows_rule(call: Call) -> Rule:
    dim, joined = _names(call)
    return _window_rule(f"{dim} -> {joined}", call, linear="0" if call.args[4] == 0 else "")


def _overlap_add_rule(call: Call) -> Rule:
    dim, joined = _names(call)
    return _window_rule(f"{joined} -> {dim}", call, linear="0")


rule(windows, _windows_rule)
rule(overlap_add, _overlap_add_rule)
