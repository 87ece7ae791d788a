"""Templates: what they render, and what they say about answers."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.engine.constraint import Constraint
from millpond.engine.constraint import Reasoning as ThinkBlock
from millpond.errors import Refused, Rejected
from millpond.front.chat import ChatTemplate, Plan
from millpond.front.parsing.wish import ToolWish
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED

TOKENIZER = Tokenizer(BUNDLED)
SOURCE = (BUNDLED / "chat_template.jinja").read_text("utf-8")
QWEN = ChatTemplate(
    (BUNDLED.parent / "millpond-tiny-qwen" / "chat_template.jinja").read_text("utf-8"), TOKENIZER
)
USER = {"role": "user", "content": "Hi"}


def glm() -> ChatTemplate:
    found = ChatTemplate.of_model(BUNDLED, TOKENIZER)
    assert found is not None
    return found


def test_the_prompt_opens_the_think_block_and_says_so():
    prompt = glm().render([USER])
    assert prompt.text.endswith("<|user|>Hi<|assistant|><think>")
    assert prompt.in_reasoning


def test_parts_of_text_equal_a_string():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert glm().render([{"role": "user", "content": parts}]) == glm().render([USER])


def test_both_names_of_reasoning_are_understood_in_history():
    answers = [
        {"role": "assistant", "content": "4", name: "2+2"}
        for name in ("reasoning", "reasoning_content")
    ]
    texts = [glm().render([USER, a, USER]).text for a in answers]
    assert texts[0] == texts[1]
    assert "<think>2+2</think>4" in texts[0]


def test_arguments_of_past_calls_may_be_json_text():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    text = glm().render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}]).text
    assert "<tool_call>f<arg_key>x</arg_key><arg_value>é</arg_value></tool_call>" in text


def test_json_in_templates_is_not_escaped_for_html():
    template = ChatTemplate("{{ messages[0].content | tojson }}")
    assert template.render([{"role": "user", "content": "<é>'"}]).text == '"<é>\'"'


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "no role"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": ["x"]}],
        [{"role": "assistant", "tool_calls": 1}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    ],
)
def test_messages_that_cannot_be_served_are_refused(messages):
    with pytest.raises(Rejected):
        glm().render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].absent.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_an_error_inside_the_template_is_the_callers(source):
    with pytest.raises(Rejected, match="template"):
        ChatTemplate(source).render([USER])


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(Rejected):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([USER])
    with pytest.raises(Rejected):
        ChatTemplate("{{ messages.append(1) }}").render([USER])


def test_template_variables_cannot_displace_the_messages():
    with pytest.raises(Rejected):
        glm().render([USER], extra={"messages": []})


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(Refused, match="line 1"):
        ChatTemplate("{% if %}")


def test_efforts_are_those_the_template_tells_apart():
    assert glm().efforts == {"low", "high", "max"}


def test_a_final_message_is_continued_where_it_ends():
    prompt = glm().render(
        [USER, {"role": "assistant", "content": "It is"}], continue_final_message=True
    )
    assert prompt.text.endswith("</think>It is")
    assert not prompt.in_reasoning


@pytest.mark.parametrize(
    ("value", "variables"),
    [(None, {}), ("low", {"reasoning_effort": "low"}), ("max", {"reasoning_effort": "max"})],
)
def test_an_effort_becomes_a_variable_of_the_template(value, variables):
    assert glm().effort(value) == variables


@pytest.mark.parametrize("value", ["none", "medium", "LOW", "", 3, ["low"]])
def test_an_effort_that_would_silently_be_another_is_refused(value):
    with pytest.raises(Rejected, match="high, low, max") as caught:
        glm().effort(value)
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(Rejected):
        glm().render([USER], extra={"reasoning_effort": value})


@pytest.mark.parametrize(
    ("value", "on"), [("none", False), ("low", True), ("medium", True), ("high", True)]
)
def test_an_effort_is_a_switch_where_the_template_has_only_that(value, on):
    assert QWEN.effort(value) == {"enable_thinking": on}
    assert QWEN.render([USER], extra=QWEN.effort(value)).in_reasoning == on


def test_a_template_without_reasoning_has_no_effort():
    with pytest.raises(Rejected, match="none at all"):
        ChatTemplate("{{ messages[0].content }}").effort("low")


def test_variables_that_the_template_never_reads_are_told():
    assert glm().unknown({"enable_thinking": False, "clear_thinking": True}) == ["enable_thinking"]
    assert QWEN.unknown({"enable_thinking": False, "thinking": 1}) == ["thinking"]


def test_an_old_function_message_is_a_tool_message():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    texts = [
        glm().render([*asked, {"role": role, "name": "f", "content": "42"}]).text
        for role in ("tool", "function")
    ]
    assert texts[0] == texts[1]
    assert "<|observation|><tool_response>42</tool_response>" in texts[0]


def test_a_developer_message_is_a_system_message():
    texts = [glm().render([{"role": r, "content": "s"}, USER]) for r in ("system", "developer")]
    assert texts[0] == texts[1]


TOOL = {"type": "function", "function": {"name": "now"}}


def plan(template: ChatTemplate, tools: ToolWish | None = None, **how: Any) -> Plan:
    """What is planned for a question."""
    tools = tools or ToolWish.none()
    return template.plan(template.render([USER], tools=tools.for_template), tools, **how)


def test_a_plain_question_plans_neither_tools_nor_a_grammar():
    made = plan(glm())
    assert made.reading.in_reasoning
    assert made.reading.tools == ()
    assert (made.constraint, made.reasoning) == (None, None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_that_is_wanted_becomes_a_grammar_after_the_reasoning(choice):
    made = plan(glm(), ToolWish.of([TOOL], choice))
    assert made.constraint is not None
    assert made.constraint.kind == "grammar"
    assert made.constraint.param == "tool_choice"
    assert made.reasoning == ThinkBlock(
        end_token=TOKENIZER.token_id("</think>"),
        is_open=True,
        start_token=TOKENIZER.token_id("<think>"),
    )
    assert [t.name for t in made.reading.tools] == ["now"]


def test_tools_that_may_be_called_need_no_grammar():
    made = plan(glm(), ToolWish.of([TOOL]))
    assert (made.constraint, made.reasoning) == (None, None)
    assert [t.name for t in made.reading.tools] == ["now"]


def test_a_thinking_budget_names_the_token_that_ends_thinking():
    made = plan(glm(), thinking_budget=7)
    assert made.reasoning is not None
    assert made.reasoning.budget == 7
    assert made.reasoning.end_token == TOKENIZER.token_id("</think>")


def test_a_constraint_starts_after_the_reasoning_if_there_is_any():
    json_object = Constraint(kind="json_object")
    assert plan(glm(), constraint=json_object).reasoning is not None
    off = QWEN.render([USER], extra={"enable_thinking": False})
    assert QWEN.plan(off, ToolWish.none(), constraint=json_object).reasoning is None


def test_what_cannot_be_planned_is_refused_by_name():
    plain = ChatTemplate("{{ messages[0].content }}", TOKENIZER)
    wanted = ToolWish.of([TOOL], "required")
    json_object = Constraint(kind="json_object")
    for template, how, param in (
        (plain, {"tools": wanted}, "tools"),
        (plain, {"thinking_budget": 1}, "thinking_token_budget"),
        (glm(), {"thinking_budget": -1}, "thinking_token_budget"),
        (glm(), {"tools": wanted, "constraint": json_object}, "tool_choice"),
        (ChatTemplate(SOURCE), {"constraint": json_object}, "response_format"),
    ):
        with pytest.raises(Rejected) as caught:
            plan(template, **how)
        assert caught.value.param == param
