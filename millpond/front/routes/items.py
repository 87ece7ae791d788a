"""An answer as the output items of the Responses API, whole or as its stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any

from millpond.errors import MillpondError
from millpond.front import replies
from millpond.front.answer import Piece, TextToken
from millpond.front.parsing.base import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
)
from millpond.front.routes.common import View, pieces
from millpond.front.service import Flight, Service
from millpond.front.transport import named_event

Made = dict[str, Any]


class ResponseView(View):
    """One answer; `echo` is what a response repeats of its request. At most one item is open."""

    def __init__(
        self, service: Service, flight: Flight, answer_id: str, echo: Mapping[str, Any]
    ) -> None:
        super().__init__(service, flight)
        self.id, self.created, self._echo = answer_id, int(time.time()), echo
        self._items: list[Made] = []
        self._said: list[TextToken] = []  # whose log probabilities no text has shown yet
        self._open = False
        self._last: Piece | None = None

    def take(self, prompt: int, piece: Piece) -> None:
        for _ in self._grow(piece):
            pass
        self._last = piece
        if piece.finish_reason is not None:
            list(self._close(cut=piece.finish_reason == "length"))

    def whole(self) -> Made:
        return self._response("incomplete" if self._cut else "completed")

    @property
    def _cut(self) -> bool:
        return self._last is not None and self._last.finish_reason == "length"

    def _response(self, status: str, error: MillpondError | None = None) -> Made:
        running = status == "in_progress"
        problem = {"code": "server_error", "message": str(error)} if error is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": problem,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "model": self.service.name,
            "output": [] if running else self._items,
            **self._echo,
            "usage": None if running else self._usage(),
        }

    def _usage(self) -> Made:
        answer = self.flight.answers[0]
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }

    async def events(self) -> AsyncGenerator[bytes]:
        """Created, in progress, the items as they grow, and how it ended."""
        numbers = count()

        def sent(made: Made) -> bytes:
            return named_event({**made, "sequence_number": next(numbers)})

        for kind in ("created", "in_progress"):
            start = self._response("in_progress")
            yield sent({"type": f"response.{kind}", "response": start})
        try:
            async with aclosing(pieces(self.service, self.flight)) as found:
                async for _, piece in found:
                    for made in self._grow(piece):
                        yield sent(made)
                    self._last = piece
        except MillpondError as error:
            list(self._close(cut=True))
            failed = self._response("failed", error)
            yield sent({"type": "response.failed", "response": failed})
            return
        for made in self._close(cut=self._cut):
            yield sent(made)
        status = "incomplete" if self._cut else "completed"
        yield sent({"type": f"response.{status}", "response": self._response(status)})

    # Items.

    def _grow(self, piece: Piece) -> Iterator[Made]:
        if self.flight.answers[0].ask.params.logprobs is not None:
            self._said += [t for t in piece.tokens if t.said]
        for one in piece.events:
            match one:
                case Reasoning(text):
                    yield from self._text("reasoning", "reasoning_text", text)
                case Content(text):
                    yield from self._text("message", "output_text", text)
                case CallStart(_, call_id, name):
                    yield from self._close()
                    yield self._start(
                        {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                    )
                case Arguments(_, text):
                    self._items[-1]["arguments"] += text
                    yield self._at("response.function_call_arguments.delta", delta=text)
                case CallEnd():
                    yield from self._close()

    def _text(self, kind: str, part_kind: str, text: str) -> Iterator[Made]:
        """More text of the open item if it is of `kind`, else the first of a new one."""
        if not text:
            return
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._close()
            extra: Made = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield self._start({"type": kind, **extra, "content": []})
            part: Made = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            yield self._at("response.content_part.added", content_index=0, part=dict(part))
        grown = self._items[-1]["content"][0]
        grown["text"] += text
        more: Made = {}
        if kind == "message":
            said, self._said = self._said, []
            more["logprobs"] = replies.chat_logprobs(self.service.tokenizer, said)["content"]
            grown["logprobs"] += more["logprobs"]
        yield self._at(f"response.{part_kind}.delta", content_index=0, delta=text, **more)

    def _start(self, item: Made) -> Made:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._items.append(item)
        self._open = True
        at = len(self._items) - 1
        return {"type": "response.output_item.added", "output_index": at, "item": dict(item)}

    def _close(self, *, cut: bool = False) -> Iterator[Made]:
        if not self._open:
            return
        self._open = False
        item, at = self._items[-1], len(self._items) - 1
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            yield self._at(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        else:
            part = item["content"][0]
            more: Made = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._at(
                f"response.{part['type']}.done", content_index=0, text=part["text"], **more
            )
            yield self._at("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": at, "item": dict(item)}

    def _at(self, kind: str, **fields: Any) -> Made:
        at = len(self._items) - 1
        return {"type": kind, "item_id": self._items[at]["id"], "output_index": at, **fields}
