"""How two processes end: whichever goes first, nobody hangs and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.front.conftest import wait_for
from tests.front.process.conftest import Served, alive

COMPLETE = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def lines(served: Served, on_first: Callable[[], object], body: object = None) -> Iterator[str]:
    """The lines of a long stream; `on_first` is called once the first has come."""
    asked = {**LONG, "stream": True, **(body or {})}
    with httpx.stream("POST", served.url + COMPLETE, json=asked, timeout=30) as reply:
        for line in reply.iter_lines():
            if line:
                yield line
                on_first()
                on_first = bool


def test_an_engine_that_is_killed_ends_open_requests_with_an_error_and_the_server_with_status_1(
    serve,
):
    served = serve()
    engine = served.engine
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, served.url + COMPLETE, json=LONG, timeout=30)
        heard = list(lines(served, lambda: os.kill(engine, signal.SIGKILL)))
        late = httpx.post(served.url + COMPLETE, json=LONG, timeout=30)
        health = httpx.get(served.url + "/health", timeout=30)
    assert heard[-1] == "data: [DONE]"
    assert "signal 9" in json.loads(heard[-2].removeprefix("data: "))["error"]["message"]
    for reply in (whole.result(), late):
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert "the engine has failed" in reply.json()["error"]["message"]
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    status, err = served.end()
    assert status == 1
    assert "signal 9" in err
    assert "Traceback" not in err


def test_a_server_that_is_killed_takes_its_engine_along_and_leaves_no_files(serve):
    served = serve()
    engine = served.engine
    folder = _folder_of(served)
    with suppress(httpx.TransportError):
        list(lines(served, lambda: os.kill(served.process.pid, signal.SIGKILL)))
    wait_for(lambda: not alive(engine))
    wait_for(lambda: not folder.exists())


def test_a_step_that_never_ends_is_told_to_everybody_and_ends_the_server(serve):
    """The device hangs: requests get an answer, and whoever looks after the server its reason."""
    served = serve("open_stuck", "--watchdog-timeout", "1")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(httpx.post, served.url + COMPLETE, json=LONG, timeout=50) for _ in range(3)
        ]
        replies = [reply.result() for reply in asked]
    seen = [httpx.get(served.url + "/health", timeout=30)]
    wait_for(
        lambda: (
            seen[0].status_code == 503
            or seen.insert(0, httpx.get(served.url + "/health", timeout=30))
        )
    )
    health = seen[0]
    for reply in replies:
        assert reply.status_code >= 500
        assert "has not ended after" in reply.json()["error"]["message"]
    assert health.status_code == 503
    assert "has not ended after" in health.json()["error"]
    status, err = served.end()
    assert status == 1
    assert "millpond-engine: " in err


def test_requests_are_told_of_in_the_log_where_that_is_asked_for(serve):
    for level, flags, count in (("INFO", (), 0), ("WARNING", ("--enable-log-requests",), 2)):
        served = serve("open_quick", *flags, "--log-level", level)
        for _ in range(2):
            body = {**LONG, "max_tokens": 1}
            assert httpx.post(served.url + COMPLETE, json=body, timeout=30).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        status, err = served.end()
        assert status == 0
        assert len([line for line in err.splitlines() if "prompt tokens cached" in line]) == count


def test_an_engine_is_stopped_with_its_server_and_leaves_no_files(serve):
    served = serve()
    engine = served.engine
    folder = _folder_of(served)
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "")
    assert not alive(engine)
    assert not folder.exists()


def test_a_signal_to_the_whole_group_is_a_drain_all_the_same(serve):
    served = serve()
    heard = list(
        lines(served, lambda: os.killpg(served.process.pid, signal.SIGINT), {"max_tokens": 60})
    )
    assert heard[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in heard[-2]
    assert served.end() == (0, "")


def test_what_outlives_the_drain_is_told_so(serve):
    served = serve("open_slow", "--drain-seconds", "0.5")
    heard = list(lines(served, lambda: served.process.send_signal(signal.SIGTERM)))
    assert heard[-1] == "data: [DONE]"
    assert "shutting down" in heard[-2]
    assert served.end() == (0, "")


def test_a_second_signal_under_load_is_quick_and_quiet(serve):
    served = serve("open_slow", "--drain-seconds", "600")
    begun = threading.Semaphore(0)

    def client(_: int) -> None:
        with suppress(httpx.TransportError):
            list(lines(served, begun.release, {"max_tokens": 4000}))

    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(client, i) for i in range(12)]
        for _ in waiting:
            assert begun.acquire(timeout=30)
        engine = served.engine
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        served.process.send_signal(signal.SIGINT)
        assert served.end(40.0) == (0, "")  # the streams would have taken 80 s
    assert not alive(engine)


def test_while_a_model_loads_the_server_says_so_and_may_be_stopped(serve):
    served = serve("open_never", phase="loading")
    ready = httpx.get(served.url + "/ready")
    assert ready.status_code == 503
    assert {"starting"} <= ready.json()["phases"].keys()
    assert httpx.get(served.url + "/health").json()["status"] == "loading"
    refused = httpx.post(served.url + COMPLETE, json=LONG)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "not ready yet: loading" in refused.json()["error"]["message"]
    assert httpx.get(served.url + "/metrics").status_code == 200
    engine = served.engine
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "")
    assert not alive(engine)


@pytest.mark.parametrize(
    "opener, words",
    [("open_refused", "no weights in sight"), ("open_broken", "a fault of the start")],
)
def test_a_start_that_fails_is_told_and_has_a_status(serve, opener, words):
    served = serve(opener, phase="")
    status, err = served.end()
    assert status == 1
    assert words in err


def test_a_model_that_cannot_be_served_is_one_line(serve):
    served = serve("open_quick", "--session-len", "100000", phase="")
    status, err = served.end()
    assert (status, err.count("\n")) == (1, 1)
    assert "session_len=100000" in err


def _folder_of(served: Served) -> Path:
    """Where the two processes meet: the server listens there."""
    pid = served.process.pid
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        if f"socket:[{fields[6]}]" in inodes and fields[-1].endswith("/requests"):
            return Path(fields[-1]).parent
    raise AssertionError("no socket of the server's")
