"""explain: why a parameter, a value, a module's output or a collective is as it is, from what the passes recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from torch import fx

from shardc.announcement import is_collective
from shardc.error import ShardingError, did_you_mean
from shardc.explanation import Chain, Explanation, Kind, Step
from shardc.fact import Origin
from shardc.node import is_getitem
from shardc.program import Program, Value
from shardc.text import op_names, type_text, value_names

PREFIXES = ("param", "input", "output", "module", "value")


def explain(program: Program, name: str) -> Explanation:
    """Why what ``name`` names is as it is: see ``Explainer.explain``."""
    return Explainer(program).explain(name)


class Explainer:
    """Explains what is in one program; for many names of it make one of these.

    The program is one in global shapes, as the dump prints it: after propagate it explains shardings, and after
    lower_reshards collectives too.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = value_names(program)
        self._called = op_names(program)
        self._nodes = {node.name: node for node in program.graph.nodes if node.op != "output"}
        self._pins = {(pin.kind, pin.name): pin.text for pin in program.pins}
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))

    def explain(self, name: str) -> Explanation:
        """What is named: a parameter, buffer, input, output or module of the model, or a node as the dump prints it.

        ``param:``, ``input:``, ``output:``, ``module:`` and ``value:`` before the name say which is meant where several
        have it. Raises a ShardingError for a name that nothing has, or several.
        """
        prefix, colon, rest = name.partition(":")
        kind, bare = (prefix, rest) if colon and prefix in PREFIXES else ("", name)
        tables = self._tables if not kind else {kind: self._tables[kind]}
        found = [(each, table[bare]) for each, table in tables.items() if bare in table]
        if len(found) == 1:
            each, node = found[0]
            by_name = {"module": self.module, "output": self._result}
            return by_name[each](bare) if each in by_name else self.node(node)
        raise self._several(name, [each for each, _ in found]) if found else self._unknown(name, tables)

    @cached_property
    def _tables(self) -> Mapping[str, Mapping[str, fx.Node]]:
        program = self.program
        results = zip(program.outputs, program.results, strict=True)
        by_kind: dict[str, dict[str, fx.Node]] = {kind: {} for kind in PREFIXES}
        for node, given in self._inputs.items():
            by_kind["param" if given.kind in ("parameter", "buffer") else "input"][self.names[node]] = node
        by_kind["output"] = {put.name: node for put, node in results if put.kind == "output" and node is not None}
        by_kind["module"] = {path: node for path, nodes in self._modules.items() for node in nodes[-1:]}
        by_kind["value"] = {name: node for name, node in self._nodes.items() if node.op == "call_function"}
        return by_kind

    @cached_property
    def _modules(self) -> Mapping[str, list[fx.Node]]:
        """The calls of forward by the modules that they are in, however deep."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.program.calls:
            source = self.program.source(node)
            path = source.module if source.phase == "forward" else ""
            while path:
                found.setdefault(path, []).append(node)
                path = path.rpartition(".")[0]
        return found

    def node(self, node: fx.Node) -> Explanation:
        """Why a node is as it is: a placeholder, a value or a collective."""
        source = self.program.source(node)
        return Explanation(
            self.names[node], self._kind(node), type_text(self.program, node), source.module, source.location,
            tuple(self._chains(node)), self._placed(node),
        )  # fmt: skip

    def module(self, path: str) -> Explanation:
        """Why what a module returns lies as it does, and what is sent within it."""
        inside = self._modules[path]
        known = {*inside, *(user for node in inside for user in node.users if is_getitem(user))}
        left = [node for node in inside if any(self._leaves(user, known) for user in node.users)]
        sent = [node for node in inside if is_collective(node)]
        return Explanation(path, "module", parts=tuple(map(self.node, [*left, *sent])))

    def _leaves(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        is_forward = user.op == "output" or self.program.source(user).phase == "forward"
        return is_forward and user not in inside

    def _result(self, name: str) -> Explanation:
        node, pin = self._tables["output"][name], self._pins.get(("output", name), "")
        found = self.node(node)
        return Explanation(name, "output", found.type, found.module, found.location, found.chains, pin)

    def _kind(self, node: fx.Node) -> Kind:
        if node in self._inputs:
            kind = self._inputs[node].kind
            return kind if kind == "parameter" or kind == "buffer" else "input"
        return "collective" if is_collective(node) else "value"

    def _placed(self, node: fx.Node) -> str:
        given = self._inputs.get(node)
        return self._pins.get((given.kind, given.name) if given else ("value", node.name), "")

    def _chains(self, node: fx.Node) -> Iterator[Chain]:
        """One for each axis of what a node holds; of a collective those of what it is given, too."""
        for value in dict.fromkeys(self._values(node)):
            producer, index = value
            shardings, origins = self.program.shardings(producer), self.program.origins(producer)
            sharding = shardings[index] if shardings else None
            for part in () if sharding is None else (*sharding.cut_axes, *sharding.partial_axes):
                if part.name in origins[index]:
                    yield self._chain(part.name, origins[index][part.name])

    def _values(self, node: fx.Node) -> Iterator[Value]:
        producer, index = self.program.value(node)
        indices = range(len(self.program.types(node))) if producer is node else [index]
        yield from ((producer, each) for each in indices)
        if is_collective(node):
            yield from map(self.program.value, node.all_input_nodes)

    def _chain(self, axis: str, origin: Origin) -> Chain:
        return Chain(axis, origin.annotation, tuple(self._step(each) for each in origin.chain))

    def _step(self, origin: Origin) -> Step:
        holder, via = self._holder(*origin.value), self._nodes.get(origin.via)
        value = origin.value[0] if holder is None else self.names[holder]
        type_ = "" if holder is None else type_text(self.program, holder)
        if via is None:
            return Step(value, type_, origin.via)
        source = self.program.source(via)
        return Step(value, type_, self._called.get(via.target, ""), via.name, source.module, source.location)

    def _holder(self, name: str, index: int) -> fx.Node | None:
        """The node that the dump prints for a value."""
        node = self._nodes.get(name)
        if node is None or not self.program.has_many(node):
            return node
        return next((user for user in node.users if is_getitem(user) and user.args[1] == index), node)

    def _unknown(self, name: str, tables: Mapping[str, Mapping[str, fx.Node]]) -> ShardingError:
        names = [each for table in tables.values() for each in table]
        remedy = did_you_mean(name.rpartition(":")[2], names)
        return ShardingError(
            f"explain {name!r}",
            f"a program of {len(names)} names",
            "no parameter, input, output, module or value has that name",
            remedy or "name one as shardc dump prints it",
        )

    def _several(self, name: str, kinds: list[str]) -> ShardingError:
        return ShardingError(
            f"explain {name!r}",
            f"the name of {len(kinds)} things",
            f"it may be {' or '.join(f'{kind}:{name}' for kind in kinds)}",
            f"write {kinds[0]}:{name}",
        )
