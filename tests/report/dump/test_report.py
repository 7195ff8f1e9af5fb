"""The HTML report in a real browser: it opens fast, agrees with the JSON, and runs no script from a name."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from attending import Attending, draw
from targets import mlp
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Pipeline, ShardingError, Zero, blocks
from shardc.api import Compiled
from shardc.cli.main import main
from shardc.cli.targets.target import TargetOptions, load_target
from shardc.costs.memory import memory_curve, memory_of
from shardc.costs.rings import rings_of
from shardc.report.dump.dump import dump
from shardc.report.dump.html import report_record
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import Explanation

HOSTILE = '"><script>alert(1)<!--</script>\u2028{{data}}'
pytestmark = pytest.mark.xdist_group("browser")


def compiled(target: str, mesh: Mesh, **options: Any) -> Compiled:
    found = load_target(target, TargetOptions({}, None, 64 if target.startswith("hf:") else None, "meta"), mesh)
    return shardc.compile(found.model, mesh, found.annotations, args=found.args, kwargs=found.kwargs, **options)


def small(**options: Any) -> Compiled:
    model, args, kwargs, annotations = mlp()
    return shardc.compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs, **options)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    program = small()
    return program, written(program, tmp_path_factory.mktemp("two_layers"))


@pytest.fixture(scope="module")
def gpt2() -> Compiled:
    return compiled("hf:gpt2", Mesh(dp=2, tp=2))


def written(program: Compiled, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(program.dump("html"), encoding="utf-8")
    return path


# The page beside the JSON.


def collectives_shown(browser: Any) -> list[dict[str, Any]]:
    rows = browser.run(
        "return [...document.querySelectorAll('#collectives-table tbody tr')].map(row => Object.fromEntries("
        "[...row.querySelectorAll('[data-key]')].map(each => [each.dataset.key, each.textContent])))"
    )
    return [{key: number(text) for key, text in row.items()} for row in rows]


def number(text: str) -> Any:
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() else text


def collectives_dumped(program: Compiled) -> list[dict[str, Any]]:
    found = json.loads(program.dump("json", only="collectives"))["collectives"]
    shapes = ("local_shape_in", "local_shape_out")
    shown = (*shapes, "id", "kind", "axes", "phase", "dtype", "bytes", "wire_bytes", "node", "source", "cause")
    return [
        {key: each[key] for key in (*shown, *(key for key in ("stage", "times") if key in each))}
        | {key: str(each[key]) for key in shapes}
        | {"axes": "".join(each["axes"])}
        for each in found
    ]


@pytest.mark.sweep
def test_the_report_of_gpt2_is_there_at_once_and_has_every_collective_parameter_and_op(
    gpt2: Compiled, browser: Any, tmp_path: Path
) -> None:
    path = written(gpt2, tmp_path)
    assert path.stat().st_size < 5_000_000
    assert min(browser.open(path) for _ in range(3)) < 3
    assert collectives_shown(browser) == collectives_dumped(gpt2)
    assert len(browser.texts("#parameters-table tbody tr")) == len(list(gpt2.model.parameters()))
    browser.run("document.querySelector('.actions button').click()")
    browser.run("document.querySelectorAll('details.part').forEach(part => { part.open = true; part.fillPart(); })")
    ops = {node.name for node in gpt2.whole.graph.nodes if node.op == "call_function"}
    assert sorted(ops) == sorted(
        browser.run("return [...document.querySelectorAll('[data-value]')].map(each => each.dataset.value)")
    )
    assert browser.complaints() == []


@pytest.mark.parametrize("plan", ["tensor", "zero", "pipeline", "forward alone", "before lowering", "local"])
def test_the_table_of_collectives_is_that_of_the_json(plan: str, browser: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "zero": {"zero": Zero("dp", 3)},
        "forward alone": {"train": False},
        "pipeline": {"pipeline": Pipeline(microbatches=4)},
    }
    target, axis = ("gpt:gpt_tied", "pp") if plan == "pipeline" else ("targets:mlp", "tp")
    program = compiled(target, Mesh(**{"dp": 2, axis: 2}), **options.get(plan, {}))
    after = {"before lowering": "capture", "local": "localize"}.get(plan, "")
    path = tmp_path / "report.html"
    path.write_text(dump(program, "html", after), encoding="utf-8")
    browser.open(path)
    assert collectives_shown(browser) == ([] if after == "capture" else collectives_dumped(program))
    assert browser.complaints() == []
    if plan == "pipeline":
        boxes = browser.run("return document.querySelectorAll('svg.schedule g.action').length")
        assert boxes == 2 * 2 * 4 and "Schedule" in browser.texts("nav a")


def test_the_program_after_every_pass_has_a_report(
    two_layers: tuple[Compiled, Path], browser: Any, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    for name in two_layers[0].after:
        path.write_text(dump(two_layers[0], "html", name), encoding="utf-8")
        browser.open(path)
        browser.run("document.querySelector('.actions button').click()")
        assert browser.texts(".leaf.value") and browser.complaints() == [], name


# What a reader does.


def test_a_module_that_is_opened_shows_its_ops_and_the_type_of_every_edge(
    two_layers: tuple[Compiled, Path], browser: Any
) -> None:
    browser.open(two_layers[1])
    up = "details.module[data-module=up]"
    assert browser.texts(f"{up} .leaf") == []
    browser.run(f"document.querySelector('{up} > summary').click()")
    assert browser.run(f"return document.querySelector('{up}').open")
    assert any("f32[32@tp, 8]" in text for text in browser.texts(f"{up} .leaf.parameter"))
    ops = browser.texts(f"{up} > .inside > .leaf.value")
    assert any(" dot f32[8@dp, 32@tp]" in op and "← x f32[8@dp, 8]" in op for op in ops)


def test_a_collective_that_is_chosen_says_why_it_is_there_down_to_the_annotations(
    two_layers: tuple[Compiled, Path], browser: Any
) -> None:
    program, path = two_layers
    browser.open(path)
    [found] = [each for each in program.collectives if each.phase == "forward" and each.axes == ("tp",)]
    browser.run(f"document.querySelector('#collectives-table a[href$=\"collective:{found.name}\"]').click()")
    [shown] = browser.texts("#inspector")
    assert found.name in shown and "f32[8@dp, 8]{sum tp}" in shown and "needs it added up" in shown
    ends = set(browser.texts("#inspector a.annotation"))
    assert ends == set(program.explain(found.name).ends) == {"down.weight: P(None, 'tp')"}
    browser.run("document.querySelector('#inspector .close').click()")
    assert browser.run("return document.getElementById('inspector').hidden && !location.hash")


def test_what_is_to_be_typed_to_learn_what_removes_a_collective_is_copied_by_a_click(
    browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of this very plan, as it was typed, which runs."""
    path = tmp_path / "report.html"
    plan = ["targets:mlp", "--mesh", "dp=2,tp=2", "--annotate", "x=dp,-", "--set", "dropout=0.5", "--zero=dp=1"]
    assert main(["dump", *plan[:1], "--format", "html", *plan[1:], f"-o{path}"]) == 0
    browser.open(path)
    browser.run("location.hash = '#collective:all_reduce_tp'")
    [typed] = browser.texts("#inspector .copyable code")
    assert shlex.split(typed) == ["shardc", "explain", *plan, "all_reduce_tp"]
    browser.click("#inspector .copyable button")
    assert browser.run("return String(getSelection())") == typed
    browser.wait("return document.querySelector('#inspector .copyable button').textContent === 'Copied'")
    assert browser.complaints() == []
    assert main([*shlex.split(typed)[1:], "--no-advice"]) == 0
    assert capsys.readouterr().out.startswith("all_reduce_tp: ")


def test_search_is_reached_finds_and_leads_by_the_keyboard_alone(
    two_layers: tuple[Compiled, Path], browser: Any
) -> None:
    browser.open(two_layers[1])
    browser.press("/")
    browser.press("parameter down\ue015\ue007")  # arrow down, enter
    assert browser.texts("#inspector h2") == ["parameterdown.weight"]
    assert browser.texts("#inspector rect title") == ["held by 0, 2", "held by 1, 3"]
    browser.press("\ue00c")  # escape
    assert browser.run("return document.getElementById('inspector').hidden")
    browser.run("location.hash = '#constructor:x'")
    browser.run("location.hash = '#value:no%ZZsuch'")
    assert browser.complaints() == []


def test_a_layout_shows_which_ranks_hold_each_block(browser: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 12)
    mesh = Mesh(dp=2, tp=2, device_ids=(3, 2, 1, 0))
    program = shardc.compile(model, mesh, {"weight": P(blocks(3, "tp"), "dp")}, args=(torch.randn(2, 4),))
    browser.open(written(program, tmp_path))
    browser.run("location.hash = '#parameter:weight'")
    tiles = [["held by 3", "held by 1"], ["held by 2", "held by 0"]] * 3
    assert browser.texts("#inspector rect title") == [title for row in tiles for title in row]


def test_the_report_opens_with_ops_that_run_whole_and_unrequested_gathers(browser: Any, tmp_path: Path) -> None:
    program = shardc.compile(Unruly(), Mesh(dp=2, spare=2), {"x": P("dp")}, args=(torch.randn(4, 8),))
    browser.open(written(program, tmp_path))
    first = browser.texts(".look .alarm")
    assert [text.lstrip("!") for text in first] == [
        "Axis spare cuts nothing: its 2 ranks all do the same work.",
        "1 op without a rule, run whole on every rank",
        "1 gather that no annotation asks for",
    ]
    notes = browser.texts("#notes li")
    assert any("sort" in note and "no annotation asks for it" in note for note in notes)
    assert any("tests.whole" in note and "register_rule" in note for note in notes)


def test_the_report_draws_the_predicted_step_of_a_known_machine(browser: Any, tmp_path: Path) -> None:
    program = small(links={"dp": "ethernet"})
    browser.open(written(program, tmp_path))
    assert "Predicted time" in browser.texts("nav a")
    marks = browser.run(
        "return [...document.querySelectorAll('#time a.mark')].map(each => each.getAttribute('aria-label'))"
    )
    assert sorted(marks) == sorted(each.name for each in program.collectives)
    assert browser.complaints() == []


# Names.


@pytest.mark.parametrize("links", [(), "pcie"], ids=["no machine", "a machine"])
def test_the_report_shows_rings_with_what_they_send_hold_and_wait_for(links: Any, browser: Any, tmp_path: Path) -> None:
    options = {"links": links} if links else {}
    program = shardc.compile(
        Attending(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=draw(16, dtype=torch.float32), attention="ring", **options
    )
    browser.open(written(program, tmp_path))
    cells = browser.run("return [...document.querySelectorAll('#rings-table tbody td')].map(td => td.innerText)")
    rings = rings_of(program.program)
    assert len(cells) == len(rings) * (11 if links else 8)
    for name in ("steps", "wire_bytes", "held"):
        assert {f"{getattr(each, name):,}" for each in rings} <= set(cells), name


@torch.library.custom_op("tests::whole", mutates_args=())
def whole(x: Tensor) -> Tensor:
    return x.sin()


whole.register_fake(torch.empty_like)


class Unruly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum(1).sort().values.sin().sum() + whole(self.up(x).detach()).sum()


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE.replace(".", ""), nn.Linear(4, 4))
        self.register_parameter("constructor", nn.Parameter(torch.ones(4)))

    def forward(self, __proto__: Tensor) -> Tensor:
        [layer] = self.children()
        return (layer(__proto__) * self.constructor).sum()


def test_names_that_are_scripts_are_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    annotations = {"__proto__": P("dp"), "param:*<script>*weight": P("tp")}
    program = shardc.compile(Hostile(), Mesh(dp=2, tp=2), annotations, args=(torch.ones(4, 4),))
    path = written(program, tmp_path)
    browser.open(path)
    browser.run("document.querySelector('.actions button').click()")
    assert any(HOSTILE in name for name in browser.texts("details.module b"))
    for link in browser.run(
        "return [...document.querySelectorAll('#parameters-table a, .annotations a')].map(a => a.hash)"
    ):
        browser.run("location.hash = arguments[0]", link)
        assert not browser.run("return document.getElementById('inspector').hidden")
    assert browser.run("return document.scripts.length") == 2 and browser.complaints() == []


def test_no_script_runs_but_the_pages_own(two_layers: tuple[Compiled, Path], browser: Any) -> None:
    browser.open(two_layers[1])
    browser.run("const made = document.createElement('script'); made.text = 'taken = 1'; document.body.append(made)")
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x onerror=\"taken = 1\">')")
    assert browser.run("return typeof taken") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


# The record, without a browser.


@pytest.mark.parametrize("plan", ["tensor", "zero", "moe"])
def test_the_curve_of_memory_is_highest_at_the_peak(plan: str) -> None:
    program = (
        compiled("moe:moe", Mesh(ep=4)).whole
        if plan == "moe"
        else small(zero=Zero("dp", 3) if plan == "zero" else None).whole
    )
    curve = memory_curve(program)
    at = [sum(alive(changes, place) for changes in curve.changes.values()) for place in range(len(curve.places) + 1)]
    assert max(at) == memory_of(program)["peak"]
    saved = alive(curve.changes["saved"], curve.starts["backward"] - 1)
    assert saved == memory_of(program)["saved"]


def alive(changes: list[tuple[int, int]], place: int) -> int:
    return next((nbytes for start, nbytes in reversed(changes) if start <= place), 0)


def test_the_curve_of_each_rank_of_a_pipeline_is_highest_at_its_peak() -> None:
    program = compiled("gpt:gpt_tied", Mesh(pp=2), pipeline=Pipeline(microbatches=4))
    ranks = report_record(program, program.whole)["report"]["ranks"]
    assert [max(nbytes for _, nbytes in rank["curve"]) for rank in ranks] == [r["memory"]["peak"] for r in ranks]


def test_the_page_knows_of_every_value_and_collective_what_explain_answers(two_layers: tuple[Compiled, Path]) -> None:
    program = two_layers[0].whole
    report, explainer = report_record(two_layers[0], program)["report"], Explainer(program)
    assert list(report["because"]) == [each.name for each in two_layers[0].collectives]
    for name, because in report["because"].items():
        found = explainer.explain(f"value:{name}")
        for part, shown in zip(found.parts or (found,), because["parts"], strict=True):
            assert ways(report, shown["chains"]) == answered(part) and len(shown["reasons"]) == len(part.reasons) > 0
        assert [each["is_chosen"] for each in because["choices"]].count(True) >= 1
    for node in program.graph.nodes:
        if node.op != "output" and explainer.node(node).kind != "collective":
            assert ways(report, report["why"].get(node.name, [])) == answered(explainer.node(node)), node


def answered(found: Explanation) -> list[tuple[Any, ...]]:
    return [
        (chain.axis, chain.end, [(step.value, step.role, step.via, step.call) for step in chain.steps])
        for chain in found.chains
    ]


def ways(report: dict[str, Any], chains: list[Any]) -> list[tuple[Any, ...]]:
    """The chains as a reader of the page puts them together."""
    found = []
    for axis, place in chains:
        steps: list[tuple[str, ...]] = []
        end = report["annotations"][report["steps"][place][0]]
        while place >= 0:
            _, *step, place = report["steps"][place]
            steps.insert(0, tuple(step))
        found.append((axis, end, steps))
    return found


def test_two_reports_of_one_model_are_the_same_to_the_byte(two_layers: tuple[Compiled, Path]) -> None:
    assert small().dump("html") == two_layers[1].read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_beside_itself(two_layers: tuple[Compiled, Path]) -> None:
    page = two_layers[1].read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("default-src 'none'") == 1 and "unsafe" not in page
    assert "innerHTML" not in page and "eval(" not in page


def test_a_part_of_a_report_is_refused() -> None:
    with pytest.raises(ShardingError, match="search box"):
        small().dump("html", only="collectives")
