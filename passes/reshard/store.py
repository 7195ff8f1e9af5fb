"""store: agreed -> agreed. Between uses a parameter is cut over more axes than it is computed with (ZeRO).

It is resharded where it is used, and its gradient arrives in the stored sharding::

    w: f32[64, 256@tp]                            w: f32[64@dp, 256@tp]
    y = dot(x, w, "a b, b c -> a c")       ->     g: f32[64, 256@tp] = reshard(w);  y = dot(x, g, "a b, b c -> a c")
    d: f32[64, 256@tp] = reshard(p)               d: f32[64@dp, 256@tp] = reshard(p)

Stage 3 has a separate reshard for backward, so that no gathered parameter is saved. In a pipeline one reshard serves
forward and backward. Two would both run before the first microbatch, as no microbatch changes a parameter, and both
results would be kept until the last backward. The result of a reshard for each microbatch could be freed, but would be
sent again for each. The copy of an offloaded stage goes to the host with the stage. Stages 1 and 2 have one reshard, in
the phase ``update``. Its result is a result of the program, which the runtime keeps until a parameter is written.

If ``Zero`` tells fast axes from slow ones, each reshard becomes two, with a sharding between them that only the fast
axes cut. So the slow axes gather only a piece, which is saved for backward, and add up only a piece::

    w: f32[64@dp+node]                            h: f32[(2 32@node)] = reshard(w)        # forward, over dp
    g: f32[64] = reshard(w)                ->     g: f32[64] = reshard(h);  b: f32[64] = reshard(h)

Invariant: every op except reshards keeps its shardings.
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
    """The program with parameters stored as ``Zero`` and cast as ``Precision`` says; unchanged without them."""
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
        if result is not None and output.kind == "gradient":  # cast and reduce it as soon as it is computed
            for before, node in pairwise(reversed(casts_behind(result, reshard))):
                if before.op != "placeholder":
                    before.append(node)
    return program


def stored_sharding(type_: TensorType, sharding: Sharding, axes: Axes, from_last: bool = False) -> Sharding:
    """The sharding with one dim cut by ``axes`` too: the first that they divide, else the first that is long enough.

    Dims that nothing cuts come first; ``from_last``: of these the last one. If no dim is long enough for all axes, each
    axis cuts a dim of its own. The sharding is unchanged if the axes already cut the value, if no dim is long enough,
    or if no DTensor could hold the shards.
    """
    cutting = {part.name for part in sharding.cut_axes}
    axes = tuple(axis for axis in axes if axis.size > 1 and axis.name not in cutting)
    if not axes:
        return sharding
    shape, dims = type_.shape, list(enumerate(sharding.dims))[:: -1 if from_last else 1]

    def fitting() -> Iterator[Sharding]:
        """The possible shardings, one by one: each size that is compared limits the sizes a program is valid for."""
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
    """The sharding of a stored parameter after it is gathered over the slow axes.

    None if only slow or only fast axes cut it, or if slow axes cut a dim unevenly.
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
    """Changes the storage of parameters.

    ``order``: the places of nodes in the graph before any change. ``gradients``: the index of each input's gradient
    among the results.
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
        """Store a parameter and its gradient in another sharding, and keep a narrower copy for computing."""
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
        """The cast to fewer bytes that is a parameter's only reader, or None. It becomes the first call."""
        cast = next(iter(node.users), None)
        if cast is None or len(node.users) > 1 or not is_cast(cast):
            return None
        is_narrower = self.program.type(cast).nbytes < self.program.type(node).nbytes
        if not is_narrower or self.program.sharding(cast) != self.program.sharding(node):
            return None
        self.first_call.prepend(cast)
        return cast

    def _set_origins(self, node: fx.Node, origin: Origin, why: StorageChange) -> None:
        """Set the origin of the option's axes on a value."""
        added = dict.fromkeys(why.axes, origin)
        self.program.set_origins(node, ({**self.program.origin(node), **added},))

    def _gather(self, node: fx.Node, between: Sharding | None, why: StorageChange) -> fx.Node | None:
        """Reshard a stored value for its users: in stages 1 and 2 once, which is returned; in stage 3 once for a group.

        A group is all users in one phase, or in a pipeline, where microbatches run in turn, all users. The value in the
        sharding ``between`` is made once for all groups.
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
        """Return a gradient in its parameter's stored sharding, by the reshard that reduces it or by another.

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
        """Add up a gradient over the fast axes before the reshard that adds it up over the slow ones."""
        assert self.zero is not None
        value = operand(node)
        partial = self.program.sharding(value).partial
        left = tuple((part, op) for part, op in partial if part.name in self.zero.slow_axes)
        if left and any(part.name in self.zero.fast_axes for part, _ in partial):
            with self.program.graph.inserting_before(node):
                target = replace(between, partial=left)
                added = insert_reshard(self.program, value, target, node, *self.program.causes(node))
            node.args = (added,)
