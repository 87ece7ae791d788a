"""Who asks for what, and when: prompts of token ids, all at once, at given times, or in turns.

Knows no engine. All prompts are drawn from a seed before any clock starts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `out` tokens are generated, whatever they are; `at` seconds after it is known.

    `label` groups requests in results. `key` is for whoever asked.
    """

    tokens: Tokens
    out: int
    n: int = 1
    at: float = 0.0
    label: str = ""
    key: int = 0


class Traffic(Protocol):
    """Requests, some of which follow from the answers to others."""

    def first(self) -> list[Ask]:
        """Those that are there from the beginning."""

    def after(self, ask: Ask, answer: Tokens) -> list[Ask]:
        """What comes once `ask` was answered (by its first sample)."""


class Draw:
    """Token ids nobody asked for before, reproducible."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._random = random.Random(seed)
        self._vocab = range(vocab)

    def tokens(self, count: int) -> Tokens:
        """`count` ids, each as likely as any other."""
        return tuple(self._random.choices(self._vocab, k=count))


class Given:
    """A list of requests, whatever is answered."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks = list(asks)

    def first(self) -> list[Ask]:
        """All of them."""
        return self.asks

    def after(self, ask: Ask, answer: Tokens) -> list[Ask]:
        """Nothing."""
        del ask, answer
        return []


def at_once(
    draw: Draw, count: int, prompt: int, out: int, *, shared: int = 0, every: float = 0.0
) -> Given:
    """`count` prompts of `prompt` tokens, the first `shared` of which are the same in all.

    `every` seconds one arrives; 0: all at once.
    """
    common = draw.tokens(shared)
    return Given(
        [Ask(common + draw.tokens(prompt - shared), out, at=i * every) for i in range(count)]
    )


COLD_EVERY = 4
"""Of `some_cold`: one of so many prompts shares nothing."""


def some_cold(draw: Draw, count: int, prompt: int, out: int, *, shared: int) -> Given:
    """As `at_once`, but every `COLD_EVERY`-th prompt shares nothing. Labels: `cold` and `shared`.

    A cold prompt among others that hit shows what caching costs those that gain nothing by it.
    """
    common, asks = draw.tokens(shared), []
    for i in range(count):
        cold = i % COLD_EVERY == COLD_EVERY - 1
        first = draw.tokens(shared) if cold else common
        label = "cold" if cold else "shared"
        asks.append(Ask(first + draw.tokens(prompt - shared), out, label=label))
    return Given(asks)


class Conversations:
    """Every turn adds the answer before and `more` tokens; all begin a turn together."""

    def __init__(self, draw: Draw, count: int, turns: int, more: int, out: int) -> None:
        self._said = [[draw.tokens(more) for _ in range(turns)] for _ in range(count)]
        self._out = out
        self._so_far: list[Tokens] = [() for _ in range(count)]
        self._turn = 0
        self._open = 0

    def first(self) -> list[Ask]:
        """The first turn."""
        return self._next()

    def after(self, ask: Ask, answer: Tokens) -> list[Ask]:
        """The next turn of all, when this answer was the last of the turn."""
        self._so_far[ask.key] = ask.tokens + answer
        self._open -= 1
        if self._open or self._turn == len(self._said[0]):
            return []
        return self._next()

    def _next(self) -> list[Ask]:
        turn, self._turn = self._turn, self._turn + 1
        self._open = len(self._said)
        return [
            Ask(self._so_far[key] + said[turn], self._out, label=f"turn {turn + 1}", key=key)
            for key, said in enumerate(self._said)
        ]
