"""What leaves the engine: deltas, and the end of samples and requests. Holds no lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from millpond.engine.counters import Counters
from millpond.engine.request import Request, Sequence
from millpond.engine.stream import wake
from millpond.engine.types import Delta, TokenOut
from millpond.plan.step import Emitted, TokenLogprob

Sink: TypeAlias = Callable[[list[Delta]], None]
"""Takes the deltas of a step together, on the engine's thread, in place of the streams."""


class Outbox:
    """Turns drawn tokens and endings into deltas; `on_over` hears of every request that is over."""

    def __init__(
        self, counters: Counters, on_over: Callable[[Request], None], sink: Sink | None = None
    ) -> None:
        self._counters = counters
        self._on_over = on_over
        self._sink = sink
        self._gathered: list[Delta] = []
        self._woken: list[asyncio.Future[None]] = []

    def draw(
        self, sequence: Sequence, run: Iterable[Emitted], drafted: int = 0, accepted: int = 0
    ) -> bool:
        """Append the tokens of one step and tell the stream; True when one of them ends the sample.

        What follows that one is dropped. Of `drafted` drafts so many were `accepted`.
        """
        request, tokens, guide = sequence.request, sequence.tokens, sequence.guide
        stop_ids, limit = request.stop_ids, request.length_limit
        reason = stop = None
        outs = []
        for emitted in run:
            token = emitted.token
            tokens.append(token)
            outs.append(TokenOut(token=token, logprob=emitted.logprob, top=emitted.top))
            if guide is not None:
                guide.advance(token)
            if token in stop_ids and len(tokens) >= request.stop_from:
                reason, stop = "stop", token
            elif guide is not None and guide.complete:
                reason = "stop"
            elif len(tokens) >= limit:
                reason = "length"
            else:
                continue
            break
        if not outs:
            return False
        count = len(outs)
        self._counters.generated_tokens += count
        drafts = (drafted, accepted if accepted < count else count)
        self._push(sequence, tuple(outs), reason, stop, None, drafts)
        return reason is not None

    def end(
        self, sequence: Sequence, reason: str, error: str | None = None, param: str | None = None
    ) -> None:
        """End a sample that draws no more; nothing happens when it has ended before."""
        if sequence.finish_reason is None:
            self._push(sequence, (), reason, None, error, param=param)

    def flush(self) -> None:
        """Wake the coroutines that wait for what was pushed since then, or feed the sink."""
        if self._gathered and self._sink is not None:
            gathered, self._gathered = self._gathered, []
            self._sink(gathered)
        if self._woken:
            woken, self._woken = self._woken, []
            wake(woken)

    def _push(
        self,
        sequence: Sequence,
        tokens: tuple[TokenOut, ...],
        reason: str | None,
        stop: int | None,
        error: str | None,
        drafts: tuple[int, int] = (0, 0),
        param: str | None = None,
    ) -> None:
        request = sequence.request
        if reason is None and request.told:  # as nearly always
            delta = Delta(
                request_id=request.spec.request_id,
                sample_index=sequence.index,
                tokens=tokens,
                drafted=drafts[0],
                accepted=drafts[1],
            )
        else:
            outcome = logprobs = None
            if not request.told:
                request.told = True
                outcome, logprobs = request.outcome, _prompt_logprobs(request)
            delta = Delta(
                request_id=request.spec.request_id,
                sample_index=sequence.index,
                tokens=tokens,
                finish_reason=reason,
                stop_token=stop,
                error=error,
                param=param,
                drafted=drafts[0],
                accepted=drafts[1],
                outcome=outcome,
                prompt_logprobs=logprobs,
            )
        if self._sink is not None:
            self._gathered.append(delta)
        elif (waiter := request.stream.push(delta)) is not None:
            self._woken.append(waiter)
        if reason is not None:
            sequence.finish_reason = reason
            request.unfinished -= 1
            if not request.unfinished:
                self._counters.finished[reason] += 1
                self._on_over(request)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob, ...] | None:
    """The prompt's log probabilities, by position; from here on they need not be computed again."""
    entries, request.prompt_logprobs = request.prompt_logprobs, None
    return None if entries is None else tuple(sorted(entries, key=lambda entry: entry.position))
