"""store: agreed -> agreed. Between uses a parameter lies cut over one axis more than it is computed with (ZeRO).

It is resharded where it is used, and its gradient arrives as it lies::

    w: f32[64, 256@tp]                            w: f32[64@dp, 256@tp]
    y = dot(x, w, "a b, b c -> a c")       ->     g: f32[64, 256@tp] = reshard(w);  y = dot(x, g, "a b, b c -> a c")
    d: f32[64, 256@tp] = reshard(p)               d: f32[64@dp, 256@tp] = reshard(p)

Stage 3 has a reshard of its own for backward, so that nothing gathered is saved. Stages 1 and 2 have one, in the phase
``update``: what it makes is a result of the program, which the runtime keeps until a parameter is written. Invariant:
every op but the reshards lies as before.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from shardc.collective import reshard
from shardc.mesh import AxisPart
from shardc.program import Output, Program
from shardc.sharding import DimSharding, Sharding, TensorType


def store(program: Program) -> Program:
    """The program with parameters stored as ``Zero`` says; the same without it."""
    zero = program.options.zero
    if zero is None:
        return program
    assert program.mesh is not None
    axis, program = program.mesh.axis(zero.axis), program.copy()
    storer = _Storer(program, zero.stage)
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        stored = stored_sharding(put.type, program.sharding(node), axis)
        if put.kind == "parameter" and stored != program.sharding(node):
            storer.store(put.name, node, stored)
    return program


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
    """Changes how parameters lie. State: ``place``, where each node of the graph as it was stands."""

    def __init__(self, program: Program, stage: int) -> None:
        self.program, self.stage = program, stage
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        self.first_call = next(node for node in program.graph.nodes if node.op != "placeholder")

    def store(self, name: str, node: fx.Node, stored: Sharding) -> None:
        """Let a parameter and its gradient lie otherwise than they are computed on."""
        program, type_, lies = self.program, self.program.type(node), self.program.sharding(node)
        why = f"{name} is stored as {stored.text(type_)} by zero, and computed on as {lies.text(type_)}"
        program.set_sharding(node, stored)
        program.computed = {**program.computed, name: lies}
        users = sorted(node.users, key=self.place.__getitem__)
        if self.stage == 3:
            for phase in ("forward", "backward"):
                of_phase = [user for user in users if program.source(user).phase == phase]
                if of_phase:
                    self._use(node, lies, of_phase, of_phase[0], why)
        elif users:
            kept = self._use(node, lies, users, self.first_call, why)
            program.set_source(kept, replace(program.source(kept), phase="update"))
            program.outputs = (*program.outputs, Output(name, "computed"))
            program.output_node.args = ((*program.results, kept),)
        self._store_gradient(name, stored, why)

    def _use(self, node: fx.Node, lies: Sharding, users: list[fx.Node], before: fx.Node, why: str) -> fx.Node:
        """Let users have a value in another sharding."""
        with self.program.graph.inserting_before(before):
            made = self._reshard(node, lies, users[0], why)
        for user in users:
            user.replace_input_with(node, made)
        return made

    def _store_gradient(self, name: str, stored: Sharding, why: str) -> None:
        """Let a gradient arrive as its parameter is stored: by the reshard that reduces it, or by another."""
        program, results = self.program, list(self.program.results)
        for i, output in enumerate(program.outputs):
            made = results[i]
            if made is None or (output.kind, output.name) != ("gradient", name):
                continue
            if made.target is reshard and list(made.users) == [program.output_node] and results.count(made) == 1:
                program.set_sharding(made, stored)
                program.set_cause(made, f"{program.cause(made)}; {why}")
            else:
                with program.graph.inserting_after(made):
                    results[i] = self._reshard(made, stored, made, why)
        program.output_node.args = (tuple(results),)

    def _reshard(self, value: fx.Node, lies: Sharding, like: fx.Node, why: str) -> fx.Node:
        program = self.program
        made = program.insert(reshard, (value,), program.value_type(program.value(value)), like)
        program.set_sharding(made, lies)
        program.set_origins(made, (program.origin(value),))
        program.set_cause(made, why)
        return made
