"""What is read off a ledger is what its blocks add up to: the curve, the peak, the classes, and who is alive there."""

from __future__ import annotations

from collections import Counter

import gpt
import pytest

from shardc import Mesh, Zero, compile
from shardc.api import Compiled
from shardc.costs.ledger import Block, Ledger, bytes_of
from shardc.costs.memory import memory_by_rank, memory_curve
from shardc.costs.replay import ledgers_of
from shardc.options import Pipeline

OFFLOADED = Pipeline(microbatches=4, schedule="interleaved", chunks=3, offload=True)


def compiled(mesh: Mesh, pipeline: Pipeline | None = None, stage: int | None = None) -> Compiled:
    model, args, _, _ = gpt._target(gpt.Config(layers=4), gpt.DATA)
    zero = None if stage is None else Zero("dp", stage)  # type: ignore[arg-type]
    return compile(model, mesh, gpt.DATA, args=args, pipeline=pipeline, zero=zero)


def test_a_block_is_alive_while_anything_holds_it() -> None:
    ledger, (a, b, c) = Ledger(()), (Block((None, 0), size, kind) for size, kind in ((4, "x"), (8, "y"), (2, "x")))  # type: ignore[arg-type]
    for blocks in ((a,), (b,), (a,)):
        ledger.hold(blocks)
    ledger.end_action("first")
    for blocks in ((b,), (a,)):
        ledger.drop(blocks)
    ledger.hold((c,))
    ledger.end_action("second")
    assert ledger.balances() == [0, 4, 12, 4, 6]
    assert ledger.highs() == [("first", 12), ("second", 12)]
    assert list(ledger.most()) == [a, b]
    assert list(ledger.most(lambda block: block.kind == "x")) == [a, c]


@pytest.mark.parametrize("stage", [None, 3])
def test_the_peak_is_what_its_values_and_its_classes_add_up_to(stage: int | None) -> None:
    """The largest part of it is in the blocks, whose modules the values tell."""
    program = compiled(Mesh(dp=2), stage=stage).program
    (ledger,), (memory,), curve = ledgers_of(program), memory_by_rank(program), memory_curve(program)
    at_peak = ledger.most()
    assert bytes_of(at_peak) == memory["peak"] - memory["optimizer"] == max(ledger.balances())
    by_class, by_module = Counter[str](), Counter[str]()
    for block in at_peak:
        by_class[block.kind] += block.nbytes
        by_module[program.source(block.value[0]).module.partition(".")[0]] += block.nbytes
    levels = {kind: ledger.curve(kind) for kind in curve.changes}
    place = [sum(each) for each in zip(*levels.values(), strict=True)].index(bytes_of(at_peak))
    assert by_class == Counter({kind: level[place] for kind, level in levels.items() if level[place]})
    assert by_module["blocks"] > sum(by_module.values()) / 3, by_module


@pytest.mark.parametrize("pipeline", [Pipeline(microbatches=4), OFFLOADED], ids=["1f1b", "offload"])
def test_the_actions_of_a_rank_reach_its_peak_and_all_of_its_bytes_have_a_value(pipeline: Pipeline) -> None:
    program = compiled(Mesh(dp=2, pp=2), pipeline).program
    for ledger, memory in zip(ledgers_of(program), memory_by_rank(program), strict=True):
        states = 0 if pipeline.offload else memory["optimizer"]
        assert max(nbytes for _, nbytes in ledger.highs()) == bytes_of(ledger.most()) == memory["peak"] - states
        assert bytes_of(ledger.saved) == memory["saved"] <= memory["peak"]
