"""Sends requests as many users would, and notes when what came back; draws and prints nothing.

Closed loop: a number of users, each of whom asks again as soon as they are answered. Open loop:
requests come at random moments at a given rate, whether or not earlier ones have been answered.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.front.load.wire import Connection, Failure, Target


@dataclass(slots=True)
class Outcome:
    """What became of one request; times are seconds on one clock.

    `arrivals` are the moments at which text came; `due` is when it was to be sent, which counts as
    its beginning: a client that falls behind must not flatter the server.
    """

    due: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def latency(self) -> float:
        """From the beginning to the end."""
        return self.end - self.due

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between what came together and what came next."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first, None for an answer of one."""
        rest = self.completion_tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / rest if rest > 0 else None


@dataclass(frozen=True, slots=True)
class Pace:
    """`users` at once (closed loop), or `rate` requests a second (open loop, `users` at most)."""

    users: int | None
    rate: float = math.inf
    seed: int = 0

    def delays(self, count: int) -> list[float]:
        """Seconds from the beginning at which each of `count` requests is due."""
        if math.isinf(self.rate):
            return [0.0] * count
        draw, now, made = random.Random(self.seed), 0.0, []
        for _ in range(count):
            made.append(now)
            now += draw.expovariate(self.rate)
        return made


async def drive(
    target: Target,
    path: str,
    bodies: Sequence[Any],
    pace: Pace,
    on_end: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Send every body once; one outcome each, in their order."""
    idle: list[Connection] = []
    made: list[Connection] = []
    free = asyncio.Semaphore(pace.users or len(bodies) or 1)
    begin = time.perf_counter()

    async def one(body: Any, due: float) -> Outcome:
        if not idle:
            idle.append(Connection(target))
            made.append(idle[-1])
        connection = idle.pop()
        try:
            outcome = await follow(connection, path, body, due)
        finally:
            free.release()
            idle.append(connection)
        on_end(outcome)
        return outcome

    tasks = []
    for body, delay in zip(bodies, pace.delays(len(bodies)), strict=True):
        wait = begin + delay - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        await free.acquire()
        # In a closed loop a user's next request is due when the last one has been answered.
        due = time.perf_counter() if math.isinf(pace.rate) else begin + delay
        tasks.append(asyncio.create_task(one(body, due)))
    outcomes = await asyncio.gather(*tasks)
    for connection in made:
        connection.close()
    return outcomes


async def follow(connection: Connection, path: str, body: Any, due: float) -> Outcome:
    """One streamed request to its end. Never raises."""
    outcome = Outcome(due)
    try:
        async for event in connection.events(path, body):
            _note(outcome, event)
    except Failure as failure:
        outcome.error = str(failure)
    outcome.end = time.perf_counter()
    if outcome.error is None and not outcome.arrivals:
        outcome.error = "an answer without text"
    return outcome


def _note(outcome: Outcome, event: Any) -> None:
    if "error" in event:
        outcome.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event.get("choices", ()):
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else _text_of(delta)
        if text:
            outcome.arrivals.append(time.perf_counter())
            break
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.completion_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens") or 0


def _text_of(delta: Any) -> Any:
    """Whatever of a chat delta is text, by any of its names."""
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return next((delta[n] for n in names if delta.get(n)), None)
