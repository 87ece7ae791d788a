"""What the routes that generate text have in common: who is let in, and how answers are sent."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response

from millpond.errors import MillpondError, Rejected, StepFailed, Unavailable
from millpond.front import replies
from millpond.front.answer import Ask, Piece
from millpond.front.schema import Sampling
from millpond.front.service import Flight, Service
from millpond.front.transport import EventStream, finish_unless_gone
from millpond.telemetry import logger

log = logger("front")
MAX_PROMPTS = 2048  # of one request

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; the error names the field"},
    401: {"description": "No key, or not one of this server's"},
    403: {"description": "The routes that change what others are served are closed"},
    404: {"description": "No such model"},
    408: {"description": "The body did not arrive in time"},
    413: {"description": "The body is larger than this server reads"},
    429: {"description": "More requests than this server queues; Retry-After says when to return"},
    500: {"description": "A fault of the server's own"},
    503: {"description": "Not ready, draining, or the engine has failed"},
}


STREAMED: dict[int | str, dict[str, Any]] = ERRORS | {200: {"content": {"text/event-stream": {}}}}
"""Of a route whose answer may come as events."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of the errors that a route can answer, for the API's own description."""
    return {s: ERRORS[s] for s in statuses}


def accept(service: Service, body: Any) -> None:
    """Refuse what is addressed to another model, comes too late, or asks for what is not there."""
    model = body.model
    if model is not None and model != service.name:
        raise Rejected(
            f"the model {model!r} does not exist, this server has {service.name!r}",
            param="model",
            code="model_not_found",
        )
    service.look()
    if isinstance(body, Sampling):
        body.refuse_unsupported()


def limit_of(given: int | None, name: str, *, echo: bool = False) -> int | None:
    """The limit on new tokens; 0 only makes sense when the prompt itself is asked for."""
    if given == 0 and not echo:
        raise Rejected(f"{name} must be at least 1", param=name)
    return max(1, given) if given is not None else None


_told: set[str] = set()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names ignored fields, logged the first time each is seen."""
    if not names:
        return {}
    for name in names:
        if name not in _told and len(_told) < 1000:
            _told.add(name)
            log.warning("ignored request field %r", name)
    text = ", ".join(n.encode("ascii", "backslashreplace").decode() for n in names)
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return {"x-ignored-fields": clean[:1000]}


@contextmanager
def names(**spoken: str) -> Iterator[None]:
    """Let refusals name a field as the route's own clients spell it: names(prompt="input")."""
    try:
        yield
    except Rejected as error:
        if error.param in spoken:
            error.param = spoken[error.param]
        raise


def failure(service: Service, piece: Piece) -> MillpondError:
    """Why a piece is the last although its answer has not come to its end."""
    if not service.engine.healthy:
        return Unavailable(f"the engine has failed: {service.engine.failure}")
    if piece.finish_reason == "abort":  # not by its client, who would not read this
        return Unavailable("the server is shutting down and has ended the request")
    if piece.param is not None:
        return Rejected(piece.error or "the request cannot be served", param=piece.param)
    return StepFailed(piece.error or "the request failed")


async def pieces(service: Service, flight: Flight) -> AsyncGenerator[tuple[int, Piece]]:
    """(index of the prompt, piece) of a flight; raises when the engine ends one before its end."""
    async with aclosing(flight.pieces()) as found:
        async for prompt, piece in found:
            if piece.finish_reason in ("error", "abort"):
                raise failure(service, piece)
            yield prompt, piece


class View:
    """One request's answers in the shape of a route; the shapes themselves are in subclasses."""

    def __init__(self, service: Service, flight: Flight) -> None:
        self.service, self.flight = service, flight

    def take(self, prompt: int, piece: Piece) -> None:
        """Keep a piece for the whole answer."""
        raise NotImplementedError

    def whole(self) -> Any:
        """The answer that is not streamed."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes]:
        """The stream."""
        raise NotImplementedError

    async def collect(self) -> None:
        """Take in every piece."""
        async with aclosing(pieces(self.service, self.flight)) as found:
            async for prompt, piece in found:
                self.take(prompt, piece)


async def respond(
    service: Service,
    request: Request,
    make_asks: Callable[[], Sequence[Ask]],
    make_view: Callable[[Flight], View],
    *,
    stream: bool,
    ignored: Sequence[str],
    spoken: Mapping[str, str],
) -> Response:
    """Tokenise off the event loop, submit, and answer as a stream or when all is there.

    `spoken` are the route's own names of fields that a refusal may name.
    """
    with names(**spoken):
        asks = await asyncio.to_thread(make_asks)
        for compiled in service.prepare(asks):
            await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for it too
        # The engine's own ids are unique whatever the client calls its request.
        flight = Flight(service, asks, uuid.uuid4().hex, request.state.request_id)
    try:
        view = make_view(flight)
    except BaseException:
        flight.abort()
        raise
    headers = ignored_header(ignored)
    if stream:
        return EventStream(view.events(), flight, headers)
    await finish_unless_gone(request, flight, view.collect())
    return replies.reply(view.whole(), headers=headers)
