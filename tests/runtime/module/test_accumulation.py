"""Gradient accumulation: gradients are reduced over ranks once, when one is read, without a setting."""

import pytest
import torch
from parallel_models import DATA, MEGATRON, MLP, TIED, TiedModel, doubles, ids, whole

import shardc
from shardc.language.mesh import Mesh
from shardc.options import Zero
from shardc.runtime.comm.distributed import make_device_mesh

PLANS = {
    "data": (Mesh(dp=4), DATA, None),
    "data and tensor": (Mesh(dp=2, tp=2), MEGATRON, None),
    "stage 1": (Mesh(dp=4), DATA, Zero(stage=1)),
    "stage 2": (Mesh(dp=4), DATA, Zero(stage=2)),
}


def made(mesh, annotations, zero, model=MLP):
    torch.manual_seed(0)
    alone = model().double()
    parallel = shardc.parallelize(alone, make_device_mesh(mesh), annotations, zero=zero)
    return alone, parallel, parallel.shardc.conversion.comm.traffic[0]


def run_steps(mesh, annotations, zero, microbatches, keeps_gradients=False):
    """How many times the announced bytes of a backward's reductions each step has sent."""
    alone, parallel, traffic = made(mesh, annotations, zero)
    steppers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, parallel)]
    counted = []
    for step, count in enumerate(microbatches):
        traffic.clear()
        for model, stepper in zip((alone, parallel), steppers, strict=True):
            for i in range(count):
                (model(*doubles(10 * step + i)) / count).backward()
            stepper.step()
            stepper.zero_grad(set_to_none=step % 2 == 0 and not keeps_gradients)
        sent = traffic.bytes["all_reduce"] + traffic.bytes["reduce_scatter"]
        counted.append((sent - count * announced(parallel, "forward")) / announced(parallel, "backward"))
        assert_same_parameters(parallel, alone)
    return counted


def announced(parallel, phase):
    kinds = ("all_reduce", "reduce_scatter")
    found = [each for each in parallel.program.collectives if each.kind in kinds and each.phase == phase]
    return sum(each.wire_bytes for each in found)


def assert_same_parameters(parallel, alone):
    for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_reduced_once_a_step(gloo, plan):
    """More often under stage 2, and when backwards that were read one by one are accumulated for the first time."""
    microbatches = [3, 3, 1, 1, 2, 2]
    for counted in gloo.run(run_steps, *PLANS[plan], microbatches):
        assert counted == (microbatches if plan == "stage 2" else [1, 1, 1, 1, 2, 1])


@pytest.mark.parametrize("plan", ["data", "data and tensor", "stage 1"])
def test_gradients_that_are_zeroed_and_kept_are_reduced_once_a_step(gloo, plan):
    for counted in gloo.run(run_steps, *PLANS[plan], [3, 3, 1, 3, 3], True):
        assert counted == [1, 1, 1, 2, 1], "a step more where one backward was expected"


def run_early():
    """In which backward of each step gradients are summed over ranks; 0 is the read after them."""
    alone, parallel, traffic = made(Mesh(dp=4), DATA, None)
    found = []
    for count in (3, 3, 2, 2, 4, 4):
        calls = []
        for i in range(count):
            for model in (alone, parallel):
                loss = model(*doubles(i))
                traffic.clear()
                loss.backward()
            calls.append(traffic.calls["all_reduce"])
        traffic.clear()
        for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, atol=1e-12, rtol=0)
            assert type(mine.grad._local_tensor) is torch.Tensor
        calls.append(traffic.calls["all_reduce"])
        found.append([i for i, each in enumerate(calls[-1:] + calls[:-1]) if each])
        for model in (alone, parallel):
            model.zero_grad()
    return found


def test_gradients_are_reduced_in_the_last_backward_that_is_expected(gloo):
    for found in gloo.run(run_early):
        assert found == [[0], [3], [0], [2], [0, 2], [4]]


def run_graph():
    """Backwards that make a graph of the gradients, which torch adds up itself."""
    alone, parallel, _ = made(Mesh(dp=4), DATA, None)
    for model in (alone, parallel):
        for i in range(2):
            model(*doubles(i)).backward(create_graph=True)
    for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad.detach()), theirs.grad.detach(), atol=1e-12, rtol=0)


def test_gradients_with_a_graph_accumulate(gloo):
    gloo.run(run_graph)


def run_reads():
    """Gradients that are read, dropped or asked for otherwise in the midst of an accumulation."""
    alone, parallel, traffic = made(Mesh(dp=4), DATA, None)
    parallel.seed = alone.seed = 0

    def backward(seed, **options):
        for model in (alone, parallel):
            model(*doubles(seed)).backward(
                **{name: [model.up.weight] if name == "inputs" else value for name, value in options.items()}
            )

    def check():
        for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
            assert (theirs.grad is None) == (mine.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(whole(mine.grad), theirs.grad, atol=1e-12, rtol=0)

    def clear(set_to_none=True):
        for model in (alone, parallel):
            model.zero_grad(set_to_none=set_to_none)

    backward(0), backward(1), check(), backward(2), check()  # read between two backwards
    clear(), backward(3), clear(), backward(4), check()  # never read
    clear(), backward(5), clear(set_to_none=False), backward(6), check()
    clear(), backward(7), backward(8, inputs=True), check(), backward(9), check()
    clear(), backward(0)
    for model in (alone, parallel):
        weights = [model.up.weight, model.down.bias]
        grads = torch.autograd.grad(model(*doubles(1)), weights)
        model.kept = [whole(each) for each in grads]
    torch.testing.assert_close(parallel.kept, alone.kept, atol=1e-12, rtol=0)
    backward(2), check()
    for model in (alone, parallel):  # one parameter's gradient is dropped, the others go on
        model.up.bias.grad = None
    backward(3), check()
    clear(), backward(4)
    for model in (alone, parallel):
        loss = model(*doubles(5))
        loss.backward(retain_graph=True)
        loss.backward()
    check(), clear(), backward(6)
    before = traffic.calls["all_reduce"]
    text = repr(parallel.down.bias.grad)
    assert text == repr(alone.down.bias.grad) and traffic.calls["all_reduce"] > before
    assert type(parallel.up.bias.grad.to_local()) is torch.Tensor
    scaler_reads(alone, parallel)


def scaler_reads(alone, parallel):
    for model in (alone, parallel):
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            scaler.scale(model(*doubles(i))).backward()
        scaler.unscale_(stepper)
        model.norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(stepper)
        scaler.update()
    torch.testing.assert_close(parallel.norm, alone.norm, atol=1e-12, rtol=0)
    assert_same_parameters(parallel, alone)


def test_a_gradient_that_is_read_is_whole_whenever_it_is_read(gloo):
    gloo.run(run_reads)


def run_tied():
    """A tied embedding, blocks, a frozen parameter and a buffer, three microbatches a step."""
    alone, parallel, _ = made(Mesh(dp=2, tp=2), TIED, Zero(stage=1), TiedModel)
    for model in (alone, parallel):
        model.dropout.p = 0.0
        stepper = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        for step in range(3):
            for i in range(3):
                model(**ids(3 * step + i)).loss.backward()
            stepper.step()
            stepper.zero_grad()
    assert_same_parameters(parallel, alone)


def test_a_tied_model_accumulates(gloo):
    gloo.run(run_tied)
