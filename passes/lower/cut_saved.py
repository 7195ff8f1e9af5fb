"""cut_saved: lowered -> lowered. Values saved for backward are cut, or put in the tier below, as ``saved`` says.

Ranks that would all save a value save a piece each, and backward gathers the pieces before it reads the value::

    x: f32[8@dp, 64] = relu(y)                    x: f32[8@dp, 64] = relu(y)
                                                  s: f32[8@dp, 64@tp] = saved_slice(x, ("tp",), 1)
    ...                                   ->      ...                                                   # backward
    dw = dot(x, dz)                               g: f32[8@dp, 64] = all_gather(s, ("tp",), 1)
                                                  dw = dot(g, dz)

With a tier, host memory or files, the piece or the value goes there until backward fetches it::

    o: f32[8@dp, 64@tp] = offload(s, "host")
    ...                                                                                                 # backward
    u: f32[8@dp, 64@tp] = fetch(o, "host");  g: f32[8@dp, 64] = all_gather(u, ("tp",), 1)

Views that backward reads are taken of the gathered or fetched value. Each stage of a pipeline saves a piece of the
values that it reads. Later passes treat these gathers and fetches as those of stored parameters: a layer's go together,
one layer ahead. Invariant: forward computes the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.sharding import DimSharding, Sharding, TensorType, num_shards
from shardc.ops.tier import fetch, offload
from shardc.options.saved import SavedAs, key_for, saved_as
from shardc.program.collective import all_gather, saved_slice
from shardc.program.communication import is_saved
from shardc.program.lifetime import owners_of, split
from shardc.program.node import descendants, is_getitem
from shardc.program.program import Program, Value
from shardc.program.provenance import PARAMETER, Origin, SavedCut
from shardc.program.stages import StageAssignment, ValueKinds, has_stages

from ..reshard.store import stored_sharding
from .make_again import enclosing, make_again


def cut_saved(program: Program) -> Program:
    """The program that saves pieces, or saves in the tier below; unchanged without the option."""
    if not program.options.saved or not split(program).backward:
        return program
    program = program.copy()
    for node in split(program).backward:  # calls made again for backward may stand before values it will gather
        program.output_node.prepend(node)
    cuts = Cuts(program)
    for stage, readers in _backward_by_stage(program).items():
        _cut_for(program, cuts, readers, stage)
    unused = {key: how.to for key, how in cuts.saved.items() if how is not None and key not in cuts.used}
    why = {key: NOTHING_CUT if to is None else NOTHING_BELOW for key, to in unused.items()}
    program.notes = (*program.notes, *(f"saved names {key!r}, but {each}" for key, each in why.items()))
    return program


def pieces_of(program: Program, forward: Iterable[fx.Node]) -> dict[Value, int]:
    """The bytes that a rank saves on its device, for each value of forward that it does not save whole there."""
    if not program.options.saved:
        return {}
    cuts = Cuts(program)
    found = {program.value(node): cuts.of(node) for node in forward if not program.has_many(node)}
    return {value: 0 if cut.to else cut.nbytes for value, cut in found.items() if cut is not None}


NOTHING_CUT = "nothing that these modules read is cut so: its axes are of one rank or cut it already, or dims are short"
NOTHING_BELOW = "nothing that these modules read is saved so: backward reads no matrix of it that is made of the inputs"


class Cuts:
    """The cut and the place of each saved value of forward. Raises an OptionError if a glob matches no module.

    A value that depends on no input, such as positions, is saved whole by every rank. Numbers and vectors, which are
    small at any size, stay on the device, and so do values that depend only on parameters, such as casts of them.
    ``used``: the keys of the option that change how a value is saved.
    """

    def __init__(self, program: Program) -> None:
        entries = program.options.saved or {}
        self.program, self.entries, self.used = program, entries, set[str]()
        self.saved = {key: saved_as(entry) for key, entry in entries.items()}
        self.of_inputs = descendants(*program.placeholders)
        kinds = zip(program.placeholders, program.inputs, strict=True)
        self.of_data = descendants(*(node for node, put in kinds if put.kind in ("input", "random")))
        paths = {path for node in split(program).forward for path in enclosing(program.source(node).module)}
        for key, entry in entries.items():
            if key_for({key: entry}, {"", *paths}) is None:
                what, problem = f"a glob over {len(paths)} modules", "it matches none"
                remedy = did_you_mean(key, paths) or "say '*' for all"
                raise OptionError(f"saved={{{key!r}: {entry!r}}}", what, problem, remedy)

    def of(self, node: fx.Node) -> SavedCut | None:
        """The way a value is saved; None if it is saved as it was computed."""
        key, computed = key_for(self.entries, self._modules(node)), self.program.sharding(node)
        how, type_ = None if key is None else self.saved[key], self.program.global_type(node)
        if key is None or how is None or node not in self.of_inputs:
            return None
        stored = self._stored(type_, computed, how)
        to = how.to if node in self.of_data and len(type_.shape) > 1 else None
        if stored == computed and to is None:
            return None
        self.used.add(key)
        return SavedCut(node.name, type_, stored, computed, f"saved={{{key!r}: {self.entries[key]!r}}}", to)

    def _stored(self, type_: TensorType, computed: Sharding, how: SavedAs) -> Sharding:
        """The sharding in which a value is saved; ``computed`` if it cannot be cut so."""
        if computed.partial:
            return computed
        stored = self._sharding(type_, computed, how.axes, how.dim)
        is_cut = stored.storable(type_.shape) == stored and len(_changed(computed, stored)) == 1
        return stored if is_cut else computed

    def _sharding(self, type_: TensorType, computed: Sharding, names: tuple[str, ...], dim: int | None) -> Sharding:
        """The sharding with a dim cut by further axes; unchanged if the dim is too short or they already cut it."""
        mesh, cutting = computed.mesh, {part.name for part in computed.cut_axes}
        axes = tuple(mesh.axis(name) for name in names if name not in cutting and mesh.axis_size(name) > 1)
        if dim is None:  # the last dims are features, of one number in every call
            return stored_sharding(type_, computed, axes, from_last=True)
        cut = computed.dims[dim] if dim < len(computed.dims) else None
        if cut is None or cut.minor or cut.local_size(type_.shape[dim]) < num_shards(axes):
            return computed
        return computed.with_dim(dim, DimSharding((*cut.axes, *axes)))

    def _modules(self, node: fx.Node) -> set[str]:
        """The modules that read a value, in forward or in backward, and those that contain them."""
        readers = (user for user in node.users if not is_saved(user))
        return {"", *(path for each in readers for path in enclosing(self.program.source(each).module))}


def _changed(one: Sharding, other: Sharding) -> list[int]:
    """The dims that two shardings cut differently."""
    return [dim for dim, (cut, further) in enumerate(zip(one.dims, other.dims, strict=True)) if cut != further]


def _backward_by_stage(program: Program) -> dict[int, list[fx.Node]]:
    """The calls of backward by the stage of the pipeline that runs them; all are of stage 0 without one."""
    backward = split(program).backward
    if not has_stages(program):
        return {0: list(backward)}
    kinds = ValueKinds(program)
    assignment, by_stage = StageAssignment(kinds), dict[int, list[fx.Node]]()
    for node in backward:
        if node in kinds.timed and node in assignment.stage:
            by_stage.setdefault(assignment.stage[node], []).append(node)
    return by_stage


def _cut_for(program: Program, cuts: Cuts, readers: Sequence[fx.Node], stage: int) -> None:
    """Let the backward calls of a stage read values that are gathered from pieces, or fetched."""
    parts = split(program)
    owners, forward = owners_of(program, (*parts.update, *parts.forward)), set(parts.forward)

    def memory(nodes: Iterable[fx.Node | None]) -> set[Value]:
        """The values that own the memory of those nodes that are of forward."""
        values = (program.value(node) for node in nodes if node in forward)
        return {owners[value] for value in values if value in owners}

    read = memory(operand for reader in readers for operand in reader.all_input_nodes) - memory(program.results)
    found: dict[Value, list[fx.Node]] = {}  # the calls that bring back a value, which the last of them returns
    twins: dict[fx.Node, fx.Node] = {}  # by node of forward with such a value, the call that returns it
    for node in parts.forward:
        value = program.value(node)
        if value in read and not program.has_many(node):
            if value not in found and (cut := cuts.of(node)) is not None:
                found[value] = _brought_back(program, node, cut, readers[0], stage)
            if value in found:
                twins[node] = found[value][-1]
    make_again(program, readers, {value for value, owner in owners.items() if owner in found}, twins)
    for calls in found.values():
        first = min(calls[-1].users)
        for each in calls:
            first.prepend(each)
            program.set_source(each, replace(program.source(first), phase="backward", stage=stage))


def _brought_back(program: Program, node: fx.Node, cut: SavedCut, before: fx.Node, stage: int) -> list[fx.Node]:
    """Save a value in a stage as a cut says; return the calls of backward, inserted at ``before``, that restore it."""
    is_cut, last = cut.stored != cut.computed, program.value(node)[0]
    args = _slice_arguments(cut) if is_cut else ()
    saves = [(saved_slice, args, "saved")] * is_cut + [(offload, (cut.to,), "offloaded")] * bool(cut.to)
    brings = [(fetch, (cut.to,), "fetched")] * bool(cut.to) + [(all_gather, args, "gathered")] * is_cut
    picked = [user for user in last.users if is_getitem(user)] if program.has_many(last) else [last]
    value, place, back = node, max(picked), list[fx.Node]()
    for target, further, name in saves:
        with program.graph.inserting_after(place):
            place = value = _inserted(program, target, (value, *further), node, cut, name)
        program.set_source(value, replace(program.source(node), stage=stage))
    with program.graph.inserting_before(before):
        for target, further, name in brings:
            value = _inserted(program, target, (value, *further), node, cut, name)
            back.append(value)
    return back


def _slice_arguments(cut: SavedCut) -> tuple[tuple[str, ...], int]:
    """The axes by which a value is cut further, printed, and the dim."""
    (dim,) = _changed(cut.computed, cut.stored)
    added = cut.stored.dims[dim].axes[len(cut.computed.dims[dim].axes) :]
    return tuple(map(cut.stored.mesh.print_part, added)), dim


def _inserted(program: Program, target: Any, args: tuple[Any, ...], node: fx.Node, cut: SavedCut, name: str) -> fx.Node:
    """Insert a step on the way of a value to where it is saved, or back to its own sharding."""
    step = program.insert(target, args, cut.type, node, name=f"{node.name}_{name}")
    option, is_whole = Origin(cut.option, PARAMETER, (node.name, 0)), target is all_gather
    program.set_sharding(step, cut.computed if is_whole else cut.stored)
    program.set_origins(step, ({**program.origin(node), **({} if is_whole else dict.fromkeys(cut.axes, option))},))
    program.set_causes(step, (cut,))
    return step
