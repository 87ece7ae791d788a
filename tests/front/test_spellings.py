"""Every usual way to ask for a form of the answer is one constraint; two of them are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millpond.engine.constraint import Constraint
from millpond.errors import Rejected
from millpond.front.structured import from_fields, from_response_format, only_one

SCHEMA = {"type": "object", "title": "Größe"}


@pytest.mark.parametrize(
    "given, kind, strict",
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "json_schema", 0),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
            "json_schema",
            1,
        ),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": None}, "json_schema", 0),
        ({"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}}, "json_schema", 0),
    ],
)
def test_a_schema_is_read_wherever_it_stands(given: dict[str, Any], kind: str, strict: int):
    found = from_response_format(given)
    assert found is not None
    assert (found.kind, found.strict, found.param) == (kind, bool(strict), "response_format")
    assert json.loads(found.text) == SCHEMA


def test_other_formats():
    assert from_response_format(None) is None
    assert from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}) == Constraint(kind="json_object")
    own = from_response_format({"type": "regex_schema", "regex_schema": "a+"}, param="text.format")
    assert own == Constraint(kind="regex", text="a+", param="text.format")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": None},
        {"type": "xml"},
        {"type": "structural_tag", "structures": []},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": "object"},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}},
        {"type": "regex_schema"},
        {"type": "regex_schema", "regex_schema": ["a"]},
    ],
)
def test_formats_that_say_nothing_are_refused(given: dict[str, Any]):
    with pytest.raises(Rejected) as caught:
        from_response_format(given)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, None),
        ({"regex": None, "structured_outputs": None, "temperature": 1}, None),
        ({"structured_outputs": {"json": None, "backend": "x"}}, None),
        ({"regex": "a"}, Constraint(kind="regex", text="a", param="regex")),
        ({"ebnf": "root ::= x"}, Constraint(kind="grammar", text="root ::= x", param="ebnf")),
        (
            {"json_schema": '{"type": "null"}'},
            Constraint(kind="json_schema", text='{"type": "null"}', param="json_schema"),
        ),
        ({"guided_json": {}}, Constraint(kind="json_schema", text="{}", param="guided_json")),
        (
            {"guided_choice": ["a", "é"]},
            Constraint(kind="choice", text='["a", "é"]', param="guided_choice"),
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_fallback": True}},
            Constraint(kind="choice", text='["a"]', param="structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint(kind="json_object", param="structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"json_object": False}}, None),
        (
            {"structured_outputs": {"grammar": "start: X"}},
            Constraint(kind="grammar", text="start: X", param="structured_outputs.grammar"),
        ),
    ],
)
def test_fields_of_their_own(fields: dict[str, Any], expected: Constraint | None):
    assert from_fields(fields) == expected


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"regex": 3}, "regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", 1]}, "guided_choice"),
        ({"guided_json": {"a": {1, 2}}}, "guided_json"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
        ({"regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(Rejected) as caught:
        from_fields(fields)
    assert caught.value.param == param


def test_one_form_is_enough():
    one, other = Constraint(kind="json_object"), Constraint(kind="regex", text="a", param="regex")
    assert only_one(None, None) is None
    assert only_one(one, None) is only_one(None, one) is one
    with pytest.raises(Rejected, match="regex and response_format both"):
        only_one(one, other)
