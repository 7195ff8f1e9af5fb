"""store: agreed -> agreed. Between uses a parameter is cut over one axis more than it is computed with (ZeRO).

It is resharded where it is used, and its gradient arrives in the stored sharding::

    w: f32[64, 256@tp]                            w: f32[64@dp, 256@tp]
    y = dot(x, w, "a b, b c -> a c")       ->     g: f32[64, 256@tp] = reshard(w);  y = dot(x, g, "a b, b c -> a c")
    d: f32[64, 256@tp] = reshard(p)               d: f32[64@dp, 256@tp] = reshard(p)

Stage 3 has a reshard of its own for backward, so that nothing gathered is saved. In a pipeline it has one for both: a
stage would run both before its first microbatch, as no microbatch changes a parameter, and keep both results to the
last one's backward. One for each microbatch could be freed, but would be sent as often. The copy of a stage that is
offloaded goes to the host with the stage. Stages 1 and 2 have one reshard, in the phase ``update``. What it makes is a
result of the program, which the runtime keeps until a parameter is written. Invariant: every op but the reshards
computes on the shardings that it had.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import fx

from shardc.language.mesh import AxisPart
from shardc.language.sharding import DimSharding, Sharding, TensorType
from shardc.options import Zero
from shardc.program.collective import reshard
from shardc.program.node import casts_behind, is_cast, operand
from shardc.program.program import Output, Program, ends_of, parameters_of
from shardc.program.provenance import PARAMETER, Origin, ShardingChange, StorageChange

from .insert_reshards import insert_reshard


def store(program: Program) -> Program:
    """The program with parameters stored as ``Zero`` and cast as ``Precision`` says; the same without them."""
    zero, precision = program.options.zero, program.options.precision
    if zero is None and precision is None:
        return program
    assert program.mesh is not None
    axis, program = program.mesh.axis(zero.axis) if zero else None, program.edited()
    storer = _Storer(program, zero)
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind == "parameter":
            sharding = program.sharding(node)
            storer.store(entry.name, node, stored_sharding(entry.type, sharding, axis) if axis else sharding)
    for output, result in zip(program.outputs, program.results, strict=True):
        if result is not None and output.kind == "gradient":  # is cast and reduced as soon as it is computed
            for before, node in pairwise(reversed(casts_behind(result, reshard))):
                if before.op != "placeholder":
                    before.append(node)
    return program


def stored_sharding(type_: TensorType, sharding: Sharding, axis: AxisPart) -> Sharding:
    """The sharding with one dim cut by ``axis`` too: the first that divides, else the first that is long enough.

    Dims that nothing cuts come first. The same where the axis cuts the value already, or no dim is long enough, or no
    DTensor could hold the shards.
    """
    if axis.size == 1 or any(part.name == axis.name for part in sharding.cut_axes):
        return sharding
    shape = type_.shape
    cuts = [
        sharding.with_dim(dim, DimSharding((*cut.axes, axis)))
        for dim, cut in sorted(enumerate(sharding.dims), key=lambda pair: bool(pair[1].axes))
        if not cut.minor and cut.local_size(shape[dim]) >= axis.size
    ]
    fitting = [cut for cut in cuts if cut.storable(shape) == cut]
    return next(iter([*(cut for cut in fitting if cut.is_even(shape)), *fitting]), sharding)


class _Storer:
    """Changes how parameters are stored.

    ``order``: of the nodes of the graph as it was. ``gradients``: which result is the gradient of an input.
    """

    def __init__(self, program: Program, zero: Zero | None) -> None:
        self.program, self.zero, self.stage = program, zero, zero.stage if zero else 0
        self.order = {node: i for i, node in enumerate(program.graph.nodes)}
        owned = enumerate(ends_of(program))
        self.gradients = {owner: i for i, (output, owner, _) in owned if output.kind == "gradient"}
        parameters = set(parameters_of(program).values())
        calls = (node for node in program.graph.nodes if node.op != "placeholder")
        self.first_call = next(node for node in calls if not (is_cast(node) and operand(node) in parameters))

    def store(self, name: str, node: fx.Node, stored: Sharding) -> None:
        """Store a parameter and its gradient in another sharding; a narrower copy for computing is kept."""
        program, computed = self.program, self.program.sharding(node)
        copy = cast = self._narrower(node)
        if stored == computed and cast is None:
            return
        program.computed = {**program.computed, name: computed}
        if stored != computed:
            assert self.zero is not None
            why = StorageChange(name, program.type(node), stored, computed, self.zero.text)
            for value in filter(None, (node, cast)):
                program.set_sharding(value, stored)
                self._set_origin(value, Origin(why.option, PARAMETER, (value.name, 0)))
            self._store_gradient(node, stored, why)
            gathered = self._gather(cast or node, computed, why)
            copy = cast if cast is not None and self.stage == 3 else gathered
        if copy is not None:  # it is computed in the update, and returned from the program
            for value in (copy, operand(copy)):
                if value.op != "placeholder":
                    program.set_source(value, replace(program.source(value), phase="update"))
            program.outputs = (*program.outputs, Output(name, "computed"))
            program.output_node.args = ((*program.results, copy),)

    def _narrower(self, node: fx.Node) -> fx.Node | None:
        """The cast to fewer bytes that alone reads a parameter, if there is one. It becomes the first call."""
        cast = next(iter(node.users), None)
        if cast is None or len(node.users) > 1 or not is_cast(cast):
            return None
        is_narrower = self.program.type(cast).nbytes < self.program.type(node).nbytes
        if not is_narrower or self.program.sharding(cast) != self.program.sharding(node):
            return None
        self.first_call.prepend(cast)
        return cast

    def _set_origin(self, node: fx.Node, origin: Origin) -> None:
        """The origin of the option's axis on a value."""
        assert self.zero is not None
        self.program.set_origins(node, ({**self.program.origin(node), self.zero.axis: origin},))

    def _gather(self, node: fx.Node, computed: Sharding, why: StorageChange) -> fx.Node | None:
        """Reshard a stored value for its users: in stages 1 and 2 once for all, which is returned; in stage 3 by group.

        The users of a phase are a group of stage 3, or all in a pipeline, where microbatches follow each other.
        """
        program, users = self.program, sorted(node.users, key=self.order.__getitem__)
        if self.stage < 3:
            groups = [(users, min(self.first_call, *users, key=self.order.__getitem__))] if users else []
        elif program.options.pipeline is not None:
            groups = [(users, users[0])] if users else []
        else:
            phases = ([u for u in users if program.source(u).phase == phase] for phase in ("forward", "backward"))
            groups = [(group, group[0]) for group in phases if group]
        resharded = None
        for group, before in groups:
            with program.graph.inserting_before(before):
                resharded = insert_reshard(program, node, computed, group[0], why)
            for user in group:
                user.replace_input_with(node, resharded)
        return resharded if self.stage < 3 else None

    def _store_gradient(self, node: fx.Node, stored: Sharding, why: StorageChange) -> None:
        """Return a gradient as its parameter is stored: from the reshard that reduces it, or from another.

        Casts after that reshard run on the stored sharding too.
        """
        program, results = self.program, list(self.program.results)
        place = self.gradients.get(node)
        gradient = None if place is None else results[place]
        if place is None or gradient is None:
            return
        chain = casts_behind(gradient)
        is_sole = all(len(each.users) == 1 for each in chain) and results.count(gradient) == 1
        if chain[-1].target is reshard and is_sole:
            (cause,) = program.causes(chain[-1])
            assert isinstance(cause, ShardingChange), cause
            program.set_causes(chain[-1], (replace(cause, stored=why),))
        else:
            with program.graph.inserting_after(gradient):
                chain = [insert_reshard(program, gradient, stored, gradient, why)]
            results[place] = chain[0]
            program.output_node.args = (tuple(results),)
        assert self.zero is not None
        for each in chain:
            value = operand(each) if each.target is reshard else each
            origin = program.origin(node)[self.zero.axis]
            program.set_sharding(each, stored)
            self._set_origin(each, origin.through(f"the gradient {why.name}", (value.name, 0)))
