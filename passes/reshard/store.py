"""store: agreed -> agreed. Between uses a parameter lies cut over one axis more than it is computed with (ZeRO).

It is resharded where it is used, and its gradient arrives as it lies::

    w: f32[64, 256@tp]                            w: f32[64@dp, 256@tp]
    y = dot(x, w, "a b, b c -> a c")       ->     g: f32[64, 256@tp] = reshard(w);  y = dot(x, g, "a b, b c -> a c")
    d: f32[64, 256@tp] = reshard(p)               d: f32[64@dp, 256@tp] = reshard(p)

Stage 3 has a reshard of its own for backward, so that nothing gathered is saved. In a pipeline it has one for both: a
stage would make both before its first microbatch, for none of them changes a parameter, and keep both to the last one's
backward. One for each microbatch could be freed, but would be sent as often. Of stages that are offloaded the copy goes
to the host with the stage. Stages 1 and 2 have one reshard, in the phase ``update``: what it makes is a result of the
program, which the runtime keeps until a parameter is written. Invariant: every op but the reshards lies as before.
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
    axis, program = program.mesh.axis(zero.axis) if zero else None, program.copy()
    storer = _Storer(program, zero)
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        if put.kind == "parameter":
            lies = program.sharding(node)
            storer.store(put.name, node, stored_sharding(put.type, lies, axis) if axis else lies)
    _cast_at_once(program)
    return program


def _cast_at_once(program: Program) -> None:
    """Let gradients be cast and reduced as soon as they are made."""
    for output, made in zip(program.outputs, program.results, strict=True):
        if made is not None and output.kind == "gradient":
            for before, node in pairwise(reversed(casts_behind(made, reshard))):
                if before.op != "placeholder":
                    before.append(node)


def stored_sharding(type_: TensorType, lies: Sharding, axis: AxisPart) -> Sharding:
    """``lies`` with one dim cut by ``axis`` too: the first that divides, else the first that is long enough.

    Dims that nothing cuts come first. The same where the axis cuts the value already, or no dim is long enough, or no
    DTensor could lie so.
    """
    if axis.size == 1 or any(part.name == axis.name for part in lies.cut_axes):
        return lies
    shape = type_.shape
    cuts = [
        lies.with_dim(dim, DimSharding((*cut.axes, axis)))
        for dim, cut in sorted(enumerate(lies.dims), key=lambda pair: bool(pair[1].axes))
        if not cut.minor and cut.local_size(shape[dim]) >= axis.size
    ]
    fitting = [cut for cut in cuts if cut.storable(shape) == cut]
    return next(iter([*(cut for cut in fitting if cut.is_even(shape)), *fitting]), lies)


class _Storer:
    """Changes how parameters lie. State: ``place``, where each node of the graph as it was stands.

    ``gradients``: which result is the gradient of an input.
    """

    def __init__(self, program: Program, zero: Zero | None) -> None:
        self.program, self.zero, self.stage = program, zero, zero.stage if zero else 0
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        owned = enumerate(ends_of(program))
        self.gradients = {owner: i for i, (output, owner, _) in owned if output.kind == "gradient"}
        parameters = set(parameters_of(program).values())
        calls = (node for node in program.graph.nodes if node.op != "placeholder")
        self.first_call = next(node for node in calls if not (is_cast(node) and operand(node) in parameters))

    def store(self, name: str, node: fx.Node, stored: Sharding) -> None:
        """Let a parameter and its gradient lie otherwise than they are computed on; a narrower copy is kept."""
        program, type_, lies = self.program, self.program.type(node), self.program.sharding(node)
        cast = self._narrower(node)
        if stored == lies and cast is None:
            return
        program.computed = {**program.computed, name: lies}
        for held in filter(None, (node, cast)):
            program.set_sharding(held, stored)
        if stored != lies:
            assert self.zero is not None
            why = StorageChange(name, type_, stored, lies, self.zero.text)
            for held in filter(None, (node, cast)):
                self._explain(held, Origin(why.option, PARAMETER, (held.name, 0)))
            self._store_gradient(node, stored, why)
            kept = self._gather(cast or node, lies, why)
        else:
            kept = cast
        if cast is not None and self.stage == 3:
            kept = cast
        if kept is not None:
            self._keep(name, kept)

    def _explain(self, node: fx.Node, origin: Origin) -> None:
        """Over the option's axis a value is cut because of it."""
        assert self.zero is not None
        self.program.set_origins(node, ({**self.program.origin(node), self.zero.axis: origin},))

    def _narrower(self, node: fx.Node) -> fx.Node | None:
        """The cast to fewer bytes that is all that a parameter is used for, now the first call and right after it."""
        cast = next(iter(node.users), None)
        if cast is None or len(node.users) > 1 or not is_cast(cast) or not self._is_narrower(cast, node):
            return None
        self.first_call.prepend(cast)
        return cast

    def _is_narrower(self, cast: fx.Node, node: fx.Node) -> bool:
        sizes = [self.program.type(each).nbytes for each in (cast, node)]
        return sizes[0] < sizes[1] and self.program.sharding(cast) == self.program.sharding(node)

    def _gather(self, node: fx.Node, lies: Sharding, why: StorageChange) -> fx.Node | None:
        """Let users have a value in another sharding: all of them one, which is returned, or each group of stage 3."""
        users = sorted(node.users, key=self.place.__getitem__)
        if self.stage < 3:
            first = min(self.first_call, *users, key=self.place.__getitem__) if users else node
            return self._use(node, lies, users, first, why) if users else None
        for together in filter(None, self._groups(users)):
            self._use(node, lies, together, together[0], why)
        return None

    def _groups(self, users: list[fx.Node]) -> list[list[fx.Node]]:
        """Users that share what stage 3 gathers: those of a phase, or all where microbatches follow each other."""
        if self.program.options.pipeline is not None:
            return [users]
        phases = ("forward", "backward")
        return [[user for user in users if self.program.source(user).phase == phase] for phase in phases]

    def _keep(self, name: str, node: fx.Node) -> None:
        """Let a value be made in the update and be a result of the program."""
        program = self.program
        for made in filter(None, (node, operand(node))):
            if made.op != "placeholder":
                program.set_source(made, replace(program.source(made), phase="update"))
        program.outputs = (*program.outputs, Output(name, "computed"))
        program.output_node.args = ((*program.results, node),)

    def _use(self, node: fx.Node, lies: Sharding, users: list[fx.Node], before: fx.Node, why: StorageChange) -> fx.Node:
        """Let users have a value in another sharding."""
        with self.program.graph.inserting_before(before):
            made = insert_reshard(self.program, node, lies, users[0], why)
        for user in users:
            user.replace_input_with(node, made)
        return made

    def _store_gradient(self, node: fx.Node, stored: Sharding, why: StorageChange) -> None:
        """Let a gradient arrive as its parameter is stored: by the reshard that reduces it, or by another.

        What only casts it after the reshard does so where it is stored.
        """
        program, results = self.program, list(self.program.results)
        place = self.gradients.get(node)
        made = None if place is None else results[place]
        if place is None or made is None:
            return
        chain = casts_behind(made)
        if chain[-1].target is reshard and all(len(each.users) == 1 for each in chain) and results.count(made) == 1:
            for each in chain:
                program.set_sharding(each, stored)
                self._explain(each, self._as_stored(why.name, node, each))
            (cause,) = program.causes(chain[-1])
            assert isinstance(cause, ShardingChange), cause
            program.set_causes(chain[-1], (replace(cause, stored=why),))
        else:
            with program.graph.inserting_after(made):
                kept = results[place] = insert_reshard(program, made, stored, made, why)
            self._explain(kept, self._as_stored(why.name, node, kept))
            program.output_node.args = (tuple(results),)

    def _as_stored(self, name: str, node: fx.Node, gradient: fx.Node) -> Origin:
        """Why the gradient of a parameter is cut over the option's axis."""
        assert self.zero is not None
        value = operand(gradient) if gradient.target is reshard else gradient
        return self.program.origin(node)[self.zero.axis].through(f"the gradient {name}", (value.name, 0))
