"""Replies against right ones: by letter, by what an object says, by what a call asks."""

from __future__ import annotations

import pytest

from millpond.evaluate.cases import Case, Kind
from millpond.evaluate.grading import calls, is_right, json_object, parses
from millpond.front.parsing import dialect
from millpond.front.parsing.dialect import Family, Reading
from millpond.front.parsing.values import Tool

ADD = Tool.of({"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}})
NOW = Tool.of({"name": "now", "parameters": {}})
GLM = "</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
QWEN = (
    "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>"
)


def case(kind: Kind, reply: str, family: Family = dialect.GLM) -> Case:
    written = dialect.Dialect(family, {}, family.markers)
    reading = Reading(written, in_reasoning=True, tools=(ADD, NOW))
    return Case(task="t", seed=0, kind=kind, prompt=(1,), reply=reply, reading=reading)


def test_text_is_right_letter_by_letter() -> None:
    asked = case("text", "</think>7")
    assert is_right(asked, "</think>7")
    assert not is_right(asked, "</think>7 ")
    assert not is_right(asked, "7")
    assert not is_right(asked, "")
    assert parses(asked, "7") is None


@pytest.mark.parametrize("family, reply", [(dialect.GLM, GLM), (dialect.QWEN, QWEN)])
def test_calls_are_read_in_both_syntaxes(family: Family, reply: str) -> None:
    asked = case("calls", reply, family)
    assert calls(asked, reply) == [("add", {"a": 1})]
    assert is_right(asked, reply)
    assert parses(asked, reply)


def test_several_calls_and_calls_without_arguments() -> None:
    asked = case("calls", GLM)
    twice = "</think>" + "<tool_call>now</tool_call>" * 2
    assert calls(asked, twice) == [("now", {}), ("now", {})]
    assert is_right(asked, twice) is False


@pytest.mark.parametrize(
    "reply",
    [
        "</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>",
        "</think><tool_call></tool_call>",
        "</think><tool_call>two words</tool_call>",
        "</think></tool_call>",
        "</think>" + GLM.removeprefix("</think>") + "<tool_call>now",
        "",
    ],
)
def test_a_broken_call_does_not_parse(reply: str) -> None:
    asked = case("calls", GLM)
    assert calls(asked, reply) is None
    assert parses(asked, reply) is False
    assert is_right(asked, reply) is False


def test_an_answer_in_place_of_a_call_is_wrong() -> None:
    assert parses(case("calls", GLM), "</think>It is 1.") is False


def test_another_argument_is_readable_and_wrong() -> None:
    asked = case("calls", GLM)
    assert parses(asked, GLM.replace("1", "2"))
    assert is_right(asked, GLM.replace("1", "2")) is False


def test_objects_count_by_what_they_say() -> None:
    asked = case("json", '</think>{"a": 1, "b": "x"}')
    assert is_right(asked, '</think>{"b":"x","a":1}')
    assert not is_right(asked, '{"b":"x","a":1}')  # it is still thinking
    assert not is_right(asked, '</think>{"a": 2, "b": "x"}')
    assert parses(asked, '</think>{"a": 2}')
    for text in ('{"a": 1', "[1]", "a: 1", ""):
        broken = f"</think>{text}"
        assert parses(asked, broken) is False
        assert json_object(asked, broken) is None
        assert is_right(asked, broken) is False


def test_free_replies_are_not_graded() -> None:
    assert is_right(case("free", "one two"), "three") is None
