"""Answers made of choices, whole or in chunks: what chat completions and completions share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from millpond.errors import MillpondError
from millpond.front import replies
from millpond.front.answer import Piece
from millpond.front.routes.common import View, pieces
from millpond.front.schema import Generate
from millpond.front.service import Flight, Service
from millpond.front.transport import DONE, event


class ChoiceView(View):
    """Chunks of choices, then usage where wanted, then the end mark."""

    kind = chunk_kind = ""

    def __init__(self, service: Service, body: Generate, flight: Flight, answer_id: str) -> None:
        super().__init__(service, flight)
        self.body = body
        self.id, self.created = answer_id, int(time.time())

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """The choices that a piece adds to a stream."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """Choices sent before any text."""
        return []

    def first_extras(self) -> dict[str, Any]:
        """What the first chunk, and the whole answer, carry beside choices."""
        return {}

    async def events(self) -> AsyncGenerator[bytes]:
        """The stream; a fault in the middle of it is an event of its own."""
        options, extras = self.body.stream_options, self.first_extras()
        always = options.continuous_usage_stats

        def chunk(choices: list[dict[str, Any]], usage: bool) -> bytes:
            made = replies.envelope(self.chunk_kind, self.id, self.service.name, self.created)
            made |= {"choices": choices, **extras}
            extras.clear()
            if usage:
                made["usage"] = replies.usage(self.flight.answers)
            return event(made)

        for choice in self.opening():
            yield chunk([choice], always)
        try:
            async with aclosing(pieces(self.service, self.flight)) as found:
                async for prompt, piece in found:
                    for choice in self.chunks(prompt, piece):
                        yield chunk([choice], always)
        except MillpondError as error:
            yield event(replies.error_of(error))
        else:
            usage = options.include_usage or self.service.force_usage
            extras |= self._metrics()
            if usage or extras:
                yield chunk([], usage)
        yield DONE

    def body_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer around its choices."""
        made = replies.envelope(self.kind, self.id, self.service.name, self.created)
        usage = replies.usage(self.flight.answers)
        extras = self.first_extras() | self._metrics()
        return {**made, "choices": choices, "usage": usage, **extras}

    def _metrics(self) -> dict[str, Any]:
        """What the answer took, where that is asked for; of several at once it cannot be told."""
        if not self.body.include_metrics or self.body.n > 1 or len(self.flight.answers) > 1:
            return {}
        width = self.service.resolved.num_draft_tokens
        return {"metrics": replies.metrics(self.flight.answers[0], width)}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Dictionaries of lists, end to end."""
    return {k: [v for p in parts for v in p[k]] for k in parts[0]}
