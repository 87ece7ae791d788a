"""Folds a text up to a place, lets a test damage what is in memory there, and scores the rest.

Knows the arenas of a worker and the order of a hand-off; does not know which damages there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millpond.evaluate.cases import Dialect
from millpond.memory.arena import Arenas
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, SeatLoad, StepPlan, StepResult
from millpond.plan.step import TokenLogprob as Score
from millpond.runtime.worker import load
from millpond.state.lease import PageId, Seat, SlotId

SEAT, SLOT = Seat(0), SlotId(0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one sequence: its slot [bytes], its pages [n, bytes] and its seat [bytes]."""

    slot: torch.Tensor
    pages: torch.Tensor
    seat: torch.Tensor

    def clone(self) -> Memory:
        """A copy to be damaged."""
        return Memory(self.slot.clone(), self.pages.clone(), self.seat.clone())


class Bench:
    """A worker that runs one text at a time, in the first seat, slot and pages.

    With `num_drafts` its entries are laid out as those of an engine with so many.
    """

    def __init__(self, model: Path, *, num_pages: int = 32, num_drafts: int = 0) -> None:
        self.worker = load(
            model,
            dtype="float32",
            device="cpu",
            num_slots=1,
            num_pages=num_pages,
            num_seats=1,
            num_draft_tokens=num_drafts,
        )
        dialect = Dialect(model)
        self.ends = dialect.ends
        self.digits = tuple(dialect.tokenizer.token_id(str(digit)) for digit in range(10))
        self.steps = 0

    @property
    def arenas(self) -> Arenas:
        """The worker's memory."""
        return self.worker.runner.arenas

    def begin(self, tokens: Sequence[int]) -> None:
        """Seat a text; all its pages are given at once."""
        pages = tuple(PageId(i) for i in range(num_pages(len(tokens))))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        seated = SeatLoad(
            seat=SEAT,
            request="text",
            sample_index=0,
            params=params,
            tokens=tuple(tokens),
            prompt_len=len(tokens),
        )
        self._run(seat_loads=(seated,), page_updates=(PageUpdate(SEAT, 0, pages),))

    def fold(
        self, tokens: Sequence[int], start: int, *, top: int | None = None
    ) -> tuple[Score, ...]:
        """Fold `tokens` at `start`, in chunk form from 0 and per token elsewhere.

        With `top`, the log probability of every token but the first, beside the `top` likeliest.
        """
        row = Row(
            request="text",
            seat=SEAT,
            start=start,
            tokens=tuple(tokens),
            state_in=SLOT if start else None,
            state_out=SLOT,
            prompt_logprobs=top,
        )
        result = self._run(**{"decode" if start else "prefill": (row,)})
        return result.prompt_logprobs[0].entries if top is not None else ()

    def memory(self, num_tokens: int) -> Memory:
        """What is there now of a text of `num_tokens` tokens."""
        a, pages = self.arenas, num_pages(num_tokens)
        return Memory(a.slots.storage[SLOT], a.pages.storage[:pages], a.seats.storage[SEAT]).clone()

    def restore(self, memory: Memory) -> None:
        """Put it back."""
        a = self.arenas
        a.slots.storage[SLOT] = memory.slot
        a.pages.storage[: len(memory.pages)] = memory.pages
        a.seats.storage[SEAT] = memory.seat

    def _run(self, **parts: Any) -> StepResult:
        self.steps += 1
        return self.worker.execute(StepPlan(step=self.steps, **parts))


@dataclass(frozen=True, slots=True, eq=False)
class Handoff:
    """A text, how many of its tokens are folded, the memory then, and where its reply begins.

    The place of a hand-off is named by what has just been folded; see `tests.support.places`.
    """

    bench: Bench
    tokens: tuple[int, ...]
    cut: int
    reply: int
    memory: Memory

    @classmethod
    def at(cls, bench: Bench, tokens: Sequence[int], cut: int, reply: int) -> Handoff:
        """Fold the text up to `cut`."""
        assert 0 < cut <= reply <= len(tokens)
        bench.begin(tokens)
        bench.fold(tokens[:cut], 0)
        return cls(bench, tuple(tokens), cut, reply, bench.memory(len(tokens)))

    def earlier(self, count: int) -> Memory:
        """The memory `count` tokens before."""
        self.bench.begin(self.tokens)
        self.bench.fold(self.tokens[: self.cut - count], 0)
        return self.bench.memory(len(self.tokens))

    def ahead(self, junk: int) -> Memory:
        """The memory after one more token, which is not of the text."""
        room = (*self.tokens, junk)
        self.bench.begin(room)
        self.bench.restore(self.memory)
        self.bench.fold((junk,), self.cut)
        return self.bench.memory(len(self.tokens))

    def goes_on(self, memory: Memory) -> tuple[Score, ...]:
        """Scores of the reply's tokens when the rest of the text is folded on top of `memory`.

        The first token after the hand-off has none: it was drawn before.
        """
        self.bench.begin(self.tokens)
        self.bench.restore(memory)
        scored = self.bench.fold(self.tokens[self.cut :], self.cut, top=2)
        return tuple(s for s in scored if s.position >= self.reply)

    def is_right(self, memory: Memory) -> bool:
        """Whether every token of the reply is the likeliest one there, given those before it.

        The last one may be any that ends a turn.
        """
        *said, end = self.goes_on(memory)
        return end.top[0][0] in self.bench.ends and all(s.top[0][0] == s.token for s in said)


def num_pages(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)
