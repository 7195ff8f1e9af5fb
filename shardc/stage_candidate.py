"""Changes of a pipeline's stages that might let less cross between them: where they begin, or how many there are.

The nearest modules first; last comes what lets nothing cross for sure: one stage, its ranks given to another axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from shardc.cause import Crossed
from shardc.change import Change
from shardc.mesh import Mesh
from shardc.options import BALANCES, Pipeline
from shardc.program import Program
from shardc.stage_record import StageRecord
from shardc.stage_units import prefixes


def stage_candidates(program: Program, cause: Crossed, is_late: bool, mesh: Mesh, count: int) -> list[Change]:
    """At most ``count`` changes for a message between stages; ``is_late``: it goes when all microbatches are done."""
    pipeline = program.options.pipeline
    assert pipeline is not None
    found = [
        *(_on_one_rank(pipeline, cause, mesh) if is_late else ()),
        *_other_beginnings(program, pipeline, cause),
        *(Change(stages=(("balance", each), *_freely(pipeline))) for each in BALANCES if each != pipeline.balance),
    ]
    return [*found[: count - 1], _one_stage(program, pipeline, mesh)]


def _freely(pipeline: Pipeline) -> tuple[tuple[str, None], ...]:
    """Stages begin where they are even."""
    return (("cuts", None),) if pipeline.cuts else ()


def _on_one_rank(pipeline: Pipeline, cause: Crossed, mesh: Mesh) -> Iterator[Change]:
    """Stages placed in a V, so that the first and the last are on one rank."""
    last = mesh.axis_size(pipeline.axis) - 1
    if pipeline.chunks_a_rank == 1 and {cause.source, cause.target} == {0, last}:
        yield Change(stages=(("schedule", "zb-v"), *_freely(pipeline)))


def _other_beginnings(program: Program, pipeline: Pipeline, cause: Crossed) -> Iterator[Change]:
    """A stage between the two begins with another module, the nearest first; all other stages as they do."""
    begin, now = _beginnings(program), [path for path, _ in StageRecord(program).modules]
    if not all(path in begin for path in now[1:]):
        return  # a stage begins outside of all modules, which no glob names
    places = [0, *(begin[path] for path in now[1:]), inf]
    low, high = sorted((cause.source, cause.target))
    for stage in range(low + 1, high + 1):
        before, here, after = places[stage - 1 : stage + 2]
        others = [path for path, place in begin.items() if before < place < after and place != here]
        for path in sorted(others, key=lambda path: (path.count("."), abs(begin[path] - here))):
            yield Change(stages=(("cuts", (*now[1:stage], path, *now[stage + 1 :])),))


def _beginnings(program: Program) -> dict[str, int]:
    """The modules by the place of their first call of forward; of those that begin at one place the outermost."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    forward = [node for node in program.calls if program.source(node).phase == "forward" and not program.causes(node)]
    for place, node in enumerate(sorted(forward, key=lambda node: program.source(node).ordinal)):
        path = program.source(node).module
        fresh = [each for each in prefixes(path) if each not in seen]
        found.update(dict.fromkeys(fresh[:1], place))
        seen.update(fresh)
    return found


def _one_stage(program: Program, pipeline: Pipeline, mesh: Mesh) -> Change:
    """The pipeline's ranks given to the axis that cuts the batch, else to any other, else left out."""
    sizes = mesh.sizes
    freed, sizes[pipeline.axis] = sizes[pipeline.axis], 1
    data = [part.name for pin in program.pins if pin.kind == "input" for part in pin.sharding.cut_axes]
    other = next((name for name in [*data, *sizes] if name in sizes and name != pipeline.axis), None)
    if other is not None:
        sizes[other] *= freed
    return Change(stages=_freely(pipeline), mesh=tuple(sizes.items()))
