"""cut_saved: lowered -> lowered. What is saved for backward is cut over further axes meanwhile (the option ``saved``).

Ranks that would all save a value save a piece each, and backward gathers the pieces before it reads them::

    x: f32[8@dp, 64] = relu(y)                    x: f32[8@dp, 64] = relu(y)
                                                  s: f32[8@dp, 64@tp] = saved_slice(x, ("tp",), 1)
    ...                                   ->      ...                                                   # backward
    dw = dot(x, dz)                               g: f32[8@dp, 64] = all_gather(s, ("tp",), 1)
                                                  dw = dot(g, dz)

Views that backward reads are taken of what is gathered. Each stage of a pipeline saves a piece of what it reads. Later
passes treat these gathers as those of stored parameters: a layer's go together, one layer ahead. Invariant: forward
computes what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from shardc.language.errors import OptionError, did_you_mean
from shardc.language.sharding import DimSharding, Sharding, TensorType, num_shards
from shardc.options.saved import axes_of_entry, dim_of_entry, key_for
from shardc.program.collective import all_gather, saved_slice
from shardc.program.lifetime import owners_of, split
from shardc.program.node import descendants, is_getitem
from shardc.program.program import Program, Value
from shardc.program.provenance import PARAMETER, Origin, SavedCut
from shardc.program.stages import StageAssignment, ValueKinds, has_stages

from ..reshard.store import stored_sharding
from .make_again import enclosing, make_again


def cut_saved(program: Program) -> Program:
    """The program that saves pieces; the same without the option."""
    saved = program.options.saved
    if not saved or not split(program).backward:
        return program
    program = program.copy()
    for node in split(program).backward:  # what backward computes of forward may stand before what it will gather
        program.output_node.prepend(node)
    cuts = Cuts(program)
    for stage, readers in _backward_by_stage(program).items():
        _cut_for(program, cuts, readers, stage)
    unused = [key for key, entry in saved.items() if entry is not None and key not in cuts.used]
    program.notes = (*program.notes, *(f"saved names {key!r}, but {NOTHING_CUT}" for key in unused))
    return program


def pieces_of(program: Program, forward: Iterable[fx.Node]) -> dict[Value, int]:
    """The bytes of the piece that a rank saves of each value of forward, where it is not all of it."""
    if not program.options.saved:
        return {}
    cuts = Cuts(program)
    found = {program.value(node): cuts.of(node) for node in forward if not program.has_many(node)}
    return {value: cut.nbytes for value, cut in found.items() if cut is not None}


NOTHING_CUT = "nothing that these modules read is cut so: its axes are of one rank or cut it already, or dims are short"


class Cuts:
    """How each value of forward is cut while it is saved. OptionError where a glob matches no module.

    What depends on no input, as positions do, is not sent but saved by every rank. ``used``: the keys of the option
    that cut a value.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.saved, self.used = program, program.options.saved or {}, set[str]()
        self.of_inputs = descendants(*program.placeholders)
        paths = {path for node in split(program).forward for path in enclosing(program.source(node).module)}
        for key, entry in self.saved.items():
            if key_for({key: entry}, {"", *paths}) is None:
                what, problem = f"a glob over {len(paths)} modules", "it matches none"
                remedy = did_you_mean(key, paths) or "say '*' for all"
                raise OptionError(f"saved={{{key!r}: {entry!r}}}", what, problem, remedy)

    def of(self, node: fx.Node) -> SavedCut | None:
        """How a value is saved; None where it is as it was computed."""
        key, computed = key_for(self.saved, self._modules(node)), self.program.sharding(node)
        entry, type_ = None if key is None else self.saved[key], self.program.global_type(node)
        if key is None or entry is None or computed.partial or node not in self.of_inputs:
            return None
        stored = self._sharding(type_, computed, axes_of_entry(entry), dim_of_entry(entry))
        if stored.storable(type_.shape) != stored or len(_changed(computed, stored)) != 1:
            return None
        self.used.add(key)
        return SavedCut(node.name, type_, stored, computed, f"saved={{{key!r}: {entry!r}}}")

    def _sharding(self, type_: TensorType, computed: Sharding, names: tuple[str, ...], dim: int | None) -> Sharding:
        """The sharding with a dim cut by further axes; the same where the dim is too short, or they cut it already."""
        mesh, cutting = computed.mesh, {part.name for part in computed.cut_axes}
        axes = tuple(mesh.axis(name) for name in names if name not in cutting and mesh.axis_size(name) > 1)
        if dim is None:  # the last ones are features, which are as many in every call
            return stored_sharding(type_, computed, axes, from_last=True)
        cut = computed.dims[dim] if dim < len(computed.dims) else None
        if cut is None or cut.minor or cut.local_size(type_.shape[dim]) < num_shards(axes):
            return computed
        return computed.with_dim(dim, DimSharding((*cut.axes, *axes)))

    def _modules(self, node: fx.Node) -> set[str]:
        """The modules that read a value, in forward or in backward, and those that hold them."""
        readers = (user for user in node.users if user.target is not saved_slice)
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
    """Let the calls of backward of a stage read what is gathered of pieces."""
    parts = split(program)
    owners, forward = owners_of(program, (*parts.update, *parts.forward)), set(parts.forward)

    def memory(nodes: Iterable[fx.Node | None]) -> set[Value]:
        """The values in whose memory these of forward are."""
        values = (program.value(node) for node in nodes if node in forward)
        return {owners[value] for value in values if value in owners}

    read = memory(operand for reader in readers for operand in reader.all_input_nodes) - memory(program.results)
    gathered: dict[Value, fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}  # by each node that stands for such a value
    for node in parts.forward:
        value = program.value(node)
        if value in read and not program.has_many(node):
            if value not in gathered and (cut := cuts.of(node)) is not None:
                gathered[value] = _gathered(program, node, cut, readers[0], stage)
            if value in gathered:
                twins[node] = gathered[value]
    make_again(program, readers, {value for value, owner in owners.items() if owner in gathered}, twins)
    for gather in gathered.values():
        first = min(gather.users)
        first.prepend(gather)
        program.set_source(gather, replace(program.source(first), phase="backward", stage=stage))


def _gathered(program: Program, node: fx.Node, cut: SavedCut, before: fx.Node, stage: int) -> fx.Node:
    """Save a piece of a value in a stage; what is gathered of it in backward, before a call there."""
    (dim,) = _changed(cut.computed, cut.stored)
    added = cut.stored.dims[dim].axes[len(cut.computed.dims[dim].axes) :]
    args = tuple(map(cut.stored.mesh.print_part, added)), dim
    last = program.value(node)[0]
    picked = [user for user in last.users if is_getitem(user)] if program.has_many(last) else [last]
    with program.graph.inserting_after(max(picked)):
        piece = program.insert(saved_slice, (node, *args), cut.type, node, name=f"{node.name}_saved")
    with program.graph.inserting_before(before):
        whole = program.insert(all_gather, (piece, *args), cut.type, node, name=f"{node.name}_gathered")
    program.set_source(piece, replace(program.source(node), stage=stage))
    origins = program.origin(node)
    option = Origin(cut.option, PARAMETER, (node.name, 0))
    program.set_sharding(piece, cut.stored)
    program.set_origins(piece, ({**origins, **dict.fromkeys(cut.axes, option)},))
    program.set_sharding(whole, cut.computed)
    program.set_origins(whole, (origins,))
    for each in (piece, whole):
        program.set_causes(each, (cut,))
    return whole
