"""Groups that train by themselves equal copies of the model that do, with outer steps of the same optimizer."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Local, Mesh, P, Pipeline, ShardingError, Zero
from shardc.costs.step import outer_entry
from shardc.runtime.comm.failure import default_store

STEPS, BATCH = 13, 8
INNER = {"lr": 0.02, "weight_decay": 0.1}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
LAYERS = {"up.weight": P("tp"), "down.weight": P(None, "tp")}
PLANS: dict[str, Any] = {
    "groups of one": ({"dc": 4}, {"x": P("dc")}, {}),
    "data": ({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, {}),
    "tensor, axes in another order": ({"tp": 2, "dc": 2}, {"x": P("dc"), **LAYERS}, {}),
    "stored": ({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, {"zero": Zero("dp", 3)}),
    "stages": (
        {"dc": 2, "pp": 2}, {"x": P("dc")},
        {"pipeline": Pipeline("pp", microbatches=2)},
    ),
}  # fmt: skip


class Net(nn.Module):
    """Two layers, of sizes that no mesh divides, and a layer that is trained late."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def expected(groups: int, every: int, parts: int = 1, after: int = 0, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """The parameters of each group, of copies of the model that are trained in plain torch."""
    models = [net() for _ in range(groups)]
    inner = [torch.optim.AdamW(model.parameters(), **INNER) for model in models]
    anchors = [each.detach().clone() for each in models[0].parameters()]
    outers = [torch.optim.SGD([anchor], **OUTER) for anchor in anchors]
    total, before, parts_of = sum(each.numel() for each in anchors), 0, []
    for anchor in anchors:
        parts_of.append(before * parts // total)
        before += anchor.numel()
    for step, batch in enumerate(batches()[:steps], 1 - after):
        for model, optimizer, own in zip(models, inner, batch.chunk(groups), strict=True):
            optimizer.zero_grad()
            model(own).backward()
            optimizer.step()
        for i, (anchor, outer, part) in enumerate(zip(anchors, outers, parts_of, strict=True)):
            first, values = every * (part + 1) // parts, [list(model.parameters())[i] for model in models]
            if step <= 0:
                anchor.copy_(torch.stack([value.detach() for value in values]).mean(0))
            elif step >= first and (step - first) % every == 0:
                anchor.grad = torch.stack([anchor - value.detach() for value in values]).mean(0)
                outer.step()
            if step <= 0 or (step >= first and (step - first) % every == 0):
                for value in values:
                    value.data.copy_(anchor)
    return [{name: each.detach() for name, each in model.named_parameters()} for model in models]


def train(sizes: dict[str, int], annotations: Any, options: Any, local: Local) -> dict[str, Any]:
    """The parameters of this rank's group, and the bytes that this rank has sent to the others."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(mesh.get_rank())  # whose values all start from are the first group's
    model = net() if mesh.get_rank() == 0 else Net().double()
    module = shardc.parallelize(model, mesh, annotations, local=local, **options)
    module(batches()[0])
    optimizer = torch.optim.AdamW(module.parameters(), **INNER)
    sent = module.shardc.outer.groups.traffic
    for batch in batches():
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    held = {id(each) for each in module.shardc.parameters()}  # by the stage of this rank
    return {
        "index": module.shardc.outer.groups.index, "sent": sum(sent.bytes.values()),
        "parameters": {name: whole(each) for name, each in module.named_parameters() if id(each) in held},
    }  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("every", "parts", "after"), [(4, 1, 0), (5, 2, 0), (5, 2, 3)])
def test_equals_copies_of_the_model(gloo: GlooPool, name: str, every: int, parts: int, after: int) -> None:
    sizes, annotations, options = PLANS[name]
    wanted = expected(sizes["dc"], every, parts, after)
    for found in gloo.run(train, sizes, annotations, options, Local("dc", every, parts=parts, after=after)):
        for key, value in found["parameters"].items():
            torch.testing.assert_close(value, wanted[found["index"]][key], rtol=1e-10, atol=1e-10, msg=key)


def on_groups(sizes: dict[str, int], annotations: Any, local: Local, **options: Any) -> tuple[Any, Any]:
    """A module of the model, and its optimizer."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    module = shardc.parallelize(net(), mesh, annotations, local=local, **options)
    module(batches()[0])
    return module, torch.optim.AdamW(module.parameters(), **INNER)


def take_steps(module: Any, optimizer: Any, which: range) -> None:
    for step in which:
        optimizer.zero_grad()
        module(batches()[step % STEPS]).backward()
        optimizer.step()


def values(module: Any) -> dict[str, Tensor]:
    return {name: whole(each) for name, each in module.named_parameters()}


def bytes_of_steps(local: Local | None, steps: int) -> tuple[int, int, dict[str, Tensor]]:
    """The bytes that a rank sends over an axis of groups, or of data parallelism; what an outer step announces."""
    if local is None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dc",))
        module = shardc.parallelize(net().float(), mesh, {"x": P("dc")}, args=(batches()[0].float(),))
        sent = sum(each.times * each.wire_bytes for each in module.program.collectives if each.axes == ("dc",))
        return sent * steps, 0, {}
    module, optimizer = on_groups({"dc": 4}, {"x": P("dc")}, local)
    take_steps(module, optimizer, range(steps))
    entry = outer_entry(module.program.whole)
    assert entry is not None
    return sum(module.shardc.outer.groups.traffic.bytes.values()), entry.wire_bytes, values(module)


def test_bytes(gloo: GlooPool) -> None:
    """One outer step in twenty sends as much as one step of data parallelism."""
    data_parallel = gloo.run(bytes_of_steps, None, 40)[0][0]
    sent, announced, _ = gloo.run(bytes_of_steps, Local("dc", 20), 40)[0]
    assert sent == pytest.approx(2 * data_parallel / 20, rel=0.01), "float64"
    assert sent == 2 * announced
    sent, announced, _ = gloo.run(bytes_of_steps, Local("dc", 20, after=3), 43)[0]
    assert sent == (3 + 2) * announced


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_in_codes(gloo: GlooPool, codec: str) -> None:
    """Groups are alike to the bit, near to what they are without codes; what is announced is what is sent."""
    _, announced, plain = gloo.run(bytes_of_steps, Local("dc", 4), 8)[0]
    found = gloo.run(bytes_of_steps, Local("dc", 4, wire=codec), 8)
    for sent, coded, parameters in found:
        assert sent == 2 * coded
        for name, value in parameters.items():
            assert torch.equal(value, found[0][2][name])
            torch.testing.assert_close(value, plain[name], rtol=0.0, atol=0.02)
            assert not torch.equal(value, plain[name])
    assert found[0][1] < announced


def resumed(
    folder: Path, saves_at: int | None, sizes: dict[str, int], zero: Zero | None, outer: Any = None, after: int = 0
) -> dict[str, Tensor]:
    module, optimizer = on_groups(sizes, {"x": P("dc")}, Local("dc", 4, outer=outer, after=after), zero=zero)
    if saves_at is not None:
        take_steps(module, optimizer, range(saves_at))
        shardc.save(folder, module, optimizer, step=saves_at)
        take_steps(module, optimizer, range(saves_at, 10))
    else:
        take_steps(module, optimizer, range(3))  # of no consequence
        step = shardc.load(folder, module, optimizer)["step"]
        take_steps(module, optimizer, range(step, 10))
    return values(module)


@pytest.mark.parametrize("outer", [None, partial(torch.optim.Adam, lr=0.02)], ids=["nesterov", "adam"])
def test_resumes(gloo: GlooPool, tmp_path: Path, outer: Any) -> None:
    """Saved between two outer steps, each group goes on from its own; on another mesh all do so from the first's."""
    sizes = {"dc": 2, "dp": 2}
    wanted = gloo.run(resumed, tmp_path, 6, sizes, None, outer)
    assert (tmp_path / "group-1" / "step-00000006").is_dir()
    assert not torch.equal(wanted[0]["up.weight"], wanted[2]["up.weight"])
    for one, other in zip(gloo.run(resumed, tmp_path, None, sizes, Zero("dp", 3), outer), wanted, strict=True):
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)
    four = gloo.run(resumed, tmp_path, None, {"dc": 4}, None, outer)
    torch.testing.assert_close(four[0]["up.weight"], wanted[0]["up.weight"], rtol=0.1, atol=0.1)
    loaded = shardc.load(tmp_path)["model"]["up.weight"]
    assert loaded.shape == (14, 6)


def test_resumes_among_the_first_steps(gloo: GlooPool, tmp_path: Path) -> None:
    """Groups that are alike still: on any number of them training goes on as it was."""
    wanted = gloo.run(resumed, tmp_path, 4, {"dc": 2, "dp": 2}, None, None, 6)
    for one, other in zip(
        gloo.run(resumed, tmp_path, None, {"dc": 2, "dp": 2}, Zero("dp", 3), None, 6), wanted, strict=True
    ):
        torch.testing.assert_close(one["up.weight"], other["up.weight"], rtol=1e-12, atol=1e-12)


class Late(nn.Module):
    """A second layer that is read by some groups, or later than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, is_read: bool) -> Tensor:
        y = self.first(x)
        return (self.second(y) if is_read else y).square().mean()


def trained_late(folder: Path, is_resumed: bool, is_first_group_early: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dc", "dp"))
    torch.manual_seed(0)
    module = shardc.parallelize(Late().double(), mesh, {"x": P(("dc", "dp"))}, local=Local("dc", 4))
    optimizer, steps = torch.optim.AdamW(module.parameters(), lr=0.02), range(10)
    if is_resumed:
        steps = range(shardc.load(folder, module, optimizer)["step"], 10)
    for step in steps:
        optimizer.zero_grad()
        module(batches()[step], step >= 8 or (is_first_group_early and mesh.get_local_rank("dc") == 0)).backward()
        optimizer.step()
        if step == 5:
            shardc.save(folder, module, optimizer, step=6)
    return values(module)


@pytest.mark.parametrize("is_first_group_early", [False, True])
def test_resumes_with_parameters_that_have_had_no_gradient(
    gloo: GlooPool, tmp_path: Path, is_first_group_early: bool
) -> None:
    wanted = gloo.run(trained_late, tmp_path, False, is_first_group_early)
    for found, expected_ in zip(gloo.run(trained_late, tmp_path, True, is_first_group_early), wanted, strict=True):
        for name, value in expected_.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def without_groups(folder: Path) -> list[float]:
    """The losses of groups that go on from steps that all ranks took together, after steps of groups."""
    module, optimizer = on_groups({"dc": 4}, {"x": P("dc")}, Local("dc", 4))
    take_steps(module, optimizer, range(8))
    shardc.save(folder, module, optimizer)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dc",))
    together = shardc.parallelize(net(), mesh, {"x": P("dc")}, args=(batches()[0],))
    shared = torch.optim.AdamW(together.parameters(), **INNER)
    shardc.load(folder, together, shared)
    assert not any(key.startswith("outer_") for state in shared.state.values() for key in state)
    take_steps(together, shared, range(60))
    shardc.save(folder, together, shared)
    shardc.load(folder, module, optimizer)
    losses = []
    for step in range(8):
        losses.append(float(module(batches()[step]).detach()))
        take_steps(module, optimizer, range(step, step + 1))
    return losses


def test_what_groups_kept_is_left_out_without_them(gloo: GlooPool, tmp_path: Path) -> None:
    for losses in gloo.run(without_groups, tmp_path):
        assert max(losses) < 0.001


def skipping() -> dict[str, Tensor]:
    """One group takes a step less than the others before an outer step that the user asks for."""
    module, optimizer = on_groups({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, Local("dc", 4))
    take_steps(module, optimizer, range(5 - module.shardc.outer.groups.index))
    shardc.outer_step(module, optimizer)
    return values(module)


def test_an_outer_step_has_all_groups_where_one_has_changed(gloo: GlooPool) -> None:
    found = gloo.run(skipping)
    for parameters in found:
        for name, value in parameters.items():
            assert torch.equal(value, found[0][name])


def late_optimizer() -> list[bool]:
    """An optimizer of a pipeline that was made before stages had their parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dc", "pp"))
    module = shardc.parallelize(
        net(), mesh, {"x": P("dc")}, local=Local("dc", 2), pipeline=Pipeline("pp", microbatches=2)
    )
    optimizer = torch.optim.AdamW(module.parameters(), **INNER)
    take_steps(module, optimizer, range(4))
    return [bool(each.isfinite().all()) for each in map(whole, module.shardc.parameters())]


def test_an_optimizer_of_a_pipeline_may_be_made_before(gloo: GlooPool) -> None:
    assert all(map(all, gloo.run(late_optimizer)))


def leaving_out(late: int, key: str) -> tuple[list[bool], dict[str, Tensor]]:
    """Whether this rank's group was in each of three outer steps, of which one group comes late to the second."""
    module, optimizer = on_groups({"dc": 4}, {"x": P("dc")}, Local("dc", 2, patience=1.0))
    groups, taken, store = module.shardc.outer.groups, [], PrefixStore(key, default_store())
    for outer in range(3):
        take_steps(module, optimizer, range(2 * outer, 2 * outer + 1))
        wait_for = {(1, True): ["taken"], (2, False): ["missed"]}.get((outer, groups.index == late))
        store.wait(wait_for or [])
        before = sum(groups.traffic.calls.values())
        take_steps(module, optimizer, range(2 * outer + 1, 2 * outer + 2))
        taken.append(sum(groups.traffic.calls.values()) > before)
        if outer == 1:
            store.set("missed" if groups.index == late else "taken", "")
    return taken, values(module)


@pytest.mark.parametrize("late", [0, 2])
def test_leaves_out_a_late_group(gloo: GlooPool, tmp_path: Path, late: int) -> None:
    """The others go on without it; after the next outer step it has what they have."""
    found = gloo.run(leaving_out, late, str(tmp_path))
    assert [taken for taken, _ in found] == [[True, rank != late, True] for rank in range(4)]
    for _, parameters in found:
        for name, value in parameters.items():
            assert torch.equal(value, found[0][1][name]), name


def of_a_copy() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A copy goes on by itself, with steps of its own; one of its modules runs what a group has."""
    module, optimizer = on_groups({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, Local("dc", 2))
    take_steps(module, optimizer, range(3))
    twin = copy.deepcopy(module)
    losses = module(batches()[5]).detach(), twin(batches()[5]).detach()
    take_steps(twin, torch.optim.AdamW(twin.parameters(), **INNER), range(2))
    assert twin.up(batches()[0][:3]).shape == (3, 14)
    return *losses, values(twin)


def test_of_a_copy(gloo: GlooPool) -> None:
    found = gloo.run(of_a_copy)
    for one, other, parameters in found:
        assert torch.equal(one, other)
        for name, value in parameters.items():
            assert torch.equal(value, found[0][2][name])


def stepped_now() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, optimizer = on_groups({"dc": 2, "dp": 2}, {"x": P(("dc", "dp"))}, Local("dc", 8, parts=2))
    take_steps(module, optimizer, range(3))
    shardc.outer_step(module, optimizer)
    before = values(module)
    shardc.outer_step(module, optimizer)  # nothing has changed
    return before, values(module)


def test_outer_step_of_the_user(gloo: GlooPool) -> None:
    found = gloo.run(stepped_now)
    for before, after in found:
        for name, value in before.items():
            assert torch.equal(value, found[0][0][name])
            assert torch.equal(value, after[name])


def of_own_batches() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each rank gives its own part of the batch; or each group its own batch, without an annotation for the axis."""
    sizes, own = {"dc": 2, "dp": 2}, Local("dc", 4)
    module, optimizer = on_groups(sizes, {"x": P(("dc", "dp"))}, own)
    mesh = module.shardc.outer.groups.comm.device_mesh
    other, other_optimizer = on_groups(sizes, {"x": P("dp")}, own)
    for batch in batches()[:6]:
        part = batch.chunk(4)[mesh.get_rank()]
        for each, stepped, given in (
            (module, optimizer, shardc.shard_batch(part, mesh, P(("dc", "dp")))),
            (other, other_optimizer, batch.chunk(2)[mesh.get_local_rank("dc")]),
        ):
            stepped.zero_grad()
            each(given).backward()
            stepped.step()
    return values(module), values(other)


def test_batches_of_ranks_and_of_groups(gloo: GlooPool) -> None:
    wanted = expected(2, 4, steps=6)
    for rank, found in enumerate(gloo.run(of_own_batches)):
        for parameters in found:
            for name, value in parameters.items():
                torch.testing.assert_close(value, wanted[rank // 2][name], rtol=1e-10, atol=1e-10)


def of_no_optimizer() -> None:
    on_groups({"dc": 4}, {"x": P("dc")}, Local("dc", 4, outer=torch.optim.LBFGS))


def test_check_of_the_outer_optimizer(gloo: GlooPool) -> None:
    with pytest.raises(RuntimeError, match=r"takes a step by gradients alone"):
        gloo.run(of_no_optimizer)


def of_another_model() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dc", "dp"))
    torch.manual_seed(mesh.get_local_rank("dc"))
    module = shardc.parallelize(Net().double(), mesh, {"x": P("dp")}, local=Local("dc", 4), initial="check")
    module(batches()[0])


def test_check_of_initial_values(gloo: GlooPool) -> None:
    with pytest.raises(RuntimeError, match=r"all groups must come with one model"):
        gloo.run(of_another_model)


def test_compiled() -> None:
    """What one group runs, with its part of the batch, and what it sends in outer steps."""
    whole_batch, mesh = batches()[0], Mesh(dc=2, dp=2)
    program = shardc.compile(net(), mesh, {"x": P(("dc", "dp"))}, args=(whole_batch,), local=Local("dc", 20))
    assert {each.axes for each in program.collectives} == {("dp",)}
    loss, _ = program.simulate(whole_batch[:4])
    torch.testing.assert_close(loss, net()(whole_batch[:4]))
    numel = sum(each.numel() for each in net().parameters())
    assert program.memory["optimizer"] == 4 * 8 * numel
    (note,) = [note for note in program.whole.notes if note.startswith("2 groups along dc")]
    assert "every 20 steps" in note
    four = program.recompile(mesh=Mesh(dc=4, dp=1))
    assert four.program.type(four.program.named_inputs["input", "x"]).shape == (2, 6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such axis": ({"local": Local("dx", 4)}, "it has no such axis"),
    "stored over it": ({"zero": Zero("dc", 3)}, "a group has all of its parameters"),
    "stages over it": ({"pipeline": Pipeline("dc", microbatches=2)}, "a group has all stages"),
    "a parameter cut by it": ({"annotations": {"up.weight": P("dc")}}, "groups along dc have all parameters"),
    "minor to another axis": ({"annotations": {"x": P(("dp", "dc"))}}, "name 'dc' before its other axes"),
    "parts of other sizes": ({"args": (torch.ones(7, 6).double(),)}, "2 groups have equal parts of it"),
    "codes of its own": ({"wire": {"dc gradients": "int8"}}, r"say Local\(..., wire='int8'\) in place of it"),
    "other groups": ({"local": Local("dc", 4, groups=3)}, "there are 2 along dc"),
    "no option": ({"local": 20}, "it is no shardc.Local"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, problem = REFUSED[name]
    given = {"annotations": {"x": P(("dc", "dp"))}, "args": (batches()[0],), "local": Local("dc", 4), **changes}
    with pytest.raises(ShardingError, match=problem):
        shardc.compile(net(), Mesh(dc=2, dp=2), given.pop("annotations"), **given)


class WithTargets(nn.Module):
    """Two inputs that belong together."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (x - target).square().mean()


def test_an_input_without_an_annotation_is_named() -> None:
    x, target, mesh = torch.ones(4, 6), torch.zeros(4, 6), Mesh(dc=2)
    local = Local("dc", 4)
    with pytest.raises(ShardingError, match=r"input 'target'(.|\n)*cut dim 0 by 'dc' first too"):
        shardc.compile(WithTargets(), mesh, {"x": P("dc")}, args=(x, target), local=local)
    both = shardc.compile(WithTargets(), mesh, {"x": P("dc"), "target": P("dc")}, args=(x, target), local=local)
    assert both.program.type(both.program.named_inputs["input", "target"]).shape == (2, 6)


def test_refused_on_virtual_ranks() -> None:
    with pytest.raises(ShardingError, match="start 4 ranks with torchrun"):
        shardc.parallelize(net(), Mesh(dc=2, dp=2), {"x": P(("dc", "dp"))}, local=Local("dc", 4))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"every": 0}, "1 or more"),
        ({"every": 2, "after": -1}, "0 or more"),
        ({"every": 2, "parts": 3}, "at most"),
        ({"every": 4, "wire": "1bit"}, "no codec"),
        ({"every": 4, "outer": 0.7}, "makes an optimizer"),
        ({"every": 4, "patience": 0}, "in seconds"),
    ],
)
def test_refused_options(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ShardingError, match=problem):
        Local("dc", **wrong)
