"""From logits to tokens: which logits a step needs, what it draws, which drafts that accepts.

Knows rows and seats; does not know requests, nor when one is finished. What was drawn stays on the
device until the step is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from millpond.ops.batch import ForwardBatch, Sampled, VerifyRows
from millpond.ops.bind import Bound
from millpond.ops.reference.sampling import count_accepted, counts_before
from millpond.plan.step import (
    Drafts,
    Emitted,
    Row,
    RowLogprobs,
    SeatLoad,
    SeatMask,
    StepPlan,
    TokenLogprob,
    Verified,
)
from millpond.runtime.seats import SeatSampling
from millpond.state.lease import Seat

SCORE_BLOCK = 256
"""Prompt positions whose logits are held at once: bounds memory at large vocabularies."""

Logits = Callable[[torch.Tensor], torch.Tensor]
Top = tuple[tuple[int, float], ...]
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of n tokens: their log probabilities [n], the likeliest ids [n, m] and values [n, m]."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to be drawn after a known row: by which seat, from which logits, where it stands."""

    seat: Seat
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A row whose own tokens are scored: `count` positions from packed token `first` on."""

    row: Row
    first: int
    count: int


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

    seats: tuple[int, ...]  # `rows.seats` on the host
    rows: VerifyRows
    tokens: torch.Tensor  # [B, K + 1] int64: the certain token, then drafts
    positions: torch.Tensor  # [B, K + 1] int64, of those tokens

    @classmethod
    def of(cls, plan: StepPlan, batch: ForwardBatch) -> Drafted | None:
        """None if the plan has no such rows."""
        if batch.verify is None:
            return None
        rows = batch.verify
        place = torch.arange(rows.width, device=rows.base.device)
        return cls(
            seats=tuple(row.seat for row in plan.verify),
            rows=rows,
            tokens=batch.token_ids[batch.first_verify_token :].view(-1, rows.width),
            positions=(rows.base + rows.pending)[:, None] + place,
        )

    @property
    def seats_by_place(self) -> tuple[int, ...]:
        """The seat of every place."""
        return tuple(seat for seat in self.seats for _ in range(self.rows.width))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the device: D tokens of known rows, then B * (K + 1) of verify rows."""

    known: tuple[int, ...]  # the seats of the D
    verify: tuple[int, ...]  # the seats of the B
    width: int  # K + 1
    token: torch.Tensor  # [D + B * (K + 1)] int64
    finite: torch.Tensor  # as many, bool
    emitted: torch.Tensor  # as many, bool: the known rows' tokens, accepted drafts, one more a row
    accepted: torch.Tensor  # [B] int64
    num_drafts: torch.Tensor  # [B] int64
    base: torch.Tensor  # [B] int64, the end of the rows' input slots
    scored: tuple[int, ...]  # the tokens whose log probabilities are asked for
    table: Table | None  # theirs
    told: tuple[Seat, ...] = ()  # whose drafts are reported
    drafts: torch.Tensor | None = None  # [told, K] int64, theirs

    def telling(self, seats: Sequence[Seat], drafts: torch.Tensor) -> Drawn:
        """With what was proposed to `seats`; `drafts` [n, K] are those of all that drew."""
        row = {seat: index for index, seat in enumerate(self.known + self.verify)}
        at = torch.tensor([row[seat] for seat in seats], device=drafts.device)
        return replace(self, told=tuple(seats), drafts=drafts.index_select(0, at))

    @property
    def last(self) -> torch.Tensor:
        """The newest token of every seat that drew: [D + B]."""
        count = len(self.known)
        places = self.token[count:].view(-1, self.width)
        of_verify = places.gather(1, self.accepted[:, None]).squeeze(1)
        return torch.cat((self.token[:count], of_verify))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`Drawn`, on the host. `bases` are those of the verify rows, in order; `drafts` as asked."""

    emitted: tuple[Emitted, ...]
    verified: tuple[Verified, ...]
    bases: tuple[int, ...]
    drafts: tuple[Drafts, ...] = ()


class Verifier:
    """Draws a step's tokens, accepts drafts, and counts for penalties what is emitted."""

    def __init__(self, seats: SeatSampling, ops: Bound) -> None:
        self.seats = seats
        self._ops = ops

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
            logits = logits.index_select(0, self.seats.tensor(shared))
        sent = self.seats.tensor([(d.seat, d.position) for d in draws]).reshape(-1, 2)
        seat, position = sent.unbind(1)
        seats = known if drafted is None else known + drafted.seats_by_place
        counting = self.seats.counting(seats)
        generated = self.seats.generated(seat) if counting else None
        if drafted is not None:
            if generated is not None:
                before = self.seats.generated(drafted.rows.seats)
                places = counts_before(before, drafted.tokens[:, 1:]).flatten(0, 1)
                generated = torch.cat((generated, places))
            seat = torch.cat((seat, drafted.rows.seats.repeat_interleave(drafted.rows.width)))
            position = torch.cat((position, drafted.positions.flatten() + 1))
        rows = self.seats.rows(seats, seat)
        if masks:
            width = 1 if drafted is None else drafted.rows.width
            at, words = self._masked(masks, known, () if drafted is None else drafted.seats, width)
            rows = replace(rows, allowed_row=at, allowed=words)
        sampled = self.seats.choose(logits, rows, position, generated)
        drawn = self._accept(known, sampled, drafted)
        if counting:
            self.seats.remember(seats, seat, drawn.token, drawn.emitted)
        asking = [i for i, s in enumerate(seats) if self.seats.params(s).logprobs is not None]
        if not asking:
            return drawn
        at = self.seats.tensor(asking)
        most = max(self.seats.params(seats[i]).logprobs or 0 for i in asking)
        table = self._ops.token_logprobs(logits[at], drawn.token[at], most)
        return replace(drawn, scored=tuple(asking), table=table)

    def report(self, drawn: Drawn) -> Outcome:
        """Copy to the host what a step drew: the one time that it waits for the device."""
        drafts = drawn.token[:0] if drawn.drafts is None else drawn.drafts.flatten()
        numbers = (
            drawn.token,
            drawn.finite.long(),
            drawn.accepted,
            drawn.num_drafts,
            drawn.base,
            drafts,
        )
        sizes = [len(part) for part in numbers]
        packed = iter(torch.cat(numbers).tolist())
        token, finite, accepted, num_drafts, bases, told = (list(islice(packed, n)) for n in sizes)
        extras: dict[int, tuple[float, Top]] = {}
        if drawn.table is not None:
            extras = dict(zip(drawn.scored, _on_host(drawn.table), strict=True))

        def emitted(seat: int, at: int) -> Emitted:
            logprob, top = extras.get(at, (None, ()))
            top = top[: self.seats.params(seat).logprobs or 0]
            return Emitted(
                seat=Seat(seat), token=token[at], finite=bool(finite[at]), logprob=logprob, top=top
            )

        tokens = [emitted(seat, at) for at, seat in enumerate(drawn.known)]
        verified = []
        for index, seat in enumerate(drawn.verify):
            if seat < 0:
                continue
            first = len(drawn.known) + index * drawn.width
            tokens += [emitted(seat, first + i) for i in range(accepted[index] + 1)]
            verified.append(Verified(Seat(seat), num_drafts[index], accepted[index]))
        each = len(told) // max(len(drawn.told), 1)
        waiting = tuple(
            Drafts(seat, tuple(told[each * index : each * (index + 1)]))
            for index, seat in enumerate(drawn.told)
        )
        return Outcome(tuple(tokens), tuple(verified), tuple(bases), waiting)

    def score_prompts(
        self, scored: Sequence[Scored], hidden: torch.Tensor, logits: Logits
    ) -> tuple[RowLogprobs, ...]:
        """Log probabilities of known tokens; `hidden` holds the scored positions, row after row."""
        found, at = [], 0
        for s in scored:
            after = () if s.row.next_token is None else (s.row.next_token,)
            known = (*s.row.tokens[1:], *after)
            entries: list[TokenLogprob] = []
            for begin in range(0, s.count, SCORE_BLOCK):
                end = min(begin + SCORE_BLOCK, s.count)
                tokens = self.seats.tensor(known[begin:end])
                table = self._ops.token_logprobs(
                    logits(hidden[at + begin : at + end]), tokens, s.row.prompt_logprobs or 0
                )
                entries += [
                    TokenLogprob(
                        position=s.row.start + begin + i + 1,
                        token=known[begin + i],
                        logprob=logprob,
                        top=top,
                    )
                    for i, (logprob, top) in enumerate(_on_host(table))
                ]
            found.append(RowLogprobs(request=s.row.request, entries=tuple(entries)))
            at += s.count
        return tuple(found)

    def _masked(
        self, masks: Sequence[SeatMask], known: Sequence[int], verify: Sequence[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of logits that masks bind, and their masks: [A] int64, [A, W] int32."""
        first = {seat: row for row, seat in enumerate(known)}
        first |= {seat: len(known) + index * width for index, seat in enumerate(verify)}
        bound = [
            (first[mask.seat] + place, allowed)
            for mask in masks
            for place, allowed in enumerate(mask.places)
            if allowed is not None
        ]
        packed = np.frombuffer(b"".join(allowed for _, allowed in bound), np.int32)
        words = torch.from_numpy(packed.reshape(len(bound), -1).copy())
        return self.seats.tensor([row for row, _ in bound]), words.to(self.seats.device)

    def _accept(self, known: tuple[int, ...], sampled: Sampled, drafted: Drafted | None) -> Drawn:
        token, finite = sampled.token, sampled.finite
        emitted = torch.ones_like(finite)
        none = token[:0]
        drawn = Drawn(known, (), 1, token, finite, emitted, none, none, none, (), None)
        if drafted is None:
            return drawn
        rows, width = drafted.rows, drafted.rows.width
        places = token[len(known) :].view(-1, width)
        sound = finite[len(known) :].view(-1, width).long().cumprod(1).sum(1)
        accepted = count_accepted(
            places, drafted.tokens[:, 1:], torch.minimum(rows.num_drafts, sound)
        )
        place = torch.arange(width, device=token.device)
        run = place <= accepted[:, None]
        return replace(
            drawn,
            verify=drafted.seats,
            width=width,
            emitted=torch.cat((emitted[: len(known)], run.flatten())),
            accepted=accepted,
            num_drafts=rows.num_drafts,
            base=rows.base,
        )


def _on_host(table: Table) -> list[tuple[float, Top]]:
    """Per token: its log probability, and the likeliest (id, value)."""
    return [
        (logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(*(part.tolist() for part in table), strict=True)
    ]
