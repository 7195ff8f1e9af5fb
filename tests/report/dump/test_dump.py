"""dump: JSON that matches its schema, parts of a dump, and differences between two passes."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from attending import Attending, draw
from jsonschema import Draft202012Validator
from schemas import met, objects, said
from targets import mlp, weighed

from shardc import Compiled, Mesh, P, Pipeline, ShardingError, Zero, compile
from shardc.cli.main import main
from shardc.report.dump.dump import dump
from shardc.report.dump.pass_diff import dump_diff
from shardc.report.dump.schema import form_schema

SCHEMA = form_schema("dump")
ON_FOUR = ["--mesh", "dp=2,tp=2"]


@pytest.fixture(scope="module")
def megatron() -> Compiled:
    model, args, kwargs, annotations = mlp()
    return compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)


@pytest.fixture(scope="module")
def piped() -> Compiled:
    model, args, kwargs, _ = mlp(dropout=0.5)
    pipeline = Pipeline(microbatches=2, schedule="zb-h1")
    return compile(model, Mesh(dp=2, pp=2), {"x": P("dp")}, args=args, kwargs=kwargs, pipeline=pipeline)


@pytest.fixture(scope="module")
def compilations(megatron: Compiled, piped: Compiled) -> list[Compiled]:
    """Programs that together have whatever a dump may have."""
    model, args, kwargs, annotations = weighed()
    zero = compile(
        model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs, zero=Zero("dp", 3), links={"tp": "nvlink"}
    )
    inference = compile(model, Mesh(dp=3), {"x": P("dp")}, args=args, kwargs=kwargs, train=False)
    cut = {"x": P(None, "cp")}
    ring = compile(Attending(), Mesh(cp=3), cut, kwargs=draw(6, dtype=torch.float32), links={"cp": "nvlink"})
    coded = megatron.recompile(wire={"dp": "1bit"})
    offloaded = zero.recompile(zero=Zero("dp", 3, offload="parameters"))
    below = compile(model, Mesh(dp=1), args=(torch.randn(256, 8),), saved={"*": "host"})
    return [megatron, zero, inference, piped, ring, coded, offloaded, below]


# The schema.


def test_every_dump_matches_the_schema_and_together_they_use_all_of_it(compilations: list[Compiled]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    validator, seen = Draft202012Validator(SCHEMA), set[tuple[str, str]]()
    for compiled in compilations:
        for name in compiled.after:
            record = json.loads(dump(compiled, "json", after=name, verbose=name == "store"))
            assert [error.message for error in validator.iter_errors(record)] == [], name
            seen |= met(record, SCHEMA)
        record = json.loads(compiled.dump("json", only="memory,*dot*"))
        assert validator.is_valid(record) and "stages" not in record
        seen |= met(record, SCHEMA)
    assert seen == said(SCHEMA)


def test_the_schema_lets_nothing_pass_that_it_does_not_know() -> None:
    found = objects(SCHEMA)
    assert len(found) > 12 and all("additionalProperties" in each for each in found)
    assert all(each["additionalProperties"] is False for each in found if "properties" in each)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["dump", "--schema"])
    assert exit_.value.code == 0 and json.loads(capsys.readouterr().out) == SCHEMA


# Parts of a dump.


def test_only_a_module_is_its_values_and_their_collectives(megatron: Compiled) -> None:
    text = megatron.dump(only="up")
    assert text.startswith("program (lowered) on dp=2, tp=2\n\ninputs\n  parameter up.weight: f32[32@tp, 8]\n")
    assert "\nall_reduce_dp_bucket  dp" in text and "mse_loss_backward:" not in text
    record = json.loads(megatron.dump("json", only="up"))
    assert [entry["name"] for entry in record["parameters"]] == ["up.weight", "up.bias"]
    assert {entry["module"] for entry in record["nodes"]} == {"up"} and "memory" not in record
    assert [entry["id"] for entry in record["collectives"]] == ["all_reduce_dp_bucket"]


def test_only_names_several_tables_and_globs(megatron: Compiled) -> None:
    record = json.loads(megatron.dump("json", only="memory,parameters,loss"))
    assert {"memory", "parameters", "buffers", "outputs"} < set(record) and "flops" not in record
    assert len(record["parameters"]) == 4 and [entry["name"] for entry in record["outputs"]] == ["loss"]
    assert megatron.dump(only="inputs,fallbacks") == (
        "input   sharding      on one rank  bytes\n"
        "x       f32[8@dp, 8]  f32[4, 8]    128 B\n"
        "target  f32[8@dp, 8]  f32[4, 8]    128 B\n\n"
        "no fallbacks\n"
    )


def test_only_of_what_is_not_there_names_what_is_near(megatron: Compiled) -> None:
    for given, near in {"colectives": "did you mean collectives", "dwn.weight": "did you mean down.weight"}.items():
        with pytest.raises(ShardingError, match=near):
            megatron.dump(only=given)
    with pytest.raises(ShardingError, match="a table cannot be drawn"):
        megatron.dump("dot", only="memory")


def test_dot_draws_only_some_values(megatron: Compiled) -> None:
    drawn = megatron.dump("dot", only="down")
    assert '"dot_1" -> "all_reduce_tp"' in drawn and "gelu" not in drawn.replace('label="', "")


def test_dot_draws_stages_and_what_they_send(piped: Compiled) -> None:
    drawn = piped.dump("dot")
    assert 'subgraph cluster_stage_0 {\n    label="stage 0 on rank 0";' in drawn and "stage 1 on rank 1" in drawn
    assert drawn.count(" times") == sum(
        len(sent["values"]) for stage in json.loads(piped.dump("json"))["stages"] for sent in stage["sent"]
    )
    assert drawn.count("style=bold") >= drawn.count(" times") > 0


# Between passes.


def test_diff_lists_what_came_and_what_changed_under_its_module(megatron: Compiled) -> None:
    text = dump_diff(megatron, "insert_reshards")
    assert text == dump_diff(megatron, "decompose,insert_reshards")
    assert text.startswith(
        "decompose to insert_reshards, values: 6 came, 0 went, 0 moved, 10 changed (9 in sharding, 1 in operands)\n"
    )
    assert (
        '\n@@ forward, down\n- dot_1: f32[8@dp, 8] = dot(gelu, down.weight, "a b, c b -> a c")\n'
        '+ dot_1: f32[8@dp, 8]{sum tp} = dot(gelu, down.weight, "a b, c b -> a c")\n'
        "+ reshard: f32[8@dp, 8] = reshard(dot_1)  # because dot_1 (down) is f32[8@dp, 8]{sum tp}, add_1"
    ) in text


def test_diff_only_of_a_module(megatron: Compiled) -> None:
    text = dump_diff(megatron, "capture,propagate", only="up")
    assert "- addmm: f32[8, 32] = addmm(up.bias, x, t)\n" in text and "down" not in text


def test_diff_in_json_has_the_entries_of_dumps(megatron: Compiled) -> None:
    node = Draft202012Validator({"$ref": "#/$defs/node", "$defs": SCHEMA["$defs"]})
    passes = list(megatron.after)
    for before, after in pairwise(passes):
        record = json.loads(dump_diff(megatron, after, "json"))
        assert (record["before"], record["after"]) == (before, after)
        old, new = (json.loads(dump(megatron, "json", after=name))["nodes"] for name in (before, after))
        names, others = ({entry["name"]: entry for entry in entries} for entries in (old, new))
        assert [entry["name"] for entry in record["came"]] == [name for name in others if name not in names]
        assert [entry["name"] for entry in record["went"]] == [name for name in names if name not in others]
        changed = {entry["name"]: (entry["before"], entry["after"]) for entry in record["changed"]}
        differ = {name for name in names if name in others and _says(names[name]) != _says(others[name])}
        assert differ <= set(changed) and all(node.is_valid(each) for pair in changed.values() for each in pair)
        assert [name for name in others if name not in record["moved"] and name in names] == [
            name for name in names if name not in record["moved"] and name in others
        ]


def _says(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["type"], entry["op"], entry["operands"]


@pytest.mark.parametrize(
    ("further", "code", "message"),
    [
        (["--diff", "propagat"], 2, "did you mean propagate?"),
        (["--diff", "capture"], 2, "a difference is between two\n  say --diff PASS,PASS"),
        (
            ["--diff", "capture,propagate,store"],
            2,
            "3 passes\n  a difference is between two\n  say --diff capture,store",
        ),
        (["--diff", "propagate", "--format", "dot"], 2, "a difference is a listing"),
        (["--diff", "propagate", "--only", "memory"], 2, "a listing has no tables"),
    ],
)
def test_mistakes_of_diff_are_named(
    further: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", "targets:mlp", *ON_FOUR, *further]) == code
    assert message in capsys.readouterr().err
