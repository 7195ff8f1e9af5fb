"""Higher-order ops while a model is captured.

``torch.cond`` and ``while_loop`` become opaque calls: the bodies are traced apart, with what they close over as further
operands, and each with its vector-Jacobian product. ``map``, ``scan``, ``associative_scan`` and ``flex_attention`` are
written out as ordinary ops, which have rules. ``torch.compile`` inside a model is looked through.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc.body import Bodies, Body, floating, type_of
from shardc.borrow import changed
from shardc.opaque import Opaque, call
from shardc.sharding import TensorType

_HOME = "torch._higher_order_ops"
REPLACED = ("cond", "while_loop", "map_impl", "scan", "associative_scan", "flex_attention")  # no such op is ever called


@contextlib.contextmanager
def higher_order_ops(kept: list[Opaque]) -> Iterator[None]:
    """In the block higher-order ops run as this file says; ``kept``: the opaque calls, which graphs only name."""
    places: dict[tuple[str, str], Any] = {
        (f"{_HOME}.cond", "cond_op"): partial(_cond, kept),
        (f"{_HOME}.while_loop", "while_loop_op"): partial(_while_loop, kept),
        (f"{_HOME}.map", "map_impl"): _map,
        (f"{_HOME}.scan", "scan_op"): _scan,
        (f"{_HOME}.associative_scan", "associative_scan_op"): _associative_scan,
        ("torch.nn.attention.flex_attention", "flex_attention_hop"): _flex_attention,
        ("torch", "compile"): _uncompiled,
    }
    if "torch._dynamo" in sys.modules:  # else nothing is compiled yet, and its import takes seconds
        places["torch._dynamo.config", "error_on_nested_fx_trace"] = False
    with contextlib.ExitStack() as stack:
        for (module, name), value in places.items():
            stack.enter_context(changed(importlib.import_module(module), name, value))
        yield


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """``torch.compile`` of a model that is being captured: the model."""
    return (lambda found: found) if model is None else model


# Opaque calls.


def _cond(kept: list[Opaque], pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any],
          operands: Any = ()) -> Any:  # fmt: skip
    """One branch runs, on every rank the same; so does its backward."""
    leaves, nest = pytree.tree_flatten(operands)
    captured = Bodies("torch.cond")
    bodies = [captured.body(_nested(fn, nest), [pred, *leaves]) for fn in (true_fn, false_fn)]
    _check_alike(bodies)
    branches = [body.traced() for body in bodies]

    def forward(*given: Tensor) -> Sequence[Tensor]:
        return branches[not given[0]].forward(given)

    def backward(*given: Tensor) -> Sequence[Tensor]:
        return branches[not given[0]].vjp(given)

    given = [pred, *leaves, *captured.outside]
    made = Opaque("cond", forward, branches[0].types)
    gradient = Opaque("cond_backward", backward, floating(map(type_of, given)))
    kept += [made, gradient]
    return pytree.tree_unflatten(list(call(made, gradient, given)), bodies[0].tree)


def _while_loop(kept: list[Opaque], cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any,
                additional: Any) -> Any:  # fmt: skip
    """The loop runs whole on every rank. The backward runs it again, keeps every step, and goes back over them."""
    device = next((leaf.device for leaf in carried if isinstance(leaf, Tensor)), None)
    carry = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device) for leaf in carried]
    captured = Bodies("while_loop")
    bodies = [captured.body(fn, [*carry, *additional]) for fn in (cond_fn, body_fn)]
    test, step = (body.traced() for body in bodies)
    types, size = tuple(map(type_of, carry)), len(carry)
    if step.types != types:
        captured.refuse(f"its body turns {_listed(types)} into {_listed(step.types)}", "return what it was given")

    def steps(given: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        state, rest = list(given[:size]), given[size:]
        while True:
            yield state
            if not test.forward([*state, *rest])[0]:
                return
            state = list(step.forward([*state, *rest]))

    def forward(*given: Tensor) -> Sequence[Tensor]:
        last: Sequence[Tensor] = ()
        for last in steps(given):  # noqa: B007
            pass
        return last

    def backward(*given: Tensor) -> Sequence[Tensor]:
        operands, tangents = given[: size + num_rest], list(given[size + num_rest :])
        rest = operands[size:]
        sums = [torch.zeros_like(tensor) for tensor in rest if tensor.is_floating_point()]
        for state in reversed(list(steps(operands))[:-1]):
            found = step.vjp([*state, *rest, *tangents])
            sums = [total + part for total, part in zip(sums, found[len(tangents) :], strict=True)]
            tangents = list(found[: len(tangents)])
        return [*tangents, *sums]

    given = [*carry, *additional, *captured.outside]
    num_rest = len(given) - size
    made = Opaque("while_loop", forward, types)
    gradient = Opaque("while_loop_backward", backward, floating(map(type_of, given)))
    kept += [made, gradient]
    return pytree.tree_unflatten(list(call(made, gradient, given)), bodies[1].tree)


# Written out.


def _map(f: Callable[..., Any], xs: Sequence[Tensor], args: Sequence[Any]) -> Any:
    """Every row on its own; the results stacked."""
    rows = [f(*row, *args) for row in zip(*(x.unbind(0) for x in xs), strict=True)]
    return pytree.tree_map(lambda *parts: torch.stack(parts), *rows)


def _scan(combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Any) -> Any:
    """Step after step; the outputs stacked."""
    carry: Any = list(init)
    outputs = []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        carry, output = combine(*pytree.tree_leaves(carry), *row, *additional_inputs)
        outputs.append(output)
    return carry, pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)


def _associative_scan(combine: Callable[..., Any], xs: Sequence[Tensor], additional_inputs: Any) -> Any:
    """Neighbours in parallel, in as many steps as the logarithm of the length."""
    scan = importlib.import_module(f"{_HOME}.associative_scan").generic_associative_scan
    nest = pytree.tree_structure(combine(*(x[0] for x in xs), *(x[0] for x in xs)))
    many = torch.vmap(lambda *rows: tuple(pytree.tree_leaves(combine(*rows))))
    return pytree.tree_unflatten(scan(many, list(xs), additional_inputs=additional_inputs), nest)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float,
                    kernel_options: Any, score_buffers: Any = (), mask_buffers: Any = ()) -> Any:  # fmt: skip
    """Scores, mask and softmax as ops: batch and heads may stay cut, and the backward is theirs."""
    plain = importlib.import_module(f"{_HOME}.flex_attention").math_attention
    return plain(query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)


def _nested(fn: Callable[..., Any], nest: Any) -> Callable[..., Any]:
    return lambda pred, *leaves: fn(*pytree.tree_unflatten(list(leaves), nest))


def _check_alike(bodies: Sequence[Body]) -> None:
    one, other = bodies
    if (one.types, one.tree) != (other.types, other.tree):
        problem = f"one branch returns {_listed(one.types)}, the other {_listed(other.types)}"
        one.captured.refuse(problem, "let both return tensors of the same shapes and dtypes")


def _listed(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"
