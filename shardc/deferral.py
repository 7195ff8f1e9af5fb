"""Which reductions of gradients may wait: what is summed over ranks once may be summed over backwards before."""

from __future__ import annotations

from torch import fx

from shardc.bucket import members
from shardc.collective import EXCHANGES
from shardc.ends import ends_of, parameters_of
from shardc.node import descendants, is_getitem, operands
from shardc.ops.padding import fit
from shardc.program import Program


def deferrable(program: Program) -> frozenset[fx.Node]:
    """The calls that may run once for several backwards, on the sums of what each backward has for them.

    An all_reduce that ends in gradients of parameters, through nothing but linear ops of such alone, and these ops. So
    a reduce_scatter under stage 1 of ``Zero``; elsewhere it makes a gradient smaller, and is not put off.
    """
    zero = program.options.zero
    kinds = {"all_reduce", "reduce_scatter"} if zero is not None and zero.stage == 1 else {"all_reduce"}
    parameters = _gradients_of_parameters(program)
    ends: set[fx.Node] = set()  # linear ops whose value goes to gradients of parameters alone
    found: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        users = set(node.users) - {program.output_node}
        is_result = program.output_node in node.users
        if node.op != "call_function" or not users <= ends | found or (is_result and node not in parameters):
            continue
        sent = members(node)
        if sent and all(each.kind in kinds and each.args[1] == "sum" for each in sent):
            found.add(node)
        elif _is_linear(program, node):
            ends.add(node)
    return frozenset(_closed(program, found))


def _gradients_of_parameters(program: Program) -> set[fx.Node]:
    """Results that are gradients of parameters and nothing else."""
    parameters, ends = set(parameters_of(program).values()), list(ends_of(program))
    others = {node for output, owner, node in ends if output.kind != "gradient" or owner not in parameters}
    return {node for *_, node in ends if node is not None} - others


def _is_linear(program: Program, node: fx.Node) -> bool:
    if is_getitem(node) or node.target is fit:
        return True
    if sent := members(node):
        return all(each.kind != "mask_padding" and each.args[1] not in ("max", "min") for each in sent)
    if node.target in EXCHANGES:
        return False  # its local types do not say its rule
    given = frozenset(i for i, taken in enumerate(operands(node)) if taken is not None)
    return given in program.rule(node).linear


def _closed(program: Program, reductions: set[fx.Node]) -> set[fx.Node]:
    """The reductions and what follows, without those that something else is joined to on the way."""
    while True:
        reached = {node: descendants(node) - {program.output_node} for node in reductions}
        closed = set().union(*reached.values())
        open_ends = {each for each in closed - reductions if not set(each.all_input_nodes) <= closed}
        if not open_ends:
            return closed
        reductions = {node for node in reductions if not reached[node] & open_ends}
