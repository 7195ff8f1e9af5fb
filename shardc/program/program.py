"""The program: a torch.fx graph over global values, and typed access to every fact about its nodes.

Only this file reads or writes ``node.meta``. A node's arguments hold numbers, strings, tuples and nodes alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import fx

from shardc.language.errors import REPORT, ShardingError
from shardc.language.mesh import Mesh
from shardc.language.rule import OpCall, OpRule, Rule, replicated_rule
from shardc.language.sharding import Sharding, TensorType
from shardc.language.words import Level
from shardc.ops import op_rule
from shardc.options import Options
from shardc.program.inference import Types, result_types, typed
from shardc.program.node import add_copy, add_node, last_node, op_name, operands
from shardc.program.provenance import Cause, CutChoice, FormChoice, Origin, SideChoice, Source

Shardings = Sharding | tuple[Sharding | None, ...] | None
Value = tuple[fx.Node, int]  # a node and the index of one of its results
Check = Callable[["Program", fx.Node], None]  # raises an AssertionError


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder. ``name``: the path of the parameter or buffer, or the name of the input (``x``, ``batch.ids``).

    ``tangent``: the gradient of the output that it names. ``random``: int64[2], seed and step. ``residual``: what codes
    left out of a gradient in the step before. ``momentum``: the optimizer's momentum of a parameter.
    """

    name: str
    kind: Literal["parameter", "buffer", "input", "tangent", "random", "residual", "momentum"]
    type: TensorType
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An element of the output node's one tuple argument, in order.

    ``gradient``: that of the parameter or input that it names. ``buffer``: a buffer's new value, written back after the
    step. ``changed``: the new value of an input that the forward changes in place. ``computed``: a parameter as it is
    computed on, if this copy is kept until the parameter is written. ``guard``: a result that keeps an op in the
    program, which must find in values what it found at capture. ``residual``: what codes leave out of a gradient.
    """

    name: str
    kind: Literal["output", "gradient", "buffer", "changed", "computed", "guard", "residual"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A value with a fixed sharding.

    ``name``: that of an input, or of a node if ``kind`` is ``value``. ``open``: the dims that propagation may cut, or
    cut further. ``text``: the annotation as the user wrote it. ``priorities``: one for each dim. On conflict inputs and
    values come before parameters, by ``kind``. ``is_returned_whole``: an output that is gathered when it is returned,
    and computed in any sharding. ``stages``: the pipeline stages that hold a parameter already. ``zigzags``: dims of
    positions that are to be put in zigzag order, each with its axis; after that the input itself is in order, and whole
    along them.
    """

    name: str
    kind: str
    sharding: Sharding
    open: frozenset[int]
    text: str
    priorities: tuple[int, ...] = ()
    is_returned_whole: bool = False
    stages: frozenset[int] = frozenset()
    zigzags: tuple[tuple[int, str], ...] = ()

    def priority(self, dim: int) -> int:
        """The round in which the cut of a dim propagates, and from which an open dim may be cut."""
        return self.priorities[dim] if self.priorities else 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that cut the value, or its positions in zigzag."""
        names = [part.name for part in self.sharding.cut_axes]
        return tuple(dict.fromkeys((*names, *(axis for _, axis in self.zigzags))))

    @property
    def is_annotation(self) -> bool:
        """Whether it comes from an annotation, and not from a parameter's present sharding or from a pipeline."""
        return ": P(" in self.text


BOUND = ("rule", "is_fallback", "checked")  # facts of a call that follow from its types and the table of rules
NO_SOURCE = Source()
NEVER_CHECKED: tuple[tuple[Check, ...], list[Any]] = ((), [])


@dataclass(slots=True)
class Program:
    """A graph with its inputs, outputs, mesh and level. Passes take one and return another.

    ``pins``: fixed shardings of inputs and nodes. A ``localized`` program has local shapes in every type; its shardings
    are those of the global values. ``computed``: for parameters that are stored in another sharding, the one in which
    they are computed on. ``num_stages``: the number of pipeline stages; with a pipeline ``mesh`` is that of one stage,
    with an axis of microbatches. ``notes``: texts for the user. ``forms``, ``sides``: the choices of ``decompose`` and
    ``insert_reshards``, for ``explain``. ``cache``: facts computed from the program (``stages.cached_on_program``);
    ``rules``: those bound to its calls. A copy starts with neither.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    mesh: Mesh | None = None
    level: Level = "captured"
    pins: tuple[Pin, ...] = ()
    notes: tuple[str, ...] = field(default=())
    options: Options = field(default_factory=Options)
    computed: Mapping[str, Sharding] = field(default_factory=dict)
    num_stages: int = 1
    forms: tuple[FormChoice, ...] = ()
    sides: tuple[SideChoice, ...] = ()
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    rules: dict[Any, Rule] = field(default_factory=dict, init=False, repr=False, compare=False)

    def copy(self, level: Level | None = None) -> Program:
        """A copy whose graph may be changed without touching this one."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            copies[node] = add_copy(graph, node, copies.__getitem__)
        return replace(self, graph=graph, level=level or self.level)

    def mapped(self, function: Callable[[Any], Any]) -> Program:
        """A copy with ``function`` applied to arguments, facts and fields; its calls have no rules yet.

        The function has to leave nodes as they are.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            args, kwargs = fx.map_arg((function(node.args), function(node.kwargs)), copies.__getitem__)
            new = copies[node] = add_node(graph, node.op, node.target, args, kwargs, node.name)
            new.meta.update({key: function(fact) for key, fact in self.facts(node).items()})
        return Program(graph, **{name: function(value) for name, value in self.own_fields.items()})

    @property
    def own_fields(self) -> dict[str, Any]:
        """The fields that it is made from, by name, without the graph."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "graph"}

    def facts(self, node: fx.Node) -> dict[str, Any]:
        """All facts about a node that do not follow from others."""
        return {key: fact for key, fact in node.meta.items() if key not in BOUND}

    def set_facts(self, node: fx.Node, facts: Mapping[str, Any]) -> None:
        """Set the facts about a node of another program."""
        node.meta.update(facts)

    def edited(self, level: Level | None = None) -> Program:
        """The same graph without the facts that were computed from it, for a pass that is about to change it."""
        return replace(self, level=level or self.level)

    def unbound(self) -> Program:
        """A copy whose calls have no rules yet: the table may have others by now."""
        program = self.copy()
        for node in program.calls:
            for fact in BOUND:
                node.meta.pop(fact, None)
        return program

    # Inputs and outputs of the graph.

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The placeholders, parallel to ``inputs``."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    @property
    def input_axes(self) -> tuple[str, ...]:
        """The names of the axes that cut an input of the model, or its positions in zigzag."""
        return tuple(dict.fromkeys(axis for pin in self.pins if pin.kind == "input" for axis in pin.axes))

    @property
    def named_inputs(self) -> dict[tuple[str, str], fx.Node]:
        """The placeholders by kind and name."""
        return {(put.kind, put.name): node for put, node in zip(self.inputs, self.placeholders, strict=True)}

    @property
    def output_node(self) -> fx.Node:
        """The output node; its one argument is a tuple, parallel to ``outputs``, of nodes, or None for no value."""
        return last_node(self.graph)

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The returned nodes, parallel to ``outputs``."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def calls(self) -> Iterator[fx.Node]:
        """The calls of ops, getitem excluded."""
        return (node for node in self.graph.nodes if node.op == "call_function" and node.target is not operator.getitem)

    # Facts about nodes.

    def types(self, node: fx.Node) -> tuple[TensorType | None, ...]:
        """The types of a node's results."""
        found: Types = node.meta.get("type")
        return found if isinstance(found, tuple) else (found,)

    def type(self, node: fx.Node) -> TensorType:
        """The type of a node with one result."""
        found = node.meta["type"]
        assert isinstance(found, TensorType), (node, found)
        return found

    def local_type(self, node: fx.Node, index: int = 0) -> TensorType | None:
        """The local type of a node's result: its type in a localized program, else that of its shard."""
        if node.target is operator.getitem:
            node, index = self.value(node)
        type_, sharding = node.meta.get("type"), node.meta.get("sharding")
        if isinstance(type_, tuple):
            type_, sharding = type_[index], sharding and sharding[index]
        if type_ is None or sharding is None or self.level == "localized":
            return type_
        return TensorType(sharding.local_shape(type_.shape), type_.dtype)

    def global_type(self, node: fx.Node, index: int = 0) -> TensorType:
        """The global type of the result ``index`` of a node, also in a localized program."""
        producer, picked = self.value(node)
        index = index if producer is node else picked
        found: tuple[TensorType, ...] = producer.meta.get("global_types") or self.types(producer)  # type: ignore[assignment]
        return found[index]

    def set_local_types(self, node: fx.Node, types: tuple[TensorType | None, ...]) -> None:
        """Set the local types of a node's results, and keep the present ones as global."""
        self.set_global_types(node, self.types(node))
        self.set_type(node, types if self.has_many(node) else types[0])

    def set_global_types(self, node: fx.Node, types: tuple[TensorType | None, ...]) -> None:
        """Set the global types of the results of a node in a localized program."""
        node.meta["global_types"] = types

    def set_type(self, node: fx.Node, type_: Types) -> None:
        """Set a node's type: a tuple when the op returns several results."""
        node.meta["type"] = type_

    def has_many(self, node: fx.Node) -> bool:
        """Whether the op returns a tuple or list."""
        return isinstance(node.meta.get("type"), tuple)

    def value(self, node: fx.Node) -> Value:
        """The value that a node stands for: a getitem is a result of its producer."""
        if node.target is not operator.getitem:
            return node, 0
        producer, index = node.args
        assert isinstance(producer, fx.Node) and isinstance(index, int)
        return producer, index

    def value_type(self, value: Value) -> TensorType:
        """The type of a value."""
        type_ = self.types(value[0])[value[1]]
        assert type_ is not None, value
        return type_

    def operand_values(self, node: fx.Node) -> tuple[Value | None, ...]:
        """The operands of a call as values, in the order of ``operands``."""
        return tuple([None if operand is None else self.value(operand) for operand in operands(node)])

    def sharding(self, node: fx.Node) -> Sharding:
        """The sharding of a node with one result (or of a getitem)."""
        producer, index = self.value(node)
        sharding = self.shardings(producer)[index]
        assert sharding is not None, node
        return sharding

    def shardings(self, node: fx.Node) -> tuple[Sharding | None, ...]:
        """The shardings of a node's results; empty before propagate."""
        found: Shardings = node.meta.get("sharding")
        return found if isinstance(found, tuple) else () if found is None else (found,)

    def set_sharding(self, node: fx.Node, sharding: Shardings) -> None:
        """Set a node's sharding: a tuple when the op returns several results."""
        node.meta["sharding"] = sharding

    def origin(self, node: fx.Node) -> Mapping[str, Origin]:
        """The origin of each axis that cuts a node's value."""
        producer, index = self.value(node)
        return self.origins(producer)[index]

    def origins(self, node: fx.Node) -> tuple[Mapping[str, Origin], ...]:
        """For each result of a node, the origin of each axis that cuts it."""
        found: tuple[Mapping[str, Origin], ...] = node.meta.get("origins", ())
        return found or ({},) * len(self.types(node))

    def set_origins(self, node: fx.Node, origins: tuple[Mapping[str, Origin], ...]) -> None:
        """Set, for each result of a node, the origin of each axis that cuts it."""
        node.meta["origins"] = origins

    def source(self, node: fx.Node) -> Source:
        """The place in the user's model that a node comes from."""
        found: Source = node.meta.get("source", NO_SOURCE)
        return found

    def set_source(self, node: fx.Node, source: Source) -> None:
        """Set the place that a node comes from."""
        node.meta["source"] = source

    def causes(self, node: fx.Node) -> tuple[Cause, ...]:
        """The causes of a reshard or a collective; of a bucket one for each member."""
        found: tuple[Cause, ...] = node.meta.get("causes", ())
        return found

    def set_causes(self, node: fx.Node, causes: tuple[Cause, ...]) -> None:
        """Set the causes of a reshard or a collective."""
        node.meta["causes"] = causes

    def cut_choice(self, node: fx.Node) -> CutChoice | None:
        """The choice of an op's cuts; None before insert_reshards, and for a call inserted since."""
        found: CutChoice | None = node.meta.get("cut_choice")
        return found

    def set_cut_choice(self, node: fx.Node, choice: CutChoice) -> None:
        """Set the choice of an op's cuts."""
        node.meta["cut_choice"] = choice

    def former_names(self, node: fx.Node) -> tuple[str, ...]:
        """The names of the nodes that this one replaced."""
        found: tuple[str, ...] = node.meta.get("former_names", ())
        return found

    # Rules.

    def call(self, node: fx.Node) -> OpCall:
        """The call of a node, with types for nodes."""
        return OpCall(
            self._with_types(node.args),
            self._with_types(node.kwargs),
            tuple(value and self.value_type(value) for value in self.operand_values(node)),
            self.types(node),
        )

    def rule(self, node: fx.Node) -> Rule:
        """The rule of a node, bound to its shapes once; the replicated rule where the table has none.

        Equal calls, as in every layer, share one rule.
        """
        if "rule" not in node.meta:
            args, kwargs = self._with_types((node.args, node.kwargs))
            key = node.target, typed(args), typed(dict(kwargs)), typed(self.types(node))
            if key not in self.rules:
                entry, call = op_rule(node.target), self.call(node)
                self.rules[key] = self._bound(entry, node, call) if entry else replicated_rule(call)
            node.meta["rule"] = self.rules[key]
        rule: Rule = node.meta["rule"]
        return rule

    def _bound(self, entry: OpRule, node: fx.Node, call: OpCall) -> Rule:
        """The rule that the table gives a call; if a rule of shardc's own fails, the replicated rule, and a note."""
        try:
            return entry.bind(call)
        except ShardingError:  # of a rule of the user's
            raise
        except Exception as error:
            op, why = f"{node.target} ({self.source(node).place})", f"{type(error).__name__}: {error}"
            self.notes = (*self.notes, f"{op} runs whole: its rule raised {why}; {REPORT}")
            return replicated_rule(call)

    def bind_rule(self, node: fx.Node, rule: Rule) -> None:
        """Give a node another rule than its op's."""
        node.meta["rule"] = rule

    def is_fallback(self, node: fx.Node) -> bool:
        """Whether an op has no rule and runs whole; computed once, so that localize does not change it."""
        if "is_fallback" not in node.meta:
            node.meta["is_fallback"] = self.rule(node).is_fallback
        return bool(node.meta["is_fallback"])

    def forget_rule(self, node: fx.Node) -> None:
        """Bind the rule anew after a change of the node's arguments or types."""
        node.meta.pop("rule", None)

    def check_once(self, node: fx.Node, checks: tuple[Check, ...]) -> None:
        """Run ``checks`` on a node, without those that it passed with the same op, rule, types and shardings."""
        meta = node.meta
        facts = [node.target, meta.get("rule"), meta.get("type"), meta.get("sharding")]
        for read in node.all_input_nodes:
            if read.target is operator.getitem:
                facts.append(read.args[1])
                read = read.args[0]  # type: ignore[assignment]
            facts += (read.meta.get("type"), read.meta.get("sharding"))
        passed, known = meta.get("checked", NEVER_CHECKED)
        if facts != known:
            passed = ()
        if passed is not checks:
            for check in checks:
                if check not in passed:
                    check(self, node)
            meta["checked"] = checks, facts

    def _with_types(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: self.value_type(self.value(node)))  # type: ignore[arg-type, return-value]

    # Building.

    def insert(self, target: Any, args: tuple[Any, ...], type_: Types, like: fx.Node,
               kwargs: Mapping[str, Any] | None = None, name: str | None = None) -> fx.Node:  # fmt: skip
        """Insert a call at the graph's insertion point, with the source of ``like``."""
        node = add_node(self.graph, "call_function", target, args, kwargs, name or op_name(target))
        self.set_type(node, type_)
        self.set_source(node, self.source(like))
        return node

    def copy_of(self, node: fx.Node, given: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Insert a copy of a call, with other operands for those in ``given``."""
        return add_copy(self.graph, node, lambda operand: given.get(operand, operand))

    def repeat(self, node: fx.Node, given: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Insert a copy of a forward call into backward, with other operands for those in ``given``."""
        again = self.copy_of(node, given)
        self.set_source(again, replace(self.source(node), phase="backward"))
        return again

    def emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Insert a call, with the type that ``infer`` finds."""
        return self.insert(target, args, self.infer(target, args, kwargs), like, kwargs)

    def infer(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> Types:
        """The type of a call whose arguments hold typed nodes: see ``result_types``."""
        typed, named = self._with_types((args, dict(kwargs)))
        return result_types(target, typed, named, device)

    def replace(self, old: fx.Node, new: fx.Node | Sequence[fx.Node | None]) -> None:
        """Replace ``old`` by ``new`` and erase it; an op with several results by one node for each."""
        if isinstance(new, fx.Node):
            old.replace_all_uses_with(new)
            new.meta["former_names"] = (*self.former_names(new), old.name, *self.former_names(old))
        else:
            for user in list(old.users):
                result = new[self.value(user)[1]]
                assert result is not None, user
                self.replace(user, result)
        self.graph.erase_node(old)

    def remove_dead(self) -> None:
        """Erase every call without a user."""
        for node in reversed(self.graph.nodes):
            if node.op not in ("placeholder", "output") and not node.users:
                self.graph.erase_node(node)


End = tuple[Output, fx.Node | None, fx.Node | None]
# The kind of the input that owns a result, by the kind of the result.
PLACEHOLDERS = {"buffer": "buffer", "changed": "input", "computed": "parameter", "residual": "residual"}


def parameters_of(program: Program) -> dict[str, fx.Node]:
    """The placeholders of parameters by name."""
    return inputs_of(program, "parameter")


def inputs_of(program: Program, kind: str) -> dict[str, fx.Node]:
    """The placeholders of inputs of a kind by name."""
    return {name: node for (of, name), node in program.named_inputs.items() if of == kind}


def ends_of(program: Program) -> Iterator[End]:
    """Each output, the placeholder that owns it (None for the model's outputs), and the node that is returned for it.

    Gradients follow the inputs that require them: a parameter and an input of the model may have one name.
    """
    stored, inputs = program.named_inputs, zip(program.inputs, program.placeholders, strict=True)
    differentiable = ((put.name, node) for put, node in inputs if put.requires_grad)
    for output, result in zip(program.outputs, program.results, strict=True):
        if output.kind == "gradient":
            yield output, next(node for name, node in differentiable if name == output.name), result
        else:
            kind = PLACEHOLDERS.get(output.kind, "")
            yield output, stored.get((kind, output.name)), result


def residual_owner(name: str) -> str:
    """The parameter of a residual. A gradient that is summed in several steps has several, which end in numbers."""
    return name.partition(":")[0]


def residuals_of(program: Program, parameters: Collection[str]) -> list[fx.Node]:
    """The residuals of gradients on a rank that stores these parameters."""
    elsewhere = parameters_of(program).keys() - set(parameters)
    return [node for name, node in inputs_of(program, "residual").items() if residual_owner(name) not in elsewhere]


OF_BACKWARD = ("tangent", "residual", "momentum")  # kinds of inputs that backward takes
SMALL_OUTPUT = 1024  # elements


def is_small_output(program: Program, output: Output, result: fx.Node) -> bool:
    """Whether an output without an annotation is returned whole: 0-dim, or a vector of at most SMALL_OUTPUT."""
    shape = program.global_type(result).shape
    is_pinned = any((pin.kind, pin.name) == ("output", output.name) for pin in program.pins)
    return output.kind == "output" and not is_pinned and len(shape) <= 1 and math.prod(shape) <= SMALL_OUTPUT


def gradient_names(program: Program) -> dict[str, tuple[str, str]]:
    """The name of each gradient, in order, with the kind and name of its input.

    The gradient of an input that shares its name with a parameter is named ``input:NAME``.
    """
    keys = {node: key for key, node in program.named_inputs.items()}
    found: dict[str, tuple[str, str]] = {}
    for output, owner, _ in ends_of(program):
        if output.kind == "gradient" and owner is not None:
            kind, name = keys[owner]
            found[f"{kind}:{name}" if name in found else name] = kind, name
    return found


def shardings_of(program: Program) -> dict[str, Sharding]:
    """The sharding of every parameter, buffer, input, output and node, by name."""
    nodes = (node for node in program.graph.nodes if node.op != "output" and not program.has_many(node))
    found = {node.name: program.sharding(node) for node in nodes}
    for output, node in zip(program.outputs, program.results, strict=True):
        if node is not None and output.kind == "output":
            found[output.name] = program.sharding(node)
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if given.kind not in OF_BACKWARD:
            found[given.name] = program.sharding(node)
    return found
