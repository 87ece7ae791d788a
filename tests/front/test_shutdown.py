"""The end of a server whose engine runs in its own process; that of two processes is elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys
from millpond.front.server import Options, bind, serve
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED, held, make_service

service = make_service(Tokenizer(BUNDLED), "word " * 60, pause=0.02)
options = Options(drain_seconds=float(sys.argv[2]), log_level="WARNING")
status = serve(service, bind("127.0.0.1", int(sys.argv[1])), options)
service.engine.close(drain=False, timeout=5.0)
print("held", held(service), "aborted", len(service.engine.aborted))
sys.exit(status)
"""
Started = tuple["subprocess.Popen[str]", str]


@pytest.fixture
def start() -> Iterator[Callable[[float], Started]]:
    processes: list[subprocess.Popen[str]] = []

    def run(drain_seconds: float) -> Started:
        port = free_port()
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port), str(drain_seconds)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                httpx.get(url + "/ready")
                return process, url
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def interrupted(started: Started, signals: int) -> list[str]:
    """The lines of a stream in whose middle the server is told to end."""
    process, url = started
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    try:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    for _ in range(signals):
                        process.send_signal(signal.SIGTERM)
                        time.sleep(0.2)
    except httpx.TransportError:
        lines.append("broken off")
    return [x for x in lines if x]


def test_a_stream_that_outlives_the_deadline_is_ended_and_given_back(start):
    started = start(0.5)
    lines = interrupted(started, 1)
    assert lines[-1] == "data: [DONE]"
    assert "shutting down" in lines[-2]
    out, err = started[0].communicate(timeout=30)
    assert (started[0].returncode, out, err) == (0, "held 0 aborted 1\n", "")


def test_a_second_signal_does_not_wait(start):
    started = start(600.0)
    assert interrupted(started, 2)[-1] != "data: [DONE]"
    out, _ = started[0].communicate(timeout=30)
    assert (started[0].returncode, out.split()[1]) == (0, "0")
