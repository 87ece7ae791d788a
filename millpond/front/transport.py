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
AHEAD = 64
"""Events made ready for a client that takes none."""


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
        ready = _Ready()
        producer = asyncio.ensure_future(ready.fill(self._events))
        stall = _Stall()
        try:
            while data := await ready.take():
                with stall:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except asyncio.CancelledError:
            if stall.found:
                raise ClientGone from None
            raise
        finally:
            stall.end()
            producer.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await producer
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Ready:
    """Events that can be sent. While a client, or this process, is slow they are sent together."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self._error: BaseException | None = None

    async def fill(self, events: AsyncGenerator[bytes]) -> None:
        """Take all events in, no more ahead of the client than `AHEAD`."""
        try:
            async for event in events:
                self._events.append(event)
                self._changed.set()
                if len(self._events) >= AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:  # noqa: BLE001 -- raised again by `take`
            self._error = error
        self._over = True
        self._changed.set()

    async def take(self) -> bytes:
        """All that is ready, waiting for it; nothing once there is nothing more to come."""
        await self._changed.wait()
        data = b"".join(self._events)
        self._events.clear()
        self._room.set()
        if self._over:
            if self._error is not None and not data:
                raise self._error
        else:
            self._changed.clear()
        return data


class _Stall:
    """Cancels the task that made it when what it is entered for takes `STALL_SECONDS`."""

    def __init__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._since: float | None = None
        self._timer = self._loop.call_later(STALL_SECONDS, self._look)
        self.found = False

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def end(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        """One timer for a whole stream: it looks at every sending that takes long enough."""
        since, now = self._since, self._loop.time()
        if since is not None and now - since >= STALL_SECONDS and self._task is not None:
            self.found = True
            self._task.cancel()
        else:
            begin = now if since is None else since
            self._timer = self._loop.call_at(begin + STALL_SECONDS, self._look)
