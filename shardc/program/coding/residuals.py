"""The inputs and the results of a program that are residuals: what codes leave out of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from torch import fx

from shardc.language.mesh import merge_parts
from shardc.language.sharding import DimSharding, Sharding, TensorType, num_shards
from shardc.ops.codes import sum_dtype
from shardc.program.communication import bucket, members, results
from shardc.program.program import Input, Output, Program, ends_of


class Residuals:
    """Makes the inputs and the results of a program that are residuals.

    ``names``: for each collective with feedback the names of its values; ``results``: for each node that is returned as
    gradients, their names. State: ``last``, the last placeholder.
    """

    def __init__(self, program: Program, fed: Collection[fx.Node]) -> None:
        self.program, self.last = program, program.placeholders[-1]
        self.results: dict[fx.Node, list[str]] = {}
        for output, _, result in ends_of(program):
            if output.kind == "gradient" and result is not None:
                self.results.setdefault(result, []).append(output.name)
        self.names: dict[fx.Node, list[str]] = {}
        times = Counter[str]()
        for node in sorted(fed):
            self.names[node] = []
            for part in members(node):
                name = self._gradient(results(node, part)) or node.name
                times[name] += 1
                self.names[node].append(name if times[name] == 1 else f"{name}:{times[name]}")

    def _gradient(self, values: Iterable[fx.Node]) -> str:
        """The name of the first gradient that values become; each value of a bucket becomes its own result."""
        reached = dict.fromkeys(values)
        for node in (queue := list(reached)):
            if node in self.results:
                return self.results[node][0]
            after = [each for each in node.users if each.op != "output"]
            for user in after:
                own = [part for part in members(user) if part.operand is node] if user.target is bucket else ()
                for each in [result for part in own for result in results(user, part)] if own else [user]:
                    if each not in reached:
                        reached[each] = None
                        queue.append(each)
        return ""

    def of_last_step(self, values: Sequence[fx.Node], node: fx.Node) -> dict[str, fx.Node]:
        """Add an input for what was left out of each value of a collective in the last step; return them by name."""
        pairs = zip(self.names[node], values, strict=True)
        return {name: self.add_input(name, "residual", *residual_of(self.program, value)) for name, value in pairs}

    def add_input(
        self, name: str, kind: Literal["residual", "momentum"], type_: TensorType, sharding: Sharding
    ) -> fx.Node:
        """A new input of the program."""
        program = self.program
        with program.graph.inserting_after(self.last):
            self.last = program.graph.placeholder(f"{kind}_{name.replace('.', '_').replace(':', '_')}")
        program.set_type(self.last, type_)
        program.set_sharding(self.last, sharding)
        program.set_origins(self.last, ({},))
        program.inputs = (*program.inputs, Input(name, kind, type_))
        return self.last

    def keep(self, name: str, residual: fx.Node) -> None:
        """Return a residual from the program."""
        program = self.program
        program.outputs = (*program.outputs, Output(name, "residual"))
        program.output_node.args = ((*program.results, residual),)


def residual_of(program: Program, value: fx.Node) -> tuple[TensorType, Sharding]:
    """The type and the sharding of what codes leave out of a value: each rank has its own."""
    type_, sharding = program.value_type(program.value(value)), program.sharding(value)
    ranks = DimSharding(merge_parts(sharding.partial_axes))
    residual = TensorType((num_shards(ranks.axes), *type_.shape), sum_dtype(type_.dtype))
    return residual, Sharding(sharding.mesh, (ranks, *sharding.dims))
