"""Constraints are compiled or refused, aside, once, and within bounds."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from millpond.engine import grammar
from millpond.engine.constraint import Constraint, Kind
from millpond.engine.grammar import MAX_TEXT, Grammar, Grammars, all_words, words_of
from millpond.engine.schema_keywords import first_unknown
from millpond.errors import Rejected, Unavailable
from tests.structured.engines import EOS, MODEL, VOCAB, tokens

SECONDS = 60
"""More than any compilation takes on a busy machine; without a bound some would take for ever."""


def _deep(levels: int) -> str:
    return '{"properties": {"a": ' * levels + "{}" + "}}" * levels


BAD: dict[str, tuple[Kind, str, bool]] = {
    "no JSON": ("json_schema", "{", False),
    "nothing": ("json_schema", "", False),
    "an array": ("json_schema", "[]", False),
    "a number": ("json_schema", "3", False),
    "a string": ("json_schema", '"object"', False),
    "null": ("json_schema", "null", False),
    "nothing allowed": ("json_schema", "false", False),
    "nested beyond reason": ("json_schema", _deep(2000), False),
    "nested beyond reason, strict": ("json_schema", _deep(2000), True),
    "an unknown type": ("json_schema", '{"type": "objekt"}', False),
    "a type that is a number": ("json_schema", '{"type": 5}', False),
    "properties that are a list": ("json_schema", '{"properties": [1]}', False),
    "lengths that exclude each other": (
        "json_schema", '{"type": "string", "minLength": 9, "maxLength": 3}', False
    ),
    "numbers that exclude each other": (
        "json_schema", '{"type": "integer", "minimum": 9, "maximum": 3}', False
    ),
    "a pattern that looks ahead": ("json_schema", '{"type": "string", "pattern": "(?=x)"}', False),
    "a pattern left open": ("json_schema", '{"type": "string", "pattern": "["}', False),
    "a schema elsewhere": ("json_schema", '{"$ref": "https://example.com/s.json"}', False),
    "a schema that is not there": ("json_schema", '{"$ref": "#/$defs/nope"}', False),
    "a schema that is itself": ("json_schema", '{"$ref": "#"}', False),
    "alternatives that multiply": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]}
                    for i in range(10)
                ]
            }
        ),
        False,
    ),
    "more properties than a row can hold": (
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {} for i in range(5500)}},
            separators=(",", ":"),
        ),
        False,
    ),
    "too long": ("json_schema", json.dumps({"enum": ["x" * MAX_TEXT]}), False),
    "an unknown keyword, strict": ("json_schema", '{"type": "object", "foo": 1}', True),
    "an unknown keyword inside, strict": (
        "json_schema", '{"properties": {"foo": {"items": {"bar": 1}}}}', True
    ),
    "a keyword nobody enforces, strict": ("json_schema", '{"not": {"type": "string"}}', True),
    "alternatives that overlap, strict": (
        "json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}', True
    ),
    "an unknown format, strict": ("json_schema", '{"type": "string", "format": "nosuch"}', True),
    "half a character": ("regex", "a\ud800", False),
    "a zero byte": ("regex", "a\0", False),
    "looking ahead": ("regex", "(?=a)b", False),
    "looking back at a group": ("regex", r"(a)\1", False),
    "a set left open": ("regex", "[", False),
    "repeats of repeats": ("regex", "((a{100}){100}){100}", False),
    "nothing to repeat": ("regex", "*a", False),
    "groups without end": ("regex", "(" * 20_000 + "a" + ")" * 20_000, False),
    "no character at all": ("regex", r"[^\s\S]", False),
    "no rule": ("grammar", "", False),
    "no start": ("grammar", 'other: "a"', False),
    "a rule that is missing": ("grammar", "start: other", False),
    "a rule that never ends": ("grammar", "start: other\nother: other", False),
    "a terminal within itself": ("grammar", 'start: A\nA: "a" A | "b"', False),
    "brackets without end": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, False),
    "a special token that is none": ("grammar", 'start: <nosuch> "x"', False),
    "GBNF cut short": ("grammar", 'root ::= "a" [0-', False),
    "GBNF without root": ("grammar", 'leaf ::= "a"', False),
    "GBNF without end": ("grammar", "root ::= " + "(" * 5_000, False),
    "no choice": ("choice", "[]", False),
    "a choice that is no list": ("choice", '"yes"', False),
    "choices that are numbers": ("choice", "[1, 2]", False),
    "choices that are no JSON": ("choice", "yes,no", False),
}  # fmt: skip

HEAVY: dict[str, tuple[Kind, str]] = {
    "many properties": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    ),
    "many alternatives": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(3000)]})),
    "a long repeat": ("regex", "(ab|a){2000}"),
    "many ways to match": ("regex", "(a|aa)+b(.*x){30}"),
    "a huge minimum": ("json_schema", '{"items": {"type": "integer"}, "minItems": 100000}'),
    "an ambiguous grammar": ("grammar", 'start: a\na: a a | "x" |'),
    "a list of itself": (
        "json_schema",
        '{"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}',
    ),
}


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(MODEL / "tokenizer.json", VOCAB, EOS)
    yield made
    made.close()


class Gated(Grammars):
    """Compiles nothing before the gate is open."""

    def __init__(self, **kwargs: int) -> None:
        super().__init__(MODEL / "tokenizer.json", VOCAB, EOS, **kwargs)
        self.gate = threading.Event()
        self.compiled: list[Constraint] = []

    def _compile(self, constraint: Constraint) -> Grammar:
        assert self.gate.wait(SECONDS)
        self.compiled.append(constraint)
        return super()._compile(constraint)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_field(grammars: Grammars, name: str):
    kind, text, strict = BAD[name]
    constraint = Constraint(kind=kind, text=text, strict=strict, param="their_field")
    with pytest.raises(Rejected) as caught:
        grammars.prepare(constraint).result(SECONDS)
    assert caught.value.param == "their_field"
    assert caught.value.code == "invalid_grammar"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", HEAVY)
def test_what_is_merely_heavy_is_compiled(grammars: Grammars, name: str):
    kind, text = HEAVY[name]
    assert grammars.prepare(Constraint(kind=kind, text=text)).result(SECONDS).first.any()


@pytest.mark.parametrize(
    "kind, text, written",
    [
        ("json_object", "", '{"a": [1, {"b": null}]}'),
        ("json_schema", '{"type": "integer"}', "-12"),
        ("json_schema", "true", '"anything"'),
        ("json_schema", '{"type": "object", "title": "T", "foo": 1, "$id": "urn:a:b"}', "{}"),
        (
            "json_schema",
            '{"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "null"}',
            "null",
        ),
        (
            "json_schema",
            '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}',
            "null",
        ),
        (
            "json_schema",
            '{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null"}',
            "null",
        ),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string"}]}', '"a"'),
        ("json_schema", '{"type": "array", "items": {"type": "null"}}', "[\n  null,\n  null\n]"),
        ("regex", "[a-c]{2}x?", "ab"),
        ("regex", "", ""),
        ("grammar", 'start: "yes" | "no"', "yes"),
        ("grammar", 'root ::= "a" [0-9]+ leaf\nleaf ::= "z" | "y" leaf', "a12yyz"),
        ("grammar", 'start: "::=" "x"', "::=x"),
        ("choice", '["one", "one more", "é 😀", "a\\"b\\\\", "line\\nend", "\\u0001"]', "é 😀"),
        ("choice", '["one", "one more", "a\\"b\\\\"]', 'a"b\\'),
        ("choice", '["one", "line\\nend"]', "line\nend"),
    ],
)
def test_what_can_be_used_matches_what_it_says(
    grammars: Grammars, kind: Kind, text: str, written: str
):
    matcher = grammars.prepare(Constraint(kind=kind, text=text)).result(SECONDS).matcher()
    assert matcher.consume_tokens(list(tokens(written)))
    assert matcher.is_accepting()


def test_an_endless_run_of_blanks_is_no_json(grammars: Grammars):
    matcher = grammars.prepare(Constraint(kind="json_object")).result(SECONDS).matcher()
    assert not matcher.consume_tokens(list(tokens('{"a":' + " " * 40)))


def test_tokens_that_only_the_model_has_are_never_first():
    padded = Grammars(MODEL / "tokenizer.json", VOCAB + 70, EOS)
    first = padded.prepare(Constraint(kind="regex", text="(?s:.*)")).result(SECONDS).first
    flags = np.unpackbits(first.view(np.uint8), bitorder="little")
    assert len(first) == (VOCAB + 70 + 31) // 32
    assert flags[:VOCAB].sum() > 1900
    assert not flags[VOCAB:].any()
    assert all(flags[token] for token in EOS)
    padded.close()


def test_special_tokens_are_text_of_nobody(grammars: Grammars):
    first = grammars.prepare(Constraint(kind="regex", text="(?s:.*)")).result(SECONDS).first
    special = words_of(tuple(range(2012, 2033)), VOCAB)
    assert (first & special == words_of(EOS, VOCAB)).all()


def test_a_set_of_tokens_is_bits():
    assert (words_of((0, 31, 32, 2047, 5000, -1), 2048) != 0).sum() == 3
    assert (words_of((31,), 64) == np.array([-(2**31), 0], np.int32)).all()
    assert (all_words(40) == np.array([-1, 255], np.int32)).all()


def test_the_same_constraint_is_compiled_once():
    gated = Gated()
    constraint = Constraint(kind="regex", text="ab")
    first, second = gated.prepare(constraint), gated.prepare(constraint)
    gated.gate.set()
    assert first.result(SECONDS) is second.result(SECONDS)
    assert gated.prepare(constraint).result(SECONDS) is first.result()
    assert len(gated.compiled) == 1
    gated.close()


def test_only_so_many_are_kept():
    gated = Gated(num_kept=2)
    gated.gate.set()
    a, b, c = (Constraint(kind="regex", text=text) for text in "abc")
    for constraint in (a, b, a, c):  # b is the one used longest ago
        gated.prepare(constraint).result(SECONDS)
    gated.prepare(a).result(SECONDS)
    assert gated.compiled == [a, b, c]
    gated.prepare(b).result(SECONDS)
    assert gated.compiled == [a, b, c, b]
    gated.close()


def test_a_refused_one_is_not_kept():
    gated = Gated()
    gated.gate.set()
    bad = Constraint(kind="regex", text="[")
    for _ in range(2):
        with pytest.raises(Rejected):
            gated.prepare(bad).result(SECONDS)
    assert gated.compiled == [bad, bad]
    gated.close()


def test_preparing_returns_before_anything_is_compiled_and_not_without_end(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_PENDING", 3)
    gated = Gated()
    waiting = [gated.prepare(Constraint(kind="regex", text="a" * n)) for n in (1, 2, 3)]
    assert not any(one.done() for one in waiting)
    with pytest.raises(Unavailable, match="3 grammars wait"):
        gated.prepare(Constraint(kind="regex", text="b"))
    gated.gate.set()
    for one in waiting:
        one.result(SECONDS)
    gated.prepare(Constraint(kind="regex", text="b")).result(SECONDS)
    gated.close()


def test_a_panic_of_the_library_is_a_refusal(grammars: Grammars, monkeypatch):
    class Panic(BaseException):
        """What the binding raises is no `Exception`."""

    def panic(constraint: Constraint) -> str:
        raise Panic("index out of bounds")

    monkeypatch.setattr(grammar, "definition", panic)
    with pytest.raises(Rejected, match="index out of bounds"):
        grammars.prepare(Constraint(kind="regex", text="never seen before")).result(SECONDS)


@pytest.mark.parametrize(
    "schema, unknown",
    [
        ({"type": "object", "title": "T", "properties": {"foo": {"type": "null"}}}, None),
        ({"properties": {"a": {"frob": 1}}}, "frob"),
        ({"anyOf": [{"items": {"frob": 1}}]}, "frob"),
        ({"$defs": {"frob": {"additionalProperties": {"nope": 1}}}}, "nope"),
        ({"enum": [{"frob": 1}], "default": {"frob": 1}, "const": {"frob": 2}}, None),
        (True, None),
    ],
)
def test_unknown_keywords_are_found_where_schemas_stand(schema, unknown):
    assert first_unknown(schema) == unknown
