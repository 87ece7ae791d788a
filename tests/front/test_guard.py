"""Who is let in and how much may be said: keys, bodies, the queue, and the admin switch."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest
from openai import APIStatusError, OpenAI

from millpond.config import GenerationConfig
from millpond.front import transport
from millpond.front.guard import Limits
from millpond.front.server import Options
from millpond.front.service import Flight, Room
from millpond.front.transport import EventStream
from tests.front.conftest import Running, held, make_service, wait_for

COMPLETE = "/v1/completions"
SHORT = {"prompt": "x", "max_tokens": 3}
LIMIT = 20_000
KEYS = ("first-key", "zweiter Schlüssel")


@pytest.fixture(scope="module")
def guarded(tokenizer) -> Iterator[Running]:
    limits = Limits(keys=KEYS, max_body=LIMIT, body_seconds=0.5)
    running = Running(make_service(tokenizer, "word " * 10), Options(limits=limits))
    yield running
    assert held(running.service) == 0
    running.close()


def post(
    server: Running, key: object = KEYS[0], path: str = COMPLETE, **how: object
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    headers |= how.pop("headers", {})  # type: ignore[arg-type]
    how.setdefault("json", SHORT)
    if "content" in how:
        del how["json"]
    return httpx.post(server.url + path, headers=headers, timeout=30, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens_the_server_by_either_header(guarded, key):
    assert post(guarded, key).status_code == 200
    assert post(guarded, None, headers={"x-api-key": key.encode()}).status_code == 200
    # Anthropic's clients send both kinds; a scheme that is not ours does not hide the other header.
    both = {"x-api-key": key.encode(), "authorization": "Basic abc"}
    assert post(guarded, None, headers=both).status_code == 200


@pytest.mark.parametrize("key", [None, "first-ke", "first-keyy", "FIRST-KEY", "first-key,"])
def test_without_a_key_nothing_is_answered_but_health(guarded, key):
    before = len(guarded.service.engine.requests)
    refused = post(guarded, key)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["x-request-id"]
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(guarded.url + "/v1/models").status_code == 401
    assert httpx.get(guarded.url + "/metrics").status_code == 401
    assert httpx.get(guarded.url + "/absent").status_code == 401
    assert post(guarded, key, "/v1/messages").json()["type"] == "error"
    for path in ("/health", "/ready"):
        assert httpx.get(guarded.url + path).status_code == 200
        assert httpx.head(guarded.url + path).status_code == 200
    assert len(guarded.service.engine.requests) == before


def _parts(size: int, part: int = 1000) -> Iterator[bytes]:
    head = b'{"max_tokens": 3, "prompt": "'
    yield head
    left = size - len(head) - 2
    while left > 0:
        yield b"x " * (min(part, left) // 2) + b"x" * (min(part, left) % 2)
        left -= part
    yield b'"}'


def test_a_body_may_be_as_large_as_the_limit(guarded):
    for content in (b"".join(_parts(LIMIT)), _parts(LIMIT)):
        reply = post(guarded, content=content)
        assert reply.status_code == 400  # of so many tokens there is no room: it was read
        assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("size", [LIMIT + 1, 10 << 20])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_larger_body_is_a_413_however_it_is_sent(guarded, size, chunked):
    content = _parts(size) if chunked else b"".join(_parts(size))
    reply = post(guarded, content=content)
    assert reply.status_code == 413
    assert "larger than the 19.5 KiB" in reply.json()["error"]["message"]
    assert reply.headers["connection"] == "close"


def test_a_client_library_is_told_of_a_body_of_10_mb(guarded):
    client = OpenAI(base_url=guarded.url + "/v1", api_key=KEYS[0], max_retries=0)
    with pytest.raises(APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="x" * (10 << 20))
    assert refused.value.status_code == 413
    with pytest.raises(APIStatusError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.status_code == 401


def test_a_large_body_is_not_read_before_the_key_is_known(guarded):
    assert post(guarded, "wrong", content=b"".join(_parts(10 << 20))).status_code == 401


def _answer(server: Running, sent: bytes) -> bytes:
    """All that comes back to bytes that are not followed by others."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(sent)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def test_a_body_that_does_not_arrive_is_a_408(guarded):
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    for how in ("content-length: 100\r\n\r\n", "transfer-encoding: chunked\r\n\r\n5\r\n"):
        found = _answer(guarded, (head + how).encode() + b'{"pro')
        assert found.startswith(b"HTTP/1.1 408")
        assert b"did not arrive" in found


def test_a_full_queue_is_a_429_until_somebody_is_done(serve):
    running = serve("word " * 300, pause=0.1)
    running.service.room = Room(2)
    answers: list[httpx.Response] = []
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}

    def client() -> None:
        answers.append(httpx.post(running.url + COMPLETE, json=long, timeout=60))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for thread in clients:
        thread.start()
    wait_for(lambda: running.service.room.taken == 2)
    for body in (SHORT, {**SHORT, "stream": True}):
        refused = httpx.post(running.url + COMPLETE, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
    assert httpx.get(running.url + "/v1/models").status_code == 200
    running.service.engine.pause = 0.0
    for thread in clients:
        thread.join()
    assert [a.status_code for a in answers] == [200, 200]
    assert httpx.post(running.url + COMPLETE, json=SHORT).status_code == 200
    # Several prompts of one request count as several.
    assert (
        httpx.post(running.url + COMPLETE, json={**SHORT, "prompt": ["a", "b"]}).status_code == 200
    )
    refused = httpx.post(running.url + COMPLETE, json={**SHORT, "prompt": ["a", "b", "c"]})
    assert refused.status_code == 429
    assert running.service.room.taken == 0


def test_without_the_switch_nobody_can_end_what_others_asked(serve):
    running = serve("word " * 20)
    for path, body in (("/flush_cache", None), ("/abort_request", {"abort_all": True})):
        refused = httpx.post(running.url + path, json=body)
        assert refused.status_code == 403
        assert "--enable-admin" in refused.json()["error"]["message"]
    assert "/flush_cache" not in httpx.get(running.url + "/openapi.json").json()["paths"]


def test_an_operator_ends_one_request_by_its_id_and_no_other(serve):
    running = serve("word " * 400, pause=0.2, options=Options(admin=True))
    long = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    last: dict[str, str] = {}
    begun = threading.Semaphore(0)

    def client(name: str) -> None:
        headers = {"x-request-id": name}
        with httpx.stream("POST", running.url + COMPLETE, json=long, headers=headers) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    if name not in last:
                        begun.release()
                    last[name] = line

    clients = [threading.Thread(target=client, args=(n,)) for n in ("a-1", "a", "b")]
    for thread in clients:
        thread.start()
    for _ in clients:
        assert begun.acquire(timeout=20)

    def end(**body: object) -> int:
        reply = httpx.post(running.url + "/abort_request", json=body)
        assert reply.status_code == 200
        return reply.json()["aborted"]

    assert end(rid="absent") == 0
    assert end(rid="cmpl-a-1") == 1
    assert end(request_id="b") == 1
    running.service.engine.pause = 0.0
    for thread in clients:
        thread.join()
    for name in ("a-1", "b"):
        assert "ended" in json.loads(last[name][6:])["error"]["message"]
    assert json.loads(last["a"][6:])["choices"][0]["finish_reason"] == "length"
    assert httpx.get(running.url + "/flush_cache").json()["success"]
    assert "/flush_cache" in httpx.get(running.url + "/openapi.json").json()["paths"]


async def test_a_client_that_reads_nothing_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(transport, "STALL_SECONDS", 0.2)
    service = make_service(tokenizer, "word " * 500, pause=0.05)
    flight = Flight(
        service, [service.ask("x", GenerationConfig(max_new_tokens=400, ignore_eos=True))], "a"
    )
    sent = []

    async def events() -> AsyncGenerator[bytes]:
        async for _ in flight.pieces():
            yield b"x"

    async def receive() -> dict[str, str]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, object]) -> None:
        sent.append(message)
        if len(sent) > 2:
            await asyncio.Event().wait()  # a buffer that stays full

    async with asyncio.timeout(20):
        await EventStream(events(), flight)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    wait_for(lambda: held(service) == 0)
    assert len(service.engine.aborted) == 1
    assert service.room.taken == 0
    assert not service.flights


async def test_events_that_wait_for_a_slow_client_are_sent_together_and_none_is_lost(tokenizer):
    service = make_service(tokenizer, "word " * 500)
    flight = Flight(
        service, [service.ask("x", GenerationConfig(max_new_tokens=300, ignore_eos=True))], "a"
    )
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes]:
        count = 0
        async for _ in flight.pieces():
            yield b"%d " % count
            count += 1

    async def receive() -> dict[str, str]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))  # type: ignore[arg-type]
        while held(service):  # all is said before the client has read the first event
            await asyncio.sleep(0.005)
        for _ in range(1000):  # turns of the loop, in which others do what they can
            await asyncio.sleep(0)

    await EventStream(events(), flight)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert b"".join(sent).split() == [b"%d" % i for i in range(300)]
    assert len(sent) < 100
    assert max(len(part.split()) for part in sent) <= transport.AHEAD
