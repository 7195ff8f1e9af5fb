"""offload: lowered -> lowered. Parameters are stored in the tier below the device's memory, as ``Zero.offload`` says.

A parameter is fetched where it is used, and again in backward, and its gradient goes back. A parameter that is cast to
fewer bytes is cast in the tier below, and the cast copy is fetched::

    w: f32[64@dp, 256]                          w: f32[64@dp, 256]                       # in the tier below
    g: f32[64, 256] = all_gather(w)             u = fetch(w);  g = all_gather(u)
    ...                                    ->   ...
    d: f32[64@dp, 256] = reduce_scatter(p)      d = reduce_scatter(p);  e = offload(d)   # e is returned

In a pipeline a stage fetches a parameter once a step. If only the optimizer is offloaded, a parameter is fetched once
after each step of the optimizer. That copy, or a gathered or cast one, is a result of the program, which the runtime
keeps until the parameter is written.

Invariant: calls on the device read parameters only through ``fetch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from shardc.ops import tier
from shardc.options.zero import OPTIMIZER
from shardc.program.lifetime import split
from shardc.program.program import Output, Program, ends_of, parameters_of


def offload(program: Program) -> Program:
    """The program with parameters in the tier below; unchanged without the option."""
    offloaded = program.options.offloaded
    if offloaded is None:
        return program
    program = program.edited()
    _offload_results(program, "gradient")
    (_keep if offloaded == OPTIMIZER else _stream)(program)
    return program


def _stream(program: Program) -> None:
    """Fetch each parameter, or its cast, where it is used, and again in backward."""
    found, casts = split(program), _offload_results(program, "computed")
    parts = {*found.forward, program.output_node}, set(found.backward)
    for node in parameters_of(program).values():
        stored = casts.get(node, node)
        readers = sorted(each for each in stored.users if stored is node or each is not program.output_node)
        in_pipeline = program.options.pipeline is not None
        groups = [readers] if in_pipeline else [[each for each in readers if each in part] for part in parts]
        for group in filter(None, groups):
            _fetch(program, stored, group)


def _keep(program: Program) -> None:
    """Fetch each parameter in the update part, and return the copy unless the program already returns one."""
    kept = {owner for output, owner, _ in ends_of(program) if output.kind == "computed"}
    for name, node in parameters_of(program).items():
        if not node.users:
            continue
        fetched = _fetch(program, node, sorted(node.users))
        program.set_source(fetched, replace(program.source(fetched), phase="update"))
        if node not in kept:
            program.computed = {name: program.sharding(node), **program.computed}
            program.outputs = (*program.outputs, Output(name, "computed"))
            program.output_node.args = ((*program.results, fetched),)


def _offload_results(program: Program, kind: str) -> dict[fx.Node, fx.Node]:
    """Let the program return parameters' results of one kind from the tier below; these copies, by parameter.

    Readers of a ``computed`` result, a cast, read the copy too.
    """
    parameters, results, copies = set(parameters_of(program).values()), list(program.results), dict[fx.Node, fx.Node]()
    for i, (output, owner, result) in enumerate(ends_of(program)):
        if output.kind == kind and owner in parameters and result is not None:
            readers = set(result.users) - {program.output_node} if kind == "computed" else ()
            results[i] = copies[owner] = _offload(program, result)
            for reader in readers:
                reader.replace_input_with(result, copies[owner])
    program.output_node.args = (tuple(results),)
    return copies


def _fetch(program: Program, node: fx.Node, readers: Sequence[fx.Node]) -> fx.Node:
    """Let readers of a parameter, in order, read a copy that is fetched before the first of them."""
    with program.graph.inserting_before(readers[0]):
        fetched = program.insert(tier.fetch, (node,), program.type(node), readers[0], name=f"fetch_{node.name}")
    _stand_for(program, fetched, node)
    for reader in readers:
        reader.replace_input_with(node, fetched)
    return fetched


def _offload(program: Program, result: fx.Node) -> fx.Node:
    """A copy of a result in the tier below, right after it is computed."""
    graph, is_computed = program.graph, result.op == "call_function"
    with graph.inserting_after(result) if is_computed else graph.inserting_before(program.output_node):
        copy = program.insert(tier.offload, (result,), program.type(result), result, name=f"offload_{result.name}")
    _stand_for(program, copy, result)
    return copy


def _stand_for(program: Program, copy: fx.Node, node: fx.Node) -> None:
    """Give a copy the sharding of a value, and its origins."""
    program.set_sharding(copy, program.sharding(node))
    program.set_origins(copy, (program.origin(node),))
