"""Deltas of tokens to pieces of an answer: decoding, stop strings, parsing; knows no transport."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from millpond.engine.constraint import Constraint
from millpond.engine.constraint import Reasoning as ThinkBlock
from millpond.engine.types import Delta, PrefixOutcome, TokenOut
from millpond.front.parsing.base import Content, Event, Reasoning, merged
from millpond.front.parsing.dialect import PLAIN, Reading
from millpond.front.text import Detokenizer, StopStrings, Tokenizer
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and all that is wanted of it: what the engine is told and how text is made.

    `constraint` is the language of the answer, `reasoning` tells the engine where it begins.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    reading: Reading = PLAIN
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    reasoning: ThinkBlock | None = None
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TextToken:
    """A generated token with the text that became certain with it.

    `said` when it is of the content: no reasoning, no part of a call, no marker, not the end.
    """

    out: TokenOut
    text: str
    said: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sample gained; `events` say what of it is reasoning, content and tool calls.

    `finish_reason` is stop, length, tool_calls, abort or error in the last piece. `raw` is the text
    before it was parsed; `stop_reason` the stop string, or the id of the stop token, that ended it.
    `param` is the field of the request that is to blame for the `error`, if one is.
    """

    index: int
    events: tuple[Event, ...] = ()
    raw: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    param: str | None = None

    @property
    def text(self) -> str:
        """The content it has."""
        return "".join(e.text for e in self.events if isinstance(e, Content))

    @property
    def reasoning(self) -> str:
        """The reasoning it has."""
        return "".join(e.text for e in self.events if isinstance(e, Reasoning))


class _Ends:
    """Stop strings in a stream of text and markers; a marker comes out whole, and in its place."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = StopStrings(stops)
        self._waiting: deque[tuple[str, str | None]] = deque()
        self._certain = 0  # characters of what waits that are before any stop string

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    def push(self, text: str, marker: str | None, *, watch: bool) -> list[tuple[str, str | None]]:
        """(text, the marker it is) that are certain; `watch` for stop strings, or let all pass."""
        self._waiting.append((text, marker))
        return self._release(self._stops.push(text) if watch else text)

    def finish(self) -> list[tuple[str, str | None]]:
        """What was held back for a stop string that did not come."""
        return self._release(self._stops.finish())

    def _release(self, certain: str) -> list[tuple[str, str | None]]:
        self._certain += len(certain)
        made = []
        while self._waiting and len(self._waiting[0][0]) <= self._certain:
            made.append(self._waiting.popleft())
            self._certain -= len(made[-1][0])
        if self._waiting and self._certain:
            text, marker = self._waiting[0]
            if marker is None or self.matched is not None:
                made.append((text[: self._certain], None))
                self._waiting[0] = (text[self._certain :], marker)
                self._certain = 0
        return made


class Sample:
    """One sample of one request, growing."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer, index: int) -> None:
        self._index = index
        self._least = ask.params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=ask.skip_special_tokens)
        self._ends = _Ends(ask.stops)
        self._markers, self._parallel = ask.reading.tokens, ask.reading.parallel
        self._reader = ask.reading.reader()
        self.count = 0  # generated tokens, the one that stopped it included
        self.thought = 0  # those of them that are reasoning
        self.done = False

    def push(self, delta: Delta) -> Piece | None:
        """The piece this delta makes; None when the sample was over before it."""
        if self.done:
            return None
        raw: list[str] = []
        tokens: list[TextToken] = []
        last = len(delta.tokens) - 1
        for i, out in enumerate(delta.tokens):
            self.count += 1
            silent = delta.stop_token is not None and i == last
            text = "" if silent else self._decode(out.token, raw)
            reader = self._reader
            elsewhere = silent or reader.thinking or reader.in_markup
            tokens.append(TextToken(out, text, not elsewhere and out.token not in self._markers))
            self.thought += reader.thinking
            if self._ends.matched is not None or self._satisfied:
                break
        finish, reason = delta.finish_reason, delta.stop_token if delta.finish_reason else None
        if finish is not None and self._ends.matched is None:
            self._read(self._ends.push(self._detokenizer.finish(), None, watch=True), raw)
        stop: str | int | None = reason
        if self._ends.matched is not None:
            finish, stop = "stop", self._ends.matched
        elif self._satisfied:
            finish, stop = "stop", None
        elif finish is not None:
            self._read(self._ends.finish(), raw)
        if finish is not None:
            self.done = True
            self._reader.finish(cut=finish != "stop" or self._ends.matched is not None)
            if finish == "stop" and self._reader.completed and not self._reader.in_call:
                finish = "tool_calls"
        return Piece(
            index=self._index,
            events=merged(self._reader.take()),
            raw="".join(raw),
            tokens=tuple(tokens),
            finish_reason=finish,
            stop_reason=stop,
            error=delta.error,
            param=delta.param,
        )

    @property
    def _satisfied(self) -> bool:
        """Whether the one call that was wanted is there."""
        return not self._parallel and self._reader.completed > 0

    def _decode(self, token: int, raw: list[str]) -> str:
        """Read one token; its text, after what was held of a character before it."""
        marker = self._markers.get(token)
        before = "" if marker is None else self._detokenizer.finish()
        text = self._detokenizer.push(token)
        watch = self.count >= self._least
        if before:
            self._read(self._ends.push(before, None, watch=watch), raw)
        self._read(self._ends.push(text, marker, watch=watch), raw)
        return before + text

    def _read(self, certain: list[tuple[str, str | None]], raw: list[str]) -> None:
        for text, marker in certain:
            raw.append(text)
            if self._satisfied:
                return
            if marker is None:
                self._reader.text(text)
            else:
                self._reader.mark(marker)


@dataclass(slots=True)
class Answer:
    """All samples of one request, growing, and what the engine told about its prompt."""

    ask: Ask
    tokenizer: Tokenizer
    samples: list[Sample] = field(default_factory=list)
    outcome: PrefixOutcome | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # those of them that are in the answer
    runs: Counter[int] = field(default_factory=Counter)  # steps that verified, by how many it kept
    begun: float = field(default_factory=time.perf_counter)  # all three in seconds of that clock
    first_at: float | None = None  # when tokens first came
    last_at: float | None = None  # and last

    def __post_init__(self) -> None:
        self.samples = [Sample(self.ask, self.tokenizer, i) for i in range(self.ask.params.n)]

    def push(self, delta: Delta) -> Piece | None:
        """The piece this delta makes, if it makes one."""
        if delta.outcome is not None:
            self.outcome = delta.outcome
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        sample = self.samples[delta.sample_index]
        before = sample.count
        piece = sample.push(delta)
        self.drafted += delta.drafted
        # A stop string, or the one call that was wanted, may cut the answer among its drafts.
        kept = min(delta.accepted, sample.count - before)
        self.accepted += kept
        if delta.drafted:
            self.runs[kept] += 1
        if delta.tokens:
            self.last_at = time.perf_counter()
            if self.first_at is None:
                self.first_at = self.last_at
        return piece

    @property
    def done(self) -> bool:
        """Whether every sample is over, so that the request may be aborted."""
        return all(s.done for s in self.samples)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ask.tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.outcome.cached_tokens if self.outcome else 0

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all samples."""
        return sum(s.count for s in self.samples)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that are reasoning."""
        return sum(s.thought for s in self.samples)
