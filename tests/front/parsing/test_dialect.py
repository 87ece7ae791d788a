"""A family is recognised by what its template holds, and its markers by token or by text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.front.chat import ChatTemplate
from millpond.front.parsing.base import Message, collect
from millpond.front.parsing.dialect import Reading, family_of
from tests.front.parsing.feeding import GLM, QWEN, TOKENIZER, TOOLS

THINKS = "{{ messages[0].content }}<think>\n</think>"


@pytest.mark.parametrize(
    ("template", "name"), [(GLM, "glm"), (QWEN, "qwen"), (ChatTemplate(THINKS), "thinking")]
)
def test_the_template_says_which_family_it_is(template, name):
    assert template.dialect.family.name == name


def test_a_template_without_reasoning_and_calls_has_no_family():
    assert family_of("{{ messages }}") is None
    reader = Reading().reader()
    reader.text("\n<think>a</think>")
    reader.mark("</think>")
    assert collect(reader.take()) == Message("\n<think>a</think></think>")


def test_markers_are_the_tokenizers_tokens_where_it_has_them():
    assert GLM.dialect.written == ()
    assert GLM.dialect.token("</think>") == TOKENIZER.token_id("</think>")
    assert ChatTemplate(THINKS).dialect.written == ("<think>", "</think>")
    assert ChatTemplate(THINKS).dialect.token("</think>") is None


TEXT = st.lists(
    st.sampled_from(["<think>", "</think>", "</thi", "nk>", "<", "a", "\n"]), max_size=8
).map("".join)


@given(TEXT, st.booleans(), st.lists(st.integers(0, 50)))
def test_markers_without_tokens_are_found_in_text_however_it_is_cut(text, opened, cuts):
    def run(pieces: list[str]) -> Message:
        reader = Reading(ChatTemplate(THINKS).dialect, opened).reader()
        for piece in pieces:
            reader.text(piece)
        reader.finish(cut=False)
        return collect(reader.take())

    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    assert run([text[a:b] for a, b in itertools.pairwise(places)]) == run([text])


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
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
    reader = Reading(ChatTemplate(THINKS).dialect, opened, TOOLS).reader()
    reader.text(text)
    reader.finish(cut=False)
    got = collect(reader.take())
    assert (got.reasoning, got.content) == expected
