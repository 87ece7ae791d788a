"""Runs requests through the real engine, step by step by hand, and gives back their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest, EngineStats
from millpond.plan.sampling import SamplingParams
from tests.exactness.families import MAX_POSITION, VOCAB, executor
from tests.support.recording import RecordingExecutor, Truth

Text = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """A prompt, how to continue it, and before which engine steps it arrives and is aborted."""

    tokens: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    priority: int = 0
    aborted: int | None = None


@dataclass(frozen=True)
class House:
    """How an engine is built: pool sizes and settings; `fail_at` is a step that fails."""

    num_slots: int = 24
    num_pages: int = 64
    num_seats: int = 8
    fail_at: int | None = None
    count_writes: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Served:
    """What came of it: the text of every sample of every request, cached tokens, counters."""

    texts: list[list[Text]]
    cached: list[int]
    stats: EngineStats
    executor: RecordingExecutor
    engine: Engine


def make_engine(
    family: str,
    truth: Truth,
    where: str,
    *,
    num_slots: int = 24,
    num_pages: int = 64,
    num_seats: int = 8,
    settings: dict[str, Any] | None = None,
    count_writes: bool = False,
) -> tuple[Engine, RecordingExecutor]:
    """A fresh engine on a fresh rank, audited and poisoned."""
    found = executor(
        family,
        truth,
        where,
        num_slots=num_slots,
        num_pages=num_pages,
        num_seats=num_seats,
        count_writes=count_writes,
    )
    given: dict[str, Any] = {
        "max_batch_size": num_seats,
        "max_prefill_tokens": 256,
        "session_len": MAX_POSITION,
        "checkpoint_budget": 8,
        "eos_token_ids": (VOCAB - 1,),
        "debug_audit": True,
        "debug_poison": True,
        **(settings or {}),
    }
    return Engine(EngineSettings(**given), found), found


def serve(family: str, house: House, asks: Sequence[Ask], truth: Truth, where: str) -> Served:
    """Serve `asks` to the end; fails when the engine leaks, audits wrongly or ends one in error."""
    engine, found = make_engine(
        family,
        truth,
        where,
        num_slots=house.num_slots,
        num_pages=house.num_pages,
        num_seats=house.num_seats,
        settings=house.settings,
        count_writes=house.count_writes,
    )
    found.fail_at = house.fail_at
    streams: dict[int, RequestStream] = {}
    step = 0
    while len(streams) < len(asks) or _busy(engine):
        for number, ask in enumerate(asks):
            if number not in streams and ask.arrives <= step:
                streams[number] = engine.submit(
                    EngineRequest(
                        request_id=f"{number}",
                        tokens=ask.tokens,
                        params=ask.params,
                        priority=ask.priority,
                    )
                )
            if ask.aborted == step:
                engine.abort(f"{number}")
        engine.step()
        step += 1
        assert step < 4000, "the engine does not come to an end"
    served = Served([], [], engine.stats(), found, engine)
    for number, ask in enumerate(asks):
        texts, cached = _drain(streams[number], ask.params.n)
        served.texts.append(texts)
        served.cached.append(cached)
    assert served.stats.slots_running == 0
    assert served.stats.pages_used == served.stats.pages_indexed
    return served


def alone(family: str, ask: Ask, truth: Truth) -> list[Text]:
    """The texts of one request on a fresh engine that saves and reuses nothing."""
    house = House(
        settings={"prefix_caching": False, "checkpoint_mode": "off", "max_prefill_tokens": 1024}
    )
    return serve(family, house, [Ask(ask.tokens, ask.params)], truth, "alone").texts[0]


def _busy(engine: Engine) -> bool:
    stats = engine.stats()
    return bool(stats.requests_running or stats.requests_waiting)


def _drain(stream: RequestStream, n: int) -> tuple[list[Text], int]:
    texts: list[list[int]] = [[] for _ in range(n)]
    cached = 0
    while (delta := stream.get(timeout=0.0)) is not None:
        assert delta.error is None, delta.error
        texts[delta.sample_index] += [t.token for t in delta.tokens]
        if delta.outcome is not None:
            cached = delta.outcome.cached_tokens
    return [tuple(t) for t in texts], cached
