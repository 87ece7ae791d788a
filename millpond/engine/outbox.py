"""What leaves the engine: deltas, and the end of samples and requests. Holds no lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from millpond.engine.counters import Counters
from millpond.engine.request import Request, Sequence
from millpond.engine.stream import wake
from millpond.engine.types import Delta, TokenOut
from millpond.plan.step import Emitted, TokenLogprob, Verified

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

    def draw(self, sequence: Sequence, emitted: Emitted) -> bool:
        """Append a drawn token and tell the stream; True when the sample is over."""
        reason, stop = self._append(sequence, emitted.token)
        out = TokenOut(token=emitted.token, logprob=emitted.logprob, top=emitted.top)
        self._push(sequence, (out,), reason, stop, None)
        return reason is not None

    def draw_run(self, sequence: Sequence, run: list[Emitted], count: Verified) -> bool:
        """As `draw`, for the tokens of one step; what follows the one that ends it is dropped."""
        reason = stop = None
        outs = []
        for emitted in run:
            reason, stop = self._append(sequence, emitted.token)
            outs.append(TokenOut(token=emitted.token, logprob=emitted.logprob, top=emitted.top))
            if reason is not None:
                break
        if outs:
            accepted = min(count.accepted, len(outs))
            self._push(sequence, tuple(outs), reason, stop, None, (count.drafted, accepted))
        return reason is not None

    def _append(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        """The finish reason and the stop token, if this token ends the sample."""
        request, tokens, guide = sequence.request, sequence.tokens, sequence.guide
        tokens.append(token)
        if guide is not None:
            guide.advance(token)
        self._counters.generated_tokens += 1
        if token in request.stop_ids and len(tokens) >= request.stop_from:
            return "stop", token
        if guide is not None and guide.complete:
            return "stop", None
        return ("length" if len(tokens) >= request.length_limit else None), None

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
