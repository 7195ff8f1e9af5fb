"""What a collective is there for, in any plan that is cut like this one: said to who asks what would remove it."""

from __future__ import annotations

from torch import fx

from shardc.announcement import collective_at
from shardc.bucket import axes_of
from shardc.program import Program
from shardc.transfer import Movement, movements


def why_needed(program: Program, node: fx.Node) -> str:
    """One sentence of a collective of a lowered program in global shapes."""
    moved, axes = list(movements(program, node)), " and ".join(axes_of(node))
    kind, count = collective_at(program, node).kind, len(moved)
    ends: set[str] = {program.outputs[i].kind for movement in moved for i in movement.ends}
    if kind in ("all_reduce", "reduce_scatter"):
        return _of_sum(program, node, moved, axes, ends)
    if all(_is_parameter(program, movement) for movement in moved):
        what = (
            f"{count} parameters lie cut over {axes} and are"
            if count > 1
            else f"a parameter lies cut over {axes} and is"
        )
        return f"{what} computed with whole: a rank is sent what it lacks"
    if kind == "all_to_all":
        return (
            f"the value is made cut over {axes} along one dim and read cut along another: ranks hold what others read"
        )
    if kind == "collective_permute":
        return f"along a dim that {axes} cuts, each rank reads what its neighbours hold"
    return f"the value is made cut over {axes} and read whole: a rank is sent what it lacks"


def _of_sum(program: Program, node: fx.Node, moved: list[Movement], axes: str, ends: set[str]) -> str:
    inputs = {part.name for pin in program.pins if pin.kind == "input" for part in pin.sharding.cut_axes}
    if ends == {"gradient"} and set(axes_of(node)) <= inputs:
        names = [program.outputs[i].name for movement in moved for i in movement.ends]
        what = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        return (
            f"the gradient of {what} is a sum over the batch, of which each rank along {axes} has a part: "
            "every plan that cuts the batch adds it up once a step"
        )
    if "output" in ends or all(not program.value_type(program.value(each.made)).shape for each in moved):
        return f"it is a sum over what {axes} cuts, of which each rank has a part; it is but a number or an output"
    return f"it is a sum over a dim that {axes} cuts, of which each rank has a part: whoever reads it needs all parts"


def _is_parameter(program: Program, movement: Movement) -> bool:
    kinds = dict(zip(program.placeholders, (put.kind for put in program.inputs), strict=True))
    return kinds.get(movement.made) in ("parameter", "buffer")
