"""A host tower over the symbolic executor, with what tests ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from millpond.engine.loop import Engine, EngineSettings, RequestStream
from millpond.engine.types import Delta, EngineRequest, PrefixOutcome
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Capabilities
from tests.support.symbolic import VOCAB, SymbolicExecutor, naive_text

Answer = dict[int, tuple[list[int], str | None]]
"""Tokens and finish reason of every sample."""


class Tower:
    """An engine stepped by hand; keyword arguments are settings and capabilities, by name."""

    def __init__(self, **numbers: Any) -> None:
        capabilities: dict[str, Any] = {
            "num_slots": 12,
            "num_pages": 60,
            "num_seats": 4,
            "export_granularity": 64,
            "vocab_size": VOCAB,
            "max_position": 100_000,
            "num_draft_tokens": 0,
            "runs_ahead": False,
        }
        settings: dict[str, Any] = {
            "max_batch_size": 4,
            "max_prefill_tokens": 256,
            "session_len": 100_000,
            "debug_audit": True,
            "debug_poison": True,
        }
        for name, value in numbers.items():
            (capabilities if name in capabilities else settings)[name] = value
        self.settings = EngineSettings(**settings)
        self.executor = SymbolicExecutor(
            Capabilities(**capabilities),
            mode=self.settings.checkpoint_mode,
            max_prefill_tokens=self.settings.max_prefill_tokens,
            any_form=self.settings.decode_anchor_step > 0,
        )
        self.engine = self._open()
        self.outcomes: dict[str, PrefixOutcome] = {}
        self._names = count()

    def _open(self) -> Engine:
        return Engine(self.settings, self.executor)

    @property
    def token_limit(self) -> int:
        """Tokens a sample may hold."""
        caps = self.executor.capabilities
        return min(self.settings.session_len, caps.max_position, caps.num_pages * 64)

    def request(
        self, tokens: Iterable[int], *, priority: int = 0, cache_salt: str = "", **params: Any
    ) -> EngineRequest:
        """A request with an id of its own; token ids are brought into the vocabulary."""
        params = {"max_tokens": 5, "temperature": 0.0, **params}
        return EngineRequest(
            request_id=f"r{next(self._names)}",
            tokens=tuple(token % VOCAB for token in tokens),
            params=SamplingParams(**params),
            priority=priority,
            cache_salt=cache_salt,
        )

    def step(self) -> bool:
        """One step; raises what the executor found wrong with it."""
        busy = self.engine.step()
        if self.executor.violation is not None:
            raise self.executor.violation
        return busy

    def run(self, limit: int = 10_000) -> int:
        """Step until idle; returns the number of steps."""
        for steps in range(limit):
            if not self.step():
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def answers(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Submit all, run to the end, and collect."""
        streams = [self.engine.submit(request) for request in requests]
        self.run()
        return [collect(stream, self.outcomes) for stream in streams]

    def naive(self, request: EngineRequest) -> Answer:
        """What the request must answer."""
        return {
            index: naive_text(
                request.tokens,
                request.params,
                index,
                eos=self.settings.eos_token_ids,
                token_limit=self.token_limit,
            )
            for index in range(request.params.n)
        }

    def assert_nothing_is_held(self) -> None:
        """When idle, only the index holds anything; without it everything is free."""
        self.engine.flush_cache()
        stats = self.engine.stats()
        assert stats.slots_free == stats.slots_total
        assert stats.pages_free == stats.pages_total
        assert stats.requests_running == stats.requests_waiting == 0
        seats = self.engine._ledger.seats
        assert sorted(seats) == list(range(self.settings.max_batch_size))


def collect(stream: RequestStream, outcomes: dict[str, PrefixOutcome] | None = None) -> Answer:
    """Everything a stream delivers; blocks until it ends."""
    answer: Answer = {}
    for delta in stream:
        take(answer, delta)
        if delta.outcome is not None and outcomes is not None:
            outcomes[delta.request_id] = delta.outcome
    return answer


def take(answer: Answer, delta: Delta) -> None:
    """Add one delta to an answer; nothing may follow the last one of a sample."""
    tokens, reason = answer.setdefault(delta.sample_index, ([], None))
    assert reason is None, "a delta after the last"
    tokens.extend(out.token for out in delta.tokens)
    answer[delta.sample_index] = (tokens, delta.finish_reason)
