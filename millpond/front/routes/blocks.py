"""An answer as the content blocks of Anthropic's API, whole or as its stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from millpond.errors import MillpondError
from millpond.front import replies
from millpond.front.answer import Piece
from millpond.front.parsing.base import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    ToolCall,
)
from millpond.front.routes.common import View, pieces
from millpond.front.service import Flight, Service
from millpond.front.transport import named_event

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageView(View):
    """One answer. Thinking is only shown where it was asked for: clients read the first block."""

    def __init__(
        self, service: Service, flight: Flight, answer_id: str, *, thinking: bool, omitted: bool
    ) -> None:
        super().__init__(service, flight)
        self.id, self.created = answer_id, int(time.time())
        self._shown, self._omitted = thinking, omitted
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the call that is open
        self._open = False
        self._last: Piece | None = None

    def take(self, prompt: int, piece: Piece) -> None:
        for _ in self._grow(piece.events):
            pass
        self._last = piece
        if piece.finish_reason is not None:
            list(self._close())

    def whole(self) -> dict[str, Any]:
        return {**self._envelope(), "content": self._blocks, **self._end(), "usage": self._usage()}

    def _envelope(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.service.name}

    def _usage(self) -> dict[str, Any]:
        answer = self.flight.answers[0]
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": answer.completion_tokens,
        }

    def _end(self) -> dict[str, Any]:
        """Why it ended; null while it has not."""
        piece = self._last
        if piece is None or piece.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        if piece.finish_reason == "stop" and isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        return {"stop_reason": _STOPS[piece.finish_reason], "stop_sequence": None}

    async def events(self) -> AsyncGenerator[bytes]:
        """`message_start` when the prompt has been read, blocks, `message_delta`, and the end."""
        begun = False
        try:
            async with aclosing(pieces(self.service, self.flight)) as found:
                async for _, piece in found:
                    if not begun:
                        begun = True
                        start = {**self._envelope(), "content": [], **self._end()}
                        start["usage"] = {**self._usage(), "output_tokens": 0}
                        yield named_event({"type": "message_start", "message": start})
                        yield named_event({"type": "ping"})
                    for made in self._grow(piece.events):
                        yield named_event(made)
                    self._last = piece
        except MillpondError as error:
            status = replies.status_of(error)
            yield named_event(replies.messages_error(replies.error_of(error), status))
            return
        for made in self._close():
            yield named_event(made)
        yield named_event({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    # Blocks: at most one is open, the last.

    def _grow(self, events: Iterable[Event]) -> Iterable[dict[str, Any]]:
        for one in events:
            match one:
                case Reasoning(text):
                    if self._shown and text:
                        yield from self._become("thinking", thinking="", signature="")
                        yield from self._more("thinking", "" if self._omitted else text)
                case Content(text):
                    if text:
                        yield from self._become("text", text="")
                        yield from self._more("text", text)
                case CallStart(_, call_id, name):
                    yield from self._close()
                    self._arguments = ""
                    yield from self._become("tool_use", id=call_id, name=name, input={})
                case Arguments(_, text):
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnd():
                    yield from self._close()

    def _become(self, kind: str, **fields: Any) -> Iterable[dict[str, Any]]:
        """Open a block of `kind` unless the open one is."""
        if self._open and self._blocks[-1]["type"] == kind:
            return
        yield from self._close()
        self._open = True
        self._blocks.append({"type": kind, **fields})
        at = len(self._blocks) - 1
        shown = {"type": kind, **fields}
        yield {"type": "content_block_start", "index": at, "content_block": shown}

    def _more(self, kind: str, text: str) -> Iterable[dict[str, Any]]:
        if text:
            self._blocks[-1][kind] += text
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterable[dict[str, Any]]:
        if not self._open:
            return
        self._open = False
        block, at = self._blocks[-1], len(self._blocks) - 1
        if block["type"] == "thinking":
            block["signature"] = f"{self.id}.{at}"
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            call = ToolCall(block["id"], block["name"], self._arguments, complete=True)
            block["input"] = call.object()
        yield {"type": "content_block_stop", "index": at}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
