"""Memory between steps, in bytes a parameter: announced, in the ZeRO paper's table, and alive."""

import gc
from itertools import pairwise, product

import pytest
import torch
import zero_table
from cases import few
from torch import nn

import shardc
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Precision, Zero
from shardc.runtime.comm.checksum import checksum
from shardc.runtime.comm.distributed import make_device_mesh

BF16 = torch.bfloat16
PLANS = {"data parallel": None, "stage 1": Zero(stage=1), "stage 2": Zero(stage=2), "stage 3": Zero(stage=3)}
PAPER = Precision(BF16, BF16, BF16)  # 2 + 2 + 12 bytes: compute, gradients, and fp32 master with Adam's states
BYTES = {  # a parameter, fp32 Adam, four ranks
    "data parallel": {None: 16, Precision(): 18, PAPER: 16},
    "stage 1": {None: 10, Precision(): 9, PAPER: 7},
    "stage 2": {None: 7, Precision(): 6, PAPER: 5.5},
    "stage 3": {None: 4, Precision(): 4.5, PAPER: 4},
}
CASES = [(plan, precision) for plan in PLANS for precision in BYTES[plan]]


class Square(nn.Module):
    """Matrices without biases, all of whose dims divide."""

    def __init__(self, *sizes):
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs))

    def forward(self, x):
        return self.layers(x).float().square().mean()


def lasting(memory):
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def numel(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("plan", "precision"), CASES)
def test_bytes_a_parameter_are_announced(plan, precision):
    model = Square(64, 128, 64)
    compiled = shardc.compile(
        model, Mesh(dp=4), {"x": P("dp")}, args=(torch.ones(4, 64),), zero=PLANS[plan], precision=precision
    )
    assert lasting(compiled.memory) == BYTES[plan][precision] * numel(model)


def paper(ranks, stage):
    """Bytes a parameter as ZeRO's paper counts: 2 and 2 for parameters and gradients in bf16, 12 for fp32 Adam."""
    return {None: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]


def ours(ranks, stage):
    """With gradients of 4 bytes."""
    return {None: 18, 1: 6 + 12 / ranks, 2: 2 + 16 / ranks, 3: 18 / ranks}[stage]


@pytest.mark.parametrize("size", few(zero_table.SIZES.values(), 7.5e9), ids=zero_table.SIZES)
def test_the_table_of_zeros_paper_to_three_digits_and_ours_beside_it(size):
    for ranks, stage in product(zero_table.RANKS, zero_table.STAGES):
        for precision, count in ((PAPER, paper), (Precision(), ours)):
            wanted = float(f"{count(ranks, stage) * size / 1e9:.3g}")
            assert zero_table.held(size, ranks, stage, precision) == wanted, (ranks, stage, precision)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bound"), [(2, 7), (3, 4)])
def test_the_peak_within_a_step_is_one_layer_above_the_memory_between_steps(stage, bound):
    _, most, layer = zero_table.within_step(stage)
    assert most <= bound + layer


def live_bytes():
    """Bytes of every storage that a tensor looks at, by its address; wrappers and traced tensors own nothing."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    plain = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta]
    plain = [each for each in plain if not torch._is_functional_tensor(each)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain}


def run_lasting(zero, precision):
    """Bytes a parameter that are alive between the two backwards of the second step, where gradients are open sums."""
    mesh = make_device_mesh(Mesh(dp=4))
    checksum(torch.zeros(1))  # a process keeps 1 MB of weights for checksums
    before = live_bytes()
    torch.manual_seed(0)
    parallel = shardc.parallelize(Square(256, 256, 256), mesh, {"x": P("dp")}, zero=zero, precision=precision)
    narrow = precision is not None and precision.gradients is not None
    stepper = (torch.optim.SGD if narrow else torch.optim.AdamW)(parallel.parameters(), lr=0.01)
    for step in range(2):
        for _ in range(2 - step):
            parallel(torch.ones(4, 256)).backward()
        if step == 0:
            stepper.step()
            stepper.zero_grad()
    found = {address: size for address, size in live_bytes().items() if address not in before}
    return sum(found.values()) / numel(parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "precision"), [*((plan, None) for plan in PLANS), ("stage 1", PAPER), ("stage 3", Precision())]
)
def test_bytes_a_parameter_are_those_alive(gloo, plan, precision):
    """To a thousandth. Gradients in bf16 are stepped by SGD, without states."""
    states = 8 / (4 if PLANS[plan] else 1) if precision == PAPER else 0
    for found in gloo.run(run_lasting, PLANS[plan], precision):
        assert found == pytest.approx(BYTES[plan][precision] - states, rel=1e-3)
