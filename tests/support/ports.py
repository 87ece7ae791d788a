"""Ports for servers that tests start as processes of their own."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """One that stays free until it is taken, and while a server that had it is down.

    Systems give whoever connects a port from 32768 on, and members of a Mooncake Store look for
    theirs below 17000; in between it takes another test that draws the same number.
    """
    while True:
        port = 18000 + secrets.randbelow(14000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
