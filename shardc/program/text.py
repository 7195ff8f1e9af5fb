"""The text form of a program and of tables about it, stable from run to run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from shardc.language.mesh import MICROBATCH
from shardc.language.text import bytes_text, folded, operations_text, over_calls, printable, table
from shardc.program.communication import ring_of
from shardc.program.program import OF_BACKWARD, Input, Output, Program
from shardc.program.provenance import cause_text
from shardc.program.traffic import collectives_of

SILENT_ARGUMENTS = ("device", "layout", "pin_memory", "text")  # the same all over a program, or printed elsewhere


def program_text(program: Program, only: Iterable[fx.Node] | None = None) -> str:
    """A program at any level: inputs, a line for each value under its phase and module, results; or ``only`` nodes."""
    names = value_names(program)
    nodes = {None, *program.graph.nodes} if only is None else set(only)
    inputs = [
        f"  {input_text(program, put, node)}"
        for put, node in zip(program.inputs, program.placeholders, strict=True)
        if node in nodes and (put.kind != "random" or node.users)
    ]
    ends = zip(program.outputs, program.results, strict=True)
    results = [f"  {result_text(program, output, node, names)}" for output, node in ends if node in nodes]
    parts = [
        f"program ({program.level}){_mesh_text(program)}\n",
        _lines("inputs", inputs),
        "\n".join([*map(printable, _body_lines(program, names, nodes)), ""])[1:],
        _lines("results", results),
        notes_text(program) if only is None else "",
    ]
    return "\n".join(part for part in parts if part.strip())


def notes_text(program: Program) -> str:
    """The notes of the compiler on its work."""
    return _lines("notes", (f"  {note}" for note in program.notes))


def _lines(title: str, lines: Iterable[str]) -> str:
    listed = list(map(printable, lines))
    return "\n".join([title, *listed, ""]) if listed else ""


def rank_axes(program: Program) -> dict[str, int]:
    """The sizes of the axes of ranks, the pipeline's first; without the axis of microbatches, which is one of time."""
    mesh, pipeline = program.mesh, program.options.pipeline
    axes = {} if mesh is None else mesh.sizes
    if pipeline is None:
        return axes
    ranks = {pipeline.axis: program.num_stages // pipeline.chunks_a_rank}
    return {**ranks, **{name: size for name, size in axes.items() if name not in (MICROBATCH, pipeline.axis)}}


def _mesh_text(program: Program) -> str:
    """`` on dp=2, tp=4``, or empty."""
    axes, pipeline = rank_axes(program), program.options.pipeline
    microbatches = f", {pipeline.microbatches} microbatches" if pipeline else ""
    return f" on {', '.join(f'{name}={size}' for name, size in axes.items())}{microbatches}" if axes else ""


def value_names(program: Program) -> dict[fx.Node, str]:
    """The printed name of each node: an input's is the user's, all others the node's."""
    names = map(_input_name, program.inputs)
    return {node: node.name for node in program.graph.nodes} | dict(zip(program.placeholders, names, strict=True))


def value_name(program: Program, node: fx.Node) -> str:
    """The printed name of one node."""
    if node.op != "placeholder":
        return node.name
    return next(_input_name(put) for put, its in zip(program.inputs, program.placeholders, strict=True) if its is node)


def _input_name(put: Input) -> str:
    return f"{put.kind}({put.name})" if put.kind in OF_BACKWARD else put.name


def type_text(program: Program, node: fx.Node) -> str:
    """``f32[8@dp, 64]``; a tuple of them for an op with several results; local shapes in a localized program."""
    producer, index = program.value(node)
    types, shardings = program.types(producer), program.shardings(producer)
    if program.level == "localized" or not shardings:
        shardings = (None,) * len(types)
    texts = [
        "None" if type_ is None else str(type_) if sharding is None else sharding.text(type_)
        for type_, sharding in zip(types, shardings, strict=True)
    ]
    has_many = program.has_many(producer) and producer is node
    return f"({', '.join(texts)})" if has_many else texts[index]


def input_text(program: Program, put: Input, node: fx.Node) -> str:
    """``parameter up.weight: f32[64@tp, 8]``."""
    return f"{put.kind} {put.name}: {type_text(program, node)}".replace("random random", "random")


def result_text(program: Program, output: Output, node: fx.Node | None, names: dict[fx.Node, str]) -> str:
    """``gradient up.weight: f32[64@tp, 8] = dot_4``."""
    value = "None" if node is None else f"{type_text(program, node)} = {names[node]}"
    return f"{output.kind} {output.name}: {value}"


def _body_lines(program: Program, names: dict[fx.Node, str], nodes: Container[fx.Node | None]) -> Iterator[str]:
    called, remarks = op_names(program), remarks_of(program)
    phase = module = location = ""
    for node in program.graph.nodes:
        if node.op != "call_function" or node not in nodes:
            continue
        source = program.source(node)
        if source.phase != phase:
            yield from ("", source.phase)
            module = location = ""
        if source.module != module:
            yield f"  {source.module or '(model)'}"
        remark = [source.location] if source.location not in ("", location) else []
        remark += [remarks[node]] if node in remarks else []
        comment = f"  # {'; '.join(remark)}" if remark else ""
        yield f"    {call_line(program, node, names, called)}{comment}"
        phase, module, location = source.phase, source.module, source.location


def call_line(program: Program, node: fx.Node, names: dict[fx.Node, str], called: dict[Any, str]) -> str:
    """``add: f32[8@dp, 64] = add(x, y)``."""
    return f"{names[node]}: {type_text(program, node)} = {call_text(node, names, called)}"


def op_names(program: Program) -> dict[Any, str]:
    """The printed name of each op: ``aten.add.Tensor`` is ``add``, unless an op of our own has that name."""
    targets = {node.target for node in program.calls}
    names: dict[Any, str] = {target: target.__name__ for target in targets if not hasattr(target, "_schema")}  # type: ignore[union-attr]
    own = set(names.values())
    for target in targets - names.keys():
        namespace, name = str(target).split(".")[:2]
        names[target] = name if namespace == "aten" and name not in own else f"{namespace}.{name}"
    return names


def call_text(node: fx.Node, names: dict[fx.Node, str], called: dict[Any, str]) -> str:
    """``dot(x, w, "b k, k n -> b n")``; a getitem prints as ``layer_norm[1]``."""
    if node.target not in called:
        return f"{_argument(node.args[0], names)}[{node.args[1]}]"
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None and key not in SILENT_ARGUMENTS}
    arguments = [_argument(value, names) for value in node.args]
    if ring := ring_of(node):  # in words after the tensors, since its tuple of values is long
        first, axes, dim, _, *others = arguments
        arguments = [first, *others, axes, dim, str(ring)]
    arguments += [f"{key}={_argument(value, names)}" for key, value in kwargs.items()]
    return f"{called[node.target]}({', '.join(arguments)})"


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(_argument(entry, names) for entry in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_argument(entry, names) for entry in value)}{',' * (len(value) == 1)})"
    return names[value] if value in names else str(value).removeprefix("torch.")


def remarks_of(program: Program) -> dict[fx.Node, str]:
    """For each reshard and collective its causes and the bytes that one rank sends."""
    by_name = {each.name: f"{bytes_text(each.wire_bytes)} on the wire" for each in collectives_of(program)}
    remarks = {}
    for node in program.calls:
        parts = [by_name[node.name]] if node.name in by_name else []
        parts += [f"because {cause_text(program.causes(node), most=2)}"] if program.causes(node) else []
        if parts:
            remarks[node] = ", ".join(parts)
    return remarks


# Tables.


def parameters_text(program: Program, stages: Mapping[fx.Node, Sequence[int]] | None = None) -> str:
    """Parameters and buffers, each with its sharding, its local type and bytes, and the stages that hold it."""
    rows = []
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        local = program.local_type(node)
        if local is not None and put.kind in ("parameter", "buffer"):
            held = "+".join(map(str, (stages or {}).get(node, ())))
            rows.append((put.name, type_text(program, node), str(local), bytes_text(local.nbytes), held))
    return (
        table(("parameter", "sharding", "on one rank", "bytes", "stage"), folded(rows)) if rows else "no parameters\n"
    )


def fallbacks_text(program: Program, nodes: Sequence[fx.Node]) -> str:
    """The ops without a rule, which run whole on every rank."""
    names, called = value_names(program), op_names(program)
    sources = ((node, program.source(node)) for node in nodes)
    rows = [(names[node], call_text(node, names, called), place.module, place.location) for node, place in sources]
    return (
        table(("run whole, having no rule", "call", "module", "source"), folded(rows, alike=over_calls)) if rows else ""
    )


def memory_text(memory: Mapping[str, int]) -> str:
    """Bytes on one rank by class."""
    return table(("memory of one rank", "bytes"), ((name, bytes_text(size)) for name, size in memory.items()))


def flops_text(counts: Mapping[str, int]) -> str:
    """Floating-point operations, of one rank and of the whole program."""
    rows = ((name, operations_text(count)) for name, count in counts.items())
    return table(("floating-point operations", "count"), rows)


def range_name(program: Program, node: fx.Node) -> str:
    """``backward/blocks.0.mlp/gelu_backward``: the node's phase, its module (``(model)`` at the top), and its name."""
    source = program.source(node)
    return f"{source.phase}/{source.module or '(model)'}/{node.name}"
