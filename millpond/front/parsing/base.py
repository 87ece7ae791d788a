"""What an answer is made of: reasoning, content, tool calls; knows no model's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some more of the think block."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some more of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of one message from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Some more of a call's arguments; all fragments of a call together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. It does not come for a call in which the answer was cut off."""

    index: int


Event = Reasoning | Content | CallStart | Arguments | CallEnd


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same with neighbours of one kind joined."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            made[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            made[-1] = Content(last.text + event.text)
        elif (
            isinstance(event, Arguments)
            and isinstance(last, Arguments)
            and event.index == last.index
        ):
            made[-1] = replace(last, text=last.text + event.text)
        else:
            made.append(event)
    return tuple(made)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text, the beginning of it where not `complete`."""

    id: str
    name: str
    arguments: str
    complete: bool

    def object(self) -> dict[str, Any]:
        """The arguments; of a call that was cut off, nothing."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.arguments)
            if isinstance(found, dict):
                return found
        return {}


@dataclass(frozen=True, slots=True)
class Message:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def collect(events: Iterable[Event]) -> Message:
    """The message that these events make."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(index, id, name):
                calls[index] = ToolCall(id, name, "", complete=False)
            case Arguments(index, text):
                calls[index] = replace(calls[index], arguments=calls[index].arguments + text)
            case CallEnd(index):
                calls[index] = replace(calls[index], complete=True)
    return Message("".join(content), "".join(reasoning), tuple(calls[i] for i in sorted(calls)))
