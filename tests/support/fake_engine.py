"""An engine that answers scripted tokens through the same door as the real one."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from millpond.engine import submission
from millpond.engine.constraint import Constraint
from millpond.engine.settings import EngineSettings
from millpond.engine.types import (
    Delta,
    EngineRequest,
    EngineStats,
    PrefixOutcome,
    TokenOut,
)
from millpond.errors import Rejected, Unavailable
from millpond.plan.step import Capabilities, TokenLogprob

Script = Callable[[EngineRequest, int], list[int]]
"""From a request and a sample index to the tokens that would be generated, without end."""


SETTINGS = EngineSettings(max_batch_size=8, max_prefill_tokens=512, session_len=512)
CAPABILITIES = Capabilities(
    num_slots=8, num_pages=100, num_seats=8, export_granularity=64, vocab_size=2048,
    max_position=512,
)  # fmt: skip
"""What is refused, is refused by the real engine's own rules."""


class FakeStream:
    """Deltas of one request, for a thread or for an event loop."""

    def __init__(self, engine: FakeEngine, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._queue: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, delta: Delta | None) -> None:
        self._queue.put(delta)
        if self._wake is not None:
            with suppress(RuntimeError):  # the loop that waited is closed
                self._wake()

    def __iter__(self) -> Iterator[Delta]:
        while (delta := self._queue.get()) is not None:
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            ready.clear()
            try:
                delta = self._queue.get_nowait()
            except queue.Empty:
                await ready.wait()
                continue
            if delta is None:
                return
            yield delta

    def abort(self) -> None:
        self._engine.abort(self.request_id)


class FakeEngine:
    """Answers every request from `script`, one token at a time, `pause` seconds apart."""

    def __init__(self, script: Script, *, eos: frozenset[int], pause: float = 0.0) -> None:
        self.script, self.eos, self.pause = script, eos, pause
        self.healthy, self.failure = True, None
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.finished: dict[str, int] = {}
        self.running: dict[str, threading.Event] = {}
        self.generated = 0
        self.closed = False
        self.refuse: Exception | None = None  # raised by the next submission
        self.fault: str | None = None  # ends the next request with this error

    def submit(self, request: EngineRequest) -> FakeStream:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        if self.closed or not self.healthy:
            raise Unavailable("the engine is closed")
        submission.check(request, SETTINGS, CAPABILITIES)
        stream = FakeStream(self, request)
        self.requests.append(request)
        stop = self.running[request.request_id] = threading.Event()
        threading.Thread(target=self._run, args=(request, stream, stop), daemon=True).start()
        return stream

    def _run(self, request: EngineRequest, stream: FakeStream, stop: threading.Event) -> None:
        params = request.params
        scripts = [self.script(request, i) for i in range(params.n)]
        left = dict(enumerate(scripts))
        first, at = True, 0
        fault, self.fault = self.fault, None
        while left:
            if self.pause:
                time.sleep(self.pause)
            for i in list(left):
                reason, stopped = None, None
                token = left[i][at % len(left[i])]
                ended = (token in self.eos and not params.ignore_eos) or (
                    token in params.stop_token_ids
                )
                if stop.is_set():
                    reason = "abort"
                elif fault is not None:
                    reason = "error"
                elif ended and at + 1 >= params.min_tokens:
                    reason, stopped = "stop", token
                elif at + 1 >= params.max_tokens:
                    reason = "length"
                silent = reason in ("abort", "error")
                stream.put(
                    Delta(
                        request_id=request.request_id,
                        sample_index=i,
                        tokens=() if silent else (self._token(token, params.logprobs),),
                        finish_reason=reason,
                        stop_token=stopped,
                        error=fault,
                        outcome=self._outcome(request) if first else None,
                        prompt_logprobs=self._prompt(request) if first else None,
                    )
                )
                self.generated += not silent
                first = False
                if reason is not None:
                    self.finished[reason] = self.finished.get(reason, 0) + 1
                    del left[i]
            at += 1
        self.running.pop(request.request_id, None)
        stream.put(None)

    def _token(self, token: int, logprobs: int | None) -> TokenOut:
        if logprobs is None:
            return TokenOut(token=token)
        top = tuple((token + k, -0.5 - k) for k in range(logprobs))
        return TokenOut(token=token, logprob=-0.5, top=top)

    def _outcome(self, request: EngineRequest) -> PrefixOutcome:
        cached = max(0, len(request.tokens) - 1) // 64 * 64
        return PrefixOutcome(
            reason="hit" if cached else "too_short",
            prompt_tokens=len(request.tokens),
            cached_tokens=cached,
        )

    def _prompt(self, request: EngineRequest) -> tuple[TokenLogprob, ...] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        return tuple(
            TokenLogprob(position=i, token=t, logprob=-1.0, top=((t, -1.0),)[:count])
            for i, t in enumerate(request.tokens)
            if i > 0
        )

    def abort(self, request_id: str) -> None:
        event = self.running.get(request_id)
        if event is not None and not event.is_set():
            self.aborted.append(request_id)
            event.set()

    def die(self, why: str) -> None:
        """What a failed step loop leaves: no health, and every stream ends with an error."""
        self.healthy, self.failure = False, why

    def prepare(self, constraint: Constraint) -> Future[None]:
        done: Future[None] = Future()
        if constraint.text == "impossible":
            done.set_exception(Rejected("it cannot be", param=constraint.param))
        else:
            done.set_result(None)
        return done

    def stats(self) -> EngineStats:
        running = len(self.running)
        return EngineStats(
            requests_running=running,
            requests_waiting=0,
            slots_free=8 - running,
            slots_running=running,
            slots_checkpoint=0,
            slots_total=8,
            pages_free=100,
            pages_used=0,
            pages_indexed=0,
            pages_total=100,
            steps=self.generated,
            steps_failed=0,
            prompt_tokens=sum(len(r.tokens) for r in self.requests),
            generated_tokens=self.generated,
            prefix_tokens={"hit": 0, "never_seen": 0},
            checkpoints_published={"prompt_end": 0},
            checkpoints_skipped={},
            checkpoints_evicted=0,
            preemptions=0,
            nonfinite=0,
            finished=dict(self.finished),
        )

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def close(self, drain: bool = True, timeout: float = 10.0) -> None:
        self.closed = True
        if not drain:
            for request_id in list(self.running):
                self.abort(request_id)
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            time.sleep(0.005)
