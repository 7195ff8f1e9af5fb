"""Records: their JSON form, the schema that follows from their fields, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator

from shardc.language.record import FURTHER, Count, json_of, json_text, read, schema_of, violations


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf.

    ``colour``, ``from_``: its colour, and a ``branch``. ``size``: in centimetres.
    """

    colour: Literal["green", "red"]
    from_: str
    size: Annotated[float, ("minimum", 0), ("maximum", 10)] = 1.5


@dataclass(frozen=True, slots=True)
class BranchEntry:
    """A branch. ``branches``: those that grow on it."""

    leaves: tuple[Leaf, ...]
    ends: tuple[Count, Count]
    first: Leaf | None
    note: str | None = None
    branches: tuple[BranchEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree."""

    version: Literal[1] = field(default=1, init=False)
    is_old: bool
    height: int | None
    branches: Mapping[Literal["low", "high"], BranchEntry]
    place: tuple[str, int]
    anything: Any


@dataclass(frozen=True, slots=True)
class Bird:
    """A bird, and how often it was seen, by year."""

    name: str
    years: Mapping[str, Count] = field(metadata=FURTHER)


LEAF = Leaf("red", "low", 2.5)
BRANCH = BranchEntry((LEAF,), (1, 2), None, "broken", (BranchEntry((), (3, 4), LEAF),))
TREE = Tree(True, None, {"low": BRANCH}, ("x", 1), [{}, 2])
BRANCH_JSON = json_of(BRANCH)
SCHEMA = schema_of(Tree, "trees")


def test_the_json_form_has_the_fields_in_order_and_leaves_out_what_may_be_absent() -> None:
    inner = {"leaves": [], "ends": [3, 4], "first": {"colour": "red", "from": "low", "size": 2.5}, "branches": []}
    leaf = {"colour": "red", "from": "low", "size": 2.5}
    low = {"leaves": [leaf], "ends": [1, 2], "first": None, "note": "broken", "branches": [inner]}
    expected: dict[str, Any] = {
        "version": 1,
        "is_old": True,
        "height": None,
        "branches": {"low": low},
        "place": ["x", 1],
    }
    expected["anything"] = [{}, 2]
    assert json.dumps(json_of(TREE)) == json.dumps(expected)
    assert json_of(Bird("wren", {"2020": 3})) == {"name": "wren", "2020": 3}
    assert json_text(Bird("wren", {"2020": 3})) == '{\n "name": "wren",\n "2020": 3\n}\n'


def test_a_record_is_read_back_as_it_was_without_keys_that_it_does_not_know() -> None:
    written = json.loads(json.dumps(json_of(TREE)))
    assert read(Tree, written) == TREE == read(Tree, {**written, "more": 1})


def test_the_schema_has_the_types_and_the_texts_of_the_docstrings() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["title"] == "trees" and SCHEMA["description"] == "A tree." and SCHEMA["additionalProperties"] is False
    assert SCHEMA["required"] == ["version", "is_old", "height", "branches", "place", "anything"]
    assert SCHEMA["properties"] == {
        "version": {"const": 1},
        "is_old": {"type": "boolean"},
        "height": {"type": ["integer", "null"]},
        "branches": {
            "type": "object",
            "propertyNames": {"enum": ["low", "high"]},
            "additionalProperties": {"$ref": "#/$defs/branch"},
        },
        "place": {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "integer"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "anything": {},
    }
    assert SCHEMA["$defs"]["leaf"]["properties"]["from"] == {
        "type": "string",
        "description": "Its colour, and a branch.",
    }
    assert SCHEMA["$defs"]["branch"]["properties"]["first"] == {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}
    size = SCHEMA["$defs"]["leaf"]["properties"]["size"]
    assert size == {"type": "number", "minimum": 0, "maximum": 10, "description": "In centimetres."}
    bird = schema_of(Bird, "birds")
    assert bird["required"] == ["name"] and bird["additionalProperties"] == {"type": "integer", "minimum": 0}
    assert schema_of(Bird | Leaf, "either")["anyOf"] == [{"$ref": "#/$defs/bird"}, {"$ref": "#/$defs/leaf"}]


def test_a_docstring_that_names_no_field_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong:
        """A class. ``nmae``: misspelt."""

        name: str

    with pytest.raises(AssertionError, match="no field nmae"):
        schema_of(Wrong, "wrong")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_old": 1}, "is_old is 1, no boolean"),
        ({"place": ["x"]}, 'place is ["x"], no list of 2'),
        ({"height": "3"}, 'height is "3", no integer or null'),
        ({"branches": []}, "branches is [], no object"),
        ({"branches": {"low": {"ends": [1, 2], "first": None, "branches": []}}}, "branches.low has no 'leaves'"),
        ({"branches": {"low": {**BRANCH_JSON, "leaves": [{"from": "", "size": 1}]}}}, "leaves[0] has no 'colour'"),
        (
            {"branches": {"low": {**BRANCH_JSON, "leaves": [{"colour": "blue", "from": "", "size": 1}]}}},
            'branches.low.leaves[0].colour is "blue", none of green, red',
        ),
    ],
)
def test_violations_name_their_place(change: dict[str, Any], message: str) -> None:
    document = {**json_of(TREE), **change}
    assert any(message in each for each in violations(document, SCHEMA, SCHEMA["$defs"]))
    assert not Draft202012Validator(SCHEMA).is_valid(document)
    assert not [*violations(json_of(TREE), SCHEMA, SCHEMA["$defs"])]
