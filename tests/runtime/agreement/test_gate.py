"""What ranks may do together without an error, and what they hear of each other where an error is caught."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from parallel_models import DATA, MEGATRON, MLP, doubles
from torch import nn

import shardc
from shardc import Mesh, P
from shardc.runtime.comm.distributed import make_device_mesh

ODD = 1
PLANS = {
    "data": (Mesh(dp=4), DATA, {}),
    "tensor": (Mesh(dp=2, tp=2), MEGATRON, {}),
    "zero 1": (Mesh(dp=4), DATA, {"zero": shardc.Zero("dp", stage=1)}),
    "zero 3": (Mesh(dp=4), DATA, {"zero": shardc.Zero("dp", stage=3)}),
    "pipeline": (Mesh(dp=2, pp=2), DATA, {"pipeline": shardc.Pipeline("pp", microbatches=2)}),
}


def made(plan, model=MLP):
    torch.manual_seed(0)
    mesh, annotations, options = PLANS[plan]
    return shardc.parallelize(model().double(), make_device_mesh(mesh), annotations, **options)


def told(function, *args):
    """The error that a call raises, without the numbers of modules."""
    try:
        function(*args)
    except Exception as error:
        text = re.sub(r"\(module [\d.]+, call (\d+)\)", r"(call \1)", f"{type(error).__name__}: {error}")
        return re.sub(r" \(module [\d.]+\)", "", text)
    return "no error"


def is_odd():
    return dist.get_rank() == ODD


def run_training(plan):
    """Accumulation, evaluation in between, a second module, a copy, several backwards of a call."""
    one, two = made(plan), made(plan)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.01)
    for step in range(3):
        for part in range(3):
            (one(*doubles(part)) + two(*doubles(part))).backward()
        first, second = one(*doubles(0)), one(*doubles(1))
        (first + second).backward()
        one.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
        one.eval()
        with torch.no_grad():
            one(*doubles(7)), two(*doubles(7, rows=8))
        one.train()
    average = copy.deepcopy(one)
    with torch.no_grad():
        average(*doubles(0))
        for mine, theirs in zip(average.parameters(), one.parameters(), strict=True):
            if not mine.is_meta:
                mine.lerp_(theirs, 0.5)
        average(*doubles(1)), one(*doubles(1))
    loss = one(*doubles(2))
    loss.backward(retain_graph=True)
    loss.backward()
    torch.autograd.grad(one(*doubles(3)), [each for each in one.parameters() if not each.is_meta])
    with torch.inference_mode():
        one(*doubles(4))
    return True


@pytest.mark.parametrize("plan", PLANS)
def test_what_all_ranks_do_in_one_order_is_accepted(gloo, plan):
    assert all(gloo.run(run_training, plan))


def run_own_attributes():
    """A model that holds its rank's number, a function and an object of its own, none of which changes the program."""
    model = MLP().double()
    model.rank, model.log, model.state = dist.get_rank(), lambda text: text, object()
    parallel = shardc.parallelize(model, make_device_mesh(Mesh(dp=4)), DATA)
    for step in range(2):
        parallel(*doubles(step)).backward()
        parallel.rank = 10 * dist.get_rank() + step
    return True


def test_attributes_that_change_no_program_may_differ(gloo):
    assert all(gloo.run(run_own_attributes))


def run_evicted():
    """One rank has lost its program of a signature: all compile it again."""
    parallel = made("zero 1")
    losses = [float(parallel(*doubles(0)))]
    if is_odd():
        parallel.shardc.variants.clear()
    losses += [float(parallel(*doubles(0))), float(parallel(*doubles(0)))]
    return losses


def test_all_ranks_compile_where_one_of_them_must(gloo):
    assert all(len(set(losses)) == 1 for losses in gloo.run(run_evicted))


def run_order():
    one, two = made("tensor"), made("tensor")
    first, second = (two, one) if is_odd() else (one, two)
    texts = [told(first, *doubles(0)), told(second, *doubles(0))]
    return [re.sub(r"\d+,", "N,", each) for each in texts], float(one(*doubles(0)))


def test_modules_called_in_another_order_are_refused(gloo):
    outcomes = gloo.run(run_order)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for text in outcomes[0][0]:
        assert text.splitlines()[1].endswith(": calls were made in another order, or one was skipped")


class OfDict(nn.Module):
    """Of a batch in a dict, with a flag."""

    def forward(self, batch, scaled=False):
        total = sum(each.sum() for each in batch.values())
        return total / 2 if scaled else total


def run_other_arguments():
    rows, found = torch.ones(4, 2), []
    module = shardc.parallelize(OfDict(), Mesh(dp=4), {}, runtime="distributed")
    for of_odd in ({"batch": {"ids": rows, "mask": rows}}, {"batch": {"ids": rows}, "scaled": 1.0}):
        found.append(
            told(lambda given=of_odd: module(**(given if is_odd() else {"batch": {"ids": rows}, "scaled": 2.0})))
        )
    return found


def test_other_keys_and_other_values_are_refused_as_one_would_write_them(gloo):
    for keys, values in gloo.run(run_other_arguments):
        assert "{'batch': {'ids': _, 'mask': _}}" in keys and "{'batch': {'ids': _}, 'scaled': _}" in keys, keys
        assert "of a dict the same keys" in keys
        assert "value 'scaled': 2.0" in values and "value 'scaled': 1.0" in values, values
        assert "give every rank the same value" in values


def run_alone():
    """What one rank does alone, and the others' next call; then all go on."""
    parallel, texts = made("data"), []
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(2):
        parallel(*doubles(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_odd():  # an evaluation on one rank
        with torch.no_grad():
            texts.append(told(parallel, *doubles(5)))
    else:
        texts.append(told(parallel, *doubles(0)))
    for part in range(2):
        parallel(*doubles(part)).backward()
    if is_odd():  # a step, of which gradients are the first thing that is read
        texts.append(told(optimizer.step))
        optimizer.zero_grad()
    else:
        texts.append(told(parallel, *doubles(0)))
        optimizer.zero_grad()
    parallel(*doubles(1)).backward()
    texts.append(told(parallel.clip_grad_norm_, 2.0 if is_odd() else 1.0))
    optimizer.zero_grad()
    loss = parallel(*doubles(1))
    loss.backward()
    return texts, float(loss)


def test_what_one_rank_does_alone_is_refused_and_all_can_go_on(gloo):
    outcomes = gloo.run(run_alone)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    evaluated, stepped, clipped = outcomes[0][0]
    assert evaluated.splitlines()[1:4:2] == ["  rank 0 has", "  where rank 1 has"] and "gradients are o" in evaluated
    assert "rank 0 calls forward of MLP (call 5); rank 1 reads gradients of MLP" in stepped
    assert stepped.splitlines()[1].endswith(": a step was skipped, or gradients were read on one rank alone")
    assert "max_norm=1.0" in clipped and "max_norm=2.0" in clipped


def run_scaler(plan):
    """A step by way of a GradScaler that one rank leaves out, then one that all make."""
    parallel, scaler = made(plan), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler.scale(parallel(*doubles(0))).backward()
    text = told(parallel, *doubles(0)) if is_odd() else told(scaler.step, optimizer)
    optimizer.zero_grad()
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for step in range(2):
        loss = parallel(*doubles(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
    return text, losses


@pytest.mark.parametrize("plan", ["tensor", "zero 3"])
def test_a_scaled_step_that_one_rank_leaves_out_is_refused(gloo, plan):
    outcomes = gloo.run(run_scaler, plan)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert "rank 1 calls forward of MLP (call 2)" in outcomes[0][0]
    assert "rank 0 unscales gradients in a GradScaler; " in outcomes[0][0]


class Picked(nn.Module):
    """A program that depends on how many values are positive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, mask):
        return self.linear(x[torch.nonzero(mask).flatten()]).square().sum()


def run_guard():
    mesh, annotations = make_device_mesh(Mesh(dp=2, tp=2)), {"linear.weight": P("tp")}
    parallel = shardc.parallelize(Picked(), mesh, annotations, check="never")
    x, mask = torch.ones(4, 4).double(), torch.tensor([1, 1, 0, 0])
    losses = [float(parallel(x, mask)), float(parallel(x, 1 - mask))]
    text = told(parallel, x, torch.tensor([1, 1, int(is_odd()), 0]))
    losses.append(float(parallel(x, mask)))
    return text, losses


def test_a_guard_that_fails_on_one_rank_alone_is_refused(gloo):
    outcomes = gloo.run(run_guard)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    text, losses = outcomes[0]
    assert len(set(losses)) == 1
    assert [line.partition(" at ")[0] for line in text.splitlines()] == [
        "ShardingError: ranks 0 and 1: each runs Picked, whose program depends on values, "
        "and they differ in what it gets",
        "  rank 0 has", "    result: nonzero gives i64[2, 1]",
        "  where rank 1 has", "    result: nonzero gives i64[3, 1]",
        "  give every rank the same values",
    ]  # fmt: skip


def make(rank_options, mesh=None):
    options = rank_options[dist.get_rank()]
    mesh = options.pop("mesh", mesh)
    return lambda: shardc.parallelize(MLP(), mesh, DATA, runtime="distributed", **options)


def run_first_meeting():
    """Modules on ranks that have made none together yet, which meet in the store of the job."""
    if dist.get_rank() == 3:
        return []
    mesh = Mesh(dp=3)
    cases = [
        [{}, {"initial": "broadcst"}, {}],
        [{}, {"bucket": 7}, {}],
        [{}, {"mesh": Mesh(dp=2)}, {}],
        [{}, {"mesh": Mesh(tp=3)}, {}],
    ]
    return [told(make(case, mesh)) for case in cases]


def test_ranks_that_have_no_group_yet_hear_of_each_other(gloo):
    outcomes = gloo.run(run_first_meeting)[:3]
    wrong, option, fewer, names = zip(*outcomes, strict=True)
    own = "ShardingError: parallelize: initial='broadcst'"
    assert wrong[0] == wrong[2] and wrong[0].startswith(f"RankError: rank 1 failed: {own}")
    assert wrong[1].startswith(own)
    assert len(set(option)) == 1 and "option bucket=26214400\n" in option[0] and "option bucket=7\n" in option[0]
    for text in fewer:
        assert "ranks 0 and 1: they make a module on meshes of different ranks\n" in text
        assert "rank 0 makes a module on ranks 0, 1, 2; rank 1 makes a module on ranks 0, 1\n" in text
    assert len(set(names)) == 1 and "mesh Mesh(dp=3)" in names[0] and "mesh Mesh(tp=3)" in names[0]
