"""store: agreed -> agreed. Between uses a parameter is cut over one axis more than it is computed with (ZeRO).

It is resharded where it is used, and its gradient arrives in the stored sharding::

    w: f32[64, 256@tp]                            w: f32[64@dp, 256@tp]
    y = dot(x, w, "a b, b c -> a c")       ->     g: f32[64, 256@tp] = reshard(w);  y = dot(x, g, "a b, b c -> a c")
    d: f32[64, 256@tp] = reshard(p)               d: f32[64@dp, 256@tp] = reshard(p)

Stage 3 has a reshard of its own for backward, so that nothing gathered is saved. In a pipeline it has one for both: a
stage would run both before its first microbatch, as no microbatch changes a parameter, and keep both results to the
last one's backward. One for each microbatch could be freed, but would be sent as often. The copy of a stage that is
offloaded goes to the host with the stage. Stages 1 and 2 have one reshard, in the phase ``update``. What it makes is a
result of the program, which the runtime keeps until a parameter is written.

Where ``Zero`` tells fast axes from slow ones, a reshard is two, with a sharding between them that the fast axes alone
cut. So the slow ones gather a piece, which is saved for backward, and add up a piece::

    w: f32[64@dp+node]                            h: f32[(2 32@node)] = reshard(w)        # forward, over dp
    g: f32[64] = reshard(w)                ->     g: f32[64] = reshard(h);  b: f32[64] = reshard(h)

Invariant: every op but the reshards computes on the shardings that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from torch import fx

from shardc.language.cut import join_dim
from shardc.language.mesh import Axes
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, num_shards
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
    names = [name for name in program.mesh.axis_names if zero and name in zero.axes]
    axes, program = tuple(map(program.mesh.axis, names)), program.edited()
    storer = _Storer(program, zero)
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind == "parameter":
            sharding = program.sharding(node)
            storer.store(entry.name, node, stored_sharding(entry.type, sharding, axes))
    for output, result in zip(program.outputs, program.results, strict=True):
        if result is not None and output.kind == "gradient":  # is cast and reduced as soon as it is computed
            for before, node in pairwise(reversed(casts_behind(result, reshard))):
                if before.op != "placeholder":
                    before.append(node)
    return program


def stored_sharding(type_: TensorType, sharding: Sharding, axes: Axes, from_last: bool = False) -> Sharding:
    """The sharding with one dim cut by ``axes`` too: the first that divides, else the first that is long enough.

    Dims that nothing cuts come first; ``from_last``: of these the last one. Several axes cut a dim each where none is
    long enough for all. The same where the axes cut the value already, or no dim is long enough, or no DTensor could
    hold the shards.
    """
    cutting = {part.name for part in sharding.cut_axes}
    axes = tuple(axis for axis in axes if axis.size > 1 and axis.name not in cutting)
    if not axes:
        return sharding
    shape, dims = type_.shape, list(enumerate(sharding.dims))[:: -1 if from_last else 1]

    def fitting() -> Iterator[Sharding]:
        """The possible shardings, one by one: each size that is compared limits for which sizes a program holds."""
        for dim, cut in sorted(dims, key=lambda pair: bool(pair[1].axes)):
            if not cut.minor and cut.local_size(shape[dim]) >= num_shards(axes):
                further = sharding.with_dim(dim, DimSharding((*cut.axes, *axes)))
                if further.storable(shape) == further:
                    yield further

    even = (further for further in fitting() if further.is_even(shape))
    found = next(even, None) or next(fitting(), None)
    if found is None and len(axes) > 1:
        for axis in axes:
            sharding = stored_sharding(type_, sharding, (axis,), from_last)
    return found or sharding


def halfway(type_: TensorType, stored: Sharding, zero: Zero) -> Sharding | None:
    """The sharding of a stored parameter that was gathered over the slow axes.

    None where slow axes alone cut it, or fast axes alone, or where slow axes cut a dim unevenly.
    """
    cutting = {part.name for part in stored.cut_axes}
    slow = cutting.intersection(zero.slow_axes)
    if not slow or cutting.isdisjoint(zero.fast_axes):
        return None
    dims = list(stored.dims)
    for dim, (cut, size) in enumerate(zip(stored.dims, type_.shape, strict=True)):
        if slow.isdisjoint(part.name for part in cut.axes):
            continue
        if not cut.is_even(size):
            return None
        digits = [(part.size, WHOLE if part.name in slow else DimSharding((part,))) for part in cut.axes]
        dims[dim] = join_dim([*digits, (cut.local_size(size), WHOLE)])
    return replace(stored, dims=tuple(dims))


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
            between = halfway(why.type, stored, self.zero)
            for value in filter(None, (node, cast)):
                program.set_sharding(value, stored)
                self._set_origins(value, Origin(why.option, PARAMETER, (value.name, 0)), why)
            self._store_gradient(node, between, why)
            gathered = self._gather(cast or node, between, why)
            copy = cast if cast is not None and self.stage == 3 else gathered
        if copy is not None:  # it is computed in the update, and returned from the program
            value = copy
            while value.op != "placeholder":
                program.set_source(value, replace(program.source(value), phase="update"))
                value = operand(value)
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

    def _set_origins(self, node: fx.Node, origin: Origin, why: StorageChange) -> None:
        """The origin of the option's axes on a value."""
        added = dict.fromkeys(why.axes, origin)
        self.program.set_origins(node, ({**self.program.origin(node), **added},))

    def _gather(self, node: fx.Node, between: Sharding | None, why: StorageChange) -> fx.Node | None:
        """Reshard a stored value for its users: in stages 1 and 2 once for all, which is returned; in stage 3 by group.

        The users of a phase are a group of stage 3, or all in a pipeline, where microbatches follow each other. What
        stands ``between`` is made once for all groups.
        """
        program, users = self.program, sorted(node.users, key=self.order.__getitem__)
        if self.stage < 3:
            groups = [(users, min(self.first_call, *users, key=self.order.__getitem__))] if users else []
        elif program.options.pipeline is not None:
            groups = [(users, users[0])] if users else []
        else:
            phases = ([u for u in users if program.source(u).phase == phase] for phase in ("forward", "backward"))
            groups = [(group, group[0]) for group in phases if group]
        resharded, source = None, node
        if between is not None and groups:
            with program.graph.inserting_before(groups[0][1]):
                source = insert_reshard(program, node, between, users[0], why)
        for group, before in groups:
            with program.graph.inserting_before(before):
                resharded = insert_reshard(program, source, why.computed, group[0], why)
            for user in group:
                user.replace_input_with(node, resharded)
        return resharded if self.stage < 3 else None

    def _store_gradient(self, node: fx.Node, between: Sharding | None, why: StorageChange) -> None:
        """Return a gradient as its parameter is stored: from the reshard that reduces it, or from another.

        Casts after that reshard run on the stored sharding too.
        """
        program, results, stored = self.program, list(self.program.results), why.stored
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
        if between is not None:
            self._add_within(chain[-1], between)
        for each in chain:
            value = operand(each) if each.target is reshard else each
            origin = program.origin(node)[why.axes[0]]
            program.set_sharding(each, stored)
            self._set_origins(each, origin.through(f"the gradient {why.name}", (value.name, 0)), why)

    def _add_within(self, node: fx.Node, between: Sharding) -> None:
        """Add up a gradient over the fast axes before the reshard that does so over the slow ones."""
        assert self.zero is not None
        value = operand(node)
        partial = self.program.sharding(value).partial
        left = tuple((part, op) for part, op in partial if part.name in self.zero.slow_axes)
        if left and any(part.name in self.zero.fast_axes for part, _ in partial):
            with self.program.graph.inserting_before(node):
                target = replace(between, partial=left)
                added = insert_reshard(self.program, value, target, node, *self.program.causes(node))
            node.args = (added,)
