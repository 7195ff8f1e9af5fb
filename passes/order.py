"""The passes of the compiler, in order. Each is one function ``Program -> Program`` in the file of its name.

A pass may change its argument's graph; ``run_passes`` hands it a copy of a program that is kept.

A program has a level, which names its invariants; ``verify`` checks them after every pass:

==========  ====================================================================================================
captured    every value has a type; every op is pure
canonical   fewer kinds of op; after keep_dims every product of matrices is a ``dot`` over the model's own dims
annotated   every value has a sharding, though the operands of an op may not fit together
agreed      the operands of every op fit its rule; a ``reshard`` stands wherever a sharding changes
lowered     no ``reshard`` is left, only collectives. Types are still those of whole values
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
    # Captured: the ops of torch's trace.
    cut_stages,  # the pipeline stage of each call
    canonicalize,  # losses, means, dropout and views in few ops that have rules
    # Canonical: from here on a cut can pass wherever dims correspond.
    keep_dims,  # contractions keep the model's dims
    order_positions,  # positions in zigzag order, if the user asks for it
    cut_blocks,  # a cut of a fused q, k, v weight becomes a cut of each block
    propagate,  # a sharding on every value, from the few that the user annotated
    # Annotated: shardings are a wish; ops are unchanged.
    decompose,  # softmax over a cut vocabulary and the like, as local work and small reductions
    insert_reshards,  # a reshard wherever producer and consumer differ
    # Agreed: each op can compute on shards; between ops values change their sharding.
    store,  # parameters are cut further between uses, as ZeRO says
    accumulate,  # sums over microbatches come before sums over ranks
    lower_reshards,  # each reshard as the cheapest collectives
    # Lowered: fuse_collectives settles the collectives; later passes move and group them.
    fuse_collectives,  # fewer and cheaper collectives
    mask_padding,  # ops do not see the padding at the end of an unevenly cut dim
    offload,  # parameters stored in host memory or in files
    rematerialize,  # save values for backward, or compute them again
    cut_saved,  # cut saved values over more axes, or move them to host memory or files
    bucket_collectives,  # several collectives as one
    encode_collectives,  # codes in place of values, if the user asks for it
    chunk_dots,  # products in chunks, one sent while another is multiplied, if the user asks for it
    overlap_collectives,  # work between a collective and its first reader
    # Localized: the program that each rank runs.
    localize,  # local shapes, one text for all ranks
)

# Milestones, for code that looks at a program between passes.
UNANNOTATED: Pass = keep_dims  # up to here passes read no annotations but those of outputs and modules
PROPAGATED: Pass = propagate  # every value has a sharding
SETTLED: Pass = fuse_collectives  # later passes join, move and repeat collectives, but reduce and gather nothing new
PLACED: Pass = offload  # up to here no pass reads an option of LATE
LATE = ("remat", "saved", "bucket", "overlap")  # options of the passes after PLACED
WHOLE, LOCAL = PASSES[-2:]  # their programs: the last one in global shapes, and the one that ranks run
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
    """Run the passes that follow ``after`` (by default all), up to and including ``until``; verify each new program.

    ``watch`` is called with each pass's name, the program after it and the seconds it took. ``keep``: the passes whose
    programs later passes must not change; the first program is never changed. ``is_verified`` is false for programs
    that are only priced. Raises an InternalError for any error of a pass that is not about the user's input.
    """
    is_kept = True
    for run in PASSES[0 if after is None else PASSES.index(after) + 1 : PASSES.index(until) + 1]:
        start = time.perf_counter()
        with torch._C.DisableTorchFunction():  # the caller's modes, such as a default device, are for models
            before = program.copy() if is_kept else program
            program = run_pass(run, before)
            if program is not before and is_verified:
                verify(program)
        is_kept = run in keep
        watch(run.__name__, program, time.perf_counter() - start)
    return program


def run_pass(run: Callable[[Program], Program], program: Program) -> Program:
    """The program after a pass. Raises an InternalError for any error that is not about the user's input."""
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
    """The op that the variable ``node`` held in the innermost function of a traceback that has one."""
    found: fx.Node | None = None
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        found = node if isinstance(node, fx.Node) and node.op == "call_function" else found
        traceback = traceback.tb_next
    return found


CAPTURE = "capture"  # the name of the program before the first pass


class Snapshots(Mapping[str, Program]):
    """The program after capture and after each pass, by name.

    Most are rarely looked at. A program that was not kept is made again on request: by a function that was kept in its
    place, or by running the passes after the nearest kept program before it.
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
