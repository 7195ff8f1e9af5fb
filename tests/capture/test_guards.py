"""Decisions of torch's ops that depend on values are guards: checked in every run, compiled anew where they change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc import CaptureError, Mesh, P
from shardc.capture.values.refusals import GuardError
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.module.runtime import MAX_VARIANTS
from shardc.verify import verify

MESH = Mesh(dp=2, tp=2)
ANNOTATIONS = {"x": P("dp"), "linear.weight": P("tp")}


class Model(nn.Module):
    """A linear layer, a count of its calls, and a function of what the layer gives and of eight whole numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(6, 6), name
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        self.calls.add_(1)
        return FOUND[self.name](self.linear(x), given)


def ctc(h: Tensor, given: Tensor) -> Tensor:
    rows = h.log_softmax(-1)[:, None].expand(8, 2, 6)
    return F.ctc_loss(rows, torch.tensor([[1, 2, 3], [2, 3, 4]]), torch.tensor([8, 7]), 1 + (given[:2] > 1).long())


def branching(h: Tensor, given: Tensor) -> Tensor:
    return h.square().sum() if given.sum() > 14 else h.abs().sum()


FOUND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nonzero": lambda h, given: h[torch.nonzero(given > 1).flatten()].square().sum(),
    "masked_select": lambda h, given: torch.masked_select(h, (given > 1)[:, None]).std(),
    "unique": lambda h, given: (h.sum() * torch.unique(given)).sum(),
    "bincount": lambda h, given: (torch.bincount(given) * h.sum()).mean(),
    "repeat_interleave": lambda h, given: torch.repeat_interleave(h, given, 0).square().sum(),
    "combinations of what a mask selects": lambda h, given: torch.combinations(h[:, 0].masked_select(given > 1)).sum(),
    "tensor_split": lambda h, given: sum(part.mean() for part in torch.tensor_split(h, given[:2].sort()[0])),
    "cov": lambda h, given: torch.cov(h.T, fweights=given).square().sum(),
    "gaussian_nll_loss": lambda h, given: F.gaussian_nll_loss(h, h * 2, h.square() + 1),
    "ctc_loss": ctc,
    "a branch": branching,
    "a branch in a checkpoint": lambda h, given: checkpoint(branching, h, given, use_reentrant=False),
    "lstsq": lambda h, given: torch.linalg.lstsq(h[:, :2], h[:, 2:]).solution.square().sum(),
}
CHANGES = {name: name not in ("gaussian_nll_loss", "lstsq", "cov", "ctc_loss") for name in FOUND}
ONE, OTHER = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2]), torch.tensor([4, 4, 1, 1, 1, 1, 1, 1])


def drawn(seed: int) -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(name: str, mesh) -> tuple[list[int], list[float]]:
    """After each of four steps, on two findings in turn, how many programs there are; how far it is from eager."""
    torch.manual_seed(0)
    alone = Model(name).double()
    parallel = shardc.parallelize(alone, mesh, ANNOTATIONS)
    counts, apart = [], []
    for step, given in enumerate((ONE, OTHER, ONE, OTHER)):
        losses = [each(drawn(step), given) for each in (parallel, alone)]
        apart.append(float((losses[0] - losses[1]).detach().abs()))
        for each, loss in zip((parallel, alone), losses, strict=True):
            each.zero_grad()
            loss.backward()
        for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
            found = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            apart.append(float((found - theirs.grad).abs().max() / max(1, theirs.grad.abs().max())))
        (variants,) = parallel.shardc.variants.values()
        counts.append(len(variants.calls))
        calls = parallel.calls.full_tensor() if hasattr(parallel.calls, "full_tensor") else parallel.calls
        assert float(calls) == step + 1, "a run that a guard ended has changed nothing"
    return counts, apart


@pytest.mark.parametrize("name", FOUND)
def test_each_outcome_of_a_guard_is_compiled_once(name: str) -> None:
    counts, apart = trained(name, MESH)
    assert counts == ([1, 2, 2, 2] if CHANGES[name] else [1, 1, 1, 1])
    assert max(apart) < 1e-12


@pytest.mark.sweep
def test_a_guard_holds_in_compiled_code() -> None:
    model = shardc.parallelize(Rows(), MESH, {"x": P("dp")}, compile="inductor")
    for count in (3, 5, 3):
        x = (torch.arange(8) < count).double()
        assert torch.equal(model(x), count * x)
    (variants,) = model.shardc.variants.values()
    assert len(variants.calls) == 2


def on_gloo() -> tuple[list[int], list[float]]:
    return trained("masked_select", make_device_mesh(MESH))


def test_ranks_of_a_job_compile_anew_together(gloo) -> None:
    for counts, apart in gloo.run(on_gloo):
        assert counts == [1, 2, 2, 2] and max(apart) < 1e-12


class OfParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(-3.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.nonzero(self.weight > 0).sum() + self.weight.sum()) * x.sum()


def of_parameter(mesh) -> list[float]:
    model = shardc.parallelize(OfParameter(), mesh, {"weight": P("dp"), "x": P("tp")})
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5
    return losses


def parameter_on_gloo() -> list[float]:
    return of_parameter(make_device_mesh(MESH))


def test_a_guard_on_a_cut_parameter_sees_the_whole_parameter(gloo) -> None:
    expected = [4 * (22.0 + 4.0), 4 * (22.0 + 0.0), 4 * (18.0 - 4.0)]
    assert of_parameter(MESH) == expected
    assert gloo.run(parameter_on_gloo) == [expected] * 4


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nonzero(x).shape[0]


def test_findings_without_end_are_an_error_that_names_the_line() -> None:
    model = shardc.parallelize(Rows(), MESH, {"x": P("dp")})
    rows = [torch.arange(MAX_VARIANTS + 1) < i for i in range(MAX_VARIANTS + 1)]
    for i, x in enumerate(rows[:-1]):
        assert torch.equal(model(x.double()), i * x.double())
    assert torch.equal(model(rows[0].double()), rows[0] * 0.0)
    line = Rows.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError, match=rf"^test_guards.py:{line}\n  .*8 programs were compiled already; now nonzero gives i64"
    ):
        model(rows[-1].double())


def test_a_compiled_program_refuses_values_that_it_was_not_captured_for() -> None:
    x = torch.tensor([1.0, 0.0, 2.0, 0.0])
    program = shardc.compile(Rows(), MESH, {"x": P("dp")}, args=(x,), train=False)
    assert torch.equal(program.simulate(x.flip(0))[0], x.flip(0) * 2)
    assert "guard 0: nonzero gives i64[2, 1] at test_guards.py" in program.dump()
    with pytest.raises(
        GuardError, match=r"nonzero gives i64\[4, 1\], the program was captured where it gave i64\[2, 1\]"
    ):
        program.simulate(x + 1)


def test_verify_holds_guarded_programs_against_eager() -> None:
    model = Model("repeat_interleave")
    found = verify(model, MESH, ANNOTATIONS, args=(drawn(0).float(), ONE))
    assert found and all(each.is_small for each in found)


class Dropping(Model):
    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return super().forward(F.dropout(x, training=self.training), given)


def test_the_shape_of_a_ctc_loss_depends_on_its_lengths_and_not_on_the_numbers_that_a_model_draws() -> None:
    found = verify(Dropping("ctc_loss"), MESH, ANNOTATIONS, args=(drawn(0).float(), ONE))
    assert found and all(each.is_small for each in found)


class Chance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(torch.rand_like(x) > 0.5).sum() * x


class OfGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * torch.nonzero(gradient).shape[0])
        return x * 2


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (Rows(), torch.ones(4, device="meta"), "it depends on tensors without values: capture with real ones"),
        (Chance(), torch.ones(4), "it depends on numbers that are drawn at random"),
        (OfGradient(), torch.ones(4, requires_grad=True), "it depends on a gradient that comes in later"),
    ],
)
def test_where_values_are_not_known_the_error_says_why(model: nn.Module, x: Tensor, reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_guards.py:\d+: .*nonzero(.|\n)*\({reason}\)"):
        shardc.compile(model, MESH, args=(x,))


class AsManyAsTheMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.mean())].sum() * x


def test_a_whole_number_made_of_one_with_a_fraction_is_a_size_under_a_guard() -> None:
    parallel = shardc.parallelize(AsManyAsTheMean(), MESH, {"x": P("dp")})
    for mean in (2.0, 2.9, 3.1, 2.5):
        x = torch.full((4,), mean, dtype=torch.float64)
        torch.testing.assert_close(parallel(x), AsManyAsTheMean()(x))
    (variants,) = parallel.shardc.variants.values()
    assert len(variants.calls) == 2


class Larger(nn.Module):
    """As many rows as the larger of two sides, which Python's own ``max`` finds."""

    def forward(self, x: Tensor, sides: Tensor) -> Tensor:
        side = max(sides[0], sides[1])
        return x * side + (x[:2] if sides[0] > 3 else x[2:]).sum()


def test_two_whole_numbers_may_be_compared_each_outcome_under_a_guard() -> None:
    x = torch.randn(4, dtype=torch.float64)
    parallel = shardc.parallelize(Larger(), MESH, {"x": P("dp")})
    for sides in ([2, 3], [3, 2], [5, 4], [2, 3]):
        torch.testing.assert_close(parallel(x, torch.tensor(sides)), Larger()(x, torch.tensor(sides)))
    (variants,) = parallel.shardc.variants.values()
    assert len(variants.calls) == 3


class Split(nn.Module):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        first, second = x.split(sizes.tolist())
        return first.sum() * second


def test_a_list_of_whole_numbers_may_be_sizes() -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    parallel = shardc.parallelize(Split(), MESH, {"x": P(None, "dp")})
    for sizes in (torch.tensor([2, 3]), torch.tensor([4, 1])):
        torch.testing.assert_close(parallel(x, sizes), Split()(x, sizes))


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        self.read(x)
        return x


READS: dict[str, Callable[[Tensor], object]] = {
    "in": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_read_by_the_users_own_line_is_an_error(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureError, match=r"^test_guards.py:\d+: \"\w+\": lambda x: .*\n  .*depends on the value"):
        shardc.compile(Reads(read), MESH, args=(torch.ones(4),))
