"""Calls of the Qwen 3.5 family, well formed and otherwise."""

from __future__ import annotations

import pytest

from millpond.front.parsing.base import Arguments, CallEnd, CallStart, Content, Message
from tests.front.parsing.feeding import QWEN, arguments, events, message, read


def call(name: str, *pairs: tuple[str, str]) -> str:
    """A call's markup."""
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def test_strings_come_as_they_are_written():
    begun = [("<tool_call>", True), ("\n<function=get_weather>\n<parameter=city>\n", False)]
    assert read(QWEN, [*begun, ('Os"l', False)], cut=True) == (
        CallStart(0, "c0", "get_weather"),
        Arguments(0, '{"city": "Os\\"l'),
    )


def test_what_may_be_the_end_of_a_value_waits_until_that_is_known():
    begun = [("<tool_call>", True), ("\n<function=get_weather>\n<parameter=city>\nOslo", False)]
    for tail in (
        "\n",
        "\n<",
        "\n</param",
        "</",
        "\n</function>",
        "\n</function>\n",
        "\n<parameter=n",
    ):
        got = read(QWEN, [*begun, (tail, False)], cut=True)
        assert got[-1] == Arguments(0, '{"city": "Oslo'), tail
        got = read(QWEN, [*begun, (tail, False), ("!\n</parameter>", False)], cut=True)
        assert got[-1] == Arguments(0, '{"city": "Oslo' + tail.replace("\n", "\\n") + '!"')


def test_a_call_without_parameters_has_an_empty_object():
    assert events(QWEN, call("now")) == (
        CallStart(0, "c0", "now"), Arguments(0, "{}"), CallEnd(0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\nOslo\n", "Oslo"),
        ("Oslo", "Oslo"),
        ("\n\nOslo\n\n", "\nOslo\n"),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("\n  a\n    b\n", "  a\n    b"),
        ("\n<b>x</b> </parameter\n", "<b>x</b> </parameter"),
        ("\n<parameter=city> </function> x\n", "<parameter=city> </function> x"),
    ],
)
def test_one_line_break_on_either_side_of_a_value_is_of_the_format(written, value):
    head = "<tool_call>\n<function=get_weather>\n<parameter=city>"
    text = f"{head}{written}</parameter>\n</function>\n</tool_call>"
    assert arguments(message(QWEN, text)) == [("get_weather", {"city": value})]


def test_values_are_typed_by_the_schema():
    text = call(
        "get_weather", ("n", "3"), ("ratio", "1e3"), ("sure", "True"), ("note", "None"),
        ("list", '["a"]'), ("deep", '{"b": null}'), ("mixed", "7"), ("any", "7"),
        ("unknown", "true"),
    )  # fmt: skip
    assert arguments(message(QWEN, text)) == [
        (
            "get_weather",
            {
                "n": 3,
                "ratio": 1000.0,
                "sure": True,
                "note": None,
                "list": ["a"],
                "deep": {"b": None},
                "mixed": 7,
                "any": "7",
                "unknown": "true",
            },
        )
    ]


@pytest.mark.parametrize(
    "tail",
    [
        "\n</parameter>\n</function>\n",
        "\n</parameter>\n</function>",
        "\n</parameter>\n",
        "\n</parameter>",
        "\n</parameter>\n</tool_call>",
        "\n</function>\n</tool_call>",
        "\n</function>",
        "</tool_call>",
        "",
    ],
)
def test_what_the_model_forgot_to_close_is_closed(tail):
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo{tail}"
    got = message(QWEN, text)
    assert arguments(got) == [("get_weather", {"city": "Oslo"})]
    assert got.calls[0].complete
    assert got.content == ""
    both = message(QWEN, text + "\n" * bool(tail) + call("now")) if tail else got
    assert arguments(both)[:1] == [("get_weather", {"city": "Oslo"})]
    assert len(both.calls) == (2 if tail else 1)


def test_a_forgotten_end_of_a_value_is_seen_at_the_next_parameter_of_the_tool():
    body = "<parameter=city>\nOslo\n<parameter=n>\n3\n</parameter>\n"
    text = f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>"
    assert arguments(message(QWEN, text)) == [("get_weather", {"city": "Oslo", "n": 3})]


def test_two_functions_in_one_call_are_two_calls():
    body = "<function=now>\n</function>\n<function=get_weather>\n</function>\n"
    got = message(QWEN, f"<tool_call>\n{body}</tool_call>")
    assert arguments(got) == [("now", {}), ("get_weather", {})]


def test_what_follows_a_function_is_said():
    got = message(QWEN, "<tool_call>\n<function=now>\n</function>\nDone.</tool_call>!")
    assert arguments(got) == [("now", {})]
    assert got.content == "Done.</tool_call>!"


def test_what_has_no_place_in_a_call_is_said_after_it():
    body = 'what? {"city": 1} <parameter=a\nb> <x>\n<parameter=n>\n3\n</parameter>'
    got = message(QWEN, f"<tool_call>\n<function=get_weather>\n{body}\n</function>\n</tool_call>")
    assert arguments(got) == [("get_weather", {"n": 3})]
    assert got.content == 'what? {"city": 1} <parameter=a\nb> <x>'


def test_an_answer_that_was_cut_off_does_not_pretend_to_be_whole():
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOsl"
    got = message(QWEN, text, cut=True)
    assert (got.calls[0].arguments, got.calls[0].complete) == ('{"city": "Osl', False)
    assert message(QWEN, text[:20], cut=True) == Message(text[:20])


def test_line_breaks_beside_the_think_markers_are_of_the_format():
    got = message(QWEN, "\nhm\n\nhm\n</think>\n\nok", in_reasoning=True)
    assert got == Message("ok", "hm\n\nhm")
    assert message(QWEN, "\n</think>\n\nok", in_reasoning=True) == Message("ok")


def test_a_second_end_of_thinking_is_no_content():
    """With thinking switched off the prompt has closed the block; some models close it again."""
    assert message(QWEN, "</think>\n\nok") == Message("ok")
    assert events(QWEN, "ok </think>") == (Content("ok </think>"),)
