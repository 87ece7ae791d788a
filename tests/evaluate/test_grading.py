"""Replies against right ones: by letter, by what an object says, by what a call asks."""

from __future__ import annotations

import pytest

from millpond.evaluate.cases import Case, Kind
from millpond.evaluate.grading import calls, is_right, json_object, parses

GLM = "</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
QWEN = (
    "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>"
)


def case(kind: Kind, reply: str) -> Case:
    return Case(task="t", seed=0, kind=kind, prompt=(1,), reply=reply)


def test_text_is_right_letter_by_letter() -> None:
    asked = case("text", "</think>7")
    assert is_right(asked, "</think>7")
    assert not is_right(asked, "</think>7 ")
    assert not is_right(asked, "7")
    assert not is_right(asked, "")
    assert parses(asked, "7") is None


@pytest.mark.parametrize("reply", [GLM, QWEN])
def test_calls_are_read_in_both_syntaxes(reply: str) -> None:
    assert calls(reply) == [("add", {"a": "1"})]
    assert is_right(case("calls", GLM), reply)
    assert parses(case("calls", GLM), reply)


def test_several_calls_and_calls_without_arguments() -> None:
    assert calls("<tool_call>now</tool_call>" * 2) == [("now", {}), ("now", {})]
    assert calls("<tool_call>\n<function=now>\n</function>\n</tool_call>") == [("now", {})]


def test_a_parameter_may_hold_several_lines() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\na\nb\n</parameter>\n</function>\n</tool_call>"
    assert calls(text) == [("f", {"x": "a\nb"})]


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>add<arg_key>a</arg_key></tool_call>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>",
        "<tool_call></tool_call>",
        "<tool_call>two words</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "</tool_call>",
    ],
)
def test_a_broken_call_does_not_parse(reply: str) -> None:
    asked = case("calls", GLM)
    assert calls(reply) is None
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
    assert not is_right(asked, '</think>{"a": 2, "b": "x"}')
    assert parses(asked, '{"a": 2}')
    for broken in ('{"a": 1', "[1]", "a: 1", ""):
        assert parses(asked, broken) is False
        assert json_object(broken) is None
        assert is_right(asked, broken) is False


def test_free_replies_are_not_graded() -> None:
    assert is_right(case("free", "one two"), "three") is None
