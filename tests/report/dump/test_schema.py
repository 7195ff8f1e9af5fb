"""The JSON that commands write matches its schemas and uses all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import suggested
from jsonschema import Draft202012Validator
from schemas import Properties, errors, met, objects, said
from targets import mlp, weighed

from shardc import Compiled, Mesh, P, Pipeline, Zero, compile
from shardc.cli.main import main
from shardc.language.machine import DEVICES, LINKS, Link, Machine
from shardc.language.record import json_of, json_text
from shardc.report.dump.diff import diff
from shardc.report.dump.program_record import program_record
from shardc.report.dump.records import Dump
from shardc.report.dump.schema import form_schema
from shardc.report.explain import explanation, records
from shardc.report.explain.explanation import ReasonKind

GOLDEN = Path(__file__).parents[2] / "golden"
COMMANDS = {
    "dump": "dump", "check": "check", "diff": "diff", "cost": "cost", "explain": "explain", "stages": "stages",
    "trace": "trace", "bench-links": "links", "suggest": "suggest",
}  # fmt: skip
OF_DUMPS = set(form_schema("dump")["$defs"])  # test_dump.py compares these with dumps


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def own(properties: Properties) -> Properties:
    return {(place, key) for place, key in properties if place.partition(".")[0] not in OF_DUMPS}


@pytest.fixture(scope="module")
def plans() -> dict[str, Compiled]:
    """Plans that differ in all that plans may differ in."""
    model, args, kwargs, annotations = mlp()
    given = {"args": args, "kwargs": kwargs}
    pipeline = Pipeline(microbatches=2)
    other, other_args, other_kwargs, other_annotations = weighed()
    return {
        "plain": compile(model, Mesh(dp=2, tp=2), annotations, links={"tp": "nvlink"}, **given),
        "zero": compile(model, Mesh(dp=2, tp=2), annotations, zero=Zero("dp", 3), **given),
        "coded": compile(model, Mesh(dp=2, tp=2), annotations, wire={"dp": "1bit"}, **given),
        "piped": compile(model, Mesh(dp=2, pp=2), {"x": P("dp")}, pipeline=pipeline, **given),
        "weighed": compile(other, Mesh(dp=2, tp=2), other_annotations, args=other_args, kwargs=other_kwargs),
    }


def checked(plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    budgets = [f"--fail-on={each}" for each in ("fallback", "note", "collectives", "wire>1TB")]
    assert main(["check", "targets:weighed", "--mesh", "dp=2,tp=2", *budgets, "--format", "json"]) == 1
    return [json.loads(capsys.readouterr().out)]


def differing(plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    dumps = {name: program_record(plan.whole) for name, plan in plans.items()}
    part = Dump(dumps["plain"].level, dumps["plain"].mesh, "collectives", dumps["plain"].collectives)
    captured = program_record(plans["plain"].at("capture"))
    pairs = [("plain", "zero"), ("zero", "plain"), ("plain", "piped"), ("plain", "weighed"), ("weighed", "plain")]
    found = [diff(dumps[a], dumps[b]) for a, b in pairs]
    found += [diff(part, dumps["plain"]), diff(captured, dumps["plain"])]
    return [golden("diff.json"), *map(json_of, found)]


def explained(plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    command = ["explain", "targets:mlp", "--mesh", "dp=2,tp=2", "--annotate", "up.bias=-", "--format", "json"]
    found = []
    for name in ("all_reduce_tp", "all_gather_tp", "down", "x"):
        assert main([*command, "--try", "4", name]) == 0
        found.append(json.loads(capsys.readouterr().out))
    named = {"plain": ("x", "all_reduce_dp_bucket"), "zero": ("x", "reduce_scatter_dp_bucket"), "piped": ("x", "y")}
    named["coded"] = ("x", "all_gather_dp_bucket")
    others = [json_of(plans[plan].explain(name)) for plan, names in named.items() for name in names]
    return [*found, *({"version": 1, **each} for each in others)]


def measured(plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    link = Link(1e-5, 1e9, kinds=(("all_reduce", 1e-5, 1e9),))
    machine = Machine({"dp": link, **LINKS}, DEVICES["cpu"])
    in_nodes = replace(machine, device=replace(DEVICES["h100"], files=3e9), node=8, between="infiniband")
    return [json.loads(json.dumps(each.to_json())) for each in (machine, in_nodes)]


def costs(plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    offloading = ["--mesh", "dp=2,tp=2", "--zero", "dp=3,offload=parameters", "--saved", "*=host", "--format", "json"]
    records = [golden("cost.json"), golden("cost_symbolic.json")]
    for further in ([], ["--symbolic"]):
        assert main(["cost", "targets:mlp", *offloading, *further]) == 0
        records.append(json.loads(capsys.readouterr().out))
    ring = ["--mesh", "cp=2", "--annotate", "x=-,cp", "--attention", "ring", "--links", "pcie"]
    for arguments in (["targets:mlp", "--mesh", "dp=2,tp=2", "--local", "dp=4"], ["attending:attending", *ring]):
        assert main(["cost", *arguments, "--format", "json"]) == 0
        records.append(json.loads(capsys.readouterr().out))
    return records


RECORDS: dict[str, Callable[[dict[str, Compiled], pytest.CaptureFixture[str]], list[Any]]] = {
    "check": checked,
    "diff": differing,
    "explain": explained,
    "cost": costs,
    "stages": lambda plans, capsys: [golden("stages.json")],
    "trace": lambda plans, capsys: [golden("mlp.trace.json"), json.loads(plans["piped"].timeline.chrome_trace())],
    "links": measured,
    "suggest": lambda plans, capsys: [json.loads(json_text(suggested.found()))],
}


@pytest.mark.parametrize("name", RECORDS)
def test_output_matches_its_schema_and_uses_all_of_it(
    name: str, plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]
) -> None:
    schema, seen = form_schema(name), set[tuple[str, str]]()
    for record in RECORDS[name](plans, capsys):
        assert errors(record, schema) == []
        seen |= met(record, schema)
    assert own(seen) == own(said(schema))


@pytest.mark.parametrize("name", ["dump", *RECORDS])
def test_a_wrong_document_is_refused(name: str, plans: dict[str, Compiled], capsys: pytest.CaptureFixture[str]) -> None:
    schema = form_schema(name)
    validator = Draft202012Validator(schema)
    records = [golden("mlp.json")] if name == "dump" else RECORDS[name](plans, capsys)
    for record in records[: 1 if name == "diff" else 2]:  # in a further diff there are pairs of anything
        changed = dict(wrong(record, schema))
        assert len(changed) > 10 and {kind for kind, *_ in changed} == {"lacks", "unknown", "type"}
        accepted = [what for what, document in changed.items() if validator.is_valid(document)]
        assert not accepted and validator.is_valid(record)


def wrong(record: Any, schema: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies of a document, each with one fault: a key too few or too many, or an object in place of another value."""
    for path, value in places(record):
        if isinstance(value, dict):
            yield ("unknown", *path), replaced(record, path, {**value, "unknown": {}})
            kinds = [each for each in objects(schema) if set(value) <= set(each.get("properties", ()))]
            for key in {key for key in value if kinds and all(key in each["required"] for each in kinds)}:
                yield ("lacks", *path, key), replaced(record, path, {k: v for k, v in value.items() if k != key})
        elif path:
            yield ("type", *path), replaced(record, path, {})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a document with the way to it; of a list the first entry."""
    yield path, value
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def replaced(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A document with another value in one place."""
    if not path:
        return value
    key, *rest = path
    copy = dict(record) if isinstance(record, dict) else list(record)
    copy[key] = replaced(record[key], tuple(rest), value)
    return copy


def test_the_words_of_advice_are_those_of_its_schema() -> None:
    assert [records.REMOVE, records.SHRINK] == form_schema("explain")["$defs"]["advice"]["properties"]["aim"]["enum"]
    assert {*get_args(ReasonKind)} == {*explanation.REASONS}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_schema_which_lets_nothing_pass_that_it_does_not_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--schema"])
    schema = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 0 and schema == form_schema(COMMANDS[command])
    Draft202012Validator.check_schema(schema)
    assert all("additionalProperties" in each for each in objects(schema))
    assert all(each.startswith("#") for each in references(schema))


def references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        return [each for key, value in schema.items() for each in ([value] if key == "$ref" else references(value))]
    return [each for entry in schema for each in references(entry)] if isinstance(schema, list) else []
