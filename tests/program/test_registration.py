"""Rules for a user's own ops keep the op sharded; a rule that does not fit is refused at compilation at the latest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardingError, check_rule, register_rule
from shardc.language.rule import RULES
from shardc.program.traffic import fallbacks_of

MESH = Mesh(dp=2, tp=2)


@pytest.fixture(autouse=True)
def _table_as_before() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@torch.library.custom_op("tests::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@torch.library.custom_op("tests::matmul", mutates_args=())
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@torch.library.custom_op("tests::heads", mutates_args=())
def heads(x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(shape).clone()


@torch.library.custom_op("tests::scale_", mutates_args=("x",))
def scale_(x: Tensor) -> None:
    x.mul_(2)


rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
matmul.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
heads.register_fake(lambda x, shape: x.new_empty(shape))


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def compile(function: Callable[..., Tensor], annotations: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
    """The program, and its output beside the eager model's."""
    torch.manual_seed(0)
    model, x = Model(function).double(), torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        program = shardc.compile(model, MESH, annotations, args=(x,), train=False)
        return program, program.simulate(x)[0], model(x)


def num_fallbacks(program: Any) -> int:
    return len(fallbacks_of(program.at("fuse_collectives")))


def test_an_op_with_a_rule_of_the_users_stays_sharded() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight[:, 0].contiguous())

    annotations = {"x": P("dp")}
    program, found, expected = compile(norm, annotations)
    assert num_fallbacks(program) == 1 and len(program.collectives) == 1
    register_rule(rms_norm, "... d, d -> ... d", whole="d")
    program, found, expected = compile(norm, annotations)
    assert num_fallbacks(program) == 0 and not program.collectives
    torch.testing.assert_close(found, expected)


def test_a_factor_that_is_summed_leaves_one_reduction() -> None:
    register_rule(torch.ops.tests.matmul.default, "m k, k n -> m n", linear="0 1")
    program, found, expected = compile(matmul, {"x": P("dp", "tp"), "weight": P("tp")})
    assert [(each.kind, each.axes) for each in program.collectives] == [("all_reduce", ("tp",))]
    torch.testing.assert_close(found, expected)
    check_rule(matmul, torch.randn(6, 12).double(), torch.randn(12, 6).double())


def test_an_op_that_names_sizes_is_told_one_ranks() -> None:
    register_rule(heads, "b (h d) -> b h d", sizes=1)
    program, found, expected = compile(lambda x, weight: heads(x, [4, 2, 4]), {"x": P("dp", "tp")})
    assert num_fallbacks(program) == 0 and not program.collectives
    torch.testing.assert_close(found, expected)


def test_a_rule_may_depend_on_the_call() -> None:
    register_rule(heads, lambda call: "b t -> b t" if len(call.result.shape) == 2 else None, sizes=1)
    program, *_ = compile(lambda x, weight: heads(x, [4, 8]) + heads(x, [4, 2, 4]).sum((1, 2))[:, None], {"x": P("dp")})
    assert num_fallbacks(program) == 1


def test_a_rule_of_shardc_is_replaced_deliberately() -> None:
    program, *_ = compile(lambda x, weight: x.cumsum(1), {"x": P("dp")})
    assert not program.collectives
    register_rule(torch.ops.aten.cumsum.default, "b t -> b t", whole="b t", override=True)
    program, found, expected = compile(lambda x, weight: x.cumsum(1), {"x": P("dp")})
    assert [found.kind for found in program.collectives] == ["all_gather"]
    torch.testing.assert_close(found, expected)


def test_check_rule_says_in_which_factor_a_rule_is_wrong() -> None:
    register_rule(rms_norm, "... d, d -> ... d")
    with pytest.raises(ShardingError) as raised:
        check_rule(rms_norm, torch.randn(6, 12).double(), torch.randn(12).double())
    assert raised.value.what == "d in 2 pieces" and "Tensor-likes are not close" in raised.value.problem
    assert "whole=" in raised.value.remedy


def test_check_rule_of_what_cannot_be_cut_says_so() -> None:
    with pytest.raises(ShardingError, match="its rule lets nothing be cut"):
        check_rule(rms_norm, torch.randn(6, 12), torch.randn(12))
    register_rule(rms_norm, "... d, d -> ... d", whole="d")
    with pytest.raises(ShardingError, match=r"no size divides by 2 or by 3\n  give sizes of 6 or 12"):
        check_rule(rms_norm, torch.randn(5, 12), torch.randn(12))


@torch.library.custom_op("tests::count_small", mutates_args=())
def count_small(x: Tensor) -> Tensor:
    return (x < 1).sum(0).to(x.dtype)


count_small.register_fake(lambda x: x.new_empty(x.shape[1:]))


def test_a_reduction_that_would_count_padding_is_cut_evenly_unless_said_otherwise() -> None:
    def count(x: Tensor, weight: Tensor) -> Tensor:
        return count_small(x[:3])

    register_rule(count_small, "b d -> d")
    program, found, expected = compile(count, {"x": P(None, "tp")})
    assert num_fallbacks(program) == 0
    _, found, expected = compile(lambda x, weight: count_small(shardc.annotate(x[:3] * 1, P("dp"))), {})
    torch.testing.assert_close(found, expected)
    register_rule(count_small, "b d -> d", uneven=True, override=True)
    with pytest.raises(ShardingError) as raised:
        check_rule(count_small, torch.randn(6, 12).double())
    assert raised.value.what == "b with padding"


def test_a_sum_of_what_is_linear_sees_no_padding() -> None:
    register_rule(matmul, "m k, k n -> m n", linear="0 1")
    x, y = torch.randn(5, 3).double(), torch.randn(3, 4).double()

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return matmul(x, y)

    program = shardc.compile(Product(), MESH, {"x": P("dp", "tp")}, args=(x, y), train=False)
    assert [each.kind for each in program.collectives] == ["all_reduce"]
    torch.testing.assert_close(program.simulate(x, y)[0], x @ y)


NORM, TWO = "tests.rms_norm.default", "tests::rms_norm(Tensor x, Tensor weight) -> Tensor"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no arrow": (
        lambda: register_rule(rms_norm, "... d, d"),
        f"register_rule({NORM}): spec '... d, d' for {TWO}\n"
        "  it does not read like operands -> results\n"
        "  write an entry for each tensor, as in 'b k, k n -> b n'; _ for a tensor that is not looked at",
    ),
    "an entry less": (
        lambda: register_rule(rms_norm, "b d -> b d"),
        f"register_rule({NORM}): spec 'b d -> b d' for {TWO}\n"
        "  1 operand for 2 tensors of the schema\n"
        "  write an entry for each tensor, as in 'b k, k n -> b n'; _ for a tensor that is not looked at",
    ),
    "a result of its own": (
        lambda: register_rule(rms_norm, "b d, d -> b n"),
        f"register_rule({NORM}): spec 'b d, d -> b n' for {TWO}\n"
        "  factor 'n' stands in results alone, so that the op must be told one rank's size of it\n"
        "  give local= or sizes=, or write 1 for a dim that is never cut",
    ),
    "an unknown factor": (
        lambda: register_rule(rms_norm, "b dim, dim -> b dim", whole="dims"),
        f"register_rule({NORM}): spec 'b dim, dim -> b dim' for {TWO}\n"
        "  whole='dims' names 'dims', which is no factor of it\n"
        "  did you mean dim?",
    ),
    "an operand too far": (
        lambda: register_rule(rms_norm, "b d, d -> b d", linear="02"),
        f"register_rule({NORM}): spec 'b d, d -> b d' for {TWO}\n"
        "  linear='02' names operand 2\n"
        "  there are operands 0 to 1",
    ),
    "no group": (
        lambda: register_rule(rms_norm, "b d, d -> b d", linear="x"),
        f"register_rule({NORM}): spec 'b d, d -> b d' for {TWO}\n"
        "  linear='x' does not list operands\n"
        "  write '0 1' for two groups, '01' for one group of two",
    ),
    "a reduction": (
        lambda: register_rule(rms_norm, "b d, d -> b d", reduce="mean"),  # type: ignore[arg-type]
        f"register_rule({NORM}): reduce='mean'\n  there is no such reduction\n  say sum, max or min",
    ),
    "a second rule": (
        lambda: register_rule(torch.ops.aten.cumsum.default, "... -> ..."),
        "register_rule(aten.cumsum.default): it has a rule\n"
        "  a second one would hide it\n"
        "  say override=True to put yours in its place",
    ),
    "a rule of an op that torch tags as pointwise": (
        lambda: register_rule(torch.ops.aten.erfinv.default, "... -> ..."),
        "register_rule(aten.erfinv.default): it has a rule\n"
        "  a second one would hide it\n"
        "  say override=True to put yours in its place",
    ),
    "several overloads": (
        lambda: register_rule(torch.ops.aten.sum, "a b -> a"),
        "op aten.sum: of type OpOverloadPacket\n"
        "  a rule is for one overload of an op of torch.library\n"
        "  name one of aten.sum.dim_IntList, ",
    ),
    "no op": (
        lambda: register_rule(torch.sin, "a -> a"),
        "of type builtin_function_or_method\n"
        "  a rule is for one overload of an op of torch.library\n"
        "  write torch.ops.NAMESPACE.NAME.default",
    ),
    "an op that changes its operand": (
        lambda: register_rule(scale_, "a -> "),
        "  the op changes its operands\n  make it return what it computes",
    ),
    "a call of other dims": (
        lambda: (register_rule(rms_norm, "a b d, d -> a b d"), compile(lambda x, w: rms_norm(x, w[:, 0]), {})),
        f"register_rule({NORM}), operand 0: f64[4, 8] as 'a b d'\n"
        "  3 entries for 2 dims\n"
        "  name each dim; '...' stands for any number of leading dims",
    ),
    "a call of other sizes": (
        lambda: (register_rule(rms_norm, "d b, d -> d b"), compile(lambda x, w: rms_norm(x, w[:, 0]), {})),
        f"register_rule({NORM}), operand 1: f64[8] as 'd'\n"
        "  factor 'd' is 8 here and 4 in another tensor\n"
        "  give the two dims different names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_does_not_fit_is_refused(name: str) -> None:
    action, expected = REFUSED[name]
    with pytest.raises(ShardingError) as raised:
        action()
    assert expected in str(raised.value)
    assert all((raised.value.who, raised.value.what, raised.value.problem, raised.value.remedy))
