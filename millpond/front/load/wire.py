"""A small HTTP/1.1 client for load: one request at a time on a connection, answers as they come.

Speaks just enough for JSON and server-sent events; costs little, so that it measures the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from millpond.errors import Refused

LARGEST_LINE = 1 << 20  # of a head, or of an event, in bytes


class Failure(Exception):
    """The server refused, or broke off; the message says how."""


class Target:
    """Where requests go, from a URL such as http://127.0.0.1:23333. Raises `Refused` for others."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused(f"{url!r} is not the address of a server")
        self.host, self.secure = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.key = api_key

    @property
    def url(self) -> str:
        """The address without a path of the API's."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{self.host}:{self.port}{self.base}"


class Connection:
    """One connection, made when it is first used and again after it was lost."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded JSON of an answer, text that is no JSON as text. Raises `Failure`."""
        status, data = 0, b""
        async for code, part in self._exchange(method, path, body):
            status, data = code, data + part
        try:
            made = msgspec.json.decode(data)
        except msgspec.DecodeError:
            made = data.decode("utf-8", "replace")
        if status != 200:
            raise Failure(_told(status, made))
        return made

    async def events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any]]:
        """The decoded events of a stream, without its end mark. Raises `Failure`."""
        held = b""
        async for status, part in self._exchange("POST", path, body):
            held += part
            if status != 200:
                continue
            while (end := held.find(b"\n\n")) >= 0:
                event, held = held[:end], held[end + 2 :]
                for line in event.split(b"\n"):
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield _decoded(data)
        if status != 200:
            raise Failure(_told(status, held))

    def close(self) -> None:
        """Break the connection off."""
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None

    async def _exchange(
        self, method: str, path: str, body: Any
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """(status, a part of the body), at least once."""
        whole = False
        try:
            reader, writer = await self._open()
            writer.write(self._head(method, path, body))
            await writer.drain()
            status, headers = await _read_head(reader)
            yield status, b""
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := await _read_size(reader):
                    yield status, await reader.readexactly(size)
                    await reader.readexactly(2)
                await reader.readline()
            else:
                length = int(headers.get("content-length", 0))
                yield status, await reader.readexactly(length)
            whole = headers.get("connection", "").lower() != "close"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        finally:
            if not whole:
                self.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            target = self._target
            self._reader, self._writer = await asyncio.open_connection(
                target.host,
                target.port,
                ssl=ssl.create_default_context() if target.secure else None,
                limit=LARGEST_LINE,
            )
        return self._reader, self._writer

    def _head(self, method: str, path: str, body: Any) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        target = self._target
        lines = [
            f"{method} {target.base}{path} HTTP/1.1",
            f"host: {target.host}:{target.port}",
            f"content-length: {len(data)}",
            "content-type: application/json",
        ]
        if target.key is not None:
            lines.append(f"authorization: Bearer {target.key}")
        return "\r\n".join((*lines, "", "")).encode() + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = text.rstrip().split("\r\n")
    pairs = (line.partition(":") for line in rest)
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first[:60]!r} is no answer in HTTP/1")
    return int(status[:3]), {k.lower(): v.strip() for k, _, v in pairs}


async def _read_size(reader: asyncio.StreamReader) -> int:
    """Bytes of the next chunk, 0 after the last."""
    line = await reader.readline()
    if not line:
        raise EOFError("the connection ended in the middle of an answer")
    return int(line, 16)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        made = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Failure(f"an event that is no JSON: {error}") from error
    if not isinstance(made, dict):
        raise Failure("an event that is no JSON object")
    return made


def _told(status: int, body: Any) -> str:
    """A refusal in words."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError:
            body = body.decode("utf-8", "replace")
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = body["error"].get("message", body)
    return f"HTTP {status}: {str(body)[:300]}"
