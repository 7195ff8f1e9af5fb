"""Names that explain accepts: every name that shardc prints, and every name of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from explain_cases import MESH, case, compiled
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P, ShardingError
from shardc.api import Compiled
from shardc.report.dump.html import report_record
from shardc.report.explain.explain import Explainer
from shardc.report.explain.explanation import Explanation

pytestmark = pytest.mark.xdist_group("explain")  # who shares what is made once


def explainer(program: Compiled) -> Explainer:
    others = {name: each for name, each in program.after.items() if each is not program.whole}
    return Explainer(program.whole, program.model, others)


# The model's own names.


def test_the_second_name_of_a_tied_parameter_is_explained_as_the_first() -> None:
    program = compiled("hf:gpt2", MESH, {"n_layer": 1})
    first, second = (program.explain(name) for name in ("transformer.wte.weight", "lm_head.weight"))
    assert (second.chains, second.type, second.ends) == (first.chains, first.type, first.ends)
    assert "lm_head.weight and transformer.wte.weight are one parameter, tied" in second.text()
    assert program.explain("lm_head").parts


class Odd(nn.Module):
    """A module whose parts are called otherwise than by their own forward, twice, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.once = self.again = nn.Linear(8, 8)
        self.nothing, self.unused = nn.Identity(), nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.nothing(self.attention(x, x, x, need_weights=False)[0])
        for layer in self.layers:
            x = self.again(layer(self.once(x))) * self.scale
        return x.square().mean()


@pytest.fixture(scope="module")
def odd() -> Compiled:
    annotations = {"x": P("dp"), "attention.out_proj.weight": P(None, "tp"), "again.weight": P("tp")}
    return shardc.compile(Odd(), MESH, annotations, args=(torch.randn(4, 6, 8),))


def test_what_is_not_called_by_its_own_forward_is_explained(odd: Compiled) -> None:
    assert odd.explain("attention.out_proj.weight").ends == ("attention.out_proj.weight: P(None, 'tp')",)
    held = odd.explain("attention.out_proj")
    assert [part.name for part in held.parts] == ["attention.out_proj.weight", "attention.out_proj.bias"]
    assert "no op of the program is its own: these are its parameters" in held.text()
    assert [part.name for part in odd.explain("unused").parts] == ["unused.weight", "unused.bias"]
    assert odd.explain("nothing").text().endswith("no op of the program is its own and it has no parameters\n")
    assert "again and once are one module" in odd.explain("again").text()
    assert odd.explain("again.weight").ends == odd.explain("once.weight").ends == ("again.weight: P('tp')",)
    assert odd.explain("(model)").parts and odd.explain("layers").parts


def test_every_parameter_buffer_and_module_of_the_model_is_explained(odd: Compiled) -> None:
    for name, _ in odd.model.named_parameters(remove_duplicate=False):
        assert odd.explain(name).name == name
    for name, _ in [*odd.model.named_buffers(), *odd.model.named_modules(remove_duplicate=False)]:
        assert odd.explain(name or "(model)").text()


def test_a_name_is_typed_as_it_is_printed(odd: Compiled) -> None:
    gradient = odd.explain("gradient:layers.0.bias")
    assert gradient.kind == "gradient"
    assert odd.explain("the gradient layers.0.bias") == odd.explain("gradient layers.0.bias") == gradient
    assert odd.explain("parameter once.weight") == odd.explain("once.weight") == odd.explain("param:once.weight")
    assert odd.explain("once.weight (once)") == odd.explain("once.weight")
    assert odd.explain("input x") == odd.explain("x")
    said = odd.explain("again.weight: P('tp')")
    assert said.kind == "annotation" and [part.name for part in said.parts] == ["once.weight"]
    with pytest.raises(ShardingError, match=r"explain 'gradient:once\.wieght'(.|\n)*did you mean once\.weight"):
        odd.explain("gradient:once.wieght")


@pytest.mark.parametrize(("name", "remedy"), [("stage:1", "--pipeline"), ("gradient:weight", "--no-train")])
def test_a_kind_that_the_program_does_not_have_is_refused_with_the_option_that_adds_it(name: str, remedy: str) -> None:
    program = shardc.compile(nn.Linear(4, 4), Mesh(dp=2), {}, args=(torch.ones(4, 4),), train=False)
    kind = name.partition(":")[0]
    with pytest.raises(ShardingError, match=rf"a {kind} of the program\n  it has none\n  .*{remedy}"):
        program.explain(name)


class Kinds(nn.Module):
    """Has names that read as kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.gradient = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"the gradient": self.gradient(self.stage(batch["input x"])).sum()}


def test_a_name_in_the_model_that_reads_as_a_kind_is_that_name() -> None:
    annotations = {"batch.input x": P("dp"), "gradient.weight": P("tp")}
    program = shardc.compile(Kinds(), MESH, annotations, args=({"input x": torch.randn(4, 4)},))
    assert [program.explain(name).kind for name in ("the gradient", "batch.input x", "stage", "gradient")] == [
        "output", "input", "module", "module"
    ]  # fmt: skip
    assert program.explain("gradient:gradient.weight").kind == "gradient"


def test_a_node_that_only_an_earlier_program_has_is_explained_from_it(odd: Compiled) -> None:
    known = explainer(odd)
    for after, program in odd.after.items():
        for node in program.graph.nodes:
            if node.op == "call_function":
                assert known.explain(node.name).text(), (after, node)
    reshard = next(node.name for node in odd.at("insert_reshards").calls if node.name.startswith("reshard"))
    assert "it stands in place of" in odd.explain(reshard).text()


# Every name that is printed.


class Shifted(nn.Module):
    """Looks at neighbours along a dim that is cut, unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv1d(4, 4, 3, padding=1), nn.Embedding(10, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.conv(x) + torch.roll(x, 1, -1)
        return (F.pad(x[..., 1:], (0, 1)) + self.table(ids).mean()).square().sum()


def shifted() -> Compiled:
    annotations = {"x": P(None, None, "tp"), "table.weight": P("dp"), "ids": P("dp")}
    given = torch.randn(2, 4, 18), torch.randint(10, (4, 3))
    return shardc.compile(Shifted(), Mesh(dp=2, tp=4), annotations, args=given)


DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")
SOME = ("gpt2", "moe", "vit", "pipeline", "tied, zero 3")


def programs(name: str) -> Compiled:
    return shifted() if name == "windows" else case(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in SOME] + ["windows"])
def test_every_name_that_is_printed_can_be_typed(name: str) -> None:
    """In the text and the JSON of the dump, the drawing, the report, and in what explains each of these."""
    program = programs(name)
    known, refused = explainer(program), set[str]()
    names = {*of_dump(program), *of_drawing(program), *of_report(program)}
    explained = dict[str, Explanation]()
    while names:
        name = names.pop()
        try:
            explained[name] = known.explain(name)
        except ShardingError:
            refused.add(name)
            continue
        names |= {each for each in of_explanation(explained[name]) if each not in explained and each not in refused}
    assert not refused
    assert len(explained) > len(list(program.whole.graph.nodes)) / 2


def of_dump(program: Compiled) -> Iterator[str]:
    dumped = json.loads(program.dump("json"))
    for each in dumped["collectives"]:
        yield from (each["id"], *each["node"].split(", "), *of_cause(each["cause"]))
    for found in program.collectives:
        yield from found.node.split(", ")
    for each in dumped["nodes"]:
        yield from filter(None, (each["name"], each["module"], *each["operands"]))
    for kind in ("parameters", "buffers", "inputs", "outputs"):
        yield from (each["name"] for each in dumped[kind])
    for stage in dumped["stages"]:
        yield from filter(None, (f"stage {stage['stage']}", *stage["modules"], *stage["parameters"]))
        yield from (value["name"] for sent in stage["sent"] for value in sent["values"])
    yield from of_text(program.dump())


def of_text(text: str) -> Iterator[str]:
    """The names at the beginning of lines, those that calls take, and those of results and of remarks."""
    program = text.split("\n\nparameter ")[0]
    for line in program.splitlines():
        code, _, remark = line.partition("  # ")
        value = re.match(r"    (\S+): .* = [\w.]+\((.*)\)$", code)
        if value:
            yield value[1]
            taken = re.sub(r'"[^"]*"', "", value[2])
            words = re.findall(r"(?<![\w.=@])(?:tangent\([\w.]+\)|[A-Za-z_][\w.]*)(?![\w.=])", taken)
            yield from (each for each in words if each not in ("None", "True", "False", "inf", *DTYPES))
        elif end := re.match(r"  (\w+ [\w.]+): .*? = (\S+)$", code):
            yield from end.groups()
        elif given := re.match(r"  (parameter|buffer|input|tangent) (\S+): ", code):
            yield given[2] if given[1] != "tangent" else f"tangent({given[2]})"
        elif module := re.match(r"  ([\w.]+|\(model\))$", code):
            yield module[1]
        yield from of_cause(remark.partition("because ")[2])
    for line in text[len(program) :].splitlines():
        yield from re.findall(r"^(?:all_|reduce_|collective_|send_)\w+", line)


def of_cause(cause: str) -> Iterator[str]:
    place = r"((?:the )?[\w.]+(?: [\w.]+)?|tangent\([\w.]+\))( \([\w.]+\))?"
    for piece in cause.split("; "):
        found = re.match(rf"{place} is .*, {place} (?:wants|reach)", piece)
        stored = re.match(r"(\S+) is stored as", piece)
        yield from (found[1], found[3], f"{found[1]}{found[2] or ''}") if found else ()
        yield from stored.groups() if stored else ()
        yield from re.findall(r"stage \d+", piece)


def of_drawing(program: Compiled) -> Iterator[str]:
    drawn = program.dump("dot")
    yield from (
        json.loads(f'"{label}"').split("\n")[0].partition(" = ")[0]
        for label in re.findall(r'^ +".*?" \[label="(.*?)"[,\]]', drawn, re.M)
    )
    yield from (
        json.loads(f'"{label}"')
        for label in re.findall(r'^ +label="(?!stage|forward|backward|update)(.*?)";', drawn, re.M)
    )


def of_report(program: Compiled) -> Iterator[str]:
    report: dict[str, Any] = report_record(program, program.whole)["report"]
    yield from report["why"]
    for _, value, _, _, call, _ in report["steps"]:
        yield from filter(None, (value, call))
    for each in report["because"].values():
        for part in each["parts"]:
            yield from (end["name"] for end in (part["has"], part["wants"]) if end)


def of_explanation(found: Explanation) -> Iterator[str]:
    yield f"{found.kind} {found.name}"
    for end in filter(None, (found.has, found.wants)):
        yield from filter(None, (end.name, end.module))
    for step in (step for chain in found.chains for step in chain.steps):
        yield from filter(None, (step.value, step.call, step.module))
        yield from [step.via] * step.via.startswith("the ")
    yield from filter(None, (found.module,))
    for part in found.parts:
        yield from of_explanation(part)
