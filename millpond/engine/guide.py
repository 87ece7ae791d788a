"""Where one sample stands in its grammar and in its thinking, and which tokens may come next.

Knows tokens and matchers; does not know rows or threads: whoever fills masks calls `fill` from one
thread at a time, and nobody else touches the guide meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from millpond.engine.constraint import Reasoning
from millpond.engine.grammar import Grammar, Words, all_words, num_words, words_of
from millpond.plan.sampling import SamplingParams

NOTHING_LEFT = (
    "the grammar allows no token here that the request allows: stop_token_ids and min_tokens, or"
    " the vocabulary, exclude all of them"
)

TOO_COMPLEX = "the grammar became too complex to follow: simplify it"

REFUSED = (
    "a token was drawn that the grammar does not allow: logits or penalties left the range of fp32"
)


class Thinking(NamedTuple):
    """Whether the think block is open, and how many tokens of thinking there were."""

    is_open: bool
    used: int

    def after(self, token: int, reasoning: Reasoning | None, *, may_open: bool) -> Thinking:
        """What one more token makes of it."""
        if reasoning is None:
            return self
        if self.is_open:
            if token == reasoning.end_token:
                return Thinking(False, self.used)
            return Thinking(True, self.used + 1)
        return Thinking(may_open and token == reasoning.start_token, self.used)


class Guide:
    """The guide of one sample. Every generated token goes through `advance`, once, in order.

    `places` are the tokens allowed at the next position, and at those after each of the first
    `num_drafts` drafts; None allows all. They are stale from `advance` until the next `fill`.
    """

    __slots__ = (
        "_constrained",
        "_ends",
        "_eos",
        "_first",
        "_matcher",
        "_min_tokens",
        "_not_ends",
        "_reasoning",
        "_thinking",
        "_vocab_size",
        "complete",
        "count",
        "error",
        "filling",
        "is_quick",
        "is_slow",
        "places",
        "stale",
    )

    def __init__(
        self,
        grammar: Grammar | None,
        reasoning: Reasoning | None,
        params: SamplingParams,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self._matcher: LLMatcher | None = None if grammar is None else grammar.matcher()
        self._first = None if grammar is None else grammar.first
        self._reasoning = reasoning
        self._thinking = Thinking(reasoning is not None and reasoning.is_open, 0)
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._constrained = grammar is not None
        # What ends the answer, in the words of masks: refused before `min_tokens`, as drawing does.
        eos = () if params.ignore_eos else eos_token_ids
        self._ends = words_of(params.stop_token_ids + eos, vocab_size)
        self._eos = words_of(eos_token_ids, vocab_size) if params.ignore_eos else None
        thinks_first = self._constrained and self._thinking.is_open
        self._not_ends = (all_words(vocab_size) & ~self._ends).tobytes() if thinks_first else None
        self.count = 0  # generated tokens
        self.complete = False  # nothing more may follow
        self.error: str | None = None
        self.places: tuple[bytes | None, ...] = (None,)
        self.stale = True
        self.filling: Future[None] | None = None  # set by whoever has it filled elsewhere
        self.is_slow = False  # took longer than a step may wait
        self.is_quick = False  # within `GRACE` when its matcher was last asked
        self.fill()

    @property
    def is_ready(self) -> bool:
        """Whether `places` are there to be used, and nobody is filling them."""
        return self.error is None and (self.filling is None or self.filling.done())

    @property
    def goes_ahead(self) -> bool:
        """Whether a step may be launched that needs masks which cannot be filled yet.

        They are waited for then, so a matcher has to have shown that it is quick.
        """
        unproven = self._matcher is not None and not self._thinking.is_open and not self.is_quick
        return not (self.is_slow or unproven)

    @property
    def is_refusal(self) -> bool:
        """Whether `error` is the request's own doing."""
        return self.error is not None and self.error.startswith((NOTHING_LEFT, TOO_COMPLEX))

    @property
    def num_drafts(self) -> int:
        """How many of the drafts last filled for may be verified."""
        return len(self.places) - 1

    def advance(self, token: int) -> None:
        """One more token was generated. Sets `complete`, or `error` where it is not allowed."""
        self.count += 1
        self.stale = True
        if self._thinking.is_open or self._matcher is None:
            self._thinking = self._next(self._thinking, token)
            return
        self._first = None
        if not self._matcher.consume_token(token):
            self.error = _trouble(self._matcher, otherwise=REFUSED)
        elif self._matcher.is_stopped():
            self.complete = True

    def fill(self, drafts: Sequence[int] = ()) -> None:
        """Find what may come next, and after each of `drafts` as far as they are allowed.

        Sets `error` when nothing may.
        """
        places, after = self._free_places(drafts)
        if after is not None and self._matcher is not None:
            places += self._matched_places(self._matcher, drafts[after:], after)
        if self.error is None:
            self.places = tuple(places) or (None,)
        self.stale = False

    def needs_matching(self, drafts: Sequence[int] = ()) -> bool:
        """Whether `fill` takes more than a look: a walk through the vocabulary."""
        if self._matcher is None:
            return False
        if self._thinking.is_open and self._reasoning is not None:
            return self._reasoning.end_token in drafts
        return self._first is None or bool(drafts)

    # Places.

    def _next(self, thinking: Thinking, token: int) -> Thinking:
        return thinking.after(token, self._reasoning, may_open=not self._constrained)

    def _free_places(self, drafts: Sequence[int]) -> tuple[list[bytes | None], int | None]:
        """Places before the grammar begins, and after how many drafts it does (None: not yet)."""
        places: list[bytes | None] = []
        thinking = self._thinking
        for index in range(len(drafts) + 1):
            if not thinking.is_open and self._constrained:
                return places, index
            place = self._free_place(thinking)
            places.append(place)
            if index == len(drafts) or (place is not None and not _allows(place, drafts[index])):
                return places, None
            thinking = self._next(thinking, drafts[index])
        return places, None

    def _free_place(self, thinking: Thinking) -> bytes | None:
        reasoning = self._reasoning
        if not thinking.is_open or reasoning is None:
            return None
        if reasoning.budget is not None and thinking.used >= reasoning.budget:
            return words_of((reasoning.end_token,), self._vocab_size).tobytes()
        # Where an answer is owed, thinking does not end the request.
        return self._not_ends

    def _matched_places(
        self, matcher: LLMatcher, drafts: Sequence[int], ahead: int
    ) -> list[bytes | None]:
        """Places from where the grammar begins, `ahead` tokens on."""
        words = self._first if self._first is not None and not drafts else None
        if words is not None:
            return self._finished([words], ahead)
        # Drafts are tried on a copy: an error is for ever, and a draft may never come.
        walker = matcher.deep_copy() if drafts else matcher
        found: list[Words] = []
        for index in range(len(drafts) + 1):
            words = np.zeros(num_words(self._vocab_size), np.int32)
            walker.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if walker.is_error():
                if index == 0 and ahead == 0:
                    self.error = _trouble(walker, otherwise=NOTHING_LEFT)
                break
            found.append(words)
            if index < len(drafts) and not walker.try_consume_tokens([drafts[index]]):
                break
        return self._finished(found, ahead)

    def _finished(self, found: list[Words], ahead: int) -> list[bytes | None]:
        """What the request itself excludes is taken out, as far as something is left."""
        places: list[bytes | None] = []
        for index, words in enumerate(found):
            at = index + ahead
            if self._eos is not None:
                held = words & ~self._eos
                words = held if held.any() else words
            if self.count + at < self._min_tokens:
                words = words & ~self._ends
            if not words.any():
                if at == 0:
                    self.error = NOTHING_LEFT
                break
            places.append(words.tobytes())
        return places


def _trouble(matcher: LLMatcher, *, otherwise: str) -> str:
    """Why a matcher is in an error: it met a limit, or `otherwise`."""
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if matcher.stop_reason() == "NoExtensionBias" or "satisfy the grammar" in said:
        return otherwise
    return f"{TOO_COMPLEX} ({said[:200]})"


def _allows(place: bytes, token: int) -> bool:
    return bool(place[token // 8] >> token % 8 & 1)
