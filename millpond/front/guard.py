"""Who may speak to the server, how much they may say and how long it may take them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.front import replies
from millpond.units import human

OPEN = frozenset({"/health", "/ready", "/"})
"""Paths that need no key: whoever looks after the process has none, and the page asks for one."""

LINGER_BYTES, LINGER_SECONDS = 64 << 20, 5.0
"""How much of a refused body is read and dropped, so that its sender gets to read the refusal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Keys (none: everybody is let in), bytes of a body, and seconds for it to arrive."""

    keys: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_seconds: float = 60.0


class Guard:
    """Middleware: 401 without a key, 413 for a body too large however it comes, 408 if too slow."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._keys = [_digest(key.encode()) for key in limits.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        announced = int(length) if length.isdigit() else 0
        has_body = announced > 0 or b"transfer-encoding" in headers
        body = _Body(receive, self._limits)
        if self._keys and scope["path"] not in OPEN and not self._knows(headers):
            body.refused = True
            refusal = replies.refusal(
                scope["path"],
                replies.error_body(
                    "this server needs an API key, sent as 'Authorization: Bearer KEY'",
                    kind="authentication_error",
                    code="invalid_api_key",
                ),
                401,
                {"www-authenticate": "Bearer"},
            )
        elif announced > self._limits.max_body:
            body.refused = True
            refusal = replies.refusal(
                scope["path"],
                replies.error_body(
                    too_large(self._limits.max_body),
                    kind="invalid_request_error",
                    code="request_too_large",
                ),
                413,
            )
        elif has_body:
            await self._app(scope, body.receive, body.closing(send))
            return
        else:
            await self._app(scope, receive, send)
            return
        await refusal(scope, receive, body.closing(send) if has_body else send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        """Whether one of the keys came along; takes as long whichever it is."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        digest = _digest(given.strip())
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0


class _Body:
    """The body of one request, counted while it is read."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._read, self._whole = 0, False
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds
        self._slow = False
        self.refused = False  # the answer is sent before the body has been read

    async def receive(self) -> Message:
        """The next part. Raises `HTTPException` for a body that is too large, or too slow."""
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refused = self._slow = True
            raise HTTPException(
                408, f"the body did not arrive within {self._limits.body_seconds:g} s"
            ) from None
        self._count(message)
        if self._read > self._limits.max_body:
            self.refused = True
            raise HTTPException(413, too_large(self._limits.max_body))
        return message

    def _count(self, message: Message) -> None:
        self._read += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)

    def closing(self, send: Send) -> Send:
        """`send`, but an answer that comes before the end of the body closes the connection."""

        async def tagged(message: Message) -> None:
            if not self.refused:
                await send(message)
            elif message["type"] == "http.response.start":
                await send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
            else:
                await send({**message, "more_body": True})
                if not message.get("more_body", False):
                    await self._drop()
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

        return tagged

    async def _drop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self._slow else LINGER_SECONDS):
                while not self._whole and self._read < self._limits.max_body + LINGER_BYTES:
                    self._count(await self._receive())


def too_large(limit: int) -> str:
    """The refusal of a body, in words."""
    return f"the body is larger than the {human(limit)} that this server reads"


def read_keys(lines: Iterable[str]) -> tuple[str, ...]:
    """Keys from the lines of a file; empty ones and those that begin with # are none."""
    found = (line.strip() for line in lines)
    return tuple(key for key in found if key and not key.startswith("#"))


def _digest(key: bytes) -> Any:
    """Equal lengths for keys of any length, so that comparing tells nothing of one."""
    return hashlib.sha256(key).digest()
