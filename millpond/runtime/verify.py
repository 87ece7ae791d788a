"""From logits to tokens: which logits a step needs, what it draws, which drafts that accepts.

Knows rows and seats; does not know requests, nor when one is finished. What was drawn stays on the
device until the step is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from millpond.ops.batch import ForwardBatch, Sampled, Settled, VerifyRows
from millpond.ops.bind import Bound
from millpond.ops.reference.sampling import counts_before
from millpond.plan.step import SeatLoad, SeatMask, StepPlan
from millpond.runtime.outcome import Asked, Scored
from millpond.runtime.seats import SeatSampling
from millpond.state.lease import Seat

SCORE_BLOCK = 256
"""Prompt positions whose logits are held at once: bounds memory at large vocabularies."""

Logits = Callable[[torch.Tensor], torch.Tensor]
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of n tokens: their log probabilities [n], the likeliest ids [n, m] and values [n, m]."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to be drawn after a known row: by which seat, from which logits, where it stands."""

    seat: Seat
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logits a plan needs, as packed tokens.

    `at` holds the tokens that `draws` are from, then every place of the verify rows, `num_drawn`
    together, then those that are scored.
    """

    at: tuple[int, ...]
    num_drawn: int
    draws: tuple[Draw, ...]
    scored: tuple[Scored, ...]


def wanted(plan: StepPlan, width: int) -> Wanted:
    """Nothing else of a forward ever becomes logits. `width`: places of a verify row."""
    drawn: list[int] = []
    draws: list[Draw] = []
    scored: list[Scored] = []
    first = 0
    for row in plan.prefill + plan.decode:
        length = len(row.tokens)
        if row.emit_seats:
            draws += [Draw(seat, len(drawn), row.end) for seat in row.emit_seats]
            drawn.append(first + length - 1)
        if row.prompt_logprobs is not None:
            scored.append(Scored(row, first, length - (row.next_token is None)))
        first += length
    drawn += range(first, first + width * len(plan.verify))
    at = (*drawn, *(s.first + i for s in scored for i in range(s.count)))
    return Wanted(at, len(drawn), tuple(draws), tuple(scored))


@dataclass(frozen=True, slots=True)
class Drafted:
    """The verify rows of a forward, as they were staged."""

    seats: tuple[Seat, ...]  # `rows.seats` on the host
    rows: VerifyRows
    tokens: torch.Tensor  # [B, K + 1] int64: the certain token, then drafts

    @classmethod
    def of(cls, plan: StepPlan, batch: ForwardBatch) -> Drafted | None:
        """None if the plan has no such rows."""
        if batch.verify is None:
            return None
        tokens = batch.token_ids[batch.first_verify_token :].view(-1, batch.verify.width)
        return cls(tuple(row.seat for row in plan.verify), batch.verify, tokens)

    @property
    def seats_by_place(self) -> tuple[Seat, ...]:
        """The seat of every place."""
        return tuple(seat for seat in self.seats for _ in range(self.rows.width))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the device: D tokens of known rows, then B * (K + 1) of verify rows."""

    asked: Asked
    token: torch.Tensor  # [D + B * (K + 1)] int64
    finite: torch.Tensor  # as many, bool
    emitted: torch.Tensor  # as many, bool: the known rows' tokens, accepted drafts, one more a row
    settled: Settled | None  # what the verify rows have come to
    num_drafts: torch.Tensor  # [B] int64
    base: torch.Tensor  # [B] int64, the end of the rows' input slots
    table: Table | None = None  # of the scored tokens
    drafts: torch.Tensor | None = None  # [told, K] int64

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What the host is to be told, in the order in which `outcome` reads it."""
        accepted = self.base if self.settled is None else self.settled.accepted
        drawn = (self.token, self.finite, accepted, self.num_drafts, self.base)
        drafts = () if self.drafts is None else (self.drafts,)
        return (*drawn, *(self.table or ()), *drafts)


def drawn_positions(rows: VerifyRows) -> torch.Tensor:
    """Where the token stands that each place draws: [B, K + 1]."""
    place = torch.arange(1, rows.width + 1, device=rows.base.device)
    return (rows.base + rows.pending)[:, None] + place


class Verifier:
    """Draws a step's tokens, accepts drafts, and counts for penalties what is emitted."""

    def __init__(self, seats: SeatSampling, ops: Bound) -> None:
        self.seats = seats
        self.ops = ops

    def load(self, loads: Sequence[SeatLoad]) -> None:
        """Install the sampling data of requests that take a seat."""
        self.seats.load(loads)

    def draw(
        self,
        draws: Sequence[Draw],
        logits: torch.Tensor,
        drafted: Drafted | None,
        masks: Sequence[SeatMask] = (),
    ) -> Drawn:
        """Draw a token for each of `draws`, and one at every place of the verify rows.

        logits [L + B * (K + 1), V] fp32: L known rows, then the places. A draft is accepted if it
        and all before it are what was drawn in their places; where logits are not finite the run
        ends, with that token as its last. `masks` say what some seats may draw at each place.
        """
        known = tuple(d.seat for d in draws)
        count = drafted.tokens.numel() if drafted is not None else 0
        if len(draws) + count > logits.shape[0]:  # a fan-out: several seats draw from one row
            shared = (*(d.row for d in draws), *range(logits.shape[0] - count, logits.shape[0]))
            logits = logits.index_select(0, self.seats.ring.integers(shared))
        seat, position = self.seats.ring.integers(
            ([d.seat for d in draws], [d.position for d in draws])
        ).unbind()
        seats = known if drafted is None else known + drafted.seats_by_place
        counting = self.seats.counting(seats)
        generated = self.seats.generated(seat) if counting else None
        if drafted is not None:
            if generated is not None:
                before = self.seats.generated(drafted.rows.seats)
                places = counts_before(before, drafted.tokens[:, 1:]).flatten(0, 1)
                generated = torch.cat((generated, places))
            seat = torch.cat((seat, drafted.rows.seats.repeat_interleave(drafted.rows.width)))
            position = torch.cat((position, drawn_positions(drafted.rows).flatten()))
        rows = self.seats.rows(seats, seat)
        if masks:
            width = 1 if drafted is None else drafted.rows.width
            verify = () if drafted is None else drafted.seats
            at, words, most = self._masked(masks, known, verify, width)
            if len(at):
                rows = replace(rows, allowed_row=at, allowed=words)
            if drafted is not None:
                fewer = torch.minimum(drafted.rows.num_drafts, most)
                drafted = replace(drafted, rows=replace(drafted.rows, num_drafts=fewer))
        sampled = self.seats.choose(logits, rows, position, generated)
        drawn = self._accept(known, sampled, drafted)
        if counting:
            self.seats.remember(seats, seat, drawn.token, drawn.emitted)
        asking = [i for i, s in enumerate(seats) if self.seats.params(s).logprobs is not None]
        if not asking:
            return drawn
        at = self.seats.ring.integers(asking)
        tops = tuple(self.seats.params(seats[i]).logprobs or 0 for i in asking)
        table = self.ops.token_logprobs(logits[at], drawn.token[at], max(tops))
        asked = replace(drawn.asked, scored=tuple(asking), tops=tops)
        return replace(drawn, asked=asked, table=table)

    def telling(self, drawn: Drawn, told: Sequence[Seat], drafts: torch.Tensor) -> Drawn:
        """With what was proposed to the seats `told`; drafts [n, K] are those of all that drew."""
        row = {seat: at for at, seat in enumerate(drawn.asked.known + drawn.asked.verify)}
        at = self.seats.ring.integers([row[seat] for seat in told])
        asked = replace(drawn.asked, told=tuple(told))
        return replace(drawn, asked=asked, drafts=drafts.index_select(0, at))

    def score_prompts(
        self, scored: Sequence[Scored], hidden: torch.Tensor, logits: Logits
    ) -> tuple[torch.Tensor, ...]:
        """Log probabilities of known tokens; `hidden` holds the scored positions, row after row.

        -> three tensors a row, on the device: its `Table`. `prompt_scores` reads them.
        """
        known = self.seats.ring.integers([token for s in scored for token in s.successors])
        found, at = [], 0
        for s in scored:
            most = s.row.prompt_logprobs or 0
            ends = range(at, at + s.count, SCORE_BLOCK)
            blocks = [slice(b, min(b + SCORE_BLOCK, at + s.count)) for b in ends]
            tables = [
                self.ops.token_logprobs(logits(hidden[block]), known[block], most)
                for block in blocks
            ]
            found += [torch.cat(parts) for parts in zip(*tables, strict=True)]
            if not tables:
                found += [known[:0]] * 3
            at += s.count
        return tuple(found)

    def _masked(
        self, masks: Sequence[SeatMask], known: Sequence[int], verify: Sequence[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of logits with masks [A] int64, these masks [A, W] int32, and drafts [B] int64.

        The last are the most drafts that the masks of each verify row allow for.
        """
        first = {seat: row for row, seat in enumerate(known)}
        first |= {seat: len(known) + index * width for index, seat in enumerate(verify)}
        bound = [
            (first[mask.seat] + place, allowed)
            for mask in masks
            for place, allowed in enumerate(mask.places)
            if allowed is not None
        ]
        packed = np.frombuffer(b"".join(allowed for _, allowed in bound), np.int32)
        told: dict[int, int] = {mask.seat: len(mask.places) - 1 for mask in masks}
        rows, words, most = self.seats.ring.send(
            (
                np.array([row for row, _ in bound], np.int64),
                packed.reshape(len(bound), -1 if bound else 1),
                np.array([told.get(seat, width) for seat in verify], np.int64),
            )
        )
        return rows, words, most

    def _accept(self, known: tuple[Seat, ...], sampled: Sampled, drafted: Drafted | None) -> Drawn:
        token, finite = sampled.token, sampled.finite
        emitted = torch.ones_like(finite)
        none = token[:0]
        if drafted is None:
            return Drawn(Asked(known, (), 1), token, finite, emitted, None, none, none)
        rows, count = drafted.rows, len(known)
        places = Sampled(token[count:], finite[count:])
        settled = self.ops.settle(places, drafted.tokens, rows)
        run = torch.arange(rows.width, device=token.device) <= settled.accepted[:, None]
        return Drawn(
            Asked(known, drafted.seats, rows.width),
            token,
            finite,
            torch.cat((emitted[:count], run.flatten())),
            settled,
            rows.num_drafts,
            rows.base,
        )
