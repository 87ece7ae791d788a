"""What holds for both families: the cut of the stream does not matter, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.front.parsing.base import Content, Message, Reasoning, ToolCall, collect
from tests.front.parsing.feeding import (
    GLM,
    QWEN,
    arguments,
    check_order,
    cut_up,
    events,
    message,
    read,
    rendered,
)

FAMILIES = pytest.mark.parametrize("template", [GLM, QWEN], ids=["glm", "qwen"])
SHARED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "\n\n", "a", "é", "now"]
SHARED += ["get_weather", "city", "true", "null", '"', "\\", "{", "12", "[1]", "<", ">"]
OF_GLM = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>city</arg_key>"]
OF_GLM += ["<tool_call>get_weather<arg_key>n</arg_key><arg_value>"]
OF_QWEN = ["<function=now>", "<function=", "<function=get_weather>\n", "</function>", "<parameter="]
OF_QWEN += ["<parameter=city>\n", "\n</parameter>\n", "</parameter>", "<parameter=n>", "</func"]
OF_QWEN += ["<tool_call>\n<function=get_weather>\n<parameter=city>\n", "</function>\n</tool_call>"]
PARTS = {GLM: SHARED + OF_GLM, QWEN: SHARED + OF_QWEN}
CUTS = st.lists(st.integers(0, 120), max_size=30)
ANYTHING = st.sampled_from([GLM, QWEN]).flatmap(
    lambda t: st.tuples(st.just(t), st.lists(st.sampled_from(PARTS[t]), max_size=14).map("".join))
)


@settings(max_examples=600, deadline=None)
@given(ANYTHING, CUTS, st.booleans(), st.booleans(), st.booleans())
def test_any_cut_of_any_stream_gives_the_same_events(answer, cuts, opened, with_tools, cut):
    template, text = answer
    how = {"in_reasoning": opened, "cut": cut} | ({} if with_tools else {"tools": ()})
    whole = events(template, text, **how)
    assert read(template, cut_up(template, text, cuts), **how) == whole
    assert read(template, cut_up(template, text, list(range(len(text)))), **how) == whole
    check_order(whole)


@settings(max_examples=600, deadline=None)
@given(ANYTHING, st.booleans())
def test_arguments_are_json_when_the_turn_ended_and_its_beginning_when_it_was_cut(answer, opened):
    template, text = answer
    whole = message(template, text, in_reasoning=opened)
    assert all(c.complete and isinstance(d, dict) for c, (_, d) in zip(
        whole.calls, arguments(whole), strict=True
    ))  # fmt: skip
    short = message(template, text, in_reasoning=opened, cut=True)
    for call, known in zip(short.calls, whole.calls, strict=False):
        assert call.complete or known.arguments.startswith(call.arguments)


@settings(max_examples=400, deadline=None)
@given(ANYTHING, st.booleans())
def test_without_tools_nothing_but_the_think_block_is_touched(answer, opened):
    template, text = answer
    got = message(template, text, in_reasoning=opened, tools=())
    assert not got.calls
    bare = text.replace("<think>", "").replace("</think>", "")
    both = (got.reasoning + got.content).replace("<think>", "").replace("</think>", "")
    assert "".join(both.split()) == "".join(bare.split())


WORDS = st.text(st.sampled_from("ab é<>/\n\"'\\{}[]:,=🦆"), max_size=20)
NOT_BLANK = WORDS.filter(lambda t: t.strip("\n") == t and t.strip() == t)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS,
        "note": st.one_of(st.none(), WORDS),
        "n": st.integers(-999, 999),
        "ratio": st.floats(-9, 9, allow_nan=False),
        "sure": st.booleans(),
        "list": st.lists(WORDS, max_size=3),
        "deep": st.dictionaries(WORDS, st.one_of(st.none(), st.booleans(), WORDS), max_size=2),
        "mixed": st.one_of(st.integers(0, 9), st.just("é")),
    },
)
CALLS = st.lists(
    st.one_of(st.just(("now", {})), VALUES.map(lambda v: ("get_weather", v))), max_size=3
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([GLM, QWEN]), NOT_BLANK, NOT_BLANK, CALLS)
def test_a_message_survives_being_rendered_and_read(template, thought, said, calls):
    """And what was read is rendered to the very text again, so that it stays a cached prefix."""
    given_calls = tuple(
        ToolCall(f"c{i}", name, json.dumps(a), complete=True) for i, (name, a) in enumerate(calls)
    )
    text = rendered(template, Message(said, thought, given_calls))
    got = message(template, text, in_reasoning=True)
    assert (got.reasoning, got.content) == (thought, said)
    assert arguments(got) == calls
    assert rendered(template, got) == text


@FAMILIES
def test_an_answer_that_never_leaves_its_think_block_is_all_reasoning(template):
    assert message(template, "hm\n", in_reasoning=True) == Message("", "hm\n")


@FAMILIES
def test_a_block_that_the_model_opens_itself_is_reasoning(template):
    assert message(template, "\n<think>hm</think>ok") == Message("ok", "hm")
    assert message(template, "<think>again<think></think>ok", in_reasoning=True) == Message(
        "ok", "again<think>"
    )


@FAMILIES
def test_markers_in_the_answer_are_part_of_it(template):
    said = "write <think> and </think> like this"
    assert message(template, "</think>" + said, in_reasoning=True) == Message(said)
    assert message(template, said) == Message(said)


@FAMILIES
def test_line_breaks_after_the_block_are_not_of_the_answer(template):
    assert message(template, "hm</think>\n\n  4\n", in_reasoning=True) == Message("  4\n", "hm")


@FAMILIES
def test_what_looks_like_a_call_in_plain_text_is_text(template):
    """Markers are tokens: their text, written out letter by letter, is content."""
    said = "<tool_call>now</tool_call> <tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert collect(read(template, [(c, False) for c in said])) == Message(said)


@FAMILIES
@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>what is this?</tool_call>",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "<tool_call><tool_call></tool_call>",
        "<tool_call>\n\n\n\n\n\n\n\n\n\n\n\nnow</tool_call>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_stays_where_it_was_said(template, bad):
    assert message(template, f"A {bad} B") == Message(f"A {bad} B")
    assert message(template, f"A {bad} B</think>C", in_reasoning=True) == Message("C", f"A {bad} B")


@FAMILIES
def test_reasoning_comes_token_by_token(template):
    got = read(template, [("a", False), (" b", False)], in_reasoning=True)
    assert got == (Reasoning("a b"),)


@FAMILIES
def test_white_space_before_a_call_is_not_said(template):
    call = rendered(template, Message("", "", (ToolCall("x", "now", "{}", complete=True),)))
    call = call.split("</think>")[1].lstrip()
    got = events(template, f"</think>ok \n\n{call}\n", in_reasoning=True)
    assert got[0] == Content("ok")
    assert arguments(collect(got)) == [("now", {})]
    assert len(got) == 4
    assert collect(events(template, f"ok\n{call}\nbye")).content == "ok\n\nbye"


@FAMILIES
def test_a_call_inside_the_think_block_ends_it(template):
    call = rendered(template, Message("", "", (ToolCall("x", "now", "{}", complete=True),)))
    call = call.split("</think>")[1].lstrip()
    got = message(template, f"hm\n{call}</think>\n\nok", in_reasoning=True)
    assert got.reasoning.rstrip("\n") == "hm"
    assert [c.name for c in got.calls] == ["now"]
    assert got.content == "ok"
    unclosed = message(template, f"hm\n{call}bye", in_reasoning=True)
    assert (unclosed.reasoning.rstrip("\n"), unclosed.content) == ("hm", "bye")
