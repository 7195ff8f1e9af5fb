"""explain: why a parameter, a value, a module's output or a collective is as it is, from what the passes recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial

from torch import fx

from shardc.announcement import collectives_of
from shardc.bucket import bucket
from shardc.collective import Collective
from shardc.error import ShardingError, did_you_mean
from shardc.explain_chain import Chains
from shardc.explain_collective import CollectiveExplainer
from shardc.explanation import Explanation, Kind
from shardc.fallback import fallbacks_of
from shardc.program import Program
from shardc.text import type_text

PREFIXES = ("param", "input", "output", "module", "value")
Table = Mapping[str, Callable[[], Explanation]]


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
        self._chains = Chains(program)
        self._sent = CollectiveExplainer(program, self._chains)
        self._pins = {(pin.kind, pin.name): pin.text for pin in program.pins}
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._fallbacks = set(fallbacks_of(program))

    def explain(self, name: str) -> Explanation:
        """What is named: a parameter, buffer, input, output or module of the model, or a node as the dump prints it.

        ``param:``, ``input:``, ``output:``, ``module:`` and ``value:`` before the name say which is meant where several
        have it. Raises a ShardingError for a name that nothing has, or several.
        """
        prefix, colon, rest = str(name).partition(":")
        kind, bare = (prefix, rest) if colon and prefix in PREFIXES else ("", str(name))
        tables = {kind: self.tables[kind]} if kind else self.tables
        found = [each for each, table in tables.items() if bare in table]
        if len(found) == 1:
            return tables[found[0]][bare]()
        raise _several(name, bare, found) if found else _unknown(name, bare, tables)

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """What can be named: by its kind and its name, what explains it."""
        nodes, names = self._chains.nodes, self._chains.names
        stored = {node for node, given in self._inputs.items() if given.kind in ("parameter", "buffer")}
        return {
            "param": {names[node]: partial(self.node, node) for node in self._inputs if node in stored},
            "input": {names[node]: partial(self.node, node) for node in self._inputs if node not in stored},
            "output": {name: partial(self.output, name) for name in self._outputs},
            "module": {path: partial(self.module, path) for path in self._modules},
            "value": {
                **{name: partial(self.node, node) for name, node in nodes.items() if node.op == "call_function"},
                **{name: partial(self._sent.explain, found) for name, found in self.collectives.items()},
            },
        }

    @cached_property
    def collectives(self) -> Mapping[str, Collective]:
        """What the program sends, by name; nothing before lower_reshards."""
        is_lowered = self.program.level in ("lowered", "localized")
        return {found.name: found for found in collectives_of(self.program)} if is_lowered else {}

    @cached_property
    def _members(self) -> Mapping[str, Explanation]:
        """What goes with others in a bucket, by the name that it had as a collective of its own."""
        sent = ((found, self._sent.node(found)) for found in self.collectives.values())
        buckets = [found for found, node in sent if node is not None and node.target is bucket]
        return {part.name: part for found in buckets for part in self._sent.members(found)}

    @cached_property
    def _outputs(self) -> Mapping[str, fx.Node]:
        ends = zip(self.program.outputs, self.program.results, strict=True)
        return {put.name: node for put, node in ends if put.kind == "output" and node is not None}

    @cached_property
    def _modules(self) -> Mapping[str, list[fx.Node]]:
        """The calls that are in each module, however deep."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.program.graph.nodes:
            path = self.program.source(node).module if node.op == "call_function" else ""
            while path:
                found.setdefault(path, []).append(node)
                path = path.rpartition(".")[0]
        return found

    def node(self, node: fx.Node) -> Explanation:
        """Why a node is as it is: a placeholder, a value or a collective."""
        if node.name in self.collectives:
            return self._sent.explain(self.collectives[node.name])
        if node.name in self._members:
            return self._members[node.name]
        source, given = self.program.source(node), self._inputs.get(node)
        placed = self._pins.get((given.kind, given.name) if given else ("value", node.name), "")
        return Explanation(
            self._chains.names[node], self._kind(node), type_text(self.program, node), source.module, source.location,
            tuple(self._chains.of(node)), placed, notes=tuple(self._notes(node)),
        )  # fmt: skip

    def _kind(self, node: fx.Node) -> Kind:
        given = self._inputs.get(node)
        if given is None:
            return "value"
        return given.kind if given.kind == "parameter" or given.kind == "buffer" else "input"

    def _notes(self, node: fx.Node) -> Iterator[str]:
        if node in self._fallbacks:
            yield f"{self._chains.op(node)} has no rule: its operands are gathered, and it runs whole on every rank"
        readers = (user for user in node.users if user.name in self.collectives)
        yield from (f"sent by {user.name}" for user in readers)

    def output(self, name: str) -> Explanation:
        """Why an output of the model lies as it does."""
        found = self.node(self._outputs[name])
        placed = self._pins.get(("output", name), "") or found.placed
        return replace(found, name=name, kind="output", placed=placed, sent=None)

    def module(self, path: str) -> Explanation:
        """Why what a module returns lies as it does, and what is sent in it, in backward too."""
        inside = self._modules[path]
        within = set(inside)
        forward = [node for node in inside if self.program.source(node).phase == "forward"]
        left = [node for node in forward if self._is_returned(node, within)]
        known = self.collectives.keys() | self._members.keys()
        sent = [node for node in inside if node.name in known and node.target is not bucket]
        parts = [self.node(node) for node in [*left, *(node for node in sent if node not in left)]]
        return Explanation(path, "module", parts=tuple(parts))

    def _is_returned(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether the forward of another module reads a value, or it is the model's."""
        return any(
            user not in inside and (user.op == "output" or self.program.source(user).phase == "forward")
            for user in node.users
        )


def _unknown(name: str, bare: str, tables: Mapping[str, Table]) -> ShardingError:
    names = [each for table in tables.values() for each in table]
    return ShardingError(
        f"explain {name!r}",
        f"the program has {len(names)} names",
        "no parameter, input, output, module, value or collective is named so",
        did_you_mean(bare, names) or "name one as shardc dump prints it",
    )


def _several(name: str, bare: str, kinds: list[str]) -> ShardingError:
    meant = [f"{kind}:{bare}" for kind in kinds]
    return ShardingError(
        f"explain {name!r}", f"it names {len(kinds)} things", "it may mean each of them", f"say {' or '.join(meant)}"
    )
