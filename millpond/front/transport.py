"""How answers travel: server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millpond.front.replies import dump
from millpond.front.service import Flight

DONE = b"data: [DONE]\n\n"
STALL_SECONDS = 60.0
"""How long a client may leave a full buffer unread; then it is taken for gone."""


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(body) + b"\n\n"


def named_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event under the name of its type."""
    return f"event: {body['type']}\n".encode() + event(body)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Coroutine[Any, Any, Any], receive: Receive) -> bool:
    """Run `work` until it is done or the client goes; True when it is done. Its error is raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for t in (task, watch):
            t.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await t


async def finish_unless_gone(
    request: Request, flight: Flight, work: Coroutine[Any, Any, None]
) -> None:
    """Await `work`; when the client goes first the flight is aborted and `ClientGone` raised."""
    try:
        if not await _first(work, request.receive):
            raise ClientGone
    finally:
        flight.abort()


class EventStream(Response):
    """Server-sent events of a flight; the flight is aborted on every exit that is not its end."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], flight: Flight, headers: dict[str, str] | None = None
    ) -> None:
        self._events, self._flight = events, flight
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {})
        )

    def init_headers(self, headers: Any = None) -> None:
        """Headers without a length: it is not known."""
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        try:
            with suppress(ClientGone):
                await _first(self._send(send), receive)
        finally:
            self._flight.abort()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                async with asyncio.timeout(STALL_SECONDS):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
