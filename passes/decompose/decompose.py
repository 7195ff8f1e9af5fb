"""decompose: annotated -> annotated. Ops that need a cut dim whole become local work and small reductions.

A softmax, a gather or a lookup needs the whole dim only for a maximum, a sum or a position. Convolutions, pools and
slices need only the edges of neighbours' chunks::

    y: f32[512@dp, 64] = _log_softmax(x)     # x: f32[512@dp, 64@tp]
        ->
    m: f32[512@dp, 1] = amax(x);  s: f32[512@dp, 64@tp] = sub(x, m);  e: f32[512@dp, 1] = sum(exp(s))
    y: f32[512@dp, 64@tp] = sub(s, log(e))

So cross entropy over a cut vocabulary moves a few numbers a token. An op is taken apart only if that moves fewer bytes
than gathering, and only along the axes that would cut the dim. Then the program is propagated again, which may cut the
dims of more ops. Before that, attention over cut positions whose mask needs a gradient changes from torch's kernels to
our own. Invariant: every value that is left is as before, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from shardc.costs.count import flops_of
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, ceil_div, num_shards
from shardc.ops.attention.ring import POSITIONS
from shardc.ops.index import lookup_rows, scatter_rows
from shardc.options import ULYSSES
from shardc.program.communication import bytes_sent, is_collective
from shardc.program.node import arguments, op_name
from shardc.program.program import Program, Value
from shardc.program.provenance import Cuts, FormChoice

from ..emitter import NEVER, Decomposition, Emitter, Form
from ..propagate.cut_blocks import cut_blocks
from ..propagate.propagate import propagate
from ..reshard.choose_cuts import Arrivals, assign, claims_on, current_shardings, num_pieces, op_shardings
from ..reshard.insert_reshards import insert_reshards
from ..reshard.lower_reshards import lower_reshards
from .along import Along, Results, Windowed
from .attention import ATTENTION, learned_masks, with_own_kernels, without_effect, writes_out_softmax
from .convolution import CONVOLUTIONS
from .group_heads import group_heads, num_key_heads, repeat_heads, repeating
from .index import INDEXING, lookup_moves
from .pool import POOLS, RESAMPLINGS
from .reductions import NORMALIZATIONS, REDUCTIONS, SOFTMAXES
from .scan import SCANS
from .share_heads import HEADS
from .shift import SHIFTS
from .zigzag import ZIGZAGS

aten = torch.ops.aten


def decompose(program: Program) -> Program:
    """The program with ops taken apart where that moves fewer bytes."""
    has_softmax = writes_out_softmax(program)
    apart = cheapest_ends(_with_own_kernels(_with_grouped_heads(program)), _decomposed)
    if (repeated := repeat_heads(apart)) is not apart:
        apart = propagate(cut_blocks(repeated))
    return replace(apart, notes=(*apart.notes, *without_effect(apart, has_softmax)))


def _with_grouped_heads(program: Program) -> Program:
    """The program with attention over cut positions reading the keys' own heads where the model repeats them."""
    names = {node.name for node in repeating(program) if _is_in_chunks(program, node) and _divide(program, node)}
    if not names:
        return program
    program = program.copy(level="canonical")
    group_heads(program, [node for node in program.calls if node.name in names])
    program.remove_dead()
    return propagate(cut_blocks(program))


def _divide(program: Program, attention: fx.Node) -> bool:
    """Whether ranks can share the heads of the keys that a model repeats; true if they are not asked to share any."""
    if program.options.attention != ULYSSES:
        return True
    heads, positions = program.sharding(arguments(attention)["key"]).dims[HEADS : POSITIONS + 1]
    return num_key_heads(program, attention) % (num_shards(heads.all_axes) * num_shards(positions.all_axes)) == 0


def _with_own_kernels(program: Program) -> Program:
    """The program with our own kernels for attention over cut positions that torch's kernels cannot run as a ring."""
    pairs = [(forward, node) for forward, node in learned_masks(program) if _is_in_chunks(program, node)]
    if not pairs or program.options.attention == ULYSSES:
        return program
    names, program = [(a.name, b.name) for a, b in pairs], program.copy(level="canonical")
    nodes = {node.name: node for node in program.calls}
    return propagate(cut_blocks(with_own_kernels(program, [(nodes[a], nodes[b]) for a, b in names])))


def _is_in_chunks(program: Program, node: fx.Node) -> bool:
    rule = program.rule(node)
    return any(factor in rule.chunks for factor in _arriving(program, node, rule))


def _decomposed(program: Program) -> Program:
    """The program, whose graph is changed, with ops taken apart until none is left for which that sends less."""
    seen: set[Any] = set()
    taken_apart: list[FormChoice] = []
    while True:
        forms = _forms(program)
        kinds = {node.target for node in program.calls if _is_apart(forms, node)}
        if not kinds:
            break
        if not seen.isdisjoint(kinds):
            forms = _forms_behind(program, forms, kinds)
        seen |= kinds
        program = program.edited(level="canonical")
        for node in [node for node in program.calls if _is_apart(forms, node)]:
            choice, expand = forms[node.name]
            with program.graph.inserting_before(node):
                program.replace(node, expand(Emitter(program, node)))
            taken_apart.append(choice)
        program.remove_dead()
        program = propagate(cut_blocks(program))
    chosen = (*taken_apart, *(choice for choice, _ in forms.values()))
    return replace(program, forms=chosen) if chosen else program


Forms = Mapping[str, tuple[FormChoice, Form]]  # by an op's name: the choice, and the function that takes the op apart


def _is_apart(forms: Forms, node: fx.Node) -> bool:
    return node.name in forms and forms[node.name][0].is_apart


def _forms(program: Program) -> Forms:
    """For each op that can be taken apart, whether that sends less, and its replacement."""
    forms: dict[str, tuple[FormChoice, Form]] = {}
    for node in program.calls:
        form = None
        if node.target in DECOMPOSITIONS:
            form = _local_form(program, node)
        if node.target in WINDOWED:
            form = form or _windowed_form(program, node)
        if form is not None:
            forms[node.name] = form
    return forms


def _forms_behind(program: Program, forms: Forms, kinds: set[Any]) -> Forms:
    """The forms, and those of ops of the same kinds that cuts reach once these let them pass: norms form long chains.

    The search costs a propagation, so it runs only after cuts have reached more ops of a kind already taken apart.
    """
    if not any(node.target in kinds and not _is_apart(forms, node) for node in program.calls):
        return forms
    program = program.copy(level="canonical")
    for node in program.calls:
        if node.target in kinds and node.target in DECOMPOSITIONS:
            program.bind_rule(node, replace(program.rule(node), whole=frozenset()))
    program = propagate(cut_blocks(program))
    for node in program.calls:
        if node.target in kinds:
            program.forget_rule(node)
    apart = {name: form for name, form in forms.items() if form[0].is_apart}
    return {**_forms(program), **apart}


def _local_form(program: Program, node: fx.Node) -> tuple[FormChoice, Form] | None:
    """The choice whether an op becomes local work and a sum; None if no dim that it needs whole arrives cut."""
    rule, decomposition = program.rule(node), DECOMPOSITIONS[node.target]
    cuts = _arriving(program, node, rule)
    whole = {factor for factor in cuts if factor in rule.whole}
    moved = decomposition.moved(program, node, whole) if whole else NEVER
    if moved >= NEVER:
        return None
    refused = ""
    if _is_scattered(node, cuts, whole):
        refused = "not asked: positions do not follow one another"
    if any(_is_stored(program, node, cuts[factor]) for factor in whole):
        refused = "not asked: a table that is cut as inputs are is stored so, and gathered"
    apart, gathered = ceil_div(moved, _num_others(cuts, whole)), _gathered_bytes(program, node, rule, whole, cuts)
    count = num_pieces({factor: cuts[factor] for factor in whole})
    is_apart = not refused and apart < gathered
    apart, gathered = (nbytes * (count - 1) // count for nbytes in (apart, gathered))  # what one rank sends
    return _choice(program, node, cuts, whole, apart, gathered, is_apart, refused), decomposition.expand


def _windowed_form(program: Program, node: fx.Node) -> tuple[FormChoice, Form] | None:
    """The choice whether an op becomes windows, along the first dim where that moves less, else along the first one.

    None if no dim with a windowed form arrives cut.
    """
    rule, found = program.rule(node), None
    cuts = _arriving(program, node, rule)
    for factor, along in _windows(program, node, rule, cuts):
        moved, others = WINDOWED[node.target].moved(along), _num_others(cuts, {factor})
        ways = tuple((way, ceil_div(nbytes, others)) for way, nbytes in WINDOWED[node.target].ways(along))
        if moved is None and not ways:
            continue
        is_apart = moved is not None and moved < (along.count - 1) * _gathered_bytes(program, node, rule, {factor}, {})
        if is_apart or found is None:
            apart = ceil_div(moved or 0, along.count * others)
            gathered = _gathered_bytes(program, node, rule, {factor}, cuts) * (along.count - 1) // along.count
            choice = _choice(program, node, cuts, {factor}, apart, gathered, is_apart)
            found = replace(choice, ways=ways), partial(_in_windows, along)
        if is_apart:
            break
    return found


def _in_windows(along: Along, emit: Emitter) -> Results:
    return WINDOWED[along.node.target].expand(replace(along, emit=emit, chosen=along.emit))


def _windows(program: Program, node: fx.Node, rule: Rule, cuts: Cuts) -> Iterator[tuple[str, Along]]:
    """The factors along which an op may be taken apart into windows."""
    for factor, cut in cuts.items():
        for dim, in_chunks, divides in _cut_dims(program, node, rule, factor, cut):
            nested = () if divides else tuple(part.size for part in in_chunks.axes)
            yield factor, Along(Emitter(program, node), dim, num_shards(in_chunks.axes), nested=nested)


def _choice(
    program: Program, node: fx.Node, cuts: Cuts, factors: set[str], apart: int, gathered: int, is_apart: bool,
    refused: str = "",
) -> FormChoice:  # fmt: skip
    axes = frozenset(part.name for factor in factors for part in cuts[factor].all_axes)
    target, source = op_name(node.target), program.source(node)
    return FormChoice(node.name, target, source, axes, apart, gathered, is_apart, refused)


def _cut_dims(
    program: Program, node: fx.Node, rule: Rule, factor: str, cut: DimSharding
) -> Iterator[tuple[int, DimSharding, bool]]:
    """The dims that have a factor in chunks, or whose whole pieces it counts, each with its cut.

    The third entry: whether several axes cut the dim as one axis of as many ranks would. This is not always so, since
    each axis cuts the shards of those before it.
    """
    tensors = [
        (dims, program.value_type(value).shape, program.shardings(value[0])[value[1]])
        for value, dims in _tensors(program, node, rule)
        if dims is not None
    ]
    for dims, _, sharding in tensors:
        for dim, factors in enumerate(dims):
            if factor not in factors or sharding is None:
                continue
            is_piece = factor == WINDOWED[node.target].piece
            dim_cut = cut if rule.chunks.get(factor) == 1 else sharding.dims[dim] if is_piece else WHOLE
            if dim_cut.minor:  # a merged dim, cut unevenly: in chunks if another tensor is, else not
                in_chunks = DimSharding(dim_cut.axes)
                dim_cut = in_chunks if any(in_chunks in other.dims for *_, other in tensors if other) else WHOLE
            if num_shards(dim_cut.axes) == 1:
                continue
            sizes = [shape[dim] for dims, shape, _ in tensors if dim < len(shape) and dims[dim]]
            first, num_rest = dim_cut.axes[0].size, num_shards(dim_cut.axes[1:])
            divides = all(ceil_div(size, first) % num_rest == 0 for size in sizes)
            if divides or WINDOWED[node.target].nests:
                yield dim, dim_cut, divides


def _is_stored(program: Program, node: fx.Node, cut: DimSharding) -> bool:
    """Whether a table is cut over an axis that cuts inputs: any parameter may be stored so, and is gathered for use."""
    data = program.input_axes
    return node.target in TABLES and any(part.name in data for part in cut.all_axes)


def _is_scattered(node: fx.Node, cuts: Cuts, whole: set[str]) -> bool:
    """Whether a rank's positions are not consecutive, so that the first does not determine the others."""
    is_index = node.target in TABLES or node.target in INDEXING
    return is_index and any(cuts[factor].minor for factor in whole if factor.startswith("v"))


def _num_others(cuts: Cuts, factors: set[str]) -> int:
    """The number of pieces that all factors but these cut an op into."""
    return num_pieces({factor: cut for factor, cut in cuts.items() if factor not in factors})


def _arriving(program: Program, node: fx.Node, rule: Rule) -> Cuts:
    """The cuts of an op's factors as if all of them might be cut."""
    loose = replace(rule, whole=frozenset(), chunks={}, is_even=False, sees_padding=False)

    def sharding_of(value: Value) -> Sharding:
        sharding = program.shardings(value[0])[value[1]]
        assert sharding is not None
        return sharding

    return assign(loose, claims_on(program, node, loose, sharding_of))


def _gathered_bytes(program: Program, node: fx.Node, rule: Rule, factors: set[str], cuts: Cuts) -> int:
    """Bytes of the tensors that would be gathered along ``factors``, each cut by the other factors of ``cuts``."""
    total = 0
    for value, dims in _tensors(program, node, rule):
        if any(rule.has(factor, dims) for factor in factors):
            own_cuts = {factor: cut for factor, cut in cuts.items() if rule.has(factor, dims)}
            total += ceil_div(program.value_type(value).nbytes, _num_others(own_cuts, factors))
    return total


def _tensors(program: Program, node: fx.Node, rule: Rule) -> Iterator[tuple[Value, Dims | None]]:
    """An op's operands and results, each with its factors."""
    values = [*program.operand_values(node), *((node, i) for i in range(len(rule.results)))]
    dims_of = rule.operands + rule.results
    return ((value, dims) for value, dims in zip(values, dims_of, strict=True) if value is not None)


# The ops.


def _embedding(emit: Emitter) -> fx.Node:
    weight, ids = emit.given["weight"], emit.given["indices"]
    return emit(lookup_rows, weight, ids, emit(aten.arange.default, emit.shape(weight)[0]))


def _embedding_backward(emit: Emitter) -> fx.Node:
    given, rows = emit.given, emit(aten.arange.default, emit.given["num_weights"])
    gradient = emit(scatter_rows, given["grad_output"], given["indices"], rows)
    if given["padding_idx"] < 0:
        return gradient
    mask = emit(aten.unsqueeze.default, emit(aten.ne.Scalar, rows, given["padding_idx"]), 1)
    return emit(aten.mul.Tensor, gradient, mask)


def _scatter_moves(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """As many bytes as the lookup, so that both take the same form."""
    given = arguments(node)
    return NEVER if given["scale_grad_by_freq"] else 2 * program.type(given["grad_output"]).nbytes


DECOMPOSITIONS: dict[Any, Decomposition] = {
    aten.embedding.default: Decomposition(_embedding, lookup_moves),
    aten.embedding_dense_backward.default: Decomposition(_embedding_backward, _scatter_moves),
    **INDEXING,
    **NORMALIZATIONS,
    **REDUCTIONS,
    **SOFTMAXES,
}
TABLES = (aten.embedding.default, aten.embedding_dense_backward.default)


WINDOWED: dict[Any, Windowed] = ATTENTION | CONVOLUTIONS | POOLS | RESAMPLINGS | SCANS | SHIFTS | ZIGZAGS


def cheapest_ends(program: Program, decomposed: Callable[[Program], Program]) -> Program:
    """The program after ``decomposed``, propagated as it is, or with outputs before inputs if that is cheaper.

    The latter is not tried if the user has set priorities. ``decomposed`` may change the graph of its argument.
    """
    if not _ends_conflict(program):
        return decomposed(program)
    pins = tuple(
        replace(pin, priorities=(-1,) * len(pin.sharding.dims)) if pin.kind == "output" else pin for pin in program.pins
    )
    outputs_first = decomposed(propagate(cut_blocks(replace(program.copy(level="canonical"), pins=pins))))
    inputs_first = decomposed(program)
    nbytes, flops = [], []
    for result in (inputs_first, outputs_first):
        lowered = lower_reshards(insert_reshards(result.copy()))
        nbytes.append(sum(bytes_sent(lowered, node) for node in lowered.calls if is_collective(node)))
        flops.append(flops_of(lowered, True))
    return outputs_first if nbytes[1] < nbytes[0] and flops[1] <= flops[0] else inputs_first


def _ends_conflict(program: Program) -> bool:
    """Whether an axis that cuts both inputs and outputs moves to another dim somewhere, and no priorities decide."""
    axes: dict[str, set[str]] = {"input": set(), "output": set()}
    for pin in program.pins:
        axes.setdefault(pin.kind, set()).update(_dims_by_axis(pin.sharding))
    shared = axes["input"] & axes["output"]
    if not shared or any(any(pin.priorities) for pin in program.pins):
        return False
    arrivals = Arrivals(program, current_shardings(program))
    for node in program.calls:
        tensors = arrivals.tensors(node)
        op = op_shardings(tensors, assign(tensors.rule, arrivals.claims(node)))
        pairs = [*zip(tensors.arriving, op.operands, strict=True), *zip(tensors.propagated, op.results, strict=True)]
        for src, dst in ((src, dst) for src, dst in pairs if src is not None and dst is not None):
            src_dims, dst_dims = _dims_by_axis(src), _dims_by_axis(dst)
            if any(src_dims[axis] != dst_dims[axis] for axis in shared & src_dims.keys() & dst_dims.keys()):
                return True
    return False


def _dims_by_axis(sharding: Sharding) -> dict[str, int]:
    """The dim that each axis cuts."""
    return {part.name: dim for dim, cut in enumerate(sharding.dims) for part in cut.all_axes}
