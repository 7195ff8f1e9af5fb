"""Suggestions: each compiles and runs, costs what it says, is deterministic, and keeps what is fixed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from attending import WIDTH, Attending
from gpt import GPT, Config
from left_processes import no_process_left
from search_models import Blocks, chain, transformer
from torch import nn
from torch.distributed.tensor import Shard

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero
from shardc.language.errors import OptionError
from shardc.language.machine import DEVICES, LINKS, Link, Machine
from shardc.search.found import Found
from shardc.search.pricing.price import Price
from shardc.search.reasons import corrected
from shardc.search.space.plan import Axis, Plan
from shardc.search.suggestion import Suggestion
from shardc.search.task import Task
from shardc.verify import verify

NO_PIPELINE = {"pipeline": None}
LARGE = (pytest.mark.sweep, pytest.mark.soak)


def small_model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Real tensors of a model whose dims divide by four."""
    torch.manual_seed(0)
    model, (x,) = transformer(width=128, samples=4, positions=8)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model, (torch.randn(x.shape),)


@pytest.fixture(scope="module")
def suggested() -> tuple[Suggestion, ...]:
    """Suggestions for the small model on slow links, of several meshes and options."""
    model, args = small_model()
    return shardc.suggest(model, 4, args=args, links=Machine({"*": Link(1e-7, 1e9)}, "cpu"))


def plan_of(suggestion: Suggestion) -> tuple[Any, ...]:
    return suggestion.mesh, *suggestion.annotations.items(), suggestion.zero, suggestion.remat, suggestion.pipeline


def test_long_causal_rows_are_put_in_zigzag() -> None:
    """Of one sample, the positions are what ranks can share; in zigzag none of them waits for the busiest."""
    with torch.device("meta"):
        model, x = Attending(heads=1, num_keys=1), torch.empty(1, 16384, WIDTH)
    best = shardc.suggest(model, 2, args=(x,), fix={"mesh": "2"})[0]
    (spec,) = (spec for name, spec in best.annotations.items() if name == "x")
    assert [axis for _, axis in spec.zigzags.items()] == [*best.mesh.axis_names]


@pytest.mark.xdist_group("suggested")
def test_suggestions_are_ordered_by_time_and_no_two_are_the_same(suggested: tuple[Suggestion, ...]) -> None:
    assert [each.seconds for each in suggested] == sorted(each.seconds for each in suggested)
    assert len({each.text() for each in suggested}) == len(suggested) > 1


def test_no_plan_is_listed_again_with_an_idle_option_or_its_axes_in_another_order() -> None:
    x = torch.empty(512, 256, device="meta")
    found = shardc.suggest(chain(256, 4096, 256), 4, args=(x,), links="nvlink", device="h100", fix=NO_PIPELINE)
    assert len({(tuple(sorted(each.mesh.sizes.values())), repr(each.cost)) for each in found}) == len(found) > 3


def found(seconds: float, peak: float) -> Found:
    return Found(Plan((Axis("dp", 4),)), Price(seconds, 0, 0, 0, 0, 0, 0, peak, 0, 0))


def test_of_plans_that_take_equal_time_the_one_of_least_memory_is_better() -> None:
    plans = [found(2.0, 7), found(2.0, 5), found(1.0, 9)]
    by_time, by_memory = Task(4, Machine()), Task(4, Machine(), objective="memory")
    assert sorted(plans, key=lambda each: each.rank(by_time)) == [plans[2], plans[1], plans[0]]
    assert min([found(3.0, 5), plans[1]], key=lambda each: each.rank(by_memory)) == plans[1]


def test_estimates_of_other_plans_are_corrected_and_in_whole_bytes() -> None:
    other = corrected(found(4.0, 7), chosen=found(3.0, 10), estimate=found(2.0, 3))
    assert (other.price.seconds, other.price.peak) == (6.0, 23)


def test_an_axis_that_cuts_nothing_is_named_in_the_reasons() -> None:
    x = torch.empty(64, 512, device="meta")
    (best, *others) = shardc.suggest(
        chain(512, 512, 512, 512), 4, args=(x,), links="ethernet", device="h100", fix=NO_PIPELINE
    )
    assert not best.annotations
    assert [each for each in best.reasons if "cuts no work: its 4 ranks compute the same" in each]
    for each in others:
        cutting = {axis for spec in each.annotations.values() for axis in spec.axes}
        said = {reason.partition(" ")[0] for reason in each.reasons if "cuts no work" in reason}
        assert said == {*each.mesh.axis_names} - cutting


def test_blocks_of_unlike_widths_are_found_a_plan_as_good_as_megatrons() -> None:
    """A cut of the residual stream gains most alone, and nothing gains beside it."""
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, hidden), nn.GELU(), nn.Linear(hidden, 1024))
            for hidden in (4096, 2048, 8192)
        ]
        model, x = Blocks(blocks), torch.empty(512, 1024)
    ways: dict[str, Any] = {"args": (x,), "links": Machine({"*": "nvlink"}, "h100")}
    best = shardc.suggest(model, 4, **ways, fix=NO_PIPELINE)[0]
    megatron = {"*.1.weight": P("tp"), "*.3.weight": P(None, "tp")}
    by_hand = [
        shardc.compile(model, Mesh(tp=4), megatron, **ways),
        shardc.compile(model, Mesh(dp=2, tp=2), {"x": P("dp"), **megatron}, **ways, zero=Zero("dp", 2)),
    ]
    assert best.seconds <= min(each.timeline.makespan for each in by_hand)


def test_features_are_cut_where_an_axis_for_them_is_fixed() -> None:
    x = torch.empty(64, 512, device="meta")
    best = shardc.suggest(chain(512, 1024, 512), 4, args=(x,), links="nvlink", device="h100", fix={"cp": 2})[0]
    assert best.mesh.sizes["cp"] == 2
    assert "cp" in best.annotations["input"].axes


@pytest.mark.xdist_group("suggested")
def test_every_suggestion_compiles_and_costs_what_its_program_costs(suggested: tuple[Suggestion, ...]) -> None:
    model, args = small_model()
    for each in suggested:
        program = shardc.compile(model, **each, args=args)
        assert each.memory == program.memory
        assert each.seconds == program.timeline.makespan
        assert each.cost.num_collectives == sum(collective.times for collective in program.collectives)
        assert each.cost.wire_bytes == sum(one.times * one.wire_bytes for one in program.collectives)


@pytest.mark.xdist_group("suggested")
def test_every_suggestion_equals_one_device(suggested: tuple[Suggestion, ...]) -> None:
    model, args = small_model()
    for each in suggested:
        options: Mapping[str, Any] = {name: each[name] for name in each if name not in ("mesh", "annotations")}
        differences = verify(model, each.mesh, each.annotations, args=args, options=options)
        assert all(difference.is_small for difference in differences), each.summary()


@pytest.mark.xdist_group("suggested")
def test_a_suggestion_trains_on_virtual_ranks(suggested: tuple[Suggestion, ...]) -> None:
    for each in suggested[:2]:
        losses = []
        for is_parallel in (False, True):
            model, args = small_model()
            if is_parallel:
                links_and_optimizer = ("links", "optimizer")
                model = shardc.parallelize(model, **{k: v for k, v in each.items() if k not in links_and_optimizer})
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(3):
                loss = model(*args)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-5), each.summary()
        assert losses[2] < losses[0]


@pytest.mark.xdist_group("suggested")
def test_a_suggestion_shows_itself_in_one_line(suggested: tuple[Suggestion, ...]) -> None:
    assert [repr(each) for each in suggested] == [f"<{each.summary()}>" for each in suggested]


@pytest.mark.xdist_group("suggested")
def test_parallelize_takes_a_suggestion_as_it_is(suggested: tuple[Suggestion, ...]) -> None:
    model, args = small_model()
    expected = model(*args).item()
    assert shardc.parallelize(model, **suggested[0])(*args).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.xdist_group("suggested")
def test_the_text_of_a_suggestion_is_its_plan(suggested: tuple[Suggestion, ...]) -> None:
    for each in suggested:
        model, args = small_model()
        names: dict[str, Any] = {"shardc": shardc, "model": model}
        exec(each.text(), names)
        assert (names["mesh"], names["annotations"]) == (each.mesh, dict(each.annotations))
        model = names["model"]
        model(*args)
        assert model.program.memory == each.memory  # type: ignore[union-attr, operator]


@pytest.mark.xdist_group("suggested")
def test_neither_no_grad_nor_evaluation_changes_what_is_suggested(suggested: tuple[Suggestion, ...]) -> None:
    model, args = small_model()
    links = Machine({"*": Link(1e-7, 1e9)}, "cpu")
    with torch.no_grad():
        found = shardc.suggest(model.eval(), 4, args=args, links=links)
    assert [plan_of(each) for each in found] == [plan_of(each) for each in suggested]
    assert not model.training and not torch.is_inference_mode_enabled()


IN_A_PROCESS = """
import torch, shardc
from search_models import Blocks, chain, transformer
model, args = transformer(width=256, samples=4, positions=32)
for each in shardc.suggest(model, 2, args=args, links="pcie", device="h100", top=3):
    print(each.to_json())
"""


@pytest.mark.slow
def test_suggestions_are_the_same_in_every_process() -> None:
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS], env=environment, capture_output=True, text=True, check=True
        )
        texts.add(run.stdout)
    assert len(texts) == 1 and "mesh" in texts.pop()


@pytest.mark.parametrize(
    ("fix", "keeps"),
    [
        ({"tp": 2}, lambda each: each.mesh.sizes["tp"] == 2),
        ({"tp": 1, "zero": 3, "pipeline": None}, lambda each: "tp" not in each.mesh.sizes and each.zero.stage == 3),
        ({"zero": [0, 1], "pipeline": None}, lambda each: each.zero is None or each.zero.stage == 1),
        ({"pp": 2}, lambda each: each.pipeline is not None and each.mesh.sizes["pp"] == 2),
        ({"mesh": "2x2", "pipeline": None}, lambda each: list(each.mesh.sizes.values()) == [2, 2]),
        ({"pipeline": Pipeline("pp", 4)}, lambda each: each.pipeline.microbatches == 4),
    ],
    ids=["tp=2", "no tp, zero=3", "zero 0 or 1", "pp=2", "2x2", "4 microbatches"],
)
def test_what_is_fixed_is_in_every_suggestion(fix: dict[str, Any], keeps: Any) -> None:
    model, args = transformer(width=256, samples=8, positions=32)
    found = shardc.suggest(model, 4, args=args, links="nvlink", device="h100", fix=fix)
    assert found and all(map(keeps, found)), [each.summary() for each in found]


@pytest.mark.parametrize("fix", [pytest.param({"mesh": "2x2x2"}, marks=LARGE), {"dp": 2, "tp": 2, "tp2": 2}], ids=str)
def test_three_axes_may_be_fixed(fix: dict[str, Any]) -> None:
    model, args = transformer(width=256, samples=8, positions=32)
    found = shardc.suggest(model, 8, args=args, links="nvlink", device="h100", fix={**fix, **NO_PIPELINE})
    assert found and all(list(each.mesh.sizes.values()) == [2, 2, 2] for each in found)


def test_plans_are_chosen_by_what_they_send_in_codes() -> None:
    """A plan has the entries for its own axes, costs what its program costs, and runs; without codes it is slower."""
    model, args = small_model()
    links, wire = Machine({"*": Link(1e-7, 1e8)}, "cpu"), {"dp": "int8", "tp activations": "int8"}
    first = shardc.suggest(model, 4, args=args, links=links, wire=wire, fix=NO_PIPELINE, top=1)[0]
    assert first["wire"] and first["wire"].items() <= wire.items()
    assert f"wire={first['wire']}" in first.text()
    assert {key.split()[0] for key in first["wire"]} <= {*first.mesh.axis_names}
    compiled = shardc.compile(model, args=args, **first)
    assert compiled.memory == dict(first.memory)
    sent = sum(each.wire_bytes for each in compiled.collectives)
    assert sent == first.cost.wire_bytes < sum(each.wire_bytes for each in compiled.recompile(wire=None).collectives)
    plain = shardc.suggest(model, 4, args=args, links=links, fix=NO_PIPELINE, top=1)[0]
    assert first.seconds <= plain.seconds
    shardc.parallelize(model, **first)(*args).sum().backward()


def test_given_annotations_are_in_every_suggestion() -> None:
    model, args = transformer(width=256, samples=8, positions=32)
    given = {"*.mlp.down.weight": P(None, "tp"), "x": P("dp")}
    found = shardc.suggest(model, 4, args=args, annotations=given, links="nvlink", device="h100", fix=NO_PIPELINE)
    assert found and all(given.items() <= each.annotations.items() for each in found)
    assert all({"dp", "tp"} <= set(each.mesh.axis_names) for each in found)


def test_an_annotation_may_name_one_block_of_many() -> None:
    """One that is not among the few blocks by which plans are compared."""
    model, args = transformer(width=128, samples=8, positions=16, layers=4)
    given = {"blocks.3.mlp.down.weight": P(None, "tp")}
    (found, *_) = shardc.suggest(model, 2, args=args, annotations=given, links="nvlink", device="h100", fix=NO_PIPELINE)
    assert found.annotations.items() >= given.items()


@pytest.mark.parametrize("name", ["dp", "data"])
def test_an_axis_by_which_the_user_cuts_samples_is_one_of_samples(name: str) -> None:
    """So that ZeRO is over it."""
    model, args = small_model()
    given = {"x": P(name)}
    (found, *_) = shardc.suggest(
        model, 4, args=args, annotations=given, links="nvlink", device="h100", fix=NO_PIPELINE | {"zero": 3}
    )
    assert found.zero == Zero(name, 3) and found.annotations.items() >= given.items()


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"x": P("rows"), "blocks.1.mlp.up.weight": P(None, "width")}, {"width": 2}),
        ({"x": P("dp"), "param:*": P()}, {"mesh": "2x2"}),
        pytest.param(
            {"x": P("a"), "*.mlp.up.weight": P("b"), "*.mlp.down.weight": P(None, "c")}, {"mesh": "2x2x2"}, marks=LARGE
        ),
    ],
    ids=str,
)
def test_every_axis_that_annotations_name_is_one_of_the_mesh(given: dict[str, P], fix: dict[str, Any]) -> None:
    model, args = transformer(width=256, samples=8, positions=32)
    devices = 8 if "2x2x2" in fix.values() else 4
    found = shardc.suggest(
        model, devices, args=args, annotations=given, links="nvlink", device="h100", fix=fix | NO_PIPELINE
    )
    named = {axis for spec in given.values() for axis in spec.axes}
    assert found and all(named <= {*each.mesh.axis_names} for each in found)
    assert all(given.items() <= each.annotations.items() for each in found)


def test_what_is_fixed_is_said_where_no_plan_keeps_it() -> None:
    model, args = transformer(width=256, samples=8, positions=32)
    with pytest.raises(ShardingError, match=r"fix=\{'mesh': '2x2', 'pipeline': None\}"):
        shardc.suggest(model, 4, args=args, annotations={"x": P("a", "b", "c")}, fix={"mesh": "2x2", **NO_PIPELINE})


@pytest.mark.sweep
def test_less_memory_than_a_plan_needs_besides_what_it_saves_is_no_error() -> None:
    with torch.device("meta"):
        model, ids = GPT(Config(layers=3, vocab=256, context=64, width=128, heads=4)), torch.zeros(8, 64).long()
    ways: dict[str, Any] = {"args": (ids, ids), "links": "nvlink", "device": "h100", "fix": {"tp": 4, **NO_PIPELINE}}
    assert all(each.excess > 0 for each in shardc.suggest(model, 4, memory="1MB", top=2, **ways))


@pytest.mark.sweep
def test_what_is_saved_is_cut_where_memory_is_short() -> None:
    with torch.device("meta"):
        config = Config(layers=4, vocab=512, context=1024, width=1024, heads=8)
        model, ids = GPT(config), torch.zeros(8, 1024).long()
    far = replace(DEVICES["h100"], host=1e9)  # host memory is slow to reach
    ways: dict[str, Any] = {"args": (ids, ids), "links": "nvlink", "device": far, "fix": {"tp": 4, **NO_PIPELINE}}
    tight, ample = (shardc.suggest(model, 4, memory=memory, top=1, **ways) for memory in ("520MB", "80GB"))
    whole = shardc.compile(model, **{**tight[0], "saved": None}, args=(ids, ids))
    assert tight[0].saved == {"blocks.*": "tp"} and tight[0].memory["peak"] < whole.memory["peak"]
    assert "saved={'blocks.*': 'tp'}" in tight[0].text() and "saved={'blocks.*': 'tp'}" in tight[0].summary()
    assert any(reason.startswith("saved={'blocks.*': 'tp'}: with all saved whole") for reason in tight[0].reasons)
    assert shardc.compile(model, **tight[0], args=(ids, ids)).memory == tight[0].memory
    assert not any(each.saved for each in ample)


@pytest.mark.sweep
def test_where_nothing_fits_the_optimizer_or_parameters_too_are_in_host_memory() -> None:
    """A plan that fits without is not looked at there."""
    model, args = transformer(width=256, samples=4, positions=32)
    ways: dict[str, Any] = {"args": args, "links": "nvlink", "device": "h100", "fix": NO_PIPELINE, "top": 4}
    ample, tight = (shardc.suggest(model, 2, memory=memory, **ways) for memory in ("80GB", "8MB"))
    assert not any(each.zero and each.zero.offload for each in ample)
    first = tight[0]
    assert first.zero is not None and first.zero.offload and first.fits and first.memory["offloaded"] > 8e6
    assert "offload=" in first.text() and "offload=" in first.summary()
    assert shardc.compile(model, **first, args=args).memory == first.memory


def test_where_nothing_fits_the_nearest_plan_says_by_how_many_bytes() -> None:
    model, args = transformer(width=256, samples=4, positions=32)
    ways = {"args": args, "links": "nvlink", "device": "h100", "fix": NO_PIPELINE}
    found = shardc.suggest(model, 2, memory="100kB", **ways)
    first = found[0]
    assert not any(each.fits for each in found)
    assert [each.excess for each in found] == sorted(each.memory["peak"] - 100_000 for each in found)
    assert f"{first.excess / 1e6:.1f} MB too much" in first.summary()
    smallest = shardc.suggest(model, 2, objective="memory", top=1, **ways)[0]
    assert first.memory["peak"] <= smallest.memory["peak"] * 1.001


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"devices": 0}, "devices: 0"),
        ({"nodes": 3}, "nodes=3"),
        ({"memory": "many"}, "memory"),
        ({"objective": "speed"}, "objective='speed'"),
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"fix": {"tq": 2}}, "'tq'"),
        ({"fix": {"tp": 3}}, "3"),
        ({"fix": {"zero": 4}}, "4"),
        ({"fix": {"zero": Zero("dp", 3)}}, "say a stage, 0 to 3"),
        ({"fix": NO_PIPELINE | {"saved": {"nosuch.*": "host"}}}, "a glob over .* modules"),
        ({"fix": {"mesh": "2x3"}}, "say sizes of its axes with the product 4"),
        ({"fix": [2]}, r"fix: of type list(.|\n)*write fix=\{'tp': 4\}"),
        ({"fix": {2: 2}}, "a plan has no such part"),
        ({"fix": {"zero": []}}, "it allows no value"),
        ({"annotations": {"x": "dp"}}, r"annotation 'x': 'dp'(.|\n)*write a P"),
        ({"annotations": {"x": [Shard(0)]}}, r"annotation 'x'(.|\n)*write a P"),
        ({"links": "nvlnk"}, "nvlnk"),
        ({"device": "h1000"}, "h1000"),
        ({"nodes": 2, "links": "nvlink"}, "no link joins the nodes"),
        ({"annotations": {"*.weigth": P("tp")}}, r"weigth'(.|\n)*it matches nothing"),
        ({"args": ()}, "x"),
        ({"batch": 0}, "batch"),
        ({"top": 0}, "top"),
        ({"jobs": 0}, "jobs"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], names: str) -> None:
    model, args = transformer(width=64, samples=4, positions=8)
    arguments = {"devices": 4, "args": args, "fix": NO_PIPELINE} | changed
    with pytest.raises(ShardingError, match=names):
        shardc.suggest(model, arguments.pop("devices"), **arguments)


def test_a_module_that_is_none_is_named() -> None:
    with pytest.raises((ShardingError, OptionError), match="model"):
        shardc.suggest(torch.relu, 2, args=(torch.ones(2),))  # type: ignore[arg-type]


def test_one_device_needs_no_collective() -> None:
    model, args = transformer(width=64, samples=4, positions=8)
    first, *_ = shardc.suggest(model, 1, args=args)
    assert first.mesh == Mesh(dp=1) and first.cost.num_collectives == 0 and first.zero is None


@pytest.mark.parametrize(
    ("devices", "memory", "fix"),
    [(4, float("inf"), {}), pytest.param(2, 16e6, {"pipeline": None}, marks=pytest.mark.sweep)],
)
def test_suggestions_are_the_same_with_several_processes(devices: int, memory: float, fix: dict[str, Any]) -> None:
    model, args = transformer(width=256, samples=4, positions=32)
    options: dict[str, Any] = {"links": "pcie", "device": "h100", "memory": memory, "fix": fix}
    with no_process_left():
        one, several = (shardc.suggest(model, devices, args=args, **options, jobs=jobs) for jobs in (1, 3))
    assert [each.to_json() for each in one] == [each.to_json() for each in several]
    assert one.compiled == several.compiled and one.candidates == several.candidates


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_gives_the_best_so_far(jobs: int) -> None:
    model, args = transformer(width=256, samples=4, positions=32)
    seen: list[str] = []

    def interrupt(text: str) -> None:
        seen.append(text)
        if "with options" in text or len(seen) == 2:
            raise KeyboardInterrupt

    with no_process_left():
        found = shardc.suggest(model, 4, args=args, links="nvlink", device="h100", progress=interrupt, jobs=jobs)
    assert found and isinstance(found[0].zero, Zero | None)


class Scores(nn.Module):
    """Blocks over ``[sample, position, width]``, and scores that are returned with the loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        return scores.square().mean(), scores


def test_where_memory_is_short_no_more_is_computed_again_than_must_be() -> None:
    """The best saves as much as there is memory for, and beats plans that compute all or half of the blocks again."""
    with torch.device("meta"):
        model, x = Scores(), torch.empty(16, 256, 64)
    plain = shardc.compile(model, Mesh(dp=2), {"x": P("dp")}, args=(x,), optimizer="adamw")
    half, full = (plain.recompile(remat=shardc.Remat("blocks.*", every=every)) for every in (2, 1))
    limit = (plain.memory["peak"] + half.memory["peak"]) // 2
    links = Machine({"*": LINKS["nvlink"]}, DEVICES["h100"])
    fixed = {"pipeline": None, "mesh": "2"}
    best = shardc.suggest(model, 2, args=(x,), memory=limit, links=links, fix=fixed)[0]
    others = [each.recompile(links=links).timeline.makespan for each in (half, full)]
    assert best.memory["peak"] <= limit
    assert best.seconds < min(others)
