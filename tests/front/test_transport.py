"""What becomes of a request whose client is gone, at the moments a socket cannot be made to hit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from millpond.config import GenerationConfig
from millpond.front.service import Flight
from millpond.front.text import Tokenizer
from millpond.front.transport import EventStream
from tests.front.conftest import held, make_service, wait_for

LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)


async def test_a_stream_whose_client_left_before_it_began_is_given_back(tokenizer: Tokenizer):
    service = make_service(tokenizer, "word " * 500, pause=0.01)
    flight = Flight(service, [service.ask("x", LONG)], "a")

    async def events() -> AsyncGenerator[bytes]:
        async for _ in flight.pieces():
            yield b""

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.Event().wait()  # a full buffer

    await EventStream(events(), flight)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    wait_for(lambda: held(service) == 0)
    assert len(service.engine.aborted) == 1


async def test_a_handler_that_is_cancelled_gives_its_request_back(tokenizer: Tokenizer):
    service = make_service(tokenizer, "word " * 500, pause=0.01)
    flight = Flight(service, [service.ask("x", LONG)], "a")

    async def read() -> None:
        async for _ in flight.pieces():
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(lambda: held(service) == 0)
    assert len(service.engine.aborted) == 1
