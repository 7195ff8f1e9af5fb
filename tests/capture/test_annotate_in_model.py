"""shardc.annotate in a model, and patterns of modules and outputs, place values and gradients and change no number."""

from __future__ import annotations

import torch
from printed import after, block, compiled, parameter, printed, value
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.program.program import Program
from shardc.runtime.simulator import simulate

MESH = Mesh(dp=2, tp=2)


def test_annotate_places_a_value_and_its_gradient() -> None:
    """What comes in otherwise is resharded before, and lies as annotated from there on; so does the gradient."""

    def double(x: Tensor) -> Tensor:
        return shardc.annotate(x.neg(), P(None, None, "dp")).square()

    program = compiled(double, MESH, {"x": P("dp")}, train=True, x=parameter(4, 3, 6))
    assert printed(program.at("insert_reshards")) == block(
        """
        x: f32[4@dp, 3, 6]
        tangent(output): f32[4, 3, 6@dp]
        neg: f32[4@dp, 3, 6] = neg(x)
        reshard: f32[4, 3, 6@dp] = reshard(neg)
        annotate: f32[4, 3, 6@dp] = shardc.annotate(reshard, "-,-,dp")
        pow_1: f32[4, 3, 6@dp] = pow(annotate, 2)
        pow_2: f32[4, 3, 6@dp] = pow(annotate, 1.0)
        mul: f32[4, 3, 6@dp] = mul(pow_2, 2.0)
        mul_1: f32[4, 3, 6@dp] = mul(tangent(output), mul)
        annotate_1: f32[4, 3, 6@dp] = shardc.annotate(mul_1, "-,-,dp")
        reshard_1: f32[4@dp, 3, 6] = reshard(annotate_1)
        neg_1: f32[4@dp, 3, 6] = neg(reshard_1)
        output: pow_1
        gradient x: neg_1
        """
    )


def test_a_value_that_is_annotated_as_whole_is_whole() -> None:
    found = after("fuse_collectives", lambda x: shardc.annotate(x.exp(), P()) * 2, MESH, {"x": P("dp")}, x=value(4, 6))
    assert 'all_gather_dp: f32[4, 6] = all_gather(exp, ("dp",), 0)\nannotate: f32[4, 6]' in found


def test_an_open_dim_of_an_annotation_takes_what_comes() -> None:
    def mark(spec: P) -> str:
        return after("propagate", lambda x: shardc.annotate(x.exp(), spec), MESH, {"x": P("dp", "tp")}, x=value(4, 6))

    assert 'annotate: f32[4@dp, 6@tp] = shardc.annotate(exp, "?,tp")' in mark(P(P.OPEN, "tp"))
    assert 'annotate: f32[4@dp, 6@tp] = shardc.annotate(exp, "dp,...")' in mark(P("dp", ...))
    assert 'annotate: f32[4, 6@tp] = shardc.annotate(exp, "-,tp")' in mark(P(None, "tp"))


def test_a_partial_sum_is_reduced_to_where_it_is_annotated() -> None:
    """A sequence that is cut outside the two weights: Megatron's all_reduce becomes a reduce_scatter."""

    def mlp(x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        hidden = shardc.annotate((x @ u).relu(), P(None, None, "tp"))
        return shardc.annotate(hidden @ d, P(None, "tp"))

    tensors = {"x": value(4, 8, 6), "u": parameter(6, 16), "d": parameter(16, 6)}
    program = compiled(mlp, MESH, {"x": P()}, **tensors)
    assert [(each.kind, each.local_shape_out) for each in program.collectives] == [("reduce_scatter", (4, 4, 6))]


def test_one_value_may_be_annotated_in_two_ways() -> None:
    def both(x: Tensor) -> Tensor:
        return shardc.annotate(x, P("dp")).sum(0) + shardc.annotate(x, P(None, "dp")).sum(1)

    program = compiled(both, MESH, train=True, x=parameter(4, 4)).at("propagate")
    assert {name: str(program.sharding(node)) for name, node in marks(program).items()} == {
        "annotate": "[_@dp, _]",
        "annotate_1": "[_, _@dp]",
        "annotate_2": "[_, _@dp]",
        "annotate_3": "[_@dp, _]",
    }


def marks(program: Program) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in program.calls if node.name.startswith("annotate")}


def test_a_lower_priority_number_of_an_annotation_speaks_first() -> None:
    def add(first: int, second: int) -> str:
        def function(x: Tensor) -> Tensor:
            one = shardc.annotate(x.exp(), P("tp", priority=first))
            return one + shardc.annotate(x.sin(), P(None, "tp", priority=second))

        return after("propagate", function, MESH, x=value(4, 4))

    assert "add: f32[4@tp, 4] = add(annotate, annotate_1)" in add(0, 0)
    assert "add: f32[4@tp, 4] = add(annotate, annotate_1)" in add(1, 2)
    assert "add: f32[4, 4@tp] = add(annotate, annotate_1)" in add(2, 1)


def test_an_annotation_cuts_each_of_several_blocks() -> None:
    def halves(x: Tensor) -> Tensor:
        one, other = shardc.annotate(x.exp(), P(None, shardc.blocks(2, "tp"))).chunk(2, 1)
        return one * other

    assert "split: (f32[4, 4@tp], f32[4, 4@tp]) = split(annotate, 4, 1)" in after(
        "propagate", halves, MESH, x=value(4, 8)
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "hidden": x}


def compile_model(annotations: dict[str, P]) -> shardc.Compiled:
    """The model compiled, whose values and gradients on virtual ranks are those of eager."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 8, dtype=torch.float64)
    found = shardc.compile(model, MESH, annotations, args=(x,))
    outputs, gradients = found.run(simulate, found.program, (x,), {})
    expected = model(x)
    expected["loss"].backward()
    torch.testing.assert_close(outputs, {name: tensor.detach() for name, tensor in expected.items()})
    torch.testing.assert_close(gradients, {name: each.grad for name, each in model.named_parameters()})
    return found


def test_a_module_pattern_places_every_output_it_matches_and_the_gradients() -> None:
    program = compile_model({"x": P("dp"), "module:layers.*": P("dp", "tp")}).at("propagate")
    found = [(program.source(node).module, str(program.sharding(node))) for node in marks(program).values()]
    assert found == [(f"layers.{i}", "[_@dp, _@tp]") for i in (0, 1, 1, 0)]


def test_an_output_pattern_says_how_an_output_leaves() -> None:
    annotations = {"x": P("dp"), "layers.1.weight": P("tp")}
    assert str(compile_model(annotations).shardings["hidden"]) == "[_@dp, _@tp]"
    assert str(compile_model(annotations | {"output:hid*": P()}).shardings["hidden"]) == "[_, _]"
    assert str(compile_model(annotations | {"output:hidden": P(None, "dp")}).shardings["hidden"]) == "[_, _@dp]"
