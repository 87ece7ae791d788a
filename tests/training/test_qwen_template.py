"""The chat template of the second bundled model against golden strings of its family's format."""

from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond.errors import Rejected
from millpond.front.chat import ChatTemplate

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-qwen"
TEMPLATE = ChatTemplate((BUNDLED / "chat_template.jinja").read_text("utf-8"))
HI = {"role": "user", "content": "hi"}
ASKED = "<|im_start|>user\nhi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
PREAMBLE = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
FORMAT = (
    "</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
    "suffix:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n"
    "value_1\n</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second "
    "parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n"
    "<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your "
    "function call in natural language BEFORE the function call, but NOT after\n- If there is no "
    "function call available, answer the question like normal with your current knowledge and do "
    "not tell the user about function calls\n</IMPORTANT>"
)


def text(*messages: dict[str, Any], tools: Any = None, gen: bool = False, **extra: Any) -> str:
    """The rendered chat."""
    made = TEMPLATE.render(messages, tools=tools, add_generation_prompt=gen, extra=extra)
    return made.text


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call as clients send it back."""
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content: Any = None, thought: str | None = None, *calls: Any) -> dict[str, Any]:
    """An answer as clients send it back."""
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if thought is not None:
        made["reasoning_content"] = thought
    return made | ({"tool_calls": list(calls)} if calls else {})


def test_turns_are_chatml_with_their_contents_trimmed():
    got = text({"role": "system", "content": " s\n"}, {"role": "user", "content": "\n hi "})
    assert got == f"<|im_start|>system\ns<|im_end|>\n{ASKED}"


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": " h"}, {"type": "text", "text": "i "}]
    assert text({"role": "user", "content": parts}) == ASKED


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "empty"),
        ([{"role": "system", "content": "s"}], "no message of a user"),
        ([HI, {"role": "system", "content": "s"}], "first message"),
        ([{"role": "system", "content": "s"}] * 2 + [HI], "first message"),
        ([{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], "user to answer"),
        ([HI, {"role": "observation", "content": "x"}], "system, user, assistant or tool"),
    ],
)
def test_the_template_raises_on_what_the_format_has_no_place_for(messages, why):
    with pytest.raises(Rejected, match=why):
        text(*messages)


def test_tools_open_the_system_turn_and_the_callers_text_follows():
    tools = [
        {"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    lines = (
        '{"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}\n'
        '{"type": "function", "function": {"name": "g"}}\n'
    )
    opening = f"<|im_start|>system\n{PREAMBLE}{lines}{FORMAT}"
    assert text(HI, tools=tools) == f"{opening}<|im_end|>\n{ASKED}"
    system = {"role": "system", "content": " Be brief.\n"}
    assert text(system, HI, tools=tools) == f"{opening}\n\nBe brief.<|im_end|>\n{ASKED}"


@pytest.mark.parametrize(
    ("extra", "opened"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_the_answer_begins_in_a_think_block_unless_thinking_is_switched_off(extra, opened):
    prompt = TEMPLATE.render([HI], extra=extra)
    assert prompt.text == ASKED + ANSWER + opened
    assert prompt.in_reasoning == (extra.get("enable_thinking") is not False)


def test_soft_switches_are_plain_text():
    typed = {"role": "user", "content": "hi /no_think"}
    assert text(typed, gen=True).endswith(f"hi /no_think<|im_end|>\n{ANSWER}<think>\n")


def test_only_answers_after_the_last_query_keep_their_reasoning():
    old, new = reply("a", "\nold\n"), reply("b", "\nnew\n")
    kept = f"{ANSWER}<think>\nnew\n</think>\n\nb<|im_end|>\n"
    assert text(HI, old, HI, new) == f"{ASKED}{ANSWER}a<|im_end|>\n{ASKED}{kept}"


def test_an_answer_without_reasoning_gets_an_empty_block():
    assert text(HI, reply("a")) == f"{ASKED}{ANSWER}<think>\n\n</think>\n\na<|im_end|>\n"


def test_reasoning_inside_the_content_is_recognised():
    inline = reply("<think>\nr\n</think>\n\na")
    assert text(HI, inline) == text(HI, reply("a", "r"))
    assert text(HI, inline, HI) == f"{ASKED}{ANSWER}a<|im_end|>\n{ASKED}"


def test_calls_nest_function_and_parameters_with_raw_values():
    made = reply(
        "ok", "r", call("f", city="Oslo\n<b>", n=3, deep={"é": [True]}, list=[1]), call("now")
    )
    assert text(HI, made) == (
        f"{ASKED}{ANSWER}<think>\nr\n</think>\n\nok\n\n"
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n<b>\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n"
        '<parameter=deep>\n{"é": [true]}\n</parameter>\n<parameter=list>\n[1]\n</parameter>\n'
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_plain_values_are_written_as_the_published_template_writes_them():
    """Truth values and nothing come out as Python shows them; parsers read both spellings."""
    made = text(HI, reply("", "", call("f", a=True, b=None, c=1.5)))
    assert "<parameter=a>\nTrue\n</parameter>\n<parameter=b>\nNone\n</parameter>\n" in made
    assert "<parameter=c>\n1.5\n</parameter>\n" in made


def test_a_call_without_text_follows_the_think_block():
    made = text(HI, reply(None, "r", call("now")))
    assert f"{ANSWER}<think>\nr\n</think>\n\n<tool_call>\n<function=now>\n" in made


def test_results_share_one_user_turn_and_are_no_query():
    a, b = ({"role": "tool", "tool_call_id": i, "content": f" {i}\n"} for i in "AB")
    got = text(HI, reply("", "r", call("f"), call("g")), a, b, gen=True)
    assert got.startswith(f"{ASKED}{ANSWER}<think>\nr\n</think>\n\n<tool_call>\n")
    assert got.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n"
        f"<tool_response>\nB\n</tool_response><|im_end|>\n{ANSWER}<think>\n"
    )
