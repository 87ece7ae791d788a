"""The grammar of a wanted call takes what the template writes, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from millpond.engine.constraint import Constraint
from millpond.engine.grammar import definition
from millpond.front.chat import ChatTemplate
from millpond.front.parsing.base import Message, ToolCall
from millpond.front.parsing.syntax import call_grammar
from tests.front.parsing.feeding import BUNDLED, FUNCTIONS, GLM, QWEN, TOKENIZER, rendered

VOCABULARY = LLTokenizer((BUNDLED / "millpond-tiny-glm" / "tokenizer.json").read_text("utf-8"))
ORDER = {
    "name": "order",
    "parameters": {
        "type": "object",
        "properties": {
            "item": {"type": "string"},
            "size": {"enum": ["s", "a ::= b", 3, None]},
            "count": {"$ref": "#/$defs/count"},
            "extra": {"type": "array", "items": {"type": "string"}, "description": "x ::= y"},
        },
        "required": ["item", "count"],
        "$defs": {"count": {"type": "integer", "minimum": 1, "title": "Count", "x-odd": 1}},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
}
FREE = {"name": "free", "parameters": {"type": "object"}}
OFFERED = [*FUNCTIONS, ORDER, FREE]


def accepts(template: ChatTemplate, *calls: tuple[str, dict[str, Any]], **how: Any) -> bool:
    """Whether the grammar of these functions takes the calls as the template writes them."""
    made = [ToolCall("c", name, json.dumps(a), complete=True) for name, a in calls]
    text = rendered(template, Message("", "", tuple(made))).split("</think>", 1)[1]
    functions = how.pop("functions", OFFERED)
    assert template.dialect is not None
    grammar = call_grammar(template.dialect, functions, **how)
    matcher = LLMatcher(
        VOCABULARY, definition(Constraint(kind="grammar", text=grammar)), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


FAMILIES = pytest.mark.parametrize("template", [GLM, QWEN], ids=["glm", "qwen"])


@FAMILIES
@pytest.mark.parametrize(
    "calls",
    [
        [("now", {})],
        [("order", {"item": "a <b>\n</x> é", "size": "a ::= b", "count": 2, "extra": ["ü"]})],
        [("order", {"item": "", "count": 1})],
        [("order", {"item": "x", "size": 3, "count": 1}), ("now", {}), ("free", {})],
        [("free", {"a": "b", "c": "d\ne"})],
        [("get_weather", {"city": "Oslo", "deep": {"a": [1, None]}, "mixed": "é"})],
    ],
)
def test_what_the_template_writes_is_taken(template, calls):
    assert accepts(template, *calls)


@FAMILIES
@pytest.mark.parametrize(
    "calls",
    [
        [],
        [("other", {})],
        [("now", {"a": 1})],
        [("order", {"item": "x"})],
        [("order", {"item": "x", "count": 0})],
        [("order", {"item": "x", "count": "many"})],
        [("order", {"item": "x", "size": "xl", "count": 1})],
    ],
)
def test_what_was_not_offered_is_not_taken(template, calls):
    assert not accepts(template, *calls)


@FAMILIES
def test_one_call_is_enough_where_calls_are_not_parallel(template):
    assert accepts(template, ("now", {}), parallel=False)
    assert not accepts(template, ("now", {}), ("now", {}), parallel=False)
    assert accepts(template, ("now", {}), functions=[FUNCTIONS[1]])
    assert not accepts(template, ("free", {}), functions=[FUNCTIONS[1]])
