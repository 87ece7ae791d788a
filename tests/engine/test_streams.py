"""Deltas reach threads and coroutines in order, each once, without polling."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millpond.engine.stream import RequestStream, wake
from millpond.engine.types import Delta, TokenOut
from tests.support.towers import Tower, collect, take


def delta(token: int, reason: str | None = None) -> Delta:
    return Delta(
        request_id="r", sample_index=0, tokens=(TokenOut(token=token),), finish_reason=reason
    )


def test_a_stream_ends_after_the_last_sample():
    stream = RequestStream("r", 1, lambda _: None)
    stream.push(delta(1))
    stream.push(delta(2, "stop"))
    assert [d.tokens[0].token for d in stream] == [1, 2]
    assert stream.get(timeout=0) is None
    assert next(iter(stream), None) is None


def test_waiting_longer_than_allowed_is_a_timeout_and_loses_nothing():
    stream = RequestStream("r", 1, lambda _: None)
    for timeout in (0, 0.001):
        with pytest.raises(TimeoutError):
            stream.get(timeout=timeout)
    stream.push(delta(1, "stop"))
    assert stream.get(timeout=0) == delta(1, "stop")


def test_a_thread_that_waits_is_woken_by_every_delta():
    stream = RequestStream("r", 1, lambda _: None)
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(d.tokens[0].token for d in stream))
    reader.start()
    for token in range(500):
        stream.push(delta(token, "stop" if token == 499 else None))
    reader.join(30)
    assert got == list(range(500))


async def test_coroutines_that_wait_are_woken_from_another_thread():
    streams = [RequestStream(f"r{i}", 1, lambda _: None) for i in range(5)]

    def produce():
        for token in range(200):
            last = "stop" if token == 199 else None
            woken = [stream.push(delta(token, last)) for stream in streams]
            wake(future for future in woken if future is not None)

    async def consume(stream: RequestStream) -> list[int]:
        return [d.tokens[0].token async for d in stream]

    producer = threading.Thread(target=produce)
    consumers = [asyncio.create_task(consume(stream)) for stream in streams]
    await asyncio.sleep(0)
    producer.start()
    got = await asyncio.wait_for(asyncio.gather(*consumers), 30)
    producer.join()
    assert got == [list(range(200))] * 5


async def test_a_cancelled_reader_may_be_followed_by_another():
    stream = RequestStream("r", 1, lambda _: None)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    wake([f for f in [stream.push(delta(7, "stop"))] if f is not None])
    assert [d.tokens[0].token async for d in stream] == [7]


def test_a_loop_that_was_closed_does_not_disturb_the_engine():
    stream = RequestStream("r", 1, lambda _: None)
    loop = asyncio.new_event_loop()
    reader = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    future = stream.push(delta(1, "stop"))
    assert future is not None
    reader.cancel()
    loop.run_until_complete(asyncio.gather(reader, return_exceptions=True))
    loop.close()
    wake([future])


async def test_many_coroutines_are_served_by_one_engine_at_once():
    tower = Tower(debug_audit=False)
    requests = [tower.request(range(i, i + 70), seed=i, n=1 + i % 3) for i in range(20)]
    tower.engine.start()

    async def ask(request):
        answer: dict = {}
        async for piece in tower.engine.submit(request):
            take(answer, piece)
        return answer

    try:
        answers = await asyncio.wait_for(asyncio.gather(*map(ask, requests)), 60)
    finally:
        await asyncio.to_thread(tower.engine.close)
    assert answers == [tower.naive(request) for request in requests]


def test_many_threads_submit_and_abort_at_once():
    tower = Tower(num_slots=3, num_pages=20, debug_audit=False)
    tower.engine.start()
    wrong: list[object] = []

    def client(number: int) -> None:
        for i in range(6):
            request = tower.request(range(number, number + 100), seed=i, max_tokens=12)
            stream = tower.engine.submit(request)
            if i % 3 == 2:
                stream.get()
                stream.abort()
            answer = collect(stream)
            expected = tower.naive(request)
            _, reason = answer[0]
            if i % 3 != 2 and answer != expected:
                wrong.append((request, answer))
            if i % 3 == 2 and reason not in ("abort", "length"):
                wrong.append((request, answer))
            if i == 4:
                tower.engine.flush_cache()
            tower.engine.stats()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    tower.engine.close()
    assert not wrong
    assert tower.executor.violation is None
    stats = tower.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)


def test_stop_tokens_end_a_sample_unless_it_is_too_early():
    tower = Tower(eos_token_ids=(7,))
    request = tower.request(range(40), max_tokens=400)
    text, reason = tower.answers([request])[0][0]
    assert reason == "stop"
    assert text[-1] == 7
    longer = tower.request(range(40), max_tokens=400, min_tokens=len(text) + 1)
    ignoring = tower.request(range(40), max_tokens=len(text) + 5, ignore_eos=True)
    own = tower.request(range(40), max_tokens=400, stop_token_ids=(text[0],))
    got = tower.answers([longer, ignoring, own])
    assert got == [tower.naive(longer), tower.naive(ignoring), tower.naive(own)]
    assert len(got[0][0][0]) > len(text)
    assert got[1][0][1] == "length"
    assert got[2][0] == (text[:1], "stop")


def test_an_answer_ends_where_the_session_or_the_pool_ends():
    for limits in ({"session_len": 100}, {"num_pages": 2}):
        tower = Tower(**limits)
        request = tower.request(range(90), max_tokens=1000, ignore_eos=True)
        tokens, reason = tower.answers([request])[0][0]
        assert reason == "length"
        assert 90 + len(tokens) == tower.token_limit


def test_a_delta_says_why_its_sample_ended():
    tower = Tower(eos_token_ids=(7,))
    stream = tower.engine.submit(tower.request(range(40), max_tokens=400))
    tower.run()
    last = list(stream)[-1]
    assert (last.finish_reason, last.stop_token, last.tokens[-1].token) == ("stop", 7, 7)
