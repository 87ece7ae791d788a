"""Connections on which nobody asks anything do not use up the open files of a server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx

from tests.front.test_shutdown import ROOT, SERVER
from tests.support.ports import free_port

IMPATIENT = "from millpond.front import connections; connections.REQUEST_SECONDS = 1.0\n" + SERVER
HEADERS = b"Host: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": true}'
STREAM = b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (
    HEADERS,
    len(BODY),
    BODY,
)


def test_a_connection_without_a_request_ends_and_one_that_is_answered_does_not():
    port = free_port()
    command = [sys.executable, "-c", IMPATIENT, str(port), "1"]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process,
        ExitStack() as opened,
    ):
        try:
            _wait_for(port, process)
            silent, half, again, asking = (
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                for _ in range(4)
            )
            asking.sendall(STREAM)
            half.sendall(b"GET /health HTTP/1.1\r\n")
            again.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert again.recv(1000).startswith(b"HTTP/1.1 200")
            again.sendall(b"GET /health HTTP/1.1\r\n")
            assert [_rest(one) for one in (silent, half, again)] == [b""] * 3
            assert b"[DONE]" in _until(asking, b"[DONE]")
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/ready")
            return
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)


def _rest(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection, in whatever way."""
    try:
        return b"".join(iter(lambda: connection.recv(1000), b"")).partition(b"\r\n\r\n")[2]
    except ConnectionResetError:
        return b""


def _until(connection: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got and (more := connection.recv(1000)):
        got += more
    return got
