"""The chat template against golden strings of the family's format."""

from pathlib import Path
from typing import Any

import jinja2
import pytest

import millpond
from training.render import load_template

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
TEMPLATE = load_template(BUNDLED / "chat_template.jinja")
OPEN = "[gMASK]<sop><|system|>Reasoning Effort: "
HEADER = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
FOOTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
    "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
    "<arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
HI = {"role": "user", "content": "hi"}


def text(*messages: dict[str, Any], **extra: Any) -> str:
    """The rendered chat."""
    return TEMPLATE.render(messages=list(messages), **extra)


def call(name: str, number: str | None = None, **arguments: Any) -> dict[str, Any]:
    """A tool call as clients send it back."""
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if number is None else made | {"id": number}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("low", "Low"),
        ("high", "High"),
        ("max", "Max"),
        ("medium", "Max"),
        (None, "Max"),
        ("HIGH", "Max"),
    ],
)
def test_only_low_and_high_are_honoured_as_effort(given: str | None, shown: str) -> None:
    assert text(HI, reasoning_effort=given) == f"{OPEN}{shown}<|user|>hi"


def test_an_unset_effort_is_max_and_the_generation_prompt_opens_the_think_block() -> None:
    assert text(HI, add_generation_prompt=True) == f"{OPEN}Max<|user|>hi<|assistant|><think>"


def test_system_and_user_text_are_not_stripped_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b\n"}]
    got = text({"role": "system", "content": " s "}, {"role": "user", "content": parts})
    assert got == f"{OPEN}Max<|system|> s <|user|> ab\n"


def test_assistant_content_is_stripped_and_reasoning_comes_first() -> None:
    reply = {"role": "assistant", "reasoning_content": "r", "content": "\n a \n"}
    assert text(HI, reply) == f"{OPEN}Max<|user|>hi<|assistant|><think>r</think>a"
    inline = {"role": "assistant", "content": "<think>r</think>\na"}
    assert text(HI, inline) == f"{OPEN}Max<|user|>hi<|assistant|><think>r</think>a"
    plain = {"role": "assistant", "content": None}
    assert text(HI, plain) == f"{OPEN}Max<|user|>hi<|assistant|><think></think>"


def test_clear_thinking_empties_reasoning_before_the_last_user_turn_only() -> None:
    old = {"role": "assistant", "reasoning_content": "old", "content": "a"}
    new = {"role": "assistant", "reasoning_content": "new", "content": "b"}
    kept = text(HI, old, HI, new)
    assert "<think>old</think>a" in kept
    assert "<think>new</think>b" in kept
    cleared = text(HI, old, HI, new, clear_thinking=True)
    assert "<think></think>a" in cleared
    assert "<think>new</think>b" in cleared


def test_the_tools_block_has_one_object_a_line_without_private_keys() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "é", "strict": True, "parameters": {}},
        },
        {"name": "g", "parameters": {"a": [1, None]}, "defer_loading": False},
        {"type": "function", "function": {"name": "hidden", "defer_loading": True}},
    ]
    lines = '{"name": "f", "description": "é", "parameters": {}}\n'
    lines += '{"name": "g", "parameters": {"a": [1, null]}}\n'
    assert text(HI, tools=tools) == f"{OPEN}Max{HEADER}{lines}{FOOTER}<|user|>hi"


def test_tool_calls_write_strings_raw_and_the_rest_as_json() -> None:
    reply = {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [call("f", city="Oslo <b>", n=3, deep={"é": [True]}), call("now")],
    }
    assert text(HI, reply).endswith(
        "<|assistant|><think></think>ok<tool_call>f<arg_key>city</arg_key>"
        "<arg_value>Oslo <b></arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
        '<arg_key>deep</arg_key><arg_value>{"é": [true]}</arg_value></tool_call>'
        "<tool_call>now</tool_call>"
    )


def results(*given: tuple[str | None, str]) -> list[dict[str, Any]]:
    """Tool messages, with or without ids."""
    return [
        {"role": "tool", "content": body} | ({} if number is None else {"tool_call_id": number})
        for number, body in given
    ]


def test_results_share_one_observation_and_are_sorted_into_call_order() -> None:
    reply = {"role": "assistant", "content": "", "tool_calls": [call("f", "1"), call("g", "2")]}
    end = "<|observation|><tool_response>A</tool_response><tool_response>B</tool_response>"
    assert text(HI, reply, *results(("2", "B"), ("1", "A"))).endswith(end)
    assert text(HI, reply, *results(("1", "A"), ("2", "B")), HI).endswith(end + "<|user|>hi")


def test_results_keep_their_order_when_ids_do_not_allow_sorting() -> None:
    reply = {"role": "assistant", "content": "", "tool_calls": [call("f", "1"), call("g", "2")]}
    end = "<|observation|><tool_response>B</tool_response><tool_response>A</tool_response>"
    assert text(HI, reply, *results((None, "B"), (None, "A"))).endswith(end)
    assert text(HI, reply, *results(("9", "B"), ("1", "A"))).endswith(end)


def test_nothing_closes_a_turn_and_no_line_break_parts_two() -> None:
    asked, said = call("f", "1", a="x"), {"role": "assistant", "reasoning_content": "r"}
    chat = text(
        {"role": "system", "content": "s"},
        HI,
        said | {"content": "ok", "tool_calls": [asked]},
        *results(("1", "7")),
        said | {"content": "seven"},
        HI,
        add_generation_prompt=True,
    )
    assert chat == (
        f"{OPEN}Max<|system|>s<|user|>hi<|assistant|><think>r</think>ok<tool_call>f"
        "<arg_key>a</arg_key><arg_value>x</arg_value></tool_call><|observation|>"
        "<tool_response>7</tool_response><|assistant|><think>r</think>seven<|user|>hi"
        "<|assistant|><think>"
    )


def test_no_variable_switches_thinking_off() -> None:
    plain = text(HI, add_generation_prompt=True)
    for value in (False, True):
        assert text(HI, add_generation_prompt=True, enable_thinking=value) == plain


def test_arguments_that_are_no_object_are_an_error() -> None:
    broken = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    with pytest.raises(jinja2.UndefinedError):
        text(HI, {"role": "assistant", "content": "", "tool_calls": [broken]})
