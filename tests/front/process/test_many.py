"""Many clients of one server whose engine is another process: all are served, and none is kept."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import httpx
import msgspec
import pytest

from millpond.config import PytorchEngineConfig
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest, EngineStats
from millpond.errors import Rejected, Unavailable
from millpond.front.directory import Texts
from millpond.front.load.drive import Outcome, Pace, drive, follow
from millpond.front.load.wire import Connection, Target
from millpond.front.process import messages as m
from millpond.front.process import remote
from millpond.front.process.remote import RemoteEngine
from millpond.front.service import Flight, Room, Service
from millpond.plan.sampling import SamplingParams
from tests.front.conftest import BUNDLED, Running, held, wait_for

COMPLETE = "/v1/completions"
CONFIG = PytorchEngineConfig(max_batch_size=64, session_len=256)


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    made = RemoteEngine(None, CONFIG, opener="tests.support.null_engine:open_quick")
    made.wait_ready(60)
    yield made
    made.close(drain=False, timeout=10)
    assert made.healthy


@pytest.fixture(scope="module")
def server(engine: RemoteEngine) -> Iterator[Running]:
    plan = engine.plan()
    service = Service.of(
        Texts.read(BUNDLED), plan.resolved, plan.vocab_size, engine, engine.startup, name="tiny"
    )
    service.room = Room(64 + 4096)
    running = Running(service)
    yield running
    running.close()


def test_numbers_that_the_engine_measured_reach_the_service(engine, server):
    plan = engine.plan()
    measured = replace(plan.resolved, num_pages=77)
    service = Service.of(
        Texts.read(BUNDLED), plan.resolved, plan.vocab_size, engine, engine.startup, name="tiny"
    )
    engine.sized.add_done_callback(lambda sized: service.take_numbers(sized.result()))
    encoded = msgspec.msgpack.encode(m.Sized(measured))
    engine._take(msgspec.msgpack.decode(encoded, type=m.FromEngine))
    assert service.resolved == measured


def body(draw: random.Random, tokens: int) -> dict[str, object]:
    return {
        "prompt": [draw.randrange(2000) for _ in range(8)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _request(name: str, tokens: int = 4, **more: object) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]
    return EngineRequest(request_id=name, tokens=(1, 2, 3), params=params)


def test_three_hundred_clients_at_once_are_all_answered_whole(server):
    draw = random.Random(1)
    bodies = [body(draw, 12) for _ in range(300)]
    outcomes = asyncio.run(drive(Target(server.url), COMPLETE, bodies, Pace(300)))
    assert Counter(o.error for o in outcomes) == {None: 300}
    assert {o.completion_tokens for o in outcomes} == {12}
    assert {o.prompt_tokens for o in outcomes} == {8}
    wait_for(lambda: held(server.service) == 0)


def test_a_thousand_clients_at_once_are_all_answered_by_the_command(serve):
    """Each holds a connection, and with it an open file on either side."""
    served = serve("open_quick", "--max-batch-size", "64", "--session-len", "256")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if enough < 1200:
        pytest.skip(f"only {enough} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
    draw = random.Random(3)
    bodies = [body(draw, 4) for _ in range(1000)]
    outcomes = asyncio.run(drive(Target(served.url), COMPLETE, bodies, Pace(1000)))
    assert Counter(o.error for o in outcomes) == {None: 1000}
    assert {o.completion_tokens for o in outcomes} == {4}
    assert httpx.get(served.url + "/health", timeout=30).status_code == 200


def _alive() -> dict[str, int]:
    """Objects that belong to requests."""
    gc.collect()
    kinds = Counter(type(thing) for thing in gc.get_objects())
    return {kind.__name__: kinds[kind] for kind in (Flight, RequestStream)}


async def _churn(url: str, count: int) -> list[Outcome | None]:
    """`count` requests, 32 at once; a fifth of them are broken off in the middle, and are None."""
    draw, free = random.Random(2), asyncio.Semaphore(32)

    async def one(i: int) -> Outcome | None:
        async with free:
            connection = Connection(Target(url))
            asked = follow(connection, COMPLETE, body(draw, 16 if i % 5 else 200), 0.0)
            try:
                if i % 5:
                    return await asked
                with suppress(TimeoutError):
                    await asyncio.wait_for(asked, draw.uniform(0.0, 0.03))
                return None
            finally:
                connection.close()

    return await asyncio.gather(*(one(i) for i in range(count)))


def test_requests_of_which_a_fifth_is_broken_off_leave_nothing_behind(server):
    service = server.service
    asyncio.run(_churn(server.url, 50))
    wait_for(lambda: held(service) == 0 and not service.flights)
    before, streams = _alive(), len(service.engine._live)
    outcomes = asyncio.run(_churn(server.url, 500))
    assert Counter(o.error for o in outcomes if o is not None) == {None: 400}
    wait_for(lambda: held(service) == 0 and not service.flights)
    assert service.room.taken == 0
    assert len(service.engine._live) == streams == 0
    wait_for(lambda: all(_alive()[name] <= count for name, count in before.items()))
    stats = service.engine.stats()
    assert stats.slots_running == 0
    assert stats.pages_used == stats.pages_indexed


def test_a_metric_is_read_from_the_other_process(server):
    text = httpx.get(server.url + "/metrics").text
    assert "millpond_requests_running 0.0" in text
    assert 'millpond_startup_seconds{phase="loading"}' in text


def test_the_doors_refuse_what_the_engine_itself_would(engine):
    with pytest.raises(Rejected, match="vocabulary"):
        engine.submit(
            EngineRequest(request_id="x", tokens=(9999,), params=SamplingParams(max_tokens=1))
        )
    with pytest.raises(Rejected, match="temperature"):
        engine.submit(_request("x", temperature=-1.0))
    one = SamplingParams(max_tokens=1)
    huge = EngineRequest(request_id="x", tokens=(1,), params=one, priority=1 << 70)
    with pytest.raises(Rejected, match="cannot be told"):
        engine.submit(huge)
    stream = engine.submit(_request("left", 250))
    stream.abort()
    assert [d.finish_reason for d in stream][-1] in ("abort", "length")
    wait_for(lambda: not engine._live)


def test_all_samples_of_a_request_come_in_order_and_end(engine):
    deltas = list(engine.submit(_request("many", 5, n=3)))
    for sample in range(3):
        own = [d for d in deltas if d.sample_index == sample]
        assert sum(len(d.tokens) for d in own) == 5
        assert [d.finish_reason for d in own][-1] == "length"


def test_an_answer_that_nobody_wants_any_more_is_dropped():
    for answer in (m.Done(1), m.Declined(1, "no"), m.Declined(1, "no", later=True)):
        order: Future[EngineStats | None] = Future()
        assert order.cancel()
        remote._settle(order, answer)
        assert order.cancelled()


def test_a_closed_engine_takes_nothing_and_ends_what_it_had():
    engine = RemoteEngine(None, CONFIG, opener="tests.support.null_engine:open_slow")
    with pytest.raises(Unavailable, match="not ready yet"):
        engine.submit(_request("early"))
    with pytest.raises(Unavailable, match="no counters"):
        engine.stats()
    engine.wait_ready(60)
    stream = engine.submit(_request("long", 200))
    assert stream.get(20) is not None
    with pytest.raises(Rejected, match="in use"):
        engine.submit(_request("long"))
    seen: list[str | None] = []
    reader = threading.Thread(target=lambda: seen.extend(d.finish_reason for d in stream))
    reader.start()
    steps = engine.stats().steps
    engine.close(drain=False, timeout=10)
    reader.join(10)
    assert seen[-1] == "abort"
    assert engine.healthy
    with pytest.raises(Unavailable):
        engine.submit(_request("late"))
    with pytest.raises(Unavailable):
        engine.flush_cache()
    assert engine.stats().steps >= steps  # the last that it told
    engine.close(drain=True, timeout=10)


def test_closing_with_a_drain_lets_requests_end():
    engine = RemoteEngine(None, CONFIG, opener="tests.support.null_engine:open_slow")
    engine.wait_ready(60)
    stream = engine.submit(_request("long", 20))
    engine.close(drain=True, timeout=30)
    deltas = list(stream)
    assert sum(len(d.tokens) for d in deltas) == 20
    assert deltas[-1].finish_reason == "length"
