"""chunk_dots: lowered -> lowered. Gathers before products and sums after them become rings, as ``overlap`` says.

::

    g = all_gather(x, ("tp",), 1)                  r = gather_dots(x, ("tp",), 1, ("b t k, k n -> b t n",), False, u)
    y = dot(g, u, "b t k, k n -> b t n")     ->    y = r[0]

    p = dot(h, v, "b t k, k n -> b t n")     ->    z = dots_scatter(h, ("tp",), 1, ("b t k, k n -> b t n",), v)
    z = reduce_scatter(p, ("tp",), "sum", 1)

A rank multiplies the chunk that it has while the next one is on its way. In a sum each chunk goes round, and each rank
adds its part. Products share the ring of a value if their other operands are known before it is first read. Other
readers of the value read the ring's first result. A sum of products is one ring. Gathers of stored parameters stay as
they are, since they start a layer ahead. So do sums that reach only gradients of parameters, since nothing waits for
them.

With ``"auto"`` a ring is made if it takes less time than the calls that it replaces, and none at all if the step is not
shorter with rings. Invariant: every value that is left keeps its type and its sharding.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from shardc.costs.count import seconds
from shardc.costs.step_time import step_timeline
from shardc.language.mesh import MICROBATCH, NO_DOT_RING
from shardc.language.partition import parse_parts
from shardc.ops.contraction import dot, dots_scatter, gather_dots, names_of
from shardc.options import AUTO
from shardc.program.coding.nodes import is_decode, is_encode
from shardc.program.collective import all_gather, group_size, reduce_scatter, steps_sharding
from shardc.program.communication import is_early, is_gathered_early, members, only_to_gradients
from shardc.program.node import ancestors, operand
from shardc.program.program import Program

from .overlap_collectives import overlap_collectives


def chunk_dots(program: Program) -> Program:
    """The program with rings of products; unchanged without the option."""
    way = program.options.overlap
    if way is None:
        return program
    chunked = program.copy() if way == AUTO else program.edited()
    has_rings = _make_rings(chunked)
    if way == AUTO:
        return chunked if has_rings and _step_seconds(chunked) < _step_seconds(program) else program
    left = ", ".join(f"{number} {why}" for why, number in Counter(_left_plain(chunked)).items())
    notes = [f"{LEFT_PLAIN}: {left}"] if left else []
    if not has_rings:
        notes = [f"{NO_DOT_RING}, as {CHUNKS_NEEDED if left or _has_sums(program) else NOTHING_WAITS}", *notes]
    return replace(chunked, notes=(*chunked.notes, *notes))


LEFT_PLAIN = "overlap='ring' leaves gathers before products, or sums after them, as they are"
CHUNKS_NEEDED = (
    "none reads a gathered value, or makes a scattered sum, in even chunks: cut the positions between layers by the "
    "axis that cuts weights"
)
NOTHING_WAITS = (
    "none waits for other ranks: weights are gathered, and their gradients summed, beside products already; leave "
    "overlap out"
)


def _has_sums(program: Program) -> bool:
    """Whether products make sums over ranks that calls other than gradients of parameters wait for."""
    gradients = only_to_gradients(program) | {program.output_node}
    products = program.graph.find_nodes(op="call_function", target=dot)
    return any(program.sharding(each).partial and not gradients.issuperset(each.users) for each in products)


def _left_plain(program: Program) -> Iterator[str]:
    """For each collective beside a product that could not become a ring, the reason."""
    gradients = only_to_gradients(program)
    for node in program.calls:
        readers, read = [{each.target for each in nodes} for nodes in (node.users, node.all_input_nodes)]
        is_gather = dot in readers and not is_gathered_early(node)
        is_sum = dot in read and node not in gradients
        if (is_gather and is_decode(node)) or (is_sum and is_encode(node)):
            yield "sent in codes"
        elif is_gather and node.target is all_gather and not _has_chunks(program, node, operand(node)):
            yield "cut unevenly"
        elif is_sum and node.target is reduce_scatter and not _has_chunks(program, node, node):
            yield "cut unevenly"


def _step_seconds(program: Program) -> float:
    return step_timeline(overlap_collectives(program.copy())).makespan


def _make_rings(program: Program) -> bool:
    """Make rings of gathers, then of sums; return whether any were made."""
    rings, gradients = list[fx.Node](), only_to_gradients(program)
    for node in program.graph.find_nodes(op="call_function", target=all_gather):
        if node.users and _has_chunks(program, node, operand(node)) and not _starts_ahead(program, node):
            rings += _gather(program, node)
    for node in program.graph.find_nodes(op="call_function", target=reduce_scatter):
        if node not in gradients and node.args[2] == "sum" and _has_chunks(program, node, node):
            rings += _scatter(program, node)
    program.remove_dead()
    return bool(rings)


def _has_chunks(program: Program, node: fx.Node, piece: fx.Node) -> bool:
    """Whether the pieces that a collective joins or makes are equal, on more than one rank."""
    assert program.mesh is not None
    axes, *_, dim = members(node)[0].args
    cut = program.sharding(piece).dims[dim]
    is_even = not cut.minor and cut.is_even(program.type(piece).shape[dim])
    return is_even and MICROBATCH not in axes and group_size(program.mesh, "all_gather", (axes,)) > 1


def _starts_ahead(program: Program, node: fx.Node) -> bool:
    """Whether a gather is of a stored parameter, or of a value that is saved in pieces."""
    if not is_early(node):
        return False
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    return any(inputs[each].kind != "input" for each in ancestors(node) & inputs.keys())


def _is_faster(program: Program, ring: fx.Node, replaced: Collection[fx.Node]) -> bool:
    """Whether a ring is wanted in any case, or takes less time than the calls that it replaces."""
    return program.options.overlap != AUTO or seconds(program, ring) < sum(seconds(program, each) for each in replaced)


# Gathers.


def _gather(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """Make a ring of a gather and the products of the gathered value, if there are any."""
    first, src = min(node.users), operand(node)
    dots = sorted(each for each in node.users if _is_of_chunks(program, node, each, first))
    axes, dim = members(node)[0].args
    is_whole = steps_sharding(program.sharding(src), "all_gather", (axes, dim)) == program.sharding(node)
    if not dots or not is_whole:
        return
    made = [node, *dots] if len(dots) < len(node.users) else dots
    specs, others = zip(*(_led_by(node, each) for each in dots), strict=True)
    with program.graph.inserting_before(first):
        args = src, axes, dim, specs, len(made) > len(dots), *others
        ring = program.insert(gather_dots, args, tuple(map(program.type, made)), node, name=f"{node.name}_dots")
        _set_facts(program, ring, node, made)
        if not _is_faster(program, ring, [node, *dots]):
            program.graph.erase_node(ring)
            return
        results = [
            program.insert(operator.getitem, (ring, i), program.type(each), each, name=each.name)
            for i, each in enumerate(made)
        ]
    for each, result in reversed([*zip(made, results, strict=True)]):  # products before what they read
        program.replace(each, result)
    yield ring


def _is_of_chunks(program: Program, node: fx.Node, user: fx.Node, first: fx.Node) -> bool:
    """Whether a reader of a gather is a product that can be computed, chunk by chunk, before the first reader."""
    if user.target is not dot or program.source(user).phase != program.source(first).phase:
        return False
    spec, other = _led_by(node, user)
    led, others, out = names_of(spec)
    factor = led[members(node)[0].args[1]]
    is_known = other is not node and other < first and program.source(user).stage == program.source(node).stage
    return is_known and factor in out and factor not in others


def _led_by(node: fx.Node, product: fx.Node) -> tuple[str, fx.Node]:
    """The spec of a product with the operand ``node`` first, and the other operand."""
    a, b, spec = operand(product), operand(product, 1), str(product.args[2])
    if a is node:
        return spec, b
    left, right, out = map(" ".join, names_of(spec))
    return f"{right}, {left} -> {out}", a


# Sums.


def _scatter(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    """Make a ring of a reduce_scatter and the products whose sum it scatters, if all summands are products."""
    sums = list[fx.Node]()
    dots = list(_summed(program, node, operand(node), sums))
    if len(set(dots)) < len(dots) or not all(_is_of_sum(program, node, each) for each in dots):
        return
    axes, _, dim = members(node)[0].args
    a, *others = (operand(each, i) for each in dots for i in range(2))
    with program.graph.inserting_before(node):
        args = a, axes, dim, tuple(str(each.args[2]) for each in dots), *others
        ring = program.insert(dots_scatter, args, program.type(node), node, name=f"{node.name}_dots")
    _set_facts(program, ring, node, [node])
    if _is_faster(program, ring, [node, *dots, *sums]):
        program.replace(node, ring)
        yield ring
    else:
        program.graph.erase_node(ring)


def _summed(program: Program, node: fx.Node, value: fx.Node, sums: list[fx.Node]) -> Iterator[fx.Node]:
    """The summands of a value, through additions that are read once each; the additions are appended to ``sums``."""
    is_sum = value.target is torch.ops.aten.add.Tensor and not value.kwargs and len(value.users) == 1
    if is_sum and [program.type(each) for each in value.all_input_nodes] == [program.type(value)] * 2:
        sums.append(value)
        for each in value.all_input_nodes:
            yield from _summed(program, node, each, sums)
    else:
        yield value


def _is_of_sum(program: Program, node: fx.Node, product: fx.Node) -> bool:
    """Whether a value is a product that only its sum reads, and each chunk of one operand makes one of its chunks."""
    if (
        product.target is not dot
        or len(product.users) > 1
        or program.source(product).stage != program.source(node).stage
    ):
        return False
    assert program.mesh is not None
    axes, _, dim = members(node)[0].args
    a, b, out = names_of(str(product.args[2]))
    open_ = {(part, "sum") for part in parse_parts(axes, program.mesh)}
    return (out[dim] in a) != (out[dim] in b) and set(program.sharding(product).partial) == open_


def _set_facts(program: Program, ring: fx.Node, node: fx.Node, made: Sequence[fx.Node]) -> None:
    shardings = tuple(map(program.sharding, made))
    program.set_sharding(ring, shardings if program.has_many(ring) else shardings[0])
    program.set_origins(ring, tuple(map(program.origin, made)))
    program.set_causes(ring, program.causes(node))
    program.is_fallback(ring)  # cached while its types are global
