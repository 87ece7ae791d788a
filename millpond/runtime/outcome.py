"""What a step drew, read on the host: plain numbers become what the engine is told.

Knows the order of the parts of a report; holds nothing of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.plan.step import (
    Drafts,
    Emitted,
    Row,
    RowLogprobs,
    TokenLogprob,
    Verified,
)
from millpond.runtime.report import Numbers
from millpond.state.lease import Seat

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of a place: (id, log probability)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Of what a step draws, what the host knows beforehand."""

    known: tuple[Seat, ...]  # the seats of known rows that draw, D of them
    verify: tuple[Seat, ...]  # the seats of the verify rows, B of them
    width: int  # K + 1
    scored: tuple[int, ...] = ()  # the tokens whose log probabilities are asked for
    tops: tuple[int, ...] = ()  # how many of the likeliest each of them wants beside
    told: tuple[Seat, ...] = ()  # whose drafts are reported


@dataclass(frozen=True, slots=True)
class Scored:
    """A row whose own tokens are scored: `count` positions from packed token `first` on."""

    row: Row
    first: int
    count: int

    @property
    def successors(self) -> tuple[int, ...]:
        """The known tokens after those positions."""
        after = () if self.row.next_token is None else (self.row.next_token,)
        return (*self.row.tokens[1:], *after)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drawn. `bases` are those of the verify rows, in order; `drafts` as asked."""

    emitted: tuple[Emitted, ...]
    verified: tuple[Verified, ...]
    bases: tuple[int, ...]
    drafts: tuple[Drafts, ...] = ()


def outcome(asked: Asked, numbers: Numbers) -> Outcome:
    """Of what a step drew: tokens, whether their logits were finite, then of verify rows accepted
    drafts, drafts and bases; the three parts of scores where any are asked for; drafts to tell.

    More verify rows than were asked for may be there; they come last and are nobody's.
    """
    token, finite, accepted, num_drafts, bases = (part.tolist() for part in numbers[:5])
    drawn = list(zip(asked.known, range(len(asked.known)), strict=True))  # seats and places
    verified = []
    for index, seat in enumerate(asked.verify):
        if seat >= 0:
            count, first = accepted[index], len(asked.known) + index * asked.width
            drawn += [(seat, place) for place in range(first, first + count + 1)]
            verified.append(Verified(seat, num_drafts[index], count))
    if asked.scored:
        found = zip(asked.scored, asked.tops, scores_of(numbers[5:8]), strict=True)
        scores = {place: (logprob, top[:most]) for place, most, (logprob, top) in found}
        emitted = [
            Emitted(seat=seat, token=token[at], finite=finite[at], logprob=logprob, top=top)
            for seat, at in drawn
            for logprob, top in (scores.get(at, (None, ())),)
        ]
    else:  # the most common case by far: nothing is looked up
        emitted = [Emitted(seat=s, token=token[at], finite=finite[at]) for s, at in drawn]
    told = [tuple(drafts) for drafts in numbers[-1].tolist()] if asked.told else []
    return Outcome(
        emitted=tuple(emitted),
        verified=tuple(verified),
        bases=tuple(bases[: len(asked.verify)]),
        drafts=tuple(map(Drafts, asked.told, told)),
    )


def prompt_scores(scored: Sequence[Scored], numbers: Numbers) -> tuple[RowLogprobs, ...]:
    """What `Verifier.score_prompts` made, on the host: numbers are its tensors."""
    found = []
    for index, s in enumerate(scored):
        entries = [
            TokenLogprob(position=s.row.start + place + 1, token=token, logprob=logprob, top=top)
            for place, (token, (logprob, top)) in enumerate(
                zip(s.successors, scores_of(numbers[3 * index : 3 * index + 3]), strict=True)
            )
        ]
        found.append(RowLogprobs(request=s.row.request, entries=tuple(entries)))
    return tuple(found)


def scores_of(table: Numbers) -> list[tuple[float, Top]]:
    """Of a `Table` on the host, per token: its log probability, and the likeliest (id, value)."""
    return [
        (logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(*(part.tolist() for part in table), strict=True)
    ]
