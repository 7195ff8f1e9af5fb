"""Whatever users read from tensors on real ranks is the answer of one device on every rank, or an error."""

import io
import math
import re

import pytest
import torch
from parallel_models import whole as plain_of
from readings import READINGS, is_close, outcome
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardc
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P, blocks
from shardc.options import Zero
from shardc.runtime.comm.distributed import make_device_mesh, own_position
from shardc.runtime.comm.dtensor import shard
from shardc.runtime.tensor.global_tensor import GlobalTensor
from shardc.runtime.tensor.make import to_global

LAYOUTS = {  # by name the mesh, the shape and the cut of a tensor
    "rows, uneven": (Mesh(dp=4), (10, 6), P("dp")),
    "rows, one rank without any": (Mesh(dp=4), (3, 6), P("dp")),
    "columns, uneven": (Mesh(tp=4), (10, 6), P(None, "tp")),
    "rows and columns": (Mesh(dp=2, tp=2), (9, 5), P("dp", "tp")),
    "rows over both axes": (Mesh(dp=2, tp=2), (10, 6), P(("dp", "tp"))),
    "blocks": (Mesh(dp=2, tp=2), (12, 6), P(blocks(3, "tp"))),
    "whole": (Mesh(dp=2, tp=2), (10, 6), P()),
}
ERRORS = {  # the readings that end in an error though one device has an answer
    "x[0].zero_()": "on a view of a cut tensor: of shape",
    "torch.tensor of elements": "its data is not allocated yet",  # torch reads memory that no rank has
    "torch.tensor of sums": "its data is not allocated yet",
}


def assert_same(ours, theirs):
    torch.testing.assert_close(plain_of(ours), theirs, atol=1e-12, rtol=0)


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def made(whole, mesh, spec):
    """A global tensor of a whole that every rank has."""
    device_mesh = make_device_mesh(mesh)
    sharding = spec.sharding(mesh, tuple(whole.shape), "x")
    piece = shard(whole, sharding, own_position(device_mesh)).clone()
    return to_global(piece, sharding, tuple(whole.shape), device_mesh)


def differences(x, whole, mate, names=READINGS):
    """The readings of a tensor, by name, that are not those of the whole on one device, and what they gave."""
    found = {}
    for name in names:
        (alone, answer), (kind, value) = (outcome(READINGS[name], each, mate) for each in (whole, x))
        is_right = kind == alone and (kind == "error" or is_close(value, answer))
        if not is_right:
            found[name] = f"{kind}: {value}"
    return found


def run_layout(layout, *requires_grad):
    mesh, shape, spec = LAYOUTS[layout]
    whole, mate = drawn(shape)
    x, found = made(whole, mesh, spec), {}
    for each in requires_grad:
        pair = (tensor.detach().requires_grad_(each) for tensor in (x, whole.clone()))
        found[layout, each] = differences(*pair, mate)
    return found


def check_differences(found):
    """Every difference must be one of the known errors, never a number."""
    for case, readings in found.items():
        for name, told in readings.items():
            assert told.startswith("error: ") and ERRORS.get(name, "no error") in told, (case, name, told)


def test_every_reading_of_a_cut_tensor_is_that_of_one_device(gloo):
    for found in gloo.run(run_layout, "rows, one rank without any", True):
        assert {name for readings in found.values() for name in readings} == set(ERRORS)
        check_differences(found)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reading_of_every_layout_is_that_of_one_device(gloo, layout):
    for found in gloo.run(run_layout, layout, True, False):
        check_differences(found)


class Net(nn.Module):
    """A cut output, parameters whose sizes do not divide, and a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.register_buffer("seen", torch.zeros(3, 10))

    def forward(self, x):
        hidden = self.up(x).tanh()
        self.seen = 0.5 * self.seen + hidden.detach()[:3] if len(x) >= 3 else self.seen + 1
        y = self.down(hidden)
        return y.square().mean(), y


PLANS = {
    "dp": ({"x": P("dp")}, Mesh(dp=4), None),
    "tp": ({"up.weight": P("tp"), "x": P()}, Mesh(tp=4), None),
    "dp and tp": ({"up.weight": P("tp"), "x": P("dp")}, Mesh(dp=2, tp=2), None),
    "zero1": ({"x": P("dp")}, Mesh(dp=4), Zero("dp", stage=1)),
    "zero2": ({"x": P("dp")}, Mesh(dp=4), Zero("dp", stage=2)),
    "zero3": ({"x": P("dp")}, Mesh(dp=4), Zero("dp", stage=3)),
}
FEW = ("float(norm)", "max", "isnan().any()", "tolist", "x[mask]", "mse_loss", "backward of sum", "get_total_norm")


def trained(plan, rows, backwards=1):
    """Two models after a step of backward: on one device, and parallel; and what each returned."""
    annotations, mesh, zero = PLANS[plan]
    torch.manual_seed(0)
    alone = Net().double()
    parallel = shardc.parallelize(alone, make_device_mesh(mesh), annotations, zero=zero, differentiable=("1",))
    outputs = []
    for model in (alone, parallel):
        for _ in range(backwards):
            loss, y = model(drawn((rows, 6), seed=1)[0])
            (loss + 0.1 * y.square().sum()).backward(retain_graph=True)
        outputs.append(y)
    return alone, parallel, outputs


def run_objects(plan, rows, names):
    """The readings that differ, by the tensor that is read."""
    alone, parallel, (theirs, ours) = trained(plan, rows)
    pairs = {"output": (ours, theirs), "buffer": (parallel.seen, alone.seen)}
    for name, parameter in alone.named_parameters():
        if parameter.ndim == 2:
            mine = parallel.get_parameter(name)
            pairs |= {name: (mine, parameter), f"{name}.grad": (mine.grad, parameter.grad)}
    found = {}
    for name, (mine, whole) in pairs.items():
        mate = drawn(tuple(whole.shape), seed=2)[1]
        found[name] = differences(mine, whole, mate, names)
    for name in FEW:  # of gradients whose reduction was deferred until now
        alone, parallel, _ = trained(plan, rows, backwards=2)
        mine, whole = (model.up.weight.grad for model in (parallel, alone))
        found[f"deferred {name}"] = differences(mine, whole, drawn(tuple(whole.shape), seed=2)[1], [name])
    kinds = {type(each) for each in (*parallel.parameters(), parallel.seen, parallel.up.weight.grad, ours)}
    return found, kinds


def test_outputs_parameters_gradients_and_buffers_read_as_on_one_device(gloo):
    for found, kinds in gloo.run(run_objects, "zero3", 10, FEW):
        check_differences(found)
        assert kinds == {GlobalTensor}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
def test_every_reading_of_every_tensor_of_a_plan_is_that_of_one_device(gloo, plan):
    for rows in (10, 3):
        for found, _ in gloo.run(run_objects, plan, rows, list(READINGS)):
            check_differences(found)


def run_errors():
    mesh, shape, spec = LAYOUTS["rows, one rank without any"]
    whole, mate = drawn(shape)
    x = made(whole, mesh, spec)
    leaf = x.detach().requires_grad_()
    scaled = leaf * 2
    cases = {
        "view": lambda: x.flatten().add_(1),
        "index": lambda: scaled.__setitem__(0, 1.0),
        "data": lambda: setattr(x, "data", mate[:2]),
        "in place": lambda: x.t_(),
    }
    texts = {}
    for name, case in cases.items():
        with pytest.raises(ShardingError) as caught:
            case()
        texts[name] = str(caught.value).splitlines()
    assert_same(x, whole)
    return texts


def test_what_cannot_be_right_is_refused_in_words(gloo):
    for texts in gloo.run(run_errors):
        assert texts == {
            "view": [
                "add_ on a view of a cut tensor: of shape [18]",
                "  it is a copy: the tensor would stay as it is",
                "  write to the tensor itself: x[index] = value",
            ],
            "index": [
                "x[index] = value of a cut tensor: of shape [3, 6], which requires grad",
                "  no gradient can pass such a write",
                "  write under torch.no_grad()",
            ],
            "data": [
                "x.data = value: a tensor of shape [2, 6]",
                "  the tensor has shape [3, 6]",
                "  give a tensor of the same shape",
            ],
            "in place": [
                "t_ on a cut tensor: of shape [3, 6]",
                "  its shape would change",
                "  use the op that is not in place",
            ],
        }


def run_methods():
    """What is no op: conversions between kinds of tensors, pickles, prints, and one collective for many norms."""
    mesh, shape, spec = LAYOUTS["rows, one rank without any"]
    whole, _ = drawn(shape)
    x = made(whole, mesh, spec)
    assert type(x.full_tensor()) is type(x.to_local()) is torch.Tensor and type(x) is GlobalTensor
    assert_same(x.redistribute(placements=[Replicate()]), whole)
    leaf, alone = x.detach().requires_grad_(), whole.clone().requires_grad_()
    (leaf.full_tensor().square().sum() + leaf.redistribute(placements=[Shard(1)]).exp().sum()).backward()
    (alone.square().sum() + alone.exp().sum()).backward()
    assert type(leaf.grad) is GlobalTensor
    assert_same(leaf.grad, alone.grad)
    part = DTensor.from_local(torch.ones(2), x.device_mesh, [Partial()], run_check=False)
    assert (GlobalTensor.of(part) + 1).tolist() == [5.0, 5.0], "the part of a sum is added up before it is read"
    buffer = io.BytesIO()
    torch.save({"x": nn.Parameter(x)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["x"]
    assert type(loaded) in (torch.Tensor, nn.Parameter) and torch.equal(loaded, whole)
    assert repr(x.sum()) == repr(whole.sum())
    assert repr(x) == (
        "GlobalTensor(shape=[3, 6], dtype=torch.float64, placements=(Shard(dim=0),), values=.full_tensor())"
    )
    many = [made(each, mesh, spec).requires_grad_() for each in (whole, whole * 2, whole * 3)]
    for each, scale in zip(many, (1, 2, 3), strict=True):
        each.grad = made(whole * scale, mesh, spec)
    before = math.sqrt(sum(float((whole * scale).norm()) ** 2 for scale in (1, 2, 3)))
    with torch.profiler.profile() as profile:
        norm = nn.utils.clip_grad_norm_(many, 1.0)
    gathers = [event for event in profile.events() if event.name == "gloo:all_gather"]
    assert float(norm) == pytest.approx(before) and len(gathers) == 2  # the ranks meet, and send
    for foreach in (False, True):
        total = nn.utils.get_total_norm([each.grad for each in many], foreach=foreach)
        assert float(total) == pytest.approx(1.0, abs=1e-5)


def test_conversions_pickles_prints_and_clipping_see_the_whole(gloo):
    gloo.run(run_methods)


def run_alone(rank):
    """The error of each rank where one alone reads, and the others go on; then a norm that one alone prints."""
    annotations, mesh, _ = PLANS["dp"]
    device_mesh = make_device_mesh(mesh)
    parallel = shardc.parallelize(Net().double(), device_mesh, annotations)
    x, is_alone = drawn((10, 6))[0], own_position(device_mesh) == rank
    loss, y = parallel(x)
    with pytest.raises(ShardingError) as caught:
        y.max() if is_alone else loss.backward()
    norm = parallel(x)[1].norm()  # on all ranks, which come to its collective in their next call
    printed = f"{norm:.4f}" if is_alone else ""
    parallel(x)
    told = re.sub(r"module \d+, ", "", str(caught.value))
    return told.splitlines(), printed, f"{norm:.4f}"


def test_a_reading_on_one_rank_alone_is_named_on_every_rank(gloo):
    found = gloo.run(run_alone, 0)
    for told, _, norm in found:
        assert told == [
            "ranks 0 and 1: they are at different places in the program",
            "  rank 0 reads `max` of output '1' of shape [10, 3], cut over dp; rank 1 calls backward of Net (call 1): "
            "a tensor was read on one rank alone, as under `if rank == 0:`",
            "  let every rank make the same calls in the same order, none of them on some ranks alone",
        ]
        assert found[0][1] == norm
