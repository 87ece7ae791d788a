"""`millpond serve` as a process of its own, whose engine is another one that needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
COMMAND = """
import functools, sys
from millpond.front import cli, server, serving
server.FAREWELL = 4.0  # a busy machine takes its time to ask a server whose engine has failed
serving.RemoteEngine = functools.partial(
    serving.RemoteEngine, opener="tests.support.null_engine:" + sys.argv[1])
sys.exit(cli.main(["serve", *sys.argv[2:]]))
"""


@dataclass
class Served:
    """A running command, its address, and the process of its engine."""

    process: subprocess.Popen[str]
    url: str

    @property
    def engine(self) -> int:
        """The process id of the engine, which is the only child of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (child,) = children.read_text().split()
        return int(child)

    def end(self, timeout: float = 60.0) -> tuple[int, str]:
        """(status, standard error) once the command has ended by itself."""
        _, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, err


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be asked for its status does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers; whatever is left of them afterwards is killed."""
    started: list[Served] = []

    def start(opener: str = "open_slow", *flags: str, phase: str = "ready") -> Served:
        port = free_port()
        words = [opener, "--server-port", str(port), "--log-level", "WARNING", *flags]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        served = Served(process, f"http://127.0.0.1:{port}")
        started.append(served)
        end = time.monotonic() + 60
        while phase:
            try:
                if httpx.get(served.url + "/ready", timeout=5).json()["phase"] == phase:
                    break
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)
        served.process.communicate()
