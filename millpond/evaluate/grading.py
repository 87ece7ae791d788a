"""Whether a reply is right, and whether it can be read; knows text and the families' parsers."""

from __future__ import annotations

import json
from typing import Any

from millpond.evaluate.cases import Case
from millpond.front.parsing.base import Message, collect

Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


def read(case: Case, reply: str) -> Message:
    """A reply as a client would get it."""
    reader = case.reading.reader()
    reader.text(reply)
    reader.finish(cut=True)  # a call that is not closed is not whole
    return collect(reader.take())


def calls(case: Case, reply: str) -> list[Call] | None:
    """The tool calls of a reply; None when one of them cannot be read, or there is none."""
    message = read(case, reply)
    broken = "tool_call>" in message.content or not all(c.complete for c in message.calls)
    if broken or not message.calls:
        return None
    return [(call.name, call.object()) for call in message.calls]


def json_object(case: Case, reply: str) -> dict[str, Any] | None:
    """The JSON object a reply consists of; None when it is none."""
    try:
        found = json.loads(read(case, reply).content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parses(case: Case, reply: str) -> bool | None:
    """Whether a reply that must have a form has it; None where none is asked for."""
    if case.kind == "json":
        return json_object(case, reply) is not None
    return calls(case, reply) is not None if case.kind == "calls" else None


def is_right(case: Case, reply: str) -> bool | None:
    """Whether it is the right reply; None where there is no right one.

    Objects and calls count by what they say, everything else letter by letter.
    """
    if case.kind == "free":
        return None
    if case.kind == "json":
        wanted = json_object(case, case.reply)
        return wanted is not None and json_object(case, reply) == wanted
    if case.kind == "calls":
        asked = calls(case, case.reply)
        return asked is not None and calls(case, reply) == asked
    return reply == case.reply
