"""A model behind a server, as `millpond chat` talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millpond.config import GenerationConfig
from millpond.errors import Refused, Unavailable
from millpond.front.load.wire import Connection, Failure, Target
from millpond.front.pipeline import Response

T = TypeVar("T")


class Distant:
    """One conversation partner at an address; any server that speaks OpenAI's protocol will do.

    Raises `Refused` when none is there. `model` is the name to ask for, the server's first one
    where absent.
    """

    def __init__(self, target: Target, model: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._connection = Connection(target)
        try:
            self.name = model or self._first_model()
        except (Failure, LookupError, TypeError) as error:
            self.close()
            raise Refused(f"no model answers at {target.url}: {error}") from error

    def _first_model(self) -> str:
        return str(self._wait(self._connection.ask("GET", "/v1/models"))["data"][0]["id"])

    def _wait(self, something: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(something)

    def close(self) -> None:
        """Break off. Closing twice does nothing."""
        if not self._loop.is_closed():
            self._connection.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def stream_infer(
        self, messages: Sequence[Mapping[str, Any]], wish: GenerationConfig
    ) -> Iterator[Response]:
        """What the answer gains, as it comes; the last piece has the counts, if the server tells.

        Raises `Unavailable` for whatever the server refuses, or when it breaks off.
        """
        body = {
            "model": self.name,
            "messages": list(messages),
            "max_tokens": wish.max_new_tokens,
            "temperature": (wish.temperature if wish.do_sample else 0) or 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if wish.random_seed is not None:
            body["seed"] = wish.random_seed
        finish: str | None = None
        events = self._connection.events("/v1/chat/completions", body)
        whole = False
        try:
            while True:
                event = self._wait(anext(events, None))
                if event is None:
                    break
                if event.get("error"):
                    raise Unavailable(str(event["error"].get("message", event["error"])))
                piece = _piece(event, finish)
                finish = piece.finish_reason
                yield piece
            whole = True
        except Failure as error:
            raise Unavailable(str(error)) from error
        finally:
            if not whole:  # what is left of this answer must not be taken for the next one's
                self._connection.close()
            self._wait(events.aclose())


def _piece(event: Mapping[str, Any], finish: str | None) -> Response:
    """One chunk of a stream; `finish` is how the answer has ended before it."""
    choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
    delta: Mapping[str, Any] = choice.get("delta") or {}
    usage: Mapping[str, Any] = event.get("usage") or {}
    prompt: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
    answer: Mapping[str, Any] = usage.get("completion_tokens_details") or {}
    accepted = answer.get("accepted_prediction_tokens") or 0
    return Response(
        text=delta.get("content") or "",
        reasoning_text=delta.get("reasoning") or delta.get("reasoning_content") or "",
        token_ids=(),
        finish_reason=choice.get("finish_reason") or finish,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        drafted_tokens=accepted + (answer.get("rejected_prediction_tokens") or 0),
        accepted_tokens=accepted,
    )
