"""Runs requests through the real engine, step by step by hand, and gives back their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest, EngineStats, TokenOut
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import SeatLoad, StepPlan
from millpond.runtime.propose import Live, Proposer
from tests.exactness.families import MAX_POSITION, VOCAB, Kind, executor
from tests.support.recording import RecordingExecutor, Truth

Text = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """A prompt, how to continue it, and before which engine steps it arrives and is aborted.

    `cut` is a step during which it is aborted: its forward has run, nothing is committed yet.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    priority: int = 0
    aborted: int | None = None
    cut: int | None = None

    @property
    def ends_early(self) -> bool:
        """Whether anybody aborts it."""
        return self.aborted is not None or self.cut is not None


@dataclass(frozen=True)
class House:
    """How an engine is built: pool sizes and settings; `fail_at` is a step that fails.

    With `runs_ahead` two steps may be in flight; `late` ones run when their result is asked for.
    """

    num_slots: int = 24
    num_pages: int = 64
    num_seats: int = 8
    num_drafts: int = 0
    fail_at: int | None = None
    count_writes: bool = False
    runs_ahead: bool = False
    late: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class Forced:
    """Proposes the true continuation up to so many tokens as `right` says, then a wrong one.

    `texts` holds, by prompt, parameters and sample, what is going to be drawn; `loads` says who is
    in which seat.
    """

    def __init__(
        self,
        count: int,
        right: Callable[[], int],
        texts: Mapping[tuple[Text, SamplingParams, int], Text],
    ) -> None:
        self.count = count
        self.right = right
        self.texts = texts
        self.loads: dict[int, SeatLoad] = {}

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K]."""
        rows = []
        for seat, position in zip(live.seats, live.position.tolist(), strict=True):
            load = self.loads[seat]
            prompt = load.tokens[: load.prompt_len]
            text = (*prompt, *self.texts[prompt, load.params, load.sample_index])
            row = [*text[position + 1 :][: self.count], *(0,) * self.count][: self.count]
            right = self.right()
            if right < self.count:
                row[right] = (row[right] + 1) % VOCAB
            rows.append(row)
        return torch.tensor(rows, device=live.position.device)


@dataclass
class Served:
    """What came of it: the text of every sample of every request, cached tokens, counters.

    `told` is what the client hears of each token, `drafts` the (drafted, accepted) of a request.
    """

    texts: list[list[Text]]
    told: list[list[list[TokenOut]]]
    drafts: list[tuple[int, int]]
    cached: list[int]
    stats: EngineStats
    executor: RecordingExecutor
    engine: Engine


def make_engine(
    family: str | Kind,
    truth: Truth,
    where: str,
    *,
    num_slots: int = 24,
    num_pages: int = 64,
    num_seats: int = 8,
    num_drafts: int = 0,
    settings: dict[str, Any] | None = None,
    count_writes: bool = False,
    runs_ahead: bool = False,
) -> tuple[Engine, RecordingExecutor]:
    """A fresh engine on a fresh rank, audited and poisoned."""
    found = executor(
        family,
        truth,
        where,
        num_slots=num_slots,
        num_pages=num_pages,
        num_seats=num_seats,
        num_drafts=num_drafts,
        count_writes=count_writes,
        runs_ahead=runs_ahead,
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


def serve(
    family: str | Kind,
    house: House,
    asks: Sequence[Ask],
    truth: Truth,
    where: str,
    proposer: Proposer | None = None,
) -> Served:
    """Serve `asks` to the end; fails when the engine leaks, audits wrongly or ends one in error.

    Drafts are the model's own, or those of `proposer`.
    """
    engine, found = make_engine(
        family,
        truth,
        where,
        num_slots=house.num_slots,
        num_pages=house.num_pages,
        num_seats=house.num_seats,
        num_drafts=house.num_drafts,
        settings=house.settings,
        count_writes=house.count_writes,
        runs_ahead=house.runs_ahead,
    )
    found.fail_at, found.late = house.fail_at, house.late
    if proposer is not None:
        found.worker.runner.proposer = proposer
    streams: dict[int, RequestStream] = {}
    step = 0

    def cut(plan: StepPlan) -> None:
        if isinstance(proposer, Forced):
            proposer.loads.update((load.seat, load) for load in plan.seat_loads)
        for number, ask in enumerate(asks):
            if ask.cut is not None and ask.cut <= step:
                engine.abort(f"{number}")

    found.during = cut
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
    while engine.step():
        pass  # what was launched ahead of the last end
    served = Served([], [], [], [], engine.stats(), found, engine)
    for number, ask in enumerate(asks):
        told, cached, drafts = _drain(streams[number], ask.params.n)
        served.texts.append([tuple(out.token for out in sample) for sample in told])
        served.told.append(told)
        served.drafts.append(drafts)
        served.cached.append(cached)
    assert served.stats.slots_running == 0
    assert served.stats.pages_used == served.stats.pages_indexed
    return served


def alone(family: str | Kind, ask: Ask, truth: Truth) -> list[Text]:
    """The texts of one request on a fresh engine that saves and reuses nothing."""
    house = House(
        settings={"prefix_caching": False, "checkpoint_mode": "off", "max_prefill_tokens": 1024}
    )
    return serve(family, house, [Ask(ask.tokens, ask.params)], truth, "alone").texts[0]


def _busy(engine: Engine) -> bool:
    stats = engine.stats()
    return bool(stats.requests_running or stats.requests_waiting)


def _drain(stream: RequestStream, n: int) -> tuple[list[list[TokenOut]], int, tuple[int, int]]:
    told: list[list[TokenOut]] = [[] for _ in range(n)]
    cached = drafted = accepted = 0
    while (delta := stream.get(timeout=0.0)) is not None:
        assert delta.error is None, delta.error
        told[delta.sample_index] += delta.tokens
        drafted += delta.drafted
        accepted += delta.accepted
        if delta.outcome is not None:
            cached = delta.outcome.cached_tokens
    return told, cached, (drafted, accepted)
