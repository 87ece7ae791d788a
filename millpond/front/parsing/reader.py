"""Reads one answer, text and marker tokens as they come, into events; knows no family's markup.

A marker is a token of its own. Text that only looks like one is text.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from millpond.front.parsing.base import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from millpond.front.parsing.values import NONE, ArgumentWriter, Kinds, Tool
from millpond.front.parsing.written import WrittenMarkers

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Call(Protocol):
    """One call's markup being read, from after the token that begins it.

    It is `failed` when it turns out to be no call: then `literal` is all of it, as text, and
    nothing was emitted. It is `ended` when the next piece is not its any more; then `spilled` is
    text that had no place in it.
    """

    failed: bool
    ended: bool
    spilled: str

    @property
    def literal(self) -> str:
        """What was read and not emitted, as text."""

    def text(self, text: str) -> str:
        """Read text; what is not of the call any more is returned."""

    def mark(self, marker: str) -> bool:
        """Read a marker; False when it is not of the call any more."""

    def finish(self, *, cut: bool) -> None:
        """There is no more, because the turn ended or because it was `cut`."""


class CallSink:
    """Where a call's markup writes what it finds. `begin` comes first, `end` last, if at all."""

    def __init__(self, reader: Reader, tools: Mapping[str, Tool], untyped: Kinds) -> None:
        self._reader, self._tools, self._untyped = reader, tools, untyped
        self._index = 0

    def tool(self, name: str) -> Tool | None:
        """The tool of the request that has this name."""
        return self._tools.get(name)

    def begin(self, name: str) -> ArgumentWriter:
        """A call of `name`, for certain."""
        self._index = index = self._reader.begin_call(name)
        write = self._reader.emit
        return ArgumentWriter(
            self.tool(name), self._untyped, lambda text: write(Arguments(index, text))
        )

    def end(self) -> None:
        """All of the call has been read."""
        self._reader.end_call(self._index)


class Reader:
    """The events of one answer.

    `thinks`: it may have a think block, which the prompt opened if `in_reasoning`. `trims`: line
    breaks beside the block's markers are of the format. `call` makes the reader of a call's markup;
    without it, markers of calls are text. `written` are markers that are found in text.
    """

    def __init__(
        self,
        *,
        thinks: bool,
        in_reasoning: bool,
        trims: bool,
        call: Callable[[CallSink], Call] | None = None,
        tools: Sequence[Tool] = (),
        untyped: Kinds = NONE,
        written: tuple[str, ...] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._phase = "reasoning" if in_reasoning else "start" if thinks else "content"
        self._trims, self._new_call, self._new_id = trims, call, new_id
        self._tools = {t.name: t for t in tools}
        self._untyped = untyped
        self._written = WrittenMarkers(written)
        self._events: list[Event] = []
        self._call: Call | None = None
        self._held = ""  # white space that belongs to the text only if more text follows
        self._thought = self._said = False  # whether there is any of it yet
        self._fresh = False  # line breaks after the block are dropped until something else comes
        self._interrupted = False  # a call began inside the block, its end may still come
        self._after_call = False
        self.started = self.completed = 0  # calls

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self.completed < self.started

    @property
    def in_markup(self) -> bool:
        """Whether what has come last may be of a call, even if none has certainly begun."""
        return self._call is not None

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._phase == "reasoning"

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Some more text."""
        for piece, is_marker in self._written.push(text):
            if is_marker:
                self._mark(piece)
            else:
                self._text(piece)

    def mark(self, marker: str) -> None:
        """A marker token."""
        self._text(self._written.finish())
        self._mark(marker)

    def _text(self, text: str) -> None:
        while text and self._call is not None:
            text = self._call.text(text)
            self._settle()
        if text:
            self._plain(text)

    def _mark(self, marker: str) -> None:
        if self._call is not None:
            used = self._call.mark(marker)
            self._settle()
            if used:
                return
        if self._phase == "start":
            held, self._held = self._held, ""
            if marker in (THINK, END_THINK):
                self._fresh = marker == END_THINK
                self._phase = "content" if self._fresh else "reasoning"
                return
            self._phase = "content"
            self._plain(held)
        if marker == CALL and self._new_call is not None:
            self._call = self._new_call(CallSink(self, self._tools, self._untyped))
        elif marker == END_THINK and self._phase == "reasoning":
            self._phase, self._held, self._fresh = "content", "", True
        elif marker == END_THINK and self._interrupted:
            self._interrupted = False
        elif marker != THINK or self._phase != "reasoning" or self._thought:
            self._plain(marker)

    def finish(self, *, cut: bool) -> None:
        """There is no more, because the turn ended or because it was `cut`."""
        self._text(self._written.finish())
        if self._call is not None:
            self._call.finish(cut=cut)
            self._settle()
        if self._call is not None:
            self._plain(self._call.spilled)
        held, self._held = self._held, ""
        if held and self._phase == "reasoning":
            self.emit(Reasoning(held))
        elif held and not self._after_call:
            self.emit(Content(held))

    def emit(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def begin_call(self, name: str) -> int:
        """A call has certainly begun, which ends a think block; returns its index."""
        if self._phase == "reasoning":
            self._phase, self._held, self._interrupted = "content", "", True
        self._after_call = True
        index = self.started
        self.started += 1
        self.emit(CallStart(index, self._new_id(), name))
        return index

    def end_call(self, index: int) -> None:
        """The call is whole."""
        self.completed += 1
        self.emit(CallEnd(index))

    def _settle(self) -> None:
        call = self._call
        if call is not None and (call.failed or call.ended):
            self._call = None
            self._plain(call.literal if call.failed else call.spilled)

    def _plain(self, text: str) -> None:
        if not text:
            return
        if self._phase == "start":
            text, self._held = self._held + text, ""
            if text.isspace():
                self._held = text
                return
            self._phase = "content"
        if self._phase == "reasoning":
            self._reason(text)
        else:
            self._say(text)

    def _reason(self, text: str) -> None:
        if self._trims:
            text = self._held + text
            text = text if self._thought else text.lstrip("\n")
            body = text.rstrip("\n")
            self._held, text = text[len(body) :], body
        if text:
            self._thought = True
            self.emit(Reasoning(text))

    def _say(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if self._new_call is not None:  # a call may follow, and white space before it is not said
            text = self._held + text
            body = text.rstrip()
            self._held, text = text[len(body) :], body
            if self._after_call and not self._said:
                text = text.lstrip()
        if text:
            self._said, self._after_call = True, False
            self.emit(Content(text))
