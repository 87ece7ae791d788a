"""Whether a reply is right, and whether it can be read; knows text only."""

from __future__ import annotations

import json
import re
from typing import Any

from millpond.evaluate.cases import Case

Call = tuple[str, dict[str, str]]
"""A tool's name and its arguments, as text."""

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_KEYED = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\n?", re.DOTALL)


def after_thought(reply: str) -> str:
    """What follows the think block, if there is one."""
    return reply.rpartition("</think>")[2].strip()


def calls(reply: str) -> list[Call] | None:
    """The tool calls of a reply in either family's syntax; None when one cannot be read.

    <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>, or
    <tool_call><function=name><parameter=k>v</parameter></function></tool_call> with line breaks.
    """
    body = after_thought(reply)
    if "tool_call" in _BLOCK.sub("", body):
        return None
    found: list[Call] = []
    for block in _BLOCK.findall(body):
        function = _FUNCTION.fullmatch(block)
        if function is not None:
            name, rest, form = function[1], function[2], _PARAMETER
        else:
            name, rest = re.match(r"([^<]*)(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
            form = _KEYED
        if form.sub("", rest).strip() or not re.fullmatch(r"[\w.-]+", name):
            return None
        found.append((name, dict(form.findall(rest))))
    return found


def json_object(reply: str) -> dict[str, Any] | None:
    """The JSON object a reply consists of; None when it is none."""
    try:
        found = json.loads(after_thought(reply))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parses(case: Case, reply: str) -> bool | None:
    """Whether a reply that must have a form has it; None where none is asked for."""
    if case.kind == "json":
        return json_object(reply) is not None
    return bool(calls(reply)) if case.kind == "calls" else None


def is_right(case: Case, reply: str) -> bool | None:
    """Whether it is the right reply; None where there is no right one.

    Objects and calls count by what they say, everything else letter by letter.
    """
    if case.kind == "free":
        return None
    if case.kind == "json":
        wanted = json_object(case.reply)
        return wanted is not None and json_object(reply) == wanted
    if case.kind == "calls":
        asked = calls(case.reply)
        return asked is not None and calls(reply) == asked
    return reply == case.reply
