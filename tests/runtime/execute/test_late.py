"""A loss whose sum over ranks is under way: training does not wait for it, and whoever reads it has the value."""

import copy
import io
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from parallel_models import DATA, MLP, doubles
from torch import Tensor

import shardc
from shardc.language.mesh import Mesh
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.execute.late import LateTensor, late

VALUE = 3.25

READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "bool": bool,
    "tolist": Tensor.tolist,
    "format": "{:.2f}".format,
    "repr": repr,
    "numpy": lambda loss: loss.numpy(),
    "data": lambda loss: loss.data,
    "pointer": Tensor.data_ptr,
    "memory": Tensor.untyped_storage,
    "dlpack": torch.from_dlpack,
    "compared": lambda loss: loss < 4,
    "sum of a list": lambda loss: sum([loss, loss]),
    "stacked": lambda loss: torch.stack([loss, loss]),
    "by name": lambda loss: torch.where(condition=loss > 0, input=loss, other=loss),
    "in place": lambda loss: loss.add_(0),
    "times a tensor": lambda loss: loss * torch.tensor(2.0),
    "over itself": lambda loss: 1 / loss,
    "to a dtype": Tensor.double,
    "clone": Tensor.clone,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda loss: torch.save(loss, io.BytesIO()),
}


def reads():
    """A late tensor, and how often it was waited for."""
    waits = []
    return late(torch.empty(()), lambda: [waits.append(1) or torch.tensor(VALUE)]), waits


@pytest.mark.parametrize("read", READS)
def test_a_read_waits_once_and_the_tensor_is_a_plain_one_then(read):
    loss, waits = reads()
    plain = torch.tensor(VALUE)
    found, expected = READS[read](loss), READS[read](plain)
    assert waits == [1] and type(loss) is Tensor and not hasattr(loss, "_arrival")
    assert torch.equal(loss, plain) and loss.item() == VALUE and waits == [1]
    if isinstance(found, Tensor):
        assert type(found) is Tensor and torch.equal(found, expected)
    elif read not in ("pointer", "memory", "pickle"):
        assert found == expected


def test_what_training_does_with_a_loss_is_no_read():
    """Its gradient needs no value, nor does that of a multiple."""
    weight = torch.ones(3, requires_grad=True)
    waits = []

    class Model(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return late(torch.empty(()), lambda: [waits.append(1) or torch.tensor(VALUE)])

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.tensor([1.0, 2.0, 3.0])

    for scale, scaled in (1, lambda x: x), (0.25, lambda x: x / 4), (2, lambda x: 2 * x), (6, lambda x: x.mul(3) * 2):
        for run in (Tensor.backward, torch.autograd.backward, lambda x: torch.autograd.grad(x, weight)):
            weight.grad = None
            loss = scaled(Model.apply(weight))
            assert isinstance(loss, LateTensor) and loss.requires_grad and loss.shape == () and loss.grad_fn is not None
            found = run(loss)
            torch.testing.assert_close(weight.grad if found is None else found[0], scale * torch.tensor([1.0, 2, 3]))
            kept = loss.detach()
            assert isinstance(kept, LateTensor) and not kept.requires_grad and not waits
            assert kept.item() == loss.item() == scale * VALUE and waits.pop() and not waits


def test_what_was_made_of_it_before_it_was_written_stays_as_it_was():
    loss, _ = reads()
    share, total = loss / 2, loss.detach()
    total += 1
    assert (share.item(), total.item(), loss.item()) == (VALUE / 2, VALUE + 1, VALUE + 1)


def test_as_a_gradient_it_is_waited_for():
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward(reads()[0])
    assert torch.equal(weight.grad, torch.full((3,), VALUE))
    assert torch.equal(torch.autograd.grad(weight.sum(), weight, reads()[0])[0], torch.full((3,), VALUE))


def test_a_multiple_made_in_inference_mode_is_read_outside_of_it():
    loss, _ = reads()
    with torch.inference_mode():
        share = loss / 2
    assert share.item() == VALUE / 2 and loss.item() == VALUE


def test_threads_that_read_it_at_once_all_have_its_value():
    waits = []

    def made():
        time.sleep(0.05)
        return [waits.append(1) or torch.tensor(VALUE)]

    loss = late(torch.empty(()), made)
    readers = [loss, loss, loss.detach(), loss / 2, loss / 2]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(Tensor.item, readers)) == [VALUE, VALUE, VALUE, VALUE / 2, VALUE / 2]
    assert waits == [1] and all(type(each) is Tensor for each in readers)


def test_one_whose_sum_failed_fails_at_every_read():
    def fail():
        raise RuntimeError("a rank is gone")

    loss = late(torch.empty(()), fail)
    for read in (Tensor.item, repr, Tensor.item):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            read(loss)


def test_a_process_does_not_end_before_the_sums_that_it_takes_part_in():
    """Else whoever reads the loss on another rank is told that this one is gone."""
    code = """if True:
        import torch
        from shardc.runtime.late import late
        def fail(): raise RuntimeError("a rank is gone")
        for make in fail, lambda: print("waited") or [torch.ones(())]:
            late(torch.empty(()), make)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("waited\n", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_reads_its_memory_past_python_finds_no_number_there(dtype):
    """A function of C++ that asks no one: it shall not be given what happened to lie there."""
    loss = late(torch.zeros((), dtype=dtype), lambda: [torch.tensor(3, dtype=dtype)])
    found = torch.full((1,), loss)
    assert found.isnan() if dtype.is_floating_point else found == torch.iinfo(dtype).min
    assert loss.item() == 3


def test_the_name_of_its_type_is_one_that_loggers_take_for_a_tensors():
    kind = type(reads()[0])
    assert kind.__module__.startswith("torch") and "Tensor" in kind.__name__


def test_where_no_tensor_may_be_written_later_it_is_waited_for_at_once():
    with torch.inference_mode():
        loss, waits = reads()
    assert type(loss) is Tensor and waits == [1] and loss.item() == VALUE


SENDS = {
    "all_reduce": lambda x, got: dist.all_reduce(x, op=dist.ReduceOp.MAX) or x,
    "reduce": lambda x, got: dist.reduce(x, 0, op=dist.ReduceOp.MAX) or x,
    "broadcast": lambda x, got: dist.broadcast(x, 1) or x,
    "all_gather": lambda x, got: dist.all_gather(got, x) or got[-1],
    "gather": lambda x, got: dist.gather(x, got if dist.get_rank() == 0 else None) or x,
    "scatter": lambda x, got: dist.scatter(got[0], [x] * 4 if dist.get_rank() == 0 else None) or got[0],
    "objects": lambda x, got: dist.all_gather_object(got, x) or got[-1],
}


def step_and_send(send):
    torch.manual_seed(0)
    alone = MLP().double()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=4)), DATA)
    for microbatch in range(3):  # the first as instructions, then as the code made of them
        ours, theirs = parallel(*doubles(microbatch)), alone(*doubles(microbatch))
        assert isinstance(ours, LateTensor)
        for loss in (ours, theirs):
            (loss / 3).backward()
        assert isinstance(ours, LateTensor)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
        assert type(ours) is Tensor
    loss = parallel(*doubles(0)).detach()
    assert isinstance(loss, LateTensor)
    sent = SENDS[send](loss, [torch.zeros((), dtype=torch.float64) for _ in range(4)])
    torch.testing.assert_close(sent, alone(*doubles(0)).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("send", SENDS)
def test_every_rank_has_the_loss_of_one_device_also_one_that_is_sent_before_it_is_read(gloo, send):
    gloo.run(step_and_send, send)


def train(zero):
    """Losses, of microbatches too, as a function of C++ finds them, which waits for none."""
    torch.manual_seed(0)
    alone = MLP().double()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=4)), DATA, zero=zero)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, parallel)]
    for microbatches in (1, 1, 3, 3, 2, 1):
        found = []
        for model, optimizer in zip((alone, parallel), optimizers, strict=True):
            losses = []
            for i in range(microbatches):
                losses += [(loss := model(*doubles(i))), loss / microbatches, loss.detach()]
                losses[-2].backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.tensor(losses))
        torch.testing.assert_close(*found, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert type(parallel(*doubles(0))) is Tensor


@pytest.mark.parametrize("zero", [None, shardc.Zero(stage=1), shardc.Zero(stage=2), shardc.Zero(stage=3)], ids=str)
def test_after_a_step_a_loss_is_late_for_no_one(gloo, zero):
    gloo.run(train, zero)
