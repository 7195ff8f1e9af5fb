"""A program as lines that all ranks compare: the first that differs is named, on every rank."""

import copy

import torch
import torch.distributed as dist
from localized import row_parallel
from torch import nn

import shardc
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.runtime.agreement.agreement import agreement_on
from shardc.runtime.agreement.entry import Entry, Kind
from shardc.runtime.agreement.gate import Gate, first_difference
from shardc.runtime.agreement.program import ProgramText
from shardc.runtime.comm.distributed import make_device_mesh

MESH = Mesh(dp=2, tp=2)


def run_disagreement():
    program = row_parallel(MESH)
    if dist.get_rank() == 2:
        node = next(node for node in program.calls if node.name == "all_reduce_1")
        node.args = (*node.args[:2], "max")
    gate, text = Gate(agreement_on(make_device_mesh(MESH)), "Row", "1"), ProgramText(program, {})
    try:
        gate.enter(Entry(Kind.COMPILED, gate.digest, program=text.digest), {"program": text.__str__})
    except ShardingError as error:
        return str(error)


def test_ranks_with_different_programs_are_told_the_first_line_that_differs(gloo):
    messages = gloo.run(run_disagreement)
    assert len(set(messages)) == 1
    assert messages[0].splitlines() == [
        "ranks 0 and 2: each compares its program of Row, and they have different programs",
        "  rank 0 has",
        '    all_reduce_1 = all_reduce(sum_default, ("dp",), "sum"): f32[], forward',
        "  where rank 2 has",
        '    all_reduce_1 = all_reduce(sum_default, ("dp",), "max"): f32[], forward',
        "  give every rank the same model, annotations, options and inputs, and install the same versions",
    ]


class Constant(nn.Module):
    """Adds a tensor that is no buffer."""

    def __init__(self, value):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), [torch.full((8,), value)]

    def forward(self, x):
        return (self.linear(x) + self.table[0]).sum()


def text_of(model=None, annotations=None, **options):
    compiled = shardc.compile(
        model or Constant(1.0), MESH, annotations or {"x": P("dp")}, args=(torch.ones(4, 8),), **options
    )
    return ProgramText(compiled.program, compiled.convention.constants)


def test_what_a_line_says_in_its_comment_is_not_compared():
    one, other = "a\tx\nb = f(a)\tmodel.py:3", "a\ty\nb = g(a)\tmodel.py:4"
    assert first_difference((one, other)) == ("b = f(a)  # model.py:3", "b = g(a)  # model.py:4")


def test_a_line_that_one_rank_has_more_is_shown_alone():
    assert first_difference(("a\nb\nc", "a\nc")) == ("b", "nothing in its place")
    assert first_difference(("a", "a\nc")) == ("nothing in its place", "c")


def test_of_a_long_line_the_part_that_differs_is_shown():
    one, other = first_difference(("x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500))
    assert one.startswith("...x") and one.endswith("y...") and "a" in one and "b" in other
    assert len(one) < 210


def test_equal_models_have_equal_programs():
    model = Constant(1.0)
    assert text_of(model).digest == text_of(copy.deepcopy(model)).digest


def test_everything_that_differs_is_seen():
    texts = {
        "constant": text_of(Constant(2.0)),
        "annotation": text_of(annotations={"x": P("dp"), "linear.weight": P("tp")}),
        "zero": text_of(zero=shardc.Zero("dp", stage=2)),
        "precision": text_of(precision=shardc.Precision()),
        "bucket": text_of(bucket=7),
        "gradients": text_of(train=False),
    }
    digests = {name: text.digest for name, text in texts.items()}
    assert len({text_of().digest, *digests.values()}) == 1 + len(texts)
    lines = {name: first_difference((str(text_of()), str(text)))[1] for name, text in texts.items()}
    assert lines["zero"] == "option zero=Zero(axis='dp', stage=2)"
    assert lines["bucket"] == "option bucket=7"
    assert lines["annotation"] == "parameter linear.weight: f32[8@tp, 8], with a gradient  # linear.weight: P('tp')"
    assert lines["constant"].startswith("buffer table.0: f32[8], values ") or "values" in lines["constant"]
