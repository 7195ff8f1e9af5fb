"""The passes, in order: read this to know the compiler. After each, the program is verified.

captured --canonicalize, keep_dims--> canonical --propagate, decompose--> annotated --insert_reshards, store--> agreed
--lower_reshards, fuse_collectives, mask_padding, rematerialize, bucket_collectives--> lowered --localize--> localized
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardc.program.program import Program

from .canonicalize.canonicalize import canonicalize
from .canonicalize.cut_stages import cut_stages
from .canonicalize.keep_dims import keep_dims
from .decompose.decompose import decompose
from .lower.accumulate import accumulate
from .lower.bucket_collectives import bucket_collectives
from .lower.fuse_collectives import fuse_collectives
from .lower.localize import localize
from .lower.mask_padding import mask_padding
from .lower.overlap_collectives import overlap_collectives
from .lower.rematerialize import rematerialize
from .propagate.propagate import propagate
from .reshard.insert_reshards import insert_reshards
from .reshard.lower_reshards import lower_reshards
from .reshard.store import store
from .verify import verify

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (
    cut_stages,  # which stage of a pipeline each call is part of
    canonicalize,  # losses, means, dropout and views in few ops that have rules
    keep_dims,  # contractions keep the model's dims
    propagate,  # a sharding on every value
    decompose,  # softmax over a cut vocabulary and its like, as local work and small reductions
    insert_reshards,  # a reshard wherever producer and consumer differ
    store,  # parameters lie between uses as ZeRO says
    accumulate,  # sums over microbatches before sums over ranks
    lower_reshards,  # each reshard as the cheapest collectives
    fuse_collectives,  # fewer and cheaper ones
    mask_padding,  # where a dim is cut unevenly, ops do not see what is beyond its end
    rematerialize,  # what is saved for backward, and what is made again
    bucket_collectives,  # several that go together as one
    overlap_collectives,  # work between a collective and its first reader
    localize,  # local shapes, one text for all ranks
)

UNANNOTATED: Pass = keep_dims  # up to here no pass reads an annotation, but for those of outputs and modules
PROPAGATED: Pass = propagate  # every value has a sharding
SETTLED: Pass = fuse_collectives  # no later pass adds or removes a collective, or gives it another value

Watcher = Callable[[str, Program, float], None]


def run_passes(
    program: Program,
    watch: Watcher = lambda name, program, seconds: None,
    after: Pass | None = None,
    until: Pass = PASSES[-1],
) -> Program:
    """Run every pass, or those after one, until another; ``watch`` is told each one's name, its program and seconds."""
    for run in PASSES[0 if after is None else PASSES.index(after) + 1 : PASSES.index(until) + 1]:
        start = time.perf_counter()
        program = run(program)
        verify(program)
        watch(run.__name__, program, time.perf_counter() - start)
    return program
