"""Answers written as text with their markers spelled out, and readers fed with pieces of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import millpond
from millpond.front.chat import ChatTemplate
from millpond.front.parsing.base import CallEnd, CallStart, Event, Message, collect, merged
from millpond.front.parsing.dialect import Dialect, Reading
from millpond.front.parsing.values import Tool
from millpond.front.text import Tokenizer

BUNDLED = Path(millpond.__file__).parent / "bundled"
TOKENIZER = Tokenizer(BUNDLED / "millpond-tiny-glm")  # it has the tokens of both families
GLM, QWEN = (
    ChatTemplate((BUNDLED / name / "chat_template.jinja").read_text("utf-8"), TOKENIZER)
    for name in ("millpond-tiny-glm", "millpond-tiny-qwen")
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "n": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "deep": {"$ref": "#/$defs/deep"},
        "mixed": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "any": {},
    },
    "$defs": {"deep": {"type": "object"}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": SCHEMA},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
TOOLS = tuple(Tool.of(f) for f in FUNCTIONS)


def segments(dialect: Dialect, text: str) -> list[tuple[str, bool]]:
    """(text, whether it is a marker), as a tokenizer would cut it."""
    markers = "|".join(re.escape(m) for m in dialect.family.markers)
    return [(p, i % 2 == 1) for i, p in enumerate(re.split(f"({markers})", text))]


def read(
    template: ChatTemplate,
    pieces: Iterable[tuple[str, bool]],
    *,
    in_reasoning: bool = False,
    tools: tuple[Tool, ...] = TOOLS,
    cut: bool = False,
) -> tuple[Event, ...]:
    """The events of one answer; ids of calls are c0, c1 and so on."""
    numbers = itertools.count()
    reading = Reading(template.dialect, in_reasoning, tools)
    reader = reading.reader(lambda: f"c{next(numbers)}")
    made: list[Event] = []
    for piece, is_marker in pieces:
        (reader.mark if is_marker else reader.text)(piece)
        made += reader.take()
    reader.finish(cut=cut)
    return merged([*made, *reader.take()])


def events(template: ChatTemplate, text: str, **how: Any) -> tuple[Event, ...]:
    """The events of an answer that comes in as few pieces as it can."""
    return read(template, segments(_dialect(template), text), **how)


def message(template: ChatTemplate, text: str, **how: Any) -> Message:
    """The message that an answer makes."""
    return collect(events(template, text, **how))


def cut_up(template: ChatTemplate, text: str, cuts: list[int]) -> list[tuple[str, bool]]:
    """The same answer in pieces: text is cut at `cuts`, markers stay whole."""
    made: list[tuple[str, bool]] = []
    at = 0
    for piece, is_marker in segments(_dialect(template), text):
        places = sorted({c - at for c in cuts if at < c < at + len(piece)}) if not is_marker else []
        edges = [0, *places, len(piece)]
        made += [(piece[a:b], is_marker) for a, b in itertools.pairwise(edges) if a < b]
        at += len(piece)
    return made


def rendered(template: ChatTemplate, made: Message) -> str:
    """An answer as the template writes it, from where the model went on."""
    asked = [{"role": "user", "content": "?"}]
    reply: dict[str, Any] = {"role": "assistant", "content": made.content}
    reply["reasoning_content"] = made.reasoning
    if made.calls:
        reply["tool_calls"] = [
            {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in made.calls
        ]
    prompt = template.render(asked).text
    whole = template.render([*asked, reply], add_generation_prompt=False).text
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")


def arguments(made: Message) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and arguments of the calls, which must be valid JSON."""
    return [(c.name, json.loads(c.arguments)) for c in made.calls]


def check_order(found: Iterable[Event]) -> None:
    """Every call starts once, ends at most once, and is alone in between."""
    started, open_call = 0, False
    for event in found:
        if isinstance(event, CallStart):
            assert event.index == started
            assert not open_call
            started, open_call = started + 1, True
        elif isinstance(event, CallEnd):
            assert open_call
            open_call = False


def _dialect(template: ChatTemplate) -> Dialect:
    assert template.dialect is not None
    return template.dialect
