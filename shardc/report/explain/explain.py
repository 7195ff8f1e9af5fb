"""``explain``: why a parameter, a value, a module's result or a collective is as it is.

Facts: the origin of each axis of each value, which propagation recorded (``Program.origins``); the causes of each
reshard and collective (``Program.causes``); the place of each node in the model (``Program.source``). ``chains.py``
follows origins, ``collectives.py`` reads causes, ``stages.py`` those of a pipeline; ``explanation.py`` prints.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import fx, nn

from shardc.capture.model import state_names
from shardc.costs.count import nbytes
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.sharding import TensorType
from shardc.language.text import bytes_text
from shardc.ops.tier import TRANSFERS
from shardc.program.collective import Collective
from shardc.program.communication import bucket, is_fetch
from shardc.program.inference import types_of
from shardc.program.program import Program, gradient_names
from shardc.program.provenance import SavedCut, Source
from shardc.program.stages import has_stages
from shardc.program.text import type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.explain.chains import Chains
from shardc.report.explain.collectives import CollectiveExplainer
from shardc.report.explain.explanation import Explanation, Subject
from shardc.report.explain.stages import StageExplainer

if TYPE_CHECKING:
    from shardc.compiler import Compiled

NAMEABLE = ("param", "input", "output", "module", "value")  # the kinds that a bare name may have
PREFIXED = ("gradient", "computed", "guard")  # results that share names with these: a name needs the kind before it
WORDS = {"parameter": "param", "buffer": "param", "collective": "value"}  # other words for a kind
MODEL = "(model)"  # the name of the model itself
WHERE_THERE_ARE = {  # how to compile a program that has some of a kind
    "stage": "cut the model in stages (pipeline=, --pipeline), or name what shardc dump prints",
    "gradient": "compile backward too, without train=False or --no-train, or name what shardc dump prints",
}
Table = Mapping[str, Callable[[], Explanation]]


def explain(compiled: Compiled, name: str) -> Explanation:
    """Explain what ``name`` names in a compiled model: see ``Explainer.explain``."""
    return Explainer(compiled.whole, compiled.model, compiled.after).explain(name)


class Explainer:
    """Explains the values and collectives of one program in global shapes. One explainer serves many names.

    After propagate it explains shardings, after lower_reshards collectives too. ``model`` has names that the program
    lacks: those of tied parameters and of modules that are never called. ``others``: the programs after other passes,
    by pass, which have further names.
    """

    def __init__(
        self, program: Program, model: nn.Module | None = None, others: Mapping[str, Program] | None = None
    ) -> None:
        self.program, self.others = program, others or {}
        self.chains = Chains(program)
        self._stages = StageExplainer(program, self.chains) if has_stages(program) else None
        self._sent = CollectiveExplainer(program, self.chains, self._stages)
        self._pins = {(pin.kind, pin.name): pin.text for pin in program.pins}
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._fallbacks = set(fallbacks_of(program))
        self._model = ModelNames.of(model)

    def explain(self, name: str) -> Explanation:
        """Explain a parameter, buffer, input, output or module of the model, or a node as the dump prints it.

        If several have the name, a prefix ``param:``, ``input:``, ``output:``, ``module:`` or ``value:`` chooses one.
        Gradients and stages are named only with theirs: ``gradient:NAME``, ``stage:N``. The words of the dump work too,
        as in ``the gradient w``. Raises a ShardingError for a name that nothing has, or several have.
        """
        is_exact = any(name in self.tables[each] for each in NAMEABLE)
        kind, bare = ("", name) if is_exact else kind_and_name(str(name))
        tables = {each: self.tables[each] for each in ([kind] if kind else NAMEABLE)}
        for key in dict.fromkeys((bare, without_place(bare))):
            kinds = [each for each, table in tables.items() if key in table]
            if len(kinds) > 1:
                remedy = f"say {' or '.join(f'{kind}:{key}' for kind in kinds)}"
                what = f"it names {len(kinds)} things"
                raise ShardingError(f"explain {name!r}", what, "it may mean each of them", remedy)
            if kinds:
                return tables[kinds[0]][key]()
        further = self._annotation(bare) or self._former(without_place(bare)) if kind in ("", "value") else None
        if further is None:
            raise _unknown(name, bare, tables)
        return further

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """Everything that can be named: by kind and name, the function that explains it."""
        nodes, names, model = self.chains.nodes, self.chains.names, self._model
        stored = {node for node, each in self._inputs.items() if each.kind in ("parameter", "buffer")}
        unread = model.kinds.keys() - {names[node] for node in stored}
        return {
            "param": {
                **{names[node]: partial(self.node, node) for node in self._inputs if node in stored},
                **{name: partial(self._unread, name) for name in model.kinds if name in unread},
                **{name: partial(self._tied, name, first) for name, first in model.tied.items()},
            },
            "input": {names[node]: partial(self.node, node) for node in self._inputs if node not in stored},
            "output": {name: partial(self._result, "output", name) for name in self._results("output")},
            "module": {path: partial(self._module, path) for path in (MODEL, *self._calls, *model.modules)},
            "value": {
                **{name: partial(self.node, node) for name, node in nodes.items() if node.op == "call_function"},
                **{name: partial(self._sent.explain, each) for name, each in self.collectives.items()},
            },
            **{kind: {name: partial(self._result, kind, name) for name in self._results(kind)} for kind in PREFIXED},
            "stage": {str(i): partial(self._stage, i) for i in range(self.program.num_stages if self._stages else 0)},
        }

    @cached_property
    def collectives(self) -> Mapping[str, Collective]:
        """The program's collectives by name; none before lower_reshards."""
        is_lowered = self.program.level in ("lowered", "localized")
        return {each.name: each for each in collectives_of(self.program)} if is_lowered else {}

    # Values.

    def node(self, node: fx.Node) -> Explanation:
        """Explain a placeholder, a value or a collective by its node."""
        if node.name in self.collectives:
            return self._sent.explain(self.collectives[node.name])
        if node.name in self._members:
            return self._members[node.name]
        source, input_ = self.program.source(node), self._inputs.get(node)
        kind: Subject = "value" if input_ is None else "input"
        if input_ is not None and (input_.kind == "parameter" or input_.kind == "buffer"):
            kind = input_.kind
        placed = self._pins.get((input_.kind, input_.name) if input_ else ("value", node.name), "")
        return Explanation(
            self.chains.names[node], kind, type_text(self.program, node), source.module, source.location,
            tuple(self.chains.of(node)), placed, notes=tuple(self._notes(node)),
        )  # fmt: skip

    def _notes(self, node: fx.Node) -> Iterator[str]:
        if node in self._fallbacks:
            yield f"{self.chains.op(node)} has no rule: its operands are gathered, and it runs whole on every rank"
        if node.target in TRANSFERS:
            way = "up, from the tier below" if is_fetch(node) else "down, to the tier below"
            yield f"{bytes_text(nbytes(self.program.local_type(node)))} go {way}"
            causes = (each for each in self.program.causes(node) if isinstance(each, SavedCut))
            yield from (f"{each.text}, as {each.option} says" for each in causes)
        yield from (f"sent by {user.name}" for user in node.users if user.name in self.collectives)

    @cached_property
    def _members(self) -> Mapping[str, Explanation]:
        """The members of buckets, by the names that they had as collectives of their own."""
        nodes = ((each, self._sent.node(each)) for each in self.collectives.values())
        buckets = [each for each, node in nodes if node is not None and node.target is bucket]
        return {part.name: part for each in buckets for part in self._sent.members(each)}

    def _tied(self, name: str, first: str) -> Explanation:
        """Explain a parameter under a further name."""
        explanation = self.tables["param"][first]()
        note = f"{name} and {first} are one {explanation.kind}, tied"
        return replace(explanation, name=name, notes=(note, *explanation.notes))

    def _unread(self, name: str) -> Explanation:
        """Explain a parameter or buffer of the model that is not in the program."""
        kind, type_ = self._model.kinds[name], str(self._model.types.get(name, ""))
        return Explanation(name, "buffer" if kind == "buffer" else "parameter", type_, notes=("no op reads it",))

    def _results(self, kind: str) -> Mapping[str, fx.Node | None]:
        """The program's results of a kind by name; a gradient is None if no output depends on its value."""
        pairs = zip(self.program.outputs, self.program.results, strict=True)
        nodes = [(output.name, node) for output, node in pairs if output.kind == kind]
        names = gradient_names(self.program) if kind == "gradient" else [name for name, _ in nodes]
        results = {name: node for name, (_, node) in zip(names, nodes, strict=True)}
        return {name: node for name, node in results.items() if node is not None or kind == "gradient"}

    def _result(self, kind: str, name: str) -> Explanation:
        """Explain a result of the program: an output, or a gradient."""
        node = self._results(kind)[name]
        if node is None:
            return Explanation(name, "gradient", notes=("there is none: no output depends on it",))
        explanation = self.node(node)
        placed, shown = self._pins.get((kind, name), "") or explanation.placed, kind == "gradient"
        return replace(explanation, name=name, kind="gradient" if shown else "output", placed=placed, sent=None)

    # Modules and stages.

    def _module(self, path: str) -> Explanation:
        """Explain a module by its results and collectives, in backward too; or by its parameters, if it has no op."""
        first = self._model.modules.get(path, path)
        calls = self._calls.get(first, [])
        notes = (f"{path} and {first} are one module",) if first != path else ()
        if calls:
            return Explanation(path, "module", parts=tuple(self._returned_and_sent(calls)), notes=notes)
        parts = tuple(make() for name, make in self.tables["param"].items() if name.startswith(f"{path}."))
        rest = ": these are its parameters" if parts else " and it has no parameters"
        return Explanation(path, "module", parts=parts, notes=(*notes, f"no op of the program is its own{rest}"))

    @cached_property
    def _calls(self) -> Mapping[str, list[fx.Node]]:
        """The calls inside each module, however deep."""
        calls = [node for node in self.program.graph.nodes if node.op == "call_function"]
        inside: dict[str, list[fx.Node]] = {MODEL: calls}
        for node in calls:
            path = self.program.source(node).module
            while path:
                inside.setdefault(path, []).append(node)
                path = path.rpartition(".")[0]
        return inside

    def _returned_and_sent(self, calls: Iterable[fx.Node]) -> Iterator[Explanation]:
        inside = dict.fromkeys(calls)

        def is_returned(node: fx.Node) -> bool:
            """Whether the forward of another module reads it, or the model returns it."""
            users = (user for user in node.users if user not in inside)
            return any(user.op == "output" or self.program.source(user).phase == "forward" for user in users)

        returned = [node for node in inside if self.program.source(node).phase == "forward" and is_returned(node)]
        known = self.collectives.keys() | self._members.keys()
        sent = [node for node in inside if node.name in known and node.target is not bucket and node not in returned]
        yield from map(self.node, [*returned, *sent])

    def _stage(self, index: int) -> Explanation:
        """Explain where a stage of a pipeline begins and why, and what it sends."""
        assert self._stages is not None, "no pipeline"
        sent = (self._sent.explain(each) for each in self.collectives.values() if each.stage == index)
        return self._stages.stage(index, sent)

    # Names of other things.

    def _annotation(self, text: str) -> Explanation | None:
        """Explain an annotation, named by its pattern or as it prints: its values, and how many values it cuts."""
        pattern = text.partition(": P(")[0]
        pins = [pin for pin in self.program.pins if text == pin.text or pin.text.startswith(f"{pattern}: P(")]
        if not pins:
            return None
        texts = {pin.text for pin in pins}
        origins = (each for node in self.chains.nodes.values() for each in self.program.origins(node))
        count = sum(any(origin.annotation in texts for origin in of_axes.values()) for of_axes in origins)
        makers = (self.tables[WORDS.get(pin.kind, pin.kind)].get(pin.name) for pin in pins)
        parts = tuple(make() for make in makers if make is not None)
        notes = (f"{count} values are cut so because of it",)
        return Explanation(pins[0].text, "annotation", parts=parts, notes=notes)

    def _former(self, name: str) -> Explanation | None:
        """Explain a node of an earlier or later program."""
        node = self.chains.node(name)
        if node is not None:
            is_input, is_printed_so = node.op == "placeholder", self.chains.names[node] == name
            note = f"{name} is the name of its node" if is_input else f"it stands in place of {name}"
            return self.node(node) if is_printed_so else replace(self.node(node), notes=(note,))
        for after in reversed(list(self.others)):
            other = self.others[after]
            node = next((each for each in other.graph.nodes if each.name == name), None)
            if node is None:
                continue
            if other.shardings(node) and other.level != "localized":
                return replace(Explainer(other).node(node), notes=(f"as it is after {after}",))
            if successors := successors_of(self.program, other, node):
                note = f"it is there after {after}; where it was are now:"
                return Explanation(name, "value", parts=tuple(map(self.node, successors)), notes=(note,))
        return None


def _unknown(name: str, bare: str, tables: Mapping[str, Table]) -> ShardingError:
    names = [each for table in tables.values() for each in table]
    if not names:
        kind = next(iter(tables))
        remedy = WHERE_THERE_ARE.get(kind, "name what shardc dump prints")
        return ShardingError(f"explain {name!r}", f"a {kind} of the program", "it has none", remedy)
    return ShardingError(
        f"explain {name!r}",
        f"the program has {len(names)} names",
        "no parameter, input, output, module, value or collective is named so",
        did_you_mean(bare, names) or "name one as shardc dump prints it",
    )


def kind_and_name(text: str) -> tuple[str, str]:
    """The kind before a name, if any, and the name: ``param:up.weight``, ``the gradient up.weight``."""
    words = text.strip().removeprefix("the ")
    for sign in (":", " "):
        kind, separator, rest = words.partition(sign)
        kind = WORDS.get(kind, kind)
        if separator and kind in (*NAMEABLE, *PREFIXED, "stage"):
            return kind, rest.strip()
    return "", text.strip()


def without_place(name: str) -> str:
    """``add_1`` of ``add_1 (blocks.0.mlp)``."""
    return re.sub(r"(?<=\S) \(.*\)$", "", name)


@dataclass(frozen=True)
class ModelNames:
    """The names of a model's parameters, buffers and modules.

    ``tied``: the first name for each further name of a parameter or buffer. ``modules``: the first path for every path
    of a module. ``kinds``, ``types``: of each parameter and buffer by its first name.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, TensorType] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module | None) -> ModelNames:
        """The names of a model; no names without a model."""
        if model is None:
            return ModelNames()
        parameters, buffers, tied = state_names(model)
        kinds = dict.fromkeys(parameters, "parameter") | dict.fromkeys(buffers, "buffer")
        types = {name: types_of(tensor) for name, tensor in {**parameters, **buffers}.items()}
        first: dict[int, str] = {}
        paths = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if path]
        modules = {path: first.setdefault(id(module), path) for path, module in paths}
        known = {name: type_ for name, type_ in types.items() if isinstance(type_, TensorType)}
        return ModelNames(tied, modules, kinds, known)


def successors_of(program: Program, other: Program, node: fx.Node) -> list[fx.Node]:
    """The values of a program that correspond to a node of ``other``, the program after another pass.

    They belong to the same call of the user's, or else to the nearest one; a view of a localized program corresponds to
    the value that it views.
    """
    known = {each.name: each for each in program.graph.nodes if each.op != "output"}
    by_call: dict[tuple[Source, int], list[fx.Node]] = {}
    for each in program.calls:
        if not program.causes(each):
            by_call.setdefault(_call(program, each), []).append(each)
    visited, queue = {node}, deque([node])
    while queue:
        here = queue.popleft()
        if here.name in known:
            return [known[here.name]]
        if _call(other, here) in by_call and other.level != "localized":
            return by_call[_call(other, here)]
        near = here.all_input_nodes[:1] if other.level == "localized" else [*here.users, *here.all_input_nodes]
        queue.extend(each for each in near if each not in visited and each.op != "output")
        visited.update(near)
    return []


def _call(program: Program, node: fx.Node) -> tuple[Source, int]:
    """The user's call that a node belongs to."""
    source = program.source(node)
    return source, source.ordinal
