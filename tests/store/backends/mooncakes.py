"""A Mooncake master and its other members as processes of the test, on loopback."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from millpond.store.config import MooncakeConfig
from millpond.units import MIB
from tests.support.ports import free_port

OWNER = """
import os, sys
from millpond.store.mooncake import ENVIRONMENT
for name, value in ENVIRONMENT.items(): os.putenv(name, value)
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
code = client.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
if code == 0: client.close()
"""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Master:
    """`mooncake_master`; the same port and the same log over restarts."""

    def __init__(self, folder: Path, lease: str = "5s", **flags: object) -> None:
        self.port, self.log = free_port(), folder / "master.log"
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.program = shutil.which("mooncake_master", path=beside)
        assert self.program, "mooncake_master is not installed: pip install millpond[mooncake]"
        self.flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "rpc_thread_num": 2,
            "metrics_host": "127.0.0.1",
            "enable_metric_reporting": "false",
            "default_kv_lease_ttl": lease,
            "client_ttl": 3,
            "logtostderr": "true",
            **flags,
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Master:
        for _ in range(5):  # somebody may take the port of the metrics in between
            flags = {**self.flags, "metrics_port": free_port()}
            command = [str(self.program), *(f"--{k}={v}" for k, v in flags.items())]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_end_with_parent,
                )
            if self._listens():
                return self
        raise AssertionError(self.log.read_text("utf-8", "replace")[-2000:])

    def _listens(self) -> bool:
        """Whether it came up; False if it ended instead."""
        assert self.process is not None
        end = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.5).close()
                return True
            except OSError:
                time.sleep(0.02)
        self.kill()
        return False

    def signal(self, which: signal.Signals) -> None:
        assert self.process is not None
        _signal(self.process.pid, which)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def config(self, lend: int = 0) -> MooncakeConfig:
        return MooncakeConfig(
            master_server_address=self.address,
            protocol="tcp",
            global_segment_size=lend,
            local_buffer_size=0,
        )


class Owner:
    """A member that lends memory and does nothing else."""

    def __init__(self, master: Master, size: int = 128 * MIB) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, master.address, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == b"0", "the member could not join"

    def signal(self, which: signal.Signals) -> None:
        _signal(self.process.pid, which)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def _signal(pid: int, which: signal.Signals) -> None:
    """Send a signal; when it stops a process, return once all its threads stand still."""
    os.kill(pid, which)
    while which == signal.SIGSTOP and any(
        task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T"
        for task in Path(f"/proc/{pid}/task").iterdir()
    ):
        time.sleep(0.01)
