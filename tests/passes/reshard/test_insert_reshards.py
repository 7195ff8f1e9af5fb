"""insert_reshards: a visible reshard wherever what a value has is not what an op wants."""

from __future__ import annotations

from printed import after, block, compiled, parameter, printed, value
from torch import Tensor

from shardc import Mesh, P
from shardc.passes.reshard.choose_cuts import op_bytes, op_shardings
from shardc.program.provenance import cause_text

MESH = Mesh(dp=2, tp=4)
ONE = Mesh(a=2)


def test_a_partial_sum_rides_through_linear_ops_to_where_it_is_smallest() -> None:
    def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return ((x @ w).view(4, 2, 8).transpose(0, 1) * 3) @ v

    tensors = {"x": value(8, 8), "w": parameter(8, 8), "v": parameter(8, 4)}
    assert after("insert_reshards", chain, MESH, {"w": P("tp")}, **tensors) == block(
        """
        w: f32[8@tp, 8]
        v: f32[8, 4]
        x: f32[8, 8@tp]
        dot: f32[8, 8]{sum tp} = dot(x, w, "a b, b c -> a c")
        reshape: f32[4, 2, 8]{sum tp} = reshape(dot, [4, 2, 8])
        permute: f32[2, 4, 8]{sum tp} = permute(reshape, [1, 0, 2])
        mul: f32[2, 4, 8]{sum tp} = mul(permute, 3)
        dot_1: f32[2, 4, 4]{sum tp} = dot(mul, v, "a b c, c d -> a b d")
        reshard: f32[2, 4, 4] = reshard(dot_1)
        output: reshard
        """
    )


def test_a_partial_sum_is_reduced_before_an_op_that_would_make_it_larger() -> None:
    tensors = {"x": value(8, 8), "w": parameter(8, 4), "v": parameter(4, 16)}
    assert after("insert_reshards", lambda x, w, v: (x @ w) @ v, MESH, {"w": P("tp")}, **tensors) == block(
        """
        w: f32[8@tp, 4]
        v: f32[4, 16]
        x: f32[8, 8@tp]
        dot: f32[8, 4]{sum tp} = dot(x, w, "a b, b c -> a c")
        reshard: f32[8, 4] = reshard(dot)
        dot_1: f32[8, 16] = dot(reshard, v, "a b, b c -> a c")
        output: dot_1
        """
    )


def test_a_partial_sum_with_two_users_is_reduced_once() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.relu() * y.t()

    assert after("insert_reshards", twice, MESH, {"w": P("tp")}, x=value(8, 8), w=parameter(8, 8)) == block(
        """
        w: f32[8@tp, 8]
        x: f32[8, 8@tp]
        dot: f32[8, 8]{sum tp} = dot(x, w, "a b, b c -> a c")
        reshard: f32[8, 8] = reshard(dot)
        relu: f32[8, 8] = relu(reshard)
        permute: f32[8, 8] = permute(reshard, [1, 0])
        mul: f32[8, 8] = mul(relu, permute)
        output: mul
        """
    )


def test_a_maximum_over_a_cut_dim_is_a_partial_maximum() -> None:
    annotations = {"x": P("dp", "tp"), "output:output": P("dp")}
    assert after("insert_reshards", lambda x: x.amax(1) * 2, MESH, annotations, x=value(8, 8)) == block(
        """
        x: f32[8@dp, 8@tp]
        amax: f32[8@dp]{max tp} = amax(x, (1,))
        reshard: f32[8@dp] = reshard(amax)
        mul: f32[8@dp] = mul(reshard, 2)
        output: mul
        """
    )


def test_a_weight_that_is_cut_over_the_batch_axis_is_made_whole_and_its_gradient_cut() -> None:
    program = compiled(
        lambda x, w: (x @ w).relu().sum(), ONE, {"x": P("a"), "w": P("a")}, True, x=value(8, 6), w=parameter(6, 16)
    )
    assert printed(program.at("insert_reshards")) == block(
        """
        w: f32[6@a, 16]
        x: f32[8@a, 6]
        tangent(output): f32[]
        reshard: f32[6, 16] = reshard(w)
        dot: f32[8@a, 16] = dot(x, reshard, "a b, b c -> a c")
        relu: f32[8@a, 16] = relu(dot)
        sum_1: f32[]{sum a} = sum(relu)
        reshard_1: f32[] = reshard(sum_1)
        expand_1: f32[8@a, 16] = expand(tangent(output), [8, 16])
        threshold_backward: f32[8@a, 16] = threshold_backward(expand_1, relu, 0)
        dot_1: f32[6, 16]{sum a} = dot(x, threshold_backward, "a b, a c -> b c")
        reshard_2: f32[6@a, 16] = reshard(dot_1)
        output: reshard_1
        gradient w: reshard_2
        """
    )
    assert [each.kind for each in program.collectives] == ["all_gather", "all_reduce", "reduce_scatter"]


def test_where_one_axis_would_cut_two_dims_an_input_wins_over_a_larger_parameter() -> None:
    annotations = {"x": P("a"), "w": P(None, "a")}
    assert after("insert_reshards", lambda x, w: x @ w, ONE, annotations, x=value(8, 6), w=parameter(6, 64)) == block(
        """
        w: f32[6, 64@a]
        x: f32[8@a, 6]
        reshard: f32[6, 64] = reshard(w)
        dot: f32[8@a, 64] = dot(x, reshard, "a b, b c -> a c")
        output: dot
        """
    )


def test_of_equals_the_larger_value_keeps_its_cut_and_an_output_keeps_the_propagated_one() -> None:
    annotations = {"x": P(None, "a"), "y": P(None, "a")}
    assert after("insert_reshards", lambda x, y: x.t() @ y, ONE, annotations, x=value(8, 6), y=value(8, 16)) == block(
        """
        x: f32[8, 6@a]
        y: f32[8, 16@a]
        reshard: f32[8, 6] = reshard(x)
        dot: f32[6, 16@a] = dot(reshard, y, "a b, a c -> b c")
        output: dot
        """
    )


def test_a_reshard_records_both_shardings_its_reader_and_the_annotation() -> None:
    program = compiled(lambda x, w: x @ w, ONE, {"x": P("a"), "w": P("a")}, x=value(8, 6), w=parameter(6, 16))
    agreed = program.at("insert_reshards")
    assert [cause_text(agreed.causes(node)) for node in agreed.calls if agreed.causes(node)] == [
        "w is f32[6@a, 16], dot wants f32[6, 16]; a from w: P('a')"
    ]


def test_of_two_cuts_that_want_one_axis_the_cheaper_wins_where_both_are_inputs() -> None:
    """``y`` cuts the contracted factor of a and the last of b: gathering both is less than a sum over y."""
    program = compiled(
        lambda a, b: a @ b,
        Mesh(x=4, y=2),
        {"a": P("x", "y"), "b": P("x", "y"), "output:output": P("x", "y")},
        a=value(16, 16),
        b=value(16, 16),
    )
    assert [(each.kind, each.wire_bytes) for each in program.collectives] == [("all_gather", 128), ("all_gather", 384)]


def test_every_op_records_what_its_cuts_were_chosen_among_of_which_nothing_sends_less() -> None:
    def products(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return ((x @ y).relu() @ w).square()

    cuts = {"x": P("tp"), "y": P("dp", "tp")}
    made = compiled(products, MESH, cuts, x=value(64, 16), y=value(16, 8), w=parameter(8, 4))
    names, last = {node.name for node in made.at("decompose").calls}, {node.name: node for node in made.whole.calls}
    agreed, num_considered = made.at("insert_reshards"), []
    for node in (each for each in agreed.calls if each.name in names):
        choice = agreed.cut_choice(node)
        assert choice is not None, node
        assert node.name not in last or made.whole.cut_choice(last[node.name]) == choice, node
        num_considered.append(len(choice.considered))
        if not any(each.partial for each in choice.operands if each):  # else an open sum passes, in each way
            sent = [op_bytes(choice.tensors, op_shardings(choice.tensors, cuts)) for cuts in choice.considered]
            assert op_bytes(choice.tensors, choice) == min(sent), node
    assert max(num_considered) == 2
