"""Connections that carry no request: each takes an open file, so they end. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REQUEST_SECONDS = 60.0
"""How long a connection may be open before the headers of a request are there."""


class Silence:
    """How long connections of the HTTP server have carried no request."""

    def __init__(self) -> None:
        self._since: dict[Any, tuple[Any, float]] = {}  # after which request, and since when

    def break_off(self, connections: Iterable[Any], now: float) -> None:
        """End those on which none has come for `REQUEST_SECONDS`; `now` in seconds."""
        silent: dict[Any, tuple[Any, float]] = {}
        for connection in connections:
            request = connection.cycle
            if request is not None and not request.response_complete:
                continue
            last, since = self._since.get(connection, (request, now))
            if last is not request:
                since = now
            if now - since >= REQUEST_SECONDS and connection.transport is not None:
                connection.transport.abort()
            else:
                silent[connection] = (request, since)
        self._since = silent
