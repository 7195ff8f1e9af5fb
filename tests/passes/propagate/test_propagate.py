"""propagate: a sharding on every value, from the few that the user fixed."""

from __future__ import annotations

from printed import after, block, compiled, parameter, printed, value
from torch import Tensor

import shardc
from shardc import Mesh, P

MESH = Mesh(dp=2, tp=4)


def test_cuts_flow_forward_and_a_dot_unites_those_of_its_operands() -> None:
    annotations = {"x": P("dp"), "w": P(None, "tp")}
    assert after("propagate", lambda x, w: (x @ w).relu(), MESH, annotations, x=value(8, 6), w=parameter(6, 16)) == (
        block(
            """
            w: f32[6, 16@tp]
            x: f32[8@dp, 6]
            dot: f32[8@dp, 16@tp] = dot(x, w, "a b, b c -> a c")
            relu: f32[8@dp, 16@tp] = relu(dot)
            output: relu
            """
        )
    )


def test_cuts_flow_backward_to_the_weight_that_the_user_did_not_name() -> None:
    """Megatron's pair from its second weight alone: what is contracted over a cut dim is cut there too."""

    def mlp(x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return (x @ u).relu() @ d

    assert after("propagate", mlp, MESH, {"d": P("tp")}, x=value(8, 6), u=parameter(6, 16), d=parameter(16, 6)) == (
        block(
            """
            u: f32[6, 16@tp]
            d: f32[16@tp, 6]
            x: f32[8, 6]
            dot: f32[8, 16@tp] = dot(x, u, "a b, b c -> a c")
            relu: f32[8, 16@tp] = relu(dot)
            dot_1: f32[8, 6] = dot(relu, d, "a b, b c -> a c")
            output: dot_1
            """
        )
    )


def attention(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return (q * k + v) @ o


QKV = {"x": value(8, 6), "w": parameter(6, 24), "o": parameter(8, 6)}
IN_BLOCKS = block(
    """
    w: f32[6, (3 8@tp)]
    o: f32[8@tp, 6]
    x: f32[8, 6]
    dot: f32[8, (3 8@tp)] = dot(x, w, "a b, b c -> a c")
    split: (f32[8, 8@tp], f32[8, 8@tp], f32[8, 8@tp]) = split(dot, 8, -1)
    mul: f32[8, 8@tp] = mul(getitem, getitem_1)
    add: f32[8, 8@tp] = add(mul, getitem_2)
    dot_1: f32[8, 6] = dot(add, o, "a b, b c -> a c")
    output: dot_1
    """
)


def test_a_cut_that_flows_back_through_a_split_cuts_each_block_of_the_fused_weight() -> None:
    assert after("propagate", attention, MESH, {"o": P("tp")}, **QKV) == IN_BLOCKS


def test_a_plain_cut_of_a_fused_weight_moves_into_its_blocks_with_a_note() -> None:
    program = compiled(attention, MESH, {"w": P(None, "tp")}, **QKV).at("propagate")
    assert printed(program) == IN_BLOCKS
    assert program.notes == (
        "w: w: P(None, 'tp') cuts each block that the model takes apart, [_, (_ 8@tp)], not the whole dim",
    )


def test_an_axis_on_an_input_outranks_the_same_axis_on_a_weight() -> None:
    annotations = {"x": P("tp"), "w": P(None, "tp")}
    assert after("propagate", lambda x, w: x @ w, MESH, annotations, x=value(8, 6), w=parameter(6, 16)) == block(
        """
        w: f32[6, 16@tp]
        x: f32[8@tp, 6]
        dot: f32[8@tp, 16] = dot(x, w, "a b, b c -> a c")
        output: dot
        """
    )


def test_a_lower_priority_number_speaks_first() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    tensors = {"x": value(8, 4), "y": value(8, 4)}
    first = after("propagate", add, MESH, {"x": P("tp"), "y": P(None, "tp")}, **tensors)
    second = after("propagate", add, MESH, {"x": P("tp", priority=1), "y": P(None, "tp")}, **tensors)
    assert "add: f32[8@tp, 4] = add(x, y)" in first
    assert "add: f32[8, 4@tp] = add(x, y)" in second


def test_a_gradient_has_the_sharding_of_its_parameter() -> None:
    """Without the tie it would lie as its operands: cut over the batch axis only where they are."""
    program = compiled(
        lambda x, w: (x @ w).sum(), MESH, {"x": P("dp"), "w": P("dp", "tp")}, True, x=value(8, 6), w=parameter(6, 16)
    )
    assert printed(program.at("propagate")) == block(
        """
        w: f32[6@dp, 16@tp]
        x: f32[8@dp, 6]
        tangent(output): f32[]
        dot: f32[8@dp, 16@tp] = dot(x, w, "a b, b c -> a c")
        sum_1: f32[] = sum(dot)
        expand_1: f32[8@dp, 16@tp] = expand(tangent(output), [8, 16])
        dot_1: f32[6@dp, 16@tp] = dot(x, expand_1, "a b, a c -> b c")
        output: sum_1
        gradient w: dot_1
        """
    )


def test_an_open_dim_is_inferred_and_a_whole_one_stays_whole() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    tensors = {"x": value(8, 8), "w": parameter(8, 16)}
    opened = after("propagate", product, MESH, {"x": P("dp", ...), "w": P("tp", None)}, **tensors)
    closed = after("propagate", product, MESH, {"x": P("dp"), "w": P("tp", None)}, **tensors)
    assert "x: f32[8@dp, 8@tp]\n" in opened
    assert "x: f32[8@dp, 8]\n" in closed


def test_a_dim_that_is_cut_and_open_is_cut_further_and_one_that_is_cut_is_not() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    tensors = {"x": value(8, 8), "y": value(8, 8)}
    opened = after("propagate", add, MESH, {"x": P(("dp", P.OPEN)), "y": P(("dp", "tp"))}, **tensors)
    closed = after("propagate", add, MESH, {"x": P("dp"), "y": P(("dp", "tp"))}, **tensors)
    other = after("propagate", add, MESH, {"x": P(("dp", P.OPEN)), "y": P(("tp", "dp"))}, **tensors)
    assert "x: f32[8@dp+tp, 8]\n" in opened
    assert "x: f32[8@dp, 8]\n" in closed
    assert "x: f32[8@dp, 8]\n" in other  # what an annotation says is never undone


def test_each_dim_has_its_own_priority_and_an_open_dim_opens_in_its_round() -> None:
    def add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + y) * z

    tensors = {"x": value(8, 8), "y": value(8, 8), "z": value(8, 8)}
    mesh = Mesh(a=2, b=2, c=2)
    last = {"x": P("a", "b", priority=(0, 2)), "z": P(P.OPEN, "c", priority=(0, 1))}
    assert "y: f32[8@a, 8@c]\n" in after("propagate", add, mesh, last, **tensors)
    assert "y: f32[8@a, 8@b]\n" in after("propagate", add, mesh, last | {"x": P("a", "b")}, **tensors)

    def both(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, y * z

    ends = {"x": P("a"), "z": P(None, "a")}
    at_once, later = P(P.OPEN, P.OPEN), P(P.OPEN, P.OPEN, priority=(1, 0))
    assert "y: f32[8@a, 8]\n" in after("propagate", both, mesh, ends | {"y": at_once}, **tensors)
    assert "y: f32[8, 8@a]\n" in after("propagate", both, mesh, ends | {"y": later}, **tensors)


def test_an_axis_that_two_dims_want_cuts_that_of_the_tensor_with_most_elements_on_a_rank() -> None:
    """Shardy takes the dim that is cut most."""

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin() + x

    def shardys(x: Tensor, y: Tensor) -> Tensor:
        most = P(None, ("b", "a"))
        return shardc.annotate(shardc.annotate(shardc.annotate(x * y, most).sin(), most) + x, most)

    annotations = {"x": P(P.OPEN, ("b", "a")), "y": P("b", P.OPEN), "output:output": P(...)}
    tensors = {"x": value(8, 8), "y": value(8, 8)}
    programs = [compiled(function, Mesh(a=2, b=4), annotations, **tensors) for function in (ours, shardys)]
    assert [str(program.shardings["output"]) for program in programs] == ["[_@b, _]", "[_, _@b+a]"]
    assert [sum(each.wire_bytes for each in program.collectives) for program in programs] == [60, 88]


def test_a_view_that_takes_a_cut_dim_apart_takes_its_axis_apart() -> None:
    def swap(x: Tensor) -> Tensor:
        return x.view(2, 4).transpose(0, 1).reshape(8)

    assert after("propagate", swap, MESH, {"x": P("tp")}, x=value(8)) == block(
        """
        x: f32[8@tp]
        reshape: f32[2@tp:(1)2, 4@tp:(2)2] = reshape(x, [2, 4])
        permute: f32[4@tp:(2)2, 2@tp:(1)2] = permute(reshape, [1, 0])
        reshape_1: f32[(4@tp:(2)2 2@tp:(1)2)] = reshape(permute, [8])
        output: reshape_1
        """
    )
