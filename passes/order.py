"""The passes of the compiler, in order. Each is one function ``Program -> Program`` of the file of its name.

A pass may change the graph that it is given; ``run_passes`` gives it a copy of a program that is kept.

A program has a level, which says what holds of it; ``verify`` checks that after every pass:

==========  ====================================================================================================
captured    every value has a type; every op is pure
canonical   fewer kinds of op; after keep_dims every product of matrices is a ``dot`` over the model's own dims
annotated   every value has a sharding, though ops may read what does not fit together
agreed      every op reads what its rule says; wherever a sharding changes stands a ``reshard``
lowered     no ``reshard`` is left: collectives stand in their place. Types are still those of whole values
localized   types and sizes are those of one rank's shards: the program that every rank runs
==========  ====================================================================================================

Reshards and collectives are identities on whole values, so a program prints and runs on one device after every pass.
README.md beside this file tells the same story with examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType

import torch
from torch import fx

from shardc.language.errors import REPORT, CaptureError, FourPartError, InternalError
from shardc.program.program import Program

from .canonicalize.canonicalize import canonicalize
from .canonicalize.cut_stages import cut_stages
from .canonicalize.keep_dims import keep_dims
from .decompose.decompose import decompose
from .lower.bucket_collectives import bucket_collectives
from .lower.chunk_dots import chunk_dots
from .lower.cut_saved import cut_saved
from .lower.encode_collectives import encode_collectives
from .lower.fuse_collectives import fuse_collectives
from .lower.localize import localize
from .lower.mask_padding import mask_padding
from .lower.offload import offload
from .lower.overlap_collectives import overlap_collectives
from .lower.rematerialize import rematerialize
from .propagate.cut_blocks import cut_blocks
from .propagate.order_positions import order_positions
from .propagate.propagate import propagate
from .reshard.accumulate import accumulate
from .reshard.insert_reshards import insert_reshards
from .reshard.lower_reshards import lower_reshards
from .reshard.store import store
from .verify import verify

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (
    # Captured: the ops that torch gave.
    cut_stages,  # the stage of a pipeline that each call is part of
    canonicalize,  # losses, means, dropout and views in few ops that have rules
    # Canonical: from here on a cut can pass wherever dims correspond.
    keep_dims,  # contractions keep the model's dims
    order_positions,  # positions in zigzag, where the user wants that
    cut_blocks,  # a cut of a fused q, k, v weight becomes one of each block
    propagate,  # a sharding on every value, from the few that the user annotated
    # Annotated: shardings are a wish, and ops are as they were.
    decompose,  # softmax over a cut vocabulary and its like, as local work and small reductions
    insert_reshards,  # a reshard wherever producer and consumer differ
    # Agreed: each op can compute on shards; between ops values change their sharding.
    store,  # parameters are cut further between uses, as ZeRO says
    accumulate,  # sums over microbatches come before sums over ranks
    lower_reshards,  # each reshard as the cheapest collectives
    # Lowered: what is sent is settled after fuse_collectives; the rest moves and groups it.
    fuse_collectives,  # fewer and cheaper collectives
    mask_padding,  # where a dim is cut unevenly, ops do not see what is beyond its end
    offload,  # what is stored in host memory or in files
    rematerialize,  # what is saved for backward, and what backward computes again
    cut_saved,  # over which axes, beyond those of forward, and where
    bucket_collectives,  # several collectives as one
    encode_collectives,  # codes in place of values, where the user wants that
    chunk_dots,  # products in chunks, of which the next is on its way, where the user wants that
    overlap_collectives,  # work between a collective and its first reader
    # Localized: the program that each rank runs.
    localize,  # local shapes, one text for all ranks
)

# Milestones, for those who look at a program in between.
UNANNOTATED: Pass = keep_dims  # up to here no pass reads an annotation, but for those of outputs and modules
PROPAGATED: Pass = propagate  # every value has a sharding
SETTLED: Pass = fuse_collectives  # later passes join, move and repeat collectives, but reduce and gather nothing new
PLACED: Pass = offload  # up to here no pass reads one of LATE
LATE = ("remat", "saved", "bucket", "overlap")  # options of the passes after it
WHOLE, LOCAL = PASSES[-2:]  # the last program in global shapes, and the one that ranks run
KEPT = (UNANNOTATED, WHOLE, LOCAL)  # passes whose programs a compiled model keeps

Watcher = Callable[[str, Program, float], None]


def run_passes(
    program: Program,
    watch: Watcher = lambda name, program, seconds: None,
    after: Pass | None = None,
    until: Pass = PASSES[-1],
    keep: Collection[Pass] = (),
    is_verified: bool = True,
) -> Program:
    """Run every pass, or those after one, up to and including another, and verify each new program.

    ``watch`` is called with each pass's name, the program after it and the seconds it took. ``keep``: the passes whose
    programs later passes must not change; the first program is never changed. ``is_verified`` is false for programs
    that are only priced. Any other error of a pass than one about the user's input is raised as an InternalError.
    """
    is_kept = True
    for run in PASSES[0 if after is None else PASSES.index(after) + 1 : PASSES.index(until) + 1]:
        start = time.perf_counter()
        with torch._C.DisableTorchFunction():  # modes of the caller, as a default device is one, are for models
            before = program.copy() if is_kept else program
            program = run_pass(run, before)
            if program is not before and is_verified:
                verify(program)
        is_kept = run in keep
        watch(run.__name__, program, time.perf_counter() - start)
    return program


def run_pass(run: Callable[[Program], Program], program: Program) -> Program:
    """The program after a pass. Raises an InternalError for any other error than one about the user's input."""
    try:
        return run(program)
    except (FourPartError, CaptureError):
        raise
    except Exception as error:
        node = _op_at(error.__traceback__)
        what = "in no op that is known" if node is None else f"at {node.target}, {program.source(node).place}"
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InternalError(f"pass {run.__name__}", what, problem, REPORT) from error


def _op_at(traceback: TracebackType | None) -> fx.Node | None:
    """The op that the innermost function of a traceback had in hand, in a variable ``node``."""
    found: fx.Node | None = None
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        found = node if isinstance(node, fx.Node) and node.op == "call_function" else found
        traceback = traceback.tb_next
    return found


CAPTURE = "capture"  # the name of the program before the first pass


class Snapshots(Mapping[str, Program]):
    """The program after capture and after each pass, by name.

    Most are looked at rarely: one that was not kept is made again when it is asked for, by the passes after the nearest
    one before it that was, or by a function that is kept in its place.
    """

    def __init__(self, kept: Mapping[str, Program | Callable[[], Program]]) -> None:
        self._programs = dict(kept)

    def __getitem__(self, name: str) -> Program:
        places = {each: i for i, each in enumerate(self)}
        until = places[name]
        found = self._programs.get(name)
        if callable(found):
            found = self._programs[name] = found()
        if found is None:
            start = max((each for each in self._programs if places[each] < until), key=places.__getitem__)
            last = places[start]
            after = PASSES[last - 1] if last else None
            run_passes(self[start], self._keep, after, PASSES[until - 1], PASSES)
        return self[name] if found is None else found

    def has(self, run: Pass) -> bool:
        """Whether the program after a pass is kept, and need not be made again."""
        return run.__name__ in self._programs

    def _keep(self, name: str, program: Program, seconds: float) -> None:
        self._programs.setdefault(name, program)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return iter((CAPTURE, *(each.__name__ for each in PASSES)))

    def __len__(self) -> int:
        return 1 + len(PASSES)
