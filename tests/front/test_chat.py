"""Templates and the split of an answer from its reasoning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import Refused, Rejected
from millpond.front.chat import ChatTemplate, ReasoningSplit
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED
from tests.front.test_text import split

TOKENIZER = Tokenizer(BUNDLED)
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


MARKS = ["</think>", "<think>", "</thi", "nk>", "<", "a", "\n"]
THOUGHTS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)


@given(THOUGHTS, st.booleans(), st.lists(st.integers(0, 40)))
def test_reasoning_is_split_alike_however_the_text_is_cut(text, opened, cuts):
    def run(pieces: list[str]) -> tuple[str, str]:
        splitter = ReasoningSplit(active=True, in_reasoning=opened)
        got = [*(splitter.push(p) for p in pieces), splitter.finish()]
        return "".join(r for r, _ in got), "".join(a for _, a in got)

    assert run(split(text, cuts)) == run([text]) == run(list(text))


@pytest.mark.parametrize(
    "text, opened, expected",
    [
        ("a\n</think>\n\n4", True, ("a", "4")),
        ("a</think>4\n", True, ("a", "4\n")),
        ("</think>4", True, ("", "4")),
        ("a</thin", True, ("a</thin", "")),
        ("<think>\na</think>4", False, ("a", "4")),
        (" <think>a</think>4", False, ("a", "4")),
        ("4 < 5", False, ("", "4 < 5")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_ends_at_its_marker(text, opened, expected):
    splitter = ReasoningSplit(active=True, in_reasoning=opened)
    first, last = splitter.push(text), splitter.finish()
    assert (first[0] + last[0], first[1] + last[1]) == expected


def test_without_a_think_block_nothing_is_touched():
    splitter = ReasoningSplit(active=False, in_reasoning=False)
    assert splitter.push("\n<think>a</think>") == ("", "\n<think>a</think>")
