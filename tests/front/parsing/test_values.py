"""Arguments as JSON, and what schemas say about their types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.front.parsing.base import ToolCall
from millpond.front.parsing.values import NONE, TEXT, ArgumentWriter, Tool, kinds_of, to_json

ROOT = {
    "$defs": {"a": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "x/y": {"type": "null"}}
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"$ref": "#/$defs/a"}, {"integer"}),
        ({"$ref": "#/$defs/x~1y"}, {"null"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"type": "object"}, {"description": "x"}]}, {"object"}),
        ({"enum": ["a", 1, None, 1.5, [], {}, True]},
         {"string", "integer", "null", "number", "array", "object", "boolean"}),
        ({"const": "a"}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"anyOf": []}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
        ({"type": 3}, set()),
    ],
)  # fmt: skip
def test_the_kinds_of_a_schema(schema, kinds):
    assert kinds_of(schema, ROOT) == kinds


def test_a_schema_that_contains_itself_has_no_known_kind():
    deep: dict[str, object] = {}
    deep["anyOf"] = [deep]
    assert kinds_of(deep, {}) == NONE


@pytest.mark.parametrize(
    ("text", "kinds", "made"),
    [
        ("12", "integer", "12"),
        (" 12\n", "integer", "12"),
        ("1e3", "number", "1e3"),
        ("12", "number", "12"),
        ("twelve", "integer", '"twelve"'),
        ('"12"', "integer", '"12"'),
        ("True", "boolean", "true"),
        ("yes", "boolean", '"yes"'),
        ("None", "null", "null"),
        ("null", "string null", "null"),
        ("NaN", "number", '"NaN"'),
        ("Infinity", "number", '"Infinity"'),
        ("[1, ", "array", '"[1, "'),
        ('{"a": 1}', "array", '{"a": 1}'),
        ("5", "string integer", "5"),
        ("5 ", "string", '"5 "'),
        ("true", "string integer", '"true"'),
        ("", "integer", '""'),
        ("x", "", '"x"'),
        ("[1]", "", "[1]"),
        ("[" * 100_000, "array", None),
        ("9" * 5000, "integer", None),
    ],
)
def test_text_becomes_json_of_its_kind_or_a_string(text, kinds, made):
    got = to_json(text, frozenset(kinds.split()))
    json.loads(got)
    assert got == (json.dumps(text) if made is None else made)


KINDS = st.frozensets(st.sampled_from(["string", "null", "integer", "boolean", "array", "object"]))
PIECES = st.lists(st.text(max_size=4) | st.sampled_from(["nu", "ll", "None", "tr", "ue", "7"]))


@given(st.lists(st.tuples(st.text(max_size=3), KINDS, PIECES), max_size=4))
def test_fragments_are_one_json_object_and_pieces_do_not_matter(pairs):
    tool = Tool("f", {key: kinds for key, kinds, _ in pairs})

    def write(split: bool) -> str:
        out: list[str] = []
        writer = ArgumentWriter(tool, TEXT, out.append)
        for key, _, pieces in pairs:
            writer.key(key)
            for piece in pieces if split else ["".join(pieces)]:
                writer.value(piece)
            writer.end_value()
        writer.close()
        return "".join(out)

    assert write(split=True) == write(split=False)
    made = json.loads(write(split=True))
    assert set(made) == {key for key, _, _ in pairs}


def test_a_string_that_may_be_null_waits_only_while_it_may_be_that():
    out: list[str] = []
    writer = ArgumentWriter(Tool("f", {"a": frozenset({"string", "null"})}), NONE, out.append)
    writer.key("a")
    writer.value("nu")
    assert "".join(out) == '{"a": '
    writer.value("mber")
    assert "".join(out) == '{"a": "number'


def test_parameters_that_the_schema_does_not_name_are_of_its_additional_kind():
    tool = Tool.of({"name": "f", "parameters": {"additionalProperties": {"type": "integer"}}})
    assert tool.of_parameter("anything") == {"integer"}


def test_the_object_of_a_call_is_never_an_error():
    for text, made in (
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', {}),
        ("", {}),
        ("[1]", {}),
        ("[" * 9999, {}),
    ):
        assert ToolCall("c", "f", text, complete=False).object() == made
