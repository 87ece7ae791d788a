"""Deltas of tokens to pieces of text: decoding, stop strings, reasoning; knows no transport."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.engine.types import Delta, PrefixOutcome, TokenOut
from millpond.front.chat import ReasoningSplit
from millpond.front.text import Detokenizer, StopStrings, Tokenizer
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and all that is wanted of it: what the engine is told and how text is made.

    `reasons` when the answer may hold a think block, `in_reasoning` when the prompt opened it.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    reasons: bool = False
    in_reasoning: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TextToken:
    """A generated token with the text that became certain with it."""

    out: TokenOut
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sample gained; `finish_reason` is stop, length, abort or error in the last one.

    `raw` is the text before reasoning was split off; `stop_reason` the stop string, or the id of
    the stop token, that ended it.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    raw: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class Sample:
    """The text of one sample of one request, growing."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer, index: int) -> None:
        self._index = index
        self._least = ask.params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=ask.skip_special_tokens)
        self._stops = StopStrings(ask.stops)
        self._split = ReasoningSplit(active=ask.reasons, in_reasoning=ask.in_reasoning)
        self.count = 0  # generated tokens, the one that stopped it included
        self.done = False

    def push(self, delta: Delta) -> Piece | None:
        """The piece this delta makes; None when the sample was over before it."""
        if self.done:
            return None
        raw, tokens = "", []
        last = len(delta.tokens) - 1
        for i, out in enumerate(delta.tokens):
            self.count += 1
            silent = delta.stop_token is not None and i == last
            text = "" if silent else self._detokenizer.push(out.token)
            tokens.append(TextToken(out, text))
            raw += self._stops.push(text) if self.count >= self._least else text
            if self._stops.matched is not None:
                break
        finish, reason = delta.finish_reason, delta.stop_token if delta.finish_reason else None
        if finish is not None and self._stops.matched is None:
            raw += self._stops.push(self._detokenizer.finish())
        stop: str | int | None = reason
        if self._stops.matched is not None:
            finish, stop = "stop", self._stops.matched
        elif finish is not None:
            raw += self._stops.finish()
        thought, answer = self._split.push(raw)
        if finish is not None:
            self.done = True
            more_thought, more_answer = self._split.finish()
            thought, answer = thought + more_thought, answer + more_answer
        return Piece(
            index=self._index,
            text=answer,
            reasoning=thought,
            raw=raw,
            tokens=tuple(tokens),
            finish_reason=finish,
            stop_reason=stop,
            error=delta.error,
        )


@dataclass(slots=True)
class Answer:
    """All samples of one request, growing, and what the engine told about its prompt."""

    ask: Ask
    tokenizer: Tokenizer
    samples: list[Sample] = field(default_factory=list)
    outcome: PrefixOutcome | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def __post_init__(self) -> None:
        self.samples = [Sample(self.ask, self.tokenizer, i) for i in range(self.ask.params.n)]

    def push(self, delta: Delta) -> Piece | None:
        """The piece this delta makes, if it makes one."""
        if delta.outcome is not None:
            self.outcome = delta.outcome
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        return self.samples[delta.sample_index].push(delta)

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
