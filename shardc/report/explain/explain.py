"""explain: why a parameter, a value, a module's output or a collective is as it is, from what the passes recorded."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import fx, nn

from shardc.capture.model import state_names
from shardc.language.errors import ShardingError, did_you_mean
from shardc.language.sharding import TensorType
from shardc.program.collective import Collective
from shardc.program.communication import bucket
from shardc.program.inference import types_of
from shardc.program.program import Program, gradient_names
from shardc.program.provenance import Source
from shardc.program.stages import has_stages
from shardc.program.text import type_text
from shardc.program.traffic import collectives_of, fallbacks_of
from shardc.report.explain.chains import Chains
from shardc.report.explain.collectives import CollectiveExplainer
from shardc.report.explain.explanation import Explanation, Kind
from shardc.report.explain.stages import StageExplainer

if TYPE_CHECKING:
    from shardc.compiler import Compiled

Table = Mapping[str, Callable[[], Explanation]]
WITHOUT = {  # what gives a program some of a kind that it has none of
    "stage": "cut the model in stages (pipeline=, --pipeline), or name what shardc dump prints",
    "gradient": "compile backward too, without train=False or --no-train, or name what shardc dump prints",
}


def explain(compiled: Compiled, name: str) -> Explanation:
    """Why what ``name`` names is as it is: see ``Explainer.explain``."""
    others = {given: program for given, program in compiled.after.items() if program is not compiled.whole}
    return Explainer(compiled.whole, compiled.model, others).explain(name)


class Explainer:
    """Explains what is in one program; for many names of it make one of these.

    The program is one in global shapes, as the dump prints it: after propagate it explains shardings, and after
    lower_reshards collectives too. ``chains``: those of its values. ``model``: what knows the names that it does not
    have, of tied parameters and of modules that are not called. ``others``: by the pass that they stand after, programs
    that know further names.
    """

    def __init__(
        self, program: Program, model: nn.Module | None = None, others: Mapping[str, Program] | None = None
    ) -> None:
        self.program, self.others = program, dict(others or {})
        self.chains = Chains(program)
        self._stages = StageExplainer(program, self.chains) if has_stages(program) else None
        self._sent = CollectiveExplainer(program, self.chains, self._stages)
        self._pins = {(pin.kind, pin.name): pin.text for pin in program.pins}
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._fallbacks = set(fallbacks_of(program))
        self._named = ModelNames.of(model)

    def explain(self, name: str) -> Explanation:
        """What is named: a parameter, buffer, input, output or module of the model, or a node as the dump prints it.

        ``param:``, ``input:``, ``output:``, ``module:`` and ``value:`` before the name say which is meant where several
        have it, ``gradient:`` and ``stage:`` ask for what has no name of its own; so do the words of the dump, as in
        ``the gradient w``. Raises a ShardingError for a name that nothing has, or several.
        """
        is_exact = any(name in self.tables[each] for each in TYPED)
        kind, bare = ("", name) if is_exact else kind_and_name(str(name))
        tables = {each: self.tables[each] for each in ([kind] if kind else TYPED)}
        for typed in dict.fromkeys((bare, without_place(bare))):
            found = [each for each, table in tables.items() if typed in table]
            if len(found) > 1:
                raise _several(name, typed, found)
            if found:
                return tables[found[0]][typed]()
        further = self._annotation(bare) or self._former(without_place(bare)) if kind in ("", "value") else None
        if further is None:
            raise _unknown(name, bare, tables)
        return further

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """What can be named: by its kind and its name, what explains it."""
        nodes, names = self.chains.nodes, self.chains.names
        stored = {node for node, given in self._inputs.items() if given.kind in ("parameter", "buffer")}
        tied = {name: partial(self.tied, name, first) for name, first in self._named.tied.items()}
        lost = self._named.kinds.keys() - {names[node] for node in stored}
        modules = dict.fromkeys([WHOLE, *self._modules, *self._named.modules])
        return {
            "param": {
                **{names[node]: partial(self.node, node) for node in self._inputs if node in stored},
                **{name: partial(self.unread, name) for name in self._named.kinds if name in lost},
                **tied,
            },
            "input": {names[node]: partial(self.node, node) for node in self._inputs if node not in stored},
            "output": {name: partial(self.output, name) for name in self._ends("output")},
            "module": {path: partial(self.module, path) for path in modules},
            "value": {
                **{name: partial(self.node, node) for name, node in nodes.items() if node.op == "call_function"},
                **{name: partial(self._sent.explain, found) for name, found in self.collectives.items()},
            },
            **{kind: {name: partial(self.end, kind, name) for name in self._ends(kind)} for kind in RETURNED},
            "stage": {str(i): partial(self.stage, i) for i in range(self.program.num_stages if self._stages else 0)},
        }

    @cached_property
    def collectives(self) -> Mapping[str, Collective]:
        """What the program sends, by name; nothing before lower_reshards."""
        is_lowered = self.program.level in ("lowered", "localized")
        return {found.name: found for found in collectives_of(self.program)} if is_lowered else {}

    def node_of(self, name: str) -> fx.Node | None:
        """The node that a collective is of; None for a message between stages."""
        return self._sent.node(self.collectives[name])

    @cached_property
    def _members(self) -> Mapping[str, Explanation]:
        """What goes with others in a bucket, by the name that it had as a collective of its own."""
        sent = ((found, self._sent.node(found)) for found in self.collectives.values())
        buckets = [found for found, node in sent if node is not None and node.target is bucket]
        return {part.name: part for found in buckets for part in self._sent.members(found)}

    def _ends(self, kind: str) -> Mapping[str, fx.Node | None]:
        """What the program returns of a kind, by name; None of what there is none of."""
        ends = zip(self.program.outputs, self.program.results, strict=True)
        nodes = [(put.name, node) for put, node in ends if put.kind == kind]
        names = gradient_names(self.program) if kind == "gradient" else [name for name, _ in nodes]
        found = {name: node for name, (_, node) in zip(names, nodes, strict=True)}
        return {name: node for name, node in found.items() if node is not None or kind == "gradient"}

    @cached_property
    def _modules(self) -> Mapping[str, list[fx.Node]]:
        """The calls that are in each module, however deep."""
        calls = [node for node in self.program.graph.nodes if node.op == "call_function"]
        found: dict[str, list[fx.Node]] = {WHOLE: calls}
        for node in calls:
            path = self.program.source(node).module
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
            self.chains.names[node], self._kind(node), type_text(self.program, node), source.module, source.location,
            tuple(self.chains.of(node)), placed, notes=tuple(self._notes(node)),
        )  # fmt: skip

    def _kind(self, node: fx.Node) -> Kind:
        given = self._inputs.get(node)
        if given is None:
            return "value"
        return given.kind if given.kind == "parameter" or given.kind == "buffer" else "input"

    def _notes(self, node: fx.Node) -> Iterator[str]:
        if node in self._fallbacks:
            yield f"{self.chains.op(node)} has no rule: its operands are gathered, and it runs whole on every rank"
        readers = (user for user in node.users if user.name in self.collectives)
        yield from (f"sent by {user.name}" for user in readers)

    def tied(self, name: str, first: str) -> Explanation:
        """A further name of a parameter, which is explained by its first one."""
        found = self.tables["param"][first]()
        return replace(found, name=name, notes=(f"{name} and {first} are one {found.kind}, tied", *found.notes))

    def unread(self, name: str) -> Explanation:
        """A parameter or buffer of the model that is not in the program."""
        kind, type_ = self._named.kinds[name], str(self._named.types.get(name, ""))
        return Explanation(name, "buffer" if kind == "buffer" else "parameter", type_, notes=("no op reads it",))

    def output(self, name: str) -> Explanation:
        """Why an output of the model lies as it does."""
        return self.end("output", name)

    def end(self, kind: str, name: str) -> Explanation:
        """Why what the program returns lies as it does: an output, or a gradient."""
        node = self._ends(kind)[name]
        is_gradient = kind == "gradient"
        if node is None:
            return Explanation(name, "gradient", notes=("there is none: no output depends on it",))
        found = self.node(node)
        placed = self._pins.get((kind, name), "") or found.placed
        return replace(found, name=name, kind="gradient" if is_gradient else "output", placed=placed, sent=None)

    def module(self, path: str) -> Explanation:
        """Why what a module returns lies as it does, and what is sent in it, in backward too.

        Of a module of which no op is in the program, why its parameters lie as they do.
        """
        first = self._named.modules.get(path, path)
        inside = self._modules.get(first, [])
        notes = (f"{path} and {first} are one module",) if first != path else ()
        if not inside:
            parts = tuple(self._parameters(path))
            also = ": these are its parameters" if parts else " and it has no parameters"
            return Explanation(path, "module", parts=parts, notes=(*notes, f"no op of the program is its own{also}"))
        return Explanation(path, "module", parts=tuple(self._returned_and_sent(inside)), notes=notes)

    def _parameters(self, path: str) -> Iterator[Explanation]:
        """What explains the parameters and buffers under a module."""
        yield from (explain() for name, explain in self.tables["param"].items() if name.startswith(f"{path}."))

    def _returned_and_sent(self, inside: Iterable[fx.Node]) -> Iterator[Explanation]:
        within = dict.fromkeys(inside)
        forward = [node for node in within if self.program.source(node).phase == "forward"]
        left = [node for node in forward if self._is_returned(node, within.keys())]
        known = self.collectives.keys() | self._members.keys()
        sent = [node for node in within if node.name in known and node.target is not bucket]
        yield from map(self.node, [*left, *(node for node in sent if node not in left)])

    def _is_returned(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether the forward of another module reads a value, or it is the model's."""
        return any(
            user not in inside and (user.op == "output" or self.program.source(user).phase == "forward")
            for user in node.users
        )

    def stage(self, index: int) -> Explanation:
        """Where a stage of a pipeline begins and who says so, and what it sends."""
        assert self._stages is not None, "no pipeline"
        sent = (self._sent.explain(found) for found in self.collectives.values() if found.stage == index)
        return self._stages.stage(index, sent)

    def _annotation(self, text: str) -> Explanation | None:
        """What an annotation is about, named by its pattern or as it prints, and how much comes from it."""
        pattern = text.partition(": P(")[0]
        pins = [pin for pin in self.program.pins if text == pin.text or pin.text.startswith(f"{pattern}: P(")]
        if not pins:
            return None
        known = {pin.text for pin in pins}
        came = (each for node in self.chains.nodes.values() for each in self.program.origins(node))
        count = sum(any(origin.annotation in known for origin in origins.values()) for origins in came)
        tables = {"parameter": "param", "buffer": "param"}
        about = (self.tables[tables.get(pin.kind, pin.kind)].get(pin.name) for pin in pins)
        parts = tuple(explain() for explain in about if explain is not None)
        return Explanation(
            pins[0].text, "annotation", parts=parts, notes=(f"{count} values lie as they do because of it",)
        )

    def _former(self, name: str) -> Explanation | None:
        """What the program before or after some pass calls so."""
        node = self.chains.standing(name)
        if node is not None:
            shown = self.chains.names[node]
            note = f"{name} is the name of its node" if node.op == "placeholder" else f"it stands in place of {name}"
            return replace(self.node(node), notes=(note,)) if shown != name else self.node(node)
        for after, other in reversed(self.others.items()):
            node = next((each for each in other.graph.nodes if each.name == name), None)
            if node is not None and other.shardings(node) and other.level != "localized":
                return replace(Explainer(other).node(node), notes=(f"as it is after {after}",))
            found = [] if node is None else standing_for(self.program, other, node)
            if found:
                note = f"it is there after {after}; where it was are now:"
                return Explanation(name, "value", parts=tuple(map(self.node, found)), notes=(note,))
        return None


def _unknown(name: str, bare: str, tables: Mapping[str, Table]) -> ShardingError:
    names = [each for table in tables.values() for each in table]
    if not names:
        kind = next(iter(tables))
        remedy = WITHOUT.get(kind, "name what shardc dump prints")
        return ShardingError(f"explain {name!r}", f"a {kind} of the program", "it has none", remedy)
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


TYPED = ("param", "input", "output", "module", "value")  # kinds that a bare name may be of
RETURNED = ("gradient", "computed", "guard")  # that share names with these: said before the name, as is a stage
PRINTED = {"parameter": "param", "buffer": "param", "collective": "value"}  # a kind by another word
WHOLE = "(model)"  # what the module is called that has no name


def kind_and_name(text: str) -> tuple[str, str]:
    """The kind that is said before a name, if any, and the name: ``param:up.weight``, ``the gradient up.weight``."""
    words = text.strip().removeprefix("the ")
    for sign in (":", " "):
        kind, found, rest = words.partition(sign)
        kind = PRINTED.get(kind, kind)
        if found and kind in (*TYPED, *RETURNED, "stage"):
            return kind, rest.strip()
    return "", text.strip()


def without_place(name: str) -> str:
    """``add_1`` of ``add_1 (blocks.0.mlp)``."""
    return re.sub(r"(?<=\S) \(.*\)$", "", name)


@dataclass(frozen=True)
class ModelNames:
    """What a model calls its parameters and modules.

    ``tied``: for each further name of a parameter or buffer the first one. ``modules``: every path, for each the first
    of that module. ``kinds``, ``types``: of each parameter and buffer by its first name.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, TensorType] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module | None) -> ModelNames:
        """Those of a model; of none, none."""
        if model is None:
            return ModelNames()
        parameters, buffers, tied = state_names(model)
        kinds = dict.fromkeys(parameters, "parameter") | dict.fromkeys(buffers, "buffer")
        types = {name: types_of(tensor) for name, tensor in {**parameters, **buffers}.items()}
        first: dict[int, str] = {}
        paths = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if path]
        modules = {path: first.setdefault(id(module), path) for path, module in paths}
        return ModelNames(
            tied, modules, kinds, {n: type_ for n, type_ in types.items() if isinstance(type_, TensorType)}
        )


def standing_for(program: Program, other: Program, node: fx.Node) -> list[fx.Node]:
    """The values of a program that stand where another, after another pass, has a node.

    They are of the same call of the user's, or else of the first that reads it; for a rank's own view, what it views.
    """
    known = {each.name: each for each in program.graph.nodes if each.op != "output"}
    made: dict[tuple[Source, int], list[fx.Node]] = {}
    for each in program.calls:
        if not program.causes(each):
            made.setdefault(_call(program, each), []).append(each)
    seen, todo = {node}, deque([node])
    while todo:
        here = todo.popleft()
        if here.name in known:
            return [known[here.name]]
        if _call(other, here) in made and other.level != "localized":
            return made[_call(other, here)]
        near = here.all_input_nodes[:1] if other.level == "localized" else [*here.users, *here.all_input_nodes]
        todo.extend(each for each in near if each not in seen and each.op != "output")
        seen.update(near)
    return []


def _call(program: Program, node: fx.Node) -> tuple[Source, int]:
    """Which call of the user's it is made for."""
    source = program.source(node)
    return source, source.ordinal
