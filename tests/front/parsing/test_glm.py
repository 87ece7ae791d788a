"""Calls of the GLM family, well formed and otherwise."""

from __future__ import annotations

import json

import pytest

from millpond.front.parsing.base import Arguments, CallEnd, CallStart, Content, Message, collect
from tests.front.parsing.feeding import GLM, arguments, events, message, read, segments


def call(name: str, *pairs: tuple[str, str]) -> str:
    """A call's markup."""
    written = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs)
    return f"<tool_call>{name}{written}</tool_call>"


def test_a_call_starts_with_its_name_and_strings_come_as_they_are_written():
    pieces = [
        ("<tool_call>", True), ("get_", False), ("weather", False), ("<arg_key>", True),
        ("city", False), ("</arg_key>", True), ("<arg_value>", True), ("Os", False), ('l"o', False),
        ("</arg_value>", True), ("</tool_call>", True),
    ]  # fmt: skip
    seen = [len(read(GLM, pieces[:n], cut=True)) for n in range(len(pieces) + 1)]
    assert read(GLM, pieces[:3], cut=True) == (Content("<tool_call>get_weather"),)
    assert read(GLM, pieces[:9], cut=True) == (
        CallStart(0, "c0", "get_weather"),
        Arguments(0, '{"city": "Osl\\"o'),
    )
    assert seen[-1] == 3
    assert read(GLM, pieces)[-1] == CallEnd(0)


def test_a_call_without_arguments_has_an_empty_object():
    assert events(GLM, call("now")) == (
        CallStart(0, "c0", "now"), Arguments(0, "{}"), CallEnd(0),
    )  # fmt: skip


def test_white_space_around_names_and_between_pairs_is_ignored():
    text = (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value> 3 </arg_value>\n</tool_call>"
    )
    assert arguments(message(GLM, text)) == [("get_weather", {"city": "Oslo", "n": 3})]


def test_several_calls_in_a_row_are_counted():
    got = message(GLM, call("now") + "\n" + call("get_weather", ("city", "Oslo")) + call("now"))
    assert [c.name for c in got.calls] == ["now", "get_weather", "now"]
    assert [c.id for c in got.calls] == ["c0", "c1", "c2"]
    assert got.content == ""


def test_a_tool_that_was_not_offered_is_a_call_all_the_same():
    got = message(GLM, call("made.up-1", ("a", "1"), ("b", "x y"), ("c", '{"d": null}')))
    assert arguments(got) == [("made.up-1", {"a": 1, "b": "x y", "c": {"d": None}})]


def test_markers_inside_a_value_are_part_of_it():
    value = "<tool_call>now</tool_call> then <think></think> <arg_key>k</arg_key>"
    assert arguments(message(GLM, call("get_weather", ("city", value)))) == [
        ("get_weather", {"city": value})
    ]
    value = "</tool_call></tool_call>\n<arg_value>"
    assert arguments(message(GLM, call("get_weather", ("city", value)))) == [
        ("get_weather", {"city": value})
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<arg_key>city</arg_key><arg_value>Oslo</tool_call>", {"city": "Oslo"}),
        ("<arg_key>city</arg_key><arg_value>Oslo</tool_call>\n", {"city": "Oslo"}),
        ("<arg_key>city</arg_key><arg_value>Oslo</arg_value>", {"city": "Oslo"}),
        ("<arg_key>city</arg_key><arg_value>Oslo", {"city": "Oslo"}),
        ("<arg_key>city</arg_key>Oslo</arg_value></tool_call>", {"city": "Oslo"}),
        ("<arg_key>city<arg_value>Oslo</arg_value></tool_call>", {"city": "Oslo"}),
        ("", {}),
    ],
)
def test_what_the_model_forgot_to_close_is_closed(text, expected):
    got = message(GLM, f"<tool_call>get_weather{text}")
    assert arguments(got) == [("get_weather", expected)]
    assert got.calls[0].complete
    assert got.content == ""


def test_a_call_that_was_not_closed_ends_where_the_next_begins():
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>" + call("now")
    assert arguments(message(GLM, text)) == [("get_weather", {"city": "Oslo"}), ("now", {})]
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</tool_call>" + call("now")
    assert arguments(message(GLM, text)) == [("get_weather", {"city": "Oslo"}), ("now", {})]


def test_an_answer_that_was_cut_off_does_not_pretend_to_be_whole():
    """Half of a value must not look like a value: a client would act on it."""
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>rm -rf /tm"
    got = message(GLM, text, cut=True)
    assert got.calls[0].arguments == '{"city": "rm -rf /tm'
    assert not got.calls[0].complete
    assert got.calls[0].object() == {}
    assert message(GLM, "<tool_call>get_wea", cut=True) == Message("<tool_call>get_wea")


def test_a_value_that_waits_for_its_end_when_cut_is_left_out():
    got = message(GLM, "<tool_call>get_weather<arg_key>n</arg_key><arg_value>12", cut=True)
    assert got.calls[0].arguments == '{"n": '


def test_what_has_no_place_in_a_call_is_said_after_it():
    text = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value> oh, </arg_value>"
        "and<arg_key>odd</tool_call>bye"
    )
    got = message(GLM, text)
    assert arguments(got) == [("get_weather", {"city": "Oslo"})]
    assert got.content == "oh, </arg_value>and<arg_key>oddbye"
    assert message(GLM, text.partition("</tool_call>")[0] + "x", cut=True).content.startswith("oh,")


def test_white_space_before_a_value_whose_beginning_is_missing_is_of_it():
    pieces = segments(GLM.dialect, "<tool_call>get_weather<arg_key>city</arg_key>")
    for tail in ([" ", "\n", "Oslo"], [" \nOslo"]):
        got = read(GLM, [*pieces, *((t, False) for t in tail)])
        assert collect(got).calls[0].arguments == '{"city": " \\nOslo"}'


def test_reasoning_is_kept_to_the_letter():
    """The template writes it back as it is; anything else would miss the cached prefix."""
    assert message(GLM, "\n hm\n\n</think>ok", in_reasoning=True).reasoning == "\n hm\n\n"


def test_arguments_streamed_and_whole_are_the_same_text():
    text = call("get_weather", ("city", 'a"\n\\b'), ("deep", '{"é": [1, null]}'), ("sure", "true"))
    by_letter = [(c, m) for p, m in segments(GLM.dialect, text) for c in ([p] if m else p)]
    streamed = "".join(e.text for e in read(GLM, by_letter) if isinstance(e, Arguments))
    assert streamed == collect(events(GLM, text)).calls[0].arguments
    assert json.loads(streamed) == {"city": 'a"\n\\b', "deep": {"é": [1, None]}, "sure": True}
