"""Higher-order ops while a model is captured.

``torch.cond`` and ``while_loop`` become opaque calls: the bodies are traced apart, with what they close over as further
operands, and each with its vector-Jacobian product. ``associative_scan``, ``flex_attention`` and a ``map`` or ``scan``
that is not too long are written out as ops, which have rules. ``torch.compile`` inside a model is looked through.
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

from shardc.body import Bodies, Body, floating
from shardc.borrow import changed
from shardc.loop import Scan, While
from shardc.opaque import Opaque, call
from shardc.sharding import TensorType

Run = Callable[..., Sequence[Tensor]]

_HOME = "torch._higher_order_ops"
MAX_STEPS = 64  # of a map or scan that is written out
REPLACED = ("cond", "while_loop", "map_impl", "scan", "associative_scan", "flex_attention")  # no such op is ever called


@contextlib.contextmanager
def higher_order_ops(kept: list[Opaque]) -> Iterator[None]:
    """In the block higher-order ops run as this file says; ``kept``: the opaque calls, which graphs only name."""
    places: dict[tuple[str, str], Any] = {
        (f"{_HOME}.cond", "cond_op"): partial(_cond, kept),
        (f"{_HOME}.while_loop", "while_loop_op"): partial(_while_loop, kept),
        (f"{_HOME}.map", "map_impl"): partial(_map, kept),
        (f"{_HOME}.scan", "scan_op"): partial(_scan, kept),
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
    return _called(kept, "cond", forward, backward, branches[0].types, given, bodies[0].tree)


def _while_loop(kept: list[Opaque], cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any,
                additional: Any) -> Any:  # fmt: skip
    """The loop runs whole on every rank."""
    device = next((leaf.device for leaf in carried if isinstance(leaf, Tensor)), None)
    carry = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device) for leaf in carried]
    captured, types = Bodies("while_loop"), tuple(map(TensorType.of, carry))
    bodies = [captured.body(fn, [*carry, *additional]) for fn in (cond_fn, body_fn)]
    test, step = (body.traced() for body in bodies)
    _check_carry(captured, types, step.types)
    given = [*carry, *additional, *captured.outside]
    loop = While(test, step, len(carry), len(given))
    return _called(kept, "while_loop", loop.forward, loop.backward, types, given, bodies[1].tree)


def _long_scan(kept: list[Opaque], combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor],
               additional: Any) -> Any:  # fmt: skip
    """The steps run whole on every rank."""
    captured, types = Bodies("scan"), tuple(map(TensorType.of, init))
    body = captured.body(combine, [*init, *(x[0] for x in xs), *additional])
    step = body.traced()
    _check_carry(captured, types, step.types[: len(init)])
    stacked = (TensorType((len(xs[0]), *type_.shape), type_.dtype) for type_ in step.types[len(init) :])
    given = [*init, *xs, *additional, *captured.outside]
    loop = Scan(step, len(init), len(xs), len(given))
    return _called(kept, "scan", loop.forward, loop.backward, (*types, *stacked), given, body.tree)


def _called(kept: list[Opaque], name: str, forward: Run, backward: Run, types: tuple[TensorType, ...],
            given: Sequence[Tensor], tree: Any) -> Any:  # fmt: skip
    made = Opaque(name, forward, types)
    gradient = Opaque(f"{name}_backward", backward, floating(map(TensorType.of, given)))
    kept += [made, gradient]
    return pytree.tree_unflatten(list(call(made, gradient, given)), tree)


def _check_carry(captured: Bodies, given: tuple[TensorType, ...], made: tuple[TensorType, ...]) -> None:
    if made != given:
        captured.refuse(f"its body turns {_listed(given)} into {_listed(made)}", "return a carry as it was given")


# Written out.


def _map(kept: list[Opaque], f: Callable[..., Any], xs: Sequence[Tensor], args: Sequence[Any]) -> Any:
    """Every row on its own; the results stacked."""
    return _scan(kept, lambda *row: ([], f(*row, *args)), [], xs, ())[1]


def _scan(kept: list[Opaque], combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor],
          additional_inputs: Any) -> Any:  # fmt: skip
    """Step after step; the outputs stacked. A long one is an opaque call."""
    if len(xs[0]) > MAX_STEPS:
        return _long_scan(kept, combine, init, xs, additional_inputs)
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
