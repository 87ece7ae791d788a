"""What the server's process costs beside an engine that answers at once, in a process of its own.

    python bench/front/front.py [--parts streams,steady,lag,idle,leak] [--leak-requests 20000]

streams  requests a second and processor time a token, closed loop, at 64 and 512 streams
steady   latency added at 64 and 512 streams: the engine takes 20 ms a step, the rest is the front
lag      how late the event loop is, by the time of `GET /health`: idle, under load, beside the
         tokenising of a text of megabytes, and beside a refused body
idle     resident memory for each stream that waits for its first token
leak     requests of which a fifth is broken off; memory, files and what the engine still holds
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from millpond.front.load.drive import Pace, drive, follow  # noqa: E402
from millpond.front.load.report import quantile, summary  # noqa: E402
from millpond.front.load.wire import Connection, Failure, Target  # noqa: E402

COMMAND = """
import functools, sys
sys.path.insert(0, {root!r})
from millpond.front import cli, serving
serving.RemoteEngine = functools.partial(
    serving.RemoteEngine, opener="tests.support.null_engine:" + sys.argv[1])
sys.exit(cli.main(["serve", *sys.argv[2:]]))
"""
COMPLETE = "/v1/completions"


class Server:
    """`millpond serve` over an engine that does nothing, as long as it is entered."""

    def __init__(self, opener: str, *flags: str) -> None:
        self.opener, self.flags = opener, flags

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["--server-port", str(port), "--max-batch-size", "512", "--log-level", "WARNING"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(root=str(ROOT)), self.opener, *words, *self.flags]
        )
        self.target = Target(f"http://127.0.0.1:{port}")
        while True:
            try:
                asyncio.run(Connection(self.target).ask("GET", "/ready"))
                break
            except Failure:
                time.sleep(0.1)
        # The second process of the two is the first one's only child.
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.engine = int(children.split()[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def processor(self, pid: int | None = None) -> float:
        """Seconds of processor time so far."""
        fields = (
            Path(f"/proc/{pid or self.process.pid}/stat").read_text().rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def body(tokens: int, prompt: object = None) -> dict[str, object]:
    """A streamed completion of a prompt of 32 token ids."""
    return {
        "prompt": prompt or [random.randrange(2000) for _ in range(32)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def streams(trials: int) -> None:
    """Closed loop at full speed."""
    print("\n| streams | requests/s | tokens/s | server, processor time a token | a request |")
    print("|---|---|---|---|---|")
    for count in (64, 512):
        with Server("open_quick") as server:
            rows = []
            for trial in range(trials + 1):
                before, begin = server.processor(), time.perf_counter()
                bodies = [body(64) for _ in range(count * 4)]
                outcomes = asyncio.run(drive(server.target, COMPLETE, bodies, Pace(count)))
                seconds, used = time.perf_counter() - begin, server.processor() - before
                made = summary(outcomes, seconds)
                assert not made["failed"], made["errors"]
                if trial:  # the first one warms up
                    rows.append(
                        (
                            made["requests_per_second"],
                            made["completion_tokens_per_second"],
                            used / made["completion_tokens"] * 1e6,
                            used / made["requests"] * 1e3,
                        )
                    )
            r = [statistics.median(row[i] for row in rows) for i in range(4)]
            print(
                f"| {count} | {r[0]:,.0f} | {r[1]:,.0f} | {r[2]:.0f} us | {r[3]:.1f} ms |",
                flush=True,
            )


def steady(trials: int) -> None:
    """An engine with a clock of its own."""
    print("\n| streams | time to first token, p50 / p99 | between tokens, p50 / p99 | tokens/s |")
    print("|---|---|---|---|")
    for count in (64, 512):
        with Server("open_slow") as server:
            bodies = [body(50) for _ in range(count * (trials + 1))]
            begin = time.perf_counter()
            outcomes = asyncio.run(drive(server.target, COMPLETE, bodies, Pace(count)))
            made = summary(outcomes[count:], time.perf_counter() - begin)
            first, gap = made["ttft_ms"], made["itl_ms"]
            print(
                f"| {count} | {first['p50']:.0f} / {first['p99']:.0f} ms "
                f"| {gap['p50']:.1f} / {gap['p99']:.1f} ms "
                f"| {made['completion_tokens_per_second']:,.0f} |",
                flush=True,
            )


async def _probe(target: Target, until: asyncio.Event) -> list[float]:
    connection, found = Connection(target), []
    while not until.is_set():
        begin = time.perf_counter()
        await connection.ask("GET", "/health")
        found.append(time.perf_counter() - begin)
        await asyncio.sleep(0.005)
    connection.close()
    return found


async def _lag(server: Server, what: str) -> list[float]:
    done = asyncio.Event()
    # A process of its own: the load must not make the probe late.
    probe = asyncio.create_task(_probe(server.target, done))
    if what == "nothing else":
        await asyncio.sleep(3.0)
    else:
        script = [sys.executable, __file__, "--load", what, "--url", server.target.url]
        process = await asyncio.create_subprocess_exec(*script)
        await process.wait()
    done.set()
    return await probe


LOADS = {
    "64 streams": 64,
    "512 streams": 512,
    "a text of 4 MB is tokenised": 0,
    "a body of 7 MB of token ids": 0,
    "a body of 32 MB is refused": 0,
}


def load(what: str, url: str) -> None:
    """Play one load; runs in a process of its own."""
    target = Target(url)
    if count := LOADS[what]:
        bodies = [body(50) for _ in range(count * 4)]
        asyncio.run(drive(target, COMPLETE, bodies, Pace(count)))
        return
    asked: tuple[str, object] = (COMPLETE, body(1, [7] * 2_400_000))
    if "tokenised" in what:
        asked = ("/tokenize", {"prompt": "several words of text " * 190_000})
    elif "refused" in what:
        asked = (COMPLETE, body(1, "x" * (32 << 20)))
    for _ in range(3):
        try:
            asyncio.run(Connection(target).ask("POST", *asked))
        except Failure as failure:
            print(f"<!-- {what}: {str(failure)[:110]} -->", flush=True)


def lag() -> None:
    """The time of a request that does nothing."""
    print("\n| beside | GET /health, p50 | p99 | worst |")
    print("|---|---|---|---|")
    with Server("open_slow") as server:
        for what in ("nothing else", *LOADS):
            found = sorted(asyncio.run(_lag(server, what)))
            p50, p99 = (quantile(found, share) * 1000 for share in (0.5, 0.99))
            print(
                f"| {what} | {p50:.1f} ms | {p99:.1f} ms | {found[-1] * 1000:.0f} ms |", flush=True
            )


async def _wait(server: Server, count: int) -> None:
    async def one() -> None:
        await follow(Connection(server.target), COMPLETE, body(8), time.perf_counter())

    before = server.memory()
    tasks = [asyncio.create_task(one()) for _ in range(count)]
    waiting = 0
    while waiting < count:
        await asyncio.sleep(0.5)
        text = await Connection(server.target).ask("GET", "/metrics")
        named = [line for line in text.splitlines() if line.startswith("millpond_requests_")]
        waiting = sum(
            int(float(line.split()[-1])) for line in named if "{" not in line or "reason" in line
        )
    print(f"| {count:,} | {(server.memory() - before) / count / 1024:.1f} KiB |", flush=True)
    for task in tasks:
        task.cancel()


def idle() -> None:
    """Streams that wait."""
    print("\n| waiting streams | memory each |")
    print("|---|---|")
    for count in (200, 1000):
        with Server("open_stuck") as server:
            asyncio.run(_wait(server, count))


async def _broken_off(server: Server, at: float) -> None:
    """A client that goes in the middle of its answer."""
    connection = Connection(server.target)
    with suppress(TimeoutError):
        await asyncio.wait_for(follow(connection, COMPLETE, body(64), 0.0), at)
    connection.close()


async def _churn(server: Server, count: int, draw: random.Random) -> tuple[int, int]:
    """(failed, broken off) of `count` requests, 64 at once, a fifth of them broken off."""
    free, failed, broken = asyncio.Semaphore(64), 0, 0
    connections = [Connection(server.target) for _ in range(64)]

    async def one() -> None:
        nonlocal failed, broken
        async with free:
            if draw.random() < 0.2:
                broken += 1
                await _broken_off(server, draw.uniform(0.001, 0.2))
                return
            connection = connections.pop()
            outcome = await follow(connection, COMPLETE, body(draw.randint(1, 32)), 0.0)
            failed += outcome.error is not None
            connections.append(connection)

    await asyncio.gather(*(one() for _ in range(count)))
    for connection in connections:
        connection.close()
    return failed, broken


async def _left(server: Server) -> list[str]:
    """What the engine still holds, once it has had time to give everything back."""
    for _ in range(100):
        await asyncio.sleep(0.1)
        text = await Connection(server.target).ask("GET", "/metrics")
        held = [
            line
            for line in text.splitlines()
            if line.startswith(("millpond_requests_running", "millpond_requests_waiting"))
            and float(line.split()[-1])
        ]
        if not held:
            return []
    return held


def leak(count: int) -> None:
    """Many requests, and what is left of them."""
    print("\n| requests | broken off | failed | resident memory | open files | still held |")
    print("|---|---|---|---|---|---|")
    draw, done, off = random.Random(0), 0, 0
    with Server("open_quick") as server:
        for _ in range(8):
            failed, broken = asyncio.run(_churn(server, count // 8, draw))
            done, off = done + count // 8, off + broken
            held = asyncio.run(_left(server))
            print(
                f"| {done:,} | {off:,} | {failed} | {server.memory() / 2**20:.1f} MiB "
                f"| {server.files()} | {len(held)} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="streams,steady,lag,idle,leak")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--leak-requests", type=int, default=20_000)
    parser.add_argument("--load")
    parser.add_argument("--url")
    flags = parser.parse_args()
    if flags.load:
        load(flags.load, flags.url)
        return
    parts = {
        "streams": functools.partial(streams, flags.trials),
        "steady": functools.partial(steady, flags.trials),
        "lag": lag,
        "idle": idle,
        "leak": functools.partial(leak, flags.leak_requests),
    }
    for name in flags.parts.split(","):
        parts[name]()


if __name__ == "__main__":
    main()
